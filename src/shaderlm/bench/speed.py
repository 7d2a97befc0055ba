"""How fast a model reads prompts and writes tokens: llama-bench's tests, on our runners.

A test is pp (prompt tokens), tg (generated tokens) or both, after `depth` tokens that are already in the cache and do
not count. Tokens are random; sampling and text are left out, except that the next token is chosen on the device
(argmax), because it stays there.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InputError
from ..runtime.session import Runner, Session, Token


@dataclass(frozen=True)
class Trial:
    """What is timed: `prompt` tokens read, then `generated` tokens written, at `depth`."""

    prompt: int
    generated: int
    depth: int = 0

    @property
    def name(self) -> str:
        """pp512, tg128, pp512+tg128; with @ d4096 where the cache is not empty."""
        parts = [f"pp{self.prompt}"] * (self.prompt > 0) + [f"tg{self.generated}"] * (self.generated > 0)
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def tokens(self) -> int:
        """What tokens per second count."""
        return self.prompt + self.generated


@dataclass(frozen=True)
class Result:
    """Nanoseconds of each repetition."""

    test: Trial
    samples_ns: tuple[int, ...]

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Tokens per second of each repetition."""
        return tuple(self.test.tokens * 1e9 / ns for ns in self.samples_ns)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for one value."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def check(runner: Runner, tests: Sequence[Trial]) -> None:
    """Every test must fit the context, before the first one runs."""
    for test in tests:
        needed = test.depth + test.tokens
        if needed > runner.config.context:
            raise InputError(f"{test.name} needs {needed:,} positions, the context holds {runner.config.context:,}")


def run(runner: Runner, test: Trial, repetitions: int, warmup: bool = True) -> Iterator[Result]:
    """The result so far after each repetition. One session serves them all; its cache is rewound between them."""
    session = runner.session()
    generator = np.random.default_rng(1)
    try:
        if test.depth:
            session.feed(_random(generator, runner, test.depth))
        if warmup:  # compiles what is not compiled, makes room in the cache, wakes the GPU up
            _once(session, runner, test, generator)
        samples: list[int] = []
        for _ in range(repetitions):
            samples.append(_once(session, runner, test, generator))
            yield Result(test, tuple(samples))
    finally:
        session.close()


def _random(generator: np.random.Generator, runner: Runner, count: int) -> list[int]:
    found: list[int] = generator.integers(0, runner.config.vocabulary, count).tolist()
    return found


def _once(session: Session, runner: Runner, test: Trial, generator: np.random.Generator) -> int:
    session.rewind(test.depth)
    first = _random(generator, runner, max(1, test.prompt))
    if not test.prompt:
        # A token to go on from. It is not timed, and one position of the cache is given back for it.
        session.rewind(max(0, test.depth - 1))
        session.feed(first)
        session.choose(None).wait()
    start = time.perf_counter_ns()
    if test.prompt:
        session.feed(first)
        pending = deque([session.choose(None)])
    else:
        pending = deque[Token]()
    for _ in range(test.generated):
        pending.append(session.advance(None))
        if len(pending) > session.ahead:
            pending.popleft().wait()
    while pending:
        pending.popleft().wait()
    return time.perf_counter_ns() - start
