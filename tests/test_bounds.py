"""Kernels stay inside their buffers: every buffer is followed by NaN, and what starts empty starts as NaN.

So a read past the end, a read of scratch memory that was never written, a result that is not written and a
write past the end all show. Zeroed memory, generous padding and checked accesses hide them otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm import ops
from shaderlm.errors import RouteError
from shaderlm.gpu import Array, Device, Program

from .compare import assert_close
from .sweeps import with_all

F32, F16 = np.float32, np.float16
TAIL = 64  # bytes after each buffer


def floats(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def fenced(contents: Array | int, is_params: bool) -> Array:
    """The contents and a fence of 0xFF bytes, which is NaN in f32 and f16; empty buffers are all fence."""
    if isinstance(contents, int):
        return np.full(contents + TAIL, 0xFF, np.uint8)
    raw = np.ascontiguousarray(contents).reshape(-1).view(np.uint8)
    return raw if is_params else np.concatenate([raw, np.full(TAIL, 0xFF, np.uint8)])


@pytest.fixture
def programs(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """Every program that runs meanwhile is fenced; yields the list of those that ran."""
    inner, ran = device.run, list[Program]()

    def run(program: Program) -> dict[str, Any]:
        buffers = {name: fenced(contents, "params" in name) for name, contents in program.buffers.items()}
        names = tuple(name for name in buffers if "params" not in name)
        found = inner(replace(program, buffers=buffers, outputs=names))
        for name, raw in found.items():
            assert (raw[-TAIL:] == 0xFF).all(), f"{program.steps[0].label}: written past the end of {name}"
        ran.append(program)
        return {name: found[name][:-TAIL] for name in program.outputs}

    monkeypatch.setattr(device, "run", run)
    yield ran
    monkeypatch.undo()


def q4(m: int, k: int, n: int, group: int, dtype: Any = F32, bias: bool = False) -> dict[str, Any]:
    weight, scales = ops.pack_q4gsw(floats(1, n, k) * 0.05, group)
    given = {"x": floats(0, m, k), "weight": weight, "scales": scales.astype(dtype), "group_size": group}
    return {**given, "bias": floats(2, n) if bias else None}


def dense(m: int, k: int, n: int, kind: str) -> dict[str, Any]:
    w = floats(1, n, k) * F32(0.05)
    pack: dict[str, Callable[[Any], Any]] = {"f32": np.copy, "f16": lambda w: w.astype(F16)}
    pack |= {"q8_0": ops.pack_q8_0, "q4_0": ops.pack_q4_0}
    return {"x": floats(0, m, k), "weight": pack[kind](w), "format": kind}


def attend(s: int, hq: int, hkv: int, d: int, pos: int, dtype: Any = F32) -> dict[str, Any]:
    caches = np.random.default_rng(4).standard_normal((2, pos + s + 2, hkv, d)).astype(dtype)
    given = {"q": floats(0, s, hq, d), "k": floats(1, s, hkv, d), "v": floats(2, s, hkv, d)}
    return {**given, "k_cache": caches[0], "v_cache": caches[1], "pos": pos}


CASES: list[tuple[str, dict[str, Any]]] = [
    *[("rms_norm", {"x": floats(0, 3, width), "weight": None}) for width in (1, 4, 37, 100, 1028)],
    *[("rms_norm_mul", {"x": floats(0, 3, width), "weight": floats(1, width)}) for width in (3, 68)],
    *[
        ("add_rms_norm", {"a": floats(0, 3, width), "b": floats(1, 3, width), "weight": floats(2, width)})
        for width in (3, 68)
    ],
    *[(op, {"a": floats(0, 3, size), "b": floats(1, size)}) for op in ("add", "mul") for size in (1, 4, 260)],
    *[("silu_mul", {"gate": floats(0, 3, size), "up": floats(1, 3, size)}) for size in (1, 260)],
    *[("argmax", {"x": floats(0, 3, width)}) for width in (1, 65, 2049, 4100)],
    *[("rope", {"x": floats(0, 3, 3, 6), "positions": np.arange(3), "rotary": rotary}) for rotary in (2, 6)],
    ("embedding", {"ids": np.array([4, 0, 2]), "weight": floats(1, 5, 33)}),
    ("embedding", {"ids": np.array([4, 0, 2]), "weight": ops.pack_q8_0(floats(1, 5, 96)), "format": "q8_0"}),
    ("linear_q4gsw", q4(1, 96, 5, 32)),
    ("linear_q4gsw", q4(1, 96, 65, 32, F16, bias=True)),
    ("linear_q4gsw", q4(5, 96, 7, 64, F16)),
    ("linear_q4gsw", q4(5, 37, 9, 8, bias=True)),
    ("linear_q4gsw", q4(1, 38, 9, 5)),
    ("linear", dense(1, 33, 67, "f16")),
    ("linear", dense(66, 64, 67, "f16")),
    *[("linear", dense(m, 96, 5, "f32")) for m in (1, 3)],
    ("linear", dense(1, 96, 5, "q8_0")),
    ("linear", dense(3, 96, 5, "q4_0")),
    ("sdpa_kv", attend(1, 10, 2, 18, 0)),
    ("sdpa_kv", attend(1, 10, 2, 18, 70, F16)),
    ("sdpa_kv", attend(5, 6, 2, 5, 3)),
    ("sdpa_kv", attend(5, 6, 2, 8, 66, F16)),
]
WITH_ALL: list[tuple[str, dict[str, Any]]] = [
    ("linear", dense(1, 64, 67, "f16")),
    ("linear", dense(66, 33, 67, "f16")),
    ("linear", dense(3, 96, 5, "q8_0")),
    ("linear", dense(1, 96, 5, "q4_0")),
]


def routes_in_and_out_of_fences(
    op: str, given: dict[str, Any], on: Device, ran: list[Program], free: Any, begin: str = ""
) -> None:
    """Routes that apply (and begin so), with fences and, once `free` took them away, without: the same bits."""

    def call(route: str) -> tuple[Any, ...]:
        arguments = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in given.items()}
        result = getattr(ops, op)(**arguments, route=route, device=on)
        caches = [arguments[name] for name in ("k_cache", "v_cache") if name in arguments]
        return (*(result if isinstance(result, tuple) else (result,)), *caches)

    found: dict[str, tuple[Any, ...]] = {}
    routes = ops.routes("attention" if op == "sdpa_kv" else op)
    for route in (route for route in routes if route.startswith(begin)):
        try:
            found[route] = call(route)
        except RouteError as problem:
            assert "does not apply" in str(problem)  # noqa: PT017  (not a route for this shape)
    assert 0 < len(found) == len(ran) / (2 if op == "sdpa_kv" else 1)  # which is kv_write and then attention
    free()
    for route, results in found.items():
        for fenced_in, plain in zip(results, call(route), strict=True):
            assert_close(fenced_in, plain, "exact", f"{op}/{route}: with and without fences")


def _name(i: int, op: str, given: dict[str, Any]) -> str:
    """With the format of a weight or a cache in it, by which tests are grouped."""
    kind = given.get("format") or {2: "f16", 4: "f32"}.get(getattr(given.get("k_cache"), "itemsize", 0))
    return f"{i}-{op}" + (f"-{kind}" if kind else "")


@pytest.mark.parametrize(
    ("op", "given"),
    [*CASES, *(with_all(*case) for case in WITH_ALL)],
    ids=[_name(i, *case) for i, case in enumerate([*CASES, *WITH_ALL])],
)
def test_every_route_stays_inside_its_buffers(
    op: str, given: dict[str, Any], device: Device, programs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    routes_in_and_out_of_fences(op, given, device, programs, monkeypatch.undo)


@pytest.mark.parametrize(
    ("op", "given", "begin"),
    [
        ("linear", dense(1, 96, 5, "q8_0"), ""),
        ("linear", dense(1, 33, 67, "f16"), "gemv"),
        ("linear", {**dense(1, 96, 4099, "q8_0"), "bias": floats(2, 4099)}, "gemv"),
    ],
    ids=["q8_0", "f16", "q8_0, many rows"],
)
def test_the_gemv_of_a_real_gpu_stays_inside_its_buffers(
    op: str, given: dict[str, Any], begin: str, device: Device, programs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Software adapters get a simpler kernel. Of other routes, which write their parameters in, one case will do."""
    caps = device.caps
    monkeypatch.setattr(device, "caps", replace(caps, kind="discrete"))

    def free() -> None:
        monkeypatch.undo()
        monkeypatch.setattr(device, "caps", replace(caps, kind="discrete"))

    routes_in_and_out_of_fences(op, given, device, programs, free, begin)


@pytest.mark.parametrize(
    ("route", "dtype"),
    [("flash", F32), ("coalesced", F32), ("strided", F32), ("flash", F16), ("coalesced", F16)],
)
def test_the_cache_on_the_device_changes_in_its_new_rows_only(
    route: str, dtype: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sdpa_kv` copies only the new rows back; a cache that stays on the device must be right as a whole."""
    inner, seen = device.run, dict[str, Any]()

    def run(program: Program) -> dict[str, Any]:
        seen.update(inner(program))
        return seen

    monkeypatch.setattr(device, "run", run)
    given = attend(1, 3, 3, 4, 5, dtype)
    before = {name: given[name].copy() for name in ("k_cache", "v_cache")}
    ops.sdpa_kv(**given, route=route, device=device)
    for name, new in (("k_cache", "k"), ("v_cache", "v")):
        wanted = before[name]
        after = seen[name].view(dtype).reshape(wanted.shape)
        np.testing.assert_array_equal(np.delete(after, 5, axis=0), np.delete(wanted, 5, axis=0))
        assert_close(after[5], given[new][0], "attention f16" if dtype is F16 else "exact", name)
