"""`bench drafts`: both texts, in turns, with what was drafted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shaderlm.bench.drafts import DraftResult, lines

from .command_line import shaderlm
from .tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("bench_drafts") / "tiny.gguf", layers=1, context=1024)


def test_texts_with_and_without_drafts(tiny: Path) -> None:
    arguments = ("bench", "drafts", "-m", tiny, "--device", "numpy", "-n", 24, "-r", 1, "--always", "--deterministic")
    done = shaderlm(*arguments, "-np", "1,2", "--text", "free", "--json")
    assert done.code == 0, done.err
    results = json.loads(done.out)
    assert [(each["text"], each["streams"]) for each in results] == [("free", 1), ("free", 2)]
    assert all(each["same"] and each["off"] > 0 and len(each["ratios"]) == 1 for each in results)
    assert all(each["drafted"] >= each["accepted"] for each in results)


def test_an_acceptance_can_be_forced(tiny: Path) -> None:
    arguments = ("bench", "drafts", "-m", tiny, "--device", "numpy", "-n", 64, "-r", 1, "--always", "--text", "free")
    done = shaderlm(*arguments, "--draft-model", tiny, "--draft-acceptance", 0.5, "--draft-tokens", 1, "--json")
    assert done.code == 0, done.err
    (result,) = json.loads(done.out)
    assert 0.2 < result["accepted"] / result["drafted"] < 0.8
    assert shaderlm(*arguments, "--draft-acceptance", 0.5).code != 0, "n-grams draft nothing of a text without repeats"


def test_the_table_has_ratios() -> None:
    table = lines([DraftResult("free", 16, 1000.0, 990.0, 0.99, (0.98, 0.99, 1.0), 50, 20, True)])
    assert table[-1] == "| free | 16 | 1,000 | 990 | 0.99 | 50 | 20 (40%) |"
