"""Hugging Face folders give what a GGUF file of the same model gives: metadata, tensors, tokens, logits."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import shaderlm
from shaderlm.errors import ModelError
from shaderlm.formats.gguf import GgufFile
from shaderlm.formats.hf.config import FolderConfig
from shaderlm.formats.hf.folder import Folder
from shaderlm.formats.hf.matrices import part_of, stored, transposed
from shaderlm.formats.hf.model_type import TensorSplit
from shaderlm.formats.hf.models import MODEL_TYPES
from shaderlm.formats.safetensors import Safetensors
from shaderlm.graph.reference import Yarn
from shaderlm.models.checkpoint import architecture_of, read_config
from shaderlm.models.config import StepSpec
from shaderlm.models.supported import architecture
from shaderlm.text import Vocabulary
from shaderlm.text.vocabulary import CONTROL, UNKNOWN

from . import checkpoints
from .folders import folder_of, replace_config
from .oracles import WITH_FOLDER, Oracle
from .safetensors_files import write_safetensors
from .tiny_models import write_tiny

# What a folder says and GGUF's converter leaves out, since it follows from the rest; no other difference is right.
_SAID_TWICE = {
    *("rope.dimension_count", "attention.scale", "config.layers_with_experts", "config.attention_k_eq_v"),
    *("expert_weights_scale", "config.grouped_value_heads"),
}

# What GGUF's converter writes, and the architecture says of itself.
_SAID_BY_NAME = {"expert_gating_func", "nextn_predict_layers", "vocab_size"}
# Of qwen35, the converter puts value heads in another order. Logits of both are those of the oracle.
_REORDERED = re.compile(r"\.(ssm_\w+|attn_qkv|attn_gate)\b")


@pytest.mark.parametrize("name", WITH_FOLDER)
def test_a_folder_is_like_the_file_of_the_converter(name: str, oracles: dict[str, Oracle]) -> None:
    with GgufFile.open(oracles[name].gguf) as file, Folder.open(oracles[name].hf) as folder:
        own = f"{file.metadata['general.architecture']}."
        wanted = {key: value for key, value in file.metadata.items() if key.startswith(own)}
        found = {key: value for key, value in folder.metadata.items() if key.startswith(own)}
        for key in set(found) - set(wanted):
            assert key.removeprefix(own) in _SAID_TWICE, (key, found[key])
        for key, value in wanted.items():
            if key.endswith("dimension_sections"):  # GGUF has four, where some models have three
                assert [*found[key], 0] == value
            elif value != 0 and key.removeprefix(own) not in _SAID_BY_NAME:  # 0: not set
                assert found[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
        assert {key: info.shape for key, info in folder.tensors.items()} == {
            key: info.shape for key, info in file.tensors.items()
        }
        reordered = f"{own}config.grouped_value_heads" in found
        for key in file.tensors:
            if reordered and _REORDERED.search(key):
                continue
            bound = 1e-6 if key.endswith("ssm_a") else 0  # the exponentials of other programs differ in the last bit
            np.testing.assert_allclose(folder.dense(key), file.dense(key), rtol=bound, err_msg=key)
            middle = int(np.prod(file.tensors[key].shape[:-1])) // 2
            if middle:  # of experts: rows of two of them
                ours, theirs = (each.dense(key, middle - 1, middle + 1) for each in (folder, file))
                assert np.array_equal(ours, theirs), key
        recorded, read = (Vocabulary.from_metadata(each.metadata) for each in (file, folder))
        # Of gemma4, its converter calls the unknown token a special one.
        kinds = [[CONTROL if each == UNKNOWN else each for each in one.types] for one in (recorded, read)]
        assert kinds[0] == kinds[1]
        for field in ("kind", "tokens", "bos", "eos", "add_bos", "add_eos", "add_space_prefix"):
            if field == "add_bos" and "tokenizer.ggml.add_bos_token" not in file.metadata and recorded.add_bos:
                continue  # the file does not say: what its pre-tokenizer usually does is taken
            assert getattr(read, field) == getattr(recorded, field), field


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("parts", [1, 3])
def test_logits_are_those_of_the_file(tmp_path: Path, architecture: str, parts: int) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", architecture)
    folder = folder_of(path, tmp_path / "folder", parts=parts)
    ids = [5, 9, 200, 17, 40]
    rows = []
    for each in (path, folder):
        with shaderlm.load(each, device="cpu") as model:
            assert model.tokenizer.decode(model.tokenizer.encode("the inn, <|im_end|>")) == "the inn, <|im_end|>"
            rows.append((model.logits(ids), model.tokenizer.encode("the inn, <|im_end|>")))
    assert np.array_equal(rows[0][0], rows[1][0])
    assert rows[0][1] == rows[1][1]


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
        ),
        ({"do_sample": True, "top_k": 64}, {"temperature": 1.0, "top_k": 64}),
        ({"temperature": 0.3, "min_p": None}, {"temperature": 0.3}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({}, {}),
    ],
)
def test_sampling_values_of_the_model(tmp_path: Path, config: dict[str, Any], values: dict[str, float]) -> None:
    folder = folder_of(write_tiny(tmp_path / "tiny.gguf", "llama"), tmp_path / "folder")
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    with shaderlm.load(folder, device="cpu") as model:
        assert model.sampling_defaults == values


@pytest.mark.parametrize(("listed", "found"), [([9, 5, 1 << 20], [5, 9]), (None, []), ([], [])])
def test_tokens_that_a_folder_never_gives(listed: Any, found: list[int], tmp_path: Path) -> None:
    folder = folder_of(write_tiny(tmp_path / "tiny.gguf", "llama"), tmp_path / "folder")
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": listed}), encoding="utf-8")
    with Folder.open(folder) as file:
        assert Vocabulary.from_metadata(file.metadata).suppressed == found


def test_a_wrong_sampling_value_is_named_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrong = {"general.sampling.temp": "warm", "general.sampling.top_k": 20}
    with shaderlm.load(write_tiny(tmp_path / "tiny.gguf", "llama", metadata=wrong), device="cpu") as model:
        assert model.sampling_defaults == {"top_k": 20}
    (record,) = caplog.records
    assert record.getMessage().startswith("general.sampling.temp of the model is not used: temperature must be 0")


def test_bf16_and_f16(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", "qwen3")
    for dtype, kind in (("bf16", "bf16"), ("f16", "f16")):
        with GgufFile.open(path) as file, Folder.open(folder_of(path, tmp_path / kind, dtype=dtype)) as folder:
            assert folder.tensors["blk.0.attn_q.weight"].kind == kind
            ours, theirs = (each.dense("blk.0.attn_q.weight") for each in (folder, file))
            assert np.allclose(ours, theirs, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_names_of_tensors_are_those_of_gguf(name: str) -> None:
    """gguf's own table of Hugging Face's names never says another one; it lacks some that a model may not have."""
    row = MODEL_TYPES[name]
    kind = next(kind for kind, called in gguf.MODEL_ARCH_NAMES.items() if called == row.architecture)
    table = gguf.get_tensor_name_map(kind, 1)
    assert architecture({"general.architecture": row.architecture})
    agreed = 0
    for theirs, ours in {**row.whole_names(), **row.layer_names()}.items():
        inside = theirs in row.layer_names()
        for piece in (TensorSplit(ours),) if isinstance(ours, str) else ours:
            found = table.get_name(f"model.layers.0.{theirs.replace('.{e}', '')}" if inside else theirs)
            if not piece.part:  # a part of a tensor has no name there
                assert found in (None, f"blk.0.{piece.name}" if inside else piece.name), theirs
                agreed += found is not None
    assert agreed >= 7


_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 128}
_SIZES |= {"rms_norm_eps": 1e-6, "sliding_window": 7}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
_KINDS = {
    every: [f"{'full' if i % every == every - 1 else 'sliding'}_attention" for i in range(8)] for every in (2, 4, 6)
}
# config.json as it was written until 2025, and as transformers 5 writes it.
_FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "dtype": "bfloat16"},
    ),
    "gemma2": (
        {"rope_theta": 1e4, "query_pre_attn_scalar": 144, "hidden_act": "gelu_pytorch_tanh"},
        {"rope_parameters": _LOCAL, "query_pre_attn_scalar": 144, "layer_types": _KINDS[2]},
    ),
    "gemma3_text": (
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6, "rope_scaling": None},
        {
            "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": _LOCAL},
            "layer_types": _KINDS[6],
        },
    ),
    "olmo3": (
        {"rope_theta": 1e4, "rope_scaling": _YARN},
        {
            "rope_parameters": {"full_attention": {**_YARN, "rope_theta": 1e4}, "sliding_attention": _LOCAL},
            "layer_types": _KINDS[4],
        },
    ),
    "glm4": ({"partial_rotary_factor": 0.25}, {"rope_parameters": {**_LOCAL, "partial_rotary_factor": 0.25}}),
    "smollm3": (
        {"rope_theta": 2e6, "no_rope_layers": [1, 1, 1, 0] * 2, "use_sliding_window": False},
        {"rope_parameters": {"rope_theta": 2e6}, "no_rope_layer_interval": 4, "use_sliding_window": False},
    ),
}


@pytest.mark.parametrize("name", _FORMS)
def test_old_and_new_forms_of_a_configuration(name: str) -> None:
    old, new = (FolderConfig({"model_type": name, **_SIZES, **form}).metadata for form in _FORMS[name])
    assert old == new
    assert not [key for key in old if ".config." in key]


def test_a_configuration_of_text_and_images() -> None:
    """As the 4B model of Gemma 3 has it: only what differs from the defaults of the text model."""
    text: dict[str, Any] = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    given = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}, "boi_token_index": 5}
    config = FolderConfig(given)
    found = {key.removeprefix("gemma3."): value for key, value in config.metadata.items()}
    assert config.vocabulary == 262208
    assert (found["attention.head_count"], found["attention.head_count_kv"], found["attention.key_length"]) == (
        8,
        4,
        256,
    )
    assert (found["attention.scale"], found["rope.freq_base"], found["rope.scaling.factor"]) == (1 / 16, 1e6, 8.0)
    assert found["attention.sliding_window"] == 1024
    assert not [key for key in found if key.startswith("config.")]


def test_parts_and_columns_of_tensors(tmp_path: Path) -> None:
    """Halves, even and odd rows, and transposed matrices, also those of several experts."""
    rng = np.random.default_rng(5)
    given = {"flat": rng.normal(size=(6, 4)), "deep": rng.normal(size=(3, 6, 4)), "bias": rng.normal(size=(3, 6))}
    given = {name: values.astype(np.float32) for name, values in given.items()}
    write_safetensors(tmp_path / "model.safetensors", given)
    files = Safetensors.open(tmp_path)
    slices = {"first half": np.s_[:3], "second half": np.s_[3:], "even": np.s_[::2], "odd": np.s_[1::2]}
    for word, taken in slices.items():
        for name in ("flat", "deep"):
            wanted = given[name][..., taken, :]
            _same_rows(part_of(stored(files, name), word, bias=False), wanted)
        _same_rows(part_of(stored(files, "bias"), word, bias=True), given["bias"][:, taken])
    for name in ("flat", "deep"):
        _same_rows(transposed(stored(files, name)), given[name].swapaxes(-1, -2))
        _same_rows(
            part_of(transposed(stored(files, name)), "odd", bias=False), given[name].swapaxes(-1, -2)[..., 1::2, :]
        )
    with pytest.raises(ModelError, match="no two halves"):
        part_of(part_of(stored(files, "flat"), "odd", bias=False), "odd", bias=False)
    files.close()


def _same_rows(matrix: Any, wanted: Any) -> None:
    assert matrix.shape == wanted.shape
    rows = wanted.reshape(-1, wanted.shape[-1])
    for first, end in ((0, len(rows)), (1, len(rows) - 1), (1, 1)):
        assert np.array_equal(
            matrix.rows(slice(first, end)).view(np.float32).reshape(-1, rows.shape[1]), rows[first:end]
        )
    order = np.array([len(rows) - 1, 0, 1])
    assert np.array_equal(matrix.rows(order).view(np.float32), rows[order])


def test_llama3_frequencies(tmp_path: Path) -> None:
    """Divisors by the formula of transformers, written out one by one."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    folder = folder_of(write_tiny(tmp_path / "tiny.gguf", "llama"), tmp_path / "folder")
    replace_config(folder, rope_scaling=scaling)
    with Folder.open(folder) as found:
        divisors = found.dense("rope_freqs.weight")
    width = 2 * len(divisors)
    for i, divisor in enumerate(divisors):
        wave = 2 * np.pi * 10000 ** (2 * i / width)
        if wave < 64 / 4:
            wanted = 1.0
        elif wave > 64 / 1:
            wanted = 8.0
        else:
            smooth = (64 / wave - 1) / (4 - 1)
            wanted = 1 / ((1 - smooth) / 8 + smooth)
        assert divisor == pytest.approx(wanted, rel=1e-6)
    assert {1.0, 8.0} <= set(divisors.tolist())


