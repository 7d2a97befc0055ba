"""Shapes of models: for benchmarks of kernels and for synthetic models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, and what else its file would say. The matrices are those of a dense decoder."""

    name: str
    layers: int
    hidden: int
    Hq: int
    Hkv: int
    D: int
    ffn: int
    vocab: int
    tied: bool  # the embeddings serve as output matrix
    architecture: str = "llama"
    context: int = 131_072
    eps: float = 1e-5
    theta: float = 500_000.0  # of rope

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(K, N) of a layer's matrix products, q/k/v and gate/up each taken as one, and of the output."""
        qkv = (self.Hq + 2 * self.Hkv) * self.D
        return {
            "qkv": (self.hidden, qkv),
            "attn out": (self.Hq * self.D, self.hidden),
            "gate/up": (self.hidden, 2 * self.ffn),
            "down": (self.ffn, self.hidden),
            "output": (self.hidden, self.vocab),
        }

    @property
    def metadata(self) -> dict[str, Any]:
        """As a GGUF file of this model has it."""
        numbers = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "feed_forward_length": self.ffn,
            "attention.head_count": self.Hq,
            "attention.head_count_kv": self.Hkv,
            "attention.key_length": self.D,
            "attention.value_length": self.D,
            "attention.layer_norm_rms_epsilon": self.eps,
            "rope.freq_base": self.theta,
        }
        own = {f"{self.architecture}.{key}": value for key, value in numbers.items()}
        return {"general.architecture": self.architecture, **own}


# Shapes whose kernels are benchmarked.
MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, tied=True),
        ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, tied=False),
    )
}

_QWEN3: dict[str, Any] = {"architecture": "qwen3", "context": 40_960, "eps": 1e-6, "theta": 1e6}
# Shapes of synthetic models, which have random weights.
SYNTHETIC = {
    **MODELS,
    "qwen3-0.6b": ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, tied=True, **_QWEN3),
}
