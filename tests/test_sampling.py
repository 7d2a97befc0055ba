"""Sampling: the kernel draws what the formula keeps, the host agrees, and bad requests are refused in words."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shaderlm.compile import lower, run_op
from shaderlm.engine.sampling import Sampling, adjusted, choose, device_choice, log_probabilities, uniforms
from shaderlm.errors import InputError, RouteError
from shaderlm.gpu import WEBGPU_DEFAULT, Device
from shaderlm.graph import reference, resolve
from shaderlm.graph.ops import CHOICE
from shaderlm.kernels import choose as choose_route
from shaderlm.kernels.wgsl import read

F32 = NDArray[np.float32]
ALMOST_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def on_device(device: Device, logits: F32, sampling: Sampling, u: float) -> int:
    operands = {"logits": logits, "choice": device_choice(sampling, u)}
    raw = run_op(device, "sample", resolve("sample", {"width": logits.size}), operands, None)
    return int(raw["out"].view(np.uint32)[0])


# The kernel ----------------------------------------------------------------------------------------------

SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3, top_k=3),
    Sampling(temperature=0.8, top_k=40),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=3.0, top_p=0.35),
    Sampling(temperature=0.7, min_p=0.05),
    Sampling(temperature=1.5, top_k=50, top_p=0.95, min_p=0.02),
    Sampling(temperature=1e-8, top_k=1000, top_p=0.999999, min_p=1e-30),
    Sampling(temperature=1e6, top_p=0.5, min_p=1.0),
]


def _masked(rng: np.random.Generator, width: int) -> F32:
    logits = (rng.standard_normal(width) * 5).astype(np.float32)
    logits[rng.random(width) < 0.9] = -np.inf
    logits[rng.integers(width)] = 3
    return logits


LOGITS: dict[str, Callable[[np.random.Generator, int], F32]] = {
    "normal": lambda rng, width: (rng.standard_normal(width) * 3).astype(np.float32),
    "peaked": lambda rng, width: (rng.standard_normal(width) - 10 * np.log1p(np.arange(width))).astype(np.float32),
    "ties": lambda rng, width: np.round(rng.standard_normal(width) * 2).astype(np.float32),
    "zeros of both signs": lambda rng, width: rng.choice(f32(-0.0, 0.0, -1e-40, -3), width),
    "masked": _masked,
    "huge": lambda rng, width: rng.uniform(-1e4, 1e4, width).astype(np.float32),
    "negative": lambda rng, width: (rng.standard_normal(width) - 1e4).astype(np.float32),
    "equal": lambda rng, width: np.full(width, -1.5, np.float32),
}


def assert_drawn(index: int, logits: F32, sampling: Sampling, u: float, label: str) -> None:
    """The index is kept, and its interval of the running sum holds u: both but for the rounding of f32 sums."""
    assert 0 <= index < logits.size, label
    given = device_choice(sampling, u).view(CHOICE)[0]
    temperature, top_k, top_p, min_p = (given[n].item() for n in ("temperature", "top_k", "top_p", "min_p"))
    wrong = []
    for slack in (0.0, 1e-5, -1e-5):  # the sum of a whole tie may hang on the rounding of p
        p = top_p if top_p == 1 else min(max(top_p + slack, 0.0), 1.0)
        weights = reference.sample_weights(logits, temperature, top_k, p, min(min_p * (1 - slack), 1.0))
        before, total = weights[:index].sum(), weights.sum()
        after, due, near = before + weights[index], float(given["u"]) * total, 1e-5 * total
        if weights[index] > 0 and before - near <= due <= after + near:
            return
        wrong.append(f"weight {weights[index]:g}, {before / total:.7f} … {after / total:.7f} of the total")
    raise AssertionError(f"{label}: drew {index} for u={u!r}; " + "; ".join(wrong))


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("width", [1, 2, 63, 256, 257, 1000, 49152, 128256])
def test_the_kernel_draws_what_the_formula_keeps(width: int, kind: str, device: Device, plain_device: Device) -> None:
    rng = np.random.default_rng(width)
    logits = LOGITS[kind](rng, width)
    for sampling in SETTINGS if width < 2000 else SETTINGS[3::3]:
        somewhere = float(rng.random(dtype=np.float32))
        for on, u in ((plain_device, somewhere), (device, somewhere), (device, 0.0), (device, ALMOST_ONE)):
            assert_drawn(on_device(on, logits, sampling, u), logits, sampling, u, f"{kind} [{width}] {sampling}")


def test_the_widest_vocabulary(device: Device) -> None:
    logits = np.random.default_rng(1).standard_normal(262_144).astype(np.float32)
    for u, sampling in itertools.product((0.25, ALMOST_ONE), (SETTINGS[0], SETTINGS[6])):
        assert_drawn(on_device(device, logits, sampling, u), logits, sampling, u, str(sampling))


@pytest.mark.parametrize("width", [1, 2, 3, 5, 1023])
def test_what_lies_behind_the_logits_is_not_drawn(width: int, device: Device) -> None:
    """The kernel reads quads; buffers are padded to them with anything."""
    dims = resolve("sample", {"width": width})
    for sampling in (SETTINGS[0], SETTINGS[6]):
        operands = {"logits": np.zeros(width, np.float32), "choice": device_choice(sampling, ALMOST_ONE)}
        program = lower(choose_route("sample", dims, device.caps, None), dims, device.caps, operands)
        padded = np.concatenate([operands["logits"], np.full(7, 1e9, np.float32)])
        raw = device.run(replace(program, buffers={**program.buffers, "logits": padded}))
        assert raw["out"].view(np.uint32)[0] == width - 1


def test_a_width_beyond_exact_counts_is_refused() -> None:
    with pytest.raises(RouteError, match="width must be at most 16,777,216, width is 16,777,217"):
        choose_route("sample", resolve("sample", {"width": (1 << 24) + 1}), WEBGPU_DEFAULT, None)


@pytest.mark.parametrize("sampling", [SETTINGS[0], SETTINGS[1], SETTINGS[6], SETTINGS[8]], ids=str)
def test_nan_and_infinities(sampling: Sampling, device: Device) -> None:
    nan, inf = np.nan, np.inf
    negative_nan = np.array([0xFFC00000], np.uint32).view(np.float32)[0]
    cases = [
        (f32(nan), {0}),
        (np.full(700, nan, np.float32), {0}),
        (np.full(700, -inf, np.float32), {0}),
        (f32(-inf, nan, 1.0, negative_nan, -inf), {2}),
        (f32(nan, -3e38, negative_nan), {1}),
        (f32(3e38, inf, -inf, -3e38), {1}),
        (f32(5, inf, nan, inf), {1, 3}),
    ]
    for (logits, possible), u in itertools.product(cases, (0.0, 0.4, ALMOST_ONE)):
        assert on_device(device, logits, sampling, u) in possible, f"{logits[:5]} u={u}"
        assert choose(logits, sampling, [], u) in possible, f"{logits[:5]} u={u}, on the host"


def test_top_k_of_one_is_argmax(device: Device) -> None:
    rng = np.random.default_rng(5)
    for width in (1, 2, 300, 5000):
        logits = rng.permutation(width).astype(np.float32) - width / 3
        for u in (0.0, 0.5, ALMOST_ONE):
            sampling = Sampling(temperature=2.0, top_k=1)
            assert on_device(device, logits, sampling, u) == np.argmax(logits)
            assert choose(logits, sampling, [], u) == np.argmax(logits)


def test_the_sum_must_exceed_its_target(device: Device) -> None:
    sampling = Sampling(temperature=1.0)
    for width in (4, 16, 1024):
        equal = np.full(width, 2.5, np.float32)
        for index in {0, 1, width // 4, width // 2, width - 1}:
            assert on_device(device, equal, sampling, index / width) == index
            assert choose(equal, sampling, [], index / width) == index


def test_frequencies(device: Device) -> None:
    logits = np.log(f32(0.05, 0.4, 0.02, 0.25, 0.2, 0.08))
    sampling = Sampling(temperature=1.0, top_k=5, min_p=0.15)  # without the third and the first
    expected = np.array([0, 0.4, 0, 0.25, 0.2, 0.08]) / 0.93
    draws = list(itertools.islice(uniforms(7), 500))
    for tokens in (
        [on_device(device, logits, sampling, u) for u in draws],
        [choose(logits, sampling, [], u) for u in draws],
    ):
        counts = np.bincount(tokens, minlength=6)
        deviation = np.sqrt(expected * (1 - expected) * len(draws))
        assert (np.abs(counts - expected * len(draws)) <= 4 * deviation).all(), counts


def test_the_words_of_choice_are_the_kernel_s() -> None:
    (struct,) = re.findall(r"struct Choice \{(.*?)\}", read("pointwise/sample"), re.S)
    fields = re.findall(r"(\w+): ([fu])32,", struct)
    assert fields == [(name, CHOICE[name].kind) for name in CHOICE.names or () if name != "spare"]
    words = device_choice(Sampling(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125), 0.75)
    assert words.dtype == np.uint32
    assert words.shape == (8,)
    assert words[1] == 7
    assert words.view(np.float32)[[0, 2, 3, 4]].tolist() == [0.5, 0.25, 0.125, 0.75]


# The host ------------------------------------------------------------------------------------------------

LOG = np.log(f32(0.1, 0.3, 0.2, 0.1, 0.3))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1, 4]),  # equals stay together
        ({"top_k": 3}, [1, 2, 4]),
        ({"top_k": 4}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.0}, [1, 4]),
        ({"top_p": 0.5}, [1, 4]),
        ({"top_p": 0.61}, [1, 2, 4]),
        ({"top_p": 0.81}, [0, 1, 2, 3, 4]),
        ({"top_k": 3, "top_p": 0.74}, [1, 4]),  # 0.6 of the 0.8 that top_k left
        ({"top_k": 3, "top_p": 0.76}, [1, 2, 4]),
        ({"min_p": 0.66}, [1, 2, 4]),
        ({"min_p": 0.67}, [1, 4]),
        ({"min_p": 1.0}, [1, 4]),
        ({"temperature": 0.5, "min_p": 0.4}, [1, 2, 4]),  # (2/3)² = 0.44
        ({"temperature": 0.5, "min_p": 0.45}, [1, 4]),
    ],
)
def test_what_the_filters_keep(settings: dict[str, Any], kept: list[int], device: Device) -> None:
    sampling = Sampling(**{"temperature": 1.0, **settings})
    draws = [i / 32 for i in range(32)]
    assert sorted({choose(LOG, sampling, [], u) for u in draws}) == kept
    assert sorted({on_device(device, LOG, sampling, u) for u in draws}) == kept


def test_greedy_takes_the_lowest_of_the_largest() -> None:
    assert Sampling().greedy
    assert not Sampling(temperature=1e-9).greedy
    assert choose(f32(np.nan, 1, 3, 3, -np.inf), Sampling(top_k=5, top_p=0.1), [], 0.9) == 2
    assert choose(f32(0, 5, 4), Sampling(logit_bias={1: -2}), [], 0.0) == 2


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
            found = adjusted(logits, Sampling(**settings), tokens)
            assert found.dtype == np.float32
            assert found.tolist() == expected, settings
    assert logits.tolist() == [2, -2, 1, 0, 5], "the caller's logits changed"
    assert adjusted(f32(1, -np.inf), Sampling(repetition_penalty=2.0), [1]).tolist() == [1, -np.inf]


def test_a_banned_token_is_never_drawn() -> None:
    sampling = Sampling(temperature=1.0, logit_bias={1: -math.inf})
    assert {choose(f32(0, 50, 0), sampling, [], i / 32) for i in range(32)} == {0, 2}


def test_seeds() -> None:
    first, again, other, negative = (list(itertools.islice(uniforms(seed), 1000)) for seed in (3, 3, 4, -3))
    assert first == again != other
    assert negative != first
    assert first[:3] == [0.04529315233230591, 0.1274588704109192, 0.2098749279975891], (
        "a seed must give the same text in every release"
    )
    assert next(uniforms(None)) != next(uniforms(None))
    assert all(0 < u < 1 and float(np.float32(u)) == u for u in first)
    assert abs(np.mean(first) - 0.5) < 0.04


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
    with pytest.raises(InputError, match=r"token must lie in 0 … 4, got 5"):
        log_probabilities(LOG, 5, 0)


def test_what_may_stay_on_the_device() -> None:
    assert Sampling().on_device
    assert Sampling(temperature=1.0, top_k=4, top_p=0.5, min_p=0.1, seed=3).on_device
    penalties: list[dict[str, Any]] = [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
    ]
    assert all(Sampling(**penalty).penalizes for penalty in penalties)
    for settings in (*penalties, {"logit_bias": {1: 0.0}}, {"logprobs": 0}):
        assert not Sampling(**settings).on_device, settings


def test_settings_are_plain_and_frozen() -> None:
    biases = {np.int64(3): np.float32(2)}
    sampling = Sampling(temperature=np.float32(0.5), top_k=np.int32(4), seed=np.uint64(9), logit_bias=biases)  # type: ignore[arg-type]
    assert [type(v) for v in (sampling.temperature, sampling.top_k, sampling.seed)] == [float, int, int]
    biases.clear()
    assert sampling.logit_bias == {3: 2.0}
    assert hash(sampling) == hash(Sampling(temperature=0.5, top_k=4, seed=9))


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
        Sampling(**{name: value})
    assert words in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("logits", "sampling", "history", "words"),
    [
        (f32(1, 2), Sampling(logit_bias={2: 1.0}), [], "logit_bias has token 2; the vocabulary has the tokens 0 … 1"),
        (
            f32(1, 2),
            Sampling(presence_penalty=1.0),
            [0, -1],
            "the history has token -1; the vocabulary has the tokens 0 … 1",
        ),
        (np.zeros(2), Sampling(), [], "logits must be a float32 array [vocabulary], got float64 [2]"),
        (np.zeros((1, 2), np.float32), Sampling(), [], "got float32 [1, 2]"),
        (np.zeros(0, np.float32), Sampling(), [], "got float32 [0]"),
        ([1.0, 2.0], Sampling(), [], "got list"),
    ],
)
def test_what_cannot_be_chosen_from(logits: Any, sampling: Sampling, history: list[int], words: str) -> None:
    for function in (lambda: choose(logits, sampling, history, 0.5), lambda: adjusted(logits, sampling, history)):
        with pytest.raises(InputError) as caught:
            function()
        assert words in str(caught.value)
