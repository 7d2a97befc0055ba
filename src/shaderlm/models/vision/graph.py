"""The graph of a tower: from patches to the features of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ...graph.graph import Graph
from .mergers import MERGERS, two_matrices
from .parts import ACTIVATIONS, Parts
from .places import POSITIONS
from .sizes import Sizes


def tower_graph(sizes: Sizes, patches: int) -> tuple[Graph, Parts]:
    """The graph for so many patches, and what it is made of."""
    parts = Parts(sizes, patches + sizes.class_rows)
    b, n = parts.b, parts.patches
    x = b.tensor("patches", patches, sizes.patch_width, role="input")
    for spans in ("spans", "windows") if sizes.window else ("spans",):
        b.tensor(spans, n, 2, role="input", format="u32")
    if sizes.family.rope:
        b.tensor("turns", n, sizes.head // 2, 2, role="input")
    x = parts.linear(
        "v.patch_embd", x, 3 * sizes.patch**2, sizes.hidden, bias=sizes.family.bias and sizes.family.patch_bias
    )
    if sizes.class_rows:
        x = _after_class(parts, x)
    if sizes.family.positions:
        x = parts.sum("v.placed", x, _positions(parts))
    if sizes.family.first_norm:
        x = parts.norm("v.pre_ln", x, n, sizes.hidden)
    outputs: list[str] = []
    for i in range(sizes.layers):
        spans = "windows" if sizes.window and i not in sizes.full else "spans"
        x = LAYERS[sizes.family.layer](parts, f"v.blk.{i}", x, spans)
        if i in sizes.deepstack:
            outputs.append(_deepstack(parts, f"v.deepstack.{i}", x, len(outputs) + 1))
    return b.graph(MERGERS[sizes.family.merger](parts, x), *outputs), parts


def _after_class(parts: Parts, x: str) -> str:
    """A row of the file, then the patches."""
    name, width = "v.class_embd", parts.sizes.hidden
    out = parts.b.tensor("v.rows", parts.patches, width)
    dims = {"a": width, "b": parts.b.tensors[x].size}
    parts.b.add("concat", dims, {"a": parts.stored(name, (width,)), "b": x}, "v", out=out)
    return out


def _positions(parts: Parts) -> str:
    """Of every patch, a sum of rows of a table."""
    sizes, n = parts.sizes, parts.patches
    kind = POSITIONS[sizes.family.positions]
    taps, shape = kind.taps, kind.shape(sizes)
    # Not a matrix that is multiplied: numbers in f32.
    table = parts.stored("v.position_embd.weight", shape, (math.prod(shape),))
    inputs = {
        "weight": table,
        "rows": parts.b.tensor("places", n, taps, role="input", format="u32"),
        "factors": parts.b.tensor("place_factors", n, taps, role="input"),
    }
    dims = {"tokens": n, "N": math.prod(shape[:-1]), "K": sizes.hidden, "taps": taps}
    out = parts.b.tensor("v.positions", n, sizes.hidden)
    parts.b.add("weighted_rows", dims, inputs, "v", out=out)
    return out


def _layer(parts: Parts, name: str, x: str, spans: str) -> str:
    sizes, n, hidden = parts.sizes, parts.patches, parts.sizes.hidden
    read, bias = parts.norm(f"{name}.ln1", x, n, hidden), sizes.family.bias
    q, k, v = (parts.part(name, i, read) for i in range(3))
    if sizes.family.rope:
        q, k = _rotated(parts, name, q), _rotated(parts, name, k)
    out = _attended(parts, name, (q, k, v), spans, 1 / math.sqrt(sizes.head))
    x = parts.sum(f"{name}.attn_sum", x, parts.linear(f"{name}.attn_out", out, hidden, hidden, bias=bias))
    y = _inner(parts, name, parts.norm(f"{name}.ln2", x, n, hidden))
    return parts.sum(f"{name}.ffn_sum", x, parts.linear(f"{name}.ffn_down", y, sizes.ffn, hidden, bias=bias))


def _sandwich(parts: Parts, name: str, x: str, spans: str) -> str:
    """With norms after attention and network, and of heads: scores are not scaled."""
    sizes, n, hidden = parts.sizes, parts.patches, parts.sizes.hidden
    read = parts.norm(f"{name}.ln1", x, n, hidden)
    products = {key: parts.clamped(f"{name}.attn_{key}", read, hidden, hidden) for key in "qkv"}
    q, k = (_rotated(parts, name, parts.head_norm(f"{name}.attn_{key}_norm", products[key])) for key in "qk")
    out = _attended(parts, name, (q, k, parts.plain_norm(products["v"], sizes.heads, sizes.head)), spans, 1.0)
    y = parts.norm(f"{name}.attn_post_norm", parts.clamped(f"{name}.attn_out", out, hidden, hidden), n, hidden)
    x = parts.sum(f"{name}.attn_sum", x, y)
    read = parts.norm(f"{name}.ln2", x, n, hidden)
    gate, up = (parts.clamped(f"{name}.ffn_{each}", read, hidden, sizes.ffn, wide=True) for each in ("gate", "up"))
    y = parts.clamped(f"{name}.ffn_down", ACTIVATIONS[sizes.activation][1](parts, gate, up), sizes.ffn, hidden)
    return parts.sum(f"{name}.ffn_sum", x, parts.norm(f"{name}.ffn_post_norm", y, n, hidden))


def _attended(parts: Parts, name: str, qkv: tuple[str, str, str], spans: str, scale: float) -> str:
    sizes, n = parts.sizes, parts.patches
    out = parts.b.tensor(f"{name}.attended", n, sizes.hidden)
    dims = {"tokens": n, "H": sizes.heads, "D": sizes.head, "scale": scale}
    parts.b.add("attend_spans", dims, {**dict(zip("qkv", qkv, strict=True)), "spans": spans}, name, out=out)
    return out


LAYERS: Mapping[str, Callable[[Parts, str, str, str], str]] = {"plain": _layer, "sandwich": _sandwich}


def _inner(parts: Parts, name: str, read: str) -> str:
    """What the last product of a network reads."""
    sizes = parts.sizes
    alone, gated = ACTIVATIONS[sizes.activation]
    names = ("ffn_gate", "ffn_up") if sizes.family.gated else ("ffn_up",)
    products = [
        parts.linear(f"{name}.{each}", read, sizes.hidden, sizes.ffn, bias=sizes.family.bias, wide=True)
        for each in names
    ]
    return gated(parts, *products) if sizes.family.gated else alone(parts, *products)


def _rotated(parts: Parts, layer: str, x: str) -> str:
    sizes, n = parts.sizes, parts.patches
    out = parts.b.tensor(f"{x}.rotated", n, sizes.hidden)
    dims = {"tokens": n, "H": sizes.heads, "D": sizes.head}
    parts.b.add("rope_by_row", dims, {"x": x, "table": "turns"}, layer, out=out)
    return out


def _deepstack(parts: Parts, name: str, x: str, level: int) -> str:
    """Features after an earlier layer: neighbouring patches side by side, normalised together."""
    sizes, merged = parts.sizes, parts.sizes.merge**2
    read = parts.layer_norm(f"{name}.norm", x, parts.patches // merged, sizes.hidden * merged)
    return two_matrices(parts, (f"{name}.fc1", f"{name}.fc2"), read, sizes.hidden * merged, f"features.{level}")