def test_yarn_with_bounds_between_pairs() -> None:
    """truncate: false, as gpt-oss has it. Divisors by the formula of transformers, written out one by one."""
    scaling = {**_YARN, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0}
    config = FolderConfig({"model_type": "llama", **_SIZES, "rope_theta": 100.0, "rope_scaling": scaling})
    assert config.metadata["llama.rope.scaling.yarn_truncate"] is False
    low, high = (16 * math.log(32 / (turns * 2 * math.pi)) / (2 * math.log(100.0)) for turns in (8.0, 2.0))
    assert low < 0 < high < 2
    wanted = []
    for i in range(8):
        ramp = min(max(i / high, 0), 1)
        wanted.append(1 / (ramp / 4 + (1 - ramp)))
    found = Yarn(4.0, 32, 8.0, 2.0, truncate=False).factors(16, 100.0)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert not np.allclose(found, Yarn(4.0, 32, 8.0, 2.0).factors(16, 100.0))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"model_type": "other"}, "model_type is 'other'; supported in folders: llama"),
    "no type": ({"model_type": None}, "model_type is None"),
    "unknown key": ({"new_trick": 3}, "llama.config.new_trick is 3: it is not known what that changes"),
    "activation": ({"hidden_act": "relu"}, "llama.config.hidden_act is 'relu'"),
    "rope": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope scaling 'dynamic' is not supported without alpha",
    ),
    "rope of another type": ({"rope_scaling": {"rope_type": ["linear"]}}, "is not supported"),
    "rope key": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "x": 1}}, "llama.config.rope_scaling"),
    "vocabulary": ({"vocab_size": 3}, "vocab_size is 3"),
    "heads": ({"num_attention_heads": "4"}, "attention.head_count must be a whole number"),
    "odd heads": ({"num_attention_heads": 64, "head_dim": 1}, "an even number of rows"),
    "layers": ({"num_hidden_layers": 1}, "that the architecture llama does not read"),
    "tied by a text": ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, it is 'false'"),
    "a large epsilon": ({"rms_norm_eps": 1e308}, "rms_epsilon must be a small number above 0"),
    "a number beyond all": ({"rms_norm_eps": 10**400}, "rms_epsilon must be a number above 0, the file has inf"),
    "layers beyond all": ({"num_hidden_layers": -(10**400)}, "must be a whole number from 1 to 2²⁴, it is -inf"),
    "more than a head": (
        {"partial_rotary_factor": 1e12, "rope_scaling": {"rope_type": "llama3"}},
        "partial_rotary_factor must be a number from 0 to 1, it is 1e\\+12",
    ),
    "trained for a token": (
        {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 1}},
        "original_max_position_embeddings must be at least 2, it is 1",
    ),
    "not tied": ({"tie_word_embeddings": False}, "tie_word_embeddings is false"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quant_method is 'gptq', but there is no tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_folder_is_right_or_refused(tmp_path: Path, name: str) -> None:
    folder = folder_of(write_tiny(tmp_path / "tiny.gguf", "llama"), tmp_path / "folder")
    changes, said = WRONG[name]
    replace_config(folder, **changes)
    with pytest.raises(ModelError, match=said):
        shaderlm.load(folder, device="cpu")


def test_an_ignored_key_of_a_folder(tmp_path: Path) -> None:
    folder = folder_of(write_tiny(tmp_path / "tiny.gguf", "llama"), tmp_path / "folder")
    replace_config(folder, new_trick=3)
    shaderlm.load(folder, device="cpu", ignore_keys=["llama.config.new_trick"]).close()


_UNREAD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma": ({"hidden_act": "gelu", "hidden_activation": None}, {"hidden_act": "relu"}),
    "stablelm": ({"norm_eps": 1e-5, "rotary_scaling_factor": 1.0}, {"rotary_scaling_factor": 2.0}),
    "nemotron": ({"kv_channels": 16}, {"kv_channels": 64}),
    "gpt2": (
        {"n_special": 0, "predict_special_tokens": True, "output_past": True, "_num_labels": 1},
        {"n_special": 3, "activation_function": "gelu"},
    ),
    "starcoder": (
        {
            "inference_runner": 0,
            "validate_runner_input": True,
            "pad_key_length": True,
            "pre_allocate_kv_cache": False,
            "gradient_checkpointing": False,
        },
        {"multi_query": False},
    ),
    "starcoder2": (
        {
            "activation_function": "gelu",
            "layer_norm_epsilon": 1e-3,
            "scale_attn_weights": True,
            "attention_softmax_in_fp32": True,
            "scale_attention_softmax_in_fp32": True,
        },
        {"scale_attn_weights": False},
    ),
    "gptneox": (
        {
            "attention_probs_dropout_prob": 0,
            "hidden_dropout_prob": 0.1,
            "custom_pipelines": {"text-generation": {"impl": "a.b"}},
        },
        {"hidden_act": "relu"},
    ),
    "hunyuan-dense": (
        {
            "attention_head_dim": 128,
            "cla_share_factor": 2,
            "class_num": 0,
            "dense_list": [4096, 0],
            "im_end_id": 5,
            "im_newline_id": 11,
            "im_start_id": 4,
            "mask_init_id": 12,
            "norm_type": "rms",
            "org_vocab_size": 128167,
            "pool_type": "last",
            "text_end_id": 7,
            "text_start_id": 6,
            "use_cla": False,
            "use_rotary_pos_emb": True,
        },
        {"norm_type": "layer", "use_cla": True, "use_rotary_pos_emb": False},
    ),
}


