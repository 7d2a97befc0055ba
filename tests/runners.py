"""Runners of model files, without text: for tests of the runtime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from shaderlm.formats.checkpoint import Checkpoint
from shaderlm.formats.convert import device_format, rows_for_device
from shaderlm.formats.gguf import GgufFile
from shaderlm.gpu import Array, Device
from shaderlm.models.checkpoint import architecture_of
from shaderlm.models.config import Config
from shaderlm.runtime.gpu_runner import GpuRunner
from shaderlm.runtime.numpy_runner import NumpyRunner
from shaderlm.runtime.packed_cpu import PackedRunner
from shaderlm.runtime.runner import Runner


class FileSource:
    """The weights of a file."""

    repeats = False

    def __init__(self, file: Checkpoint) -> None:
        self._file = file

    def rows(self, name: str, kind: str, first: int, end: int) -> Array:
        return rows_for_device(self._file, name, kind, first, end)

    def vector(self, name: str) -> Array:
        return self._file.dense(name)


def config_of(file: GgufFile, *, dense: bool) -> Config:
    shapes = {name: info.shape for name, info in file.tensors.items()}
    config = architecture_of(file).read(file.metadata, shapes, dict.fromkeys(shapes, "f32"))
    return config if dense else replace(config, formats={name: device_format(file, name) for name in shapes})


def runner_of(path: Path, device: Device | Literal["cpu"] | None, **options: Any) -> Runner:
    """The model of a file on a device; "cpu": with weights as they are stored; None: in NumPy."""
    with GgufFile.open(path) as file:
        kind, config = architecture_of(file), config_of(file, dense=device is None)
        if device == "cpu":
            return PackedRunner(kind, config, FileSource(file), **options)
        if device is None:
            return NumpyRunner(kind, config, FileSource(file), **options)
        return GpuRunner(kind, config, FileSource(file), device, **options)
