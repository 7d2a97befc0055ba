"""Made-up profiles, plausible in their proportions: what the page of a profile is tested with."""

from __future__ import annotations

import random
from typing import Any

BANDWIDTH, PEAK, LAUNCH_US, TIMESTAMP_US = 4.25e12, 5.9e13, 1.95, 5.0
WIDTH, HIDDEN, VOCAB = 2048, 8192, 128_256
Q4 = 0.5625  # bytes per weight

# op, route, kernel, operands, weights (K × N) or None, share of the roofline that it reaches
_DECODE = (
    ("rms_norm_mul", "vec4", "rms_norm_mul_vec4", None, 0.6),
    ("linear", "gemv", "linear_q4_gemv", WIDTH * 3072, 0.62),
    ("rope_kv_write", "quads", "rope_kv_write", None, 0.6),
    ("attention", "flash", "attention_split", None, 0.3),
    ("attention", "flash", "attention_merge", None, 0.3),
    ("linear_add", "gemv", "linear_q4_gemv", WIDTH * WIDTH, 0.6),
    ("rms_norm_mul", "vec4", "rms_norm_mul_vec4", None, 0.6),
    ("linear_silu_mul", "gemv", "linear_q4_gemv_pair", WIDTH * 2 * HIDDEN, 0.74),
    ("linear_add", "gemv", "linear_q4_gemv", HIDDEN * WIDTH, 0.7),
)
_PREFILL = (
    ("rms_norm_mul", "vec4", "rms_norm_mul_vec4", None, 0.6),
    ("linear", "tile_shared", "linear_tile_shared", WIDTH * 3072, 0.52),
    ("rope_kv_write", "quads", "rope_kv_write", None, 0.6),
    ("attention", "coalesced", "attention_scores", None, 0.3),
    ("attention", "coalesced", "softmax_causal", None, 0.4),
    ("attention", "coalesced", "attention_values_coalesced", None, 0.25),
    ("linear_add", "tile_shared", "linear_tile_shared", WIDTH * WIDTH, 0.5),
    ("rms_norm_mul", "vec4", "rms_norm_mul_vec4", None, 0.6),
    ("linear_silu_mul", "tile_shared", "linear_tile_shared_pair", WIDTH * 2 * HIDDEN, 0.61),
    ("linear_add", "tile_shared", "linear_tile_shared", HIDDEN * WIDTH, 0.55),
)


