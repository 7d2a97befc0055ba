"""Random shapes against float64 formulas written here a second time, straight from the op's definition.

Hypothesis draws shapes and switches; the numbers come from a seeded generator, so that a failing example is
small and prints short. Draws are derandomised: every run sees the same examples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shaderlm import ops
from shaderlm.formats import blocks
from shaderlm.formats.unpack import unpack
from shaderlm.gpu import Device
from shaderlm.kernels import fold

from .compare import assert_close
from .tiers import runs_all
from .weights import split_blocks, unpack_q4gsw

F32, F16, F64 = np.float32, np.float16, np.float64
Array = Any
SEEDS = st.integers(0, 2**32 - 1)


def runs(examples: int) -> settings:
    count = examples if runs_all() else examples // 2
    return settings(max_examples=count, derandomize=True, database=None, print_blob=False)


def floats(rng: np.random.Generator, *shape: int, size: float = 1.0) -> Array:
    return (rng.standard_normal(shape) * size).astype(F32)


def inputs(rng: np.random.Generator, m: int, weight: Array) -> Array:
    """x [m, K] of a size that makes products of about 0.1: the absolute bounds are meant for such."""
    size = 0.1 / max(1e-3, float(np.sqrt((weight**2).mean() * weight.shape[1])))
    return floats(rng, m, weight.shape[1], size=min(1.0, size))


def awkward(array: Array, how: int) -> Array:
    """The same values in another memory layout: as it is, Fortran order, every second of a row, reversed."""
    if how == 1:
        return np.asfortranarray(array)
    if how == 2:
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    return np.ascontiguousarray(array[::-1])[::-1] if how == 3 else array


LAYOUTS = st.integers(0, 3)


def applicable(op: str, device: Device, **shape: Any) -> list[str]:
    found = [verdict.route for verdict in ops.explain(op, device=device, **shape) if verdict.applies]
    assert found, f"{op} has no route for {shape}"
    return found


# linear --------------------------------------------------------------------------------------------------


def q4gsw_weight(weight: Array, scales: Array, group: int, k: int) -> Array:
    """[N, k] from the definition: word w of a row holds k = 8w … 8w + 7, nibble j at bits 4j."""
    padded = np.zeros((weight.shape[0], -(-weight.shape[1] // 4) * 4), np.uint8)
    padded[:, : weight.shape[1]] = weight
    words = padded.view("<u4")
    at = np.arange(k)
    q = ((words[:, at // 8] >> (4 * (at % 8)).astype(np.uint32)) & 15).astype(F64) - 8
    return q * scales.astype(F64)[at // group].T


@runs(60)
@given(
    m=st.sampled_from([1, 1, 2, 4, 5, 17, 65]),
    k=st.one_of(st.integers(1, 80), st.sampled_from([32, 64, 96, 128])),
    n=st.one_of(st.integers(1, 9), st.sampled_from([63, 64, 65, 130])),
    group=st.one_of(st.integers(1, 64), st.sampled_from([8, 16, 32, 64])),
    bias=st.booleans(),
    half=st.booleans(),
    short=st.booleans(),
    layout=LAYOUTS,
    seed=SEEDS,
)
@example(m=1, k=1, n=1, group=1, bias=True, half=True, short=True, layout=0, seed=0)
@example(m=1, k=32, n=1, group=64, bias=False, half=True, short=False, layout=1, seed=1)
@example(m=4, k=33, n=5, group=8, bias=True, half=False, short=True, layout=2, seed=2)
@example(m=5, k=96, n=65, group=64, bias=True, half=True, short=False, layout=3, seed=3)
@example(m=1, k=2048, n=3, group=64, bias=True, half=True, short=False, layout=0, seed=4)
def test_linear_q4gsw(
    device: Device,
    m: int,
    k: int,
    n: int,
    group: int,
    bias: bool,
    half: bool,
    short: bool,
    layout: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    columns = -(-k // 2) if short else -(-k // 8) * 4
    weight = rng.integers(0, 256, (n, columns), np.uint8)  # every nibble, past k too: the op must ignore those
    scales = (rng.uniform(-0.02, 0.02, (-(-k // group), n))).astype(F16 if half else F32)
    values = q4gsw_weight(weight, scales, group, k)
    x, offset = inputs(rng, m, values), floats(rng, n) if bias else None
    expected = x.astype(F64) @ values.T + (0 if offset is None else offset)
    shape = {"tokens": m, "K": k, "N": n, "group_size": group, "bias": bias, "scales": "f16" if half else "f32"}
    routes = applicable("linear_q4gsw", device, **shape)
    for route in routes if runs_all() else [routes[seed % len(routes)]]:
        given_x, given_weight, given_scales = (awkward(array, layout) for array in (x, weight, scales))
        actual = ops.linear_q4gsw(given_x, given_weight, given_scales, group, offset, route=route, device=device)
        assert_close(actual, expected, "linear", f"linear_q4gsw/{route} {shape}")


def weight_of(rng: np.random.Generator, kind: str, n: int, k: int) -> tuple[Array, Array]:
    """A random weight in a format, of any bit pattern, and its values by the format's definition."""
    if kind in ("f32", "f16"):
        dense = floats(rng, n, k, size=0.05).astype(F32 if kind == "f32" else F16)
        return dense, dense.astype(F64)
    scales = (rng.uniform(0.001, 0.01, (n, k // 32, 1)) * rng.choice([-1, 1], (n, k // 32, 1))).astype(F16)
    if kind == "q8_0":
        quants = rng.integers(0, 256, (n, k // 32, 32), np.uint8)
        values = quants.view(np.int8).astype(F64) * scales.astype(F64)
    else:
        quants = rng.integers(0, 256, (n, k // 32, 16), np.uint8)
        values = (np.concatenate([quants & 15, quants >> 4], axis=2).astype(F64) - 8) * scales.astype(F64)
    packed = np.concatenate([scales.view(np.uint8).reshape(n, k // 32, 2), quants], axis=2)
    return packed.reshape(n, -1), values.reshape(n, k)


@runs(24)
@given(
    kind=st.sampled_from(["f32", "f16", "q8_0", "q4_0"] if runs_all() else ["f32", "q8_0"]),
    m=st.sampled_from([1, 1, 2, 5, 64, 65]),
    k=st.integers(1, 100),
    n=st.one_of(st.integers(1, 9), st.sampled_from([63, 64, 65, 130])),
    bias=st.booleans(),
    layout=LAYOUTS,
    seed=SEEDS,
)
@example(kind="f16", m=1, k=1, n=1, bias=True, layout=0, seed=0)
@example(kind="f32", m=3, k=31, n=2, bias=True, layout=1, seed=0)
@example(kind="q8_0", m=1, k=64, n=2049, bias=False, layout=0, seed=0)
def test_linear(device: Device, kind: str, m: int, k: int, n: int, bias: bool, layout: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = k if kind in ("f32", "f16") else -(-k // 32) * 32
    weight, values = weight_of(rng, kind, n, k)
    x, offset = inputs(rng, m, values), floats(rng, n) if bias else None
    expected = x.astype(F64) @ values.T + (0 if offset is None else offset)
    shape = {"tokens": m, "K": k, "N": n, "format": kind, "bias": bias}
    routes = applicable("linear", device, **shape)
    for route in routes if runs_all() else [routes[seed % len(routes)]]:
        operands = awkward(x, layout), awkward(weight, layout)
        actual = ops.linear(*operands, offset, format=kind, route=route, device=device)
        assert_close(actual, expected, "linear", f"linear/{route} {shape}")


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
def test_embedding_is_exact(kind: str, device: Device) -> None:
    """GPU dequantise = the format's definition, for every row and bit pattern drawn; ids repeat."""
    rng = np.random.default_rng(7)
    for n, k in ((1, 32), (13, 96), (5, 64 if kind.startswith("q") else 37)):
        weight, values = weight_of(rng, kind, n, k)
        for dtype in (np.int64, np.int32, np.uint32, np.uint64):
            ids = rng.integers(0, n, 2 * n + 1).astype(dtype)
            actual = ops.embedding(ids, weight, format=kind, device=device)
            assert_close(actual, values[ids], "exact", f"embedding {kind} [{n}, {k}]")


def test_leading_axes_are_kept(device: Device) -> None:
    x, weight = floats(np.random.default_rng(0), 2, 3, 16), floats(np.random.default_rng(1), 5, 16)
    packed, scales = ops.pack_q4gsw(weight, 8)
    for inputs in (x, x[0], x[0, 0]):
        assert ops.linear(inputs, weight, device=device).shape == (*inputs.shape[:-1], 5)
        assert ops.linear_q4gsw(inputs, packed, scales, 8, device=device).shape == (*inputs.shape[:-1], 5)
        assert ops.argmax(inputs, device=device).shape == inputs.shape[:-1]


# norms, pointwise ----------------------------------------------------------------------------------------


@runs(30)
@given(
    rows=st.integers(1, 6),
    width=st.one_of(st.integers(1, 270), st.sampled_from([1028, 1031])),
    eps=st.sampled_from([1e-6, 1e-5, 0.5]),
    layout=LAYOUTS,
    seed=SEEDS,
)
def test_norms(device: Device, rows: int, width: int, eps: float, layout: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    magnitudes = 10.0 ** (np.arange(rows) - 2.0)
    a, b = (floats(rng, rows, width) * magnitudes.astype(F32)[:, None] for _ in range(2))
    weight = floats(rng, width)
    total = a + b  # in f32, as the op adds

    def norm(x: Array) -> Array:
        x = x.astype(F64)
        return x / np.sqrt((x * x).sum(axis=1, keepdims=True) / width + eps)

    a_, b_ = awkward(a, layout), awkward(b, layout)
    for route in applicable("rms_norm", device, tokens=rows, width=width):
        say = f"{route} {rows}×{width} eps {eps}"
        on: dict[str, Any] = {"route": route, "device": device}
        assert_close(ops.rms_norm(a_, None, eps, **on), norm(a), "norm", f"rms_norm/{say}")
        assert_close(ops.rms_norm(a_, weight, eps, **on), norm(a) * weight, "norm", f"rms_norm_mul/{say}")
        added, normed = ops.add_rms_norm(a_, b_, weight, eps, **on)
        assert_close(added, total, "exact", f"add_rms_norm sum/{say}")
        assert_close(normed, norm(total) * weight, "norm", f"add_rms_norm/{say}")


@runs(40)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    kept=st.integers(1, 4),
    layout=LAYOUTS,
    seed=SEEDS,
)
def test_pointwise_repeats_b_over_the_leading_axes(
    device: Device, shape: list[int], kept: int, layout: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    a = floats(rng, *shape, size=30.0)
    b = floats(rng, *shape[-kept:])
    wide = a.astype(F64)
    sigmoid = np.where(wide >= 0, 1 / (1 + np.exp(-np.abs(wide))), 1 - 1 / (1 + np.exp(-np.abs(wide))))
    formulas = {"add": wide + b, "mul": wide * b, "silu_mul": wide * sigmoid * b}
    for op, expected in formulas.items():
        for route in applicable(op, device, count=a.size, period=b.size):
            actual = getattr(ops, op)(awkward(a, layout), awkward(b, layout), route=route, device=device)
            assert_close(actual, expected, "pointwise", f"{op}/{route} {shape} {b.shape}")


def test_silu_of_large_magnitudes(device: Device) -> None:
    a = np.array([-3e38, -1e4, -104, -89, -87, -1e-30, -0.0, 0, 1e-30, 87, 89, 104, 1e4, 3e38], F32)
    expected = np.where(a > 80, a, np.where(a < -80, 0, a / 2))
    for route, count in (("scalar", 14), ("vec4", 12)):
        for part in (np.s_[:count], np.s_[-count:]):
            actual = ops.silu_mul(a[part], np.ones(count, F32), route=route, device=device)
            assert_close(actual, expected[part], "pointwise", f"silu_mul/{route}")


@runs(40)
@given(
    rows=st.integers(1, 4),
    width=st.one_of(st.integers(1, 300), st.integers(2047, 2051), st.integers(4095, 6150)),
    levels=st.integers(1, 4),
    infinite=st.booleans(),
    with_nan=st.booleans(),
    seed=SEEDS,
)
def test_argmax_takes_the_lowest_of_equals(
    device: Device, rows: int, width: int, levels: int, infinite: bool, with_nan: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = np.array([-np.inf if infinite else -2.5, -0.0, 0.0, np.inf if infinite else 3e38], F32)
    x = rng.choice(values[:levels], (rows, width))
    hidden = rng.random(x.shape) < (0.3 if with_nan else 0)
    expected = np.argmax(np.where(hidden, -np.inf, x), axis=-1)
    x[hidden] = np.nan
    for route in applicable("argmax", device, rows=rows, width=width):
        actual = ops.argmax(x, route=route, device=device)
        np.testing.assert_array_equal(actual, expected, err_msg=f"argmax/{route}")


# formats, grids ------------------------------------------------------------------------------------------


@runs(60)
@given(
    n=st.integers(1, 5),
    k=st.integers(1, 100),
    group=st.integers(1, 130),
    size=st.integers(-9, 30),
    seed=SEEDS,
)
def test_q4gsw_round_trip(n: int, k: int, group: int, size: int, seed: int) -> None:
    w = floats(np.random.default_rng(seed), n, k, size=10.0**size)
    w[0, : k // 2] = 0
    packed, scales = blocks.pack_q4gsw(w, group)
    assert packed.shape == (n, -(-k // 8) * 4)
    assert scales.shape == (-(-k // group), n)
    assert (blocks.nibbles_q4gsw(packed)[:, k:] == 0).all()
    back = unpack_q4gsw(packed, scales, group, k)
    np.testing.assert_array_equal(back, q4gsw_weight(packed, scales, group, k))
    step = np.repeat(scales.astype(F64), group, axis=0)[:k].T
    assert (np.abs(w - back) <= step * 0.50001).all()
    assert (back[w == 0] == 0).all()


@runs(40)
@given(n=st.integers(1, 4), count=st.integers(1, 4), size=st.integers(-2, 4), seed=SEEDS)
@pytest.mark.parametrize(("kind", "steps"), [("q8_0", 0.5), ("q4_0", 1.0)])
def test_block_round_trip(kind: str, steps: float, n: int, count: int, size: int, seed: int) -> None:
    """Within half a step; q4_0 has no +8: what equals the largest with the other sign is a whole step off."""
    w = floats(np.random.default_rng(seed), n, 32 * count, size=10.0**size)
    w[0, :32] = 0
    packed = getattr(blocks, f"pack_{kind}")(w)
    scales, body = split_blocks(packed, kind)
    assert packed.shape == (n, count * (2 + body.shape[2]))
    back = unpack(packed, kind)
    step = np.repeat(np.abs(scales.astype(F64)), 32, axis=1)
    assert (np.abs(w - back) <= step * (steps + 0.07)).all()  # the scale itself is rounded to f16
    assert (back[0, :32] == 0).all()
    again = getattr(blocks, f"pack_{kind}")(back)
    np.testing.assert_array_equal(unpack(again, kind), back, err_msg="packed values stay")


@runs(300)
@given(limit=st.integers(1, 70_000), data=st.data())
def test_fold_covers_the_workgroups_within_the_limit(limit: int, data: st.DataObject) -> None:
    near = st.integers(-2, 2).map(lambda i: max(1, limit + i)) | st.integers(-2, 2).map(lambda i: max(1, limit**2 + i))
    n = data.draw(near | st.integers(1, 2 * limit) | st.integers(1, 2 * limit**2))
    grid = fold(n, limit)
    if grid is None:
        assert n > limit**2
    else:
        x, y, z = grid
        assert z == 1
        assert max(grid) <= limit
        assert n <= x * y < n + y, "covers, with less than one row too many"
