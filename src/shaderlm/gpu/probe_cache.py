"""What probes of a GPU found, kept on disk: the next start need not run them again.

One file per GPU and implementation of WebGPU. Another driver, or another version of the library, makes it useless.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..files import atomic_write_text, cache_directory
from .packages import version_of

if TYPE_CHECKING:
    from .caps import DeviceCaps

_PACKAGES = {"wgpu": "wgpu", "dawn": "wgpudawn"}


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
    by = "" if caps.implementation == "wgpu" else caps.implementation
    slug = re.sub(r"[^a-z0-9]+", "-", f"{caps.name} {caps.backend} {by}".lower()).strip("-")[:100]
    return cache_directory() / "tuning" / f"{slug}.probes.json"


def _stamp(caps: DeviceCaps) -> dict[str, Any]:
    library = version_of(_PACKAGES[caps.implementation])
    return {"device": caps.name, "backend": caps.backend, "driver": caps.driver, "library": library}


def _record(caps: DeviceCaps) -> dict[str, Any]:
    """The file, if it is of this driver and this library; else nothing."""
    try:
        record = json.loads(path_of(caps).read_bytes())
        same = all(record.get(name) == value for name, value in _stamp(caps).items())
    except (OSError, ModelError, ValueError, AttributeError, RecursionError):
        return {}  # there is none, or it is damaged
    return record if same else {}
