"""Sampling on a device for tests: records of outputs, a run of the op, and what may be drawn."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.compile import lower
from shaderlm.gpu import Device, DeviceCaps, Program
from shaderlm.graph import resolve
from shaderlm.graph.batch import make_batch
from shaderlm.graph.sampling import OUTPUT, argmax, finite, kept_weights, uniforms
from shaderlm.kernels import choose

F32 = NDArray[np.float32]
U32 = NDArray[np.uint32]
SETTINGS = ("temperature", "top_k", "top_p", "min_p")
Setting = tuple[float, int, float, float]


@cache
def _sorted_uniforms() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    u = uniforms(np.arange(1 << 18), 0)
    order = np.argsort(u)
    return u[order], order


def seed_for(u: float) -> int:
    """A seed whose number at position 0 is within 2e-5 of u."""
    values, seeds = _sorted_uniforms()
    i = min(int(np.searchsorted(values, u)), len(values) - 1)
    assert abs(values[i] - u) < 1e-4
    return int(seeds[i])


def records(settings: list[Setting], seeds: Any) -> NDArray[Any]:
    """Records of OUTPUT: row i of the batch and sequence slot i for the i-th."""
    outputs = np.zeros(len(settings), OUTPUT)
    for name, values in zip(SETTINGS, zip(*settings, strict=True), strict=True):
        outputs[name] = values
    outputs["row"] = outputs["slot"] = np.arange(len(settings))
    seeds = np.asarray(seeds, np.uint64)
    outputs["seed_low"], outputs["seed_high"] = seeds & 0xFFFFFFFF, seeds >> np.uint64(32)
    return outputs


def program_of(caps: DeviceCaps, logits: F32, outputs: NDArray[Any], batch: U32, **dims: Any) -> Program:
    """The op for these rows of logits; tokens start as 0."""
    slots = int(outputs["slot"].max()) + 1
    sizes = {"rows": len(logits), "width": logits.shape[1], "tokens": len(batch) - 1, "slots": slots, **dims}
    shape = resolve("sample", sizes)
    operands = {"logits": logits, "outputs": outputs, "batch": batch, "tokens": np.zeros(slots, np.uint32)}
    return lower(choose("sample", shape, caps, None), shape, caps, operands)


def sampled(device: Device, logits: F32, outputs: NDArray[Any], positions: Any = None, **dims: Any) -> U32:
    """The token of every output."""
    positions = np.zeros(len(logits), np.uint32) if positions is None else positions
    batch = make_batch(positions, positions, outputs=len(logits))
    raw = device.run(program_of(device.caps, logits, outputs, batch, **dims))
    tokens: U32 = raw["tokens"].view(np.uint32)[outputs["slot"]]
    return tokens


def drawn(device: Device, logits: F32, setting: Setting, us: list[float]) -> list[int]:
    """The tokens of one row of logits for numbers close to these."""
    outputs = records([setting] * len(us), [seed_for(u) for u in us])
    tokens: list[int] = sampled(device, np.repeat(logits[None], len(us), axis=0), outputs).tolist()
    return tokens


def assert_drawn(token: int, logits: F32, given: Any, u: float, label: str) -> None:
    """The token is kept, and its interval of the running sum holds u: both but for the rounding of f32 sums."""
    assert 0 <= token < logits.size, label
    temperature, top_k, top_p, min_p = (given[name].item() for name in SETTINGS)
    if temperature == 0 or finite(logits).max() == -np.inf:
        assert token == argmax(logits), label
        return
    wrong = []
    for slack in (0.0, 1e-5, -1e-5):  # the sum of a whole tie may hang on the rounding of p
        p = top_p if top_p == 1 else min(max(top_p + slack, 0.0), 1.0)
        weights = kept_weights(logits, temperature, top_k, p, min(min_p * (1 - slack), 1.0))
        before, total = weights[:token].sum(), weights.sum()
        after, due, near = before + weights[token], u * total, 1e-5 * total
        if weights[token] > 0 and before - near <= due <= after + near:
            return
        wrong.append(f"weight {weights[token]:g}, {before / total:.7f} … {after / total:.7f} of the total")
    raise AssertionError(f"{label}: drew {token} for u={u!r}; " + "; ".join(wrong))


def assert_all_drawn(tokens: U32, logits: F32, outputs: NDArray[Any], positions: Any, label: str) -> None:
    """`assert_drawn` for every row; row i of the batch stands at positions[i]."""
    seeds = outputs["seed_high"].astype(np.uint64) << np.uint64(32) | outputs["seed_low"]
    for token, x, given, u in zip(tokens, logits, outputs, uniforms(seeds, positions[outputs["row"]]), strict=True):
        assert_drawn(int(token), x, given, float(u), f"{label} [{x.size}] {given}")