@pytest.mark.parametrize("name", _UNREAD)
def test_keys_of_published_folders_that_change_nothing(name: str) -> None:
    """With these values; with others the keys stay, and are refused."""
    recorded, (nothing, something) = checkpoints.recorded(name)["config"], _UNREAD[name]
    expected = FolderConfig(recorded).metadata
    assert FolderConfig({**recorded, **nothing, "new_trick": None}).metadata == expected
    for key, value in something.items():
        left = {f"{checkpoints.recorded(name)['architecture']}.config.{key}": value}
        assert FolderConfig({**recorded, key: value}).metadata == expected | left


@pytest.mark.parametrize(
    ("name", "key", "value", "op"),
    [
        ("starcoder", "activation_function", "gelu", "gelu_erf"),
        ("starcoder", "activation_function", "gelu_fast", "gelu"),
        ("gptneox", "hidden_act", "gelu_fast", "gelu"),
        ("gptneox", "hidden_act", "gelu_new", "gelu"),
        ("gptneox", "hidden_act", "gelu", "gelu_erf"),
    ],
)
def test_the_gelu_that_a_folder_names(name: str, key: str, value: str, op: str, tmp_path: Path) -> None:
    """StarCoder's own folder and GPT-NeoX-20B name another one than GGUF files of their architectures mean."""
    folder = checkpoints.write_folder(tmp_path / "folder", checkpoints.recorded(name))
    replace_config(folder, **{key: value})
    with Folder.open(folder) as file:
        kind = architecture_of(file)
        graph = kind.build(read_config(kind, file), StepSpec(3))
    assert {node.op for node in graph.nodes if "gelu" in node.op} == {op}


