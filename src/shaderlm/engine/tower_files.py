"""Which tower belongs to a model: the part of a folder, or the mmproj file beside a GGUF file."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, ModelError
from ..formats.checkpoint import Checkpoint
from ..formats.hf.towers import open_folder_tower
from ..formats.vision_files import VisionFile, open_mmproj
from ..models.config import Config
from ..models.vision import Tower, read_tower
from ..runtime.tower import NumpyTower, TowerRunner, TowerSource
from ..runtime.weights import Progress

if TYPE_CHECKING:
    from ..gpu import Device

_log = logging.getLogger("shaderlm")
_BESIDE = "mmproj"  # in the names of such files


@dataclass(frozen=True)
class TowerFile:
    """A tower whose file is open, and fits the text model."""

    file: VisionFile
    tower: Tower

    def load(self, device: Device | None, precision: str, progress: Progress | None) -> TowerRunner:
        """With its weights, where the model runs."""
        source = TowerSource(self.file, self.tower)
        if device is None:
            return NumpyTower(self.tower, source, progress)
        from ..runtime.gpu_tower import GpuTower

        return GpuTower(self.tower, source, device, precision=precision, progress=progress)


def find_tower(
    file: Checkpoint,
    config: Config,
    mmproj: str | os.PathLike[str] | None,
    image_tokens: tuple[int, int] | None,
    *,
    on_device: bool,
) -> TowerFile | None:
    """The tower of a model; None: there is none. What was asked for and cannot be is an error, else a warning."""
    _check_tokens(image_tokens)
    if mmproj is not None:
        path = Path(mmproj)
        if not path.is_file():
            raise InputError(f"mmproj must be the path of a file, got {os.fspath(mmproj)!r:.200}")
        return _fitting(open_mmproj(path), file, config, image_tokens, on_device=on_device)
    found = file.path if file.path.is_dir() else _beside(file.path)
    if found is None:
        return None
    try:
        opened = open_folder_tower(found) if found.is_dir() else open_mmproj(found)
        return None if opened is None else _fitting(opened, file, config, image_tokens, on_device=on_device)
    except ModelError as problem:
        _log.warning("images are not read: %s", problem)
        return None


def _check_tokens(image_tokens: tuple[int, int] | None) -> None:
    if image_tokens is None:
        return
    least, most = image_tokens
    if not all(type(number) is int for number in image_tokens) or not 1 <= least <= most <= 16384:
        raise InputError(f"image_tokens must be two whole numbers from 1 to 16384, in order, got {image_tokens!r}")


def _beside(path: Path) -> Path | None:
    """The mmproj file in the folder of a GGUF file. Of several, one must be named."""
    try:
        names = sorted(each for each in path.parent.iterdir() if each.suffix.lower() == ".gguf")
    except OSError:
        return None
    found = [each for each in names if _BESIDE in each.name.lower() and each != path]
    if len(found) > 1:
        listed = ", ".join(each.name for each in found[:4])
        _log.warning("there are %d mmproj files beside the model (%s): mmproj says which one", len(found), listed)
        return None
    return found[0] if found else None


def _fitting(
    opened: VisionFile, file: Checkpoint, config: Config, image_tokens: tuple[int, int] | None, *, on_device: bool
) -> TowerFile:
    """The tower of an open file, which is closed again if it does not fit."""
    try:
        formats = {name: "f16" if on_device and each.kind != "f32" else "f32" for name, each in opened.tensors.items()}
        tower = read_tower(opened.metadata, opened.shapes, formats, image_tokens)
        if tower.processor.token not in (file.metadata.get("tokenizer.ggml.tokens") or ()):
            raise ModelError(f"{opened.path}: the vocabulary of the model has no {tower.processor.token} for images")
        if tower.out != config.hidden:
            raise ModelError(f"{opened.path}: the features of images have {tower.out} values, the text {config.hidden}")
        if tower.family.several_axes and config.sections is None:
            raise ModelError(f"{opened.path}: it does not fit the text model, whose positions have one axis")
        if config.layer_input and tower.input_token >= config.vocabulary:
            raise ModelError(f"{opened.path}: there is no token {tower.input_token} for inputs of layers")
        if tower.levels > config.layers or config.recurrent:
            raise ModelError(f"{opened.path}: it does not fit the layers of the text model")
        return TowerFile(opened, tower)
    except BaseException:
        opened.close()
        raise
