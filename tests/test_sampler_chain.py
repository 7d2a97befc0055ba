"""Samplers that the host runs, against formulas that are slow and obvious; their order; and what a request comes to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shaderlm.engine.sampler_order import chain_of, dry_of, order_of
from shaderlm.engine.sampling import SamplingParams, settings_of
from shaderlm.errors import InputError
from shaderlm.graph.sampler_chain import SAMPLERS, ChainRow, ChainSettings, candidates, draw_token, next_mu
from shaderlm.graph.sampling import draw, uniform

from . import sampler_formulas as slow
from .sampler_formulas import Candidates

F32 = NDArray[np.float32]
HISTORY = [1, 1, 2, 7, 30]
DRY = {3: 2.5, 9: 0.25, 60: 1.0}


def logits_of(seed: int, width: int = 64, scale: float = 2.0) -> F32:
    """Logits that differ, a few of them excluded."""
    x = np.random.default_rng(seed).normal(0, scale, width).astype(np.float32)
    x[[5, 40]] = -np.inf, np.nan
    return x


def all_candidates(logits: F32) -> Candidates:
    return [(i, float(x)) for i, x in enumerate(logits) if x > -np.inf]


def row(width: int = 64, **more: Any) -> ChainRow:
    counts = np.bincount(HISTORY, minlength=width).astype(np.uint32)
    return ChainRow(counts=counts, dry=DRY, **more)


def assert_same(logits: F32, how: ChainSettings, expected: Candidates, at: ChainRow | None = None) -> None:
    found = candidates(logits, how, at or row())
    assert found.ids.tolist() == sorted(token for token, _ in expected)
    assert found.logits.tolist() == pytest.approx([logit for _, logit in sorted(expected)], rel=1e-6, abs=1e-6)


CASES: list[tuple[str, dict[str, Any], Callable[[Candidates], Candidates]]] = [
    (
        "penalties",
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        lambda found: slow.penalties(found, HISTORY, 1.5, 0.5, 0.25),
    ),
    ("dry", {}, lambda found: [(token, logit - DRY.get(token, 0)) for token, logit in found]),
    *(("top_k", {"top_k": k}, lambda found, k=k: slow.top_k(found, k)) for k in (1, 10, 62, 100)),
    *(("top_p", {"top_p": p}, lambda found, p=p: slow.top_p(found, p)) for p in (0.0, 0.3, 0.9)),
    *(("min_p", {"min_p": p}, lambda found, p=p: slow.min_p(found, p)) for p in (0.05, 0.5, 1.0)),
    *(("typ_p", {"typical_p": p}, lambda found, p=p: slow.typical_p(found, p)) for p in (0.0, 0.2, 0.7, 0.99)),
    *(("top_n_sigma", {"top_n_sigma": n}, lambda found, n=n: slow.top_n_sigma(found, n)) for n in (0.1, 1.0, 2.5)),
    *(
        ("xtc", {"xtc_probability": 1.0, "xtc_threshold": t}, lambda found, t=t: slow.xtc(found, t))
        for t in (0.0, 0.02, 0.1, 0.5)
    ),
    *(("temperature", {"temperature": t}, lambda found, t=t: slow.temperature(found, t)) for t in (0.0, 0.5, 3.0)),
    *(
        (
            "temperature",
            {"temperature": t, "dynatemp_range": reach, "dynatemp_exponent": power},
            lambda found, t=t, reach=reach, power=power: slow.dynamic_temperature(found, t, reach, power),
        )
        for t, reach, power in ((1.0, 0.5, 1.0), (0.8, 2.0, 0.5), (0.0, 1.0, 2.0))
    ),
]


@pytest.mark.parametrize(("name", "settings", "formula"), CASES, ids=[f"{case[0]} {case[1]}" for case in CASES])
def test_each_sampler_is_its_formula(
    name: str, settings: dict[str, Any], formula: Callable[[Candidates], Candidates]
) -> None:
    for seed in range(8):
        logits = logits_of(seed, scale=1 + seed)
        assert_same(logits, ChainSettings((name,), **settings), formula(all_candidates(logits)))


@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0, 1e3, 1e30])
def test_a_whole_vocabulary(scale: float) -> None:
    """Filters that look for a threshold, where most logits are equal, close to each other, or far below the largest."""
    logits = np.random.default_rng(2).normal(0, 1, 5000).astype(np.float32) * np.float32(scale)
    found = all_candidates(logits)
    for p in (0.001, 0.5, 0.999):
        if scale:
            top = candidates(logits, ChainSettings(("top_p",), top_p=p), row(5000)).ids
            assert top.tolist() == sorted(token for token, _ in slow.top_p(found, p))
        if 0 < scale < 100:  # no logarithm of 0
            typical = candidates(logits, ChainSettings(("typ_p",), typical_p=p), row(5000)).ids
            assert typical.tolist() == sorted(token for token, _ in slow.typical_p(found, p))
    if not scale:
        assert len(candidates(logits, ChainSettings(("top_p",), top_p=0.5), row(5000)).ids) == 5000


def test_mirostat_is_its_formula() -> None:
    """Which tokens are left, how much the drawn one surprises among them, and what follows from that."""
    for seed in range(8):
        logits = logits_of(seed)
        for mu in (-1.0, 0.5, 2.0, 4.0, 10.0):
            how = ChainSettings((), mirostat_tau=3.0, mirostat_eta=0.2, seed=seed)
            expected = slow.mirostat(all_candidates(logits), mu)
            assert_same(logits, how, expected, row(mu=mu))
            token, surprise = draw_token(logits, how, row(mu=mu))
            probs = dict(zip((token for token, _ in expected), slow.softmax(expected), strict=True))
            assert surprise == pytest.approx(-math.log2(probs[token]))
            assert next_mu(mu, surprise, how) == pytest.approx(mu - 0.2 * (surprise - 3.0))


def test_the_order_decides() -> None:
    logits = logits_of(3, scale=1.0)
    how: dict[str, Any] = {"temperature": 2.0, "min_p": 0.02, "top_k": 20, "typical_p": 0.6}
    found = all_candidates(logits)
    hot = slow.min_p(slow.temperature(found, 2.0), 0.02)
    cold = slow.temperature(slow.min_p(found, 0.02), 2.0)
    assert len(hot) > len(cold) > 1
    assert_same(logits, ChainSettings(("temperature", "min_p"), **how), hot)
    assert_same(logits, ChainSettings(("min_p", "temperature"), **how), cold)
    mixed = slow.typical_p(slow.top_k(found, 20), 0.6)
    assert_same(logits, ChainSettings(("top_k", "typ_p"), **how), mixed)
    assert mixed != slow.top_k(slow.typical_p(found, 0.6), 20)


def test_xtc_acts_by_chance() -> None:
    """As often as its probability says, by seed and position, and not by the number that draws the token."""
    how = ChainSettings(("xtc",), xtc_probability=0.3, xtc_threshold=0.02, seed=9)
    logits = logits_of(1)
    acts = [len(candidates(logits, how, row(position=i)).ids) < 62 for i in range(2000)]
    assert 0.27 < np.mean(acts) < 0.33
    assert acts == [len(candidates(logits, how, row(position=i)).ids) < 62 for i in range(2000)]
    numbers = [uniform(9, i) for i in range(2000)]
    assert abs(np.corrcoef(numbers, acts)[0, 1]) < 0.08


def test_equals_stay_together() -> None:
    logits = np.array([3, 1, 3, 0, 1], np.float32)
    assert candidates(logits, ChainSettings(("top_k",), top_k=1), row(5)).ids.tolist() == [0, 2]
    assert candidates(logits, ChainSettings(("top_p",), top_p=0.1), row(5)).ids.tolist() == [0, 2]
    assert candidates(logits, ChainSettings(("typ_p",), typical_p=0.1), row(5)).ids.tolist() == [0, 2]
    xtc = ChainSettings(("xtc",), xtc_probability=1.0, xtc_threshold=0.05)
    assert candidates(logits, xtc, row(5)).ids.tolist() == [1, 3, 4]


def test_logits_of_any_kind() -> None:
    settings = ChainSettings(tuple(SAMPLERS), 1, 0.7, 0.3, 1.0, 3, 0.9, 0.1, 0.5, 1.0, 1.0, 0.1, 1.2, 0.1, 0.1)
    for values in ([np.nan] * 4, [-np.inf] * 4, [np.inf, 1, 2, 3], [-np.inf, 5, np.nan, -np.inf], [0, 0, 0, 0]):
        logits = np.array(values, np.float32)
        for how in (settings, settings._replace(mirostat_tau=1.0), settings._replace(temperature=0.0, order=("xtc",))):
            with np.errstate(all="raise", under="ignore"):
                token, surprise = draw_token(logits, how, row(4, mu=0.0)._replace(dry={0: 3e38, 3: 1.0}))
            assert 0 <= token < 4
            assert surprise >= 0
            assert token == 1 or values[1] != 5


def test_a_chain_draws_what_the_device_draws() -> None:
    """The same number, in the same order of tokens."""
    order = ("temperature", "top_k", "top_p", "min_p")
    for seed in range(200):
        logits = logits_of(seed)
        how = ChainSettings(order, seed, 0.9, top_k=30, top_p=0.9, min_p=0.02)
        assert draw_token(logits, how, row(position=seed))[0] == draw(logits, 0.9, 30, 0.9, 0.02, uniform(seed, seed))


# What a request comes to ---------------------------------------------------------------------------------


def chain(**options: Any) -> tuple[str, ...] | None:
    """Names of the samplers that the host runs; None: the device samples."""
    params = SamplingParams(**options)
    found = chain_of(params, settings_of(params))
    return None if found is None else found.order


LLAMA: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
ORDER = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]


def test_the_device_samples_where_it_can() -> None:
    """Without one of these samplers nothing is another; what an order leaves out is off."""
    assert [*SAMPLERS] == ORDER
    off: dict[str, Any] = {
        "xtc_probability": 0.5,
        "xtc_threshold": 0.6,
        "top_n_sigma": -1,
        "mirostat": 0,
        "typical_p": 1,
    }
    for options in ({}, LLAMA, {**LLAMA, **off}, {**LLAMA, "dry_multiplier": 1.0, "repetition_penalty": 1.1}):
        assert chain(**options) is None, options
    assert settings_of(SamplingParams(seed=1, **LLAMA)) == settings_of(SamplingParams(seed=1, **LLAMA, **off))
    for samplers in ([], ["temperature"], ["top_k", "temperature"], ["penalties", "temperature", "top_p", "min_p"]):
        assert chain(**LLAMA, samplers=samplers) is None, samplers
    assert chain(**{**LLAMA, "temperature": 0.0}, samplers=ORDER) is None, "greedy, whatever the filters leave"
    assert chain(**{**LLAMA, "top_p": 1.0, "min_p": 0.0}, samplers=ORDER) is None
    left = settings_of(SamplingParams(seed=1, **LLAMA, repetition_penalty=2.0, samplers=["top_k"]))
    assert left == settings_of(SamplingParams(seed=1, temperature=1.0, top_k=40))


def test_the_host_draws_where_the_device_cannot() -> None:
    assert chain(**LLAMA, xtc_probability=0.1) == ("top_k", "top_p", "min_p", "xtc", "temperature")
    assert chain(typical_p=0.5) == ("typ_p", "temperature")
    assert chain(temperature=1, top_n_sigma=1.5, dry_multiplier=1) == ("dry", "top_n_sigma")
    assert chain(temperature=1, dynatemp_range=0.5, presence_penalty=1) == ("penalties", "temperature")
    assert chain(**LLAMA, samplers=ORDER) == ("top_k", "top_p", "min_p", "temperature"), "temperature comes last"
    assert chain(**LLAMA, samplers=["min_p", "top_p"]) == ("min_p", "top_p")
    assert chain(**LLAMA, dry_multiplier=1, repetition_penalty=2, samplers=["dry", "penalties"]) == ("dry", "penalties")
    assert chain(**LLAMA, mirostat=2, typical_p=0.1, presence_penalty=1) == ("penalties", "temperature")


def test_orders_that_are_told() -> None:
    assert [*order_of(SamplingParams())] == ["penalties", "dry", "temperature", "top_k", "top_p", "min_p"]
    assert [*order_of(SamplingParams(xtc_probability=0.1))] == ORDER
    assert [*order_of(SamplingParams(mirostat=2, samplers=["xtc"]))] == ["penalties", "dry", "temperature"]
    for samplers in ("min_p;typ_p", "my", ["min_p", "typical_p"], ("min_p", "typ_p")):
        assert SamplingParams(samplers=samplers).samplers == ("min_p", "typ_p"), samplers
    assert SamplingParams(samplers="edskypmxt").samplers == tuple(ORDER)


def test_dry_of_a_request() -> None:
    assert dry_of(SamplingParams(dry_multiplier=0.5)) == (0.5, 1.75, 2, 64, ("\n", ":", '"', "*"))
    offs: list[dict[str, Any]] = [{"dry_penalty_last_n": 0}, {"samplers": ["top_k"]}]
    for off in ({}, *({"dry_multiplier": 1, **each} for each in offs)):
        assert dry_of(SamplingParams(**off)) is None, off


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dry_multiplier": -1}, "dry_multiplier must be a number in 0 … 1000 (0: off), got -1"),
        ({"dry_base": 0.5}, "dry_base must be a number in 1 … 1000, got 0.5"),
        ({"dry_allowed_length": 1.5}, "dry_allowed_length must be a whole number of at least 0, got 1.5"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n must be a whole number of at least −1"),
        ({"dry_penalty_last_n": 1 << 40}, "dry_penalty_last_n must be a whole number of at least −1"),
        ({"dry_sequence_breakers": "\n"}, "dry_sequence_breakers must be a list of at most 64 strings"),
        ({"dry_sequence_breakers": ["x" * 257]}, "dry_sequence_breakers must be a list of at most 64 strings"),
        ({"dry_sequence_breakers": ["\ud800"]}, "of 1 … 256 characters, got ['\\ud800']"),
        ({"dry_sequence_breakers": [""]}, "of 1 … 256 characters, got ['']"),
        ({"dry_sequence_breakers": ["x"] * 65}, "dry_sequence_breakers must be a list of at most 64 strings"),
        ({"xtc_probability": 1.5}, "xtc_probability must be a number in 0 … 1 (0: off), got 1.5"),
        ({"xtc_threshold": math.nan}, "xtc_threshold must be a number in 0 … 1 (above 0.5: off), got nan"),
        ({"typical_p": True}, "typical_p must be a number in 0 … 1 (1: off), got True"),
        ({"top_n_sigma": math.inf}, "top_n_sigma must be a number in −1000 … 1000"),
        ({"dynatemp_range": -0.1}, "dynatemp_range must be a number in 0 … 1000 (0: off), got -0.1"),
        ({"dynatemp_exponent": "x"}, "dynatemp_exponent must be a number in 0 … 100, got 'x'"),
        ({"mirostat": 1}, "mirostat must be 0 (off) or 2 (Mirostat 2.0), got 1"),
        ({"mirostat": 3}, "mirostat must be 0 (off) or 2 (Mirostat 2.0), got 3"),
        ({"mirostat_tau": -1}, "mirostat_tau must be a number in 0 … 100, got -1"),
        ({"samplers": ["top_k", "tfs"]}, "samplers must be None or a list of penalties, dry, top_n_sigma"),
        ({"samplers": ["top_k", "top_k"]}, "each at most once; got ['top_k', 'top_k']"),
        ({"samplers": 7}, "samplers must be None or a list of"),
        ({"samplers": [["x"]]}, "samplers must be None or a list of"),
        ({"samplers": "x" * 10**6}, "each at most once; got 'xxx"),
    ],
)
def test_wrong_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**options)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 250
    assert "\n" not in str(caught.value)
