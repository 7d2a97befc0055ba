"""Mixtures of experts: their numbers, their tensors and their part of the graph. No architecture itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..errors import ModelError
from ..graph.graph import Builder, TensorSlice
from .config import Config, Experts, Layer, Metadata, Mixture

_SHARED_WIDTH, _SHARED_COUNT = "expert_shared_feed_forward_length", "expert_shared_count"
_SELECTION_BIAS = "exp_probs_b.bias"
_GATE_UP = "ffn_gate_up_exps"
# Of a mixture beside a network: what inputs of the router, and results of experts, are multiplied with.
ROUTER_SCALE, _EXPERT_SCALE = "ffn_gate_inp.scale", "ffn_down_exps.scale"


def read_experts(mixture: Mixture, meta: Metadata, whole: int) -> Experts | None:
    """The mixture of a file, where networks without experts are so wide; None where it has and needs none."""
    if not mixture.always and not meta.get("expert_count"):
        return None
    count = meta.whole("expert_count", maximum=4096)
    used = meta.whole("expert_used_count", maximum=4096)
    if used > count:
        raise ModelError(f"{meta.full('expert_used_count')} must be at most expert_count={count}, the file has {used}")
    ffn = meta.whole("expert_feed_forward_length", whole // used) if mixture.own_width else whole
    scale = meta.number("expert_weights_scale") if meta.get("expert_weights_scale") else 1.0
    return Experts(count, used, ffn, _shared_width(mixture, meta, whole, ffn), scale, mixture)


def dense_width(mixture: Mixture | None, meta: Metadata) -> int:
    """Of a network without experts. Files whose layers all have experts need not say it."""
    own = mixture is not None and mixture.always and mixture.own_width
    return meta.whole("feed_forward_length", meta.get("expert_feed_forward_length") if own else None)


def _shared_width(mixture: Mixture, meta: Metadata, whole: int, ffn: int) -> int:
    """That of the network for all rows. Files may say how many experts it is as wide as, or both."""
    if mixture.shared == "gated":
        return meta.whole(_SHARED_WIDTH, whole)
    if mixture.shared == "none":
        return 0
    if mixture.shared == "width":
        meta.get(_SHARED_COUNT)
        return meta.whole(_SHARED_WIDTH)
    by_count = ffn * meta.whole(_SHARED_COUNT, maximum=4096) if meta.get(_SHARED_COUNT) else 0
    width = meta.whole(_SHARED_WIDTH) if meta.get(_SHARED_WIDTH) else by_count
    if by_count and width != by_count:
        raise meta.wrong(_SHARED_WIDTH, f"{by_count}, by {_SHARED_COUNT}", width)
    return width


# No key of GGUF, whose readers know by the architecture which layers have experts: of folders, a truth value for each.
_LAYERS = "config.layers_with_experts"
_DENSE_FIRST, _EVERY = "leading_dense_block_count", "interleave_moe_layer_step"


def with_dense_layers(meta: Metadata, config: Config) -> Config:
    """Layers may do without experts: by keys, or where they have the tensors of such a network, and no router."""
    experts = _by_keys(meta, config.layers) or [
        f"blk.{i}.ffn_gate_inp.weight" in config.shapes or f"blk.{i}.ffn_up.weight" not in config.shapes
        for i in range(config.layers)
    ]
    folder_says = meta.get(_LAYERS, experts)
    if folder_says != experts:
        raise meta.wrong(_LAYERS, f"{experts}, by the tensors of the layers", folder_says)
    if all(experts):
        return config
    layers = config.per_layer or (Layer(),) * config.layers
    return replace(config, per_layer=tuple(replace(layers[i], experts=each) for i, each in enumerate(experts)))


def _by_keys(meta: Metadata, layers: int) -> list[bool] | None:
    """Which layers have experts, where the file says how many without come first, or that every so many has some."""
    first, step = (meta.get(key) for key in (_DENSE_FIRST, _EVERY))
    if first is None and step is None:
        return None
    first = meta.whole(_DENSE_FIRST) if first else 0
    step = 1 if step is None else meta.whole(_EVERY)
    return [i >= first and (i + 1) % step == 0 for i in range(layers)]


def expert_matrices(config: Config, experts: Experts) -> dict[str, tuple[int, int]]:
    """The router, and the matrices of the shared network."""
    matrices = {"ffn_gate_inp": (experts.count, config.hidden)}
    if experts.shared:
        wide = ("ffn_gate_shexp", "ffn_up_shexp") if _gated(experts) else ("ffn_up_shexp",)
        matrices |= dict.fromkeys(wide, (experts.shared, config.hidden))
        matrices["ffn_down_shexp"] = (config.hidden, experts.shared)
    return matrices


def expert_tensors(config: Config, experts: Experts, layer: str, biased: Collection[str]) -> dict[str, tuple[int, ...]]:
    """The matrices of all experts of a layer, those in `biased` with biases, and the gate of the shared network."""
    wide, down = (experts.count, experts.ffn, config.hidden), (experts.count, config.hidden, experts.ffn)
    tensors: dict[str, tuple[int, ...]] = {}
    matrices = {"ffn_gate_exps": wide, "ffn_up_exps": wide, "ffn_down_exps": down}
    if not _gated(experts):
        del matrices["ffn_gate_exps"]
    if _in_one(config):
        matrices = {_GATE_UP: (experts.count, 2 * experts.ffn, config.hidden), "ffn_down_exps": down}
    for name, shape in matrices.items():
        tensors[f"{layer}.{name}.weight"] = shape
        if name in biased:
            tensors[f"{layer}.{name}.bias"] = shape[:2]
    if experts.mixture.shared == "gated":
        tensors[f"{layer}.ffn_gate_inp_shexp.weight"] = (config.hidden,)
    if experts.mixture.beside_network:
        tensors[f"{layer}.{_EXPERT_SCALE}"] = (experts.count,)
        tensors[f"{layer}.{ROUTER_SCALE}"] = (config.hidden,)
    if _has_selection_bias(config, experts):
        tensors[f"{layer}.{_SELECTION_BIAS}"] = (experts.count,)
    return tensors


def _gated(experts: Experts) -> bool:
    """Have experts a gate, beside what they widen?"""
    return experts.mixture.activation.endswith("_mul") or experts.mixture.activation == "swiglu_clamped"


def _in_one(config: Config) -> bool:
    """Does a matrix hold the rows of gate and up of every expert, one after the other? In all layers, or in none."""
    stems = {name.partition(".ffn_")[2] for name in config.shapes}
    return "gate_up_exps.weight" in stems and "gate_exps.weight" not in stems


def _has_selection_bias(config: Config, experts: Experts) -> bool:
    how = experts.mixture.selection_bias
    return how == "always" or (how == "optional" and any(name.endswith(_SELECTION_BIAS) for name in config.shapes))


def add_experts(
    b: Builder, config: Config, experts: Experts, layer: str, x: str, logits: str, tokens: int, batch: Mapping[str, str]
) -> str:
    """x [tokens, hidden] and the router's logits → Σ factor · down(activation(gate(x), up(x))), chosen experts."""
    used = experts.used
    ids = b.tensor(f"{layer}.expert_ids", tokens, used, format="u32")
    factors = b.tensor(f"{layer}.expert_factors", tokens, used)
    sizes = {"tokens": tokens, "experts": experts.count, "used": used, "batched": bool(batch)}
    bias = f"{layer}.{_SELECTION_BIAS}" if _has_selection_bias(config, experts) else None
    if bias:
        b.tensor(bias, experts.count, role="weight", format=config.formats[bias])
    how = {"gating": experts.mixture.gating, "normalise": experts.mixture.normalise, "scale": experts.scale}
    own = f"{layer}.{_EXPERT_SCALE}" if experts.mixture.beside_network else None
    if own:
        b.tensor(own, experts.count, role="weight", format=config.formats[own])
    inputs = {"logits": logits, "bias": bias, "expert_scale": own, **batch}
    how |= {"bias": bool(bias), "scaled": bool(own)}
    b.add("route_experts", sizes | how, inputs, layer, ids=ids, factors=factors)

    def product(name: str, inputs: Mapping[str, str], shape: tuple[int, ...], k: int, combine: str = "none") -> str:
        weight, bias = f"{layer}.{name}.weight", f"{layer}.{name}.bias"
        # The matrices of the experts lie one below the other.
        stored, half = f"{layer}.{_GATE_UP}.weight", {"ffn_gate_exps": 0, "ffn_up_exps": 1}.get(name)
        if half is not None and _in_one(config):
            n, kind = shape[-1], config.formats[stored]
            rows = TensorSlice(stored, experts.count * n, half * n, group=n, stride=2 * n)
            b.view(weight, experts.count * n, k, of=[rows], format=kind)
        else:
            kind = config.formats[weight]
            b.tensor(weight, experts.count * shape[-1], k, role="weight", format=kind)
        has_bias = bias in config.shapes
        if has_bias:
            b.tensor(bias, experts.count * shape[-1], role="weight", format=config.formats[bias])
        dims = sizes | {"K": k, "N": shape[-1], "format": kind, "combine": combine, "bias": has_bias}
        operands = {**inputs, "weight": weight, "bias": bias if has_bias else None, "ids": ids, **batch}
        out = b.tensor(f"{layer}.{name}", *shape)
        b.add("linear_experts", dims, operands, layer, out=out)
        return out

    wide = (tokens, used, experts.ffn)
    names = {"a": "ffn_gate_exps", "b": "ffn_up_exps"} if _gated(experts) else {"x": "ffn_up_exps"}
    operands = {key: product(name, {"x": x}, wide, config.hidden) for key, name in names.items()}
    gated = b.tensor(f"{layer}.gated_exps", *wide)
    dims = {"tokens": tokens, "count": tokens * used * experts.ffn, "batched": bool(batch)}
    b.add(experts.mixture.activation, dims, {**operands, **batch}, layer, out=gated)
    return product("ffn_down_exps", {"x": gated, "factors": factors}, (tokens, config.hidden), experts.ffn, "sum")
