"""Every recorded checkpoint gives the logits of `transformers`: from GGUF, from a folder, in parts, on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shaderlm
from shaderlm.engine import LanguageModel
from shaderlm.engine.loading import load_with
from shaderlm.formats.folder_models import MODEL_TYPES
from shaderlm.gpu import Device

from .checkpoints import PROMPTS, kept, names, recorded, write_folder, write_gguf

CHECKPOINTS = {name: recorded(name) for name in names()}
IN_FOLDERS = [name for name, entry in CHECKPOINTS.items() if entry["config"]["model_type"] in MODEL_TYPES]
ON_GPU = ("phi2",)  # the others take long to compile


def check(model: LanguageModel, entry: Mapping[str, Any]) -> None:
    """The logits after each prompt, and the tokens that follow."""
    for prompt, wanted, greedy in zip(PROMPTS, entry["logits"], entry["greedy"], strict=True):
        tolerance = 2e-4 * max(1.0, float(np.abs(wanted).max()))
        session = model.runner.session()
        found = session.logits(prompt)
        np.testing.assert_allclose(kept(found), wanted, atol=tolerance, rtol=0)
        ids = []
        for _ in greedy:
            ids.append(int(found.argmax()))
            found = session.logits(ids[-1:])
        session.close()
        assert ids == greedy


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_gguf_file(name: str, tmp_path: Path) -> None:
    with shaderlm.load(write_gguf(tmp_path / "tiny.gguf", CHECKPOINTS[name]), device="cpu") as model:
        check(model, CHECKPOINTS[name])


@pytest.mark.parametrize("name", IN_FOLDERS)
def test_a_folder(name: str, tmp_path: Path) -> None:
    with shaderlm.load(write_folder(tmp_path / "folder", CHECKPOINTS[name]), device="cpu") as model:
        check(model, CHECKPOINTS[name])


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_without_fusions(name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", CHECKPOINTS[name])
    with load_with(path, device="cpu", fusions=()) as model:
        check(model, CHECKPOINTS[name])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ON_GPU else pytest.mark.long) for name in CHECKPOINTS]
)
def test_on_a_gpu(name: str, tmp_path: Path, device: Device) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", CHECKPOINTS[name])
    with load_with(path, device=device, cache="f32", precision="exact") as model:
        check(model, CHECKPOINTS[name])
