"""Every recorded checkpoint gives the logits of `transformers`: from GGUF, from a folder, in parts, on a GPU.

Where there is an oracle, which a converter wrote, `tests/test_oracles.py` compares that one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shaderlm
from shaderlm.engine import LanguageModel
from shaderlm.engine.loading import load_with
from shaderlm.formats.gguf import GgufFile
from shaderlm.formats.hf.models import MODEL_TYPES
from shaderlm.gpu import Device
from shaderlm.graph.fuse import fuse
from shaderlm.models.checkpoint import architecture_of, read_config
from shaderlm.models.config import StepSpec

from .checkpoints import PROMPTS, kept, names, recorded, tensors_of, write_folder, write_gguf
from .oracles import ARCHITECTURES as ORACLES
from .oracles import WITH_FOLDER
from .safetensors_files import write_safetensors
from .session import Session

CHECKPOINTS = {name: recorded(name) for name in names()}
IN_FOLDERS = [name for name, entry in CHECKPOINTS.items() if entry["config"]["model_type"] in MODEL_TYPES]
# Of each kind of layer one; with --all, every checkpoint is tested. Shaders take long to compile.
UNFUSED = ("phi2", "cohere2", "hunyuan-dense", "gptneox", "nemotron", "exaone4", "granitemoe-shared")
ON_GPU = ("phi2",)


def marked(short: Collection[str]) -> list[Any]:
    """All checkpoints, those in `short` for every run of the tests."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.long) for name in CHECKPOINTS]


def check(model: LanguageModel, entry: Mapping[str, Any]) -> None:
    """The logits after each prompt, and the tokens that follow."""
    for prompt, wanted, greedy in zip(PROMPTS, entry["logits"], entry["greedy"], strict=True):
        tolerance = 2e-4 * max(1.0, float(np.abs(wanted).max()))
        session = Session(model.runner)
        found = session.logits(prompt)
        np.testing.assert_allclose(kept(found), wanted, atol=tolerance, rtol=0)
        ids = []
        for _ in greedy:
            ids.append(int(found.argmax()))
            found = session.logits(ids[-1:])
        session.close()
        assert ids == greedy


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name not in ORACLES])
def test_a_gguf_file(name: str, tmp_path: Path) -> None:
    entry = CHECKPOINTS[name]
    with shaderlm.load(write_gguf(tmp_path / "tiny.gguf", entry), device="cpu", context=entry.get("context")) as model:
        check(model, entry)


@pytest.mark.parametrize("name", [name for name in IN_FOLDERS if name not in WITH_FOLDER])
def test_a_folder(name: str, tmp_path: Path) -> None:
    entry = CHECKPOINTS[name]
    with shaderlm.load(write_folder(tmp_path / "folder", entry), device="cpu", context=entry.get("context")) as model:
        check(model, entry)


def test_older_keys_of_gpt_neox(tmp_path: Path) -> None:
    entry = CHECKPOINTS["gptneox"]
    rope = entry["config"]["rope_parameters"]
    config = {**entry["config"], "rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}
    del config["rope_parameters"]
    with shaderlm.load(write_folder(tmp_path / "folder", {**entry, "config": config}), device="cpu") as model:
        check(model, entry)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_the_text_model_of_one_for_images(name: str, prefix: str, tmp_path: Path) -> None:
    entry = CHECKPOINTS[name]
    folder = write_folder(tmp_path / "folder", entry)
    config = {"model_type": name, "text_config": entry["config"], "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {
        re.sub("^lm_head", "language_model.lm_head", re.sub(r"^model\.", prefix, name)): values
        for name, values in tensors_of(entry).items()
    }
    tensors["vision_tower.patch.weight"] = np.ones((8, 8), np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    with shaderlm.load(folder, device="cpu") as model:
        check(model, entry)


@pytest.mark.parametrize("name", marked(UNFUSED))
def test_without_fusions(name: str, tmp_path: Path) -> None:
    entry = CHECKPOINTS[name]
    path = write_gguf(tmp_path / "tiny.gguf", entry)
    with load_with(path, device="cpu", fusions=(), context=entry.get("context")) as model:
        check(model, entry)


def test_the_exact_gelu_is_fused(tmp_path: Path) -> None:
    with GgufFile.open(write_gguf(tmp_path / "tiny.gguf", CHECKPOINTS["gptneox"])) as file:
        kind = architecture_of(file)
        graph = fuse(kind.build(read_config(kind, file), StepSpec(4)))[0]
    assert [node.dims["epilogue"] for node in graph.nodes if node.op == "linear"].count("gelu_erf") == 2
    assert "gelu_erf" not in {node.op for node in graph.nodes}


@pytest.mark.parametrize("name", marked(ON_GPU))
def test_on_a_gpu(name: str, tmp_path: Path, device: Device) -> None:
    entry = CHECKPOINTS[name]
    path = write_gguf(tmp_path / "tiny.gguf", entry)
    with load_with(path, device=device, cache="f32", precision="exact", context=entry.get("context")) as model:
        check(model, entry)
