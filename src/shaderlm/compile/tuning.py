"""Routes that were measured to be the fastest, per shape and precision: what is known, and the file that keeps it.

One JSON file per device in the user's cache directory. Who measures is `tuner`; who uses it, `plan`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import kernels
from ..errors import ModelError
from ..files import atomic_write_text
from ..gpu import DeviceCaps
from ..gpu.device_files import driver_of, file_of
from ..kernels import Dims, Option, all_routes, option

FORMAT = 1
# What does not shape the work of a matmul.
_LEFT_OUT = ("eps", "scale", "batched")
_OF_HEADS = ("Hq", "Hkv", "D", "rotary", "cache")  # of a product with rope
_log = logging.getLogger("shaderlm")
_saving = threading.Lock()  # of two processes that save at once, one may lose entries, which are timed again then


@dataclass(frozen=True)
class Entry:
    """What was found for a shape. Names are ROUTE or ROUTE/CONFIG; `thorough`: by `tune`, not by `serve` or `bench`."""

    winner: str
    built_in: str  # what would be taken without measuring
    microseconds: Mapping[str, float]  # of every candidate, per call
    thorough: bool

    @property
    def gain(self) -> float:
        """How much less time than the built-in choice the winner takes, 0 … 1."""
        return 1 - self.microseconds[self.winner] / self.microseconds[self.built_in]


def key_of(op: str, dims: Dims) -> str:
    """A shape in words: linear tokens=1 K=2048 N=2048 format=q4_0 bias=False epilogue=add. What is off is left out."""
    absent = _LEFT_OUT if dims.get("Hq") else (*_LEFT_OUT, *_OF_HEADS)
    absent = absent if dims.get("rounded") else (*absent, "rounded")
    return " ".join(
        [op, *(f"{name}={value}" for name, value in dims.items() if name not in absent and value != "none")]
    )


class Tuning:
    """Entries by precision and shape. `origin` says where they come from, or why there are none."""

    def __init__(self, entries: Mapping[tuple[str, str], Entry] | None = None, origin: str = "") -> None:
        self.entries = dict(entries or {})
        self.origin = origin
        self._warned = False

    def entry(self, op: str, dims: Dims, precision: str) -> Entry | None:
        """What is known of a shape."""
        return self.entries.get((precision, key_of(op, dims)))

    def option(self, op: str, dims: Dims, caps: DeviceCaps, precision: str) -> Option | None:
        """The winner of a shape, if there is one and this device can take it at this precision."""
        entry = self.entry(op, dims, precision)
        if entry is None:
            return None
        option_or_reason = option(op, entry.winner, dims, caps, precision)
        if isinstance(option_or_reason, Option):
            return option_or_reason
        if not self._warned:  # one line is enough
            _log.warning("tuning of %s is ignored: %s", key_of(op, dims), option_or_reason)
            self._warned = True
        return None


# The file ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def kernels_version() -> str:
    """A short hash over the kernels and their declarations: what was measured of others says nothing of these."""
    root = Path(kernels.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".wgsl")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:12]


def path_of(caps: DeviceCaps) -> Path:
    """Where the tuning of a device is kept. A ModelError where there is no place for caches."""
    return file_of(caps, "json")


def _stamp(caps: DeviceCaps) -> dict[str, Any]:
    """What a file must say to be of use here."""
    return {"format": FORMAT, **driver_of(caps), "kernels": kernels_version()}


def read(caps: DeviceCaps) -> Tuning:
    """The tuning of a device. A file that is of no use is ignored with one line."""
    try:
        path = path_of(caps)
    except (ModelError, OSError) as problem:  # no home, or the working directory is gone
        return Tuning(origin=str(problem))
    try:
        return Tuning(_parse(path.read_bytes(), caps), str(path))
    except FileNotFoundError:
        return Tuning(origin=f"there is no {path}; `shaderlm tune` makes it")
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
    except (ValueError, RecursionError) as problem:
        reason = str(problem) if isinstance(problem, _UselessError) else "it is damaged"
    _log.warning("the tuning file %s is ignored: %s", path, reason)
    return Tuning(origin=f"{path} was ignored: {reason}")


class _UselessError(ValueError):
    """A file that cannot be used, and why."""


def _parse(raw: bytes, caps: DeviceCaps) -> dict[tuple[str, str], Entry]:
    record = json.loads(raw.decode())
    if not isinstance(record, dict) or not isinstance(record.get("entries"), dict):
        raise _UselessError("it is damaged")
    for name, expected in _stamp(caps).items():
        if record.get(name) != expected:
            raise _UselessError(f"it is stale, {name} is {str(record.get(name))[:60]!r} there and {expected!r} here")
    entries = {}
    for precision, shapes in record["entries"].items():
        if not isinstance(shapes, dict):
            raise _UselessError("it is damaged")
        for key, entry in shapes.items():
            entries[precision, key] = _entry(key, entry)
    return entries


def _entry(key: str, record: Any) -> Entry:
    """A checked entry: known routes, times that are times, a winner and a built-in choice among them."""
    if not isinstance(record, dict) or not isinstance(record.get("microseconds"), dict):
        raise _UselessError(f"the entry {key[:80]!r} is damaged")
    times, thorough = record["microseconds"], record.get("thorough")
    winner, built_in = record.get("winner"), record.get("built_in")
    right = all(type(value) in (int, float) and 0 < value < 1e12 and math.isfinite(value) for value in times.values())
    named = isinstance(winner, str) and isinstance(built_in, str) and {winner, built_in} <= set(times)
    if not right or not named or not isinstance(thorough, bool):
        raise _UselessError(f"the entry {key[:80]!r} is damaged")
    routes = {route.name for route in all_routes().get(key.split(" ")[0], ())}
    unknown = [name for name in times if name.partition("/")[0] not in routes]
    if unknown:
        raise _UselessError(f"the entry {key[:80]!r} names a route that there is not, {unknown[0][:60]!r}")
    return Entry(str(winner), str(built_in), {name: float(value) for name, value in times.items()}, thorough)


def save(caps: DeviceCaps, entries: Mapping[tuple[str, str], Entry]) -> Path | None:
    """Add entries to the device's file, all or nothing. Where that cannot be done, one line says so."""
    try:
        path = path_of(caps)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _saving:
            known: dict[tuple[str, str], Entry] = {}
            with suppress(OSError, ValueError, RecursionError):  # what is of no use is replaced
                known = _parse(path.read_bytes(), caps)
            text = json.dumps(_record(caps, {**known, **entries}), indent=1) + "\n"
            atomic_write_text(path, text)
        return path
    except ModelError as problem:
        reason: Any = problem
    except OSError as problem:
        reason = f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror
    _log.warning("the tuning could not be kept (%s)", reason)
    return None


def _record(caps: DeviceCaps, entries: Mapping[tuple[str, str], Entry]) -> dict[str, Any]:
    shapes: dict[str, dict[str, Any]] = {}
    for (precision, key), entry in sorted(entries.items()):
        times = sorted(entry.microseconds.items(), key=lambda pair: pair[1])
        shapes.setdefault(precision, {})[key] = {
            "winner": entry.winner,
            "built_in": entry.built_in,
            "thorough": entry.thorough,
            "microseconds": {name: max(0.001, round(value, 3)) for name, value in times},
        }
    return {**_stamp(caps), "date": datetime.now(UTC).isoformat(timespec="seconds"), "entries": shapes}
