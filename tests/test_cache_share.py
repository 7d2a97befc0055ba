"""How much memory the KV cache takes where nobody says: a share of what is free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shaderlm import load
from shaderlm.engine import EngineOptions, LanguageModel
from shaderlm.engine.planning import LARGE_GPU
from shaderlm.gpu import Device
from shaderlm.graph.batch import PAGE
from shaderlm.runtime import cache_share, runner
from shaderlm.runtime.cache_share import LEAST_PAGES, available_memory, free_memory, share_of
from shaderlm.runtime.pages import KEPT_PAGES

from .command_line import shaderlm
from .fake_runner import FakeRunner, model_of, tiny_tokenizer
from .tiny_models import write_tiny_llama

GIB = 1 << 30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("share") / "tiny.gguf", context=1024)


def test_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a card with its own memory what it has; of others what the system has, too."""
    monkeypatch.setattr(cache_share, "available_memory", lambda: 6 * GIB)
    discrete = replace(LARGE_GPU, heap=24 * GIB)
    assert free_memory(discrete, 4 * GIB, loaded=True) == free_memory(discrete, 4 * GIB, loaded=False) == 20 * GIB
    assert free_memory(LARGE_GPU, 4 * GIB, loaded=True) is None, "WebGPU does not tell"
    integrated = replace(LARGE_GPU, kind="integrated", heap=8 * GIB)
    assert free_memory(integrated, 4 * GIB, loaded=True) == 4 * GIB
    assert free_memory(integrated, 4 * GIB, loaded=False) == 2 * GIB
    assert free_memory(integrated, 40 * GIB, loaded=True) == 0
    assert free_memory(None, 1 * GIB, loaded=False) == 5 * GIB
    monkeypatch.setattr(cache_share, "available_memory", lambda: None)
    assert free_memory(None, 1 * GIB, loaded=False) is None
    assert (share_of(discrete), share_of(integrated), share_of(None)) == (0.8, 0.5, 0.5)


def test_the_memory_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    available = available_memory()
    assert available is not None
    assert 1 << 20 < available < 1 << 50
    for name, text in (
        ("memory.max", "1000000"),
        ("memory.current", "900000"),
        ("memory.stat", "inactive_file 50000\n"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cache_share, "_CGROUP", tmp_path)
    assert available_memory() == 150_000, "a container has less"
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() != 150_000


@pytest.mark.parametrize("name", ["numpy", pytest.param("device", marks=pytest.mark.full)])
def test_a_model_takes_its_share(
    name: str, tiny: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is said how much; the message says which."""
    device: Device | str = request.getfixturevalue(name) if name == "device" else name
    with load(tiny, device=device) as model:
        page = model.runner.page_bytes
    monkeypatch.setattr(runner, "free_memory", lambda *arguments, **more: 100 * page)
    with load(tiny, device=device) as model:
        assert model.engine.stats().max_pages == 50
        assert "6,400 tokens: 50% of free memory" in model.cache_limit
        model.engine.configure(EngineOptions(cache_tokens=60 * PAGE))
        assert model.engine.stats().max_pages == 60
        assert model.cache_limit.endswith(f"{60 * PAGE:,} tokens")
    monkeypatch.setattr(runner, "free_memory", lambda *arguments, **more: 0)
    with load(tiny, device=device) as model:
        assert model.engine.stats().max_pages == LEAST_PAGES
        assert len(model.generate("the", max_tokens=4).ids) == 4
    monkeypatch.setattr(runner, "free_memory", lambda *arguments, **more: None)
    with load(tiny, device=device) as model:
        assert "does not tell" in model.cache_limit


def fake(free_pages: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, FakeRunner]:
    made = FakeRunner(lambda ids: 3, 300, context=1 << 14)
    monkeypatch.setattr(runner, "free_memory", lambda *arguments, **more: free_pages * made.page_bytes)
    made.share_memory(None, 0)
    return model_of(made, tiny_tokenizer()), made


def run(model: LanguageModel, token: int) -> None:
    """A request as a server has them."""
    model.engine.submit(model.request([token] * (10 * PAGE), max_tokens=1)).result()


def test_one_conversation_after_the_other_stays_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the share: nobody else waits while the pool grows. Before, few more than one of them took were kept."""
    model, made = fake(2000, monkeypatch)
    for i in range(30):
        run(model, 10 + i)
    assert made.pool.pages >= 300 > KEPT_PAGES
    cached = model.engine.stats().prefix_hits
    run(model, 10)
    assert model.engine.stats().prefix_hits - cached >= 9 * PAGE
    model, made = fake(200, monkeypatch)
    for i in range(30):
        run(model, 10 + i)
    assert made.pool.pages <= 100, "half of what is free"


def test_the_old_pool_and_the_new_one_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = fake(300, monkeypatch)
    grown = list[tuple[int, int]]()
    grow = made._grow

    def note(pages: int) -> None:
        grown.append((made.pool.pages, pages))
        grow(pages)

    monkeypatch.setattr(made, "_grow", note)
    for i in range(60):
        run(model, 10 + i)
    assert grown
    assert all(old + new <= 300 for old, new in grown)


def test_info_says_it(tiny: Path) -> None:
    found = shaderlm("info", tiny, "--device", "cpu", "--context", 1000)
    assert "the cache of all conversations takes up to" in found.out, found
    assert "50% of what is free beside the model" in found.out
