"""Shapes of models: for benchmarks of kernels and for synthetic models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Shapes

# Matrices that read one input are multiplied as one. A file may store them as one, too.
_PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("attn_q", "attn_k", "attn_v", "attn_qkv"),
    "attn out": ("attn_output",),
    "gate/up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
    "router": ("ffn_gate_inp",),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, and what else its file would say."""

    name: str
    layers: int
    hidden: int
    Hq: int  # 0: no layer attends
    Hkv: int
    D: int
    ffn: int
    vocab: int
    tied: bool  # the embeddings serve as output matrix
    architecture: str = "llama"
    context: int = 131_072
    eps: float = 1e-5
    theta: float = 500_000.0  # of rope
    further: Mapping[str, Any] = field(default_factory=dict, hash=False)  # keys, without the architecture's name
    biases: tuple[str, ...] = ()  # of which matrices of every layer
    vectors: Mapping[str, int] = field(default_factory=dict, hash=False)  # tensors that not every such file has
    layer_vectors: Mapping[str, int] = field(default_factory=dict, hash=False)  # the same, in every layer
    tower: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of an mmproj file, after clip.vision

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(K, N) of a layer's matrix products, q/k/v and gate/up each taken as one, and of the output.

        The matrices of experts are not among them.
        """
        products: dict[str, tuple[int, int]] = {}
        tensors = self.tensors
        for product, names in _PRODUCTS.items():
            parts = [tensors[full] for name in names if (full := f"blk.0.{name}.weight") in tensors]
            if parts:
                products[product] = (parts[0][1], sum(rows for rows, _ in parts))
        return {**products, "output": (self.hidden, self.vocab)}

    @property
    def tensors(self) -> Shapes:
        """Every tensor of such a file, as its architecture has them."""
        from .config import EMBEDDING, OUTPUT  # late: NumPy takes 0.1 s, and help has shapes' names
        from .supported import architecture

        outer = (EMBEDDING,) if self.tied else (EMBEDDING, OUTPUT)
        optional: dict[str, tuple[int, ...]] = dict.fromkeys(outer, (self.vocab, self.hidden))
        optional |= {name: (size,) for name, size in self.vectors.items()}
        layers = range(self.layers)
        optional |= {f"blk.{i}.{name}": (size,) for i in layers for name, size in self.layer_vectors.items()}
        biases = {f"blk.{i}.{name}.bias": () for i in range(self.layers) for name in self.biases}  # as wide as needed
        return {**optional, **architecture(self.metadata).tensors(self.metadata, {**optional, **biases})}

    @property
    def metadata(self) -> dict[str, Any]:
        """As a GGUF file of this model has it."""
        numbers: dict[str, Any] = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "feed_forward_length": self.ffn,
            "attention.head_count": self.Hq,
            "attention.layer_norm_rms_epsilon": self.eps,
        }
        if self.Hq:
            numbers |= {
                "attention.head_count_kv": self.Hkv,
                "attention.key_length": self.D,
                "attention.value_length": self.D,
                "rope.freq_base": self.theta,
            }
        numbers |= self.further
        keys = {f"{self.architecture}.{key}": value for key, value in numbers.items()}
        return {"general.architecture": self.architecture, **keys}


# Shapes whose kernels are benchmarked.
MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, tied=True),
        ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, tied=False),
    )
}

_QWEN3: dict[str, Any] = {"context": 40_960, "eps": 1e-6, "theta": 1e6}
_PHI4_MINI: dict[str, Any] = {
    "rope.dimension_count": 96,
    "rope.scaling.original_context_length": 4096,
    "rope.scaling.attn_factor": math.sqrt(1 + math.log(131_072 / 4096) / math.log(4096)),
    "attention.sliding_window": 262_144,
}
_GPT_OSS_20B: dict[str, Any] = {
    "expert_count": 32,
    "expert_used_count": 4,
    "expert_feed_forward_length": 2880,
    "attention.sliding_window": 128,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}
_QWEN35: dict[str, Any] = {"context": 262_144, "eps": 1e-6, "theta": 1e7}
_QWEN35_KEYS: dict[str, Any] = {
    "rope.dimension_count": 64,
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 16,
    "ssm.time_step_rank": 32,
    "ssm.inner_size": 4096,
}
_QWEN35_EXPERTS: dict[str, Any] = {
    "expert_count": 256,
    "expert_used_count": 8,
    "expert_feed_forward_length": 512,
    "expert_shared_feed_forward_length": 512,
}
_GRANITE4_SMALL: dict[str, Any] = {
    "attention.head_count_kv": [8 if i in (5, 15, 25, 35) else 0 for i in range(40)],
    "attention.scale": 0.0078125,
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "logit_scale": 16.0,
    "expert_count": 72,
    "expert_used_count": 10,
    "expert_shared_feed_forward_length": 1536,
    "rope.scaling.finetuned": False,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 1,
    "ssm.time_step_rank": 128,
    "ssm.inner_size": 8192,
}
_MAMBA2: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 1,
    "ssm.time_step_rank": 80,
    "ssm.inner_size": 5120,
}
_LFM2: dict[str, Any] = {
    "shortconv.l_cache": 3,
    "attention.head_count_kv": [8 * (i in (2, 5, 8, 10, 12, 14)) for i in range(16)],
}
# Of the form of E4B: five of six layers have a window, and the last 18 read the keys and values of others.
_GEMMA4: dict[str, Any] = {
    "attention.key_length_swa": 256,
    "attention.value_length_swa": 256,
    "attention.sliding_window": 512,
    "attention.shared_kv_layers": 18,
    "embedding_length_per_layer_input": 256,
    "final_logit_softcapping": 30.0,
}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "attention.layer_norm_epsilon": 1e-6}
_QWEN3_VL_TOWER: dict[str, Any] = {
    "projector_type": "qwen3vl_merger",
    "embedding_length": 1024,
    "feed_forward_length": 4096,
    "block_count": 24,
    "attention.head_count": 16,
    "patch_size": 16,
    "image_size": 768,
    "spatial_merge_size": 2,
    "is_deepstack_layers": [i in (5, 11, 17) for i in range(24)],
    "projection_dim": 2560,
    **_HALF,
}
_GEMMA3_TOWER: dict[str, Any] = {
    "projector_type": "gemma3",
    "embedding_length": 1152,
    "feed_forward_length": 4304,
    "block_count": 27,
    "attention.head_count": 16,
    "patch_size": 14,
    "image_size": 896,
    "projection_dim": 2560,
    **_HALF,
}
# Shapes of synthetic models, which have random weights.
SYNTHETIC = MODELS | {
    shape.name: shape
    for shape in (
        ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, tied=True, architecture="qwen3", **_QWEN3),
        ModelShape(
            "gemma-3-1b",
            *(26, 1152, 4, 1, 256, 6912, 262144),
            tied=True,
            architecture="gemma3",
            context=32_768,
            eps=1e-6,
            theta=1e6,
            further={"attention.sliding_window": 512},
        ),
        # Of the size of Gemma 3 4B and Qwen3-VL-4B, with what reads images.
        ModelShape(
            "gemma-3-4b",
            *(34, 2560, 8, 4, 256, 10240, 262208),
            tied=True,
            architecture="gemma3",
            eps=1e-6,
            theta=1e6,
            further={"attention.sliding_window": 1024, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            tower=_GEMMA3_TOWER,
        ),
        ModelShape(
            "qwen3-vl-4b",
            *(36, 2560, 32, 8, 128, 9728, 151936),
            tied=True,
            architecture="qwen3vl",
            context=262_144,
            eps=1e-6,
            theta=5e6,
            further={"rope.dimension_sections": [24, 20, 20, 0], "n_deepstack_layers": 3},
            tower=_QWEN3_VL_TOWER,
        ),
        ModelShape(
            "gemma-4-4b",
            *(42, 2560, 8, 2, 512, 10240, 262144),
            tied=True,
            architecture="gemma4",
            eps=1e-6,
            theta=1e6,
            further=_GEMMA4,
            vectors={"rope_freqs.weight": 256},
            layer_vectors={"layer_output_scale.weight": 1},
        ),
        ModelShape(
            "qwen2.5-7b",
            *(28, 3584, 28, 4, 128, 18944, 152064),
            tied=False,
            architecture="qwen2",
            context=32_768,
            eps=1e-6,
            theta=1e6,
            biases=("attn_q", "attn_k", "attn_v"),
        ),
        ModelShape(
            "phi-4-mini",
            *(32, 3072, 24, 8, 128, 8192, 200064),
            tied=True,
            architecture="phi3",
            theta=10_000.0,
            further=_PHI4_MINI,
            vectors={"rope_factors_long.weight": 48, "rope_factors_short.weight": 48},
        ),
        ModelShape(
            "qwen3-30b-a3b",
            *(48, 2048, 32, 4, 128, 6144, 151936),
            tied=False,
            architecture="qwen3moe",
            further={"expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 768},
            **_QWEN3,
        ),
        # Of the size of Qwen3.5-4B and Qwen3.5-35B-A3B.
        ModelShape(
            "qwen3.5-4b",
            *(32, 2560, 16, 4, 256, 9216, 248320),
            tied=True,
            architecture="qwen35",
            further=_QWEN35_KEYS,
            **_QWEN35,
        ),
        ModelShape(
            "qwen3.5-35b-a3b",
            *(40, 2048, 16, 2, 256, 512, 248320),
            tied=False,
            architecture="qwen35moe",
            further=_QWEN35_KEYS | _QWEN35_EXPERTS,
            **_QWEN35,
        ),
        # Of the size of Granite 4 H Small (32B, 9B active), and of the largest Mamba-2 with its paper.
        ModelShape(
            "granite-4-h-small",
            *(40, 4096, 32, 8, 128, 768, 100352),
            tied=True,
            architecture="granitehybrid",
            theta=10_000.0,
            further=_GRANITE4_SMALL,
        ),
        ModelShape(
            "mamba2-2.7b",
            *(64, 2560, 0, 0, 0, 0, 50288),
            tied=True,
            architecture="mamba2",
            context=1 << 20,
            further=_MAMBA2,
        ),
        # Of the size of LFM2-1.2B: six of 16 layers attend.
        ModelShape(
            "lfm2-1.2b",
            *(16, 2048, 32, 8, 64, 8192, 65536),
            tied=True,
            architecture="lfm2",
            context=128_000,
            eps=1e-5,
            theta=1e6,
            further=_LFM2,
        ),
        ModelShape(
            "gpt-oss-20b",
            *(24, 2880, 64, 8, 64, 2880, 201088),
            tied=False,
            architecture="gpt-oss",
            theta=150_000.0,
            further=_GPT_OSS_20B,
        ),
    )
}
