"""Qwen3's forward pass in plain NumPy, in float64: slow, obvious, and without any code of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


class Checkpoint:
    """A file's numbers and tensors, through the gguf package alone."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._fields = {key: field.contents() for key, field in reader.fields.items()}
        self._tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}

    def number(self, key: str) -> Any:
        return self._fields[f"qwen3.{key}"]

    def weight(self, name: str) -> F64:
        return np.asarray(self._tensors[f"{name}.weight"], np.float64)


def norm(x: F64, weight: F64, eps: float) -> F64:
    return np.asarray(weight * x / np.sqrt((x * x).mean() + eps))


def turn(head: F64, position: int, theta: float, halves: bool) -> F64:
    width, out = len(head), head.copy()
    for i in range(width // 2):
        a, b = (i, i + width // 2) if halves else (2 * i, 2 * i + 1)
        angle = position * theta ** (-2 * i / width)
        out[a] = head[a] * np.cos(angle) - head[b] * np.sin(angle)
        out[b] = head[a] * np.sin(angle) + head[b] * np.cos(angle)
    return out


def attend(query: F64, keys: list[F64], values: list[F64]) -> F64:
    scores = np.exp([query @ key / np.sqrt(len(query)) for key in keys])
    return np.asarray(sum(s * v for s, v in zip(scores / scores.sum(), values, strict=True)))


def forward(path: Path, ids: list[int], *, head_norms: bool = True, halves: bool = True) -> F64:
    """Logits [T, vocabulary], token by token and head by head. The options make other models of it: wrong ones."""
    file = Checkpoint(path)
    heads, kv_heads = file.number("attention.head_count"), file.number("attention.head_count_kv")
    width, eps = file.number("attention.key_length"), file.number("attention.layer_norm_rms_epsilon")
    layers = file.number("block_count")
    cache: dict[tuple[int, int], tuple[list[F64], list[F64]]] = {
        (layer, head): ([], []) for layer in range(layers) for head in range(kv_heads)
    }
    logits = []
    for position, token in enumerate(ids):
        x = file.weight("token_embd")[token]
        for layer in range(layers):
            w = {name: file.weight(f"blk.{layer}.{name}") for name in (
                "attn_norm", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "attn_output",
                "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
            )}  # fmt: skip
            h = norm(x, w["attn_norm"], eps)
            parts = {}
            for name, count in (("attn_q", heads), ("attn_k", kv_heads)):
                split = list((w[name] @ h).reshape(count, width))
                if head_norms:
                    split = [norm(head, w[f"{name}_norm"], eps) for head in split]
                parts[name] = [turn(head, position, file.number("rope.freq_base"), halves) for head in split]
            v = (w["attn_v"] @ h).reshape(kv_heads, width)
            for head in range(kv_heads):
                cache[layer, head][0].append(parts["attn_k"][head])
                cache[layer, head][1].append(v[head])
            shared = heads // kv_heads  # query heads to a kv head
            attended = [attend(q, *cache[layer, head // shared]) for head, q in enumerate(parts["attn_q"])]
            x = x + w["attn_output"] @ np.concatenate(attended)
            h = norm(x, w["ffn_norm"], eps)
            gate, up = w["ffn_gate"] @ h, w["ffn_up"] @ h
            x = x + w["ffn_down"] @ (gate / (1 + np.exp(-gate)) * up)
        logits.append(file.weight("token_embd") @ norm(x, file.weight("output_norm"), eps))
    return np.array(logits)
