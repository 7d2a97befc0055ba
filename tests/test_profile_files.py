"""Profiles as files, whole and damaged; as tables; and two of them side by side."""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shaderlm.compile.roofline import Roofline
from shaderlm.engine.loading import load_with
from shaderlm.errors import InputError
from shaderlm.files import write_named
from shaderlm.gpu import Device
from shaderlm.gpu.tracer import IN_PASS
from shaderlm.profile.files import Profile, read
from shaderlm.profile.measure import Phase, Timed, profile
from shaderlm.profile.report import comparison, duration, summary, tables

from .command_line import shaderlm
from .tiny_models import write_tiny_llama

ROOFS = Roofline(2e9, 1e10, 30.0, 0.0)
UNITS = Roofline(2e12, 1e12, 2.0, 0.0, 8e12)

# Files --------------------------------------------------------------------------------------------------------


def timed(op: str, us: float, **changed: Any) -> Timed:
    return replace(Timed("blk.0", op, "route", f"{op}_kernel", 4, ("x", "out"), us, 1000, 2000, False), **changed)


def phase_of(*dispatches: Timed, **changed: Any) -> Phase:
    total = sum(timed.us for timed in dispatches)
    timeline = ({"host": [["prepare", 0.0, 5.0]], "gpu": [5.0, 80.0]},)
    made = Phase("decode", 1, 0, 8, 90.0, 95.0, total, 10.0, total, 1.0, {"wait": 80.0}, {}, dispatches, timeline)
    return replace(made, **changed)


def made_up(*phases: Phase, **changed: Any) -> Profile:
    words = ("Tiny", "a device", "Vulkan", "1.2", False, "0.1", "abc", "2026-01-01", "shaderlm profile", IN_PASS)
    return replace(Profile(*words, ("a note",), ROOFS, phases or (phase_of(timed("add", 60.0)),)), **changed)


def saved(path: Path, record: Any) -> Path:
    path.write_text(record if isinstance(record, str) else json.dumps(record), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def unfused_and_fused(device: Device, tmp_path_factory: pytest.TempPathFactory) -> list[Profile]:
    path = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "caps", replace(device.caps, kind="software"))  # the plans of a GPU join more ops
        for fusions in ((), None):
            with load_with(path, device=device, fusions=fusions) as loaded:
                model: Any = loaded.runner
                found.append(made_up(*(phase for phase, *_ in profile(model, 4, 2, 0, 1, 0.0, lambda text: None))))
    return found


def test_a_profile_comes_back_from_its_file(unfused_and_fused: list[Profile], tmp_path: Path) -> None:
    by_units = made_up(phase_of(timed("linear", 5.0, matrix_units=True)), roofline=UNITS)
    for found in (*unfused_and_fused, made_up(), made_up(phase_of(gpu_us=None)), by_units):
        assert read(saved(tmp_path / "a.json", found.record())) == found


def altered(record: Any, *path: Any, to: Any) -> Any:
    """A copy with another value somewhere; Ellipsis takes it out."""
    made = copy.deepcopy(record)
    place = made
    for key in path[:-1]:
        place = place[key]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return made


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield (*path, key)
        yield from places(part, (*path, key))


