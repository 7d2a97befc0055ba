"""Configs of models by their shape alone, for tests that need no weights."""

from __future__ import annotations

from typing import Any

from shaderlm.models.architecture import Architecture
from shaderlm.models.config import Config
from shaderlm.models.supported import architecture

SMOLLM2 = (30, 576, 9, 3, 64, 1536, 49152)
LLAMA_1B = (16, 2048, 32, 8, 64, 8192, 128256)
LLAMA_8B = (32, 4096, 32, 8, 128, 14336, 128256)
QWEN3 = (28, 1024, 16, 8, 128, 3072, 151936)
TINY = (2, 64, 4, 2, 16, 96, 300)


def model(
    shape: tuple[int, ...] = TINY,
    kind: str = "q4_0",
    *,
    name: str = "llama",
    formats: dict[str, str] | None = None,
    **metadata: Any,
) -> tuple[Architecture, Config]:
    """A model of (layers, hidden, heads, kv heads, head width, ffn, vocabulary), matrices of one format.

    `name` is the architecture's. `formats` maps the name of a matrix ("attn_v") to another format. Embeddings are tied.
    """
    layers, hidden, heads, kv_heads, width, ffn, vocabulary = shape
    given = {
        "general.architecture": name,
        f"{name}.block_count": layers,
        f"{name}.embedding_length": hidden,
        f"{name}.attention.head_count": heads,
        f"{name}.attention.head_count_kv": kv_heads,
        f"{name}.attention.key_length": width,
        f"{name}.feed_forward_length": ffn,
        f"{name}.context_length": 8192,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-5,
    }
    given |= {f"{name}.{key}": value for key, value in metadata.items()}
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
        shapes |= {f"blk.{i}.{norm}.weight": (hidden,) for norm in ("attn_norm", "ffn_norm")}
        if name == "qwen3":
            shapes |= {f"blk.{i}.{norm}.weight": (width,) for norm in ("attn_q_norm", "attn_k_norm")}
        shapes |= {f"blk.{i}.{matrix}.weight": size for matrix, size in matrices.items()}
    own = formats or {}
    kinds = {n: own.get(n.split(".")[-2], kind) if len(size) > 1 else "f32" for n, size in shapes.items()}
    made = architecture(given)
    return made, made.read(given, shapes, kinds)


llama = model
