"""When drafts pay: by times that a test makes up, so that nothing depends on how busy the machine is."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shaderlm.engine import Request
from shaderlm.engine.draft_rates import Acceptance, StepCosts, draft_counts, level_of
from shaderlm.engine.drafts import Drafts, NgramDrafter
from shaderlm.engine.ngram import LENGTH, NgramIndex

from .fake_runner import FakeRunner
from .test_engine_loop import VOCABULARY, made


def flat(count: int, longest: int) -> float:
    return 1.3


def test_drafts_are_chosen_where_they_give_more_tokens() -> None:
    right, wrong = [0.9**i for i in range(1, 8)], [0.1**i for i in range(1, 8)]
    assert draft_counts([right], 1, 64, flat, 1.0) == [7]
    assert draft_counts([wrong], 1, 64, flat, 1.0) == [0]
    assert draft_counts([right, wrong], 2, 64, flat, 1.0) == [7, 1], "a row that costs nothing more is tried"
    assert draft_counts([right], 1, 64, flat, None) == [0], "without drafts, the time is not known yet"
    assert draft_counts([right], 1, 3, flat, 1.0) == [3], "no more fit the step"
    assert draft_counts([right] * 16, 16, 240, lambda count, longest: count / 16, 1.0) == [0] * 16, "rows cost in full"
    by_model = draft_counts([right], 1, 64, lambda count, longest: 1.0 + 0.3 * longest, 1.0)
    assert 0 < by_model[0] < 7, "each token that is drafted takes time"


def test_what_drafts_already_goes_on_unless_it_is_slower() -> None:
    chances = [[0.62]]
    assert draft_counts(chances, 1, 8, lambda count, longest: 1.58, 1.0) == [0]
    assert draft_counts(chances, 1, 8, lambda count, longest: 1.58, 1.0, drafting=True) == [1]
    assert draft_counts(chances, 1, 8, lambda count, longest: 1.7, 1.0, drafting=True) == [0]


def test_times_of_steps_are_medians_of_late_ones() -> None:
    costs = StepCosts()
    assert costs.seconds(False, 1) is costs.expected(4) is None
    for seconds in (9.0, 1.0, 1.2, 50.0):
        costs.observe(False, 1, seconds)
    assert costs.seconds(False, 1) == 1.2, "the first one compiles kernels, and one may be interrupted"
    assert costs.expected(1) == pytest.approx(1.5), "one that waits is taken to cost more"
    assert costs.expected(4) == pytest.approx(1.5 * 1.25**2)
    for seconds in (9.0, 2.0):
        costs.observe(True, 3, seconds)
    assert costs.seconds(True, 4) == costs.expected(4) == 2.0
    for _ in range(600):
        costs.observe(False, 1, 1.0)
    assert costs.seconds(True, 4) is None, "what was measured long ago is measured again"


def test_acceptance_follows_what_happens() -> None:
    shared = Acceptance(weight=8.0)
    one, other = Acceptance(shared), Acceptance(shared)
    for _ in range(40):
        one.observe(2, False)
    assert one.chance(2) < 0.1
    assert other.chance(2) < 0.4, "others begin with what was seen"
    for _ in range(100):
        one.observe(2, True)
    assert one.chance(2) > 0.9
    assert [level_of(match) for match in (3, 6, 12, 24, 90)] == [0, 1, 2, 3, 3]


def test_an_index_finds_the_longest_of_the_last_matches() -> None:
    rng = random.Random(3)
    for _ in range(300):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(60))]
        index = NgramIndex()
        for end in range(len(tokens) + 1):
            index.extend(tokens, end)
        at, length = index.find(tokens, len(tokens))
        places = [i for i in range(LENGTH, len(tokens)) if tokens[i - LENGTH : i] == tokens[-LENGTH:]]
        assert (at == 0) == (not places)
        if at:
            assert at in places
            assert tokens[at - length : at] == tokens[-length:]
            last = places[-8:]
            assert all(tokens[max(0, i - length - 1) : i] != tokens[-length - 1 :] or length == 32 for i in last)


@pytest.mark.parametrize("repeats", [True, False])
def test_free_text_is_not_drafted_for(repeats: bool) -> None:
    """Steps of several rows take longer here: text that repeats drafts, other text never does."""
    model, runner = made()
    rng = random.Random(1)
    text = [rng.randrange(VOCABULARY) for _ in range(12 if repeats else 4000)]
    runner.token = lambda ids: text[len(ids) % len(text)]
    drafts = Drafts(NgramDrafter())
    model.engine.use_drafts(drafts)

    def observe(waits: bool, rows: int, seconds: float, once: Any = drafts._costs.observe) -> None:
        once(waits, rows, 1.0 if not waits else 1.1 + 0.1 * rows)

    drafts._costs.observe = observe  # type: ignore[method-assign]
    handle = model.engine.submit(Request(text[:1], max_tokens=300))
    assert [i for delta in handle for i in delta.ids] == [text[(1 + i) % len(text)] for i in range(300)]
    assert isinstance(runner, FakeRunner)
    assert (len(runner.steps) < 120) == repeats
    assert (handle.usage.drafted_tokens > 100) == repeats
    assert repeats or handle.usage.drafted_tokens == 0
    model.close()
