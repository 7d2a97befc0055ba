"""Attention over a cache and rope at random shapes, against float64 formulas written here a second time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shaderlm import ops
from shaderlm.gpu import Device

from .compare import assert_close
from .test_properties import F16, F32, F64, LAYOUTS, SEEDS, Array, applicable, awkward, floats, runs

# attention -----------------------------------------------------------------------------------------------


def attention(q: Array, k_cache: Array, v_cache: Array, pos: int, scale: float) -> Array:
    """One masked softmax over the whole context, in float64."""
    (s, hq, _), context = q.shape, pos + q.shape[0]
    group = hq // k_cache.shape[1]
    keys = np.repeat(k_cache[:context].astype(F64), group, axis=1)
    values = np.repeat(v_cache[:context].astype(F64), group, axis=1)
    scores = np.einsum("shd,chd->hsc", q.astype(F64), keys) * scale
    visible = np.arange(context)[None, :] <= np.arange(s)[:, None] + pos
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hsc,chd->shd", weights / weights.sum(axis=-1, keepdims=True), values)


@runs(24)
@given(
    hkv=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (1, 3), (5, 18), (5, 20)]),  # query heads per kv head, and their size
    s=st.sampled_from([1, 1, 2, 4, 5, 9]),
    pos=st.one_of(st.integers(0, 9), st.sampled_from([62, 63, 64, 126, 127, 128, 300])),
    spare=st.integers(0, 3),
    half=st.booleans(),
    scale=st.sampled_from([None, 0.3, 0.0, -0.2]),
    layout=LAYOUTS,
    seed=SEEDS,
)
@example(hkv=1, heads=(1, 1), s=1, pos=0, spare=0, half=True, scale=None, layout=0, seed=0)
@example(hkv=1, heads=(1, 512), s=1, pos=70, spare=1, half=False, scale=None, layout=0, seed=2)
@example(hkv=2, heads=(5, 18), s=9, pos=300, spare=2, half=False, scale=None, layout=2, seed=1)
def test_sdpa_kv(
    device: Device,
    hkv: int,
    heads: tuple[int, int],
    s: int,
    pos: int,
    spare: int,
    half: bool,
    scale: float | None,
    layout: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    dtype = F16 if half else F32
    d, capacity, hq = heads[1], pos + s + spare, hkv * heads[0]
    q, k, v = floats(rng, s, hq, d), *(floats(rng, s, hkv, d).astype(dtype).astype(F32) for _ in range(2))
    pool = floats(rng, capacity, 2, hkv, d).astype(dtype)
    pool[pos:] = np.nan  # what lies past the context must never be read
    shape = {"Hq": hq, "Hkv": hkv, "D": d, "tokens": s, "keys": pos + s, "cache": "f16" if half else "f32"}
    for route in applicable("attention", device, **shape):
        caches = pool.copy()  # the two caches are interleaved views of one array
        actual = ops.sdpa_kv(
            awkward(q, layout),
            awkward(k, layout),
            v,
            caches[:, 0],
            caches[:, 1],
            pos,
            scale,
            route=route,
            device=device,
        )
        wanted = pool.copy()
        wanted[pos : pos + s, 0], wanted[pos : pos + s, 1] = k, v
        np.testing.assert_array_equal(caches, wanted, err_msg=f"sdpa_kv/{route}: the caches")
        factor = d**-0.5 if scale is None else scale
        expected = attention(q, wanted[:, 0], wanted[:, 1], pos, factor)
        assert_close(actual, expected, "attention f16" if half else "attention", f"sdpa_kv/{route} {shape}")


@pytest.mark.parametrize("route", ["flash", "coalesced", "strided"])
@pytest.mark.parametrize("size", [177.0, 1e4])
def test_large_logits_do_not_overflow(route: str, size: float, device: Device) -> None:
    """±177 is where exp overflows in f32; the row maximum must be taken off first."""
    context, d = 140, 3
    keys = np.zeros((context, 1, d), F32)
    keys[:, 0, 0] = np.where(np.arange(context) % 7 == 3, 1, -1)
    keys[:, 0, 1] = np.linspace(0, 1, context)
    values = floats(np.random.default_rng(0), context, 1, d)
    for first in (size, -size):
        q = np.array([[[first, 0.5, 0.0]]], F32)
        caches = keys.copy(), values.copy()
        actual = ops.sdpa_kv(q, keys[-1:], values[-1:], *caches, context - 1, 1.0, route=route, device=device)
        expected = attention(q, keys, values, context - 1, 1.0)
        bounds = "attention" if size < 1e3 else "attention f16"  # at 10^4 the logits themselves are rounded
        assert_close(actual, expected, bounds, f"sdpa_kv/{route} {first:g}")


def test_float16_caches_hold_the_nearest_value(device: Device) -> None:
    """A value between two f16 neighbours becomes one of them: WGSL leaves the direction to the device."""
    k = floats(np.random.default_rng(3), 1, 2, 64, size=100.0)
    caches = np.zeros((2, 1, 2, 64), F16)
    ops.sdpa_kv(k, k, -k, caches[0], caches[1], 0, route="coalesced", device=device)
    step = np.spacing(np.abs(k.astype(F16)))
    assert (np.abs(caches[0].astype(F64) - k) <= step).all()
    np.testing.assert_array_equal(caches[0], -caches[1])


# rope ----------------------------------------------------------------------------------------------------


@runs(40)
@given(
    t=st.integers(1, 5),
    h=st.integers(1, 4),
    half_d=st.integers(1, 20),
    half_rotary=st.integers(1, 20),
    interleaved=st.booleans(),
    theta=st.sampled_from([1e4, 5e5, 1.0, 3.7]),
    scaled=st.booleans(),
    last=st.sampled_from([0, 5, 4095, 131_071, 2**31 - 1]),
    layout=LAYOUTS,
    seed=SEEDS,
)
def test_rope(
    device: Device,
    t: int,
    h: int,
    half_d: int,
    half_rotary: int,
    interleaved: bool,
    theta: float,
    scaled: bool,
    last: int,
    layout: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    d, rotary = 2 * half_d, 2 * min(half_d, half_rotary)
    x = floats(rng, t, h, d)
    positions = np.sort(rng.integers(0, last + 1, t))[::-1]
    factors = rng.uniform(0.5, 32, rotary // 2) if scaled else None
    frequency = np.exp(-np.arange(rotary // 2) * 2 / rotary * np.log(theta)) / (1 if factors is None else factors)
    turn = np.exp(1j * positions[:, None] * frequency)[:, None, :]
    expected = x.astype(F64)
    first = np.arange(rotary // 2) * (2 if interleaved else 1)
    second = first + (1 if interleaved else rotary // 2)
    rotated = (expected[..., first] + 1j * expected[..., second]) * turn
    expected[..., first], expected[..., second] = rotated.real, rotated.imag
    actual = ops.rope(
        awkward(x, layout),
        positions,
        theta=theta,
        factors=factors,
        rotary=rotary,
        interleaved=interleaved,
        device=device,
    )
    # At position 2^31 the angle itself is known to 2^31 · 2^-53: the float64 references may differ by that.
    assert_close(actual, expected, "pointwise", f"rope {x.shape} rotary {rotary} interleaved {interleaved}")
