"""What probes of a GPU found, kept on disk: the next start need not run them again.

One file per GPU and implementation of WebGPU. Another driver, or another version of the library, makes it useless.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..files import atomic_write_text
from .device_files import driver_of, file_of
from .packages import PACKAGES, version_of

if TYPE_CHECKING:
    from .caps import DeviceCaps


def read(caps: DeviceCaps, probe: str, version: int) -> Any:
    """The result of a probe, as JSON has it; None if there is none of this version of the probe."""
    entry = _record(caps).get(probe)
    return entry.get("result") if isinstance(entry, dict) and entry.get("version") == version else None


def write(caps: DeviceCaps, probe: str, version: int, result: Any) -> None:
    """Keep the result of a probe. An OSError or a ModelError where that cannot be done."""
    path = path_of(caps)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**_stamp(caps), **_record(caps), probe: {"version": version, "result": result}}
    atomic_write_text(path, json.dumps(record, indent=1) + "\n")


def remove(caps: DeviceCaps, probe: str) -> None:
    """Forget the result of a probe."""
    record = _record(caps)
    if record.pop(probe, None) is not None:
        atomic_write_text(path_of(caps), json.dumps(record, indent=1) + "\n")


def path_of(caps: DeviceCaps) -> Path:
    """The file of a GPU. A ModelError where there is no place for caches."""
    return file_of(caps, "probes.json")


def _stamp(caps: DeviceCaps) -> dict[str, Any]:
    return {**driver_of(caps), "library": version_of(PACKAGES[caps.implementation])}


def _record(caps: DeviceCaps) -> dict[str, Any]:
    """The file, if it is of this driver and this library; else nothing."""
    try:
        record = json.loads(path_of(caps).read_bytes())
        same = all(record.get(name) == value for name, value in _stamp(caps).items())
    except (OSError, ModelError, ValueError, AttributeError, RecursionError):
        return {}  # there is none, or it is damaged
    return record if same else {}
