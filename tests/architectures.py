"""Configs of models by their shape alone, for tests that need no weights."""

from __future__ import annotations

from typing import Any

from shaderlm.models.architecture import Architecture, Config, architecture

SMOLLM2 = (30, 576, 9, 3, 64, 1536, 49152)
LLAMA_1B = (16, 2048, 32, 8, 64, 8192, 128256)
LLAMA_8B = (32, 4096, 32, 8, 128, 14336, 128256)
TINY = (2, 64, 4, 2, 16, 96, 300)


def llama(
    shape: tuple[int, ...] = TINY, kind: str = "q4_0", *, formats: dict[str, str] | None = None, **metadata: Any
) -> tuple[Architecture, Config]:
    """A llama of (layers, hidden, heads, kv heads, head width, ffn, vocabulary), matrices of one format.

    `formats` maps the name of a matrix ("attn_v") to another format. Embeddings are tied.
    """
    layers, hidden, heads, kv_heads, width, ffn, vocabulary = shape
    given = {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.embedding_length": hidden,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.key_length": width,
        "llama.feed_forward_length": ffn,
        "llama.context_length": 8192,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    given |= {f"llama.{key}": value for key, value in metadata.items()}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,)}
    matrices = {
        "attn_q": (heads * width, hidden),
        "attn_k": (kv_heads * width, hidden),
        "attn_v": (kv_heads * width, hidden),
        "attn_output": (hidden, heads * width),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    for i in range(layers):
        shapes |= {f"blk.{i}.{name}.weight": (hidden,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.{name}.weight": size for name, size in matrices.items()}
    own = formats or {}
    kinds = {n: own.get(n.split(".")[-2], kind) if len(size) > 1 else "f32" for n, size in shapes.items()}
    made = architecture(given)
    return made, made.read(given, shapes, kinds)
