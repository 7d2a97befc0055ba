"""How folders of each `model_type` say what an mmproj file says: names of tensors, keys, and what follows from them.

One row of FAMILIES adds a family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import ModelError

Json = dict[str, Any]
Names = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class FolderFamily:
    """One family.

    names: patterns of names of tensors, and GGUF's; {i} is the layer of the i-th features of earlier layers. keys: of
    vision_config, and GGUF's. more: further keys, of config.json and the processor's file. absent: what the class of
    `transformers` has for keys that vision_config does not have. unread: is a tensor, of this name in GGUF, not needed
    with these keys?
    """

    projector: str
    names: Names
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    more: Callable[[Json, Json], Json]
    absent: Mapping[str, Any] = field(default_factory=dict)
    unread: Callable[[str, Json], bool] = lambda name, keys: False


_SIGLIP: Names = (
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
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "patch_size": "patch_size",
    "hidden_act": "hidden_act",
}
_SIGLIP_KEYS = {
    **_SIZES,
    "num_attention_heads": "attention.head_count",
    "num_hidden_layers": "block_count",
    "image_size": "image_size",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}
_QWEN_KEYS = {
    **_SIZES,
    "num_heads": "attention.head_count",
    "depth": "block_count",
    "out_hidden_size": "projection_dim",
    "spatial_merge_size": "spatial_merge_size",
}


def size_of(processor: Json) -> Json:
    """`size` of a processor, where it is one of several numbers."""
    return processor["size"] if isinstance(processor.get("size"), dict) else {}


def _bounds(processor: Json) -> Json:
    """The least and the most pixels, under the names of today or of before."""
    named = (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels"))
    found = {f"image_{old}": size_of(processor).get(name, processor.get(old)) for name, old in named}
    return {key: pixels for key, pixels in found.items() if pixels is not None}


def _qwen3vl(config: Json, processor: Json) -> Json:
    vision = config["vision_config"]
    layers = vision["deepstack_visual_indexes"] or []
    return {
        "image_size": round(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"],
        "is_deepstack_layers": [i in layers for i in range(vision["depth"])],
        **_bounds(processor),
    }


def _gemma3(config: Json, processor: Json) -> Json:
    vision, tokens = config["vision_config"], config.get("mm_tokens_per_image", 256)
    size = vision["image_size"]
    if processor.get("do_pan_and_scan") or size_of(processor).get("height", size) != size:
        raise ModelError(f"the processor must resize whole pictures to {size} × {size}, as the tower reads them")
    side = size // max(1, vision["patch_size"])
    return {"projector.scale_factor": side // max(1, round(tokens**0.5))}


def _gemma4(config: Json, processor: Json) -> Json:
    vision, text = config["vision_config"], config.get("text_config") or {}
    heads = vision.get("num_attention_heads", 12)
    width = vision.get("head_dim", 64)
    if vision.get("num_key_value_heads", heads) != heads or vision.get("hidden_size", heads * width) != heads * width:
        raise ModelError(f"config.json: vision_config must have {heads} heads of {width} values for keys, too")
    side = vision.get("patch_size", 16) * vision.get("pooling_kernel_size", 3)
    rope = vision.get("rope_parameters") or {}
    given = processor if processor.get("do_normalize") else {}
    return {
        "image_mean": given.get("image_mean", [0.0] * 3),
        "image_std": given.get("image_std", [1.0] * 3),
        "image_max_pixels": processor.get("max_soft_tokens", 280) * side**2,
        "rope.freq_base": rope.get("rope_theta", 100.0),
        "text_sees_images": text.get("use_bidirectional_attention") == "vision",
        "layer_input_token": text.get("pad_token_id") or 0,
    }


def _idefics3(config: Json, processor: Json) -> Json:
    side = config["vision_config"]["image_size"]
    longest, tile = size_of(processor).get("longest_edge", side), processor.get("max_image_size", side)
    if tile not in (side, {"longest_edge": side}) or not processor.get("do_image_splitting", True):
        raise ModelError(f"the processor must cut pictures into tiles of {side} × {side}, as the tower reads them")
    return {"projector.scale_factor": config.get("scale_factor", 2), "preproc_image_size": longest}


def _pixtral(config: Json, processor: Json) -> Json:
    vision, text, merged = config["vision_config"], config.get("text_config") or {}, config["model_type"] == "mistral3"
    rope = vision.get("rope_parameters") or vision
    _only(config, "projector_hidden_act", "gelu", "gelu")
    _only(config, "vision_feature_layer", -1, -1 if merged else -2)
    if not merged:
        _only(config, "vision_feature_select_strategy", "full", "default")
    return {
        "hidden_act": vision.get("hidden_act", "gelu"),
        "spatial_merge_size": config.get("spatial_merge_size", 2) if merged else 1,
        "preproc_image_size": size_of(processor).get("longest_edge", vision.get("image_size")),
        "projector.layer_norm_epsilon": text.get("rms_norm_eps", 1e-6),
        "rope.freq_base": rope.get("rope_theta", 10000.0),
    }


def _llava_clip(config: Json, processor: Json) -> Json:
    _only(config, "vision_feature_select_strategy", "default", "default")
    keys, side = _llava(config, processor), config["vision_config"].get("image_size", 224)
    cut = processor.get("crop_size", side)
    if size_of(processor).get("shortest_edge", side) != side or cut not in (side, {"height": side, "width": side}):
        raise ModelError(f"the processor must resize and crop pictures to {side} × {side}, as the tower reads them")
    return keys


def _llava_siglip(config: Json, processor: Json) -> Json:
    _only(config, "vision_feature_select_strategy", "full", "default")
    keys, side = _llava(config, processor), config["vision_config"].get("image_size", 224)
    if processor.get("do_center_crop") or processor.get("size", side) not in (side, {"height": side, "width": side}):
        raise ModelError(f"the processor must resize pictures to {side} × {side}, as the tower reads them")
    return keys


def _llava(config: Json, processor: Json) -> Json:
    """The layer whose results are features; those after it are not run."""
    _only(config, "projector_hidden_act", "gelu", "gelu")
    _only(config, "multimodal_projector_bias", True, True)
    if processor.get("do_pad"):
        raise ModelError("the processor pads pictures to squares (do_pad), which is not supported")
    layers, layer = config["vision_config"].get("num_hidden_layers", 12), config.get("vision_feature_layer", -2)
    if type(layer) is not int or type(layers) is not int or not 1 <= layer % (layers + 1) <= layers:
        raise ModelError(f"config.json: vision_feature_layer must be one of {layers} layers, it is {layer!r:.60}")
    return {"block_count": layer % (layers + 1)}


def _after_features(name: str, keys: Json) -> bool:
    """Of layers after that of the features, and of what CLIP and SigLIP make of the last one."""
    found = re.match(r"v\.blk\.(\d+)\.", name)
    late = found is not None and int(found[1]) >= keys["clip.vision.block_count"]
    return late or name.startswith(("v.post_ln.", "head.")) or name.endswith("position_ids")


def _only(config: Json, key: str, known: Any, default: Any) -> None:
    """There is one value that is supported. `default`: what the class has where the file says nothing."""
    if (value := config.get(key, default)) != known:
        raise ModelError(f"config.json: {key} is {value!r:.60}; towers of {config['model_type']} need {known!r}")


_QWEN3VL = FolderFamily(
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
    _QWEN_KEYS,
    {"attention.layer_norm_epsilon": 1e-6},
    _qwen3vl,
    {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "depth": 27,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
        "hidden_act": "gelu_pytorch_tanh",
    },
)
_QWEN25VL = FolderFamily(
    "qwen2.5vl_merger",
    (
        (r"patch_embed\.proj\.", "v.patch_embd."),
        (r"blocks\.(\d+)\.norm(1|2)\.", r"v.blk.\1.ln\2."),
        (r"blocks\.(\d+)\.attn\.qkv\.", r"v.blk.\1.attn_qkv."),
        (r"blocks\.(\d+)\.attn\.proj\.", r"v.blk.\1.attn_out."),
        (r"blocks\.(\d+)\.mlp\.(gate|up|down)_proj\.", r"v.blk.\1.ffn_\2."),
        (r"merger\.ln_q\.", "v.post_ln."),
        (r"merger\.mlp\.(\d)\.", r"mm.\1."),
    ),
    {
        **_QWEN_KEYS,
        "window_size": "window_size",
        "fullatt_block_indexes": "fullatt_block_indexes",
    },
    {"attention.layer_norm_epsilon": 1e-6, "image_size": 560},
    lambda config, processor: _bounds(processor),
)
_GEMMA3 = FolderFamily(
    "gemma3",
    (
        *_SIGLIP,
        (r"mm_input_projection_weight", "mm.input_projection.weight"),
        (r"mm_soft_emb_norm\.", "mm.soft_emb_norm."),
    ),
    _SIGLIP_KEYS,
    {},
    _gemma3,
    {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
)
_GEMMA4 = FolderFamily(
    "gemma4v",
    (
        (r"patch_embedder\.input_proj\.", "v.patch_embd."),
        (r"patch_embedder\.position_embedding_table", "v.position_embd.weight"),
        (r"encoder\.layers\.(\d+)\.input_layernorm\.", r"v.blk.\1.ln1."),
        (r"encoder\.layers\.(\d+)\.pre_feedforward_layernorm\.", r"v.blk.\1.ln2."),
        (r"encoder\.layers\.(\d+)\.post_attention_layernorm\.", r"v.blk.\1.attn_post_norm."),
        (r"encoder\.layers\.(\d+)\.post_feedforward_layernorm\.", r"v.blk.\1.ffn_post_norm."),
        (r"encoder\.layers\.(\d+)\.self_attn\.(q|k)_norm\.", r"v.blk.\1.attn_\2_norm."),
        (r"encoder\.layers\.(\d+)\.self_attn\.(q|k|v)_proj\.(linear\.)?", r"v.blk.\1.attn_\2."),
        (r"encoder\.layers\.(\d+)\.self_attn\.o_proj\.(linear\.)?", r"v.blk.\1.attn_out."),
        (r"encoder\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(linear\.)?", r"v.blk.\1.ffn_\2."),
        (r"std_(bias|scale)", r"v.std_\1"),
        (r"embedding_projection\.", "mm.input_projection."),
    ),
    {
        **_SIZES,
        "num_attention_heads": "attention.head_count",
        "num_hidden_layers": "block_count",
        "rms_norm_eps": "attention.layer_norm_epsilon",
        "pooling_kernel_size": "projector.scale_factor",
        "hidden_activation": "hidden_act",
    },
    {"attention.layer_norm_epsilon": 1e-6, "image_size": 224},
    _gemma4,
)
_IDEFICS3 = FolderFamily(
    "idefics3",
    (*_SIGLIP, (r"modality_projection\.proj\.", "mm.model.fc.")),
    _SIGLIP_KEYS,
    {},
    _idefics3,
    {
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
)
_PIXTRAL = FolderFamily(
    "pixtral",
    (
        (r"patch_conv\.", "v.patch_embd."),
        (r"ln_pre\.", "v.pre_ln."),
        (r"transformer\.layers\.(\d+)\.attention_norm\.", r"v.blk.\1.ln1."),
        (r"transformer\.layers\.(\d+)\.ffn_norm\.", r"v.blk.\1.ln2."),
        (r"transformer\.layers\.(\d+)\.attention\.(q|k|v)_proj\.", r"v.blk.\1.attn_\2."),
        (r"transformer\.layers\.(\d+)\.attention\.o_proj\.", r"v.blk.\1.attn_out."),
        (r"transformer\.layers\.(\d+)\.feed_forward\.(gate|up|down)_proj\.", r"v.blk.\1.ffn_\2."),
        (r"norm\.", "mm.input_norm."),
        (r"patch_merger\.merging_layer\.", "mm.patch_merger."),
        (r"linear_(\d)\.", r"mm.\1."),
    ),
    _SIGLIP_KEYS,
    {
        "embedding_length": 1024,
        "feed_forward_length": 4096,
        "block_count": 24,
        "attention.head_count": 16,
        "image_size": 1024,
        "patch_size": 16,
        "projection_dim": 4096,
        "attention.layer_norm_epsilon": 1e-5,
    },
    _pixtral,
)
_LLAVA_NAMES: Names = (
    *_SIGLIP,
    (r"embeddings\.class_embedding", "v.class_embd"),
    (r"pre_layrnorm\.", "v.pre_ln."),
    (r"linear_1\.", "mm.0."),
    (r"linear_2\.", "mm.2."),
)
_LLAVA_DEFAULTS = {
    "embedding_length": 768,
    "feed_forward_length": 3072,
    "block_count": 12,
    "attention.head_count": 12,
    "image_size": 224,
}
_LLAVA_CLIP = FolderFamily(
    "mlp",
    _LLAVA_NAMES,
    _SIGLIP_KEYS,
    {**_LLAVA_DEFAULTS, "patch_size": 32, "attention.layer_norm_epsilon": 1e-5, "hidden_act": "quick_gelu"},
    _llava_clip,
    unread=_after_features,
)
_LLAVA_SIGLIP = FolderFamily(
    "mlp",
    _LLAVA_NAMES,
    _SIGLIP_KEYS,
    {**_LLAVA_DEFAULTS, "patch_size": 16, "attention.layer_norm_epsilon": 1e-6},
    _llava_siglip,
    unread=_after_features,
)
# By model_type, and by that of vision_config where it has several.
FAMILIES: Mapping[str, FolderFamily] = {
    "qwen3_vl": _QWEN3VL,
    "qwen2_5_vl": _QWEN25VL,
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "smolvlm": _IDEFICS3,
    "idefics3": _IDEFICS3,
    "mistral3 pixtral": _PIXTRAL,
    "llava pixtral": _PIXTRAL,
    "llava clip_vision_model": _LLAVA_CLIP,
    "llava siglip_vision_model": _LLAVA_SIGLIP,
}
