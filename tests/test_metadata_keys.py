"""What a file says and the engine does not compute is refused by name; what changes nothing is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import Keys

import shaderlm
from shaderlm.engine.tokenizer import Tokenizer
from shaderlm.errors import InputError, ModelError
from shaderlm.models.config import Metadata
from shaderlm.models.metadata_keys import HARMLESS, REFUSED

from .architectures import model
from .changed import in_memory
from .changed import logits as logits_of
from .command_line import shaderlm as command
from .tiny_models import write_tiny, write_tiny_llama

IDS = list(range(40, 60))
ARCHITECTURES = ("llama", "qwen3")


def logits(path: Path, **options: Any) -> Any:
    with shaderlm.load(path, device="cpu", **options) as loaded:
        return loaded.logits(IDS)


def rejection(path: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        shaderlm.load(path, device="cpu", **options)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


# The tables ----------------------------------------------------------------------------------------------


def keys_of_gguf(table: Any = Keys, *, own: bool = True) -> Iterator[str]:
    """Every key of the gguf package that begins with an architecture's name, without it; or every other one."""
    for name, value in vars(table).items():
        if isinstance(value, type):
            yield from keys_of_gguf(value, own=own)
        elif not name.startswith("_") and value.startswith("{arch}.") == own:
            key = value.removeprefix("{arch}.")
            yield from (key.replace("{dense}", dense) for dense in ("dense_2", "dense_3"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_key_of_gguf_is_honoured_harmless_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    get = Metadata.get

    def watched(self: Metadata, key: str, default: Any = None) -> Any:
        read.add(key)
        return get(self, key, default)

    monkeypatch.setattr(Metadata, "get", watched)
    model(name=name)
    known, tables = set(keys_of_gguf()), [read, set(HARMLESS), set(REFUSED)]
    decided = set().union(*tables)
    assert len(known) > 100
    assert known - decided == set(), "new keys: decide what becomes of them"
    assert not set(HARMLESS) & set(REFUSED), "in two tables"
    assert decided - known == {"rope.scale_linear"}, "the gguf package knows no older names"
    assert all(HARMLESS.values())
    assert all(entry.effect for entry in REFUSED.values())


# Keys ----------------------------------------------------------------------------------------------------

CHANGING: dict[str, Any] = {
    "attention.causal": False,
    "attention.clamp_kqv": 8.0,
    "attention.max_alibi_bias": 8.0,
    "attention.scale": 0.5,
    "attention.sliding_window": 127,
    "attention.sliding_window_pattern": [True, False],
    "attn_logit_softcapping": 50.0,
    "embedding_length_out": 32,
    "embedding_scale": 12.0,
    "expert_count": 8,
    "expert_used_count": 2,
    "final_logit_softcapping": 30.0,
    "logit_scale": 0.25,
    "residual_scale": 0.22,
    "rope.dimension_sections": [8, 4, 4, 0],
    "tensor_data_layout": "transposed",
    "use_parallel_residual": True,
    "a.key.of.next.year": 0,
}


HONOURED = {("llama", "attention.sliding_window"), ("llama", "expert_count")}


@pytest.mark.parametrize(
    ("own", "key"), [(own, key) for own in ARCHITECTURES for key in CHANGING if (own, key) not in HONOURED]
)
def test_a_key_that_changes_something_is_refused_and_can_be_ignored(own: str, key: str, tmp_path: Path) -> None:
    name, value = f"{own}.{key}", CHANGING[key]
    path = write_tiny(tmp_path / "changed.gguf", own, metadata={name: value})
    plain = write_tiny(tmp_path / "plain.gguf", own)
    message = rejection(path)
    assert message.startswith(f"{name} is {value}"[:20])
    assert f"--ignore-key {name} (in Python ignore_keys=[{name!r}])" in message
    effect = REFUSED[key].effect if key in REFUSED else "it is not known what that changes"
    assert f": {effect}, which the architecture {own} does not support" in message
    np.testing.assert_array_equal(logits(path, ignore_keys=[name]), logits(plain))


NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.scale": 0.25,  # 1 / sqrt(16)
    "attention.sliding_window": 128,  # the context
    "attention.layer_norm_epsilon": 1e-5,
    "expert_count": 0,
    "expert_used_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 0.0,
    "embedding_length_out": 64,
    "pooling_type": 3,
    "rope.dimension_sections": [0, 0, 0, 0],
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.finetuned": False,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "tensor_data_layout": "Meta AI original pth",
    "use_parallel_residual": False,
    "vocab_size": 267,
}


def test_values_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "neutral.gguf", metadata={f"llama.{k}": v for k, v in NEUTRAL.items()})
    np.testing.assert_array_equal(logits(path), logits(write_tiny_llama(tmp_path / "plain.gguf")))


