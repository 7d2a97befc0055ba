"""Two ways to compute on the CPU: "cpu" keeps weights packed if llvmlite is there, "numpy" is the reference."""

from __future__ import annotations

import logging
from typing import Any

from ..install import install_command
from ..models.architecture import Architecture
from ..models.config import Config
from ..runtime.numpy_runner import NumpyRunner
from ..runtime.packed_cpu import PackedRunner, is_available
from ..runtime.weights import Source

CPU_DEVICES = ("cpu", "numpy")
_log = logging.getLogger("shaderlm")


def is_cpu(device: Any) -> bool:
    """Does a user's word for a device name the CPU?"""
    return isinstance(device, str) and device.strip().lower() in CPU_DEVICES


def packs_weights(device: Any) -> bool:
    """Do weights stay packed, on the CPU? Where they could, a hint says what to install."""
    if isinstance(device, str) and device.strip().lower() == "numpy":
        return False
    if not is_available():
        _log.warning("NumPy computes, with weights in f32; with llvmlite it is faster: %s", install_command("cpu"))
        return False
    return True


def cpu_runner(
    kind: Architecture, config: Config, source: Source, *, packed: bool, precision: str, **options: Any
) -> NumpyRunner:
    """The runner of a model on the CPU; `config` has the formats of the file if weights stay packed, otherwise f32."""
    if packed:
        return PackedRunner(kind, config, source, precision=precision, **options)
    return NumpyRunner(kind, config, source, **options)
