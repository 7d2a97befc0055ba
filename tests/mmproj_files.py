"""The part of a checkpoint that reads images as llama.cpp's converters write it, with names of the gguf package.

Knows nothing of the tables of `shaderlm.formats` and `shaderlm.models`, so that both are tested against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, MODEL_TENSOR, TENSOR_NAMES, GGUFWriter, get_tensor_name_map
from numpy.typing import NDArray

from .mmproj_converters import CONVERTERS

Tensors = Mapping[str, NDArray[np.float32]]
_PARTS = ("vision_tower.", "multi_modal_projector.")


def write_mmproj(
    path: Path, config: Mapping[str, Any], processor: Mapping[str, Any], tokens: Sequence[str], tensors: Tensors
) -> Path:
    """tensors: of the whole checkpoint, under Hugging Face's names."""
    writer = GGUFWriter(path, "clip")
    own = CONVERTERS.get(config["model_type"])
    if own is None:
        write = _write_pixtral if config["vision_config"]["model_type"] == "pixtral" else _write_llava
        write(writer, config, processor, tokens, tensors)
    else:
        own(writer, config, processor, tensors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sizes(writer: GGUFWriter, vision: Mapping[str, Any], processor: Mapping[str, Any], eps: float) -> None:
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_image_size(vision["image_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_head_count(vision["num_attention_heads"])
    writer.add_vision_attention_layernorm_eps(eps)
    writer.add_vision_image_mean(processor["image_mean"])
    writer.add_vision_image_std(processor["image_std"])


def _write_pixtral(
    writer: GGUFWriter,
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    tokens: Sequence[str],
    tensors: Tensors,
) -> None:
    """Rows of q and k that rope turns together lie beside each other, and the row of [IMG_BREAK] is there, too."""
    vision = config["vision_config"]
    writer.add_type("mmproj")
    writer.add_clip_projector_type("pixtral")
    _sizes(writer, vision, processor, 1e-5)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_block_count(vision["num_hidden_layers"])
    (writer.add_vision_use_silu if vision["hidden_act"] == "silu" else writer.add_vision_use_gelu)(True)
    if "spatial_merge_size" in config:
        writer.add_vision_spatial_merge_size(config["spatial_merge_size"])
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, 24)  # the projector has numbers, too
    for name, given in tensors.items():
        values = given
        if "embed_tokens" in name:
            row = values[tokens.index("[IMG_BREAK]")]
            writer.add_tensor(TENSOR_NAMES[MODEL_TENSOR.V_TOK_EMBD_IMG_BREAK], row)
        if not name.startswith(_PARTS):
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = vision["num_attention_heads"]
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        own = names.get_name(name, (".weight", ".bias"))
        assert own is not None, name
        writer.add_tensor(own, values)


# Replacements of llama.cpp's script for CLIP and SigLIP, in its order: first and second products are exchanged.
_OLD_NAMES = (
    *(("encoder.layers", "blk"), ("embeddings.", ""), ("_proj", ""), ("self_attn.", "attn_"), ("layer_norm", "ln")),
    *(("layernorm", "ln"), ("mlp.fc1", "ffn_down"), ("mlp.fc2", "ffn_up"), ("embedding", "embd"), ("layrnorm", "ln")),
)


def _write_llava(
    writer: GGUFWriter,
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    tokens: Sequence[str],
    tensors: Tensors,
) -> None:
    """By the older script: projection_dim is not the text's, and there are no layers after that of the features."""
    vision = config["vision_config"]
    layers = config["vision_feature_layer"] % (vision["num_hidden_layers"] + 1)
    writer.add_clip_projector_type("mlp")
    writer.add_bool("clip.has_llava_projector", True)
    _sizes(writer, vision, processor, vision["layer_norm_eps"])
    writer.add_vision_projection_dim(vision.get("projection_dim", 0))
    writer.add_vision_block_count(layers)
    writer.add_array("clip.vision.feature_layer", [layers])
    writer.add_vision_use_gelu(vision["hidden_act"] == "gelu")
    for name, values in tensors.items():
        if not name.startswith(_PARTS) or "post_layernorm" in name or ".head." in name:
            continue
        own = name.replace("multi_modal_projector.linear_1", "mm.0").replace("multi_modal_projector.linear_2", "mm.2")
        if own == name:
            own = own.replace("vision_tower.vision_model.", "v.").replace("vision_tower.", "v.")
            for before, after in _OLD_NAMES:
                own = own.replace(before, after)
            number = own.split(".")[2] if ".blk." in own else ""
            if number.isdigit() and int(number) >= layers:
                continue
        writer.add_tensor(own, values)
