"""Shapes of the models that benchmarks and synthetic models speak of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a llama-like model."""

    name: str
    layers: int
    hidden: int
    Hq: int
    Hkv: int
    D: int
    ffn: int
    vocab: int
    tied: bool  # the embeddings serve as output matrix

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


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, tied=True),
        ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, tied=False),
    )
}
