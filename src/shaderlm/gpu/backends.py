"""Which implementation of WebGPU is taken where the choice is left open.

Dawn where its matrix units can be used, which read prompts several times as fast; otherwise what was measured to be
faster; otherwise wgpu. A measurement is made once per device (`compile.backend_timing`) and kept beside the device's
tuning. It is of no use any more once the driver or one of the two libraries has changed.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from ..errors import DeviceError, ModelError
from ..files import atomic_write_text
from . import dawn, probe_cache
from .caps import DeviceCaps, Implementation
from .device_files import driver_of, file_of
from .packages import PACKAGES, version_of

Backend = Literal["auto", "wgpu", "dawn"]
BACKENDS: tuple[Backend, ...] = ("auto", "wgpu", "dawn")
IMPLEMENTATIONS: tuple[Implementation, ...] = ("wgpu", "dawn")
FORMAT = 2
MATRIX_UNITS = "it has matrix units, which read prompts faster"
WRONG_UNITS = "Dawn's matrix units failed a check; `shaderlm tune` compares both without them"
UNMEASURED = "`shaderlm tune` has not compared it with Dawn yet"
_SLOWER = 1.05  # steps of one row that take longer than this are told
_log = logging.getLogger("shaderlm")
# What the check of matrix units keeps in the cache of probes: the shapes that are right. And the adapters that have
# none, by name: of this process, for a cache that cannot be written.
UNITS_PROBE, UNITS_FORMAT = "matrix shapes that are right", 1
wrong_matrix_units: set[str] = set()


@dataclass(frozen=True)
class Timing:
    """Seconds that one implementation takes for the same work."""

    prompt: float
    decode: float  # steps of one row

    @property
    def total(self) -> float:
        """Of the whole work, which is that of a chat."""
        return self.prompt + self.decode


@dataclass(frozen=True)
class Choice:
    """An implementation, and why it is taken."""

    implementation: Implementation
    reason: str


def missing(backend: Backend) -> str | None:
    """Why an implementation cannot be used, in one line; None if it can."""
    return dawn.missing() if backend == "dawn" else None


def checked(backend: Any) -> Backend:
    """One of BACKENDS."""
    if backend not in BACKENDS:
        raise DeviceError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return cast("Backend", backend)


def versions() -> dict[Implementation, str | None]:
    """The version of each implementation's package; None where it is not installed."""
    return {implementation: version_of(PACKAGES[implementation]) for implementation in IMPLEMENTATIONS}


def choice(caps: DeviceCaps) -> Choice:
    """For an adapter that both implementations have; `caps` are Dawn's."""
    timings = read(caps)
    wrong = caps.multiplies_f16 and _units_are_wrong(caps)
    if caps.multiplies_f16 and not wrong:
        return Choice("dawn", MATRIX_UNITS + _slower_decode(timings, "dawn", "wgpu"))
    if timings is None:
        return Choice("wgpu", WRONG_UNITS if wrong else UNMEASURED)
    fastest, other = sorted(timings, key=lambda name: timings[name].total)
    times = ", ".join(f"{name} {1000 * timing.total:.1f} ms" for name, timing in sorted(timings.items()))
    return Choice(fastest, f"measured: {times}{_slower_decode(timings, fastest, other)}")


def _units_are_wrong(caps: DeviceCaps) -> bool:
    """Did they fail their check, in this process or in one before it with this driver?"""
    return caps.name in wrong_matrix_units or probe_cache.read(caps, UNITS_PROBE, UNITS_FORMAT) == []


def _slower_decode(
    timings: Mapping[Implementation, Timing] | None, taken: Implementation, other: Implementation
) -> str:
    """What is said of an implementation that was measured to make tokens more slowly than the other; else nothing."""
    slower = timings[taken].decode / timings[other].decode if timings is not None else 1.0
    return f"; tokens take {100 * (slower - 1):.0f} % longer than with --backend {other}" if slower > _SLOWER else ""


def path_of(caps: DeviceCaps) -> Path:
    """Where the measurement of a device is kept. A ModelError where there is no place for caches."""
    return file_of(caps, "backends.json", by_implementation=False)


def _stamp(caps: DeviceCaps) -> dict[str, Any]:
    return {"format": FORMAT, **driver_of(caps), "versions": versions()}


def read(caps: DeviceCaps) -> dict[Implementation, Timing] | None:
    """The timing of each implementation, if they were measured. `caps` are Dawn's."""
    try:
        record = json.loads(path_of(caps).read_bytes())
        if any(record[name] != current for name, current in _stamp(caps).items()):
            return None
        timings: dict[Implementation, Timing] = {name: Timing(**record["seconds"][name]) for name in IMPLEMENTATIONS}
        values = [float(value) for timing in timings.values() for value in (timing.prompt, timing.decode)]
    except (OSError, ModelError, ValueError, KeyError, TypeError, RecursionError):
        return None  # there is none, or it is damaged: the fixed rule holds, and `shaderlm tune` measures again
    return timings if all(math.isfinite(value) and value > 0 for value in values) else None


def save(caps: DeviceCaps, timings: Mapping[Implementation, Timing]) -> Path | None:
    """Keep a measurement. Where that cannot be done, one line says so."""
    record = {
        **_stamp(caps),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": {name: asdict(timing) for name, timing in timings.items()},
    }
    try:
        path = path_of(caps)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps(record, indent=1) + "\n")
        return path
    except ModelError as problem:
        reason = str(problem)
    except OSError as problem:
        reason = f"{problem.filename}: {problem.strerror}" if problem.filename else str(problem.strerror)
    _log.warning("the measurement of backends could not be kept (%s)", reason)
    return None
