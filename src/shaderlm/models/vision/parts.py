"""Parts of which the graphs of towers are made: products, norms, sums; and the tensors that they want of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...graph.graph import Builder, TensorSlice
from .sizes import Sizes, whole_blocks


class Parts:
    """A graph that is being made, for so many patches, among them the row of the class."""

    def __init__(self, sizes: Sizes, patches: int) -> None:
        self.sizes, self.patches, self.b = sizes, patches, Builder()
        self.wanted: dict[str, tuple[int, ...]] = {}  # tensors that there must be
        self.padded: dict[str, tuple[int, ...]] = {}  # their shapes as the graph reads them

    def stored(self, name: str, shape: tuple[int, ...], padded: tuple[int, ...] | None = None) -> str:
        """A tensor of the file, and its shape here where that is another."""
        self.wanted[name], self.padded[name] = shape, padded or shape
        return self.b.tensor(name, *self.padded[name], role="weight", format=self._format(name, shape))

    def _format(self, name: str, shape: tuple[int, ...]) -> str:
        return self.sizes.formats.get(name, "f32") if len(shape) > 1 else "f32"

    def _wide(self, x: str, rows: int, k: int) -> str:
        """Rows of whole blocks."""
        wide, out = whole_blocks(k), f"{x}.wide"
        if wide == k or self.b.tensors[x].shape[-1] == wide:
            return x
        if out not in self.b.tensors:
            self.b.tensor(out, rows, wide)
            self.b.add("pad_columns", {"tokens": rows, "width": k, "to": wide}, {"x": x}, layer_of(x), out=out)
        return out

    def linear(self, name: str, x: str, k: int, n: int, out: str = "", *, bias: bool = True, wide: bool = False) -> str:
        """[rows, n], as many rows as x has values for; `wide`: with zeros up to whole blocks."""
        tensor = self.b.tensors[x]
        rows = tensor.size // (tensor.shape[-1] if tensor.shape[-1] == whole_blocks(k) else k)
        padded = whole_blocks(n) if wide else n
        weight = self.stored(f"{name}.weight", (n, k), (padded, whole_blocks(k)))
        offset = self.stored(f"{name}.bias", (n,), (padded,)) if bias else None
        x, out = self._wide(x, rows, k), self.b.tensor(out or name, rows, padded)
        dims: dict[str, Any] = {"tokens": rows, "K": whole_blocks(k), "N": padded, "bias": bias}
        dims["format"] = self.b.tensors[weight].format
        self.b.add("linear", dims, {"x": x, "weight": weight, "bias": offset}, layer_of(name), out=out)
        return out

    def part(self, name: str, index: int, x: str) -> str:
        """Queries, keys or values: a third of the rows of a matrix, or one of its own."""
        sizes, n = self.sizes, self.patches
        packed, own = f"{name}.attn_qkv", f"{name}.attn_{'qkv'[index]}"
        width, wide = sizes.hidden, whole_blocks(sizes.hidden)
        if f"{packed}.weight" not in sizes.shapes:
            return self.linear(own, x, width, width, bias=sizes.family.bias)
        shapes = {f"{packed}.weight": (3 * width, width), f"{packed}.bias": (3 * width,)}
        self.wanted |= shapes
        self.padded |= {**shapes, f"{packed}.weight": (3 * width, wide)}
        kind = self._format(f"{packed}.weight", (3 * width, width))
        weight, bias = (TensorSlice(f"{packed}.{suffix}", width, index * width) for suffix in ("weight", "bias"))
        self.b.view(f"{own}.weight", width, wide, of=[weight], format=kind)
        self.b.view(f"{own}.bias", width, of=[bias], format="f32")
        x, out = self._wide(x, n, width), self.b.tensor(own, n, width)
        dims = {"tokens": n, "K": wide, "N": width, "format": kind, "bias": True}
        self.b.add("linear", dims, {"x": x, "weight": f"{own}.weight", "bias": f"{own}.bias"}, name, out=out)
        return out

    def norm(self, name: str, x: str, rows: int, width: int) -> str:
        """The family's."""
        return (self.rms_norm if self.sizes.family.norm == "rms" else self.layer_norm)(name, x, rows, width)

    def layer_norm(self, name: str, x: str, rows: int, width: int) -> str:
        """Mean 0 and variance 1, then weight and bias."""
        out = self.b.tensor(name, rows, width)
        weight, bias = self.stored(f"{name}.weight", (width,)), self.stored(f"{name}.bias", (width,))
        dims = {"tokens": rows, "width": width, "eps": self.sizes.eps, "bias": True}
        self.b.add("layer_norm", dims, {"x": x, "weight": weight, "bias": bias}, layer_of(name), out=out)
        return out

    def rms_norm(self, name: str, x: str, rows: int, width: int, eps: float = 0.0) -> str:
        """A root of the mean square of 1, then weight."""
        plain, out = self.b.tensor(f"{name}.plain", rows, width), self.b.tensor(name, rows, width)
        dims = {"tokens": rows, "width": width, "eps": eps or self.sizes.eps}
        self.b.add("rms_norm", dims, {"x": x}, layer_of(name), out=plain)
        weight = self.stored(f"{name}.weight", (width,))
        counts = {"count": rows * width, "period": width}
        self.b.add("mul", counts, {"a": plain, "b": weight}, layer_of(name), out=out)
        return out

    def plain_norm(self, x: str, heads: int, width: int, eps: float = 0.0) -> str:
        """A root of the mean square of 1, of every head."""
        tensor, out = self.b.tensors[x], f"{x}.plain"
        rows = tensor.size // (heads * width)
        self.b.tensor(out, *tensor.shape)
        dims = {"tokens": rows, "heads": heads, "width": width, "eps": eps or self.sizes.eps}
        self.b.add("rms_norm", dims, {"x": x}, layer_of(x), out=out)
        return out

    def head_norm(self, name: str, x: str) -> str:
        """`plain_norm`, then one weight for all heads."""
        sizes, plain = self.sizes, self.plain_norm(x, self.sizes.heads, self.sizes.head)
        out, weight = self.b.tensor(name, self.patches, sizes.hidden), self.stored(f"{name}.weight", (sizes.head,))
        counts = {"count": self.patches * sizes.hidden, "period": sizes.head}
        self.b.add("mul", counts, {"a": plain, "b": weight}, layer_of(name), out=out)
        return out

    def clamped(self, name: str, x: str, k: int, n: int, *, wide: bool = False) -> str:
        """A product without bias. What it reads and what it gives may have bounds."""
        if f"{name}.input_min" not in self.sizes.shapes:
            return self.linear(name, x, k, n, bias=False, wide=wide)
        y = self.linear(name, self._clamp(f"{name}.input", x), k, n, f"{name}.product", bias=False, wide=wide)
        return self._clamp(f"{name}.output", y)

    def _clamp(self, name: str, x: str) -> str:
        tensor, out = self.b.tensors[x], f"{name}.clamped"
        self.b.tensor(out, *tensor.shape)
        low, high = (self.stored(f"{name}_{each}", (1,)) for each in ("min", "max"))
        self.b.add("clamp", {"count": tensor.size}, {"x": x, "low": low, "high": high}, layer_of(name), out=out)
        return out

    def sum(self, out: str, a: str, b: str) -> str:
        """Of two tensors [patches, hidden]."""
        self.b.tensor(out, self.patches, self.sizes.hidden)
        self.b.add("add", {"count": self.patches * self.sizes.hidden}, {"a": a, "b": b}, layer_of(out), out=out)
        return out

    def activated(self, op: str, x: str) -> str:
        """An op on every value."""
        tensor = self.b.tensors[x]
        out = self.b.tensor(f"{x}.{op}", *tensor.shape)
        self.b.add(op, {"count": tensor.size}, {"x": x}, layer_of(x), out=out)
        return out

    def picked(self, x: str, out: str, name: str, count: int) -> str:
        """So many rows of a tensor, which the input of this name has in order."""
        rows, width = self.b.tensors[x].shape
        inputs = {
            "weight": x,
            "rows": self.b.tensor(name, count, 1, role="input", format="u32"),
            "factors": self.b.tensor(f"{name}_factors", count, 1, role="input"),
        }
        self.b.tensor(out, count, width)
        self.b.add("weighted_rows", {"tokens": count, "N": rows, "K": width, "taps": 1}, inputs, layer_of(x), out=out)
        return out

    def quick_gelu(self, x: str) -> str:
        """x / (1 + exp(−1.702 x))."""
        tensor = self.b.tensors[x]
        scaled = self.b.tensor(f"{x}.scaled", *tensor.shape)
        self.b.add("scale", {"count": tensor.size, "factor": 1.702}, {"x": x}, layer_of(x), out=scaled)
        return self.pairwise("sigmoid_mul", scaled, x)

    def pairwise(self, op: str, a: str, b: str) -> str:
        """An op on the values of two tensors of one shape."""
        tensor = self.b.tensors[a]
        out = self.b.tensor(f"{a}.{op}", *tensor.shape)
        self.b.add(op, {"count": tensor.size}, {"a": a, "b": b}, layer_of(a), out=out)
        return out


# By their names in config.json: of one product, and times a second one.
ACTIVATIONS: Mapping[str, tuple[Callable[[Parts, str], str], Callable[[Parts, str, str], str]]] = {
    "gelu_pytorch_tanh": (lambda p, x: p.activated("gelu", x), lambda p, a, b: p.pairwise("gelu_mul", a, b)),
    "gelu": (
        lambda p, x: p.activated("gelu_erf", x),
        lambda p, a, b: p.pairwise("mul", p.activated("gelu_erf", a), b),
    ),
    "quick_gelu": (lambda p, x: p.quick_gelu(x), lambda p, a, b: p.pairwise("mul", p.quick_gelu(a), b)),
    "silu": (lambda p, x: p.pairwise("sigmoid_mul", x, x), lambda p, a, b: p.pairwise("silu_mul", a, b)),
}


def layer_of(name: str) -> str:
    """For people: a layer, or the tower."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[:2] == ["v", "blk"] else parts[0]
