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


def _norms(model: ModelShape) -> Iterator[Comparison]:
    for phase, rows in (("decode", 1), ("prefill", PREFILL), ("busy", BUSY_ROWS)):
        width = model.hidden
        dims = resolve("rms_norm_mul", {"tokens": rows, "width": width})
        fused = {route: (RoutedOp("rms_norm_mul", route, dims),) for route in ("scalar", "vec4")}
        unfused = (
            RoutedOp("rms_norm", "vec4", dims, {"out": "normed"}),
            RoutedOp("mul", "vec4", resolve("mul", {"count": rows * width, "period": width}), {"a": "normed"}),
        )
        about = (model.name, phase, f"{rows}×{width}")
        work = (4 * (2 * rows * width + width), 0)
        yield Comparison("rms_norm", "scalar → vec4", "", *about, fused["scalar"], fused["vec4"], *work)
        yield Comparison("rms_norm", "norm, mul → fused", "", *about, unfused, fused["vec4"], *work)


def _product(K: int, N: int, M: int, before: str, after: str) -> Mapping[str, Any]:
    """Of the op that models have, Q4_0."""
    dims = resolve("linear", {"tokens": M, "K": K, "N": N, "format": "q4_0"})
    routes = {route: (RoutedOp("linear", route, dims),) for route in (before, after)}
    return {
        "op": "linear",
        "change": f"{before} → {after}",
        "shape": f"{M}×{K}×{N}",
        "before": routes[before],
        "after": routes[after],
        "nbytes": N * K // BLOCK * (BLOCK // 2 + 2) + 4 * M * (K + N),
        "flops": 2 * M * K * N,
    }


def _products(model: ModelShape) -> Iterator[Comparison]:
    """Many rows: of prompts, and of sequences that decode together."""
    for name in ("qkv", "gate/up", "down"):
        K, N = model.matrices[name]
        about: dict[str, Any] = {"operand": name, "model": model.name}
        for phase, M in (("prefill", PREFILL), ("prefill", PREFILL_LINEAR), ("batch", SEQUENCES)):
            for after in ("matrix", "tile_int16"):
                yield Comparison(**about, phase=phase, **_product(K, N, M, "tile_shared", after))
        yield Comparison(**about, phase="batch", **_product(K, N, FEW_SEQUENCES, "tile_int16", "gemv_rows_int16"))


