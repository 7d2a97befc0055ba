"""Requests whose tokens the host draws, or whose biases change with every token: alone, and beside all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.engine import Completion, LanguageModel
from shaderlm.engine.loading import load_with
from shaderlm.engine.sampler_order import chain_of
from shaderlm.engine.sampling import SamplingParams, settings_of
from shaderlm.engine.scheduler import Batch
from shaderlm.graph.batch import PAGE
from shaderlm.graph.sampler_chain import ChainRow, draw_token, next_mu
from shaderlm.runtime.runner import SequenceChunk, StepResult

from . import sampler_formulas as slow
from .host_sampling import log_probabilities, sample
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("tiny q8_0, batches")

PROMPT = [5, 9, 7, 5, 9, 7, 30, 5, 9]
DRY: dict[str, Any] = {"dry_multiplier": 3.0, "dry_allowed_length": 1, "dry_penalty_last_n": -1}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.3, "frequency_penalty": 0.2}
WARM: dict[str, Any] = {"temperature": 1.3, "seed": 11}
ROWS: list[dict[str, Any]] = [
    {**WARM, "xtc_probability": 0.7, "xtc_threshold": 0.01},
    {**WARM, "typical_p": 0.6, "logprobs": 2},
    {**WARM, "top_n_sigma": 1.5, **PENALTIES, "logit_bias": {7: 2.0, 9: -np.inf}},
    {**WARM, "dynatemp_range": 0.9, "top_k": 30},
    {**WARM, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5, **DRY, **PENALTIES},
    {**WARM, "samplers": ["min_p", "temperature", "penalties"], "min_p": 0.02, **PENALTIES},
    {**WARM, **DRY},
    {"temperature": 0.0, **DRY, "logprobs": 0},
]
OTHERS: list[dict[str, Any]] = [{}, WARM, {**WARM, **PENALTIES}, {"logprobs": 3}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sampled") / "tiny.gguf"
    return write_tiny_llama(path, kind="q8_0", layers=1, context=2 * PAGE)


@pytest.fixture(scope="module", params=["numpy", "device"])
def model(request: pytest.FixtureRequest, tiny: Path) -> Iterator[LanguageModel]:
    device = request.param if request.param == "numpy" else request.getfixturevalue("device")
    with load_with(tiny, device=device, cache="f32", precision="exact") as made:
        yield made


def together(model: LanguageModel, rows: Sequence[dict[str, Any]], tokens: int) -> list[Completion]:
    requests = [model.request(PROMPT, max_tokens=tokens, ignore_eos=True, **row) for row in rows]
    with model.runner.lock:  # no step before all are there
        handles = [model.engine.submit(each) for each in requests]
    found = [handle.result() for handle in handles]
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


def by_formulas(model: LanguageModel, options: dict[str, Any], count: int) -> list[int]:
    """The same from the logits of the model after each prefix, by DRY as it is written down."""
    params = SamplingParams(**options)
    settings, tokens = settings_of(params), list(PROMPT)
    chain, mu = chain_of(params, settings), 2 * params.mirostat_tau
    for _ in range(count):
        logits = model.logits(tokens)[-1]
        dry = {}
        if params.dry_multiplier:
            dry = slow.dry(
                tokens,
                model.tokenizer.piece,
                multiplier=params.dry_multiplier,
                base=params.dry_base,
                allowed=params.dry_allowed_length,
                last_n=params.dry_penalty_last_n,
                breakers=params.dry_sequence_breakers,
            )
        if chain is None:
            biased = SamplingParams(**options, logit_bias={token: -each for token, each in dry.items()})
            tokens.append(sample(logits, biased, tokens, settings, len(tokens) - 1))
            continue
        for token, bias in params.logit_bias.items():
            logits[token] += np.float32(bias)
        counts = np.bincount(tokens, minlength=len(logits)).astype(np.uint32)
        token, surprise = draw_token(logits, chain, ChainRow(len(tokens) - 1, counts, dry, mu))
        tokens.append(token)
        mu = next_mu(mu, surprise, chain) if params.mirostat else mu
    return tokens[len(PROMPT) :]


def test_alone_and_together(model: LanguageModel) -> None:
    """Each row has its samplers, whatever runs beside it; the others have the tokens that they have without."""
    expected = [by_formulas(model, row, 8) for row in ROWS]
    assert len({tuple(ids) for ids in expected}) == len(ROWS), "every sampler changes something"
    before = [each.ids for each in together(model, OTHERS, 8)]
    assert [model.generate(PROMPT, max_tokens=8, ignore_eos=True, **row).ids for row in ROWS] == expected
    found = together(model, [*OTHERS, *ROWS], 8)
    assert [each.ids for each in found] == [*before, *expected]
    assert [model.generate(PROMPT, max_tokens=8, ignore_eos=True, **row).ids for row in OTHERS] == before


def test_log_probabilities_are_those_before_all_of_it(model: LanguageModel) -> None:
    found = model.generate(PROMPT, max_tokens=4, ignore_eos=True, **ROWS[1])
    logits = model.logits([*PROMPT, *found.ids])[len(PROMPT) - 1 :]
    assert found.logprobs is not None
    for each, token, row in zip(found.logprobs, found.ids, logits, strict=False):
        chosen, best = log_probabilities(row, token, 2)
        assert each.id == token
        assert each.logprob == pytest.approx(chosen, abs=1e-4)
        assert [i for i, _ in each.top] == [i for i, _ in best]


def test_who_is_preempted_goes_on_as_before(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mirostat, DRY and penalties remember what was there, whoever loses its pages: one in every third step."""
    with load_with(tiny, device="numpy") as model:
        rows = [{**row, "cache_prompt": False} for row in ROWS]
        alone = [each.ids for each in together(model, rows, 12)]
        scheduler, calls = model.engine._scheduler, 0
        schedule = scheduler.schedule

        def preempting() -> Batch | None:
            nonlocal calls
            calls += 1
            if calls % 3 == 0 and scheduler.running:
                scheduler.preempt(scheduler.running[calls // 3 % len(scheduler.running)])
            return schedule()

        monkeypatch.setattr(scheduler, "schedule", preempting)
        assert [each.ids for each in together(model, rows, 12)] == alone
        assert model.engine.stats().preemptions > 2


@pytest.mark.parametrize("options", [ROWS[0], ROWS[4], ROWS[6]])
def test_with_grammars_and_a_least_length(tiny: Path, options: dict[str, Any]) -> None:
    with load_with(tiny, device="numpy") as model:
        text = model.generate("the", max_tokens=12, regex="[ab]{9}", **options)
        assert set(text) == {*"ab"}
        assert len(text) == 9
        assert text == model.generate("the", max_tokens=12, regex="[ab]{9}", **options)
        stops = dict.fromkeys(range(60), 50.0)
        some = model.generate(PROMPT, min_tokens=5, stop_token_ids=[*stops], logit_bias=stops, **options)
        assert len(some.ids) == 5


def test_deterministic_models_sample_too(tiny: Path) -> None:
    with load_with(tiny, device="numpy", deterministic=True) as model:
        alone = [model.generate(PROMPT, max_tokens=6, ignore_eos=True, **row).ids for row in ROWS]
        assert [each.ids for each in together(model, ROWS, 6)] == alone


def test_without_these_samplers_nothing_is_read_back(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No logits, and steps of the device's own tokens: as if there were no such samplers."""
    with load_with(tiny, device="numpy") as model:
        gave = list[str]()
        step = model.runner.step

        def noted(parts: Sequence[SequenceChunk]) -> StepResult:
            gave.extend(part.gives for part in parts)
            assert all(part.ids is None for part in parts) or len(parts[0].ids or ()) == len(PROMPT)
            return step(parts)

        monkeypatch.setattr(model.runner, "step", noted)
        for row in OTHERS:
            model.generate(PROMPT, max_tokens=3, ignore_eos=True, cache_prompt=False, **row)
        assert {*gave} == {"token"}
        gave.clear()
        model.generate(PROMPT, max_tokens=1, cache_prompt=False, **ROWS[0])
        assert gave == ["logits"]


def test_logits_come_back_of_the_rows_that_want_them(model: LanguageModel) -> None:
    """Those that the host samples come first in a step: the others stay where they are."""
    runner = model.runner
    sequences = [runner.add() for _ in range(3)]
    first, *others = sequences
    parts = [SequenceChunk(first, PROMPT, "logits"), *(SequenceChunk(each, PROMPT) for each in others)]
    logits = runner.step(parts).logits
    assert logits is not None
    assert np.allclose(logits[0], model.logits(PROMPT)[-1], atol=1e-4)
    if hasattr(runner, "device"):
        assert len(logits) == 1
    for each in sequences:
        runner.free(each)


def test_reading_a_prompt_alone_samples_nothing(tiny: Path) -> None:
    with load_with(tiny, device="numpy") as model:
        request = model.request(PROMPT, max_tokens=1, **ROWS[0])
        handle = model.engine.submit(replace(request, output="hidden"))
        assert handle.result() is None
        assert handle.hidden is not None