@pytest.mark.parametrize(
    ("name", "key", "same", "other"),
    [
        ("olmo3", "rope.freq_base_swa", 500000.0, 10000.0),
        ("cohere2", "rope.freq_base_swa", 10000.0, 500000.0),
        ("gemma2", "rope.dimension_count_swa", 16, 8),
        ("qwen3moe", "expert_weights_norm", True, False),
        ("qwen2moe", "expert_weights_norm", False, True),
        ("qwen3moe", "expert_gating_func", 1, 2),
        ("gpt-oss", "expert_gating_func", 0, 1),
    ],
)
def test_what_a_file_says_of_what_is_computed_anyway(name: str, key: str, same: Any, other: Any) -> None:
    file = in_memory(name)
    np.testing.assert_array_equal(logits_of(file.changed({key: same})), logits_of(file))
    with pytest.raises(ModelError, match=f"{file.own}.{key} is {other}"):
        logits_of(file.changed({key: other}))


# Scaling of positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"scaling.factor": 4.0}, 4.0),  # llama.cpp: linear
        ({"scale_linear": 4.0}, 4.0),  # its name in older files
        ({"scaling.factor": 4.0, "scale_linear": 2.0}, 4.0),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
        ({"scaling.type": "none", "scale_linear": 4.0}, None),
        ({"scaling.factor": 0.0}, None),
    ],
)
def test_factors_of_positions(scaling: dict[str, Any], expected: float | None, tmp_path: Path) -> None:
    metadata = {f"llama.rope.{key}": value for key, value in scaling.items()}
    path = write_tiny_llama(tmp_path / "scaled.gguf", metadata=metadata)
    said = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": expected} if expected else {}
    same = write_tiny_llama(tmp_path / "same.gguf", metadata=said)
    np.testing.assert_array_equal(logits(path), logits(same))
    assert (np.abs(logits(path) - logits(write_tiny_llama(tmp_path / "plain.gguf"))).max() > 1e-2) == bool(expected)


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_other_scalings_are_refused(kind: str, tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    path = write_tiny_llama(tmp_path / "scaled.gguf", metadata=scaling)
    message = rejection(path)
    assert f"llama.rope.scaling.type is '{kind}': positions are rotated in another way" in message
    assert "--ignore-key llama.rope.scaling.type --ignore-key llama.rope.scaling.factor" in message
    np.testing.assert_array_equal(
        logits(path, ignore_keys=list(scaling)), logits(write_tiny_llama(tmp_path / "p.gguf"))
    )


def test_a_factor_must_be_a_number(tmp_path: Path) -> None:
    for value in (-4.0, "4", True):
        path = write_tiny_llama(tmp_path / "wrong.gguf", metadata={"llama.rope.scaling.factor": value})
        assert "llama.rope.scaling.factor must be a number above 0" in rejection(path)


# Tensors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["blk.0.attn_q.scale"], "blk.0.attn_q.scale (scales of weights)"),
        (["output.scale"], "output.scale (scales of weights)"),
        (["blk.{}.attn_q_norm.weight", "blk.{}.attn_k_norm.weight"], "(norms of queries and keys), blk.0.attn_k_norm."),
        (["blk.{}.post_attention_norm.weight"], "blk.0.post_attention_norm.weight (norms after attention"),
        (["blk.{}.post_ffw_norm.weight"], "(norms after attention or feed-forward network)"),
        (["blk.{}.attn_sinks.weight"], "blk.0.attn_sinks.weight (attention sinks)"),
        (["blk.{}.attn_norm.bias"], "blk.0.attn_norm.bias (biases of norms)"),
        (["output_norm.bias"], "output_norm.bias (biases of norms)"),
        (["output.bias"], "output.bias (a bias of the logits)"),
        (["cls.output.weight"], "cls.output.weight (a classifier)"),
        (["rope_factors_long.weight"], "(frequencies of longrope)"),
        (["blk.2.attn_norm.weight"], "blk.2.attn_norm.weight. It is a variant that is not supported, or has more lay"),
        ([f"{letter}.weight" for letter in "abcdef"], "a.weight, b.weight, c.weight, d.weight and 2 more."),
    ],
)
def test_a_tensor_that_is_not_read_is_refused_by_name(names: list[str], said: str, tmp_path: Path) -> None:
    found = {name.format(i): np.ones(16, np.float32) for name in names for i in range(2)}
    message = rejection(write_tiny_llama(tmp_path / "more.gguf", tensors=found))
    count = f"{len(found)} tensor{'' if len(found) == 1 else 's'}"
    assert message.startswith(f"the file has {count} that the architecture llama does not read: ")
    assert said in message


