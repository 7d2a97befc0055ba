"""Gemma 4, text: what its metadata say of layers. Layers with a window and those without differ in nearly all sizes."""

from __future__ import annotations

import math
from dataclasses import replace

from ..errors import ModelError
from .config import Config, Factors, Layer, Metadata, Shapes, expect
from .rope import FACTORS
from .windows import local_layers

KV_HEADS, FFN = "attention.head_count_kv", "feed_forward_length"
_SHARED, _INPUT, _CAP = "attention.shared_kv_layers", "embedding_length_per_layer_input", "final_logit_softcapping"
_LOCAL_WIDTH, _LOCAL_ROTARY = "attention.key_length_swa", "rope.dimension_count_swa"


def finalize_config(meta: Metadata, config: Config) -> Config:
    """Scores are not scaled: heads of queries and keys are normalised."""
    full_width, local_width = config.head_width, meta.whole(_LOCAL_WIDTH, config.head_width)
    if meta.whole("attention.value_length_swa", local_width) != local_width:
        raise ModelError(
            f"{meta.full('attention.value_length_swa')} differs from key_length_swa; that is not supported"
        )
    expect(config.shapes, FACTORS, (config.rope.rotary // 2,))  # they say what is not rotated
    local_rotary = meta.whole(_LOCAL_ROTARY, local_width)
    if local_rotary % 2 or local_rotary > local_width:
        raise meta.wrong(_LOCAL_ROTARY, f"even and at most {local_width}", local_rotary)
    config = local_layers(
        meta, config, period=6, local_theta=meta.number("rope.freq_base_swa", 10000.0), local_rotary=local_rotary
    )
    kv_heads, ffn = meta.each(KV_HEADS, config.layers, config.heads), meta.each(FFN, config.layers)
    layers = [
        replace(layer, head_width=local_width if layer.window else full_width, kv_heads=kv_heads[i], ffn=ffn[i])
        for i, layer in enumerate(config.per_layer)
    ]
    if any(config.heads % each for each in kv_heads):
        raise meta.wrong(KV_HEADS, f"divisors of head_count={config.heads}", list(kv_heads))
    layers = _with_shared(meta, layers, config.shapes)
    cap = meta.number(_CAP) if meta.get(_CAP) else 0.0
    return replace(
        config,
        per_layer=tuple(layers),
        head_width=max(full_width, local_width),
        factors=Factors(embedding=math.sqrt(config.hidden), scores=1.0, logit_cap=cap),
        layer_input=meta.whole(_INPUT) if meta.get(_INPUT) else 0,
        shapes=_without_unread(layers, config.shapes),
    )


def _with_shared(meta: Metadata, layers: list[Layer], shapes: Shapes) -> list[Layer]:
    """The last layers read the keys and values of the last one of their kind that has some."""
    shared = meta.whole(_SHARED) if meta.get(_SHARED) else 0
    if shared >= len(layers):
        raise meta.wrong(_SHARED, f"less than block_count={len(layers)}", shared)
    first = len(layers) - shared
    full = [i for i in range(first) if not layers[i].window]
    # Where no layer without a window has a product for values, that for keys gives them, too.
    one_product = all(f"blk.{i}.attn_v.weight" not in shapes for i in full)
    folder_says = meta.get("config.attention_k_eq_v", one_product)
    if full and folder_says is not one_product:
        raise meta.wrong("config.attention_k_eq_v", f"{one_product}, by the tensors of the layers", folder_says)
    for i, layer in enumerate(layers):
        if i < first:
            layers[i] = replace(layer, keys_are_values=one_product and i in full)
            continue
        owner = max((j for j in range(first) if bool(layers[j].window) == bool(layer.window)), default=None)
        if owner is None or layers[owner].kv_heads != layer.kv_heads:
            raise meta.wrong(_SHARED, f"so many that layer {i} finds keys and values of its shape", shared)
        layers[i] = replace(layer, kv_layer=owner)
    return layers


def _without_unread(layers: list[Layer], shapes: Shapes) -> Shapes:
    """Files may have what makes keys and values in layers that read those of others. Nobody reads it."""
    unread = {
        f"blk.{i}.{name}.weight"
        for i, layer in enumerate(layers)
        for name in ("attn_k", "attn_v", "attn_k_norm")
        if layer.kv_layer is not None
    }
    return {name: shape for name, shape in shapes.items() if name not in unread}
