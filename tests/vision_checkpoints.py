"""Tiny checkpoints that see: rows that describe them, and what `make_vision_checkpoints` recorded, as files.

As for `checkpoints`, the weights depend on the names of their tensors alone. `unpack_families` writes a Hugging Face
folder, a GGUF file with its mmproj file, and pictures for each, in the form of `vision_oracles`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .checkpoints import tensors_of, write_entries
from .converted import Tensors, converted
from .folders import write_tokenizer
from .mmproj_files import write_mmproj
from .safetensors_files import write_safetensors
from .tiny_models import tiny_metadata, tiny_tokens
from .vision_oracles import VisionOracle

FOLDER = Path(__file__).parent / "data" / "vision"
# Pictures by name: rows and columns.
PICTURES = {
    "plain": (56, 40),
    "low": (30, 48),
    "wide": (8, 120),
    "line": (1, 20),
    "exact": (64, 64),
    "tall": (200, 150),
}
CASES = (("plain",), ("wide",), ("line",), ("exact",), ("plain", "low"))
QUESTION = "what is in the street?"
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_CONTROL = 3


class VisionRow(NamedTuple):
    """One checkpoint.

    architecture: GGUF's, of the text. model: the class of transformers. place: what the chat template writes for a
    picture. tokens: those that the vocabulary has for pictures. processor: what preprocessor_config.json says.
    """

    architecture: str
    model: str
    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    place: str
    tokens: tuple[str, ...]
    more: Mapping[str, Any] = MappingProxyType({})  # of the file of the processor that is not about pixels
    cases: tuple[tuple[str, ...], ...] = CASES
    image_tokens: tuple[int, int] | None = None  # of the processor, which an mmproj file does not say

    @property
    def metadata(self) -> dict[str, Any]:
        """Of the vocabulary, as GGUF files have it."""
        known = tiny_metadata()
        entries = {key: value for key, value in known.items() if key.startswith("tokenizer.")}
        return {
            **entries,
            "tokenizer.ggml.tokens": [*tiny_tokens(), *self.tokens],
            "tokenizer.ggml.token_type": [*entries["tokenizer.ggml.token_type"], *[_CONTROL] * len(self.tokens)],
            "tokenizer.chat_template": (
                "{% for m in messages %}<|im_start|>{% if m.content is string %}{{ m.content }}{% else %}"
                "{% for c in m.content %}{% if c.type == 'image' %}" + self.place + "{% else %}{{ c.text }}{% endif %}"
                "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
            ),
        }


_FIRST = len(tiny_tokens())  # the number of the first token for pictures
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": _PLAIN,
    "vocab_size": _FIRST + 3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 8,
    "image_size": 64,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_LONGEST = {"resample": 3, "size": {"longest_edge": 64}, **_CLIP}

_QWEN_TEXT = {key: value for key, value in _TEXT.items() if key not in ("head_dim", "sliding_window")}

_GEMMA_TEXT = {
    **_TEXT,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "sliding_window": 12,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
_GEMMA_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 256,
}


def _gemma4(text: Mapping[str, Any], vision: Mapping[str, Any], cases: tuple[tuple[str, ...], ...]) -> VisionRow:
    names = ("image", "boi", "eoi")
    return VisionRow(
        "gemma4",
        "Gemma4",
        {
            "text_config": {**_GEMMA_TEXT, **text},
            "vision_config": {**_GEMMA_VISION, **vision},
            **{f"{name}_token_id": _FIRST + i for i, name in enumerate(names)},
        },
        {"image_processor_type": "Gemma4ImageProcessor", "do_normalize": False, "max_soft_tokens": 70},
        "<|image|>",
        ("<|image|>", "<|image>", "<image|>"),
        cases=cases,
        image_tokens=(1, 70),
    )


_LAYER_INPUTS = {
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": _FIRST + 3,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}

ROWS: dict[str, VisionRow] = {
    "gemma4-inputs": _gemma4(_LAYER_INPUTS, {"use_clipped_linears": True}, (("plain",), ("line",))),
    "gemma4-blocks": _gemma4(
        {"use_bidirectional_attention": "vision"}, {"standardize": True}, (("wide",), ("plain", "low"))
    ),
    "qwen25vl": VisionRow(
        "qwen2vl",
        "Qwen2_5_VL",
        {
            "text_config": {
                **_QWEN_TEXT,
                "vocab_size": _FIRST + 4,
                "rope_parameters": {**_PLAIN, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "depth": 3,
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_heads": 2,
                "out_hidden_size": 32,
                "patch_size": 8,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": _FIRST,
            "vision_start_token_id": _FIRST + 1,
            "vision_end_token_id": _FIRST + 2,
            "video_token_id": _FIRST + 3,
            "tie_word_embeddings": False,
        },
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": 8,
            "merge_size": 2,
            "min_pixels": 4 * 256,
            "max_pixels": 16384 * 256,
            **_CLIP,
        },
        "<|vision_start|><|image_pad|><|vision_end|>",
        ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
        cases=(("plain",), ("wide",), ("line",), ("exact",), ("tall",), ("tall", "plain")),
    ),
    "mistral3": VisionRow(
        "mistral3",
        "Mistral3",
        {
            "text_config": {"model_type": "mistral", **_TEXT},
            "vision_config": _PIXTRAL,
            "image_token_index": _FIRST,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "multimodal_projector_bias": False,
            "tie_word_embeddings": False,
        },
        {"image_processor_type": "PixtralImageProcessorFast", "patch_size": {"height": 8, "width": 8}, **_LONGEST},
        "[IMG]",
        _PIXTRAL_TOKENS,
        {"processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 2},
    ),
    "pixtral": VisionRow(
        "llama",
        "Llava",
        {
            "text_config": {"model_type": "mistral", **_TEXT},
            "vision_config": {**_PIXTRAL, "patch_size": 16, "hidden_act": "gelu"},
            "image_token_index": _FIRST,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 16, "width": 16}, **_LONGEST},
        "[IMG]",
        _PIXTRAL_TOKENS,
        {"processor_class": "PixtralProcessor", "patch_size": 16},
    ),
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "patch_size": 8,
    "image_size": 32,
}
ROWS |= {
    "llava-clip": VisionRow(
        "llama",
        "Llava",
        {
            "text_config": {"model_type": "llama", **_TEXT, "vocab_size": _FIRST + 1},
            "vision_config": {"model_type": "clip_vision_model", **_TOWER, "intermediate_size": 80},
            "image_token_index": _FIRST,
        },
        {
            "image_processor_type": "CLIPImageProcessor",
            "do_center_crop": True,
            "resample": 3,
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
            **_CLIP,
        },
        "<image>",
        ("<image>",),
        {"processor_class": "LlavaProcessor", "patch_size": 8},
    ),
    "llava-siglip": VisionRow(
        "qwen2",
        "Llava",
        {
            "text_config": {"model_type": "qwen2", **_TEXT, "vocab_size": _FIRST + 1},
            "vision_config": {"model_type": "siglip_vision_model", **_TOWER, "intermediate_size": 80},
            "image_token_index": _FIRST,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        {
            "image_processor_type": "SiglipImageProcessor",
            "resample": 3,
            "size": {"height": 32, "width": 32},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "<image>",
        ("<image>",),
        {"processor_class": "LlavaProcessor", "patch_size": 8},
    ),
}


def picture(name: str) -> NDArray[np.uint8]:
    """[rows, columns, 3]: waves and some noise."""
    rows, columns = PICTURES[name]
    y, x, c = np.meshgrid(np.arange(rows), np.arange(columns), np.arange(3), indexing="ij")
    waves = 127.5 + 100 * np.sin(0.23 * y + 0.11 * x * (c + 1)) + 20 * np.cos(0.9 * x - 0.4 * y * c)
    return np.asarray(np.clip(waves, 0, 255), np.uint8)


def messages(names: tuple[str, ...] | list[str]) -> list[dict[str, Any]]:
    """A question about these pictures."""
    return [{"role": "user", "content": [*({"type": "image"} for _ in names), {"type": "text", "text": QUESTION}]}]


def recorded(name: str) -> dict[str, Any]:
    """config and shapes as they are stored; ids and greedy ids of every case."""
    entry: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return entry


def write_folder(path: Path, name: str, entry: Mapping[str, Any]) -> Path:
    """A Hugging Face folder."""
    row = ROWS[name]
    path.mkdir(parents=True)
    for file, content in (
        ("config.json", entry["config"]),
        ("preprocessor_config.json", row.processor),
        ("processor_config.json", dict(row.more)),
    ):
        (path / file).write_text(json.dumps(content), encoding="utf-8")
    write_safetensors(path / "model.safetensors", tensors_of(entry))
    write_tokenizer(path, row.metadata)
    return path


def write_files(path: Path, name: str, entry: Mapping[str, Any]) -> None:
    """model.gguf and mmproj.gguf."""
    row, tensors, text = ROWS[name], tensors_of(entry), entry["config"]["text_config"]
    own, made = converted(row.architecture, {"tie_word_embeddings": False, **text}, _text(tensors))
    write_entries(path / "model.gguf", row.architecture, {**row.metadata, **own}, made)
    write_mmproj(path / "mmproj.gguf", entry["config"], row.processor, row.metadata["tokenizer.ggml.tokens"], tensors)


def _text(tensors: Tensors) -> Tensors:
    """Those of the text model, under the names that it has by itself."""
    seeing = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector|embed_vision)\.")
    texts = {name: values for name, values in tensors.items() if not seeing.match(name)}
    return {re.sub(r"^(model\.)?language_model\.(model\.)?", _before, name): each for name, each in texts.items()}


def _before(inside: re.Match[str]) -> str:
    """`model.` where there was one, before or after `language_model.`."""
    return "model." if inside[1] or inside[2] else ""


def unpack_families(folder: Path) -> dict[str, VisionOracle]:
    """All of them, in a folder; by name."""
    from PIL import Image

    oracles = {}
    for name in ROWS:
        entry, path = recorded(name), folder / name
        write_folder(path / "hf", name, entry)
        write_files(path, name, entry)
        (path / "images").mkdir()
        for each in PICTURES:
            Image.fromarray(picture(each)).save(path / "images" / f"{each}.png")
        with np.load(FOLDER / f"{name}.npz") as arrays:
            np.savez(path / "pixels.npz", **{key: arrays[key] for key in arrays if key != "logits"})
            np.save(path / "logits.npy", arrays["logits"])
        about = {**entry, "cases": [_case(each) for each in entry["cases"]]}
        (path / "oracle.json").write_text(json.dumps(about), encoding="utf-8")
        oracles[name] = VisionOracle(path)
    return oracles


def _case(case: Mapping[str, Any]) -> dict[str, Any]:
    images = [f"{name}.png" for name in case["images"]]
    return {**case, "images": images, "messages": messages(case["images"])}
