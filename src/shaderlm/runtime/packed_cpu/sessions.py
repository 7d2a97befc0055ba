"""Sessions of onnxruntime: their threads, and weights beside the model. Knows no architecture."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DeviceError
from .onnx_model import constant, external, model, value

Arrays = Mapping[str, NDArray[Any]]
# Up to so many cores each session has threads that sleep while they wait. Those of a shared pool spin: on two cores
# with two other programs a step took 102 ms instead of 44, and alone on them 21 instead of 22.
FEW_CORES = 4
_lock = threading.Lock()
_pool_process: int | None = None  # whose sessions share threads; 0: nobody's; None: no session was made yet


def is_available() -> bool:
    """Is onnxruntime installed? It is not imported."""
    return importlib.util.find_spec("onnxruntime") is not None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepare() -> Any:
    """onnxruntime, on many cores with one pool of threads for all sessions, and without reports to its maker."""
    global _pool_process
    try:
        import onnxruntime
    except ImportError as problem:
        what_to_do = 'install it again, or take device="numpy"'
        raise DeviceError(f"onnxruntime cannot be imported ({problem}): {what_to_do}") from None
    with _lock:
        if _pool_process is None:
            onnxruntime.disable_telemetry_events()
            onnxruntime.set_default_logger_severity(3)
            _pool_process = 0
            if cores() > FEW_CORES:
                with suppress(Exception):  # where another user of onnxruntime in this process was first
                    onnxruntime.set_global_thread_pool_sizes(cores(), 1)
                    _pool_process = os.getpid()
    if _pool_process not in (0, os.getpid()):
        raise DeviceError(
            "the threads of onnxruntime are in the process that this one was forked from. Start processes by "
            'multiprocessing\'s "spawn", load the first model after the fork, or take device="numpy"'
        )
    return onnxruntime


class Session:
    """A model that is ready to run; `run` takes arrays by name and gives its outputs in order."""

    def __init__(
        self,
        nodes: Sequence[bytes],
        constants: Arrays,
        weights: Arrays,
        inputs: Mapping[str, tuple[Any, ...]],
        outputs: Mapping[str, tuple[Any, ...]],
    ) -> None:
        """`constants` are written into the model. `weights` are packed or copied, and may be let go of afterwards."""
        runtime = _prepare()
        options = runtime.SessionOptions()
        options.enable_cpu_mem_arena = False  # of each session; what is allocated in a step is small
        if _pool_process:
            options.use_per_session_threads = False
        else:
            options.intra_op_num_threads = cores()
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        values = [runtime.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), values)
        tensors = [constant(*each) for each in constants.items()] + [external(*each) for each in weights.items()]
        kinds = {"position_ids": "int64"}
        named = [value(name, shape, kinds.get(name, "float32")) for name, shape in inputs.items()]
        written = model(nodes, tensors, named, [value(*each) for each in outputs.items()])
        self._session = runtime.InferenceSession(written, options, providers=["CPUExecutionProvider"])._sess
        self.inputs, self._outputs = tuple(inputs), list(outputs)

    def run(self, inputs: Arrays) -> list[NDArray[np.float32]]:
        """The outputs, as new arrays."""
        arrays: list[NDArray[np.float32]] = self._session.run(self._outputs, inputs, None)
        return arrays


def release_freed_memory() -> None:
    """Give what was freed back to the system: glibc keeps the copies that packing left behind."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
