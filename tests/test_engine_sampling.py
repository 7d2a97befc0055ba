"""Sampling parameters and their checks, and sampling on the host, which others are compared with."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shaderlm.engine.sampling import SamplingParams, settings_of
from shaderlm.errors import InputError

from .host_sampling import adjust, log_probabilities, sample

F32 = NDArray[np.float32]


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def sampled(logits: F32, params: SamplingParams, history: list[int] | None = None, position: int = 0) -> int:
    return sample(logits, params, history or [], settings_of(params), position)


LOG = np.log(f32(0.1, 0.3, 0.2, 0.1, 0.3))


def test_greedy_takes_the_lowest_of_the_largest() -> None:
    assert settings_of(SamplingParams()).greedy
    assert not settings_of(SamplingParams(temperature=1e-9)).greedy
    assert sampled(f32(np.nan, 1, 3, 3, -np.inf), SamplingParams(top_k=5, top_p=0.1)) == 2
    assert sampled(f32(0, 5, 4), SamplingParams(logit_bias={1: -2})) == 2
    assert sampled(f32(0, 5, 4), SamplingParams(presence_penalty=2), [1]) == 2


def test_penalties() -> None:
    logits = f32(2, -2, 1, 0, 5)
    history = [0, 1, 1, 0, 0, 3]
    cases: list[tuple[dict[str, Any], list[float]]] = [
        ({"repetition_penalty": 2.0}, [1, -4, 1, 0, 5]),
        ({"presence_penalty": 0.5}, [1.5, -2.5, 1, -0.5, 5]),
        ({"frequency_penalty": 0.25}, [1.25, -2.5, 1, -0.25, 5]),
        ({"frequency_penalty": -1}, [5, 0, 1, 1, 5]),
        (
            {
                "repetition_penalty": 4.0,
                "presence_penalty": 1.0,
                "frequency_penalty": 0.5,
                "logit_bias": {0: 8, 4: -100},
            },
            [0.5 - 1 - 1.5 + 8, -8 - 1 - 1, 1, -1 - 0.5, -95],
        ),
        ({"logit_bias": {4: -math.inf, 2: 1.5}}, [2, -2, 2.5, 0, -math.inf]),
    ]
    for settings, expected in cases:
        for tokens in (history, Counter(history)):
            found = adjust(logits, SamplingParams(**settings), tokens)
            assert found.dtype == np.float32
            assert found.tolist() == expected, settings
    assert logits.tolist() == [2, -2, 1, 0, 5], "the caller's logits changed"
    assert adjust(f32(1, -np.inf), SamplingParams(repetition_penalty=2.0), [1]).tolist() == [1, -np.inf]


def test_a_banned_token_is_never_drawn() -> None:
    params = SamplingParams(temperature=1.0, logit_bias={1: -math.inf}, seed=3)
    assert {sampled(f32(0, 50, 0), params, position=i) for i in range(64)} == {0, 2}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 3, "top_p": 0.76}, [1, 2, 4]),
        ({"temperature": 0.5, "min_p": 0.45}, [1, 4]),
    ],
)
def test_the_host_samples_by_all_settings(settings: dict[str, Any], kept: list[int]) -> None:
    params = SamplingParams(**{"temperature": 1.0, "seed": 1, **settings})
    assert sorted({sampled(LOG, params, position=i) for i in range(200)}) == kept


def test_seeds() -> None:
    """The seed and the position decide, and nothing else; without a seed, every generation has another one."""
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in (3, 3, 4, -3, 2**64 - 3)]
    first, again, other, negative, same = ([sampled(LOG, each, position=i) for i in range(50)] for each in params)
    assert first == again
    assert first != other != negative
    assert negative == same, "seeds are taken modulo 2^64"
    assert first[:6] == [3, 2, 2, 4, 4, 4], "a seed must give the same text in every release"
    assert settings_of(SamplingParams()).seed != settings_of(SamplingParams()).seed


def test_log_probabilities() -> None:
    chosen, best = log_probabilities(LOG + np.float32(100), 2, 3)
    assert chosen == pytest.approx(math.log(0.2), abs=1e-5)
    assert [token for token, _ in best] == [1, 4, 2]
    assert [value for _, value in best] == pytest.approx(np.log([0.3, 0.3, 0.2]).tolist(), abs=1e-5)
    assert log_probabilities(LOG, 0, 0)[1] == []
    assert len(log_probabilities(LOG, 0, 20)[1]) == 5
    chosen, best = log_probabilities(f32(np.nan, 1e4, -1e4, -np.inf), 3, 2)
    assert chosen == -math.inf
    assert best == [(1, 0.0), (2, -2e4)]


def test_what_the_device_is_told() -> None:
    assert not settings_of(SamplingParams()).adjusted
    assert not settings_of(SamplingParams(temperature=1.0, top_k=4, top_p=0.5, min_p=0.1, seed=3)).adjusted
    penalties: list[dict[str, Any]] = [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
    ]
    assert all(settings_of(SamplingParams(**penalty)).penalizes for penalty in penalties)
    others: list[dict[str, Any]] = [{"logit_bias": {1: 0.0}}, {"logprobs": 0}]
    assert not any(settings_of(SamplingParams(**other)).penalizes for other in others)
    assert all(settings_of(SamplingParams(**each)).adjusted for each in (*penalties, *others))
    all_of_it: dict[str, Any] = {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 3, "logprobs": 2}
    all_of_it |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    found = settings_of(SamplingParams(**all_of_it, logit_bias={7: 1.0, 2: -math.inf}))._asdict()
    assert found == {**all_of_it, "bias": ((2, -math.inf), (7, 1.0)), "mask": None, "recent": ()}


def test_settings_are_plain_and_frozen() -> None:
    biases = {np.int64(3): np.float32(2)}
    sampling = SamplingParams(temperature=np.float32(0.5), top_k=np.int32(4), seed=np.uint64(9), logit_bias=biases)  # type: ignore[arg-type]
    assert [type(v) for v in (sampling.temperature, sampling.top_k, sampling.seed)] == [float, int, int]
    biases.clear()
    assert sampling.logit_bias == {3: 2.0}
    assert hash(sampling) == hash(SamplingParams(temperature=0.5, top_k=4, seed=9))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", -0.1, "temperature must be 0 (greedy) or a positive number, at most 1e6, got -0.1"),
        ("temperature", math.nan, "got nan"),
        ("temperature", math.inf, "got inf"),
        ("temperature", "hot", "got 'hot'"),
        ("temperature", True, "got True"),
        ("temperature", None, "got None"),
        ("top_k", -1, "top_k must be a whole number of at least 0 (0: off), got -1"),
        ("top_k", 4.0, "got 4.0"),
        ("top_k", True, "got True"),
        ("top_k", 1 << 32, "got 4294967296"),
        ("top_p", 1.1, "top_p must be a number in 0 … 1 (1: off), got 1.1"),
        ("top_p", -0.1, "got -0.1"),
        ("top_p", math.nan, "got nan"),
        ("min_p", 1.1, "min_p must be a number in 0 … 1 (0: off), got 1.1"),
        ("min_p", "0", "got '0'"),
        ("repetition_penalty", 0, "repetition_penalty must be a number in 0.001 … 1000 (1: off), got 0"),
        ("presence_penalty", math.inf, "presence_penalty must be a number in −100 … 100 (0: off), got inf"),
        ("frequency_penalty", -101, "frequency_penalty must be a number in −100 … 100 (0: off), got -101"),
        ("logit_bias", [1, 2], "logit_bias must be a mapping from token ids to numbers, got list"),
        ("logit_bias", {"1": 2}, "a token id of logit_bias must be a whole number of at least 0, got '1'"),
        ("logit_bias", {-1: 2}, "a token id of logit_bias must be a whole number of at least 0, got -1"),
        ("logit_bias", {1: 101}, "logit_bias[1] must be a number in −100 … 100, or −inf, got 101"),
        ("logit_bias", {1: math.inf}, "got inf"),
        ("logit_bias", {1: math.nan}, "got nan"),
        ("logit_bias", {1: None}, "got None"),
        ("seed", 1.5, "seed must be None or a whole number in −2^63 … 2^64 − 1, got 1.5"),
        ("seed", 1 << 64, "got 18446744073709551616"),
        ("seed", True, "got True"),
        ("logprobs", 21, "logprobs must be None or a whole number in 0 … 20, got 21"),
        ("logprobs", -1, "got -1"),
        ("logprobs", True, "got True"),
    ],
)
def test_what_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{name: value})
    assert words in str(caught.value)
    assert name in str(caught.value)
