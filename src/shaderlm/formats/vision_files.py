"""The part of a checkpoint that reads images, under the keys and names of GGUF's mmproj files.

It is such a file, or is in a Hugging Face folder beside the text model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from .gguf import GgufFile
from .safetensors import Safetensors
from .unpack import unpack

F32 = NDArray[np.float32]
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # as Pillow numbers them
_PREPROCESSORS = ("processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True)
class VisionTensor:
    """A tensor as the tower wants it. `load` reads all of it."""

    shape: tuple[int, ...]
    kind: str
    load: Callable[[], F32]


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
        return VisionFile(path, file.metadata, _as_matrices(tensors), file.close)
    except BaseException:
        file.close()
        raise


def _as_matrices(tensors: dict[str, VisionTensor]) -> dict[str, VisionTensor]:
    """Patches are rows of numbers here: kernels of convolutions become matrices, those of two moments are added."""
    name, second = "v.patch_embd.weight", "v.patch_embd.weight.1"
    if name in tensors:
        parts = [tensors.pop(name), *([tensors.pop(second)] if second in tensors else [])]
        tensors[name] = _patches(parts)
    if (whole := tensors.get("mm.input_projection.weight")) is not None:
        tensors["mm.input_projection.weight"] = _transposed(whole)
    return tensors


def _patches(parts: list[VisionTensor]) -> VisionTensor:
    rows = parts[0].shape[0]
    columns = int(np.prod(parts[0].shape[1:]))

    def load() -> F32:
        return np.asarray(sum(part.load().reshape(rows, columns) for part in parts), np.float32)

    return VisionTensor((rows, columns), "f32" if len(parts) > 1 else parts[0].kind, load)


def _transposed(whole: VisionTensor) -> VisionTensor:
    return VisionTensor(whole.shape[::-1], whole.kind, lambda: np.ascontiguousarray(whole.load().T))


# Folders -------------------------------------------------------------------------------------------------

_SIGLIP: tuple[tuple[str, str], ...] = (
    (r"embeddings\.patch_embedding\.", "v.patch_embd."),
    (r"embeddings\.position_embedding\.", "v.position_embd."),
    (r"encoder\.layers\.(\d+)\.layer_norm1\.", r"v.blk.\1.ln1."),
    (r"encoder\.layers\.(\d+)\.layer_norm2\.", r"v.blk.\1.ln2."),
    (r"encoder\.layers\.(\d+)\.self_attn\.(q|k|v)_proj\.", r"v.blk.\1.attn_\2."),
    (r"encoder\.layers\.(\d+)\.self_attn\.out_proj\.", r"v.blk.\1.attn_out."),
    (r"encoder\.layers\.(\d+)\.mlp\.fc1\.", r"v.blk.\1.ffn_up."),
    (r"encoder\.layers\.(\d+)\.mlp\.fc2\.", r"v.blk.\1.ffn_down."),
    (r"post_layernorm\.", "v.post_ln."),
)


@dataclass(frozen=True)
class _FolderFamily:
    """How folders of a `model_type` say what an mmproj file says."""

    projector: str
    names: tuple[tuple[str, str], ...]  # patterns of their tensors
    keys: Mapping[str, str]  # of vision_config
    defaults: Mapping[str, Any]


_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "patch_size": "patch_size",
}
_SIGLIP_KEYS = {
    **_SIZES,
    "num_attention_heads": "attention.head_count",
    "num_hidden_layers": "block_count",
    "image_size": "image_size",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}
_FOLDERS: Mapping[str, _FolderFamily] = {
    "qwen3_vl": _FolderFamily(
        "qwen3vl_merger",
        (
            (r"patch_embed\.proj\.", "v.patch_embd."),
            (r"pos_embed\.", "v.position_embd."),
            (r"blocks\.(\d+)\.norm1\.", r"v.blk.\1.ln1."),
            (r"blocks\.(\d+)\.norm2\.", r"v.blk.\1.ln2."),
            (r"blocks\.(\d+)\.attn\.qkv\.", r"v.blk.\1.attn_qkv."),
            (r"blocks\.(\d+)\.attn\.proj\.", r"v.blk.\1.attn_out."),
            (r"blocks\.(\d+)\.mlp\.linear_fc1\.", r"v.blk.\1.ffn_up."),
            (r"blocks\.(\d+)\.mlp\.linear_fc2\.", r"v.blk.\1.ffn_down."),
            (r"merger\.norm\.", "v.post_ln."),
            (r"merger\.linear_fc1\.", "mm.0."),
            (r"merger\.linear_fc2\.", "mm.2."),
            (r"deepstack_merger_list\.(\d+)\.norm\.", r"v.deepstack.{\1}.norm."),
            (r"deepstack_merger_list\.(\d+)\.linear_fc(\d)\.", r"v.deepstack.{\1}.fc\2."),
        ),
        {
            **_SIZES,
            "num_heads": "attention.head_count",
            "depth": "block_count",
            "out_hidden_size": "projection_dim",
            "spatial_merge_size": "spatial_merge_size",
        },
        {"attention.layer_norm_epsilon": 1e-6},
    ),
    "gemma3": _FolderFamily(
        "gemma3",
        (
            *_SIGLIP,
            (r"mm_input_projection_weight", "mm.input_projection.weight"),
            (r"mm_soft_emb_norm\.", "mm.soft_emb_norm."),
        ),
        _SIGLIP_KEYS,
        {"attention.layer_norm_epsilon": 1e-6},
    ),
    "smolvlm": _FolderFamily(
        "idefics3",
        (*_SIGLIP, (r"modality_projection\.proj\.", "mm.model.fc.")),
        _SIGLIP_KEYS,
        {"attention.layer_norm_epsilon": 1e-6},
    ),
}
_FOLDERS = {**_FOLDERS, "idefics3": _FOLDERS["smolvlm"], "qwen3_vl_moe": _FOLDERS["qwen3_vl"]}
_BEFORE = re.compile(
    r"(model\.)?(visual|vision_tower\.vision_model|vision_tower|vision_model|multi_modal_projector|connector)\."
)


def open_folder_tower(folder: Path) -> VisionFile | None:
    """The tower in a folder; None: it has none, or one of a family that is not supported."""
    config = _json(folder / "config.json")
    family, vision = _FOLDERS.get(config.get("model_type", "")), config.get("vision_config")
    if family is None or not isinstance(vision, dict):
        return None
    files = Safetensors.open(folder)
    try:
        metadata = _metadata(folder, config, vision, family)
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


def _metadata(folder: Path, config: dict[str, Any], vision: dict[str, Any], family: _FolderFamily) -> dict[str, Any]:
    """The keys that GGUF's converter would write, and what it leaves out of the processor's."""
    text = config.get("text_config") or {}
    keys: dict[str, Any] = {"projection_dim": text.get("hidden_size"), **family.defaults}
    keys |= {key: vision[name] for name, key in family.keys.items() if name in vision}
    processor: dict[str, Any] = {}
    for name in _PREPROCESSORS:
        found = _json(folder / name)
        processor |= found.get("image_processor", {}) if name == _PREPROCESSORS[0] else found
    keys |= {"image_mean": processor.get("image_mean"), "image_std": processor.get("image_std")}
    if processor.get("resample") in _RESAMPLE:
        keys["resample"] = _RESAMPLE[processor["resample"]]
    size: dict[str, Any] = processor["size"] if isinstance(processor.get("size"), dict) else {}
    if family.projector == "qwen3vl_merger":
        keys["image_size"] = round(vision.get("num_position_embeddings", 0) ** 0.5) * vision.get("patch_size", 0)
        layers = vision.get("deepstack_visual_indexes") or []
        keys["is_deepstack_layers"] = [i in layers for i in range(vision.get("depth", 0))]
        for name, key in (("shortest_edge", "image_min_pixels"), ("longest_edge", "image_max_pixels")):
            pixels = processor.get(name.replace("shortest_edge", "min_pixels").replace("longest_edge", "max_pixels"))
            if (pixels := size.get(name, pixels)) is not None:
                keys[key] = pixels
    elif family.projector == "gemma3":
        tokens = config.get("mm_tokens_per_image", 256)
        side = vision.get("image_size", 0) // max(1, vision.get("patch_size", 1))
        keys["projector.scale_factor"] = side // max(1, round(tokens**0.5))
    else:
        keys["projector.scale_factor"] = config.get("scale_factor", 2)
        keys["preproc_image_size"] = size.get("longest_edge", keys.get("image_size"))
    return {"clip.projector_type": family.projector, **{f"clip.vision.{key}": keys[key] for key in keys}}


def _folder_tensors(files: Safetensors, family: _FolderFamily, metadata: Mapping[str, Any]) -> dict[str, VisionTensor]:
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

        def load(name: str = name) -> F32:
            return unpack(files.raw(name), files.tensors[name].kind).reshape(files.tensors[name].shape)

        tensors[called] = VisionTensor(info.shape, info.kind, load)
    if (kernel := tensors.get("v.patch_embd.weight")) is not None:
        tensors["v.patch_embd.weight"] = _of_moments(kernel)
    if (norm := tensors.get("mm.soft_emb_norm.weight")) is not None:
        tensors["mm.soft_emb_norm.weight"] = VisionTensor(norm.shape, "f32", lambda: norm.load() + np.float32(1))
    if (whole := tensors.get("mm.input_projection.weight")) is not None:
        tensors["mm.input_projection.weight"] = _transposed(whole)
    return tensors


def _of_moments(kernel: VisionTensor) -> VisionTensor:
    """[hidden, 3, (moments,) patch, patch] → a matrix; a picture is the same at all moments."""
    rows, count = kernel.shape[0], kernel.shape[2] if len(kernel.shape) == 5 else 1
    if len(kernel.shape) not in (4, 5):
        raise ModelError(f"the kernel of patches must have four or five axes, it is {list(kernel.shape)}")

    def load() -> F32:
        values = kernel.load()
        return (values.sum(axis=2) if count > 1 else values).reshape(rows, -1).astype(np.float32)

    return VisionTensor((rows, int(np.prod(kernel.shape[1:])) // count), "f32" if count > 1 else kernel.kind, load)