RECORD: Any = json.loads(json.dumps(made_up().record()))
DISPATCH = ("phases", 0, "dispatches", 0)
DAMAGED: dict[str, Any] = {
    "truncated": json.dumps(RECORD)[:-40],
    "empty": "",
    "deep": "[" * 100_000,
    "a list": "[]",
    "another kind": altered(RECORD, "kind", to="shaderlm-benchmark"),
    "another version": altered(RECORD, "version", to=1),
    "no model": altered(RECORD, "model", to=...),
    "no phases": altered(RECORD, "phases", to=None),
    "roofs in a list": altered(RECORD, "roofline", to=[1.0, 2.0]),
    "a phase in a list": altered(RECORD, "phases", 0, to=[]),
    "a host that is no number": altered(RECORD, "phases", 0, "host_us", "wait", to="80"),
    "negative time ahead": altered(RECORD, "phases", 0, "ahead_us", to={"encode": -1.0}),
    "no wall time": altered(RECORD, "phases", 0, "wall_us", to=None),
    "NaN": altered(RECORD, *DISPATCH, "us", to=float("nan")),
    "negative": altered(RECORD, *DISPATCH, "us", to=-1.0),
    "huge": altered(RECORD, *DISPATCH, "us", to=10**400),
    "a word": altered(RECORD, *DISPATCH, "us", to="60"),
    "bytes in words": altered(RECORD, *DISPATCH, "bytes", to="1000"),
    "negative operations": altered(RECORD, *DISPATCH, "flops", to=-5),
    "an op that is a number": altered(RECORD, *DISPATCH, "op", to=5),
    "one field more": altered(RECORD, *DISPATCH, "colour", to="red"),
    "units that are a word": altered(RECORD, *DISPATCH, "matrix_units", to="yes"),
    "units without a roof": altered(RECORD, *DISPATCH, "matrix_units", to=True),
    "a roof of 0": altered(RECORD, "roofline", "matrix_flops_per_second", to=0.0),
    "a field less": altered(RECORD, *DISPATCH, "kernel", to=...),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line(name: str, tmp_path: Path) -> None:
    whole, bad = saved(tmp_path / "a.json", RECORD), saved(tmp_path / "bad.json", DAMAGED[name])
    done = shaderlm("profile", "--compare", whole, bad)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(r"shaderlm: .*bad\.json.*\n", done.err)


def test_no_change_of_a_file_ends_in_a_traceback(tmp_path: Path) -> None:
    """Either it is refused in one line or it can be compared."""
    whole = made_up()
    wrong: tuple[Any, ...] = (..., None, "[/x]", -1, 0, float("nan"), 10**400, True, [], {}, [None], {"a": 1})
    broken, rejected = [], set[str]()
    for path, value in itertools.product(places(RECORD), wrong):
        try:
            found = read(saved(tmp_path / "bad.json", altered(RECORD, *path, to=value)))
            printed(found, whole)
            printed(whole, found)
        except InputError as problem:
            rejected.add(str(problem))
        except Exception as problem:
            broken.append(f"{path} = {value!r:.20}: {type(problem).__name__} {problem}"[:150])
    assert not broken, f"{len(broken)}:\n" + "\n".join(broken)
    assert not [text for text in rejected if "\n" in text]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(28, "No space left on device")

    place = saved(tmp_path / "a.json", "before")
    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(InputError, match="No space left"):
        write_named(place, "after")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert place.read_text(encoding="utf-8") == "before"


# Reports ------------------------------------------------------------------------------------------------------


def printed(before: Profile, after: Profile) -> str:
    out = Console(file=io.StringIO(), width=160)
    for part in comparison(before, after):
        out.print(part, markup=not isinstance(part, str))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def cells(text: str) -> dict[str, list[str]]:
    """Rows of tables by their first cell."""
    split = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines())
    return {row[0]: row[1:] for row in split if len(row) > 1}


def shown(phase: Phase, roofline: Roofline = ROOFS) -> str:
    out = Console(file=io.StringIO(), width=160)
    for table in tables(phase, roofline):
        out.print(table)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_numbers_of_a_table() -> None:
    """60 µs for 3,000 bytes and 6,000 operations; at best 0.5 µs each by 2 GB/s."""
    last = timed("mul", 20.0, layer="output", bytes=0, flops=0)
    text = shown(phase_of(timed("add", 25.0), timed("add", 35.0, bytes=2000, flops=4000), last))
    rows = cells(text)
    assert rows["add_kernel"] == ["2", "60.0", "75.0 %", "30.0", "0.1", "0.1", "2.5"]
    assert rows["mul_kernel"] == ["1", "20.0", "25.0 %", "20.0", "–", "–", "0.0"]
    assert (rows["add"], rows["mul"]) == (rows["add_kernel"], rows["mul_kernel"])
    assert (rows["blk.0"], rows["output"]) == (rows["add"], rows["mul"])
    assert [line.strip() for line in text.splitlines() if line.startswith("decode")] == [
        "decode by kernel", "decode by op", "decode by layer",
    ]  # fmt: skip


