"""The part of a checkpoint that reads images, under the keys and names of GGUF's mmproj files.

It is such a file, or is in a Hugging Face folder beside the text model (`hf.towers`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from .gemma4_tower import gemma4_tensors
from .gguf import GgufFile
from .tower_tensors import F32, VisionTensor


class VisionFile:
    """Keys and tensors of a tower. `close` lets go of files that belong to it."""

    def __init__(
        self, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, VisionTensor], close: Callable[[], None]
    ) -> None:
        self.path, self.metadata, self.tensors, self.close = path, metadata, tensors, close
        self._last: tuple[str, F32] | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By the names of tensors."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def dense(self, name: str) -> F32:
        """All of a tensor. The last one is kept: it is asked for piece by piece."""
        last = self._last
        if last is None or last[0] != name:
            last = self._last = name, self.tensors[name].load()
        return last[1]


def open_mmproj(path: Path) -> VisionFile:
    """A GGUF file of the type mmproj."""
    file = GgufFile.open(path)
    try:
        if file.metadata.get("general.type") != "mmproj" and file.metadata.get("general.architecture") != "clip":
            raise ModelError(f"{path} is no mmproj file: its general.type is {file.metadata.get('general.type')!r:.40}")
        tensors = {}
        for name in file.tensors:
            info = file.info(name)

            def load(name: str = name, shape: tuple[int, ...] = info.shape) -> F32:
                return file.dense(name).reshape(shape)

            tensors[name] = VisionTensor(info.shape, info.kind, load)
        if file.metadata.get("clip.vision.projector_type") == "gemma4v":
            tensors = gemma4_tensors(tensors, file.metadata.get("clip.vision.attention.head_count"))
        if file.metadata.get("clip.projector_type") == "pixtral":
            tensors = _pixtral(tensors, file.metadata.get("clip.vision.attention.head_count"))
        tensors = _unswapped(tensors, file.metadata.get("clip.vision.feed_forward_length"))
        return VisionFile(path, file.metadata, _as_matrices(tensors), file.close)
    except BaseException:
        file.close()
        raise


def _unswapped(tensors: dict[str, VisionTensor], inner: Any) -> dict[str, VisionTensor]:
    """Old converters call the first product of a network "down", and the second one "up"."""
    first = tensors.get("v.blk.0.ffn_down.weight")
    if first is None or first.shape[0] != inner or first.shape[0] == first.shape[-1]:
        return tensors
    others = {"ffn_down": "ffn_up", "ffn_up": "ffn_down"}
    return {re.sub("ffn_down|ffn_up", lambda found: others[found[0]], name): each for name, each in tensors.items()}


def _pixtral(tensors: dict[str, VisionTensor], heads: Any) -> dict[str, VisionTensor]:
    """As folders have them: rows that rope turns together are in halves of heads, and the text has [IMG_BREAK]."""
    tensors = {name: each for name, each in tensors.items() if name != "v.token_embd.img_break"}
    for name, each in tensors.items():
        if name.endswith((".attn_q.weight", ".attn_k.weight")):
            if type(heads) is not int or heads < 1 or each.shape[0] % (2 * heads):
                raise ModelError(f"{name} has {each.shape[0]} rows, which are not pairs for {heads!r:.40} heads")
            tensors[name] = _in_halves(each, heads)
    return tensors


def _in_halves(pairs: VisionTensor, heads: int) -> VisionTensor:
    def load() -> F32:
        values = pairs.load().reshape(heads, -1, 2, pairs.shape[1]).swapaxes(1, 2)
        return np.ascontiguousarray(values).reshape(pairs.shape)

    return VisionTensor(pairs.shape, pairs.kind, load)


def _as_matrices(tensors: dict[str, VisionTensor]) -> dict[str, VisionTensor]:
    """Patches are rows of numbers here: kernels of convolutions become matrices, those of two moments are added."""
    name, second = "v.patch_embd.weight", "v.patch_embd.weight.1"
    if name in tensors:
        parts = [tensors.pop(name), *([tensors.pop(second)] if second in tensors else [])]
        tensors[name] = _patches(parts)
    return with_mergers(tensors)


def with_mergers(tensors: dict[str, VisionTensor]) -> dict[str, VisionTensor]:
    """Matrices that are stored with their axes, or columns, in another order than here."""
    for name, order in (("mm.input_projection.weight", _transposed), ("mm.patch_merger.weight", _patch_by_patch)):
        if name in tensors:
            tensors[name] = order(tensors[name])
    return tensors


def _patches(parts: list[VisionTensor]) -> VisionTensor:
    rows = parts[0].shape[0]
    columns = int(np.prod(parts[0].shape[1:]))

    def load() -> F32:
        return np.asarray(sum(part.load().reshape(rows, columns) for part in parts), np.float32)

    return VisionTensor((rows, columns), "f32" if len(parts) > 1 else parts[0].kind, load)


def _transposed(whole: VisionTensor) -> VisionTensor:
    return VisionTensor(whole.shape[::-1], whole.kind, lambda: np.ascontiguousarray(whole.load().T))


def _patch_by_patch(whole: VisionTensor) -> VisionTensor:
    """Columns are one patch after the other; stored are the first values of all patches, then the second ones."""
    rows = whole.shape[0]

    def load() -> F32:
        return np.ascontiguousarray(whole.load().reshape(rows, rows, -1).swapaxes(1, 2)).reshape(whole.shape)

    if len(whole.shape) != 2 or whole.shape[1] % rows:
        raise ModelError(f"mm.patch_merger.weight must have whole patches of {rows} values, it is {list(whole.shape)}")
    return VisionTensor(whole.shape, whole.kind, load)
