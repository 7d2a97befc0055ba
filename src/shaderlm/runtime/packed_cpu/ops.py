"""What each op of a graph is in ONNX. Every tensor is [rows, values]; a graph of one row says how many values.

`TRANSLATIONS` has one function for each op that can be translated. The others run in NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...graph.graph import Graph, Node, Tensor
from ...graph.reference import SWIGLU_FACTOR, SWIGLU_LIMIT
from .onnx_model import MICROSOFT, node
from .products import INT8_INPUTS, ProductShape, product_shape

POSITIONS = "position_ids"  # an input that numbers the rows, for rope


@dataclass(frozen=True)
class Product:
    """A product whose weights are stacked, by the names of its arrays in the model."""

    name: str
    weights: tuple[Tensor, ...]
    shape: ProductShape | None  # None: dense


@dataclass
class Translation:
    """Collects the nodes of a stretch, what they are made of, and which tables they read."""

    graph: Graph
    precision: str
    nodes: list[bytes] = field(default_factory=list)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)  # weights that are read as they are, in f32
    products: list[Product] = field(default_factory=list)
    tables: dict[str, int] = field(default_factory=dict)  # of rope: half of the rotary values
    _of_blocks: dict[tuple[str, str, int], str] = field(default_factory=dict)  # what products of one x share

    def add(self, op: str, inputs: Sequence[str], *outputs: str, domain: str = "", **attributes: Any) -> str:
        """Append a node; its first output."""
        outputs = outputs or (f"{op}.{len(self.nodes)}",)
        self.nodes.append(node(op, inputs, outputs, domain, **attributes))
        return outputs[0]

    def constant(self, *values: float) -> str:
        """A vector of numbers: whole ones are int64, as shapes are, others f32."""
        whole = all(isinstance(each, int) for each in values)
        array = np.array(values, np.int64 if whole else np.float32)
        name = f"constant.{array.dtype}.{'_'.join(map(str, values))}"
        self.constants[name] = array
        return name

    def reshape(self, x: str, *shape: int, out: str = "") -> str:
        """0 keeps a dimension, −1 takes what remains."""
        return self.add("Reshape", [x, self.constant(*shape)], *([out] if out else []))

    def vector(self, name: str) -> str:
        """A weight in f32."""
        self.vectors[name] = self.graph.tensors[name]
        return name

    def width(self, name: str) -> int:
        """Values of a row."""
        return self.graph.tensors[name].size

    def _sums(self, x: str, k: int, group: int) -> str:
        """Of every group of a row."""
        key = ("sums", x, group)
        if key not in self._of_blocks:
            grouped = self.reshape(x, 0, k // group, group)
            self._of_blocks[key] = self.add("ReduceSum", [grouped, self.constant(2)], keepdims=0)
        return self._of_blocks[key]

    def _two_terms(self, x: str, k: int, group: int) -> str:
        """[rows, K] → [2 · rows, K]: what rounding to 8 bits leaves of x, and then the rest, which is rounded too."""
        key = ("terms", x, group)
        if key not in self._of_blocks:
            grouped = self.reshape(x, 0, k // group, group)
            largest = self.add("ReduceMax", [self.add("Abs", [grouped]), self.constant(2)], keepdims=1)
            unit = self.add("Max", [self.add("Mul", [largest, self.constant(1 / 127)]), self.constant(1e-30)])
            whole = self.add("Mul", [self.add("Round", [self.add("Div", [grouped, unit])]), unit])
            first = self.reshape(whole, 0, k)
            self._of_blocks[key] = self.add("Concat", [first, self.add("Sub", [x, first])], axis=0)
        return self._of_blocks[key]

    def linear(self, nodes: Sequence[Node]) -> None:
        """Products of one x with weights of one kind, as one product."""
        first = nodes[0]
        x, k, outs = first.inputs["x"], int(first.dims["K"]), [each.out for each in nodes]
        weights = tuple(self.graph.tensors[each.inputs["weight"]] for each in nodes)
        shape = product_shape(first.dims["format"], k, self.precision)
        product = Product(f"{outs[0]}.product", weights, shape)
        self.products.append(product)
        total = sum(int(each.dims["N"]) for each in nodes)
        whole = outs[0] if len(nodes) == 1 else f"{outs[0]}.all"
        bias = self.vector(first.inputs["bias"]) if first.dims["bias"] else ""
        if shape is None:
            self.add("Gemm", [x, f"{product.name}.dense", *([bias] if bias else [])], whole, transB=1)
        else:
            self._packed(product.name, shape, x, bias, whole, total, k)
        if len(nodes) > 1:
            sizes = self.constant(*(int(each.dims["N"]) for each in nodes))
            self.add("Split", [whole, sizes], *outs, axis=1)

    def _packed(self, name: str, shape: ProductShape, x: str, bias: str, out: str, n: int, k: int) -> None:
        sizes = {"K": k * shape.repeats, "N": n, "bits": shape.bits, "block_size": shape.group}
        arrays, how = [f"{name}.numbers", f"{name}.scales"], {**sizes, "accuracy_level": shape.level}
        product = f"{out}.unshifted" if shape.offsets else out
        if shape.level == INT8_INPUTS:
            rows = self.add("MatMulNBits", [self._two_terms(x, k, shape.group), *arrays], domain=MICROSOFT, **how)
            terms = self.reshape(rows, 2, -1, n)
            summed = self.add("ReduceSum", [terms, self.constant(0)], *([] if bias else [product]), keepdims=0)
            if bias:
                self.add("Add", [summed, bias], product)
        else:
            read = x if shape.repeats == 1 else self.add("Concat", [x, x], axis=1)
            inputs = [read, *arrays, *(["", "", bias] if bias else [])]
            self.add("MatMulNBits", inputs, product, domain=MICROSOFT, **how)
        if shape.offsets:
            self.add("Gemm", [self._sums(x, k, shape.group), f"{name}.offsets", product], out, transB=1)


def _x(t: Translation, n: Node) -> str:
    return n.inputs["x"]


def _rms_norm(t: Translation, n: Node) -> None:
    name = f"ones.{n.dims['width']}"
    t.constants[name] = np.ones(n.dims["width"], np.float32)
    _norm(t, n, n.out, "SimplifiedLayerNormalization", [name])


def rms_norm_mul(t: Translation, n: Node, times: Node) -> None:
    """The two as one: the op of ONNX has a weight."""
    _norm(t, n, times.out, "SimplifiedLayerNormalization", [t.vector(times.inputs["b"])])


def _layer_norm(t: Translation, n: Node) -> None:
    weights = [t.vector(n.inputs[key]) for key in ("weight", "bias") if key in n.inputs]
    _norm(t, n, n.out, "LayerNormalization", weights)


def _norm(t: Translation, n: Node, out: str, op: str, weights: list[str]) -> None:
    heads, width, eps = n.dims["heads"], n.dims["width"], float(n.dims["eps"])
    if heads == 1:
        t.add(op, [_x(t, n), *weights], out, axis=-1, epsilon=eps)
        return
    y = t.add(op, [t.reshape(_x(t, n), 0, heads, width), *weights], axis=-1, epsilon=eps)
    t.reshape(y, 0, heads * width, out=out)


def _rope(t: Translation, n: Node) -> None:
    heads, width, rotary, table = n.dims["H"], n.dims["D"], n.dims["rotary"], n.inputs["table"]
    t.tables[table] = rotary // 2
    x = t.reshape(_x(t, n), 1, -1, heads * width)
    how = {"num_heads": heads, "rotary_embedding_dim": 0 if rotary == width else rotary}
    inputs = [x, POSITIONS, *(f"{table}.{part}" for part in ("cos", "sin"))]
    y = t.add("RotaryEmbedding", inputs, domain=MICROSOFT, interleaved=int(n.dims["interleaved"]), **how)
    t.reshape(y, -1, heads * width, out=n.out)


def _pairwise(op: str) -> Callable[[Translation, Node], None]:
    def translate(t: Translation, n: Node) -> None:
        a, b, period, width = n.inputs["a"], n.inputs["b"], n.dims["period"], n.dims["count"]
        if t.graph.tensors[b].role == "weight":
            b = t.vector(b)
        if period == width:
            t.add(op, [a, b], n.out)
        else:
            y = t.add(op, [t.reshape(a, 0, width // period, period), b])
            t.reshape(y, 0, width, out=n.out)

    return translate


def _silu_mul(t: Translation, n: Node) -> None:
    t.add("Mul", [t.add("QuickGelu", [n.inputs["a"]], domain=MICROSOFT, alpha=1.0), n.inputs["b"]], n.out)


def _gelu_mul(t: Translation, n: Node) -> None:
    t.add("Mul", [t.add("Gelu", [n.inputs["a"]], approximate="tanh"), n.inputs["b"]], n.out)


def _swiglu_clamped(t: Translation, n: Node) -> None:
    limit = float(SWIGLU_LIMIT)
    gate = t.add("Min", [n.inputs["a"], t.constant(limit)])
    up = t.add("Max", [t.add("Min", [n.inputs["b"], t.constant(limit)]), t.constant(-limit)])
    gated = t.add("QuickGelu", [gate], domain=MICROSOFT, alpha=float(SWIGLU_FACTOR))
    t.add("Mul", [gated, t.add("Add", [up, t.constant(1.0)])], n.out)


def _gelu(approximate: str) -> Callable[[Translation, Node], None]:
    def translate(t: Translation, n: Node) -> None:
        t.add("Gelu", [_x(t, n)], n.out, approximate=approximate)

    return translate


def _relu_squared(t: Translation, n: Node) -> None:
    y = t.add("Relu", [_x(t, n)])
    t.add("Mul", [y, y], n.out)


def _scale(t: Translation, n: Node) -> None:
    t.add("Mul", [_x(t, n), t.constant(float(n.dims["factor"]))], n.out)


def _softcap(t: Translation, n: Node) -> None:
    cap = t.constant(float(n.dims["cap"]))
    t.add("Mul", [t.add("Tanh", [t.add("Div", [_x(t, n), cap])]), cap], n.out)


def _slice(t: Translation, n: Node) -> None:
    first, step, count = n.dims["first"], n.dims["step"], n.dims["count"]
    bounds = (first, first + step * (count - 1) + 1, 1, step)
    t.add("Slice", [_x(t, n), *(t.constant(each) for each in bounds)], n.out)


def _add_gated(t: Translation, n: Node) -> None:
    gate = t.reshape(t.vector(n.inputs["gate"]), -1, 1)
    share = t.add("Sigmoid", [t.add("MatMul", [n.inputs["x"], gate])])
    t.add("Add", [n.inputs["a"], t.add("Mul", [share, n.inputs["b"]])], n.out)


def _linear(t: Translation, n: Node) -> None:
    t.linear([n])


TRANSLATIONS: Mapping[str, Callable[[Translation, Node], None]] = {
    "linear": _linear,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "add": _pairwise("Add"),
    "mul": _pairwise("Mul"),
    "silu_mul": _silu_mul,
    "gelu_mul": _gelu_mul,
    "swiglu_clamped": _swiglu_clamped,
    "gelu": _gelu("tanh"),
    "gelu_erf": _gelu("none"),
    "relu_squared": _relu_squared,
    "scale": _scale,
    "softcap": _softcap,
    "slice": _slice,
    "add_gated": _add_gated,
}


def translatable(n: Node, graph: Graph) -> bool:
    """Can the node be one of ONNX?"""
    if n.op not in TRANSLATIONS:
        return False
    if n.op in ("add", "mul"):  # values that repeat are weights
        return bool(n.dims["period"] == n.dims["count"]) or graph.tensors[n.inputs["b"]].role == "weight"
    if n.op == "rope":
        return bool(math.prod(graph.tensors[n.inputs["x"]].shape) == n.dims["H"] * n.dims["D"])
    return True