def test_each_kernel_has_its_own_roof() -> None:
    """16 MFLOP take 16 µs by multiply-adds and 2 µs by matrix units; 8 MB take 4 µs."""
    work = {"us": 20.0, "bytes": 2000, "flops": 16_000_000}
    made = [
        timed("tile", **work),
        timed("units", **work, matrix_units=True),
        timed("memory", **{**work, "bytes": 8_000_000}, matrix_units=True),
    ]
    rows = cells(shown(phase_of(*made), UNITS))
    assert [rows[f"{name}_kernel"][-1] for name in ("tile", "units", "memory")] == ["80.0", "10.0", "20.0"]


def test_rates_are_in_a_unit_in_which_they_are_short() -> None:
    text = shown(phase_of(timed("slow", 10.0, flops=20_000), timed("fast", 10.0, flops=20_000_000)))
    assert "TFLOP/s" in text
    assert "GFLOP/s" not in text
    assert (cells(text)["fast"][5], cells(text)["slow"][5]) == ("2.00", "0.00")
    assert "TFLOP/s" not in shown(phase_of(timed("slow", 10.0, flops=20_000)))


def test_roofs_in_words() -> None:
    assert str(UNITS) == "copies 2 TB/s, multiplies and adds 1 TFLOP/s (8 TFLOP/s by matrix units)"
    assert str(ROOFS) == "copies 2 GB/s, multiplies and adds 10 GFLOP/s"


def test_a_dispatch_too_short_for_the_clock() -> None:
    """Some clocks tick every 100 µs: a table says nothing of a rate then, and the others stay."""
    text = shown(phase_of(timed("add", 60.0), timed("mul", 0.0)))
    assert cells(text)["add"][1] == "60.0"
    assert cells(text)["mul"][1:3] == ["0.0", "0.0 %"]
    zero = made_up(phase_of(timed("mul", 0.0)))
    assert "mul" in printed(zero, zero)


def test_a_summary_says_what_there_is() -> None:
    whole = "\n".join(summary(phase_of(timed("add", 60.0)), ROOFS))
    assert "60.00 µs busy + 10.00 µs idle; busy for 63.2 % of the 95.00 µs per step of that run" in whole
    assert "wall time differs" not in whole
    assert "wait 80.00 µs" in whole
    assert "interrupted" not in whole
    nothing: dict[str, Any] = dict.fromkeys(("traced_wall_us", "gpu_us", "gap_us", "timestamped_us"))
    cut = "\n".join(summary(phase_of(**nothing), ROOFS))
    assert "90.00 µs per step" in cut
    assert "interrupted before single dispatches were timed" in cut
    assert "busy" not in cut


def test_a_summary_takes_the_busy_share_from_one_run() -> None:
    """A machine with other work to do: the first run took 150 µs a step, the one with timestamps 95 µs."""
    text = "\n".join(summary(phase_of(timed("add", 60.0), wall_us=150.0), ROOFS))
    assert "wall    150.0 µs per step" in text
    assert "busy for 63.2 % of the 95.00 µs per step of that run" in text
    assert "its wall time differs: the machine had other work to do, or its clocks changed" in text


def test_a_summary_of_one_step_that_is_almost_all_busy() -> None:
    """2.04 ms of 6 s are idle: that is not 100.0 %."""
    times = {"traced_wall_us": 6e6, "gpu_us": 6e6 - 2040.0, "gap_us": 2040.0}
    text = "\n".join(summary(phase_of(timed("add", 60.0), steps=1, **times), ROOFS))
    assert "in the cache before, 1 step\n" in text
    assert "2.040 ms idle; busy for 99.9 % of" in text
    assert "launch  1 dispatch × " in text


@pytest.mark.parametrize(
    ("us", "text"),
    [(0.0, "0.000 µs"), (1.9, "1.900 µs"), (951.26, "951.3 µs"), (1194.0, "1.194 ms"), (13_280_834.0, "13.28 s")],
)
def test_a_time_is_written_in_the_unit_in_which_it_is_short(us: float, text: str) -> None:
    assert duration(us) == text


