"""The same result by two ways: fused and unfused, in steps and at once, by two routes, in two formats."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm import ops
from shaderlm.formats.unpack import unpack
from shaderlm.gpu import Device, open_device
from shaderlm.graph import reference, resolve
from shaderlm.graph.batch import contiguous_batch
from shaderlm.kernels import routes_of

from .compare import assert_close
from .weights import split_blocks, unpack_q4gsw

F32, F16 = np.float32, np.float16


def floats(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


# fused = unfused -----------------------------------------------------------------------------------------

WIDTHS = (1, 3, 64, 100, 130, 576, 2048, 2050)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("subgroups", [True, False])
def test_rms_norm_mul_is_rms_norm_then_mul(width: int, subgroups: bool, device: Device, plain_device: Device) -> None:
    on = device if subgroups else plain_device
    x, weight = floats(0, 5, width) * np.logspace(-2, 2, 5, dtype=F32)[:, None], floats(1, width)
    unfused = ops.mul(ops.rms_norm(x, None, device=on), weight, device=on)
    for fused in (ops.rms_norm_mul(x, weight, device=on), ops.rms_norm(x, weight, device=on)):
        assert_close(fused, unfused, "pointwise", f"rms_norm_mul {width}")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("subgroups", [True, False])
def test_add_rms_norm_is_add_then_rms_norm_then_mul(
    width: int, subgroups: bool, device: Device, plain_device: Device
) -> None:
    on = device if subgroups else plain_device
    a, b, weight = floats(0, 5, width), floats(1, 5, width), floats(2, width)
    added, fused = ops.add_rms_norm(a, b, weight, device=on)
    total = ops.add(a, b, device=on)
    assert_close(added, total, "exact", f"add_rms_norm {width}, the sum")
    unfused = ops.mul(ops.rms_norm(total, None, device=on), weight, device=on)
    assert_close(fused, unfused, "pointwise", f"add_rms_norm {width}")


# stepwise = at once --------------------------------------------------------------------------------------

SHORT, LONG = (3, 1, 1, 5, 2), (111, 1, 57, 1)  # a step of one row takes a kernel of its own


def replay(
    steps: tuple[int, ...], q: Any, k: Any, v: Any, dtype: Any, route: str | None, on: Device
) -> tuple[Any, Any]:
    """Feed the rows in steps, by the named route where it applies and the default one where not."""
    caches = np.full((2, len(q) + 3, *k.shape[1:]), np.nan, dtype)  # an unwritten row that is read shows
    out, pos = [], 0
    for step in steps:
        rows = slice(pos, pos + step)
        shape = {"Hq": q.shape[1], "Hkv": k.shape[1], "D": q.shape[2], "tokens": step, "keys": pos + step}
        said = ops.explain("attention", device=on, cache="f16" if dtype is F16 else "f32", **shape)
        taken = route if route in [verdict.route for verdict in said if verdict.applies] else None
        out.append(ops.sdpa_kv(q[rows], k[rows], v[rows], caches[0], caches[1], pos, route=taken, device=on))
        pos += step
    return np.concatenate(out), caches


@pytest.mark.parametrize("route", [None, "flash", "coalesced", "strided"])
@pytest.mark.parametrize("steps", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize(("heads", "dtype"), [((9, 3, 64), F32), ((4, 4, 3), F16)])
def test_cache_replay(
    steps: tuple[int, ...], heads: tuple[int, int, int], dtype: Any, route: str | None, device: Device
) -> None:
    hq, hkv, d = heads
    total = sum(steps)
    q, k, v = floats(0, total, hq, d), floats(1, total, hkv, d), floats(2, total, hkv, d)
    at_once, full = replay((total,), q, k, v, dtype, "coalesced", device)
    stepwise, caches = replay(steps, q, k, v, dtype, route, device)
    tolerance = "attention f16" if dtype is F16 else "attention"
    pos = 0
    for step in steps:
        rows = slice(pos, pos + step)
        assert_close(stepwise[rows], at_once[rows], tolerance, f"sdpa_kv/{route}: {step} rows at {pos}")
        pos += step
    np.testing.assert_array_equal(caches, full, err_msg="the caches")
    keys, values = full[:, :total]
    expected = reference.attention(q, keys, values, contiguous_batch(0, total))
    assert_close(at_once, expected, tolerance, "sdpa_kv at once")


def test_cache_replay_without_subgroups(plain_device: Device) -> None:
    total = sum(SHORT)
    q, k, v = floats(0, total, 4, 3), floats(1, total, 4, 3), floats(2, total, 4, 3)
    at_once, _ = replay((total,), q, k, v, F32, None, plain_device)
    stepwise, _ = replay(SHORT, q, k, v, F32, None, plain_device)
    assert_close(stepwise, at_once, "attention", "sdpa_kv")


@pytest.mark.parametrize("route", ["coalesced", "strided"])
def test_queries_in_chunks(route: str, pytestconfig: pytest.Config, device: Device) -> None:
    """Where the scores of all queries do not fit one binding, the passes run over chunks of them."""
    small = open_device(pytestconfig.getoption("--device"), limits={"max_binding": 1 << 14})
    q, k, v = floats(0, 101, 4, 8), floats(1, 101, 2, 8), floats(2, 101, 2, 8)
    dims = resolve("attention", {"Hq": 4, "Hkv": 2, "D": 8, "tokens": 101, "keys": 101})
    chosen = next(found for found in routes_of("attention") if found.name == route)
    assert len(chosen.launch_list(dims, small.caps).dispatches) >= 3 * 11, "at least 11 chunks of queries"
    whole, _ = replay((101,), q, k, v, F32, route, device)
    chunked, _ = replay((101,), q, k, v, F32, route, small)
    assert_close(chunked, whole, "attention", f"sdpa_kv/{route} in chunks")
    later, _ = replay((30, 71), q, k, v, F32, route, small)
    assert_close(later, whole, "attention", f"sdpa_kv/{route} in chunks from position 30")


def test_rows_of_a_matrix_product_one_by_one(device: Device) -> None:
    """Prefill takes a tile route, decode a GEMV: a row must not depend on its neighbours."""
    x, w, bias = floats(0, 67, 160), floats(1, 70, 160) * 0.05, floats(2, 70)
    weight, scales = ops.pack_q4gsw(w, 32)
    together = ops.linear_q4gsw(x, weight, scales, 32, bias, device=device)
    dense = ops.linear(x, w.astype(F32), bias, device=device)
    for row in (0, 3, 63, 64, 66):
        alone = ops.linear_q4gsw(x[row], weight, scales, 32, bias, device=device)
        assert_close(alone, together[row], "linear", f"linear_q4gsw row {row}")
        assert_close(ops.linear(x[row], w.astype(F32), bias, device=device), dense[row], "linear", f"row {row}")


# one route = another -------------------------------------------------------------------------------------


def every_pair(results: dict[str, Any], tolerance: str, op: str) -> None:
    assert len(results) > 1, f"{op}: fewer than two routes ran: {list(results)}"
    for (one, a), (other, b) in itertools.combinations(results.items(), 2):
        assert_close(a, b, tolerance, f"{op}: {one} and {other}")


def applicable(op: str, on: Device, **shape: Any) -> Iterator[str]:
    return (verdict.route for verdict in ops.explain(op, device=on, **shape) if verdict.applies)


@pytest.mark.parametrize(("m", "subgroups"), [(1, True), (6, False)])
def test_routes_of_linear_q4gsw_agree(m: int, subgroups: bool, device: Device, plain_device: Device) -> None:
    on = device if subgroups else plain_device
    x, bias = floats(0, m, 256) * F32(0.1), floats(1, 77)
    weight, scales = ops.pack_q4gsw(floats(2, 77, 256) * 0.05, 64)
    names = list(applicable("linear_q4gsw", on, tokens=m, K=256, N=77, group_size=64, bias=True))
    exact = {"naive", "tile", "tile_shared"} | ({"gemv", "gemv_bytes", "gemv_packed"} if m == 1 else set())
    assert exact <= set(names)
    results = {name: ops.linear_q4gsw(x, weight, scales, 64, bias, route=name, device=on) for name in names}
    every_pair(results, "linear", "linear_q4gsw")


@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_routes_of_linear_agree(kind: str, device: Device) -> None:
    dense = floats(2, 77, 256) * 0.05
    weight = dense.astype(F16) if kind == "f16" else ops.pack_q4_0(dense)
    x = floats(0, 1, 256) * F32(0.1)
    names = applicable("linear", device, tokens=1, K=256, N=77, format=kind)
    results = {name: ops.linear(x, weight, format=kind, route=name, device=device) for name in names}
    every_pair(results, "linear", f"linear {kind}")


def test_routes_of_the_other_ops_agree(device: Device) -> None:
    x, y, weight = floats(0, 3, 4100), floats(1, 3, 4100), floats(2, 4100)
    every_pair({r: ops.rms_norm(x, weight, route=r, device=device) for r in ("vec4", "scalar")}, "pointwise", "norm")
    both = {r: ops.add_rms_norm(x, y, weight, route=r, device=device) for r in ("vec4", "scalar")}
    every_pair({r: out for r, (_, out) in both.items()}, "pointwise", "add_rms_norm")
    every_pair({r: total for r, (total, _) in both.items()}, "exact", "add_rms_norm, the sum")
    for op in ("add", "mul", "silu_mul"):
        results = {r: getattr(ops, op)(x, y, route=r, device=device) for r in ("vec4", "scalar")}
        every_pair(results, "pointwise", op)
    every_pair({r: ops.argmax(x, route=r, device=device) for r in ("split", "row")}, "exact", "argmax")


def inputs(k: int) -> Iterator[tuple[str, Any]]:
    """x [1, k] that arithmetic may stumble over: outliers, empty blocks, distant magnitudes, tiny values."""
    plain = floats(0, 1, k)
    outlier = plain.copy()
    outlier[0, 7::97] = 3e4
    gaps = plain.copy()
    gaps[0, 32:64] = 0
    yield from (("plain", plain), ("outliers", outlier), ("an empty block", gaps), ("zero", plain * 0))
    yield "magnitudes", plain * np.logspace(-12, 12, k, dtype=F32)
    yield "tiny", plain * F32(1e-30)


def gemv(kind: str, k: int, n: int, on: Device) -> tuple[Callable[[Any], Any], Any, Any]:
    """A product with one row of x in a format, the weight that it stands for, and the bias."""
    w, bias = floats(1, n, k) * F32(0.05), floats(2, n)
    if kind == "q4gsw":
        weight, wide = ops.pack_q4gsw(w, 64)
        scales = wide.astype(F16)
        dense = unpack_q4gsw(weight, scales, 64, k)
        on_gpu: dict[str, Any] = {"route": "gemv_packed", "device": on}
        return lambda x: ops.linear_q4gsw(x, weight, scales, 64, bias, **on_gpu), dense, bias
    if kind.startswith("q"):
        packed = getattr(ops, f"pack_{kind}")(w)
        dense = unpack(packed, kind).astype(np.float64)
    else:
        packed = w.astype(F16 if kind == "f16" else F32)
        dense = packed.astype(np.float64)
    return lambda x: ops.linear(x, packed, bias, format=kind, route="gemv", device=on), dense, bias


@pytest.mark.parametrize(
    ("kind", "subgroups", "threads", "size"),
    [
        ("f16", True, 256, (4160, 37)),
        ("f32", False, 256, (96, 5)),
        ("q8_0", True, 256, (4160, 37)),
        ("q8_0", True, 256, (96, 4099)),  # from 4096 rows on, integer weights get kernels of their own
        pytest.param("q8_0", False, 64, (96, 4099), marks=pytest.mark.long),
        ("q4_0", True, 256, (64, 5)),
        ("q4gsw", True, 256, (4160, 37)),
        pytest.param("q4gsw", True, 256, (2112, 4099), marks=pytest.mark.long),  # and x comes in two stages
    ],
)
def test_a_gemv_as_a_real_gpu_cuts_it(
    kind: str,
    subgroups: bool,
    threads: int,
    size: tuple[int, int],
    device: Device,
    plain_device: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Software adapters get a simpler kernel; the ones that real GPUs get must run here as well."""
    on = device if subgroups else plain_device
    caps = replace(on.caps, kind="discrete", max_invocations=threads, max_workgroup_memory=16 << 10)
    monkeypatch.setattr(on, "caps", caps)
    call, dense, bias = gemv(kind, *size, on)
    for name, x in itertools.islice(inputs(size[0]), 2 if size[0] * size[1] > 1 << 20 else None):
        # What f32 rounds away is measured by the largest of a block, not by the sum, which may cancel.
        largest = np.repeat(np.abs(x.reshape(-1, 32)).max(axis=1), 32)
        bound = 1e-6 * (largest @ np.abs(dense).T + np.abs(bias))
        error = np.abs(call(x) - reference.linear(x, dense, bias))[0]
        assert (error <= bound).all(), f"{name}: {(error / bound).max():.3g} times the bound"
    for bad in (np.nan, np.inf):
        x = floats(0, 1, size[0])
        x[0, -1] = bad
        assert not np.isfinite(call(x)).any(), f"{bad} in x must show in every result"


# one format = another ------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 5])
def test_q4_0_is_q4gsw_with_groups_of_32_in_another_order(m: int, device: Device) -> None:
    x, gguf = floats(0, m, 128), ops.pack_q4_0(floats(1, 33, 128) * 0.05)
    scales, body = split_blocks(gguf, "q4_0")
    nibbles = np.concatenate([body & 15, body >> 4], axis=2).reshape(33, 128)
    weight = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    same = ops.linear_q4gsw(x, weight, np.ascontiguousarray(scales.T), 32, device=device)
    assert_close(ops.linear(x, gguf, format="q4_0", device=device), same, "linear", "q4_0 and q4gsw")


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("m", [1, 5])
def test_a_quantised_product_is_the_product_with_its_values(kind: str, m: int, device: Device) -> None:
    x, weight = floats(0, m, 96), getattr(ops, f"pack_{kind}")(floats(1, 33, 96) * 0.05)
    rows = ops.embedding(np.arange(33), weight, format=kind, device=device)
    np.testing.assert_array_equal(rows, unpack(weight, kind).astype(F32))
    quantised = ops.linear(x, weight, format=kind, device=device)
    assert_close(quantised, ops.linear(x, rows, device=device), "linear", f"linear {kind}")
