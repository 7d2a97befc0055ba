"""What `bench kernels` compares: for each result the baseline and the new route, on real models' shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..graph import resolve
from ..models.shapes import MODELS, ModelShape

PREFILL_LINEAR = 128  # rows: where S1 makes its claim
PREFILL = 512
DEPTH = 4096
BUSY_ROWS = 16384  # enough rows of a norm to fill any GPU


@dataclass(frozen=True)
class Part:
    """One routed op of a piece of work. `alias` renames buffers, so that parts can hand results on."""

    op: str
    route: str
    dims: Mapping[str, Any]
    alias: Mapping[str, str] = field(default_factory=dict)
    only: str = ""  # time just the dispatches of kernels whose name starts so


@dataclass(frozen=True)
class Comparison:
    """A baseline, a new route, and what was claimed for the step from one to the other."""

    result: str
    what: str
    model: str
    phase: str
    shape: str
    before: tuple[Part, ...]
    after: tuple[Part, ...]
    claimed: float | None
    nbytes: int  # least traffic: inputs read once, outputs written once
    flops: int


def _norms(model: ModelShape) -> Iterator[Comparison]:
    for phase, rows in (("decode", 1), ("prefill", PREFILL), ("busy", BUSY_ROWS)):
        width = model.hidden
        dims = resolve("rms_norm_mul", {"rows": rows, "width": width})
        shape, nbytes = f"{rows}×{width}", 4 * (2 * rows * width + width)
        pair = {route: (Part("rms_norm_mul", route, dims),) for route in ("scalar", "vec4")}
        yield Comparison(
            "S0",
            "rms_norm: scalar → vec4",
            model.name,
            phase,
            shape,
            pair["scalar"],
            pair["vec4"],
            1.33,
            nbytes,
            0,
        )
        unfused = (
            Part("rms_norm", "vec4", dims, {"out": "normed"}),
            Part("mul", "vec4", resolve("mul", {"count": rows * width, "period": width}), {"a": "normed"}),
        )
        yield Comparison(
            "S3",
            "rms_norm, mul → fused",
            model.name,
            phase,
            shape,
            unfused,
            pair["vec4"],
            1 / 0.57,
            nbytes,
            0,
        )


def _linear(K: int, N: int, M: int, before: str, after: str) -> Mapping[str, Any]:
    old = resolve("linear_q4gsw", {"M": M, "K": K, "N": N})
    # The prepacked routes keep scales as f16; the others read them as they come, f32.
    new = {**old, "scales": "f16"} if after.endswith("packed") or "shared" in after else old
    scale_bytes = 2 if new["scales"] == "f16" else 4
    return {
        "shape": f"{M}×{K}×{N}",
        "before": (Part("linear_q4gsw", before, {**old, "scales": "f32"}),),
        "after": (Part("linear_q4gsw", after, new),),
        "nbytes": N * (K // 2 + scale_bytes * (K // 32)) + 4 * M * (K + N),
        "flops": 2 * M * K * N,
    }


def _linears(model: ModelShape) -> Iterator[Comparison]:
    rows = PREFILL_LINEAR
    prefill = {name: model.matrices[name] for name in ("qkv", "gate/up", "down")}
    if model.name == "llama-3.2-1b":  # the shape at which the claim of S1 was made
        prefill["gate"] = (model.hidden, model.ffn)
    for name, (K, N) in prefill.items():
        parts = _linear(K, N, rows, "naive", "tile")
        yield Comparison("S1", f"{name}: naive → tile", model.name, "prefill", **parts, claimed=3.4)
        if name != "gate":
            parts = _linear(K, N, rows, "tile", "tile_shared")
            yield Comparison("S1+", f"{name}: tile → tile_shared", model.name, "prefill", **parts, claimed=1.75)
    for name, (K, N) in model.matrices.items():
        parts = _linear(K, N, 1, "tile", "gemv")
        yield Comparison("S1b", f"{name}: tile → gemv", model.name, "decode", **parts, claimed=None)
        parts = _linear(K, N, 1, "gemv_bytes", "gemv_packed")
        yield Comparison("S4", f"{name}: bytes → packed", model.name, "decode", **parts, claimed=1.96)


def _attention(model: ModelShape) -> Iterator[Comparison]:
    heads = {"Hq": model.Hq, "Hkv": model.Hkv, "D": model.D}
    S = PREFILL
    dims = resolve("sdpa_kv", {**heads, "S": S, "C": S})
    values = {route: (Part("sdpa_kv", route, dims, only="attention_values"),) for route in ("strided", "coalesced")}
    # Causal: on average half of the context is read.
    nbytes = 4 * (model.Hq * S * (S + 1) // 2 + S * model.Hkv * model.D + S * model.Hq * model.D)
    flops = 2 * model.Hq * S * (S + 1) // 2 * model.D
    shape = f"{model.Hq}/{model.Hkv}×{model.D} S{S}"
    yield Comparison(
        "S2", "A·V: strided → coalesced", model.name, "prefill", shape, values["strided"], values["coalesced"], 1.24,
        nbytes, flops,
    )  # fmt: skip
    dims = resolve("sdpa_kv", {**heads, "S": 1, "C": DEPTH, "pos": DEPTH - 1})
    whole = {route: (Part("sdpa_kv", route, dims),) for route in ("strided", "split")}
    nbytes = 4 * (2 * DEPTH * model.Hkv * model.D + 2 * model.Hq * model.D)
    shape = f"{model.Hq}/{model.Hkv}×{model.D} C{DEPTH}"
    yield Comparison(
        "S2+", "decode: strided → split", model.name, "decode", shape, whole["strided"], whole["split"], 2.78,
        nbytes, 4 * DEPTH * model.Hq * model.D,
    )  # fmt: skip


def comparisons(models: tuple[str, ...] = tuple(MODELS)) -> list[Comparison]:
    """Every comparison on these models' shapes, in the order of the results."""
    found = [
        comparison
        for name in models
        for family in (_norms, _linears, _attention)
        for comparison in family(MODELS[name])
    ]
    return sorted(found, key=lambda comparison: comparison.result)
