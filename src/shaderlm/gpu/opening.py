"""Devices that are shared: one per adapter, opened when it is first wanted, or a little before."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from .adapters import Adapter, choose, preferred_adapter
from .backends import Backend, checked
from .drivers import DRIVERS

if TYPE_CHECKING:
    from .device import Device

# Devices that plain calls share, and the adapters that they were asked for by. Locked while a device is opened, so that
# two threads do not open two.
_open: dict[tuple[str, int], Device] = {}
_chosen: dict[tuple[str | int | None, Backend], Adapter] = {}
_open_lock = threading.Lock()
_begun: set[tuple[str | int | None, Backend]] = set()  # what `begin_opening` was asked for


def open_device(
    spec: str | int | Adapter | None = None,
    *,
    backend: Backend = "auto",
    without: Sequence[str] = (),
    limits: Mapping[str, int] | None = None,
) -> Device:
    """Open an adapter, or one by kind, number or part of its name (default: the best one found).

    `backend` is the implementation of WebGPU: "wgpu", "dawn", or "auto" for the one that suits the adapter.
    `without` switches features off ("f16", "subgroups", "subgroup_matrix", "timestamps") and `limits` lowers limits,
    both by their names in `DeviceCaps`: that is how tests see a smaller device. Plain calls share one device per
    adapter and implementation, until it is closed or lost; then the next call opens a new one.
    """
    checked(backend)
    DRIVERS.check()
    if without or limits:
        from .device import Device

        return Device(spec if isinstance(spec, Adapter) else choose(spec, backend), without=without, limits=limits)
    with _open_lock:
        adapter = spec if isinstance(spec, Adapter) else _chosen.get((spec, backend)) or choose(spec, backend)
        device = _shared(adapter)
        if isinstance(spec, Adapter):
            return device
        if backend == "auto" and adapter.caps.multiplies_f16 and not device.caps.multiplies_f16:
            adapter = choose(spec, backend)  # its matrix units failed their check, and were the reason for this choice
            device = _shared(adapter)
        _chosen[spec, backend] = adapter
        return device


def _shared(adapter: Adapter) -> Device:
    """The open device of an adapter. Locked by the caller."""
    from .device import Device  # and NumPy, which takes as long to import as drivers take to start

    device = _open.get(adapter.native.key)
    if device is None or not device.usable:
        device = _open[adapter.native.key] = Device(adapter)
    return device


def begin_opening(spec: str | int | None = None, backend: Backend = "auto") -> None:
    """Open a device in another thread, so that drivers start while this one imports modules or reads a file.

    Whoever opens it next waits for that. What goes wrong is raised there and not here. "auto" opens a GPU only, and
    "cpu" and "numpy" nothing.
    """
    word = spec.strip().lower() if isinstance(spec, str) else spec
    if word in ("cpu", "numpy") or (spec, backend) in _begun or DRIVERS.forked:
        return
    _begun.add((spec, backend))

    def work() -> None:
        with suppress(Exception):
            if word not in (None, "auto"):
                open_device(spec, backend=backend)
            elif (adapter := preferred_adapter(backend)) is not None and not adapter.caps.software:
                open_device(backend=backend)

    threading.Thread(target=work, name="device").start()