@pytest.mark.parametrize("value", ["relu", ["gelu"], {"gelu": 1}, 3])
def test_another_activation_is_refused(value: Any, tmp_path: Path) -> None:
    folder = checkpoints.write_folder(tmp_path / "folder", checkpoints.recorded("gptneox"))
    replace_config(folder, hidden_act=value)
    with Folder.open(folder) as file, pytest.raises(ModelError, match=r"gptneox.config.hidden_act must be one of gelu"):
        read_config(architecture_of(file), file)


def test_a_key_by_its_older_name_and_its_newer_one() -> None:
    """As transformers 4.45 writes those of Pythia. Two different values are refused."""
    recorded = {key: value for key, value in checkpoints.recorded("gptneox")["config"].items() if "rope" not in key}
    newer = {"partial_rotary_factor": 0.5, "rope_theta": 500.0}
    older = {"rotary_pct": 0.5, "rotary_emb_base": 500.0}
    expected = FolderConfig({**recorded, **newer}).metadata
    assert FolderConfig({**recorded, **older}).metadata == expected
    assert FolderConfig({**recorded, **older, **newer}).metadata == expected
    found = FolderConfig({**recorded, **newer, "rotary_pct": 0.25}).metadata
    assert found == expected | {"gptneox.config.rotary_pct": 0.25}


