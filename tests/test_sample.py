"""The kernels of sampling: they draw what the formula keeps, every row by its own settings, and end the step."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shaderlm.compile import lower, run_op
from shaderlm.errors import RouteError
from shaderlm.gpu import WEBGPU_DEFAULT, Device, Program
from shaderlm.graph import resolve, sampling
from shaderlm.graph.batch import LAST, NONE, PAGE, RUN, contiguous_batch, make_batch
from shaderlm.graph.sampling import OUTPUT, argmax, draw
from shaderlm.kernels import choose, read

from .index_guard import run_guarded
from .sampled import F32, Setting, assert_all_drawn, drawn, program_of, records, sampled, seed_for
from .sweeps import with_all
from .test_bounds import TAIL, fenced
from .test_decode_risks import unchecked  # noqa: F401  (a fixture)
from .test_properties import SEEDS, runs

TEMPERATURES = (0.0, 1e-8, 0.3, 0.7, 1.0, 1.5, 5.0, 1e6)
TOP_PS = (1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.95, 0.999999)
MIN_PS = (0.0, 0.0, 1e-30, 0.02, 0.1, 0.5, 1.0)
SETTINGS: list[Setting] = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.3, 3, 1.0, 0.0),
    (0.8, 40, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (3.0, 0, 0.35, 0.0),
    (0.7, 0, 1.0, 0.05),
    (1.5, 50, 0.95, 0.02),
    (1e-8, 1000, 0.999999, 1e-30),
    (1e6, 0, 0.5, 1.0),
    (1.0, 700, 0.5, 0.0),
]


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def _masked(rng: np.random.Generator, width: int) -> F32:
    logits = (rng.standard_normal(width) * 5).astype(np.float32)
    logits[rng.random(width) < 0.9] = -np.inf
    logits[rng.integers(width)] = 3
    return logits


def _outliers(rng: np.random.Generator, width: int) -> F32:
    logits = np.full(width, np.finfo(np.float32).min)
    logits[rng.integers(0, width, 9)] = rng.standard_normal(9)
    return logits


LOGITS: dict[str, Callable[[np.random.Generator, int], F32]] = {
    "normal": lambda rng, width: (rng.standard_normal(width) * 3).astype(np.float32),
    "narrow": lambda rng, width: (rng.standard_normal(width) * 1e-3).astype(np.float32),
    "peaked": lambda rng, width: (rng.standard_normal(width) - 10 * np.log1p(np.arange(width))).astype(np.float32),
    "ties": lambda rng, width: np.round(rng.standard_normal(width) * 2).astype(np.float32),
    "two values": lambda rng, width: rng.choice(f32(1, 2), width),
    "equal": lambda rng, width: np.full(width, -1.5, np.float32),
    "zeros and denormals": lambda rng, width: rng.choice(f32(-0.0, 0.0, -1e-40, 1e-40, 2e-45, -3), width),
    "masked": _masked,
    "outliers": _outliers,
    "huge": lambda rng, width: rng.uniform(-1e4, 1e4, width).astype(np.float32),
    "negative": lambda rng, width: (rng.standard_normal(width) - 1e4).astype(np.float32),
    "extremes": lambda rng, width: rng.choice(f32(np.nan, np.inf, -np.inf, 3.4028235e38, -3.4028235e38, 0), width),
    "any bits": lambda rng, width: rng.integers(0, 1 << 32, width, np.uint32).view(np.float32),
    "NaN": lambda rng, width: np.full(width, np.nan, np.float32),
    "sorted": lambda rng, width: np.sort((rng.standard_normal(width) * 3).astype(np.float32))[::-1].copy(),
}


# What is drawn ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, with_all(2), 63, 256, 1000, 2049, 128256])
def test_every_row_draws_what_the_formula_keeps(width: int, device: Device, plain_device: Device) -> None:
    """Every kind of logits with every setting; all rows at once, each at another position."""
    rng = np.random.default_rng(width)
    settings, kinds = SETTINGS, list(LOGITS)
    if width > 10_000:
        settings, kinds = SETTINGS[width % 4 :: 4], kinds[width % 2 :: 2]
    pairs = list(itertools.product(kinds, settings))
    for first in range(0, len(pairs), 48):
        part = pairs[first : first + 48]
        logits = np.stack([LOGITS[kind](rng, width) for kind, _ in part])
        outputs = records([setting for _, setting in part], rng.integers(0, 1 << 64, len(part), np.uint64))
        outputs["row"], outputs["slot"] = rng.permutation(len(part)), rng.permutation(len(part))
        positions = rng.integers(0, 1 << 17, len(part))
        for on in (device, plain_device) if width in (63, 1000) else (device,):
            tokens = sampled(on, logits, outputs, positions)
            assert_all_drawn(tokens, logits, outputs, positions, str([kind for kind, _ in part]))


@runs(6)
@given(
    kinds=st.lists(st.sampled_from(list(LOGITS)), min_size=1, max_size=6),
    width=st.one_of(st.integers(1, 40), st.integers(1, 1100), st.integers(2040, 2060), st.integers(4000, 6200)),
    seed=SEEDS,
)
@example(kinds=["equal", "two values", "narrow"], width=6143, seed=1)
def test_a_batch_of_rows_equals_its_rows_alone(device: Device, kinds: list[str], width: int, seed: int) -> None:
    """Random settings for every row. A row alone runs other kernels than a batch does: constants are specialised."""
    rng = np.random.default_rng(seed)
    rows = len(kinds)
    logits = np.stack([LOGITS[kind](rng, width) for kind in kinds])
    top_ks = (0, 0, 1, 2, 5, 40, 1000, width, width // 2, max(1, width - 1), 0xFFFFFFFF)
    choices = (TEMPERATURES, top_ks, TOP_PS, MIN_PS)
    settings: list[Any] = [tuple(rng.choice(values).item() for values in choices) for _ in kinds]
    outputs = records(settings, rng.integers(0, 1 << 64, rows, np.uint64))
    outputs["row"] = rng.permutation(rows)
    positions = rng.integers(0, 1 << 17, rows)
    tokens = sampled(device, logits, outputs, positions)
    assert_all_drawn(tokens, logits, outputs, positions, str(kinds))
    greedy = sampled(device, logits, outputs, positions, greedy=True)
    np.testing.assert_array_equal(greedy, argmax(logits))
    gpu = replace(device.caps, kind="discrete")
    for r in range(rows):
        alone = outputs[r : r + 1].copy()
        alone["row"] = alone["slot"] = 0
        batch = make_batch([positions[outputs["row"][r]]], [0], outputs=1)
        for caps in (device.caps, gpu) if r == 0 and seed == 1 else (device.caps,):  # compiles anew for every width
            one = program_of(caps, logits[r : r + 1], alone, batch)
            assert device.run(one)["tokens"].view(np.uint32)[0] == tokens[r], f"row {r}, {kinds[r]} {alone}"


def test_rows_that_pad_the_shape_are_left_alone(device: Device) -> None:
    logits = np.zeros((5, 70), np.float32)
    logits[np.arange(5), [3, 1, 4, 1, 5]] = 50
    for greedy in (False, True):
        outputs = records([(1.0, 5, 0.9, 0.0)] * 5, range(5))
        batch = make_batch(np.arange(5), np.arange(5), outputs=3)
        raw = device.run(program_of(device.caps, logits, outputs, batch, greedy=greedy, advance=True))
        assert raw["tokens"].view(np.uint32)[:5].tolist() == [3, 1, 4, 0, 0]
        after = raw["batch"].view(np.uint32).reshape(-1, 4)
        np.testing.assert_array_equal(after[[0, 4, 5]], batch[[0, 4, 5]])
        assert after[1:4, 0].tolist() == [LAST, LAST | 1, LAST | 2]


def test_the_widest_vocabulary(device: Device) -> None:
    logits = np.random.default_rng(1).standard_normal((1, 262_144)).astype(np.float32)
    for u, setting in itertools.product((1e-6, 0.25, 0.999999), (SETTINGS[1], SETTINGS[7])):
        outputs = records([setting], [seed_for(u)])
        assert_all_drawn(sampled(device, logits, outputs), logits, outputs, np.zeros(1, np.uint32), "normal")


def test_a_width_beyond_exact_counts_is_refused() -> None:
    with pytest.raises(RouteError, match="width must be at most 16,777,216, width is 16,777,217"):
        choose("sample", resolve("sample", {"rows": 1, "width": (1 << 24) + 1}), WEBGPU_DEFAULT, None)


def test_all_kernels_fit_the_least_device() -> None:
    """Workgroups of 256, 16 KiB of their memory, 8 storage buffers, no subgroups; one row and many, with all ends."""
    for rows, greedy, advance, paged in itertools.product((1, 64), *[(False, True)] * 3):
        dims = {"rows": rows, "width": 262_144, "greedy": greedy, "advance": advance, "paged": paged}
        route = choose("sample", resolve("sample", dims), WEBGPU_DEFAULT, None)
        assert route.name == ("greedy" if greedy else "histogram")


def test_the_dispatches_of_a_step() -> None:
    """A greedy step of one sequence ends with two dispatches, one that samples with four: both move the batch on."""
    for greedy, count in ((True, 2), (False, 4)):
        dims = resolve("sample", {"rows": 1, "width": 128_256, "greedy": greedy, "advance": True, "paged": True})
        launch_list = choose("sample", dims, WEBGPU_DEFAULT, None).launch_list(dims, WEBGPU_DEFAULT)
        assert len(launch_list.dispatches) == count


NEGATIVE_NAN = np.array([0xFFC00000], np.uint32).view(np.float32)[0]


@pytest.mark.parametrize(
    ("logits", "possible"),
    [
        (f32(np.nan), {0}),
        (np.full(700, np.nan, np.float32), {0}),
        (np.full(700, -np.inf, np.float32), {0}),
        (f32(-np.inf, np.nan, 1.0, NEGATIVE_NAN, -np.inf), {2}),
        (f32(np.nan, -3e38, NEGATIVE_NAN), {1}),
        (f32(3e38, np.inf, -np.inf, -3e38), {1}),
        (f32(5, np.inf, np.nan, np.inf), {1, 3}),
        (np.concatenate([np.full(2048, np.nan), [1.0, np.nan], np.full(3000, -1e9)]).astype(np.float32), {2048}),
    ],
    ids=str,
)
def test_nan_is_never_drawn_and_infinity_wins(logits: F32, possible: set[int], device: Device) -> None:
    """By argmax, by greedy rows, by rows that sample, and on the host."""
    us = [1e-6, 0.4, 0.999999]
    for setting in SETTINGS:
        assert set(drawn(device, logits, setting, us)) <= possible, setting
        assert {draw(logits, *setting, u) for u in us} <= possible, setting
    outputs = records([SETTINGS[0]], [0])
    assert sampled(device, logits[None], outputs, greedy=True).tolist() == [min(possible)] == [argmax(logits)]


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ((1.0, 0, 1.0, 0.0), [0, 1, 2, 3, 4]),
        ((1.0, 1, 1.0, 0.0), [1, 4]),  # equals stay together
        ((1.0, 3, 1.0, 0.0), [1, 2, 4]),
        ((1.0, 4, 1.0, 0.0), [0, 1, 2, 3, 4]),
        ((1.0, 99, 1.0, 0.0), [0, 1, 2, 3, 4]),
        ((1.0, 0, 0.0, 0.0), [1, 4]),
        ((1.0, 0, 0.5, 0.0), [1, 4]),
        ((1.0, 0, 0.61, 0.0), [1, 2, 4]),
        ((1.0, 0, 0.81, 0.0), [0, 1, 2, 3, 4]),
        ((1.0, 3, 0.74, 0.0), [1, 4]),  # 0.6 of the 0.8 that top_k left
        ((1.0, 3, 0.76, 0.0), [1, 2, 4]),
        ((1.0, 0, 1.0, 0.66), [1, 2, 4]),
        ((1.0, 0, 1.0, 0.67), [1, 4]),
        ((1.0, 0, 1.0, 1.0), [1, 4]),
        ((0.5, 0, 1.0, 0.4), [1, 2, 4]),  # (2/3)² = 0.44
        ((0.5, 0, 1.0, 0.45), [1, 4]),
        ((0.0, 0, 1.0, 0.0), [1]),
    ],
)
def test_what_the_filters_keep(setting: Setting, kept: list[int], device: Device) -> None:
    logits = np.log(f32(0.1, 0.3, 0.2, 0.1, 0.3))
    us = [(i + 0.5) / 32 for i in range(32)]
    assert sorted({draw(logits, *setting, u) for u in us}) == kept
    assert sorted(set(drawn(device, logits, setting, us))) == kept


def test_frequencies(device: Device) -> None:
    logits = np.log(f32(0.05, 0.4, 0.02, 0.25, 0.2, 0.08))
    setting = (1.0, 5, 1.0, 0.15)  # without the third and the first
    expected = np.array([0, 0.4, 0, 0.25, 0.2, 0.08]) / 0.93
    count = 512
    outputs = records([setting] * count, [7] * count)
    tokens = sampled(device, np.repeat(logits[None], count, 0), outputs, np.arange(count))
    counts = np.bincount(tokens, minlength=6)
    deviation = np.sqrt(expected * (1 - expected) * count)
    assert (np.abs(counts - expected * count) <= 4 * deviation).all(), counts


# When the histogram is no help -------------------------------------------------------------------------------

_WEIGHTS = "exp(-scale.step * (depths - vec4<f32>(bins)))"
WRONG_HISTOGRAMS = {
    "counts too much": ("atomicAdd(&counts[bin], 1u)", "atomicAdd(&counts[bin], 3u)"),
    "weighs the large too much": (_WEIGHTS, "exp(-0.05 * vec4<f32>(bins))"),
    "weighs the small too much": (_WEIGHTS, "min(vec4<f32>(1.0), 0.002 * vec4<f32>(bins))"),
    "knows nothing": ("if (count > 0u)", "if (count > 0u && bin % 7u == 3u)"),
}


def _with(program: Program, label: str, old: str, new: str) -> Program:
    """The program with another text in one of its kernels."""
    (step,) = (step for step in program.steps if step.label == label)
    assert step.source.count(old) == 1
    changed = replace(step, source=step.source.replace(old, new))
    return replace(program, steps=tuple(changed if each is step else each for each in program.steps))


@pytest.mark.parametrize("how", WRONG_HISTOGRAMS)
def test_a_wrong_histogram_does_not_change_what_is_drawn(how: str, device: Device) -> None:
    """It only says where to look; what was gathered is checked, and else the whole row is searched."""
    rng = np.random.default_rng(3)
    settings = [SETTINGS[i] for i in (1, 3, 4, 7, 10) for _ in range(8)]
    rows, positions = len(settings), np.arange(len(settings))
    logits = np.stack([LOGITS["normal"](rng, 3001) for _ in settings])
    outputs = records(settings, rng.integers(0, 1 << 64, rows, np.uint64))
    program = program_of(device.caps, logits, outputs, make_batch(positions, positions, outputs=rows))
    right = device.run(program)["tokens"].view(np.uint32)[:rows]
    assert_all_drawn(right, logits, outputs, positions, "normal")
    wrong = _with(program, "sample_histogram", *WRONG_HISTOGRAMS[how])
    np.testing.assert_array_equal(device.run(wrong)["tokens"].view(np.uint32)[:rows], right)
    second = "workgroupUniformLoad(&sure) == 1u || attempt == 1u"
    unchecked_search = _with(wrong, "sample_draw", second, "workgroupUniformLoad(&sure) < 2u")
    blind = device.run(unchecked_search)["tokens"].view(np.uint32)[:rows]
    assert (blind != right).any(), "this histogram is not wrong enough to matter"


# Memory ------------------------------------------------------------------------------------------------------


def _everywhere(rows: int, width: int) -> tuple[F32, Any, Any]:
    rng = np.random.default_rng(width)
    logits = np.stack([LOGITS[kind](rng, width) for kind in itertools.islice(itertools.cycle(LOGITS), rows)])
    settings = list(itertools.islice(itertools.cycle(SETTINGS[1:]), rows))
    outputs = records(settings, rng.integers(0, 1 << 64, rows, np.uint64))
    return logits, outputs, contiguous_batch(5, rows, outputs=rows)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 1023), (15, 2), (15, 63), (17, 2053)])
def test_nothing_outside_the_buffers_matters(rows: int, width: int, greedy: bool, device: Device) -> None:
    """Every buffer is followed by NaN, and what starts empty starts as NaN."""
    logits, outputs, batch = _everywhere(rows, width)
    program = program_of(device.caps, logits, outputs, batch, greedy=greedy, advance=True)
    plain = device.run(program)
    buffers = {name: fenced(contents, "params" in name) for name, contents in program.buffers.items()}
    names = tuple(name for name in buffers if "params" not in name)
    found = device.run(replace(program, buffers=buffers, outputs=names))
    for name, raw in found.items():
        assert (raw[-TAIL:] == 0xFF).all(), f"written past the end of {name}"
    for name in program.outputs:
        np.testing.assert_array_equal(found[name][:-TAIL], plain[name][: len(found[name]) - TAIL])


@pytest.mark.full
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(("rows", "width"), [with_all(1, 1), with_all(1, 4099), (16, 70), (11, 2053)])
def test_every_index_is_in_range(rows: int, width: int, greedy: bool, unchecked: Device) -> None:  # noqa: F811
    logits, outputs, batch = _everywhere(rows, width)
    sizes = {"rows": rows, "width": width, "pages": 3}
    dims = resolve("sample", {**sizes, "greedy": greedy, "advance": True, "paged": True})
    operands = {"logits": logits, "outputs": outputs, "batch": batch, "tokens": np.zeros(rows, np.uint32)}
    operands["page_table"] = np.array([4, 0, 7], np.uint32)
    program = lower(choose("sample", dims, unchecked.caps, None), dims, unchecked.caps, operands)
    found, outside = run_guarded(unchecked, program)
    assert outside == []
    tokens = found["tokens"].view(np.uint32)[:rows]
    if greedy:
        np.testing.assert_array_equal(tokens, argmax(logits))
    else:
        assert_all_drawn(tokens, logits, outputs, batch[1:, 1], "guarded")


# The end of a step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("greedy", [False, True])
def test_a_row_becomes_that_of_the_next_step(greedy: bool, device: Device) -> None:
    """Over a page's edge, where there is no page, and without pages; the flag of a run is taken off."""
    positions = np.array([126, 127, 255, 383, 0], np.uint32)
    pages, slots = [0, 0, 0, 2, 4], [5, 2, 1, 0, 3]
    table = np.array([9, 3, NONE, 6, 2, 8], np.uint32)
    batch = make_batch(positions, positions, pages, outputs=5)
    batch[1, 3] |= RUN
    rows = [1, 4, 0, 3, 2]
    outputs = records([(0.0, 0, 1.0, 0.0)] * 5, range(5))
    outputs["row"], outputs["slot"] = rows, [slots[row] for row in rows]
    logits = np.zeros((5, 9), np.float32)
    logits[np.arange(5), rows] = 1
    in_pages = [9 * PAGE + 127, 3 * PAGE, NONE, 8 * PAGE, 2 * PAGE + 1]
    for paged, places in ((True, in_pages), (False, [127, 128, 256, 384, 1])):
        expected = batch.copy()
        sampling.advance(outputs, expected, table if paged else None)
        ids = [LAST | slot for slot in slots]
        assert expected[1:].T.tolist() == [ids, (positions + 1).tolist(), places, pages]
        sizes = {"rows": 5, "width": 9, "slots": 7, "pages": 6}
        dims = resolve("sample", {**sizes, "greedy": greedy, "advance": True, "paged": paged})
        operands = {"logits": logits, "outputs": outputs, "batch": batch, "tokens": np.full(7, 8, np.uint32)}
        raw = run_op(device, "sample", dims, operands | ({"page_table": table} if paged else {}), None)
        np.testing.assert_array_equal(raw["batch"].view(np.uint32).reshape(-1, 4), expected)
        assert raw["tokens"].view(np.uint32)[:7].tolist() == [3, 2, 1, 4, 8, 0, 8]


def test_the_words_of_a_record_are_the_kernel_s() -> None:
    (struct,) = re.findall(r"struct Settings \{(.*?)\}", read("sampling/settings"), re.S)
    fields = [*re.findall(r"(\w+): ([fu])32,", struct), ("seed_low", "u"), ("seed_high", "u")]
    assert fields == [(name, OUTPUT[name].kind) for name in OUTPUT.names or ()]
    assert OUTPUT.itemsize == 32
