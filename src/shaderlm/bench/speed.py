"""How fast a model reads prompts and writes tokens: llama-bench's tests, on our runners.

A test is pp (prompt tokens), tg (generated tokens) or both, after `depth` tokens that are already in the cache and do
not count. Tokens are random; sampling and text are left out, except that the next token is chosen on the device
(argmax), because it stays there. A test with text is what a user waits for: the prompt is a text that is tokenised,
tokens are sampled and become text again, by the engine's own `Answer`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..engine.answer import Completion
from ..engine.generate import Answer, Request
from ..engine.language_model import LanguageModel
from ..engine.sampling import Sampling
from ..errors import InputError
from ..runtime.session import Runner, Session, Token
from ..text import Tokenizer

SAMPLING = Sampling(temperature=0.8, top_p=0.95, seed=1)  # of tests with text
_MORE_WORDS = 16  # how often words are added to a text that has too few tokens


@dataclass(frozen=True)
class Trial:
    """What is timed: `prompt` tokens read, then `generated` tokens written, at `depth`, with or without their text."""

    prompt: int
    generated: int
    depth: int = 0
    text: bool = False

    @property
    def name(self) -> str:
        """pp512, tg128, pp512+tg128; with @ d4096 where the cache is not empty, and +text where text is timed too."""
        parts = [f"pp{self.prompt}"] * (self.prompt > 0) + [f"tg{self.generated}"] * (self.generated > 0)
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "") + (" +text" if self.text else "")

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
        # Without a prompt there is a token to go on from: the last of the depth, or one more.
        needed = max(test.depth, 0 if test.prompt else 1) + test.tokens
        if needed > runner.config.context:
            raise InputError(f"{test.name} needs {needed:,} positions, the context holds {runner.config.context:,}")


def run(
    runner: Runner, test: Trial, repetitions: int, warmup: bool = True, model: LanguageModel | None = None
) -> Iterator[Result]:
    """The result so far after each repetition. One session serves them all; its cache is rewound between them.

    `model` is whose runner it is: tests with text need its tokenizer.
    """
    session = runner.session()
    generator = np.random.default_rng(1)
    try:
        filled = _random(generator, runner, test.depth)
        if filled:
            session.feed(filled)
        once = partial(_once, session, runner, test, generator)
        if test.text:
            assert model is not None, "text needs a tokenizer"
            once = partial(_once_with_text, session, model, test, generator, filled)
        if warmup:  # compiles what is not compiled, makes room in the cache, wakes the GPU up
            once()
        samples: list[int] = []
        for _ in range(repetitions):
            samples.append(once())
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


def _once_with_text(
    session: Session, model: LanguageModel, test: Trial, generator: np.random.Generator, filled: list[int]
) -> int:
    """Nanoseconds from the text of the prompt to the text of the last token.

    As many tokens are run as without text: a prompt is followed by one choice and a step per generated token; without
    one, the first step is that of the token to go on from.
    """
    context = model.config.context
    known = test.depth if test.prompt else max(0, test.depth - 1)
    session.rewind(known)
    words = random_text(generator, model.tokenizer, test.prompt) if test.prompt else ""
    before = filled if test.prompt or filled else _random(generator, model.runner, 1)
    wanted = test.generated + (1 if test.prompt else 0)
    result: list[Completion] = []
    start = time.perf_counter_ns()
    ids = model.prompt_ids(words)[: test.prompt] if test.prompt else []
    request = Request([*before, *ids], wanted, SAMPLING, (), frozenset(), context)
    for _ in Answer(session, model.tokenizer, request, known).pieces(nullcontext, result):
        pass
    taken = time.perf_counter_ns() - start
    if len(ids) < test.prompt:
        raise InputError(f"{test.name}: special tokens in the random text left {len(ids):,} of {test.prompt:,} tokens")
    assert len(result[0].ids) == wanted
    return taken


def random_text(generator: np.random.Generator, tokenizer: Tokenizer, count: int) -> str:
    """Random ids as text, read back and cut: the shortest found that makes at least `count` tokens.

    The caller should not read it with the same encoder again: that one remembers the words, which saves half the time.
    Prompts are read by the other one of a tokenizer's two, which knows special tokens.
    """
    text = ""
    for _ in range(_MORE_WORDS):  # special tokens have no text, and neighbours may become one token
        text += tokenizer.decode(generator.integers(0, len(tokenizer.vocabulary.tokens), count).tolist())
        ids = tokenizer.encode(text)
        for end in (count, count + 1, count + 2, count + count // 8, len(ids)):  # where it is cut, tokens may merge
            cut = tokenizer.decode(ids[:end])
            if len(tokenizer.encode(cut)) >= count:
                return cut
    raise InputError(f"no text of {count:,} tokens was found: hardly a token of this model's vocabulary has text")