def test_an_output_matrix_beside_tied_embeddings(tmp_path: Path) -> None:
    """The same numbers are one matrix. If they differ, programs do not agree on which of them counts."""
    entry = checkpoints.recorded("qwen3")
    folder, tensors = checkpoints.write_folder(tmp_path / "folder", entry), checkpoints.tensors_of(entry)
    embeddings, path = tensors["model.embed_tokens.weight"], folder / "model.safetensors"
    with shaderlm.load(folder, device="cpu") as model:
        expected = model.logits([1, 2, 3])
    write_safetensors(path, {**tensors, "lm_head.weight": embeddings})
    with shaderlm.load(folder, device="cpu") as model:
        np.testing.assert_array_equal(model.logits([1, 2, 3]), expected)
    write_safetensors(path, {**tensors, "lm_head.weight": embeddings.astype(np.float16)})
    with pytest.raises(ModelError, match="differs"):  # rounded
        shaderlm.load(folder, device="cpu")
    halves = embeddings.astype(np.float16)
    rounded: Any = {**tensors, "model.embed_tokens.weight": halves.astype(np.float32), "lm_head.weight": halves}
    write_safetensors(path, rounded)
    shaderlm.load(folder, device="cpu").close()
    other = embeddings.copy()
    other[-1, -1] += 1
    write_safetensors(path, {**tensors, "lm_head.weight": other})
    with pytest.raises(ModelError, match=r"tie_word_embeddings is true, but 'lm_head\.weight' differs"):
        shaderlm.load(folder, device="cpu")
    replace_config(folder, tie_word_embeddings=False)
    with shaderlm.load(folder, device="cpu") as model:
        assert not np.array_equal(model.logits([1, 2, 3]), expected)