def _dispatch(layer: str, row: tuple[Any, ...], rows: int, depth: int, noise: random.Random) -> dict[str, Any]:
    op, route, kernel, weights, reached = row
    if weights:
        size, flops = int(weights * Q4 + 8 * rows * weights**0.5), 2 * rows * weights
    elif op == "attention":
        size, flops = 2 * (rows + depth) * 512 * 4 + rows * WIDTH * 4, 4 * rows * (depth + rows) * WIDTH
    else:
        size, flops = 3 * rows * WIDTH * 4, 4 * rows * WIDTH
    best = 1e6 * max(size / BANDWIDTH, flops / PEAK)
    return {
        "layer": layer, "op": op, "route": route, "kernel": kernel, "workgroups": max(1, size // 18_000),
        "operands": ["x", "weight"] if weights else ["x"],
        "us": round(LAUNCH_US + best / reached * noise.uniform(0.97, 1.05), 3), "bytes": size, "flops": flops,
        "matrix_units": False,
    }  # fmt: skip


def _dispatches(rows: int, depth: int, layers: int) -> list[dict[str, Any]]:
    """One step. The embedding counts no FLOP and the choice no bytes, as bookkeeping kernels may."""
    noise = random.Random(7)
    table = _DECODE if rows == 1 else _PREFILL
    ends = {"route": "rows", "workgroups": 8, "operands": ["ids", "token_embd.weight"], "matrix_units": False}
    steps = [
        {"layer": "embedding", "op": "embedding", "kernel": "embedding", **ends, "us": 2.4, "bytes": 5000, "flops": 0}
    ]
    steps += [_dispatch(f"blk.{i}", row, rows, depth, noise) for i in range(layers) for row in table]
    steps.append(_dispatch("output", _DECODE[0], 1, depth, noise))
    steps.append(_dispatch("output", ("linear", "gemv", "linear_q4_gemv", WIDTH * VOCAB, 0.8), 1, depth, noise))
    steps.append(
        {"layer": "choose", "op": "argmax", "kernel": "argmax", **ends, "us": 4.6, "bytes": 0, "flops": 0},
    )
    return steps


def _timeline(host: dict[str, float], gpu: float, gap: float) -> list[dict[str, Any]]:
    """Four steps, the host one ahead of the GPU only as far as it must wait for the token."""
    steps, at = [], 0.0
    for _ in range(4):
        spans, begin = [], at
        for name, took in host.items():
            spans.append([name, at, at + took])
            at += took
        start = begin + gap
        steps.append({"host": spans, "gpu": [start, start + gpu]})
    return steps


def phase(name: str = "decode", layers: int = 16, timestamps: bool = True) -> dict[str, Any]:
    """One phase of a model of 1B parameters, with as many of its layers as are asked for."""
    rows, depth, steps = (1, 128, 32) if name == "decode" else (512, 0, 4)
    dispatches = _dispatches(rows, depth, layers)
    gpu = sum(d["us"] for d in dispatches)
    gap = round(38 + 0.03 * gpu, 1)
    wall = round(gpu + gap + 6, 1)
    if not timestamps:  # the wall clock adds a submission to each
        dispatches = [d | {"us": d["us"] + 46} for d in dispatches]
    stamped = sum(d["us"] for d in dispatches) + (TIMESTAMP_US * len(dispatches) if timestamps else 0)
    host = {"prepare": 18.0, "encode": 0.9 * len(dispatches), "finish": 1.2 * len(dispatches), "submit": 34.0}
    host["wait"] = round(max(5.0, wall - sum(host.values())), 1)
    return {
        "name": name, "rows": rows, "depth": depth, "steps": steps, "wall_us": wall, "traced_wall_us": wall + 12,
        "gpu_us": gpu if timestamps else None, "gap_us": gap if timestamps else None,
        "timestamped_us": stamped, "scale": 0.98 if timestamps else 1.0,
        "host_us": host, "dispatches": dispatches,
        "timeline": _timeline(host, gpu, gap + 6) if timestamps else [
            {"host": step["host"], "gpu": None} for step in _timeline(host, gpu, gap)
        ],
        "ahead_us": {"encode": 190.5, "finish": 230.25} if name == "decode" else {},
    }  # fmt: skip


def profile(*phases: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """A profile of these phases (by default prefill and decode), with some fields changed."""
    return {
        "kind": "shaderlm-profile", "version": 3, "model": "llama-3.2-1b q4_0", "device": "NVIDIA H200",
        "backend": "Vulkan", "driver": "570.133.20", "software": False, "package": "0.2.0", "commit": "abc1234",
        "date": "2026-11-15T09:00:00+00:00", "clock": "timestamps in the pass",
        "command": "shaderlm profile -m llama-3.2-1b-q4_0.gguf --html report.html",
        "notes": ["Made-up figures: this profile was not measured."],
        "roofline": {"bytes_per_second": BANDWIDTH, "flops_per_second": PEAK,
                     "dispatch_us": LAUNCH_US, "timestamp_us": TIMESTAMP_US,
                     "matrix_flops_per_second": None},
        "phases": list(phases) or [phase("prefill"), phase("decode")],
    } | changed  # fmt: skip


def slowed(given: dict[str, Any], times: int) -> dict[str, Any]:
    """The same profile with every time multiplied."""

    def of_phase(phase: dict[str, Any]) -> dict[str, Any]:
        us = {key: phase[key] * times for key in phase if key.endswith("_us") and isinstance(phase[key], float)}
        parts = {key: {name: us * times for name, us in phase[key].items()} for key in ("host_us", "ahead_us")}
        dispatches = [each | {"us": each["us"] * times} for each in phase["dispatches"]]
        timeline = [
            {"host": [[name, a * times, b * times] for name, a, b in step["host"]],
             "gpu": step["gpu"] and [at * times for at in step["gpu"]]}
            for step in phase["timeline"]
        ]  # fmt: skip
        return phase | us | parts | {"dispatches": dispatches, "timeline": timeline}

    return given | {"phases": [of_phase(phase) for phase in given["phases"]]}
