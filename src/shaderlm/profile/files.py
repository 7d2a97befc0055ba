"""Profiles as files: JSON that comes back unchanged, and traces that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..compile.roofline import Roofline
from ..errors import InputError
from .measure import Event, Phase, Timed

KIND, VERSION = "shaderlm-profile", 3


@dataclass(frozen=True)
class Profile:
    """Phases of a model on a device, and everything that a reader of them has to know."""

    model: str
    device: str
    backend: str
    driver: str
    software: bool
    package: str
    commit: str
    date: str
    command: str
    clock: str
    notes: tuple[str, ...]
    roofline: Roofline
    phases: tuple[Phase, ...]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": KIND, "version": VERSION, **asdict(self)}


def read(path: Path) -> Profile:
    """A saved profile, checked."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"{path} cannot be read: {problem}") from problem
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise InputError(f"{path} is not JSON: {problem}") from problem
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise InputError(f"{path} is JSON, but not a profile; `shaderlm profile --json FILE` writes one")
    if found.get("version") != VERSION:
        raise InputError(
            f"{path} is a profile of version {found.get('version')!r}; this program reads {VERSION}. Profile again"
        )
    try:
        return _profile(found)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as problem:
        raise InputError(f"{path} is a damaged profile: {type(problem).__name__} {problem}") from problem


def _profile(found: Mapping[str, Any]) -> Profile:
    fields = {key: value for key, value in found.items() if key not in ("kind", "version")}
    roofs = {key: value for key, value in found["roofline"].items() if value is not None}
    roofline = Roofline(**{key: _number(value) for key, value in roofs.items()})
    if not roofline.bytes_per_second or not roofline.flops_per_second or roofline.matrix_flops_per_second == 0:
        raise ValueError("a roof of 0")
    phases = tuple(_phase(phase) for phase in found["phases"])
    by_units = any(timed.matrix_units for phase in phases for timed in phase.dispatches)
    if by_units and roofline.matrix_flops_per_second is None:
        raise ValueError("dispatches by matrix units, but no roof of these")
    return Profile(**{**fields, "notes": tuple(found["notes"]), "roofline": roofline, "phases": phases})


def _phase(found: Mapping[str, Any]) -> Phase:
    for key in ("wall_us", "scale"):
        _number(found[key])
    for key in ("gpu_us", "gap_us", "timestamped_us", "traced_wall_us"):
        if found[key] is not None:
            _number(found[key])
    for us in (*found["host_us"].values(), *found["ahead_us"].values()):
        _number(us)
    dispatches = tuple(_timed(timed) for timed in found["dispatches"])
    return Phase(**{**found, "dispatches": dispatches, "timeline": tuple(found["timeline"])})


def _timed(found: Mapping[str, Any]) -> Timed:
    wrong = [key for key in ("layer", "op", "route", "kernel") if not isinstance(found[key], str)]
    if wrong:
        raise ValueError(f"{wrong[0]} must be text, got {found[wrong[0]]!r}")
    if not isinstance(found["matrix_units"], bool):
        raise ValueError(f"matrix_units must be true or false, got {found['matrix_units']!r}")
    counts = {key: int(_number(found[key])) for key in ("workgroups", "bytes", "flops")}
    return Timed(**{**found, **counts, "operands": tuple(found["operands"]), "us": _number(found["us"])})


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"expected a number of at least 0, got {value!r}")
    return float(value)


def trace(named: Sequence[tuple[str, Iterable[Event]]]) -> dict[str, Any]:
    """Chrome's trace format: a process per phase, in it the host and the GPU as threads, times in microseconds."""
    tracks = {"host": 1, "GPU": 2}
    events: list[dict[str, Any]] = []
    for process, (name, found) in enumerate(named, 1):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for track, thread in tracks.items():
            about = {"ph": "M", "pid": process, "tid": thread}
            events.append({**about, "name": "thread_name", "args": {"name": track}})
        for event in found:
            where = {"pid": process, "tid": tracks[event.track], "cat": event.track}
            when = {"ts": round(event.start, 3), "dur": round(event.duration, 3)}
            events.append({"ph": "X", "name": event.name, **where, **when, "args": event.details})
    return {"traceEvents": events, "displayTimeUnit": "ns"}
