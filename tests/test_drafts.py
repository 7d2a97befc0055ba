"""Drafts change no token: what a request gives is what it gives without them, whatever else it asks for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shaderlm
from shaderlm.engine import EngineOptions, LanguageModel, Request
from shaderlm.engine.draft_model import ModelDrafter, check_same_vocabulary
from shaderlm.engine.draft_settings import check_can_draft
from shaderlm.engine.drafts import Drafts, NgramDrafter
from shaderlm.engine.scheduler import SequenceState
from shaderlm.errors import InputError
from shaderlm.graph.batch import PAGE
from shaderlm.text import Vocabulary

from .sweeps import with_all
from .test_engine_loop import TOKEN, VOCABULARY, expected, held, left_nothing, made
from .tiny_models import tiny_metadata, write_tiny_llama


class Guessing:
    """Drafts that are right so often: `right` says what comes after the tokens of a request; -1: nothing is known."""

    def __init__(self, right: Callable[[Request, Sequence[int]], int], chance: float, seed: int) -> None:
        self._right, self._chance, self._rng = right, chance, random.Random(seed)
        self.drafted = self.accepted = 0
        self.states = set[SequenceState]()

    def chances(self, state: SequenceState, most: int) -> Sequence[float]:
        return [1.0] * self._rng.randrange(most + 1)

    def draft(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        drafts = []
        for state, count in wanted:
            self.states.add(state)
            assert not state.in_flight
            tokens, drafted = list(state.tokens), list[int]()
            while len(drafted) < count:
                token = self._right(state.owner.request, tokens + drafted)
                if token < 0 or self._rng.random() > self._chance:
                    token = self._rng.randrange(VOCABULARY)
                drafted.append(token)
            drafts.append(drafted)
        return drafts

    def verified(self, state: SequenceState, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted

    def seconds(self, tokens: int) -> float:
        return 0.0

    def forget(self, state: SequenceState) -> None:
        self.states.discard(state)

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass


def drafts_of(drafter: Any, most: int = 6) -> Drafts:
    return Drafts(drafter, most, measured=False)


@pytest.mark.smoke
@pytest.mark.parametrize(("ahead", "deterministic"), [(1, False), (2, False), (2, True)])
def test_drafts_in_a_small_pool(ahead: int, deterministic: bool) -> None:
    """Shared beginnings, preemptions, some cancelled. Tokens are right only if every page has what it should."""
    model, runner = made(ahead=ahead)
    runner.deterministic, runner.max_pages, runner.max_outputs = deterministic, 12, 32
    model.engine.configure(EngineOptions())
    drafter = Guessing(lambda request, tokens: TOKEN(tokens), 0.8, ahead)
    model.engine.use_drafts(drafts_of(drafter))
    go_on, rng = held(runner), random.Random(ahead)
    shared = [rng.randrange(VOCABULARY) for _ in range(2 * PAGE)]
    prompts = [
        shared[: rng.choice((0, PAGE, 200, 256))] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 90))]
        for _ in range(20)
    ]
    # More tokens than a page has: in whatever order they run, some find no free page for the rest.
    handles = [model.engine.submit(Request(each, max_tokens=rng.randrange(PAGE + 2, 200))) for each in prompts]
    cancelled = rng.sample(handles, 3)
    go_on.set()
    for handle in cancelled:
        next(handle)
        handle.cancel()
    for handle, prompt in zip(handles, prompts, strict=True):
        ids = [i for delta in handle for i in delta.ids]
        if handle not in cancelled:
            assert ids == expected(prompt, handle.request.max_tokens)
    stats = model.engine.stats()
    assert stats.preemptions > 0
    assert stats.drafted_tokens > stats.accepted_tokens > stats.drafts > 0
    assert (stats.drafted_tokens, stats.accepted_tokens) == (drafter.drafted, drafter.accepted)
    assert not drafter.states
    again = model.generate(prompts[0], max_tokens=20, ignore_eos=True)
    assert again.ids == expected(prompts[0], 20), "what is cached is right"
    model.close()
    left_nothing(runner)


def test_steps_are_fewer_where_drafts_are_right() -> None:
    model, runner = made()
    model.engine.use_drafts(drafts_of(Guessing(lambda request, tokens: TOKEN(tokens), 1.0, 1)))
    assert model.generate([3, 4], max_tokens=60, ignore_eos=True).ids == expected([3, 4], 60)
    assert len(runner.steps) < 40
    model.close()


def test_ngrams_find_what_repeats() -> None:
    """The output repeats its prompt, and then itself."""
    text = [5, 9, 2, 7, 7, 1, 4, 8] * 3
    model, runner = made()
    runner.token = lambda ids: text[len(ids) % len(text)]
    model.engine.use_drafts(drafts_of(NgramDrafter()))
    handle = model.engine.submit(Request(text, max_tokens=100))
    assert [i for delta in handle for i in delta.ids] == [text[(len(text) + i) % len(text)] for i in range(100)]
    assert len(runner.steps) < 30
    usage = handle.usage
    assert usage.accepted_tokens == usage.drafted_tokens > 70
    model.close()


def test_a_model_drafts_if_it_is_asked_to(tiny: Path) -> None:
    ids = [5, 9, 2, 7, 7, 1, 4, 8] * 4
    with shaderlm.load(tiny, device="numpy") as model:
        wanted = model.generate(ids, max_tokens=60, ignore_eos=True)
    with shaderlm.load(tiny, device="numpy", draft="ngram", draft_tokens=7) as model:
        assert model.generate(ids, max_tokens=60, ignore_eos=True).ids == wanted.ids
        model.engine.use_drafts(drafts_of(NgramDrafter()))
        assert model.generate(ids, max_tokens=60, ignore_eos=True).ids == wanted.ids
        assert model.engine.stats().accepted_tokens > 10, "greedy texts of tiny models repeat"
    for options, words in (({"draft": "model"}, "'ngram'"), ({"draft": "ngram", "draft_tokens": 0}, "1 … 64")):
        with pytest.raises(InputError, match=words):
            shaderlm.load(tiny, **options)


def test_models_whose_cache_cannot_be_cut_do_not_draft_for_others() -> None:
    config: Any = SimpleNamespace(recurrent=True, architecture="lfm2")
    with pytest.raises(InputError, match="lfm2 cannot"):
        check_can_draft(config)


@pytest.mark.parametrize("least", [0, -1, 1], ids=["at the stop", "before it", "after it"])
def test_min_tokens_hold_in_rows_of_drafts(tiny: Path, least: int) -> None:
    """A stop id is left out in just the rows that come before the least number of tokens."""
    ids = [5, 9, 2]
    with shaderlm.load(tiny, device="numpy") as model:
        free = model.generate(ids, max_tokens=40, ignore_eos=True).ids
        at = next(i for i in range(12, 40) if free[i] not in free[:i] and i % 7 == 4)  # among a step's rows
        options: Any = {"max_tokens": 40, "stop_token_ids": [free[at]], "min_tokens": at + least}
        wanted = model.generate(ids, ignore_eos=True, **options).ids
        assert (wanted == free[:at]) == (least <= 0)
        known = [*wanted, free[at], *[-1] * 8]
        right = Guessing(lambda request, tokens: known[len(tokens) - len(ids)], 1.0, 1)
        right.chances = lambda state, most: [1.0] * most  # type: ignore[method-assign]
        model.engine.use_drafts(drafts_of(right))
        assert model.generate(ids, ignore_eos=True, **options).ids == wanted
        assert model.engine.stats().accepted_tokens > at // 2


# A draft model ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same vocabulary, and a shorter context."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("small") / "small.gguf", kind="q8_0", layers=1, context=PAGE, seed=5
    )


def drafting(path: Path, small: Path, device: Any = "numpy", **options: Any) -> tuple[LanguageModel, ModelDrafter]:
    """A model and one that drafts for it whenever it can."""
    model = shaderlm.load(path, draft_model=small, device=device, **options)
    assert model.engine._drafts is not None
    drafter = model.engine._drafts.drafter
    assert isinstance(drafter, ModelDrafter)
    model.engine.use_drafts(drafts_of(drafter))
    return model, drafter


def sequences_of(drafter: ModelDrafter) -> int:
    return drafter._runner.pool.sequences


def test_a_model_that_drafts_for_itself_is_always_right(tiny: Path) -> None:
    """Its cache is in step after drafts that were verified in part, as the end of a text has it, and drawn alike."""
    with shaderlm.load(tiny, device="numpy") as model:
        options: Any = {"max_tokens": 50, "temperature": 1.2, "seed": 4, "ignore_eos": True}
        wanted = [model.generate([i, i + 1], **options).ids for i in range(5)]
    model, drafter = drafting(tiny, tiny)
    with model:
        found = model.generate([[i, i + 1] for i in range(5)], **options)
        assert [each.ids for each in found] == wanted
        stats = model.engine.stats()
        assert stats.accepted_tokens == stats.drafted_tokens > 150
        assert not sequences_of(drafter)


@pytest.mark.parametrize("where", ["numpy", pytest.param("device", marks=pytest.mark.full)])
def test_a_model_that_drafts_otherwise_changes_nothing(
    where: str, tiny: Path, other: Path, request: pytest.FixtureRequest
) -> None:
    """Random requests, rejected drafts, a pool in which sequences are preempted, and texts longer than it can read."""
    device: Any = where if where == "numpy" else request.getfixturevalue(where)
    rng, options = random.Random(7), EngineOptions(parallel=8, cache_tokens=6 * PAGE)
    with shaderlm.load(tiny, device=device, deterministic=True) as model:
        model.engine.configure(options)
        prompts = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in (2, 9, PAGE - 20, PAGE + 30)]
        requests = [random_request(model, rng, prompts) for _ in range(12 if where == "numpy" else 5)]
        wanted = results(model, requests, {})
    model, drafter = drafting(tiny, other, device, deterministic=True)
    with model:
        model.engine.configure(options)
        assert results(model, requests, {}) == wanted
        stats = model.engine.stats()
        assert stats.drafted_tokens > stats.accepted_tokens
        assert not sequences_of(drafter)


def test_without_memory_for_its_cache_nothing_is_drafted(tiny: Path) -> None:
    model, drafter = drafting(tiny, tiny)
    with model:
        wanted = model.generate([3, 4, 5], max_tokens=20, ignore_eos=True)
        before = model.engine.stats().drafted_tokens
        drafter._runner.pool.max_pages = drafter._runner.pool.pages
        taken = drafter._runner.add()
        drafter._runner._reserve([(taken, drafter._runner.pool.free * PAGE)])
        assert model.generate([3, 4, 5], max_tokens=20, ignore_eos=True).ids == wanted.ids
        assert model.engine.stats().drafted_tokens == before > 0


def test_memory_counts_the_model_that_drafts(tiny: Path) -> None:
    both, _ = drafting(tiny, tiny)
    small = both.draft_model
    with both:
        assert small is not None
        both.generate("the an", max_tokens=2)
        weights, pages = both.report.weight_bytes, both.runner.cache_bytes + small.runner.cache_bytes
        assert both.nbytes == 2 * weights + pages
        assert pages >= both.runner.page_bytes


def test_a_draft_model_has_the_same_vocabulary(tiny: Path) -> None:
    vocabulary = Vocabulary.from_metadata(tiny_metadata())
    tokens = [*vocabulary.tokens]
    tokens[7], tokens[8] = tokens[8], tokens[7]
    for other, words in ((tokens, "its token 7 is"), ([*tokens, "more"], f"has {len(tokens) + 1:,} tokens")):
        with pytest.raises(InputError, match=words):
            check_same_vocabulary(vocabulary, replace(vocabulary, tokens=other))
    with pytest.raises(InputError, match="exclude each other"):
        shaderlm.load(tiny, draft="ngram", draft_model=tiny)


# Random combinations ---------------------------------------------------------------------------------------

FORMS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"regex": "[ab ]*c[a-z]{3,9}"},
    {"choice": ["abcabcabc", "abd", "hello"]},
    {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 2}},
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("drafts") / "tiny.gguf", kind="q8_0", layers=1, context=2 * PAGE)


def random_request(model: LanguageModel, rng: random.Random, prompts: Sequence[list[int]]) -> Request:
    """Any of the options that say how tokens are drawn and when a text ends."""
    options: dict[str, Any] = {"max_tokens": rng.randrange(1, 24), "ignore_eos": rng.random() < 0.8}
    if rng.random() < 0.6:
        options |= {"temperature": rng.choice((0.3, 0.8, 1.5)), "seed": rng.randrange(1 << 32)}
        options |= rng.choice(({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}))
    if rng.random() < 0.4:
        options |= rng.choice(({"repetition_penalty": 1.3}, {"frequency_penalty": 0.5, "presence_penalty": 0.2}))
    if rng.random() < 0.2:
        options |= {"dry_multiplier": 0.8, "dry_allowed_length": 1}
    if rng.random() < 0.1:
        options |= {"typical_p": 0.9}  # the host draws
    if rng.random() < 0.3:
        options |= {"logprobs": rng.randrange(4)}
    if rng.random() < 0.2:
        options |= {"logit_bias": {rng.randrange(VOCABULARY): rng.choice((4.0, -4.0, float("-inf")))}}
    if rng.random() < 0.3:
        options |= {"stop": [rng.choice("abcdefghij")]}
    if rng.random() < 0.2:
        options |= {"stop_token_ids": [rng.randrange(VOCABULARY)], "min_tokens": rng.randrange(4)}
    options |= {"cache_prompt": rng.random() < 0.8, "priority": rng.randrange(2)}
    return model.request(rng.choice(prompts), **options, **rng.choice(FORMS))


def results(model: LanguageModel, requests: Sequence[Request], cancels: dict[int, int]) -> list[Any]:
    """All that comes of requests that run together; of those that are cancelled, the first tokens."""
    handles = model.engine.submit_all(requests)
    found = list[Any]()
    for i, handle in enumerate(handles):
        ids = list[int]()
        for delta in handle:
            ids += delta.ids
            if len(ids) >= cancels.get(i, 1 << 30):
                handle.cancel()
        done = handle.completion
        if i in cancels or done is None:
            found.append(ids)
        else:
            found.append((ids, str(done), done.finish_reason, handle.stop_match, done.logprobs, handle.stop_logprob))
    return found


def compare(model: LanguageModel, count: int, seed: int) -> Guessing:
    """Random requests give the same with drafts and without; who is cancelled may have got more or less."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 7, 60, PAGE - 3)))] for _ in range(6)]
    prompts += [prompts[3] + prompt for prompt in prompts[:2]]
    requests = [random_request(model, rng, prompts) for _ in range(count)]
    cancels = {i: rng.randrange(1, 9) for i in range(count) if rng.random() < 0.1}
    without = results(model, requests, cancels)
    ids = {
        id(request): each if i in cancels else each[0]
        for i, (request, each) in enumerate(zip(requests, without, strict=True))
    }

    def right(request: Request, tokens: Sequence[int]) -> int:
        at = len(tokens) - len(request.prompt_ids)
        return ids[id(request)][at] if at < len(ids[id(request)]) else -1

    drafter = Guessing(right, 0.8, seed)
    model.engine.use_drafts(drafts_of(drafter))
    for i, (found, wanted) in enumerate(zip(results(model, requests, cancels), without, strict=True)):
        if i in cancels:
            common = min(len(found), len(wanted))
            assert found[:common] == wanted[:common], requests[i]
        else:
            assert found == wanted, requests[i]
    model.engine.use_drafts(drafts_of(NgramDrafter(), 15))
    some = [i for i in range(min(count, 8)) if i not in cancels]
    assert results(model, [requests[i] for i in some], {}) == [without[i] for i in some]
    assert not drafter.states
    return drafter


@pytest.fixture
def model(tiny: Path) -> Iterator[LanguageModel]:
    with shaderlm.load(tiny, device="numpy", deterministic=True) as found:
        yield found


@pytest.mark.parametrize("count", [24, pytest.param(250, marks=pytest.mark.full), with_all(1000)])
def test_random_requests_give_what_they_give_without_drafts(model: LanguageModel, count: int) -> None:
    model.engine.configure(EngineOptions(parallel=9, cache_tokens=5 * PAGE))
    drafter = compare(model, count, count)
    assert drafter.drafted > drafter.accepted > count
    assert model.engine.stats().preemptions > 0