# Ignoring ------------------------------------------------------------------------------------------------


def test_only_keys_that_are_there_can_be_ignored(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    for names, said in (
        (["llama.rope.freq_bse"], "no metadata key 'llama.rope.freq_bse' .*did you mean llama.rope.freq_base"),
        (["tokenizer.ggml.pre"], "'tokenizer.ggml.pre' that begins with llama.; it has llama.context_length"),
        ("llama.rope.freq_base", "must be a list of metadata keys, got 'llama.rope.freq_base'"),
        ([3], r"must be a list of metadata keys, got \[3\]"),
    ):
        with pytest.raises(InputError, match=said):
            shaderlm.load(path, device="cpu", ignore_keys=names)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"llama\.block_count must be a whole number from 1 to 1,024, the file has n"):
        shaderlm.load(path, device="cpu", ignore_keys=["llama.block_count"])


def test_the_commands_can_ignore_keys(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "capped.gguf", metadata={"llama.logit_scale": 2.0})
    ignoring = ("--ignore-key", "llama.logit_scale")
    assert "runs           yes" in command("info", path, *ignoring).out
    assert "--ignore-key llama.logit_scale" in command("plan", path, "--target", "large-gpu").err
    assert "prefill: 128 tokens" in command("plan", path, "--target", "large-gpu", *ignoring).out
    on_cpu = ("-m", path, "--device", "cpu")
    for arguments in (("generate", "hi", "-n", 2), ("bench", "-p", 2, "-n", 0, "-r", 1), ("chat",)):
        refused = command(*arguments, *on_cpu)
        assert (refused.code, refused.out) == (1, "")
        assert "--ignore-key llama.logit_scale" in refused.err
        assert command(*arguments, *on_cpu, *ignoring).code == 0
    wrong = command("bench", "-m", "synthetic:smollm2-135m:q4_0", *ignoring)
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "has no metadata; leave out --ignore-key" in wrong.err


# One verdict ---------------------------------------------------------------------------------------------

WRONG: dict[str, dict[str, Any]] = {
    "architecture": {"metadata": {"general.architecture": "mamba"}},
    "architecture and tokenizer": {"metadata": {"general.architecture": "mamba", "tokenizer.ggml.pre": "klingon"}},
    "tokenizer": {"metadata": {"tokenizer.ggml.pre": "klingon"}},
    "tokenizer and key": {"metadata": {"tokenizer.ggml.pre": "klingon", "llama.logit_scale": 2.0}},
    "no tokens": {"metadata": {"tokenizer.ggml.tokens": None}},
    "key": {"metadata": {"llama.logit_scale": 2.0}},
    "key and tensor": {"metadata": {"llama.logit_scale": 2.0}, "tensors": {"output.bias": np.ones(267, np.float32)}},
    "tensor": {"tensors": {"output.bias": np.ones(267, np.float32)}},
    "shape": {"metadata": {"llama.feed_forward_length": 97}},
    "type": {"kind": "iq3_s", "hidden": 256, "ffn": 256},
    "tokens": {"tensors": {"token_embd.weight": np.zeros((99, 64), np.float32)}},
    "scaling": {"metadata": {"llama.rope.scaling.type": "su"}},
}


@pytest.mark.parametrize("name", WRONG)
def test_info_and_load_give_the_same_reason_and_load_names_the_file(name: str, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "wrong.gguf", **WRONG[name])
    reason = rejection(path)
    assert f"runs           no: {reason}\n" in command("info", path).out
    with pytest.raises(ModelError, match=re.escape(str(path))):
        shaderlm.load(path, device="swiftshader")


def test_a_tokenizer_by_itself_names_the_file_too(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "wrong.gguf", metadata={"tokenizer.ggml.pre": "klingon"})
    with pytest.raises(ModelError, match=f"{re.escape(str(path))}: tokenizer.ggml.pre 'klingon' is not known"):
        Tokenizer.from_file(path)
