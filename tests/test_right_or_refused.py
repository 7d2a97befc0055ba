"""A checkpoint is computed right or refused: whatever is added to it, taken from it or changed is noticed.

Every tiny checkpoint of every architecture is changed in one place at a time. Then it is refused, or its logits are
others. What may change without either is in the tables here, with the reason.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES, GGUFType

from shaderlm.compile.steps import rope_tables
from shaderlm.errors import ModelError
from shaderlm.formats.checkpoint import Checkpoint
from shaderlm.formats.hf.folder import Folder
from shaderlm.formats.hf.models import MODEL_TYPES
from shaderlm.models.checkpoint import architecture_of, read_config
from shaderlm.models.config import EMBEDDING, OUTPUT, Metadata, StepSpec
from shaderlm.models.metadata_keys import HARMLESS
from shaderlm.models.recurrent import SCAN_KEYS
from shaderlm.models.supported import ARCHITECTURES
from shaderlm.text import Tokenizer, Vocabulary

from . import checkpoints
from .changed import InMemory, in_memory, logits
from .folders import replace_config
from .safetensors_files import write_safetensors
from .sweeps import every_third_by_default
from .test_metadata_keys import keys_of_gguf

NAMES = checkpoints.names()
LLAMA = "llama-yarn"
Keys = Mapping[str, Any]  # of a checkpoint, without the name of its architecture


def _pattern(keys: Keys, period: int) -> list[bool]:
    """All but the last of so many layers have a window."""
    return [i % period != period - 1 for i in range(keys["block_count"])]


def _not_yarn(keys: Keys) -> bool:
    return keys.get("rope.scaling.type") != "yarn"


CONTEXT = {"context_length", "attention.temperature_scale", "attention.temperature_length"}  # how long it may be
# Keys that are read and need not change logits: when that is so, and why.
WITHOUT_EFFECT: Mapping[str, tuple[Callable[[Keys], bool], str]] = {
    "context_length": (lambda keys: True, "a sequence is not longer; it does not change the tokens that it has"),
    "attention.layer_norm_rms_epsilon": (
        lambda keys: "attention.layer_norm_epsilon" in keys,
        "the norms are layer norms, which have an epsilon of their own",
    ),
    **dict.fromkeys(
        CONTEXT - {"context_length"}, (lambda keys: True, "the context ends where it would have an effect")
    ),
    "attention.sliding_window": (
        lambda keys: not any(keys.get("attention.sliding_window_pattern", [True])),
        "no layer has a window",
    ),
    "attention.sliding_window_pattern": (lambda keys: not keys.get("attention.sliding_window"), "there is no window"),
    "feed_forward_length": (lambda keys: "expert_feed_forward_length" in keys, "experts have a width of their own"),
    "expert_shared_count": (
        lambda keys: not keys["expert_shared_count"] and "expert_shared_feed_forward_length" in keys,
        "the width says it",
    ),
    "interleave_moe_layer_step": (
        lambda keys: keys["interleave_moe_layer_step"] < 2,
        "there is no other layer between",
    ),
    **dict.fromkeys(
        ("expert_group_count", "expert_group_used_count"),
        (lambda keys: keys.get("expert_group_count", 1) < 2, "there is one group"),
    ),
    "rope.scale_linear": (
        lambda keys: "rope.scaling.factor" in keys or keys.get("rope.scaling.type") == "none",
        "an older name; the newer one is taken, or nothing is scaled",
    ),
    "rope.scaling.factor": (lambda keys: keys.get("rope.scaling.type") in ("none", "longrope"), "nothing is scaled"),
    "rope.scaling.type": (lambda keys: "rope.scaling.factor" not in keys, "there is no factor"),
    "rope.scaling.original_context_length": (
        lambda keys: True,
        "yarn rounds what follows from it to whole pairs, and factors of long contexts are compared with the context",
    ),
    **dict.fromkeys(
        (
            f"rope.scaling.yarn_{name}"
            for name in (
                *("ext_factor", "attn_factor", "beta_fast", "beta_slow"),
                *("log_multiplier", "truncate", "magnitude"),
            )
        ),
        (_not_yarn, "yarn has it"),
    ),
}

# Keys that an architecture reads and does not follow, and why.
IGNORED: Mapping[tuple[str, str], str] = {
    **dict.fromkeys(
        itertools.product(("qwen2vl", "qwen3vl", "qwen3vlmoe"), ("rope.dimension_sections", "n_deepstack_layers")),
        "without images, dimensions of positions are alike, and no features of them are added",
    ),
    **dict.fromkeys(
        itertools.product(("qwen35", "qwen35moe"), ("rope.dimension_sections",)),
        "without images, dimensions of positions are alike",
    ),
    **dict.fromkeys(
        itertools.product(("nemotron_h", "nemotron_h_moe"), ("rope.dimension_count", "rope.freq_base")),
        "positions are not rotated",
    ),
    **dict.fromkeys(
        itertools.product(("granite", "granitemoe"), SCAN_KEYS),
        "converters of Granite 4 write how recurrent layers would be; tensors of such layers are refused",
    ),
    **dict.fromkeys(
        itertools.product(("granite", "granitehybrid", "granitemoe"), ("deepstack_mapping",)),
        "without images, no features of them are added",
    ),
    ("nemotron_h_moe", "expert_shared_count"): "the width says it",
    ("stablelm", "use_parallel_residual"): "converters write true where the model does not say; the norms are decisive",
}

# The values of keys that a file need not have, where they are not the same for all.
DEFAULTS: Mapping[str, Callable[[Keys], Any]] = {
    "attention.head_count_kv": lambda keys: keys["attention.head_count"],
    "attention.key_length": lambda keys: keys["embedding_length"] // keys["attention.head_count"],
    "attention.value_length": lambda keys: keys["attention.key_length"],
    "attention.key_length_swa": lambda keys: keys["attention.key_length"],
    "attention.value_length_swa": lambda keys: keys["attention.key_length_swa"],
    "attention.sliding_window": lambda keys: 0,
    "attention.sliding_window_pattern": lambda keys: next(
        (
            found
            for period in (2, 4, 6)
            if (found := _pattern(keys, period)) == keys["attention.sliding_window_pattern"]
        ),
        None,
    ),
    "rope.dimension_count": lambda keys: keys.get(
        "attention.key_length", keys["embedding_length"] // keys["attention.head_count"]
    ),
    "rope.dimension_count_swa": lambda keys: keys["attention.key_length_swa"],
    "attention.shared_kv_layers": lambda keys: 0,
    "embedding_length_per_layer_input": lambda keys: 0,
    "interleave_moe_layer_step": lambda keys: 1,
    "leading_dense_block_count": lambda keys: keys["leading_dense_block_count"],  # tensors say it
    "expert_count": lambda keys: 0,
    "expert_used_count": lambda keys: 0,
    "expert_weights_norm": lambda keys: True,
    "expert_gating_func": lambda keys: 2,
    "expert_shared_count": lambda keys: keys["expert_shared_feed_forward_length"] // keys["expert_feed_forward_length"],
    "expert_shared_feed_forward_length": lambda keys: (
        keys.get("expert_feed_forward_length", keys["feed_forward_length"]) * keys.get("expert_shared_count", 1)
    ),
    "rope.freq_base": lambda keys: 10000.0,
    "rope.freq_base_swa": lambda keys: 10000.0,
    "rope.scaling.type": lambda keys: "linear",
}

# Values of keys that checkpoints do not have, which a file could have.
ADDED: Mapping[str, Any] = {
    "attention.key_length": 6,
    "attention.value_length": 6,
    "attention.layer_norm_rms_epsilon": 0.5,
    "attention.temperature_length": 64,
    "attention.head_count_kv": 1,
    "attention.sliding_window": 3,
    "attention.sliding_window_pattern": 1,
    "attention.scale": 0.5,
    "attention.causal": False,
    "attention.output_scale": 2.0,
    "config.activation_function": "gelu",
    "config.hidden_act": "gelu_fast",
    "config.use_parallel_residual": "neither true nor false",
    "config.layers_with_experts": [],
    "config.attention_k_eq_v": "neither true nor false",
    "expert_count": 3,
    "expert_used_count": 1,
    "expert_feed_forward_length": 8,
    "expert_shared_feed_forward_length": 8,
    "expert_weights_norm": "neither true nor false",
    "expert_weights_scale": 3.0,
    "config.grouped_value_heads": True,
    "config.mamba_rms_norm": True,
    "config.time_step_limit": [0.5, 0.6],
    "expert_shared_count": 1,
    "leading_dense_block_count": 2,
    "interleave_moe_layer_step": 3,
    "expert_gating_func": 4,
    "nextn_predict_layers": 1,
    "embedding_scale": 3.0,
    "residual_scale": 3.0,
    "logit_scale": 3.0,
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 1.0,
    "rope.dimension_count": 2,
    "rope.freq_base": 500.0,
    "rope.freq_base_swa": 500.0,
    "rope.scale_linear": 2.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "rope.scaling.attn_factor": 2.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_ext_factor": 0.5,
    "rope.scaling.yarn_attn_factor": 2.0,
    "rope.scaling.yarn_beta_fast": 2.0,
    "rope.scaling.yarn_beta_slow": 0.1,
    "rope.scaling.yarn_log_multiplier": 0.5,
    "rope.scaling.yarn_truncate": False,  # folders have it, GGUF does not
    "rope.scaling.yarn_magnitude": 2.0,  # so with this one
    "tensor_data_layout": "transposed",
    "embedding_length_out": 7,
}


# Tensors that no key of a file asks for, and what their absence means.
OPTIONAL: Mapping[str, str] = {
    OUTPUT: "the embeddings serve as output matrix",
    "rope_freqs.weight": "positions are not scaled",
}


# Of layers that read the keys and values of others: files have what would make their own.
UNREAD: Mapping[str, str] = {"gemma4": r"blk\.[23]\.attn_(k|v|k_norm)\.weight"}
# The same of single checkpoints.
OPTIONAL_THERE: Mapping[tuple[str, str], str] = {
    ("gemma4", "blk.1.attn_v.weight"): "no layer without a window has one: keys are values",
}
# And those that are not optional in an architecture.
NEEDED = {("gemma4", "rope_freqs.weight")}


def free(key: str, keys: Keys, own: str) -> bool:
    """May this key of a checkpoint change without an effect?"""
    when, _ = WITHOUT_EFFECT.get(key, (lambda keys: False, ""))
    unrotated = own == "granitehybrid" and keys["rope.scaling.finetuned"] is False
    if unrotated and key.startswith("rope.") and not key.endswith("finetuned"):
        return True
    return key in HARMLESS or when(keys) or (own, key) in IGNORED


class Computed:
    """What checkpoints compute, as their graphs and tables say it, or as their logits show it, which takes longer."""

    def __init__(self, by_logits: bool) -> None:
        self._of: Callable[[Checkpoint], Any] = logits if by_logits else _graphs
        self._before: dict[str, Any] = {}

    def of(self, folder: Path) -> str:
        """Of a folder."""
        with Folder.open(folder) as file:
            made: dict[str, Any] = {name: file.dense(name) for name in file.tensors if name.startswith("rope_")}
            if file.metadata["general.architecture"] == "falcon-h1":  # factors of the config are in its weights
                made |= {name: hash(file.dense(name).tobytes()) for name in file.tensors}
            return repr((self._of(file), made))

    def outcome(self, name: str, changed: InMemory) -> str:
        """Of a changed checkpoint: "changed", "same", or why it is refused."""
        if name not in self._before:
            self._before[name] = self._of(in_memory(name))
        try:
            after = self._of(changed)
        except ModelError as refused:
            return str(refused)
        return "same" if np.array_equal(after, self._before[name]) else "changed"


def _graphs(file: Checkpoint) -> str:
    kind = architecture_of(file)
    config = read_config(kind, file)
    return repr((kind.build(config, StepSpec(9)), kind.head(config, 1, 9), rope_tables(config)))


@pytest.fixture(scope="module", params=["graphs", pytest.param("logits", marks=pytest.mark.long)])
def computed(request: pytest.FixtureRequest) -> Computed:
    """Both ways."""
    return Computed(request.param == "logits")


def test_every_architecture_has_a_checkpoint() -> None:
    assert set(ARCHITECTURES) == {in_memory(name).own for name in NAMES}


def test_logits_are_numbers_and_differ_from_token_to_token() -> None:
    for name in NAMES:
        found = logits(in_memory(name))
        assert np.isfinite(found).all(), name
        assert found.std() > 0.1, name


# Keys ----------------------------------------------------------------------------------------------------


def _others(value: Any) -> list[Any]:
    """Values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [other for other in (value + 1, 2 * value + 2, value // 2, value - 1) if other != value]
    if isinstance(value, float):
        return [1.5 * value, value / 2]
    if isinstance(value, str):
        return [kind for kind in ("none", "linear", "yarn", "longrope", "su") if kind != value]
    assert isinstance(value, list), value
    return [[_others(item)[0] for item in value], value[1:], [*value[1:], value[0]]]


@pytest.mark.parametrize("name", every_third_by_default(NAMES))
def test_a_key_with_another_value(name: str, computed: Computed) -> None:
    file = in_memory(name)
    keys = file.keys()
    for key, value in keys.items():
        for other in _others(value):
            found = computed.outcome(name, file.changed({key: other}))
            if found == "same" and other != value:
                assert free(key, {**keys, key: other}, file.own), f"{key}={other!r} for {value!r} changes nothing"


@pytest.mark.parametrize("name", every_third_by_default(NAMES))
def test_a_key_that_is_missing(name: str, computed: Computed) -> None:
    file = in_memory(name)
    keys = file.keys()
    for key, value in keys.items():
        found = computed.outcome(name, file.changed({key: None}))
        if found == "same":
            known = free(key, keys, file.own) or (key in DEFAULTS and DEFAULTS[key](keys) == value)
            assert known, f"{key} may be missing: give what it is then in DEFAULTS, or read it without a default"


@pytest.mark.parametrize("name", every_third_by_default(NAMES))
def test_a_key_that_is_added(name: str, computed: Computed) -> None:
    """Every key of the gguf package, and one that nobody knows."""
    file = in_memory(name)
    keys = file.keys()
    for key in {*keys_of_gguf(), "rope.scale_linear", "a.key.of.next.year"} - set(keys):
        value = ADDED.get(key, 3)
        found = computed.outcome(name, file.changed({key: value}))
        if found == "same":
            assert free(key, {**keys, key: value}, file.own), f"{key}={value!r} changes nothing"
        elif found != "changed" and key not in DEFAULTS:
            assert f"{file.own}." in found or "no tensor" in found, f"{key}={value!r}: {found}"


def test_every_key_that_is_read_changes_the_logits_of_some_checkpoint(
    computed: Computed, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, set[str]] = {}
    get = Metadata.get

    def watched(self: Metadata, key: str, default: Any = None) -> Any:
        read.setdefault(key, set()).add(self.full(""))
        return get(self, key, default)

    monkeypatch.setattr(Metadata, "get", watched)
    files = {name: in_memory(name) for name in NAMES}
    for file in files.values():
        read_config(architecture_of(file), file)
    monkeypatch.undo()
    idle = set(read) - set(HARMLESS) - CONTEXT - {key for _, key in IGNORED}
    for name, file in files.items():
        keys = file.keys()
        for key in sorted(idle):
            if f"{file.own}." in read[key]:
                for value in _others(keys[key]) if key in keys else [ADDED[key]]:
                    # A size is refused: tensors have another.
                    if computed.outcome(name, file.changed({key: value})) != "same":
                        idle.discard(key)
    assert idle == set()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("feed_forward_length", [96, 96], "same"),
        ("deepstack_mapping", [-1, 1], "same"),
        ("rope.scaling.finetuned", False, "changed"),
        (
            "attention.head_count_kv",
            [2, 1],
            "granite.attention.head_count_kv must be the same for all layers, the file",
        ),
        (
            "attention.head_count_kv",
            [2],
            "granite.attention.head_count_kv must be a whole number from 1 to 4,096, or 2",
        ),
        ("expert_shared_feed_forward_length", 64, "must be feed_forward_length, 96, in a file without experts"),
    ],
)
def test_a_key_of_granite_4_without_recurrent_layers(key: str, value: Any, expected: str, computed: Computed) -> None:
    """Its converter is that of the hybrids: it writes lists, and sizes of layers that the file does not have."""
    assert expected in computed.outcome("granite-4", in_memory("granite-4").changed({key: value}))