def test_seconds_are_not_shown_as_microseconds() -> None:
    slow = phase_of(timed("add", 4e6), timed("add", 4e6), timed("mul", 3e3), wall_us=9e6, traced_wall_us=9e6)
    text = shown(slow)
    rows = cells(text)
    assert rows["op"][1:4] == ["s", "share", "s each"]
    assert rows["add"][:4] == ["2", "8.0", "100.0 %", "4.0"]
    assert "wall    9.000 s per step" in "\n".join(summary(slow, ROOFS))
    compared = printed(made_up(slow), made_up(slow))
    assert "decode, s per step" in compared
    assert cells(compared)["wall"][:2] == ["9.0", "9.0"]


def test_what_the_host_does_with_and_without_steps_recorded_ahead() -> None:
    host = {"prepare": 5.0, "encode": 10.0, "finish": 10.0, "submit": 5.0, "wait": 50.0}
    before = phase_of(timed("add", 60.0), timed("mul", 1.0), host_us=host)
    ahead = {"encode": 7.0, "finish": 8.0}
    host = {"prepare": 1.0, "take": 2.0, "submit": 3.0, "wait": 90.0}
    after = phase_of(timed("add", 60.0), timed("mul", 1.0), host_us=host, ahead_us=ahead)
    compared = cells(printed(made_up(before), made_up(after)))
    assert compared["host per dispatch"] == ["15.00 µs", "3.000 µs", "-80.0 %"]
    text = "\n".join(summary(after, ROOFS))
    assert "wait 90.00 µs; without waiting 3.000 µs per dispatch" in text
    assert "recorded ahead by other threads: encode 7.000 µs, finish 8.000 µs, together 15.00 µs per step" in text
    assert "ahead" not in "\n".join(summary(before, ROOFS))


def test_a_comparison_op_by_op() -> None:
    before = phase_of(timed("add", 60.0), timed("mul", 20.0), timed("silu_mul", 20.0), wall_us=100.0)
    after = phase_of(timed("add", 15.0), timed("add", 15.0), timed("mul", 25.0), timed("sample", 5.0), wall_us=50.0)
    rows = cells(printed(made_up(before), made_up(after)))
    assert rows["add"] == ["1", "2", "60.0", "30.0", "-50.0 %", "60.0 %", "50.0 %"]
    assert rows["mul"] == ["1", "1", "20.0", "25.0", "+25.0 %", "20.0 %", "41.7 %"]
    assert rows["silu_mul"] == ["1", "–", "20.0", "–", "gone", "20.0 %", "–"]
    assert rows["sample"] == ["–", "1", "–", "5.0", "new", "–", "8.3 %"]
    assert rows["all dispatches"] == ["3", "4", "100.0", "60.0", "-40.0 %"]
    assert rows["wall"] == ["100.0", "50.0", "-50.0 %"]
    assert "note" not in printed(made_up(before), made_up(after))


def test_a_comparison_notes_what_else_differs() -> None:
    other = made_up(phase_of(timed("add", 60.0), depth=100), model="Huge", device="a GPU", driver="2.0")
    text = printed(made_up(), other)
    for what in ("model differs: Tiny before, Huge after", "device differs: a device", "driver differs: 1.2"):
        assert f"note: {what}" in text
    assert "note: decode differs: 1 rows at depth 0 before, 1 rows at depth 100 after" in text
    with pytest.raises(InputError, match="no phase in common"):
        printed(made_up(), made_up(phase_of(timed("add", 1.0), name="prefill")))
    with pytest.raises(InputError, match="no phase in common"):
        printed(made_up(), made_up(phase_of(gpu_us=None)))
    blind = made_up(phase_of(timed("add", 60.0), gpu_us=None, gap_us=None))
    assert cells(printed(blind, blind))["GPU busy"] == ["–", "–", "–"]


def test_unfused_against_fused(unfused_and_fused: list[Profile]) -> None:
    prefill, decode = re.split(r"decode, .?s per step", printed(*unfused_and_fused))
    for i, rows in enumerate((cells(prefill), cells(decode))):
        assert rows["silu_mul"][4] == "gone"
        assert rows["linear+silu_mul"][4] == "new"
        # q, k, v, output, gate, up and down of two layers and the logits; fused, qkv of each and the logits.
        assert rows["linear"][:2] == ["15", "3"]
        counts = [str(len(found.phases[i].dispatches)) for found in unfused_and_fused]
        assert rows["all dispatches"][:2] == counts
