"""Every recorded checkpoint, at least one for each architecture, in memory, and with anything changed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.formats.checkpoint import Checkpoint
from shaderlm.formats.gguf_header import TensorInfo
from shaderlm.models.checkpoint import architecture_of, read_config
from shaderlm.runtime.numpy_runner import NumpyRunner
from shaderlm.runtime.runner import SequenceChunk

from . import checkpoints
from .converted import converted
from .runners import FileSource
from .tiny_models import tiny_metadata

PROMPT = [int(i) for i in np.random.default_rng(3).integers(0, 256, 20)]


class InMemory(Checkpoint):
    """A checkpoint without a file: metadata, and tensors in f32."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]) -> None:
        infos = {name: TensorInfo(name, value.shape, "f32", 0, value.nbytes) for name, value in tensors.items()}
        super().__init__(Path("memory"), sum(value.nbytes for value in tensors.values()), metadata, infos)
        self.arrays = dict(tensors)

    def _read(self, info: TensorInfo, first: int, end: int) -> NDArray[np.uint8]:
        rows = np.ascontiguousarray(self.arrays[info.name]).reshape(-1, info.shape[-1])
        return rows[first:end].view(np.uint8)

    def _release(self) -> None:
        pass

    @property
    def own(self) -> str:
        """What the keys of its architecture begin with."""
        return str(self.metadata["general.architecture"])

    def keys(self) -> dict[str, Any]:
        """The metadata of its architecture, by their keys without its name."""
        return {
            key.removeprefix(f"{self.own}."): v for key, v in self.metadata.items() if key.startswith(f"{self.own}.")
        }

    def changed(
        self, keys: Mapping[str, Any] | None = None, tensors: Mapping[str, NDArray[np.float32] | None] | None = None
    ) -> InMemory:
        """The same with other values of its architecture's keys and other tensors; None leaves out."""
        metadata = {**self.metadata, **{f"{self.own}.{key}": value for key, value in (keys or {}).items()}}
        arrays = {**self.arrays, **(tensors or {})}
        return InMemory(
            {key: value for key, value in metadata.items() if value is not None},
            {name: value for name, value in arrays.items() if value is not None},
        )


@cache
def in_memory(name: str) -> InMemory:
    """A recorded checkpoint."""
    entry = checkpoints.recorded(name)
    own = entry["architecture"]
    tokenizer = {key: value for key, value in tiny_metadata().items() if key.startswith("tokenizer.")}
    keys, tensors = converted(own, entry["config"], checkpoints.tensors_of(entry), entry.get("how"))
    return InMemory({"general.architecture": own, **tokenizer, **keys}, tensors)


def logits(file: Checkpoint) -> NDArray[np.float32]:
    """Of the last token of PROMPT, in NumPy."""
    kind = architecture_of(file)
    runner = NumpyRunner(kind, read_config(kind, file), FileSource(file), fusions=())  # to fuse takes most of the time
    found = runner.step([SequenceChunk(runner.add(), PROMPT, "logits")]).logits
    runner.close()
    assert found is not None
    last: NDArray[np.float32] = found[-1]
    return last