# Tensors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", every_third_by_default(NAMES))
def test_a_tensor_that_is_missing(name: str, computed: Computed) -> None:
    file = in_memory(name)
    for tensor in file.tensors:
        found = computed.outcome(name, file.changed(tensors={tensor: None}))
        optional = tensor in OPTIONAL and (file.own, tensor) not in NEEDED
        if optional or (name, tensor) in OPTIONAL_THERE:
            assert found == "changed"
        else:
            assert repr(tensor) in found or "does not read" in found, f"without {tensor}: {found}"


@pytest.mark.parametrize("name", every_third_by_default(NAMES))
def test_a_tensor_of_another_shape(name: str, computed: Computed) -> None:
    file = in_memory(name)
    for tensor, info in file.tensors.items():
        longer = (*info.shape[:-1], info.shape[-1] + 2)
        more = (info.shape[0] + 1, *info.shape[1:])
        for shape in (longer, more, info.shape[::-1], (2, *info.shape)):
            if shape != info.shape:
                found = computed.outcome(name, file.changed(tensors={tensor: np.ones(shape, np.float32)}))
                assert found not in ("changed", "same"), f"{tensor} {info.shape} → {shape}: {found}"


@pytest.mark.parametrize("name", every_third_by_default(NAMES))
def test_dimensions_of_one_are_no_difference(name: str, computed: Computed) -> None:
    """Converters write vectors as matrices of one row or column, and matrices of convolutions as [n, 1, k]."""
    file = in_memory(name)
    vectors = {tensor: value for tensor, value in file.arrays.items() if value.ndim == 1}
    matrices = {tensor: value for tensor, value in file.arrays.items() if value.ndim == 2 and tensor != EMBEDDING}
    for changed in (
        {tensor: value[None] for tensor, value in vectors.items()},
        {tensor: value[:, None] for tensor, value in vectors.items()},
        {tensor: value[:, None] for tensor, value in matrices.items()},
    ):
        assert computed.outcome(name, file.changed(tensors=changed)) == "same"


