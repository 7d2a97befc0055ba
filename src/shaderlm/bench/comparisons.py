"""What `bench kernels` compares: two routes of an op, or an op and its fusion, on the shapes of real models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..compile.workload import RoutedOp, Workload
from ..formats.blocks import BLOCK
from ..graph import OPS, resolve
from ..graph.batch import CONTEXTS
from ..models.shapes import MODELS, ModelShape

PREFILL_LINEAR = 128  # rows
PREFILL = 512
SEQUENCES, FEW_SEQUENCES = 16, 4  # that decode together
DEPTH = 4096
BUSY_ROWS = 16384  # enough rows of a norm to fill any GPU


@dataclass(frozen=True)
class Comparison:
    """A baseline and a new route. `change` names both; `operand` says which matrix, where there are several."""

    op: str
    change: str
    operand: str
    model: str
    phase: str
    shape: str
    before: Workload
    after: Workload
    nbytes: int  # least traffic: inputs read once, outputs written once
    flops: int

    @property
    def what(self) -> str:
        """The change, with the operand in front of it."""
        return f"{self.operand}: {self.change}" if self.operand else self.change


def _routed(op: str, route: str, dims: Mapping[str, Any], only: str = "") -> Workload:
    """One op by a route."""
    return (RoutedOp(op, route, resolve(op, dict(dims)), only=only),)


def _norms(model: ModelShape) -> Iterator[Comparison]:
    for phase, rows in (("decode", 1), ("prefill", PREFILL), ("busy", BUSY_ROWS)):
        width = model.hidden
        dims = {"tokens": rows, "width": width}
        scalar, fused = (_routed("rms_norm_mul", route, dims) for route in ("scalar", "vec4"))
        unfused = (
            RoutedOp("rms_norm", "vec4", fused[0].dims, {"out": "normed"}),
            RoutedOp("mul", "vec4", resolve("mul", {"count": rows * width, "period": width}), {"a": "normed"}),
        )
        about = (model.name, phase, f"{rows}×{width}")
        nbytes = 4 * (2 * rows * width + width)
        yield Comparison("rms_norm", "scalar → vec4", "", *about, scalar, fused, nbytes, 0)
        yield Comparison("rms_norm", "norm, mul → fused", "", *about, unfused, fused, nbytes, 0)


def _product(model: ModelShape, operand: str, phase: str, M: int, before: str, after: str) -> Comparison:
    """Of the op that models have, Q4_0."""
    K, N = model.matrices[operand]
    dims = {"tokens": M, "K": K, "N": N, "format": "q4_0"}
    old, new = (_routed("linear", route, dims) for route in (before, after))
    nbytes = N * K // BLOCK * (BLOCK // 2 + 2) + 4 * M * (K + N)
    about = (operand, model.name, phase, f"{M}×{K}×{N}")
    return Comparison("linear", f"{before} → {after}", *about, old, new, nbytes, 2 * M * K * N)


def _products(model: ModelShape) -> Iterator[Comparison]:
    """Many rows: of prompts, and of sequences that decode together."""
    for operand in ("qkv", "gate/up", "down"):
        for phase, M in (("prefill", PREFILL), ("prefill", PREFILL_LINEAR), ("batch", SEQUENCES)):
            for after in ("matrix", "tile_int16"):
                yield _product(model, operand, phase, M, "tile_shared", after)
        yield _product(model, operand, "batch", FEW_SEQUENCES, "tile_int16", "gemv_rows_int16")


def _linear(model: ModelShape, operand: str, phase: str, M: int, before: str, after: str) -> Comparison:
    # The prepacked routes keep scales as f16; the others read them as they come, f32.
    K, N = model.matrices[operand]
    scales = "f16" if after.endswith("packed") or "shared" in after else "f32"
    dims = {"tokens": M, "K": K, "N": N}
    old = _routed("linear_q4gsw", before, {**dims, "scales": "f32"})
    new = _routed("linear_q4gsw", after, {**dims, "scales": scales})
    nbytes = N * (K // 2 + (2 if scales == "f16" else 4) * (K // 32)) + 4 * M * (K + N)
    about = (operand, model.name, phase, f"{M}×{K}×{N}")
    return Comparison("linear_q4gsw", f"{before} → {after}", *about, old, new, nbytes, 2 * M * K * N)


def _linears(model: ModelShape) -> Iterator[Comparison]:
    for operand in model.matrices:
        if operand in ("qkv", "gate/up", "down"):
            yield _linear(model, operand, "prefill", PREFILL_LINEAR, "naive", "tile")
            yield _linear(model, operand, "prefill", PREFILL_LINEAR, "tile", "tile_shared")
        yield _linear(model, operand, "decode", 1, "tile", "gemv")
        yield _linear(model, operand, "decode", 1, "gemv_bytes", "gemv_packed")


def _attention(model: ModelShape) -> Iterator[Comparison]:
    Hq, Hkv, D, S = model.Hq, model.Hkv, model.D, PREFILL
    heads, name = {"Hq": Hq, "Hkv": Hkv, "D": D}, f"{Hq}/{Hkv}×{D}"
    dims: dict[str, Any] = {**heads, "tokens": S, "keys": S}
    old, new = (_routed("attention", route, dims, "attention_values") for route in ("strided", "coalesced"))
    # Causal: on average half of the context is read.
    pairs = Hq * S * (S + 1) // 2
    about = ("strided → coalesced", "values", model.name, "prefill", f"{name} S{S}")
    yield Comparison("attention", *about, old, new, 4 * (pairs + S * Hkv * D + S * Hq * D), 2 * pairs * D)
    dims = {**heads, "tokens": 1, "keys": DEPTH}
    strided, flash = (_routed("attention", route, dims) for route in ("strided", "flash"))
    halves = _routed("attention", "flash", {**dims, "cache": "f16"})
    where = (model.name, "decode", f"{name} C{DEPTH}")
    cached, queries, flops = 2 * DEPTH * Hkv * D, 2 * Hq * D, 4 * DEPTH * Hq * D
    yield Comparison("attention", "strided → flash", "", *where, strided, flash, 4 * (cached + queries), flops)
    # A cache of f16 halves the bytes; where subgroups have one size, it also stays in registers.
    nbytes = 2 * cached + 4 * queries
    yield Comparison("attention", "cache f32 → f16", "flash", *where, flash, halves, nbytes, flops)
    # A prompt over a cache of f16, from the beginning and after many tokens. Its rows have no class.
    for keys in (S, S + DEPTH):
        dims = {**heads, "tokens": S, "keys": keys, "context": CONTEXTS[0], "cache": "f16"}
        flash, matrix = (_routed("attention", route, dims) for route in ("flash", "matrix"))
        seen = keys - S
        about = ("flash → matrix", "", model.name, "prefill", f"{name} S{S}" + (f" C{keys}" if seen else ""))
        flops = OPS["attention"].flops(flash[0].dims, seen)
        yield Comparison("attention", *about, flash, matrix, 2 * 2 * keys * Hkv * D + 2 * 4 * S * Hq * D, flops)


def _sampling(model: ModelShape) -> Iterator[Comparison]:
    """Not a newer route: what sampling costs beside the largest logit."""
    dims = {"rows": 1, "width": model.vocab}
    greedy = _routed("sample", "greedy", {**dims, "greedy": True})
    sampled = _routed("sample", "histogram", dims)
    about = ("greedy → top_k, top_p, min_p", "", model.name, "decode", f"1×{model.vocab}")
    yield Comparison("sample", *about, greedy, sampled, 4 * model.vocab, 0)


FAMILIES = {
    "rms_norm": _norms,
    "linear": _products,
    "linear_q4gsw": _linears,
    "attention": _attention,
    "sample": _sampling,
}


def comparisons(models: tuple[str, ...] = tuple(MODELS), ops: tuple[str, ...] = tuple(FAMILIES)) -> list[Comparison]:
    """Every comparison of these ops on these models' shapes; equal changes stand together."""
    every = [comparison for op in ops for name in models for comparison in FAMILIES[op](MODELS[name])]
    order = list(dict.fromkeys((comparison.op, comparison.change) for comparison in every))
    return sorted(every, key=lambda comparison: order.index((comparison.op, comparison.change)))
