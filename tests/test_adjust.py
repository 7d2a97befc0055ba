"""Penalties, biases, masks and log-probabilities on the device: what the engine computes on the host, for every row."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shaderlm.compile import lower, run_op
from shaderlm.engine.sampling import SamplingParams
from shaderlm.gpu import WEBGPU_DEFAULT, Device
from shaderlm.graph import resolve, sampling
from shaderlm.graph.batch import NONE, contiguous_batch, make_batch
from shaderlm.graph.sampling import BIAS, MAX_LOGPROBS, OUTPUT
from shaderlm.kernels import choose

from .compare import assert_close
from .host_sampling import adjust, log_probabilities
from .index_guard import run_guarded
from .sampled import F32, records
from .sampling_operands import MAKERS, numbers
from .test_bounds import TAIL, fenced
from .test_decode_risks import unchecked  # noqa: F401  (a fixture)
from .test_properties import SEEDS, runs

OPS = ("adjust_logits", "logprobs")


def adjusted(device: Device, logits: F32, given: Any, counts: Any = None, biases: Any = None, masks: Any = None) -> F32:
    """Rows of logits after their adjustments; row i is of sequence slot i."""
    rows, width = logits.shape
    given = given.copy()
    given["history"] = np.arange(rows)
    operands = {
        "logits": logits,
        "adjustments": given,
        "batch": contiguous_batch(0, rows, outputs=rows),
        "counts": np.zeros((rows, width), np.uint32) if counts is None else counts,
        "biases": np.zeros(1, BIAS) if biases is None else biases,
        "masks": np.zeros((1, -(-width // 32)), np.uint32) if masks is None else masks,
    }
    sizes = {"biases": len(operands["biases"]), "masks": len(operands["masks"])}
    dims = resolve("adjust_logits", {"rows": rows, "width": width, **sizes})
    raw = run_op(device, "adjust_logits", dims, operands, None)["out"]
    out: F32 = raw.view(np.float32)[: logits.size].reshape(logits.shape)
    return out


def reported(device: Device, logits: F32, tokens: list[int], counts: list[int]) -> NDArray[np.float64]:
    """(token, log-probability) of the chosen and of the most likely tokens, [rows, 1 + 20, 2]; zeros if not wanted."""
    rows, width = logits.shape
    outputs, given = np.zeros(rows, OUTPUT), sampling.adjustments(rows)
    outputs["slot"], given["logprobs"] = np.arange(rows), counts
    batch = contiguous_batch(0, rows, outputs=rows)
    operands = {"logits": logits, "outputs": outputs, "adjustments": given, "batch": batch}
    operands["tokens"] = np.array(tokens, np.uint32)
    dims = resolve("logprobs", {"rows": rows, "width": width})
    return numbers(run_op(device, "logprobs", dims, operands, None)["out"], rows)


# Adjusted logits ---------------------------------------------------------------------------------------------

PARAMS = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25),
    SamplingParams(logit_bias={0: 3.0, 4: -math.inf, 20: -100.0, 36: 100.0}),
    SamplingParams(
        repetition_penalty=0.5, presence_penalty=-1.0, frequency_penalty=0.1, logit_bias={1: 1.5, 2: -math.inf, 9: -2.0}
    ),
)


def test_rows_are_adjusted_as_the_engine_does(device: Device) -> None:
    """Each row by its own parameters and history, all in one step."""
    rng = np.random.default_rng(5)
    width, rows = 37, len(PARAMS)
    logits = rng.standard_normal((rows, width)).astype(np.float32) * 4
    logits[:, 7] = -np.inf
    logits[:, 8] = np.inf
    histories = [Counter(rng.integers(0, 12, 40).tolist()) for _ in PARAMS]
    given, pairs = sampling.adjustments(rows), list[tuple[int, float]]()
    counts = np.zeros((rows, width), np.uint32)
    for record, params, history, row in zip(given, PARAMS, histories, counts, strict=True):
        record["repetition"] = params.repetition_penalty
        record["presence"], record["frequency"] = params.presence_penalty, params.frequency_penalty
        record["bias_first"], record["bias_count"] = len(pairs), len(params.logit_bias)
        pairs += params.logit_bias.items()
        row[list(history)] = list(history.values())
    biases = np.array(pairs, BIAS)
    expected = np.stack([adjust(x, p, h) for x, p, h in zip(logits, PARAMS, histories, strict=True)])
    assert_close(adjusted(device, logits, given, counts, biases), expected, "pointwise", "on the device")
    given["history"] = np.arange(rows)
    again = sampling.adjust_logits(logits, given, counts, biases, np.zeros((1, 2), np.uint32))
    assert_close(again, expected, "pointwise", "by the formula, whose penalties are f32")


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 2047, 2050])
def test_a_mask_leaves_what_it_allows(width: int, device: Device) -> None:
    """Bit i of a row of words, the lowest first, is token i. A token that is not allowed stays so with any bias."""
    rng = np.random.default_rng(width)
    logits = rng.standard_normal((3, width)).astype(np.float32)
    logits[:, width // 2] = np.nan
    allowed = rng.random((2, width)) < 0.5
    padded = np.zeros((2, -(-width // 32) * 32), bool)
    padded[:, :width] = allowed
    masks = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    given = sampling.adjustments(3)
    given["mask"] = [1, NONE, 0]
    given["bias_count"][2] = width
    biases = np.zeros(width, BIAS)
    biases["token"], biases["bias"] = np.arange(width), 5
    found = adjusted(device, logits, given, None, biases, masks)
    np.testing.assert_array_equal(found[0], np.where(allowed[1], logits[0], -np.inf))
    np.testing.assert_array_equal(found[1], logits[1])
    np.testing.assert_array_equal(found[2], np.where(allowed[0], logits[2] + np.float32(5), -np.inf))


@runs(20)
@given(
    rows=st.integers(1, 6),
    width=st.one_of(st.integers(1, 70), st.integers(2040, 2060), st.integers(4000, 4200)),
    biases=st.integers(1, 40),
    seed=SEEDS,
)
def test_random_adjustments_and_log_probabilities(
    device: Device, rows: int, width: int, biases: int, seed: int
) -> None:
    sizes = {"rows": rows, "width": width, "slots": rows + seed % 3, "tokens": rows + seed % 2}
    for op, more in (("adjust_logits", {"biases": min(biases, width), "masks": 2}), ("logprobs", {})):
        dims = resolve(op, {**sizes, **more})
        operands, expected = MAKERS[op](np.random.default_rng(seed), dims)
        raw = run_op(device, op, dims, operands, None)["out"]
        wanted = expected["out"]
        assert wanted is not None
        actual = numbers(raw, rows) if op == "logprobs" else raw.view(np.float32)[: rows * width].reshape(rows, width)
        assert_close(actual, wanted, "pointwise", f"{op} {dims}")


# Tokens that are counted -------------------------------------------------------------------------------------


@pytest.mark.parametrize("greedy", [False, True])
def test_counts_follow_what_is_sampled(greedy: bool, device: Device) -> None:
    """Two sequences at once, with the counts of their prompts from the host; a third stays as it is."""
    width, prompts = 50, {2: [3, 3, 7], 0: [49, 3], 1: [8]}
    history = {slot: Counter(ids) for slot, ids in prompts.items()}
    counts = np.stack([np.bincount(prompts[slot], minlength=width) for slot in range(3)]).astype(np.uint32)
    outputs = records([(1.0, 0, 1.0, 0.0)] * 2, [5, 6])
    outputs["slot"] = [2, 0]
    dims = resolve("sample", {"rows": 2, "width": width, "slots": 3, "greedy": greedy, "counted": True})
    for position in range(4):
        logits = np.random.default_rng(position).standard_normal((2, width)).astype(np.float32)
        batch = make_batch([position, position], [0, 1], outputs=2)
        operands = {"logits": logits, "outputs": outputs, "batch": batch, "counts": counts}
        raw = run_op(device, "sample", dims, {**operands, "tokens": np.zeros(3, np.uint32)}, None)
        counts = raw["counts"].view(np.uint32)[: 3 * width].reshape(3, width)
        for slot in (2, 0):
            history[slot][int(raw["tokens"].view(np.uint32)[slot])] += 1
    for slot, expected in history.items():
        found = {int(token): int(counts[slot, token]) for token in np.flatnonzero(counts[slot])}
        assert found == expected, f"slot {slot}"


# Log-probabilities -------------------------------------------------------------------------------------------


def test_log_probabilities_are_the_engine_s(device: Device) -> None:
    rng = np.random.default_rng(2)
    width = 3000
    logits = np.round(rng.standard_normal((7, width)) * 3, 1).astype(np.float32)  # ties
    logits[1, :] = np.nan
    logits[2, :2500] = -np.inf
    logits[3, [5, 2900, 17]] = np.inf, np.nan, np.finfo(np.float32).max
    logits[4] *= 1e4
    tokens, counts = [0, 3, 2700, 2900, 5, 6, 7], [20, 3, 7, 20, 20, 0, NONE]
    found = reported(device, logits, tokens, counts)
    for r in range(6):
        chosen, best = log_probabilities(logits[r], tokens[r], counts[r])
        assert_close(found[r, 0], [tokens[r], chosen], "pointwise", f"row {r}, chosen")
        assert_close(found[r, 1 : 1 + len(best)], np.array(best).reshape(-1, 2), "pointwise", f"row {r}")
        assert not found[r, 1 + len(best) :].any()
    assert not found[6].any(), "nothing was wanted"


def test_a_vocabulary_smaller_than_what_is_wanted(device: Device) -> None:
    logits = np.array([[1, 3, 2], [-np.inf, 0, np.nan]], np.float32)
    found = reported(device, logits, [0, 2], [MAX_LOGPROBS, MAX_LOGPROBS])
    assert found[0, 1:4, 0].tolist() == [1, 2, 0]
    assert np.exp(found[0, 1:4, 1]).sum() == pytest.approx(1, abs=1e-5)
    assert found[1, :4].tolist() == [[2, -math.inf], [1, 0], [0, -math.inf], [2, -math.inf]]
    assert not found[:, 4:].any()


# Memory and limits -------------------------------------------------------------------------------------------

SIZES: dict[str, list[dict[str, int]]] = {
    "adjust_logits": [{"rows": 1, "width": 1}, {"rows": 5, "width": 2053, "slots": 6, "biases": 7, "masks": 3}],
    "logprobs": [{"rows": 1, "width": 1}, {"rows": 6, "width": 2053}],
}
MEMORY = [(op, sizes) for op in OPS for sizes in SIZES[op]]


@pytest.mark.parametrize(("op", "sizes"), MEMORY, ids=str)
def test_nothing_outside_the_buffers_matters(op: str, sizes: dict[str, int], device: Device) -> None:
    """Every buffer is followed by NaN, and what is kept between dispatches starts as NaN."""
    dims = resolve(op, sizes)
    operands = MAKERS[op](np.random.default_rng(4), dims)[0]
    program = lower(choose(op, dims, device.caps, None), dims, device.caps, operands)
    plain = device.run(program)
    results = {
        name: size for name, size in program.buffers.items() if name in program.outputs and isinstance(size, int)
    }
    contents = {**program.buffers, **{name: np.zeros(size, np.uint8) for name, size in results.items()}}
    buffers = {name: fenced(each, "params" in name) for name, each in contents.items()}
    names = tuple(name for name in buffers if "params" not in name)
    found = device.run(replace(program, buffers=buffers, outputs=names))
    for name, raw in found.items():
        assert (raw[-TAIL:] == 0xFF).all(), f"written past the end of {name}"
    for name in program.outputs:
        np.testing.assert_array_equal(found[name][:-TAIL], plain[name][: len(found[name]) - TAIL])


@pytest.mark.full
@pytest.mark.parametrize(("op", "sizes"), MEMORY, ids=str)
def test_every_index_is_in_range(op: str, sizes: dict[str, int], unchecked: Device) -> None:  # noqa: F811
    dims = resolve(op, sizes)
    operands = MAKERS[op](np.random.default_rng(4), dims)[0]
    program = lower(choose(op, dims, unchecked.caps, None), dims, unchecked.caps, operands)
    assert run_guarded(unchecked, program)[1] == []


def test_all_kernels_fit_the_least_device() -> None:
    for op in OPS:
        assert choose(op, resolve(op, {"rows": 64, "width": 262_144}), WEBGPU_DEFAULT, None)
