"""Hugging Face folders give what a GGUF file of the same model gives: metadata, tensors, tokens, logits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shaderlm
from shaderlm.errors import ModelError
from shaderlm.formats.folder import Folder
from shaderlm.formats.gguf import GgufFile
from shaderlm.text import Tokenizer, Vocabulary

from .folders import folder_of, replace_config
from .tiny_models import write_tiny

ORACLES = Path(os.environ.get("SHADERLM_ORACLES", Path(__file__).parents[2] / "shared" / "data" / "oracles"))
needs_oracles = pytest.mark.skipif(not ORACLES.exists(), reason="needs recorded oracles: SHADERLM_ORACLES names them")
# What a folder says and GGUF's converter leaves out, since it follows from the rest; no other difference is right.
_SAID_TWICE = {"rope.dimension_count"}


@needs_oracles
@pytest.mark.parametrize("name", ["qwen2", "qwen3moe", "gemma3", "phi3"])
def test_a_folder_is_like_the_file_of_the_converter(name: str) -> None:
    with GgufFile.open(ORACLES / name / "model.gguf") as file, Folder.open(ORACLES / name / "hf") as folder:
        own = f"{file.metadata['general.architecture']}."
        wanted = {key: value for key, value in file.metadata.items() if key.startswith(own)}
        found = {key: value for key, value in folder.metadata.items() if key.startswith(own)}
        for key in set(found) - set(wanted):
            assert key.removeprefix(own) in _SAID_TWICE, (key, found[key])
        for key, value in wanted.items():
            if value != 0:  # "not set"
                assert found[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
        assert {key: info.shape for key, info in folder.tensors.items()} == {
            key: info.shape for key, info in file.tensors.items()
        }
        for key in file.tensors:
            assert np.array_equal(folder.dense(key), file.dense(key)), key
            middle = int(np.prod(file.tensors[key].shape[:-1])) // 2
            if middle:  # of experts: rows of two of them
                ours, theirs = (each.dense(key, middle - 1, middle + 1) for each in (folder, file))
                assert np.array_equal(ours, theirs), key
        recorded, read = (Vocabulary.from_metadata(each.metadata) for each in (file, folder))
        for field in ("kind", "tokens", "types", "bos", "eos", "add_bos", "add_eos", "add_space_prefix"):
            assert getattr(read, field) == getattr(recorded, field), field
        tokenizer = Tokenizer(read)
        for each in json.loads((ORACLES / name / "oracle.json").read_text(encoding="utf-8"))["texts"]:
            assert tokenizer.encode(each["text"]) == each["ids"]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("parts", [1, 3])
def test_logits_are_those_of_the_file(tmp_path: Path, architecture: str, parts: int) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", architecture)
    folder = folder_of(path, tmp_path / "folder", parts=parts)
    ids = [5, 9, 200, 17, 40]
    rows = []
    for each in (path, folder):
        with shaderlm.load(each, device="cpu") as model:
            assert model.tokenizer.decode(model.tokenizer.encode("the inn, <|im_end|>")) == "the inn, "
            rows.append((model.logits(ids), model.tokenizer.encode("the inn, <|im_end|>")))
    assert np.array_equal(rows[0][0], rows[1][0])
    assert rows[0][1] == rows[1][1]


def test_bf16_and_f16(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", "qwen3")
    for dtype, kind in (("bf16", "bf16"), ("f16", "f16")):
        with GgufFile.open(path) as file, Folder.open(folder_of(path, tmp_path / kind, dtype=dtype)) as folder:
            assert folder.tensors["blk.0.attn_q.weight"].kind == kind
            ours, theirs = (each.dense("blk.0.attn_q.weight") for each in (folder, file))
            assert np.allclose(ours, theirs, rtol=0.01, atol=1e-6)


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


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"model_type": "other"}, "model_type is 'other'; supported in folders: llama"),
    "no type": ({"model_type": None}, "model_type is None"),
    "unknown key": ({"new_trick": 3}, "llama.config.new_trick is 3: it is not known what that changes"),
    "activation": ({"hidden_act": "relu"}, "llama.config.hidden_act is 'relu'"),
    "rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
    "rope of another type": ({"rope_scaling": {"rope_type": ["linear"]}}, "is not supported"),
    "rope key": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "x": 1}}, "llama.config.rope_scaling"),
    "vocabulary": ({"vocab_size": 3}, "vocab_size is 3"),
    "heads": ({"num_attention_heads": "4"}, "attention.head_count must be a whole number"),
    "odd heads": ({"num_attention_heads": 64, "head_dim": 1}, "an even number of rows"),
    "layers": ({"num_hidden_layers": 1}, "that the architecture llama does not read"),
    "not tied": ({"tie_word_embeddings": False}, "tie_word_embeddings is false"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "llama.config.quantization_config"),
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
