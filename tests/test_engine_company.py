"""An answer in company is the answer alone: greedy ids but for ties; every bit, where it is to be deterministic."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shaderlm
from shaderlm.engine import EngineOptions, Handle, LanguageModel
from shaderlm.engine.loading import load_with
from shaderlm.graph.batch import PAGE
from shaderlm.runtime.gpu_runner import GpuRunner

from .compare import TOLERANCES
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("tiny q8_0, batches")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("company") / "tiny.gguf"
    return write_tiny_llama(path, kind="q8_0", layers=1, context=3 * PAGE)


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> Iterator[LanguageModel]:
    with shaderlm.load(tiny, device="cpu") as model:
        yield model


def on(name: str, request: pytest.FixtureRequest) -> Any:
    return "cpu" if name == "cpu" else request.getfixturevalue(name)


def prompts_of(model: LanguageModel, count: int, seed: int = 1) -> list[list[int]]:
    """Of mixed lengths; a third begin with the same page and a half. Those that soon need a page more go first."""
    rng = random.Random(seed)
    shared = [rng.randrange(model.config.vocabulary) for _ in range(PAGE + 60)]
    prompts = [
        shared * (i % 3 == 0) + [rng.randrange(model.config.vocabulary) for _ in range(rng.choice((2, 100, 104, 108)))]
        for i in range(count)
    ]
    return sorted(prompts, key=lambda prompt: not 100 <= len(prompt) < PAGE)


def assert_greedy(oracle: LanguageModel, prompt: list[int], ids: list[int], label: str) -> int:
    """Every token has the largest logit, or one that is as large within the tolerance of models. How many had not."""
    logits = oracle.logits([*prompt, *ids[:-1]])[len(prompt) - 1 :]
    best, taken = logits.max(axis=1), logits[np.arange(len(ids)), ids]
    absolute, relative = TOLERANCES["model"]
    close = best - taken <= 2 * np.maximum(absolute, relative * np.abs(best))  # both logits may be off
    assert close.all(), f"{label}: token {int((~close).argmax())} is not the one alone: {taken} of {best}"
    return int((taken < best).sum())


def threads() -> int:
    """Without those that record command buffers: they end with the model."""
    return sum(thread.name != "record-ahead" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("where", "clients", "tokens", "parallel"),
    [
        ("cpu", 20, 48, 16),
        ("device", 12, 36, 8),  # a software adapter compiles kernels for each power of two of rows
        pytest.param("device", 1000, 64, 24, marks=pytest.mark.long),
    ],
)
def test_clients_together(
    where: str,
    clients: int,
    tokens: int,
    parallel: int,
    tiny: Path,
    oracle: LanguageModel,
    request: pytest.FixtureRequest,
) -> None:
    """A tenth of them leave midway. The pool holds a quarter of what they want."""
    with load_with(tiny, device=on(where, request), cache="f32") as model:
        prompts = prompts_of(model, clients)
        model.runner.max_tokens = PAGE  # on a GPU too: who is preempted depends on what is read together
        pages = sum(-(-(len(prompt) + tokens) // PAGE) for prompt in prompts)
        model.engine.configure(EngineOptions(parallel=parallel, cache_tokens=min(pages // 4, 24) * PAGE))
        before = threads()
        requests = [model.request(prompt, max_tokens=tokens, ignore_eos=True) for prompt in prompts]
        with model.runner.lock:  # no step before all are there
            handles = [model.engine.submit(each) for each in requests]
        for i, handle in enumerate(handles):
            if i % 10 == 5:
                next(handle)
                handle.cancel()
        differing = 0
        for i, handle in enumerate(handles):
            found = handle.result()
            assert found is not None
            assert found.finish_reason == ("closed" if i % 10 == 5 else "length")
            differing += assert_greedy(oracle, prompts[i], found.ids, f"client {i}")
        assert differing <= clients * tokens // 100
        stats = model.engine.stats()
        assert stats.preemptions > 0
        assert stats.prefix_hits > 0
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert stats.generation_tokens > 2 * stats.steps, "steps are shared"
        assert model.runner.pool.sequences == 0
        while threads() > before:
            threading.Event().wait(0.001)


def bits(handle: Handle) -> list[tuple[int, float]]:
    found = handle.result()
    assert found is not None
    assert found.logprobs is not None
    return [(each.id, each.logprob) for each in found.logprobs]


# Kernels of a GPU take a software adapter half a minute to compile.
@pytest.mark.parametrize("where", ["cpu", "device", pytest.param("gpu", marks=pytest.mark.long)])
def test_deterministic_answers_do_not_depend_on_company(where: str, tiny: Path, request: pytest.FixtureRequest) -> None:
    """Alone without any cache; together with a cached prefix, in a pool that is too small for all of them."""
    options: Any = {"max_tokens": 13, "ignore_eos": True, "logprobs": 0}
    with load_with(tiny, device=on(where, request), deterministic=True) as model:
        model.runner.max_tokens = PAGE  # so is a chunk
        model.engine.configure(EngineOptions(parallel=4, cache_tokens=6 * PAGE))
        rng = random.Random(2)
        ids = [rng.randrange(model.config.vocabulary) for _ in range(4 * PAGE)]
        # Two that soon need a second page, and two that begin with the same page.
        prompts = [ids[: PAGE - 9], ids[PAGE : 2 * PAGE - 8], ids[2 * PAGE : 3 * PAGE + 3], ids[2 * PAGE : 3 * PAGE]]
        prompts[3] += ids[:11]
        alone = [bits(model.engine.submit(model.request(each, cache_prompt=False, **options))) for each in prompts]
        assert model.engine.stats().preemptions == 0
        handles = [model.engine.submit(model.request(prompt, **options)) for prompt in prompts]
        assert [bits(handle) for handle in handles] == alone
        assert handles[3].usage.cached_tokens == PAGE
        assert model.engine.stats().preemptions > 0


@pytest.mark.parametrize("where", ["device", pytest.param("gpu", marks=pytest.mark.long)])
def test_decode_rows_have_one_plan(where: str, tiny: Path, request: pytest.FixtureRequest) -> None:
    """However many there are: the same shaders with the same grids."""
    with load_with(tiny, device=on(where, request), deterministic=True) as model:
        runner = model.runner
        assert isinstance(runner, GpuRunner)
        plans = {(runner.step_rows(rows, True), runner.step_context(rows, True)) for rows in (1, 2, 5, 64)}
        assert len(plans) == 1
        assert runner.step_rows(5, False) == 8
