"""What llama.cpp's converters write of the part that reads images of Qwen2.5-VL and Gemma 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from numpy.typing import NDArray

Tensors = Mapping[str, NDArray[np.float32]]
Json = Mapping[str, Any]


def _sizes(writer: GGUFWriter, config: Json, mean: list[float], std: list[float], layers: str) -> None:
    """What files of all families have."""
    vision = config["vision_config"]
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision[layers])
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_image_mean(mean)
    writer.add_vision_image_std(std)


def write_qwen25vl(writer: GGUFWriter, config: Json, processor: Json, given: Tensors) -> None:
    """Queries, keys and values are three tensors, and so are the kernels of two moments. Windows have 112 pixels."""
    vision = config["vision_config"]
    _sizes(writer, config, processor["image_mean"], processor["image_std"], "depth")
    writer.add_clip_projector_type("qwen2.5vl_merger")
    writer.add_vision_image_size(560)
    writer.add_vision_head_count(vision["num_heads"])
    writer.add_vision_use_silu(True)
    writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, vision["depth"])
    for full, values in given.items():
        name = full.removeprefix("model.")
        if not name.startswith("visual."):
            continue
        if "patch_embed.proj" in name:
            for moment, suffix in enumerate(("", ".1")):
                writer.add_tensor(f"v.patch_embd.weight{suffix}", np.ascontiguousarray(values[:, :, moment]))
            continue
        parts = {name: values}
        if ".qkv." in name:
            parts = {name.replace("qkv", each): part for each, part in zip("qkv", np.split(values, 3), strict=True)}
        for each, part in parts.items():
            own = names.get_name(each, (".weight", ".bias"))
            assert own is not None, each
            writer.add_tensor(own, part)


def write_gemma4(writer: GGUFWriter, config: Json, processor: Json, given: Tensors) -> None:
    """Pixels of patches are channel by channel; bounds are vectors of one number. The image size means nothing."""
    vision = config["vision_config"]
    _sizes(writer, config, [0.0] * 3, [1.0] * 3, "num_hidden_layers")
    writer.add_string("clip.vision.projector_type", "gemma4v")
    writer.add_vision_image_size(224)
    writer.add_vision_head_count(vision["num_attention_heads"])
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, vision["num_hidden_layers"])
    suffixes = (".weight", *(f".{side}_{bound}" for side in ("input", "output") for bound in ("min", "max")))
    for name, values in given.items():
        if not name.startswith(("model.vision_tower.", "model.embed_vision.")):
            continue
        called = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        called += ".weight" if called.endswith("position_embedding_table") else ""
        if "input_proj" in name:
            side = vision["patch_size"]
            values = np.ascontiguousarray(values.reshape(-1, side, side, 3).transpose(0, 3, 1, 2))
        own = names.get_name(called, suffixes)
        assert own is not None, called
        writer.add_tensor(own, values.reshape(values.shape or 1))


CONVERTERS: Mapping[str, Callable[[GGUFWriter, Json, Json, Tensors], None]] = {
    "qwen2_5_vl": write_qwen25vl,
    "gemma4": write_gemma4,
}
