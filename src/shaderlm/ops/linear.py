"""Matrix products with weights and embedding look-up, NumPy in and out."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InputError, RouteError
from ..formats.weight_formats import BLOCK_FORMATS, WEIGHT_FORMATS
from ..gpu import Array
from ..graph import resolve
from ..graph.batch import contiguous_batch
from . import checks


def _bias(op: str, bias: Any, n: int) -> Array | None:
    return None if bias is None else checks.floats(op, "bias", bias, 1, "[N]", (n,))


def linear_q4gsw(
    x: Any,
    weight: Any,
    scales: Any,
    group_size: int,
    bias: Any = None,
    *,
    route: str | None = None,
    device: Any = None,
) -> Array:
    """x · wᵀ + bias with 4-bit groupwise symmetric weights, as `pack_q4gsw` makes them.

    x float32 [..., K]; weight uint8 [N, K'/2] with K' = K rounded up to a multiple of 8 (or [N, ceil(K/2)]);
    scales float32 or float16 [ceil(K / group_size), N]; bias float32 [N]. Returns float32 [..., N].
    """
    op = "linear_q4gsw"
    x = checks.floats(op, "x", x, None, "[..., K]")
    weight = checks.array(op, "weight", weight, (np.uint8,), 2, "[N, K/2]")
    scales = checks.array(op, "scales", scales, (np.float32, np.float16), 2, "[K/group_size, N]")
    group_size = checks.whole(op, "group_size", group_size, 1)
    k, n = x.shape[-1], weight.shape[0]
    padded, width = -(-k // 8) * 4, weight.shape[1]
    if width not in (padded, -(-k // 2)):
        raise InputError(
            f"{op}: weight must be [N, K/2] = [{n}, {padded}] for K = {k} (K padded to a multiple of 8), "
            f"got {list(weight.shape)}"
        )
    if width < padded or k % 8:
        weight = _zero_past(weight, k, padded)
    groups = -(-k // group_size)
    checks.shape(op, "scales", scales, (groups, n), f"[K/group_size, N] for K = {k}, group_size = {group_size}")
    if not np.isfinite(scales).all():
        bad = "only NaN" if np.isnan(scales).all() else "NaN or infinity"
        raise InputError(f"{op}: scales must be finite, got {bad}")
    bias = _bias(op, bias, n)
    shape = {"tokens": x.size // k, "K": k, "N": n, "group_size": group_size, "bias": bias is not None}
    dims = resolve(op, {**shape, "scales": "f16" if scales.dtype == np.float16 else "f32"})
    operands = {"x": x.reshape(-1, k), "weight": weight, "scales": scales, "bias": bias}
    return checks.run(op, dims, operands, route, device, (*x.shape[:-1], n))


def _zero_past(weight: Array, k: int, width: int) -> Array:
    """The packed weight with q = 0 in every nibble past k, whatever the caller left there."""
    out = np.full((weight.shape[0], width), 0x88, np.uint8)
    out[:, : k // 2] = weight[:, : k // 2]
    if k % 2:
        out[:, k // 2] = (weight[:, k // 2] & 0x0F) | 0x80
    return out


def _weight(op: str, weight: Any, kind: str | None) -> tuple[Array, str, int]:
    """The weight, its format and its K."""
    by_dtype = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}
    if kind is None:
        if not isinstance(weight, np.ndarray) or weight.dtype not in by_dtype:
            actual = weight.dtype if isinstance(weight, np.ndarray) else type(weight).__name__
            raise InputError(
                f"{op}: weight must be float32 or float16 [N, K], or uint8 GGUF blocks with a format "
                f"({', '.join(BLOCK_FORMATS)}); got {actual}"
            )
        kind = by_dtype[weight.dtype]
    if kind not in WEIGHT_FORMATS:
        raise InputError(f"{op}: format must be one of {', '.join(WEIGHT_FORMATS)}, got {kind!r}")
    form = WEIGHT_FORMATS[kind]
    if form.dtype is None:
        weights, size = form.block_weights, form.block_bytes
        weight = checks.array(op, "weight", weight, (np.uint8,), 2, f"[N, K/{weights} · {size}]")
        if weight.shape[1] % size:
            raise InputError(f"{op}: a {kind} row must be a multiple of {size} bytes, got {weight.shape[1]}")
        return weight, kind, weight.shape[1] // size * weights
    weight = checks.array(op, "weight", weight, (np.dtype(form.dtype),), 2, "[N, K]")
    return weight, kind, weight.shape[1]


def _linear(
    op: str, x: Any, weight: Any, bias: Any, kind: str | None, route: str | None, device: Any, residual: Any = None
) -> Array:
    """linear or one of its fusions, which differ in what is done with the sums."""
    x = checks.floats(op, "x", x, None, "[..., K]")
    weight, kind, k = _weight(op, weight, kind)
    if x.shape[-1] != k:
        raise InputError(f"{op}: x must be [..., K] with K = {k} as in weight, got {list(x.shape)}")
    n = weight.shape[0]
    bias = _bias(op, bias, n)
    shape = {"tokens": x.size // k, "K": k, "N": n, "format": kind, "bias": bias is not None}
    epilogue = op.removeprefix("linear_") if op != "linear" else "none"
    operands = {"x": x.reshape(-1, k), "weight": weight, "bias": bias}
    if op == "linear_add":
        residual = checks.floats(op, "residual", residual, None, "[..., N]", (*x.shape[:-1], n))
        operands["residual"] = residual.reshape(-1, n)
    try:
        dims = resolve("linear", {**shape, "epilogue": epilogue})
        return checks.run("linear", dims, operands, route, device, (*x.shape[:-1], -1))
    except (InputError, RouteError) as problem:
        if op == "linear":
            raise
        raise type(problem)(f"{op}: {problem}") from problem  # the name that the caller knows


def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    format: str | None = None,  # noqa: A002  (the word users know it by)
    route: str | None = None,
    device: Any = None,
) -> Array:
    """x · wᵀ + bias. Weight float32 or float16 [N, K], or GGUF blocks as uint8 and their format ("q4_1", "q6_k" …).

    Weights of the format "bf16" are uint16 [N, K], the first halves of float32.
    """
    return _linear("linear", x, weight, bias, format, route, device)


def linear_add(
    x: Any,
    weight: Any,
    residual: Any,
    bias: Any = None,
    *,
    format: str | None = None,  # noqa: A002
    route: str | None = None,
    device: Any = None,
) -> Array:
    """The fusion of linear and add: residual + x · wᵀ + bias, residual float32 [..., N]."""
    return _linear("linear_add", x, weight, bias, format, route, device, residual)


def linear_silu_mul(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    format: str | None = None,  # noqa: A002
    route: str | None = None,
    device: Any = None,
) -> Array:
    """The fusion of two linears and silu_mul: silu(x · gateᵀ) · (x · upᵀ), float32 [..., N/2].

    The rows of weight [N, K] and of bias [N] are gate and up in turns.
    """
    return _linear("linear_silu_mul", x, weight, bias, format, route, device)


def embedding(
    ids: Any,
    weight: Any,
    *,
    format: str | None = None,  # noqa: A002
    route: str | None = None,
    device: Any = None,
) -> Array:
    """Rows `ids` of a weight in any format that `linear` takes, as float32 [T, K]."""
    op = "embedding"
    weight, kind, k = _weight(op, weight, format)
    ids = checks.ids(op, "ids", ids, 1, weight.shape[0], "[T]")
    dims = resolve(op, {"tokens": ids.size, "N": weight.shape[0], "K": k, "format": kind})
    operands = {"batch": contiguous_batch(0, ids.size, ids), "tokens": np.zeros(1, np.uint32), "weight": weight}
    return np.ascontiguousarray(checks.run(op, dims, operands, route, device, (ids.size, -1))[:, :k])
