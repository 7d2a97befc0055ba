"""How fast a model reads prompts and writes tokens: llama-bench's tests, on the engine that users run.

A test is pp (prompt tokens), tg (generated tokens) or both, after `depth` tokens that are in the prefix cache and do
not count. Tokens are random; the next token is the most likely one, and no text is made of it. A test with text is what
a user waits for: the prompt is a text that is tokenised, tokens are sampled and become text again. A tg test may run
several sequences at once; its tokens per second are those of all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..engine.language_model import LanguageModel
from ..engine.request import Request
from ..engine.sampling import SamplingParams
from ..engine.vision import placeholder_ids
from ..errors import InputError
from ..runtime.runner import MAX_OUTPUTS, Runner
from ..text import Tokenizer

SAMPLING = SamplingParams(temperature=0.8, top_p=0.95, seed=1)  # of tests with text
_FASTER = 0.97  # of the best time before: clocks are still rising
_MAX_WARM_UP = 6  # times the usual warm-up, for devices that never settle
_MORE_WORDS = 16  # how often words are added to a text that has too few tokens


@dataclass(frozen=True)
class Trial:
    """What is timed: `prompt` tokens read, then `generated` tokens written, at `depth`, with or without their text.

    `parallel` sequences at once, each of them with that many tokens at that depth.
    """

    prompt: int
    generated: int
    depth: int = 0
    text: bool = False
    parallel: int = 1

    @property
    def test(self) -> str:
        """pp512, tg128, pp512+tg128; with @ d4096 where the cache is not empty, and +text where text is timed too."""
        parts = [f"pp{self.prompt}"] * (self.prompt > 0) + [f"tg{self.generated}"] * (self.generated > 0)
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "") + (" +text" if self.text else "")

    @property
    def name(self) -> str:
        """The test; with × 8 for eight sequences at once."""
        return self.test + (f" × {self.parallel}" if self.parallel > 1 else "")

    @property
    def tokens(self) -> int:
        """What tokens per second count."""
        return self.parallel * (self.prompt + self.generated)


def check(context: int, tests: Sequence[Trial]) -> None:
    """Every test must fit the context and a step, before the first one runs."""
    for test in tests:
        # Without a prompt there is a token to go on from: the last of the depth, or one more.
        needed = max(test.depth, 0 if test.prompt else 1) + test.prompt + test.generated
        if needed > context:
            raise InputError(f"{test.name} needs {needed:,} positions, the context holds {context:,}")
        if test.parallel > MAX_OUTPUTS:
            raise InputError(f"{test.name}: a step samples for at most {MAX_OUTPUTS} sequences at once")


def run(model: LanguageModel, test: Trial, repetitions: int, warmup: bool = True) -> Iterator[tuple[int, ...]]:
    """Nanoseconds of each repetition so far: none when the warm-up is over, then after each repetition."""
    generator = np.random.default_rng(1)
    prefixes = [_random(generator, model, test.depth) for _ in range(test.parallel)]
    if test.parallel > 1:
        assert (test.prompt, test.text) == (0, False), "only tg tests run several sequences"
        once = partial(_once_parallel, model, test, generator, prefixes)
    else:
        once = partial(_once_with_text if test.text else _once, model, test, generator, prefixes[0])
    if warmup:  # compiles what is not compiled, grows the cache, lets the GPU's clocks rise
        warm_up(model.runner, once)
        yield ()
    samples: list[int] = []
    for _ in range(repetitions):
        samples.append(once())
        yield tuple(samples)


def warm_up(runner: Runner, once: Callable[[], int]) -> None:
    """Once, and again until clocks are up: for a while after it got faster for the last time.

    A GPU clocks down while shaders compile, and up again only after a while: a prompt of a few milliseconds would be
    timed at idle clocks.
    """
    best = once()  # much of this may be compiling, when the GPU idles
    began = time.perf_counter()
    end = began + runner.warm_up_seconds
    while (now := time.perf_counter()) < min(end, began + _MAX_WARM_UP * runner.warm_up_seconds):
        nanoseconds = once()
        if nanoseconds < _FASTER * best:
            best, end = nanoseconds, now + runner.warm_up_seconds


def _random(generator: np.random.Generator, model: LanguageModel, count: int) -> list[int]:
    ids: list[int] = generator.integers(0, model.config.vocabulary, count).tolist()
    places = placeholder_ids(model.tokenizer)
    return [0 if token in places else token for token in ids] if places else ids


def _cache(model: LanguageModel, *prefixes: list[int]) -> None:
    """Leave prefixes in the prefix cache: again before each repetition, which may have taken pages of them."""
    requests = [Request(prefix, max_tokens=1, output="tokens") for prefix in prefixes if prefix]
    alone = len(requests) == 1
    for handle in map(model.engine.submit_lazy, requests) if alone else model.engine.submit_all(requests):
        handle.result()


def _request(prompt: list[int], generated: int) -> Request:
    """Greedy. The prompt is followed by one choice and a step per generated token."""
    return Request(prompt, max_tokens=generated + 1, keep_cache=False, output="tokens")


def _once(model: LanguageModel, test: Trial, generator: np.random.Generator, prefix: list[int]) -> int:
    """Nanoseconds of a repetition, by the engine's own clock, as users see them in timings.

    A prompt takes from its first step to its token, the one to go on from. Without a prompt, that is not timed.
    """
    _cache(model, prefix)
    prompt = [*prefix, *_random(generator, model, test.prompt or (0 if prefix else 1))]
    handle = model.engine.submit_lazy(_request(prompt, test.generated))
    handle.result()
    timing = handle.timing
    return round(1e9 * (timing.decode_seconds + (timing.prompt_seconds if test.prompt else 0)))


def _once_parallel(
    model: LanguageModel, test: Trial, generator: np.random.Generator, prefixes: Sequence[list[int]]
) -> int:
    """Nanoseconds from the first token of the first sequence to the last one of all: they start in one step."""
    _cache(model, *prefixes)
    prompts = [prefix or _random(generator, model, 1) for prefix in prefixes]
    handles = model.engine.submit_all([_request(prompt, test.generated) for prompt in prompts])
    try:
        for handle in handles:
            handle.wait_for_end()
            handle.result()  # raises what went wrong
    finally:
        for handle in handles:
            handle.cancel()
    seconds = max(handle.last for handle in handles) - min(handle.first for handle in handles)
    return round(seconds * 1e9)


def _once_with_text(model: LanguageModel, test: Trial, generator: np.random.Generator, prefix: list[int]) -> int:
    """Nanoseconds from the text of the prompt to the text of the last token.

    As many tokens are run as without text, but for the token to go on from: its step is timed, too.
    """
    _cache(model, prefix)
    words = random_text(generator, model.tokenizer, test.prompt) if test.prompt else ""
    before = prefix if test.prompt or prefix else _random(generator, model, 1)
    max_tokens = test.generated + (1 if test.prompt else 0)
    start = time.perf_counter_ns()
    ids = model.tokenize(words)[: test.prompt] if test.prompt else []
    handle = model.engine.submit_lazy(Request([*before, *ids], SAMPLING, max_tokens, keep_cache=False))
    while handle.next_text() is not None:
        pass
    nanoseconds = time.perf_counter_ns() - start
    if len(ids) < test.prompt:
        raise InputError(f"{test.name}: special tokens in the random text left {len(ids):,} of {test.prompt:,} tokens")
    assert handle.usage.completion_tokens == max_tokens
    return nanoseconds


def random_text(generator: np.random.Generator, tokenizer: Tokenizer, count: int) -> str:
    """Random ids as text, read back and cut: the shortest found that makes at least `count` tokens.

    The caller should not read it with the same encoder again: that one remembers the words, which saves half the time.
    Prompts are read by the other one of a tokenizer's two, which knows special tokens.
    """
    text = ""
    for _ in range(_MORE_WORDS):  # special tokens have no text, and neighbours may become one token
        text += tokenizer.decode(
            generator.integers(0, len(tokenizer.vocabulary.tokens), count).tolist(), skip_special=True
        )
        ids = tokenizer.encode(text, parse_special=False)
        for end in (count, count + 1, count + 2, count + count // 8, len(ids)):  # where it is cut, tokens may merge
            cut = tokenizer.decode(ids[:end], skip_special=True)
            if len(tokenizer.encode(cut, parse_special=False)) >= count:
                return cut
    raise InputError(f"no text of {count:,} tokens was found: hardly a token of this model's vocabulary has text")