_FULL_LAYERS = {"layer_types": ["full_attention"] * 2}
CONFLICTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "window, switched off": ("mistral", {"use_sliding_window": False}, "llama.config.use_sliding_window is False"),
    "window, full layers": (
        "mistral",
        _FULL_LAYERS,
        "there is a sliding_window, but layer_types have 'full_attention'",
    ),
    "pattern": ("gemma2", {"sliding_window_pattern": 3}, "gemma2.config.sliding_window_pattern is 3"),
    "older pattern": ("gemma2", {"_sliding_window_pattern": 3}, "gemma2.config._sliding_window_pattern is 3"),
    "partly rotated": ("qwen2", {"partial_rotary_factor": 0.5}, "qwen2.config.partial_rotary_factor is 0.5"),
    "other layers": ("qwen3moe-mixed", {"mlp_only_layers": [0]}, "layers_with_experts must be .True, False, True."),
    "no layer": ("qwen3moe", {"mlp_only_layers": [2]}, "mlp_only_layers must list layers, it is .2."),
    "parallel": ("stablelm", {"use_parallel_residual": True}, "stablelm.config.use_parallel_residual must be False"),
    "sequential": ("stablelm-parallel", {"use_parallel_residual": False}, "use_parallel_residual must be True"),
    "two lengths": ("phi3-longrope", {"original_max_position_embeddings": 32}, "is 32 and, in the scaling of rope, 64"),
    "small factor": (
        "qwen2",
        {"rope_parameters": {"rope_type": "yarn", "factor": 0.5}},
        "must be at least 1, it is 0.5",
    ),
    "no base": ("olmo3", {"rope_parameters": None}, "rope_theta must be a number above 0, it is None"),
    "no scaling": ("gpt-oss", {"rope_parameters": None, "rope_scaling": None}, "rope_scaling must be an object"),
    "two contexts": (
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "max_position_embeddings": 64}},
        "max_position_embeddings is 128 and, in rope_parameters, 64",
    ),
    "no last full layer": ("gemma4", {"layer_types": ["sliding_attention"] * 4}, "the last of them 'full_attention'"),
    "values by keys": ("gemma4", {"attention_k_eq_v": True}, "attention_k_eq_v must be False"),
    "another layer": ("gemma4", {"per_layer_config": {"4": {"head_dim": 32}}}, "must have objects by the numbers"),
    "another size": ("gemma4", {"per_layer_config": {"1": {"ffn": 3}}}, "per_layer_config has 'ffn'"),
    "two widths": (
        "gemma4",
        {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}},
        "heads of the same width",
    ),
    "local bases": ("gemma3", {"rope_local_base_freq": 77.0}, "rope_local_base_freq and rope_parameters differ"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_keys_that_a_model_does_not_read_or_that_differ(name: str, tmp_path: Path) -> None:
    checkpoint, changes, said = CONFLICTS[name]
    folder = checkpoints.write_folder(tmp_path / "folder", checkpoints.recorded(checkpoint))
    replace_config(folder, **changes)
    with pytest.raises(ModelError, match=said):
        shaderlm.load(folder, device="cpu")


def test_rope_parameters_with_the_context(tmp_path: Path) -> None:
    """As transformers 5.23 may write it."""
    recorded = checkpoints.recorded("qwen3")["config"]
    inside = {**recorded["rope_parameters"], "max_position_embeddings": recorded["max_position_embeddings"]}
    assert FolderConfig({**recorded, "rope_parameters": inside}).metadata == FolderConfig(recorded).metadata


def test_gemma4_with_images_and_its_older_keys(tmp_path: Path) -> None:
    entry = checkpoints.recorded("gemma4-moe")
    plain = checkpoints.write_folder(tmp_path / "plain", entry)
    folder = checkpoints.write_folder(tmp_path / "images", entry)
    text = {key: value for key, value in entry["config"].items() if key != "per_layer_config"}
    text |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    config = {"model_type": "gemma4", "text_config": text, "vision_config": {}, "image_token_id": 5}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {
        name.replace("model.", "model.language_model.", 1): each for name, each in checkpoints.tensors_of(entry).items()
    }
    tensors["model.vision_tower.x.weight"] = np.ones((2, 2), np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    with Folder.open(plain) as one, Folder.open(folder) as other:
        assert one.tensors == other.tensors
        assert {**other.metadata, "general.name": "plain"} == dict(one.metadata)
        for name in one.tensors:
            assert np.array_equal(one.dense(name), other.dense(name)), name


def test_gemma2_without_a_window() -> None:
    recorded = checkpoints.recorded("gemma2")["config"]
    layers = {"layer_types": ["full_attention"] * recorded["num_hidden_layers"], "sliding_window": None}
    assert FolderConfig({**recorded, **layers}).metadata["gemma2.attention.sliding_window"] == 0


def test_null_stands_for_what_follows_from_other_keys() -> None:
    recorded, longrope = (checkpoints.recorded(name)["config"] for name in ("llama-yarn", "phi3-longrope"))
    scaling = {key: value for key, value in recorded["rope_parameters"].items() if "original" not in key}
    expected = FolderConfig({**recorded, "rope_parameters": scaling}).metadata
    scaling["original_max_position_embeddings"] = None
    assert FolderConfig({**recorded, "rope_parameters": scaling}).metadata == expected
    scaling = {**longrope["rope_parameters"], "attention_factor": None}
    assert FolderConfig({**longrope, "rope_parameters": scaling}).metadata == FolderConfig(longrope).metadata


@pytest.mark.parametrize("key", ["hidden_act", "rope_interleaved"])
def test_null_is_no_value_of_a_key_that_is_known(key: str) -> None:
    recorded = checkpoints.recorded("mistral")["config"]
    assert f"llama.config.{key}" in FolderConfig({**recorded, key: None}).metadata
