"""Log probabilities of a prompt's tokens: of the steps that run them, beside other requests, and in Python."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shaderlm
from shaderlm.engine import EngineOptions, LanguageModel, PromptLogprobs, Request
from shaderlm.engine.loading import load_with
from shaderlm.errors import ContextSizeError, InputError
from shaderlm.gpu import Device
from shaderlm.graph.batch import PAGE
from shaderlm.runtime.row_scores import RowScores
from shaderlm.runtime.runner import Runner, SequenceChunk

from .tiny_models import write_tiny_llama

IDS = [(7 * i + i // 5) % 256 for i in range(3 * PAGE)]
F64 = NDArray[np.float64]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("scores") / "tiny.gguf", context=8 * PAGE)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[LanguageModel]:
    with shaderlm.load(path, device="cpu") as made:
        yield made


@pytest.fixture(scope="module")
def expected(path: Path) -> F64:
    """ln p of every token and place, the slow and obvious way: [tokens, vocabulary]."""
    with shaderlm.load(path, device="numpy") as oracle:
        logits = oracle.logits(IDS).astype(np.float64)
    return np.asarray(logits - np.log(np.exp(logits).sum(1, keepdims=True)))


def obvious(table: F64, ids: list[int]) -> F64:
    return np.array([table[i - 1, ids[i]] for i in range(1, len(ids))])


def check(found: PromptLogprobs, table: F64, ids: list[int], tolerance: float = 2e-5) -> None:
    assert (len(found), found[0], found.ids) == (len(ids), None, ids)
    np.testing.assert_allclose(found.values, obvious(table, ids), atol=tolerance)
    assert found.total == pytest.approx(obvious(table, ids).sum(), abs=tolerance * len(ids))


# Steps ---------------------------------------------------------------------------------------------------


def check_steps(runner: Runner, table: F64) -> None:
    """Parts with and without scores in one step, more rows than a head gives, and rows in the middle of a chunk."""
    first, second, other = runner.add(), runner.add(), runner.add()
    runner.step([SequenceChunk(other, [1, 2, 3], "token")]).wait()
    whole, some = RowScores(0, IDS[1:100], 3), RowScores(7, IDS[8:12], 0)
    parts = [
        SequenceChunk(other, None),
        SequenceChunk(first, IDS[:100], "nothing", scores=whole),
        SequenceChunk(second, IDS[:20], "logits", scores=some),
    ]
    result = runner.step(parts)
    reports = result.scores
    assert reports is not None
    assert reports.shape == (99 + 4, 21, 2)
    assert reports[:, 0, 0].tolist() == IDS[1:100] + IDS[8:12]
    values = reports[:, :, 1].view(np.float32)
    rows = [*range(99), *range(7, 11)]
    np.testing.assert_allclose(values[:, 0], [table[row, IDS[row + 1]] for row in rows], atol=1e-3)
    best = np.argsort(-table[:99], axis=1)[:, :3]
    np.testing.assert_allclose(values[:99, 1:4], np.take_along_axis(table[:99], best, 1), atol=1e-3)
    assert result.logits is not None
    assert result.logits[1].argmax() == table[19].argmax()
    assert result.tokens is not None
    token = int(result.tokens.wait()[other.slot])
    alone = runner.add()
    again = runner.step([SequenceChunk(alone, [1, 2, 3], "token")])
    assert again.tokens is not None
    again.tokens.wait()
    after = runner.step([SequenceChunk(alone, None)])
    assert after.tokens is not None
    assert int(after.tokens.wait()[alone.slot]) == token
    only = runner.step([SequenceChunk(first, IDS[100:103], "nothing", scores=RowScores(0, IDS[101:104]))])
    only.wait()
    assert only.scores is not None
    np.testing.assert_allclose(only.scores[:, 0, 1].view(np.float32), obvious(table, IDS)[100:103], atol=1e-3)
    for each in (first, second, other, alone):
        runner.free(each)


@pytest.mark.parametrize("device_name", ["numpy", "cpu"])
def test_scores_of_steps(path: Path, expected: F64, device_name: str) -> None:
    with shaderlm.load(path, device=device_name) as model:
        check_steps(model.runner, expected)


def test_scores_of_steps_on_a_device(path: Path, expected: F64, device: Device) -> None:
    with load_with(path, device=device, cache="f32") as model:
        check_steps(model.runner, expected)
        check(model.score(IDS), expected, IDS, 1e-3)


def test_only_reports_leave_the_device(path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    read, submit = list[int](), device.submit

    def watched(programs: Any, region: Any = None) -> Any:
        if region is not None:
            read.append(region[1])
        return submit(programs, region)

    with load_with(path, device=device) as model:
        monkeypatch.setitem(vars(device), "submit", watched)
        model.score(IDS[:200])
    assert sum(read) < 200 * 8 * 21 + 4096 * 4, "rows of logits would be 200 × 267 × 4 bytes and more"


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (RowScores(0, [1, 2, 3, 4]), "4 tokens were to follow"),
        (RowScores(-1, [1]), "from -1 to 3"),
        (RowScores(0, [1, 267]), r"0 … 266, got 267"),
        (RowScores(0, [1], 21), r"0 … 20, got 21"),
    ],
)
def test_scores_that_a_step_refuses(model: LanguageModel, scores: RowScores, message: str) -> None:
    sequence = model.runner.add()
    with pytest.raises(InputError, match=message):
        model.runner.step([SequenceChunk(sequence, [1, 2, 3], scores=scores)])
    model.runner.free(sequence)


# In Python -----------------------------------------------------------------------------------------------


def test_score(model: LanguageModel, expected: F64) -> None:
    found = model.score(IDS, logprobs=3)
    check(found, expected, IDS)
    best = expected.argmax(1)
    for i in (1, 100, len(IDS) - 1):
        entry = found[i]
        assert entry is not None
        assert entry.id == IDS[i]
        assert [token for token, _ in entry.top] == np.argsort(-expected[i - 1])[:3].tolist()
        assert entry.top[0][0] == best[i - 1]
        assert entry.top[0][1] == pytest.approx(expected[i - 1].max(), abs=2e-5)
    assert found[-1] == found[len(IDS) - 1]
    assert found[:2] == [None, found[1]]
    assert list(found) == [found[i] for i in range(len(IDS))]
    assert found.perplexity == pytest.approx(math.exp(-found.total / (len(IDS) - 1)))
    assert repr(found).startswith(f"<PromptLogprobs of {len(IDS)} tokens, total -")
    with pytest.raises(IndexError):
        found[len(IDS)]


def test_several_texts(model: LanguageModel, expected: F64) -> None:
    texts: list[list[int]] = [IDS[:50], IDS[:1], IDS[:200]]
    found = model.score(texts)
    for ids, each in zip(texts, found, strict=True):
        check(each, expected, ids)
    assert (found[1].total, math.isnan(found[1].perplexity)) == (0, True)
    text = model.score("the an in", logprobs=0)
    assert text.ids == model.tokenize("the an in")
    assert all(each is None or each.top == [] for each in text)


@pytest.mark.parametrize("wrong", [None, -1, 21, 1.5])
def test_wrong_numbers_of_alternatives(model: LanguageModel, wrong: Any) -> None:
    with pytest.raises(InputError, match="logprobs must be"):
        model.score("the", logprobs=wrong)
    request = replace(model.score_request("the"), prompt_logprobs=21)
    with pytest.raises(InputError, match=r"prompt_logprobs must be None or a whole number in 0 … 20, got 21"):
        model.engine.submit(request)


def test_texts_that_cannot_be_scored(model: LanguageModel) -> None:
    with pytest.raises(InputError, match="empty"):
        model.score([])
    with pytest.raises(ContextSizeError):
        model.score([1] * (8 * PAGE + 1))
    with pytest.raises(InputError, match="text 1: a token id must lie in"):
        model.score([[1, 2], [1, 9999]])


# With other requests -------------------------------------------------------------------------------------


def test_a_prompt_is_scored_by_chunks_beside_others(model: LanguageModel, expected: F64) -> None:
    """Few steps, each with a row of the generation beside it; neither changes the other."""
    alone = model.generate("the an", max_tokens=40, ignore_eos=True)
    before = model.engine.stats().steps
    model.score(IDS)
    assert model.engine.stats().steps - before <= 2, "a step has 512 rows"
    handle = model.engine.submit(model.request("the an", max_tokens=40, ignore_eos=True))
    found = [model.score(IDS[:length]) for length in (300, 5, 150)]
    assert handle.result() == alone
    for each in found:
        check(each, expected, each.ids)


def test_the_prefix_cache_is_neither_read_nor_filled(path: Path, expected: F64) -> None:
    with shaderlm.load(path, device="cpu") as model:
        model.generate(IDS[:-1], max_tokens=1)
        cached = model.engine.stats().pages_cached
        assert cached >= 2
        handle = model.engine.submit(model.score_request(IDS))
        handle.result()
        assert handle.usage.cached_tokens == 0
        assert handle.prompt_logprobs is not None
        check(handle.prompt_logprobs, expected, IDS)
        assert model.engine.stats().pages_cached == cached
        again = model.engine.submit(model.request(IDS, max_tokens=1))
        again.result()
        assert again.usage.cached_tokens > 2 * PAGE, "others still find what was there"


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prompt_that_makes_way_for_others(path: Path, expected: F64, deterministic: bool) -> None:
    """The pool has no room for both: the younger one waits, and is computed again. Its scores stay."""
    with load_with(path, device="cpu", deterministic=deterministic) as model:
        model.engine.configure(EngineOptions(cache_tokens=4 * PAGE))
        first = model.request(IDS[:100], max_tokens=PAGE + 15, ignore_eos=True)
        second = model.scored(model.request(IDS[:120], max_tokens=PAGE + 15, ignore_eos=True, logprobs=0))
        older, younger = model.engine.submit_all([first, second])  # in one step
        completion = younger.result()
        older.result()
        assert model.engine.stats().preemptions > 0
        assert younger.prompt_logprobs is not None
        check(younger.prompt_logprobs, expected, IDS[:120])
        assert completion is not None
        assert len(completion.ids) == PAGE + 15


def test_scores_and_a_generation_in_one_request(model: LanguageModel, expected: F64) -> None:
    plain = model.generate(IDS[:40], max_tokens=5, ignore_eos=True, logprobs=1)
    handle = model.engine.submit(model.scored(model.request(IDS[:40], max_tokens=5, ignore_eos=True, logprobs=1)))
    found = handle.result()
    assert found == plain
    assert found is not None
    assert found.logprobs == plain.logprobs
    assert handle.prompt_logprobs is not None
    check(handle.prompt_logprobs, expected, IDS[:40])


def test_scores_are_there_when_all_of_them_are(model: LanguageModel) -> None:
    handle = model.engine.submit_lazy(model.score_request(IDS))
    assert handle.prompt_logprobs is None
    handle.cancel()
    assert handle.prompt_logprobs is None
    assert handle.finish_reason == "closed"


# Rows of logits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("first", [0, 100, PAGE, 299])
def test_logits_from_a_row_on(path: Path, expected: F64, first: int, deterministic: bool) -> None:
    """They come in parts of as many rows as a step gives, or are kept; rows before are run without a head."""
    with load_with(path, device="cpu", deterministic=deterministic) as model:
        parts = list[tuple[int, Any]]()
        options: dict[str, Any] = {"output": "logits", "first_row": first, "keep_cache": False}
        model.engine.submit(
            Request(IDS[:300], take_logits=lambda at, rows: parts.append((at, rows.copy())), **options)
        ).result()
        assert [at for at, _ in parts] == (first + np.cumsum([0, *(len(rows) for _, rows in parts[:-1])])).tolist()
        assert max(len(rows) for _, rows in parts) <= model.runner.max_outputs
        rows = np.concatenate([rows for _, rows in parts]).astype(np.float64)
        assert rows.shape == (300 - first, 267)
        np.testing.assert_allclose(rows - np.log(np.exp(rows).sum(1, keepdims=True)), expected[first:300], atol=1e-4)
        handle = model.engine.submit(Request(IDS[:300], **options))
        handle.result()
        assert handle.logits is not None
        np.testing.assert_array_equal(handle.logits, np.concatenate([rows for _, rows in parts]))
