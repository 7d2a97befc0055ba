"""DRY against a formula that compares every earlier place with the end, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shaderlm.engine.dry import Dry, DrySettings, repeats

from .sampler_formulas import dry

PIECES = [b"a", b"b", b"\n", b"ab", b"c:", b"xy", b"y", b"x", b"\xc3", b"\xa9"]
BREAKERS: list[tuple[str, ...]] = [(), ("\n", ":"), ("xyx", "ba"), ("abab", "\n"), ("é",)]


def piece(token: int) -> bytes:
    return PIECES[token]


def expected(tokens: Sequence[int], settings: DrySettings) -> dict[int, float]:
    multiplier, base, allowed, last_n, breakers = settings
    return dry(tokens, piece, multiplier=multiplier, base=base, allowed=allowed, last_n=last_n, breakers=breakers)


def test_penalties_of_any_text() -> None:
    """From the beginning, and token by token after a prompt."""
    chance = random.Random(1)
    some = 0
    for _ in range(600):
        most = chance.choice([2, 3, 8, len(PIECES)])
        tokens = [chance.randrange(most) for _ in range(chance.randrange(1, 24))]
        limits = chance.randrange(4), chance.choice([-1, 1, 2, 5, 10, 64])
        settings = DrySettings(0.8, chance.choice([1.0, 1.75]), *limits, chance.choice(BREAKERS))
        prompt = chance.randrange(1, len(tokens) + 1)
        found = Dry(settings, tokens[:prompt], piece)
        for count in range(prompt, len(tokens) + 1):
            assert found.penalties == pytest.approx(expected(tokens[:count], settings)), (tokens[:count], settings)
            some += bool(found.penalties)
            if count < len(tokens):
                found.accept(tokens[count])
    assert some > 500


def test_by_hand() -> None:
    """The example: x y a b … x y a: after that, b would repeat three tokens and more."""
    settings = DrySettings(2.0, 3.0, 1, -1, ())
    found = Dry(settings, [7, 6, 0, 1, 3, 7, 6, 0], piece)
    assert found.penalties == pytest.approx({1: 2.0 * 3.0**2})
    found.accept(1)
    assert found.penalties == pytest.approx({3: 2.0 * 3.0**3})
    found.accept(0)  # after "0" came 1
    assert found.penalties == pytest.approx({1: 2.0})


def test_breakers() -> None:
    """A repetition does not reach over one, wherever it lies in tokens; a token that has one is not penalised."""
    settings = DrySettings(1.0, 2.0, 1, -1, ("\n",))
    assert Dry(settings, [0, 2, 1, 3, 0, 2, 1], piece).penalties == pytest.approx({3: 1.0}), "1 token, not 3"
    assert Dry(settings._replace(allowed_length=2), [0, 2, 1, 3, 0, 2, 1], piece).penalties == {}
    assert Dry(settings, [0, 2, 0, 2, 0], piece).penalties == {}, "a newline may follow"
    two = settings._replace(sequence_breakers=("ab",))
    assert Dry(two, [7, 0, 1, 7, 0, 1], piece).penalties == {}, "it ends with the last token"


def test_costs_nothing_more_where_all_tokens_are_the_same() -> None:
    """Lengths are those of a linear function, and no penalty is infinite."""
    count = 20_000
    assert repeats([0] * count) == [*range(1, count), 0]
    found = Dry(DrySettings(1e3, 1e3, 2, -1, ("\n",)), [0] * count, piece)
    for _ in range(20):
        found.accept(0)
    assert found.penalties == {0: float(np.finfo(np.float32).max)}


def test_what_it_keeps_is_limited() -> None:
    """No more than the tokens that it looks at, and of the text no more than a breaker is long."""
    found: Any = Dry(DrySettings(1.0, 2.0, 2, 5, ("xyx",)), [0, 1] * 50, piece)
    for _ in range(100):
        found.accept(3)
        assert (len(found._ids), len(found._repeats), len(found._text)) == (5, 5, 2)
