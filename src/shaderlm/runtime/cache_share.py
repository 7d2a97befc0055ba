"""How much memory the KV cache may take where nobody says: a share of what is free beside the model.

Of a card with memory of its own WebGPU tells the size alone, and some implementations not even that: nobody says what
other programs take of it. Other devices share the machine's memory, of which the system says what is available.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from ..gpu.caps import DeviceCaps
from ..gpu.policy import IN_SOFTWARE

LEAST_PAGES = 32  # of the pool, however little is free: a system may have more than it says
# Of a model without keys and values, whose pages take nothing of its device: each has its tokens on the host, 5 kB, and
# those after the last snapshots are of no use.
MOST_EMPTY_PAGES = 1 << 15
_CGROUP = Path("/sys/fs/cgroup")


def share_of(caps: DeviceCaps | None) -> float:
    """The part of free memory that the cache may take; None: on the CPU."""
    return (IN_SOFTWARE if caps is None else caps.policy).cache_share


def free_memory(caps: DeviceCaps | None, taken: int, *, loaded: bool) -> int | None:
    """Bytes that are free beside what a model takes, which may be loaded already; None: not known."""
    known = []
    if caps is None or not caps.policy.own_memory:
        available = available_memory()
        if available is not None:
            known.append(available if loaded else available - taken)
    if caps is not None and caps.heap:
        known.append(caps.heap - taken)
    return max(0, min(known)) if known else None


def available_memory() -> int | None:
    """Bytes of this machine's memory that programs may take without others being swapped; None: not known."""
    if sys.platform == "win32":
        return _available_on_windows()
    known = [each for each in (_meminfo(), _of_container()) if each is not None]
    if known:
        return min(known)
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):  # macOS tells the second alone
        with suppress(ValueError, OSError):
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    return None


def _meminfo() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _of_container() -> int | None:
    """What a limit of this process's container leaves; its cache of files can be given back."""
    with suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())  # "max": there is none
        used = int((_CGROUP / "memory.current").read_text())
        numbers = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(numbers.get("inactive_file", 0)))
    return None


def _available_on_windows() -> int | None:
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *((name, ctypes.c_ulonglong) for name in ("total", "available", "a", "b", "c", "d", "e")),
        )

    status = Status(length=ctypes.sizeof(Status))
    kernel32 = getattr(ctypes, "windll").kernel32  # noqa: B009 (there is none elsewhere)
    return int(status.available) if kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else None
