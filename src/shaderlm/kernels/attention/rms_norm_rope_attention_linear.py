"""The route of rms_norm_rope_attention_linear: attention of one row in splits, which the product joins."""

from __future__ import annotations

from dataclasses import replace

from ...gpu.caps import DeviceCaps
from ..linear import int16, packed
from ..linear.linear import pack_weight
from ..route import Dims, Dispatch, LaunchList, Route, f32, filling
from ..wgsl import Kernel
from .attention import PACK_CACHES, quads, scale_of, score_constants, window_of_one_row
from .measured import JOINED_HEADS
from .rms_norm_rope_attention import row_buffers
from .rms_norm_rope_attention import unsupported_reason as attention_unsupported_reason

_AT_ONCE = 64  # keys of a query head
_SUMS_BYTES = 12 << 10  # of workgroup memory: what the keys of a workgroup leave before they are joined


def _lanes_per_key(dims: Dims, caps: DeviceCaps) -> int:
    """Lanes that have a key: as many as have two octets of it, or what subgroups have.

    H200, 4 heads of 256, 32 to 96 keys: 4.3 µs with 16, 5.4 with 8.
    """
    fitting = (lanes_per_key for lanes_per_key in (16, 8) if lanes_per_key <= caps.subgroup_size)
    return next((lanes_per_key for lanes_per_key in fitting if dims["D"] % (16 * lanes_per_key) == 0), 4)


def _lanes(dims: Dims, caps: DeviceCaps) -> int:
    """Of a workgroup. Small subgroups have few lanes for a key, so that a workgroup has more keys."""
    key_bytes = f32(dims["D"]) // _lanes_per_key(dims, caps)
    return next((lanes for lanes in (128, 64) if lanes * key_bytes <= _SUMS_BYTES), 32)


def _splits(dims: Dims, caps: DeviceCaps) -> int:
    """Workgroups of a query head. H200, 4 heads of 256, 32 to 96 keys: 5.0 µs with 4, 4.3 with 8 or 16."""
    return _AT_ONCE * _lanes_per_key(dims, caps) // _lanes(dims, caps)


def _attention(dims: Dims, caps: DeviceCaps) -> Dispatch:
    lanes_per_key = _lanes_per_key(dims, caps)
    include = (
        "attention/head_quads", "attention/rotate_quads", "attention/units_octets", "attention/visible", "shared/batch",
    )  # fmt: skip
    constants = {
        "WG": _lanes(dims, caps),
        "LANES_PER_KEY": lanes_per_key,
        "OWN": dims["D"] // 8 // lanes_per_key,
        "SPLITS": _splits(dims, caps),
        "JOINED": 2 if caps.subgroup_size >= 2 * lanes_per_key else 1,
        "INTERLEAVED": dims["interleaved"],
        **score_constants({**dims, "window": window_of_one_row(dims)}),
    }
    params = {"heads": dims["Hq"], "kv_heads": dims["Hkv"]}
    params |= {name: dims[name] // 4 for name in ("rotary", "q_first", "k_first", "v_first")}
    return Dispatch(
        Kernel("attention/attention_key_splits", include, frozenset({"subgroups"})),
        dims["Hq"] * _splits(dims, caps),
        {**params, "scale": scale_of(dims), "eps": float(dims["eps"])},
        constants,
        specialised=caps.policy.specialise_constants,
    )


def _product(dims: Dims, caps: DeviceCaps) -> LaunchList:
    product_dims = {**dims, "prologue": "splits", "batched": False}
    constants = {"SPLITS": _splits(dims, caps), "QUADS": quads(dims)}
    products = int16.launch_list(product_dims, caps)
    dispatches = (
        replace(each, constants={**each.constants, **constants}, bind={**each.bind, "x": "partial"})
        for each in products.dispatches
    )
    return LaunchList(tuple(dispatches), {name: size for name, size in products.buffers.items() if name != "x"})


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    product = _product(dims, caps)
    partial = f32(_splits(dims, caps) * dims["Hq"] * (dims["D"] + 4))
    buffers = {**row_buffers(dims), "partial": partial, **product.buffers}
    return LaunchList((_attention(dims, caps), *product.dispatches), buffers)


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    reason = attention_unsupported_reason(dims, caps) or int16.integers_unsupported_reason(dims, caps)
    if reason:
        return reason
    if dims["cache"] != "f16":
        return f"keys and values are read eight at a time, the cache is {dims['cache']}"
    heads = filling(JOINED_HEADS, caps)
    if dims["Hq"] > heads:
        return f"it is for at most {heads} query heads, there are {dims['Hq']}"
    if dims["rotary"] != dims["D"]:
        return f"it rotates whole heads, rotary is {dims['rotary']} of {dims['D']}"
    if dims["D"] % 64:
        return f"D must be a multiple of 64, D is {dims['D']}"
    if dims["D"] // 8 // _lanes_per_key(dims, caps) > 4 and not caps.policy.prefer_few_barriers:
        return f"a lane would have too much of a head: D is {dims['D']}, and the size of subgroups is not known"
    most_inputs = 8 * int16.config_for({**dims, "prologue": "splits"}, caps).threads
    if dims["K"] > most_inputs:
        return f"a workgroup of the product joins at most {most_inputs} inputs, there are {dims['K']}"
    return None


ROUTES: tuple[Route, ...] = (
    Route(
        "rms_norm_rope_attention_linear",
        "splits_int16",
        _launch_list,
        _unsupported_reason,
        {**PACK_CACHES, "weight": pack_weight, "bias": packed.pack_bias},
        exact=False,
        weight_parts=packed.weight_parts,
    ),
)
