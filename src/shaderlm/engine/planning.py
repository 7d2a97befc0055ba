"""What can be known of a model on a device without its weights: its plans, and which routes are the fastest there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..compile.plan import Lowering, Plan
from ..compile.tuner import shapes_of, tune_shapes
from ..compile.tuning import Entry, Tuning, key_of, path_of, read, save
from ..errors import DeviceError, InputError
from ..formats.find import find
from ..formats.gguf import GgufFile
from ..gpu import Device, open_device
from ..graph.fuse import fuse
from ..graph.graph import Node
from ..models.architecture import Architecture, Config, Step, architecture
from ..runtime.gpu_model import cache_format, plan_of
from ..runtime.session import FIRST_CAPACITY
from .loading import check_precision, config_of_file
from .synthetic import PREFIX, config_of, parse


def described(model: str | os.PathLike[str] | None) -> tuple[Architecture, Config]:
    """A model's architecture and sizes, from its file's header or from the name of a synthetic one."""
    if isinstance(model, str) and model.startswith(PREFIX):
        return config_of(*parse(model))
    with GgufFile.open(find(model)) as file:
        kind = architecture(file.metadata)
        return kind, config_of_file(kind, file, None, dense=False)


def adapter(device: str | int | Device | None, what: str) -> Device:
    """An open device, which is not the CPU; `what` is what the CPU does not have."""
    if isinstance(device, str) and device.strip().lower() == "cpu":
        raise InputError(
            f"{what} is for a GPU, real or in software; the device 'cpu' has none, it runs the graph in NumPy"
        )
    return device if isinstance(device, Device) else open_device(None if is_auto(device) else device)


def is_auto(device: str | int | Device | None) -> bool:
    """Is the choice of a device left to us?"""
    return device is None or (isinstance(device, str) and device.strip().lower() == "auto")


def plans(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str | int | Device | None = None,
    rows: int | None = None,
    capacity: int | None = None,
    fusions: Sequence[str] | None = None,
    precision: str = "fast",
    tuning: Tuning | None = None,
) -> list[Plan]:
    """The plans of a prefill and of a decode step on a device, from the file's header alone."""
    target = adapter(device, "a plan")
    kind, config = described(model)
    room = min(max(256, rows or 0), config.context) if capacity is None else capacity
    prefill = min(128, room) if rows is None else rows
    if not prefill <= room <= config.context:
        raise InputError(
            f"rows ≤ capacity ≤ the model's context of {config.context:,} must hold, got {prefill:,} and {room:,}"
        )
    return [plan_of(kind, config, target.caps, n, room, fusions, None, precision, tuning) for n in (prefill, 1)]


def tune(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str | int | Device | None = None,
    precision: str = "fast",
    again: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[str, Entry | None, Path | None]]:
    """Time the candidates of each matmul of a decode step, thoroughly: shapes in words, what was found, where it is.

    Entries are kept as they are found. Those that are known are not timed unless `again`. `say` is told what is next.
    """
    check_precision(precision)
    target = adapter(device, "tuning")
    caps = target.caps
    path = path_of(caps)  # before anything is timed: there may be no place for caches
    if caps.software and is_auto(device):
        raise DeviceError(
            "no GPU was found, and tuning a software adapter gains nothing; --device software does it nevertheless"
        )
    kind, config = described(model)
    step = Step(1, min(FIRST_CAPACITY, config.context), cache_format(caps))
    graph, _ = fuse(kind.build(config, step), None, Lowering(caps, precision).unsupported_reason)
    known = Tuning() if again else read(caps)
    shapes = shapes_of(graph, caps, precision)
    unknown = []
    for node in shapes:
        entry = known.entry(node.op, node.dims, precision)
        if entry is not None and entry.thorough:
            yield key_of(node.op, node.dims), entry, path
        else:
            unknown.append(node)

    def announced() -> Iterator[Node]:
        for i, node in enumerate(unknown, 1):
            say(f"{i} of {len(unknown)}: {key_of(node.op, node.dims)}")
            yield node

    for node, entry in tune_shapes(target, announced(), precision):
        key = key_of(node.op, node.dims)
        yield key, entry, save(caps, {(precision, key): entry}) if entry is not None else None
