"""Profiles as files: JSON that comes back unchanged, and traces that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from ..compile.roofline import Roofline
from ..errors import InputError
from .measure import Event, Phase

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
        record = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise InputError(f"{path} is not JSON: {problem}") from problem
    if not isinstance(record, dict) or record.pop("kind", None) != KIND:
        raise InputError(f"{path} is JSON, but not a profile; `shaderlm profile --json FILE` writes one")
    version = record.pop("version", None)
    if version != VERSION:
        raise InputError(f"{path} is a profile of version {version!r}; this program reads {VERSION}. Profile again")
    try:
        profile: Profile = _parse(Profile, record)
        _check_roofs(profile)
    except (OverflowError, TypeError, ValueError) as problem:
        raise InputError(f"{path} is a damaged profile: {type(problem).__name__} {problem}") from problem
    return profile


def _parse(kind: Any, value: Any) -> Any:
    """A value of JSON as a type of the fields here. Numbers are at least 0."""
    origin, parts = get_origin(kind), get_args(kind)
    if NoneType in parts:
        return None if value is None else _parse(parts[0], value)
    if origin is tuple and isinstance(value, list):
        return tuple(_parse(parts[0], each) for each in value)
    if origin is dict and isinstance(value, dict):
        return {key: _parse(parts[1], each) for key, each in value.items()}
    if is_dataclass(kind) and isinstance(value, dict):
        fields, record_type = get_type_hints(kind), cast(Any, kind)
        if fields.keys() != value.keys():
            raise ValueError(f"the fields must be {', '.join(fields)}; got {', '.join(value)}")
        return record_type(**{name: _parse(fields[name], value[name]) for name in fields})
    if kind in (int, float) and type(value) in (int, kind) and 0 <= float(value) < math.inf:
        return kind(value)
    if kind is Any or (kind in (str, bool) and type(value) is kind) or (origin is Literal and value in parts):
        return value
    expected = "a number of at least 0" if kind in (int, float) else getattr(kind, "__name__", kind)
    raise ValueError(f"expected {expected}, got {value!r}")


def _check_roofs(profile: Profile) -> None:
    roofs = profile.roofline
    if 0 in (roofs.bytes_per_second, roofs.flops_per_second, roofs.matrix_flops_per_second):
        raise ValueError("a roof of 0")
    by_units = any(timed.matrix_units for phase in profile.phases for timed in phase.dispatches)
    if by_units and roofs.matrix_flops_per_second is None:
        raise ValueError("dispatches by matrix units, but no roof of these")


def trace(phases: Sequence[tuple[str, Iterable[Event]]]) -> dict[str, Any]:
    """Chrome's trace format: a process per phase, in it the host and the GPU as threads, times in microseconds."""
    tracks = {"host": 1, "GPU": 2}
    events: list[dict[str, Any]] = []
    for process, (name, spans) in enumerate(phases, 1):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for track, thread in tracks.items():
            about = {"ph": "M", "pid": process, "tid": thread}
            events.append({**about, "name": "thread_name", "args": {"name": track}})
        for event in spans:
            where = {"pid": process, "tid": tracks[event.track], "cat": event.track}
            when = {"ts": round(event.start, 3), "dur": round(event.duration, 3)}
            events.append({"ph": "X", "name": event.name, **where, **when, "args": event.details})
    return {"traceEvents": events, "displayTimeUnit": "ns"}