def _shape(file: InMemory, tensor: str) -> tuple[int, ...]:
    """That of a tensor as a checkpoint would have it."""
    stem, _, kind = tensor.rpartition(".")
    if tensor == OUTPUT:
        return file.tensors[EMBEDDING].shape
    if kind == "bias" and f"{stem}.weight" in file.tensors:
        return file.tensors[f"{stem}.weight"].shape[:1]
    if stem.startswith("rope_"):
        keys = file.keys()
        width = keys.get("attention.key_length", keys["embedding_length"] // max(1, keys["attention.head_count"]))
        return (keys.get("rope.dimension_count", width) // 2,)
    return (4,)


def _check_added(name: str, stems: Iterable[str], computed: Computed, described: Collection[str] = ()) -> None:
    """Tensors of these names, in every layer without them, are refused by name or change the logits.

    Of those that are `described`, the message says what they would change.
    """
    file = in_memory(name)
    layers = range(file.keys()["block_count"])
    for stem in stems:
        for tensor in (f"{stem}.{suffix}" for suffix in ("weight", "bias", "scale", "input_scale")):
            names = sorted({tensor.format(bid=i, xid=0) for i in layers} - set(file.tensors))
            if names:
                added = {each: checkpoints.weights(each, _shape(file, each)) for each in names}
                found = computed.outcome(name, file.changed(tensors=added))
                others = ["rope_factors_"] if "rope_factors_" in stem else names  # two go together
                if tensor.endswith("ffn_gate_inp.weight"):  # with a router, the network of its layer is superfluous
                    others = [*names, *(each.replace("ffn_gate_inp.weight", "ffn_down.weight") for each in names)]
                unread = found == "same" and all(re.fullmatch(UNREAD.get(file.own, ""), each) for each in names)
                named = any(each in found for each in others)
                assert found == "changed" or unread or named, f"with {names[0]}: {found}"
                if "does not read" in found and stem in described:
                    assert re.search(r"does not read: \S+ \(", found), "say in metadata_keys what it would change"


def _known(file: InMemory) -> set[str]:
    """The tensors of its architecture by the gguf package, without ".weight".

    And those of layers without experts in models with some, which the package does not have for all of them.
    """
    number = {value: key for key, value in MODEL_ARCH_NAMES.items()}[file.own]
    mixture = f"{file.own}.expert_count" in file.metadata
    dense = {f"blk.{{bid}}.ffn_{name}" for name in ("gate", "up", "down")} if mixture else set()
    return {TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[number]} | dense


@pytest.mark.parametrize("name", every_third_by_default(NAMES))
def test_a_tensor_that_is_added(name: str, computed: Computed) -> None:
    known = _known(in_memory(name))
    _check_added(name, sorted(known | {"a.tensor", "blk.{bid}.a.tensor"}), computed, known)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_another_architecture_that_is_added(name: str, computed: Computed) -> None:
    known = _known(in_memory(name))
    _check_added(name, sorted(set(TENSOR_NAMES.values()) - known), computed)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_have_the_names_of_the_gguf_package(name: str) -> None:
    file = in_memory(name)
    found = {re.sub(r"^blk\.\d+\.", "blk.{bid}.", re.sub(r"\.(weight|bias|scale)$", "", name)) for name in file.tensors}
    assert found <= _known(file)


# What begins with no architecture's name -----------------------------------------------------------------


def _with(name: str, metadata: Mapping[str, Any]) -> InMemory:
    file = in_memory(name)
    return InMemory({**file.metadata, **metadata}, file.arrays)


def test_every_key_of_gguf_that_begins_with_no_architecture_is_known_to_be_harmless_or_refused(
    computed: Computed,
) -> None:
    """Keys about the file and its tokenizer change no logits. All others say that it is another kind of file."""
    for key in keys_of_gguf(own=False):
        if not key.startswith(("general.", "tokenizer.", "split.")):
            assert key in computed.outcome(LLAMA, _with(LLAMA, {key: 1}))


@pytest.mark.parametrize("kind", ["adapter", "imatrix", "mmproj"])
def test_files_that_are_no_models_are_refused(kind: str, computed: Computed) -> None:
    assert GGUFType.MODEL == "model"
    assert {GGUFType.ADAPTER, GGUFType.IMATRIX, GGUFType.MMPROJ} == {"adapter", "imatrix", "mmproj"}
    assert f"general.type is {kind!r}" in computed.outcome(LLAMA, _with(LLAMA, {"general.type": kind}))
    assert computed.outcome(LLAMA, _with(LLAMA, {"general.type": "model"})) == "same"


# Hugging Face folders ------------------------------------------------------------------------------------

FOLDERS = [name for name in checkpoints.names() if checkpoints.recorded(name)["config"]["model_type"] in MODEL_TYPES]

# Keys of config.json that may change without an effect, and why. Those that change no model's logits are in
# `hf/models`.
FREE_IN_FOLDERS: Mapping[str, str] = {
    "max_position_embeddings": "a sequence is not longer; it does not change the tokens that it has",
    "intermediate_size": "of layers without experts, and there are none",
    "sliding_window": "no layer has a window",
    "use_sliding_window": "layer_types says which layers have a window",
    "sliding_window_pattern": "layer_types says it",
    "_sliding_window_pattern": "layer_types says it",
    "original_max_position_embeddings": "rope_parameters has it, too, or positions are not scaled",
    "use_qkv_bias": "there are such tensors, or none",
    "attention_out_bias": "there are such tensors, or none",
    "attention_softmax_in_fp32": "all of attention is computed in f32",
    "scale_attention_softmax_in_fp32": "all of attention is computed in f32",
    "eod_token_id": "the tokenizer has it",
}


_OF_EXPERTS = {"num_experts", "top_k_experts", "moe_intermediate_size"}  # of gemma4, which may have none


def _json_others(value: Any) -> list[Any]:
    if isinstance(value, dict):
        changed = [{**value, key: other} for key, item in value.items() for other in _json_others(item)]
        return [*changed, {**value, "new_trick": 1}]
    if isinstance(value, str):
        return ["other"]
    if isinstance(value, list):
        return [[*value, "other"], *([value[1:]] if value else [])]
    return [3, "x"] if value is None else _others(value)


@pytest.mark.parametrize("name", every_third_by_default(FOLDERS))
def test_a_key_of_a_folder(name: str, computed: Computed, tmp_path: Path) -> None:
    """Another value, and keys that nobody knows."""
    entry = checkpoints.recorded(name)
    folder = checkpoints.write_folder(tmp_path / "folder", entry)
    before, config = computed.of(folder), entry["config"]
    row = MODEL_TYPES[config["model_type"]]
    text = config.get(row.nested, config)
    changes = [(key, other) for key, value in text.items() for other in _json_others(value)]
    changes += [(key, 3) for key in ("new_trick", "clip_qkv", "scoring_func", "rope_scaling") if key not in text]
    for inner, changed in changes:
        idle = text.get("enable_moe_block") is False and inner in _OF_EXPERTS
        if inner not in FREE_IN_FOLDERS and not idle and not row.is_harmless(inner, changed):
            key = inner if text is config or row.nested is None else row.nested
            other = changed if key == inner else {**text, inner: changed}
            replace_config(folder, **{key: other})
            try:
                after = computed.of(folder)
            except ModelError:
                continue
            finally:
                replace_config(folder, **{key: config.get(key)})
            # Yarn rounds what follows from the length to whole pairs.
            rounded = "original_max_position_embeddings" in str(other)
            # Without images, dimensions of a position are alike.
            rounded |= inner == "rope_parameters" and text[inner].get("mrope_section") != changed.get("mrope_section")
            rounded |= inner == "use_double_wide_mlp" and not text["num_kv_shared_layers"]  # those are wider
            rounded |= inner == "rope_parameters" and text.get("position_embedding_type") == "nope"
            rounded |= inner.startswith(("mamba_", "time_step_")) and "mamba" not in text.get(
                "layer_types", ["mamba"]
            )  # no scans
            rounded |= inner == "mamba_norm_before_gate" and not text["mamba_rms_norm"]  # there is no such norm
            assert after != before or rounded, f"{inner}={changed!r} for {text.get(inner)!r} changes nothing"


ADDED_TO_FOLDERS = (
    *("new.weight", "lm_head.bias", "score.weight", "visual.x.weight", "lm_head.weight"),
    *("self_attn.new.weight", "self_attn.q_proj.scale", "attn.bias", "attention.bias", "input_layernorm.bias"),
)


@pytest.mark.parametrize("name", every_third_by_default(FOLDERS))
def test_a_tensor_of_a_folder(name: str, computed: Computed, tmp_path: Path) -> None:
    """One that nobody reads, and one of each kind that is missing."""
    entry = checkpoints.recorded(name)
    folder, tensors = checkpoints.write_folder(tmp_path / "folder", entry), checkpoints.tensors_of(entry)
    row, path = MODEL_TYPES[entry["config"]["model_type"]], folder / "model.safetensors"
    layer = next(name.partition(".0.")[0] + ".0." for name in tensors if ".0." in name)
    for number, added in enumerate(ADDED_TO_FOLDERS):
        known = added if number < 5 else layer + added
        if known not in tensors and not (row.ignored and re.match(row.ignored, known)):
            write_safetensors(path, {**tensors, known: np.ones(64, np.float32)})
            with pytest.raises(ModelError):
                computed.of(folder)
    write_safetensors(path, tensors)
    before = computed.of(folder)
    for missing in [each for each in tensors if ".1." not in each]:
        write_safetensors(path, {each: values for each, values in tensors.items() if each != missing})
        try:
            after = computed.of(folder)
        except ModelError:
            continue
        assert after != before, f"without {missing} nothing changes"


# Tokenizers ----------------------------------------------------------------------------------------------


class _Watched(dict[str, Any]):
    """Metadata that remember what was asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


# Keys of tokenizers that change no tokens, and why.
NOT_FOR_TOKENS: Mapping[str, str] = {
    **dict.fromkeys(
        (f"tokenizer.ggml.{name}_token_id" for name in ["seperator", "padding", "mask"]),
        "tokens that no text is turned into",
    ),
    **dict.fromkeys(
        (f"tokenizer.ggml.fim_{name}_token_id" for name in ["pre", "suf", "mid", "pad", "rep", "sep"]),
        "for prompts that a program puts together",
    ),
    **dict.fromkeys((f"tokenizer.ggml.{name}_token_id" for name in ["prefix", "suffix", "middle"]), "older names"),
    "tokenizer.ggml.token_type_count": "for encoders of pairs of texts",
    "tokenizer.ggml.add_sep_token": "for encoders of pairs of texts",
    "tokenizer.rwkv.world": "another tokenizer; tokenizer.ggml.model names the one that is meant",
    "tokenizer.chat_templates": "the names of further templates",
    "tokenizer.chat_template.{name}": "further templates",
}


def test_every_key_of_a_tokenizer_is_read_or_harmless() -> None:
    watched = _Watched(in_memory(LLAMA).metadata)
    Vocabulary.from_metadata(watched)
    known = {key for key in keys_of_gguf(own=False) if key.startswith("tokenizer.")}
    assert len(known) > 30
    assert known - watched.read == set(NOT_FOR_TOKENS)


@pytest.mark.parametrize("key", ["pre", "model"])
def test_an_unknown_rule_of_a_tokenizer_is_refused(key: str) -> None:
    name = f"tokenizer.ggml.{key}"
    metadata = {**in_memory(LLAMA).metadata, name: "klingon"}
    with pytest.raises(ModelError, match=f"{name}.*klingon"):
        Tokenizer(Vocabulary.from_metadata(metadata))
