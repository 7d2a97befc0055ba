"""What is measured on a device is kept in files of its name, which say by which driver."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import cache_directory

if TYPE_CHECKING:
    from .caps import DeviceCaps


def file_of(caps: DeviceCaps, ending: str, *, by_implementation: bool = True) -> Path:
    """Where something is kept; `by_implementation`: of each apart. A ModelError where there is no place for caches."""
    by = caps.implementation if by_implementation and caps.implementation != "wgpu" else ""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{caps.name} {caps.backend} {by}".lower()).strip("-")[:100]
    return cache_directory() / "tuning" / f"{slug}.{ending}"


def driver_of(caps: DeviceCaps) -> dict[str, str]:
    """What a file must say to be of this device and driver."""
    return {"device": caps.name, "backend": caps.backend, "driver": caps.driver}
