"""Which implementation of WebGPU is taken where the choice is left open: what was measured, else a fixed rule.

A measurement is made once per device (`compile.backend_timing`) and kept beside the device's tuning. It is of no use
any more once the driver or one of the two libraries has changed.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from ..errors import DeviceError, ModelError
from ..files import atomic_write_text, cache_directory
from . import dawn
from .caps import DeviceCaps, Implementation
from .packages import version_of

Backend = Literal["auto", "wgpu", "dawn"]
BACKENDS: tuple[Backend, ...] = ("auto", "wgpu", "dawn")
PACKAGES: Mapping[Implementation, str] = {"wgpu": "wgpu", "dawn": "wgpudawn"}
FORMAT = 1
# Matrix units read prompts faster, but small models decode slower through Dawn: it is not taken without measuring.
UNMEASURED = "`shaderlm tune` has not compared it with Dawn yet"
_log = logging.getLogger("shaderlm")


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
    return {implementation: version_of(package) for implementation, package in PACKAGES.items()}


def choice(caps: DeviceCaps) -> Choice:
    """For an adapter that both implementations have; `caps` are Dawn's."""
    seconds = read(caps)
    if seconds is not None:
        fastest = min(seconds, key=lambda name: seconds[name])
        times = ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in sorted(seconds.items()))
        return Choice(fastest, f"measured: {times}")
    return Choice("wgpu", UNMEASURED)


def any_measured() -> bool:
    """Has any device been measured? If not, Dawn need not be started to find out what it is called there."""
    try:
        return any((cache_directory() / "tuning").glob("*.backends.json"))
    except (OSError, ModelError):
        return False


def path_of(caps: DeviceCaps) -> Path:
    """Where the measurement of a device is kept. A ModelError where there is no place for caches."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{caps.name} {caps.backend}".lower()).strip("-")[:100]
    return cache_directory() / "tuning" / f"{slug}.backends.json"


def _stamp(caps: DeviceCaps) -> dict[str, Any]:
    about = {"device": caps.name, "backend": caps.backend, "driver": caps.driver}
    return {"format": FORMAT, **about, "versions": versions()}


def read(caps: DeviceCaps) -> dict[Implementation, float] | None:
    """Seconds of the same work by each implementation, if they were measured. `caps` are Dawn's."""
    try:
        record = json.loads(path_of(caps).read_bytes())
        if any(record[name] != current for name, current in _stamp(caps).items()):
            return None
        seconds: dict[Implementation, float] = {name: float(record["seconds"][name]) for name in PACKAGES}
    except (OSError, ModelError, ValueError, KeyError, TypeError, RecursionError):
        return None  # there is none, or it is damaged: the fixed rule holds, and `shaderlm tune` measures again
    return seconds if all(math.isfinite(value) and value > 0 for value in seconds.values()) else None


def save(caps: DeviceCaps, seconds: Mapping[Implementation, float]) -> Path | None:
    """Keep a measurement. Where that cannot be done, one line says so."""
    record = {**_stamp(caps), "date": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": dict(seconds)}
    try:
        path = path_of(caps)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps(record, indent=1) + "\n")
        return path
    except (OSError, ModelError) as problem:
        _log.warning("the measurement of backends could not be kept (%s)", problem)
        return None