def _linear(K: int, N: int, M: int, before: str, after: str) -> Mapping[str, Any]:
    old = resolve("linear_q4gsw", {"tokens": M, "K": K, "N": N})
    # The prepacked routes keep scales as f16; the others read them as they come, f32.
    new = {**old, "scales": "f16"} if after.endswith("packed") or "shared" in after else old
    scale_bytes = 2 if new["scales"] == "f16" else 4
    return {
        "op": "linear_q4gsw",
        "change": f"{before} → {after}",
        "shape": f"{M}×{K}×{N}",
        "before": (RoutedOp("linear_q4gsw", before, {**old, "scales": "f32"}),),
        "after": (RoutedOp("linear_q4gsw", after, new),),
        "nbytes": N * (K // 2 + scale_bytes * (K // 32)) + 4 * M * (K + N),
        "flops": 2 * M * K * N,
    }


def _linears(model: ModelShape) -> Iterator[Comparison]:
    for name, (K, N) in model.matrices.items():
        about: dict[str, Any] = {"operand": name, "model": model.name}
        if name in ("qkv", "gate/up", "down"):
            yield Comparison(**about, phase="prefill", **_linear(K, N, PREFILL_LINEAR, "naive", "tile"))
            yield Comparison(**about, phase="prefill", **_linear(K, N, PREFILL_LINEAR, "tile", "tile_shared"))
        yield Comparison(**about, phase="decode", **_linear(K, N, 1, "tile", "gemv"))
        yield Comparison(**about, phase="decode", **_linear(K, N, 1, "gemv_bytes", "gemv_packed"))


def _attention(model: ModelShape) -> Iterator[Comparison]:
    heads = {"Hq": model.Hq, "Hkv": model.Hkv, "D": model.D}
    S = PREFILL
    dims = resolve("attention", {**heads, "tokens": S, "keys": S})
    values = {
        route: (RoutedOp("attention", route, dims, only="attention_values"),) for route in ("strided", "coalesced")
    }
    # Causal: on average half of the context is read.
    nbytes = 4 * (model.Hq * S * (S + 1) // 2 + S * model.Hkv * model.D + S * model.Hq * model.D)
    flops = 2 * model.Hq * S * (S + 1) // 2 * model.D
    about = (model.name, "prefill", f"{model.Hq}/{model.Hkv}×{model.D} S{S}")
    pair = (values["strided"], values["coalesced"])
    yield Comparison("attention", "strided → coalesced", "values", *about, *pair, nbytes, flops)
    dims = resolve("attention", {**heads, "tokens": 1, "keys": DEPTH})
    whole = {route: (RoutedOp("attention", route, dims),) for route in ("strided", "flash")}
    nbytes = 4 * (2 * DEPTH * model.Hkv * model.D + 2 * model.Hq * model.D)
    about = (model.name, "decode", f"{model.Hq}/{model.Hkv}×{model.D} C{DEPTH}")
    flops = 4 * DEPTH * model.Hq * model.D
    yield Comparison("attention", "strided → flash", "", *about, whole["strided"], whole["flash"], nbytes, flops)
    # A cache of f16 halves the bytes; where subgroups have one size, it also stays in registers.
    halves = (RoutedOp("attention", "flash", {**dims, "cache": "f16"}),)
    nbytes = 2 * 2 * DEPTH * model.Hkv * model.D + 4 * 2 * model.Hq * model.D
    yield Comparison("attention", "cache f32 → f16", "flash", *about, whole["flash"], halves, nbytes, flops)
    yield from _prompts(model)


def _prompts(model: ModelShape) -> Iterator[Comparison]:
    """Attention of a prompt over a cache of f16, from the beginning and after many tokens. Its rows have no class."""
    heads = {"Hq": model.Hq, "Hkv": model.Hkv, "D": model.D, "cache": "f16"}
    for keys in (PREFILL, PREFILL + DEPTH):
        dims = resolve("attention", {**heads, "tokens": PREFILL, "keys": keys, "context": CONTEXTS[0]})
        flash, matrix = (RoutedOp("attention", route, dims) for route in ("flash", "matrix"))
        seen = keys - PREFILL
        shape = f"{model.Hq}/{model.Hkv}×{model.D} S{PREFILL}" + (f" C{keys}" if seen else "")
        nbytes = 2 * 2 * keys * model.Hkv * model.D + 2 * 4 * PREFILL * model.Hq * model.D
        flops = OPS["attention"].flops(dims, seen)
        yield Comparison(
            "attention", "flash → matrix", "", model.name, "prefill", shape, (flash,), (matrix,), nbytes, flops
        )


def _sampling(model: ModelShape) -> Iterator[Comparison]:
    """Not a newer route: what sampling costs beside the largest logit."""
    dims = {"rows": 1, "width": model.vocab}
    greedy = (RoutedOp("sample", "greedy", resolve("sample", {**dims, "greedy": True})),)
    sampled = (RoutedOp("sample", "histogram", resolve("sample", dims)),)
    about = (model.name, "decode", f"1×{model.vocab}")
    yield Comparison("sample", "greedy → top_k, top_p, min_p", "", *about, greedy, sampled, 4 * model.vocab, 0)


FAMILIES = {
    "rms_norm": _norms,
    "linear": _products,
    "linear_q4gsw": _linears,
    "attention": _attention,
    "sample": _sampling,
}


def comparisons(models: tuple[str, ...] = tuple(MODELS), ops: tuple[str, ...] = tuple(FAMILIES)) -> list[Comparison]:
    """Every comparison of these ops on these models' shapes; equal changes stand together."""
    found = [comparison for op in ops for name in models for comparison in FAMILIES[op](MODELS[name])]
    order = list(dict.fromkeys((comparison.op, comparison.change) for comparison in found))
    return sorted(found, key=lambda comparison: order.index((comparison.op, comparison.change)))
