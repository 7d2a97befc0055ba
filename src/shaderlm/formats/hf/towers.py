"""The part of a Hugging Face folder that reads images, under the keys and names of GGUF's mmproj files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ModelError
from ..gemma4_tower import gemma4_tensors
from ..safetensors import Safetensors
from ..tower_tensors import F32, VisionTensor
from ..unpack import unpack
from ..vision_files import VisionFile, with_mergers
from .tower_families import FAMILIES, FolderFamily

_RESAMPLE = ("nearest", "lanczos", "bilinear", "bicubic")  # as Pillow numbers them
# What the processors of all families do; of Gemma 4, which does not shift and scale, others.
_STEPS: Mapping[str, Any] = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
_PREPROCESSORS = ("processor_config.json", "preprocessor_config.json")
_BEFORE = re.compile(
    r"(model\.)?"
    r"(visual|vision_tower\.vision_model|vision_tower|vision_model|multi_modal_projector|connector|embed_vision)\."
)


def open_folder_tower(folder: Path) -> VisionFile | None:
    """The tower in a folder; None: it has none, or one of a family that is not supported."""
    config = _json(folder / "config.json")
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return None
    name = config.get("model_type", "")
    family = FAMILIES.get(name) or FAMILIES.get(f"{name} {vision.get('model_type')}")
    if family is None:
        return None
    files = Safetensors.open(folder)
    try:
        metadata = folder_metadata(folder, config, family)
        tensors = _folder_tensors(files, family, metadata)
        if not tensors:
            files.close()
            return None
        return VisionFile(folder, metadata, tensors, files.close)
    except BaseException:
        files.close()
        raise


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelError(f"{path} cannot be read: {problem!s:.100}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content


def folder_metadata(folder: Path, config: dict[str, Any], family: FolderFamily) -> dict[str, Any]:
    """The keys that GGUF's converter would write, and what it leaves out of the processor's."""
    text, processor = config.get("text_config") or {}, _processor(folder)
    vision = {**family.absent, **config["vision_config"]}
    config = {**config, "vision_config": vision}
    keys: dict[str, Any] = dict(family.defaults)
    if "hidden_size" in text:
        keys["projection_dim"] = text["hidden_size"]
    keys |= {key: vision[name] for name, key in family.keys.items() if name in vision}
    keys |= {"image_mean": processor.get("image_mean"), "image_std": processor.get("image_std")}
    if (kind := processor.get("resample")) is not None:
        keys["resample"] = _RESAMPLE[kind] if type(kind) is int and 0 <= kind < len(_RESAMPLE) else kind
    for step, known in _STEPS.items():
        free = family.projector == "gemma4v" and step == "do_normalize"
        if not free and processor.get(step, known) not in (known, None):
            raise ModelError(
                f"{folder}: {step} of the processor is {processor[step]!r:.40}; only {known!r} is supported"
            )
    try:
        keys |= family.more(config, processor)
    except ModelError as problem:
        raise ModelError(f"{folder}: {problem}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise ModelError(
            f"{folder}: vision_config or the processor has other values than expected: {problem}"
        ) from None
    return {"clip.projector_type": family.projector, **{f"clip.vision.{key}": keys[key] for key in keys}}


def _processor(folder: Path) -> dict[str, Any]:
    """What its files say of the processor."""
    processor: dict[str, Any] = {}
    for name in _PREPROCESSORS:
        found = _json(folder / name)
        inner = found.get("image_processor") if name == _PREPROCESSORS[0] else found
        processor |= inner if isinstance(inner, dict) else {}
    return processor


def _folder_tensors(files: Safetensors, family: FolderFamily, metadata: Mapping[str, Any]) -> dict[str, VisionTensor]:
    layers = [i for i, flag in enumerate(metadata.get("clip.vision.is_deepstack_layers") or []) if flag]
    tensors: dict[str, VisionTensor] = {}
    for name, info in files.tensors.items():
        begin = _BEFORE.match(name)
        if begin is None:
            continue
        called = name[begin.end() :]
        for pattern, replacement in family.names:
            if re.match(pattern, called):
                called = re.sub(f"^{pattern}", replacement, called)
                break
        called = re.sub(
            r"\{(\d+)\}", lambda match: str(layers[int(match[1])]) if int(match[1]) < len(layers) else "-", called
        )

        if family.unread(called, dict(metadata)):
            continue

        def load(name: str = name) -> F32:
            return unpack(files.raw(name), files.tensors[name].kind).reshape(files.tensors[name].shape)

        tensors[called] = VisionTensor(info.shape, info.kind, load)
    if family.projector == "gemma4v":
        return gemma4_tensors(tensors, metadata.get("clip.vision.attention.head_count"))
    if (kernel := tensors.get("v.patch_embd.weight")) is not None:
        tensors["v.patch_embd.weight"] = _of_moments(kernel)
    if (norm := tensors.get("mm.soft_emb_norm.weight")) is not None:
        tensors["mm.soft_emb_norm.weight"] = VisionTensor(norm.shape, "f32", lambda: norm.load() + np.float32(1))
    return with_mergers(tensors)


def _of_moments(kernel: VisionTensor) -> VisionTensor:
    """[hidden, 3, (moments,) patch, patch] → a matrix; a picture is the same at all moments."""
    rows, count = kernel.shape[0], kernel.shape[2] if len(kernel.shape) == 5 else 1
    if len(kernel.shape) not in (4, 5):
        raise ModelError(f"the kernel of patches must have four or five axes, it is {list(kernel.shape)}")

    def load() -> F32:
        values = kernel.load()
        return (values.sum(axis=2) if count > 1 else values).reshape(rows, -1).astype(np.float32)

    return VisionTensor((rows, int(np.prod(kernel.shape[1:])) // count), "f32" if count > 1 else kernel.kind, load)
