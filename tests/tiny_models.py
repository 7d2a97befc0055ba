"""Tiny checkpoints with random weights: real files that load in milliseconds and answer in printable nonsense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from .gguf_files import KINDS, blocks

__all__ = ["KINDS", "write_tiny_llama", "write_tiny_qwen3"]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = ("t h", "th e", "i n", "a n", "Ġ the", "Ġ a", "o u", "e r")  # Ġ is the space of byte-level BPE
# Of formats that the gguf package does not write: where the f16 scales of a block lie, the standard deviation of
# what they multiply, and half of its range if there is a minimum.
_RANDOM = {
    "q4_k": ((0, 2), 36 * 4.6, 7.5),
    "q5_k": ((0, 2), 36 * 9.2, 15.5),
    "q6_k": ((208,), 74 * 18.5, 0.0),
    "iq4_nl": ((0,), 67.0, 0.0),
    "iq4_xs": ((0,), 67 * 18.5, 0.0),
    "q3_k": ((108,), 18.5 * 2.35, 0.0),
    "q2_k": ((80, 82), 13.9, 1.5),
}
_NORMAL, _CONTROL = 1, 3


def write_tiny_llama(path: Path, **options: Any) -> Path:
    """Write a tiny llama, and return its path; options as for `write_tiny`."""
    return write_tiny(path, "llama", **options)


def write_tiny_qwen3(path: Path, **options: Any) -> Path:
    """The same for a qwen3. Its heads are wider than hidden / heads."""
    return write_tiny(path, "qwen3", **options)


def write_tiny(
    path: Path,
    architecture: str,
    *,
    kind: str = "f32",
    layers: int = 2,
    context: int = 128,
    tied: bool = True,
    template: bool = True,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[np.float32]] | None = None,
    **sizes: int,
) -> Path:
    """Write a checkpoint whose matrices are of this kind, and return its path.

    sizes: hidden, heads, kv_heads, ffn (64, 4, 2, 96; hidden and ffn 256 where blocks are that long).
    A qwen3 has a head_width too (32).
    metadata: entries to add or replace; None as a value leaves the entry out. tensors: dense tensors to add or replace.
    """
    large = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]][0] == 256
    size = {"hidden": 256 if large else 64, "heads": 4, "kv_heads": 2, "ffn": 256 if large else 96}
    if architecture == "qwen3":
        size["head_width"] = 128 if large else 32
    assert not set(sizes) - set(size), f"sizes are {', '.join(size)}; got {', '.join(sizes)}"
    size |= sizes
    entries = _metadata(architecture, size, layers, context, template) | dict(metadata or {})
    writer = GGUFWriter(path, str(entries.pop("general.architecture", architecture)))
    for key, value in entries.items():
        adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            (writer.add_array if isinstance(value, list) else adders[type(value)])(key, value)
    rng = np.random.default_rng(seed)
    given = dict(tensors or {})
    found = dict.fromkeys(given) | _shapes(size, layers, tied)
    for name, shape in found.items():
        weights = given[name] if shape is None or name in given else rng.standard_normal(shape, np.float32)
        if weights.ndim == 1:
            writer.add_tensor(name, weights if name in given else 1 + weights / 10)
        else:
            raw = _matrix(kind, weights if name in given else _scaled(name, weights))
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_tokens() -> list[str]:
    """256 bytes as byte-level BPE writes them, what the merges make, and the special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [*map(chr, printable), *(chr(256 + i) for i in range(256 - len(printable)))]
    return [*alphabet, *(merge.replace(" ", "") for merge in _MERGES), *SPECIAL]


def tiny_metadata() -> dict[str, Any]:
    """The metadata of a tiny llama, without a file."""
    return _metadata("llama", {"hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96}, 2, 128, True)


# What files of an architecture say beside what all of them do: as their converters write it.
_OWN: Mapping[str, Callable[[Mapping[str, int]], dict[str, Any]]] = {
    "llama": lambda size: {
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": size["hidden"] // size["heads"],
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": len(tiny_tokens()),
        "tokenizer.ggml.pre": "gpt-2",
    },
    "qwen3": lambda size: {
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3.attention.key_length": size["head_width"],
        "qwen3.attention.value_length": size["head_width"],
        "qwen3.rope.freq_base": 1000000.0,
        "tokenizer.ggml.pre": "qwen2",
    },
}


def _metadata(own: str, size: Mapping[str, int], layers: int, context: int, template: bool) -> dict[str, Any]:
    tokens = tiny_tokens()
    first_special = len(tokens) - len(SPECIAL)
    return {
        "general.name": f"Tiny {own.title()}",
        f"{own}.context_length": context,
        f"{own}.embedding_length": size["hidden"],
        f"{own}.block_count": layers,
        f"{own}.feed_forward_length": size["ffn"],
        f"{own}.attention.head_count": size["heads"],
        f"{own}.attention.head_count_kv": size["kv_heads"],
        **_OWN[own](size),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_NORMAL] * first_special + [_CONTROL] * len(SPECIAL),
        "tokenizer.ggml.merges": list(_MERGES),
        "tokenizer.ggml.bos_token_id": first_special + 1,
        "tokenizer.ggml.eos_token_id": first_special + 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML if template else None,
    }


def _shapes(size: Mapping[str, int], layers: int, tied: bool) -> dict[str, tuple[int, ...]]:
    hidden, ffn, vocabulary = size["hidden"], size["ffn"], len(tiny_tokens())
    head = size.get("head_width", hidden // size["heads"])
    q, kv = head * size["heads"], head * size["kv_heads"]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,)}
    if not tied:
        shapes["output.weight"] = (vocabulary, hidden)
    for i in range(layers):
        rows = {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
        rows |= {"attn_output": (hidden, q), "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden)}
        vectors = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
        if "head_width" in size:  # a qwen3
            vectors |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
        shapes |= {f"blk.{i}.{name}.weight": s for name, s in {**rows, "ffn_down": (hidden, ffn), **vectors}.items()}
    return shapes


def _scaled(name: str, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    if name not in ("token_embd.weight", "output.weight"):
        return weights * np.float32(1.5 / np.sqrt(weights.shape[1]))
    # Small, so that the layers and not the last token decide; smaller still for all but printable ASCII and the
    # merged tokens, so that the answers are text and end by their length.
    rare = np.ones((len(weights), 1), np.float32)
    rare[94:256] = 0.1
    rare[-len(SPECIAL) :] = 0.1
    return weights * rare * np.float32(0.2)


def _matrix(kind: str, weights: NDArray[np.float32]) -> NDArray[Any]:
    made = blocks(kind, weights)
    if kind not in _RANDOM:
        return made
    # Random blocks: the products of scales (6 bits, or 8 with a sign) and numbers in a block have the standard
    # deviation `unit`, and the minima lie half a range below, so that the weights are as large as those asked for.
    places, unit, half = _RANDOM[kind]
    rows = made.reshape(len(made), -1, GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]][1])
    deviation = weights.reshape(*rows.shape[:2], -1).std(axis=2)
    for at, factor in zip(places, (1.0, half), strict=False):
        rows[:, :, at : at + 2] = (deviation / unit * factor)[:, :, None].astype(np.float16).view(np.uint8)
    return rows.reshape(len(made), -1)
