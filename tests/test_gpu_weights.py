"""Weights over several bindings, and activations that do not fit one: on a device with small bindings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shaderlm import ops
from shaderlm.errors import RouteError
from shaderlm.gpu import Device, open_device
from shaderlm.graph import reference, resolve
from shaderlm.kernels import routes_of
from shaderlm.kernels.route import buffers_of

from .compare import assert_close
from .sweeps import with_all
from .weights import make_weight, unpack_q4gsw

F32, F16 = np.float32, np.float16
BINDING = 1 << 16  # of small_device


def floats(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def parts(op: str, route: str, device: Device, **shape: Any) -> int:
    """Into how many bindings the route splits the weight."""
    chosen = next(found for found in routes_of(op) if found.name == route)
    dispatches = chosen.launch_list(resolve(op, shape), device.caps).dispatches
    return sum(any(name.startswith("weight") for name in buffers_of(dispatch)) for dispatch in dispatches)


# A row of 4096 takes 2 KiB in 4 bits: 32 rows to a binding. At M = 5 x must fit as well: K = 2048, 64 rows.
@pytest.mark.parametrize(("m", "k", "full"), [(1, 4096, 32), with_all(5, 2048, 64)])
def test_linear_q4gsw_over_several_bindings(m: int, k: int, full: int, small_device: Device) -> None:
    x = floats(0, m, k) * F32(0.05)  # products of about 0.05, as the absolute bound of f16 wants
    weight, scales = ops.pack_q4gsw(floats(1, 2 * full + 1, k) * 0.02, 32)
    dense = unpack_q4gsw(weight, scales, 32, k)
    bias = floats(2, 2 * full + 1)
    expected = reference.linear(x, dense, bias)
    exact = {"tile_shared", "rows", "tile", "naive"} | ({"gemv_packed", "gemv", "gemv_bytes"} if m == 1 else set())
    for n, count in ((full - 1, 1), (full, 1), (full + 1, 2), (2 * full, 2), (2 * full + 1, 3)):
        shape = {"tokens": m, "K": k, "N": n, "group_size": 32, "bias": True}
        said = ops.explain("linear_q4gsw", device=small_device, **shape)
        names = [verdict.route for verdict in said if verdict.applies]
        assert exact <= set(names), str(said)
        for route in names:
            assert parts("linear_q4gsw", route, small_device, **shape) == count
            given = weight[:n], np.ascontiguousarray(scales[:, :n]), 32, bias[:n]
            actual = ops.linear_q4gsw(x, *given, route=route, device=small_device)
            assert_close(actual, expected[:, :n], "linear", f"linear_q4gsw/{route} M {m} N {n}")


def test_scales_that_outweigh_the_weights(small_device: Device) -> None:
    """With groups of 2 a row has more bytes of scales than of nibbles: the scales decide the split."""
    k = 2048
    x = floats(0, 1, k)
    weight, scales = ops.pack_q4gsw(floats(1, 33, k) * 0.02, 2)
    expected = reference.linear(x, unpack_q4gsw(weight, scales, 2, k))
    for route in ("naive", "gemv_bytes"):
        assert parts("linear_q4gsw", route, small_device, tokens=1, K=k, N=33, group_size=2) == 3
        actual = ops.linear_q4gsw(x, weight, scales, 2, route=route, device=small_device)
        assert_close(actual, expected, "linear", f"linear_q4gsw/{route}")


def weight_of(kind: str, n: int, k: int) -> tuple[Any, Any]:
    return make_weight(np.random.default_rng(1), kind, n, k)


# How many rows fit is a matter of the format, not of M.
@pytest.mark.parametrize(
    ("kind", "full", "m"),
    [
        ("f32", 8, 1),
        with_all("q8_0", 32, 1),
        with_all("q4_0", 64, 1),
        ("q4_0", 64, 5),
        with_all("f32", 8, 5),
        with_all("q8_0", 32, 5),
    ],
)
def test_linear_over_several_bindings(kind: str, full: int, m: int, small_device: Device) -> None:
    k = 2048
    weight, dense = weight_of(kind, 2 * full + 1, k)
    x, bias = floats(0, m, k) * F32(0.05), floats(2, 2 * full + 1)
    for n, count in ((full, 1), (full + 1, 2), (2 * full + 1, 3)):
        shape = {"tokens": m, "K": k, "N": n, "format": kind, "bias": True}
        said = ops.explain("linear", device=small_device, **shape)
        names = [verdict.route for verdict in said if verdict.applies]
        assert {"tile_shared", "rows", *(["gemv"] if m == 1 else [])} <= set(names), str(said)
        for route in names:
            assert parts("linear", route, small_device, **shape) == count
            actual = ops.linear(x, weight[:n], bias[:n], format=kind, route=route, device=small_device)
            assert_close(actual, reference.linear(x, dense[:n], bias[:n]), "linear", f"linear/{route} {kind} N {n}")


# A row of q6_k takes 1,536 bytes: 42 rows to a binding, and of f32 7 fit, or three pairs.
@pytest.mark.parametrize(
    ("kind", "k", "full", "m"),
    [
        ("q6_k", 2048, 42, 1),
        with_all("q4_1", 2048, 64, 1),
        ("f32", 2304, 6, 1),
        with_all("q6_k", 2048, 42, 5),
        with_all("q4_1", 2048, 64, 5),
        with_all("f32", 2304, 6, 5),
    ],
)
def test_fused_linears_over_several_bindings(kind: str, k: int, full: int, m: int, small_device: Device) -> None:
    """Every part of the residual is read by its own range; pairs of rows are never torn apart."""
    n = 2 * full + 2
    weight, dense = weight_of(kind, n, k)
    x, bias, residual = floats(0, m, k) * F32(0.05), floats(2, n), floats(3, m, n)
    shape = {"tokens": m, "K": k, "N": n, "format": kind, "bias": True}
    for route in ("tile_shared", "rows", *(["gemv"] if m == 1 else [])):
        for epilogue in ("add", "silu_mul"):
            assert parts("linear", route, small_device, **shape, epilogue=epilogue) == 3
        on: dict[str, Any] = {"format": kind, "route": route, "device": small_device}
        added = ops.linear_add(x, weight, residual, bias, **on)
        sums = reference.linear(x, dense, bias)
        assert_close(added, residual + sums, "linear", f"linear_add/{route} {kind}")
        gated = ops.linear_silu_mul(x, weight, bias, **on)
        expected = reference.silu_mul(sums[:, 0::2], sums[:, 1::2])
        assert_close(gated, expected, "linear", f"linear_silu_mul/{route} {kind}")


def test_a_pair_of_rows_that_does_not_fit_a_binding_is_refused(small_device: Device) -> None:
    x, weight = floats(0, 1, 8224), floats(1, 4, 8224)  # 32,896 bytes a row, of 65,536
    with pytest.raises(RouteError, match="two rows of the weight must fit one binding; a row takes 32,896 bytes"):
        ops.linear_silu_mul(x, weight, device=small_device)
    assert_close(ops.linear(x, weight, device=small_device), reference.linear(x, weight), "linear deep", "linear")


@pytest.mark.parametrize(("kind", "full"), [("f32", 8), ("f16", 16), ("q8_0", 32), ("q4_0", 64), ("q4_k", 64)])
def test_embedding_over_several_bindings(kind: str, full: int, small_device: Device) -> None:
    k = 2048
    weight, dense = weight_of(kind, 2 * full + 1, k)
    for n, ids in (
        (full, [0, full - 1]),
        (full + 1, [full, full - 1, full, 0]),
        (2 * full + 1, [2 * full, 0, full, full - 1, 2 * full - 1]),
    ):
        actual = ops.embedding(np.array(ids), weight[:n], format=kind, device=small_device)
        assert_close(actual, dense[ids].astype(F32), "exact", f"embedding {kind} N {n}")


# What does not fit is refused, before anything is allocated ----------------------------------------------


def q4(n: int, k: int) -> dict[str, Any]:
    weight, scales = ops.pack_q4gsw(floats(1, n, k), 32)
    return {"weight": weight, "scales": scales, "group_size": 32}


def kv(s: int, c: int) -> dict[str, Any]:
    caches = {name: np.zeros((c, 1, 64), F32) for name in ("k_cache", "v_cache")}
    return {"q": floats(0, s, 1, 64), "k": floats(1, s, 1, 64), "v": floats(2, s, 1, 64), **caches, "pos": 0}


TOO_LARGE: dict[str, tuple[str, dict[str, Any], str]] = {
    "linear_q4gsw, x": ("linear_q4gsw", {"x": floats(0, 9, 2048), **q4(2, 2048)}, "x takes 73,728 bytes"),
    "linear_q4gsw, out": ("linear_q4gsw", {"x": floats(0, 33, 32), **q4(512, 32)}, "out takes 67,584 bytes"),
    "linear, x": ("linear", {"x": floats(0, 9, 2048), "weight": floats(1, 2, 2048)}, "x takes 73,728 bytes"),
    "linear, one row": (
        "linear",
        {"x": floats(0, 1, 16416), "weight": floats(1, 2, 16416)},
        "takes 65,664 bytes",
    ),
    "embedding, out": (
        "embedding",
        {"ids": np.zeros(9, np.int64), "weight": floats(1, 2, 2048)},
        "out takes 73,728 bytes",
    ),
    "rms_norm": ("rms_norm", {"x": floats(0, 1, 16385), "weight": None}, "x takes 65,540 bytes"),
    "add": ("add", {"a": floats(0, 16388), "b": floats(1, 16388)}, "a takes 65,552 bytes"),
    "argmax": ("argmax", {"x": floats(0, 1, 16385)}, "x takes 65,540 bytes"),
    "rope": ("rope", {"x": floats(0, 1, 1, 16386), "positions": np.array([1])}, "x takes 65,544 bytes"),
    "sdpa_kv, caches": ("sdpa_kv", kv(1, 257), "k_cache takes 65,792 bytes"),
}


@pytest.fixture(scope="module")
def narrow_device(pytestconfig: pytest.Config) -> Device:
    """Small bindings, grids of any size: nothing but the binding can be the reason."""
    return open_device(pytestconfig.getoption("--device"), limits={"max_binding": BINDING})


@pytest.mark.parametrize("case", TOO_LARGE)
def test_what_does_not_fit_a_binding_is_refused_before_allocation(
    case: str, narrow_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(contents: Any) -> Any:
        raise AssertionError("something was allocated")

    op, arguments, words = TOO_LARGE[case]
    monkeypatch.setattr(narrow_device, "buffer", allocate)
    with pytest.raises(RouteError) as caught:
        getattr(ops, op)(**arguments, device=narrow_device)
    message = str(caught.value)
    assert words in message, message
    assert f"one binding holds {BINDING:,}" in message
    assert narrow_device.caps.name in message


def test_exactly_one_binding_fits(small_device: Device) -> None:
    x = floats(0, 1, BINDING // 4)
    assert_close(ops.rms_norm(x, None, device=small_device), reference.rms_norm(x), "norm", "rms_norm of 64 KiB")
    arguments = kv(1, 256)
    actual = ops.sdpa_kv(**arguments, route="coalesced", device=small_device)
    assert_close(actual, arguments["v"], "attention", "sdpa_kv with caches of 64 KiB")
