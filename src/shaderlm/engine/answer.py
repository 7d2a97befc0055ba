"""What a generation gives: text that knows how it came about, at once or piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple


class TokenLogprob(NamedTuple):
    """Log probability of a token that was chosen, and the likeliest alternatives, best first."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Timing:
    """Seconds until the first token (the prompt is read), and for all the others."""

    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    decoded: int = 0  # tokens after the first

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding; 0 where there was none."""
        return self.decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0


class Completion(str):
    """The text of an answer: a str with the tokens, why it ended, and how long it took.

    finish_reason is "stop" (the model ended its answer, or a stop string came), "length" (max_tokens, or a full
    context) or "closed" (the stream was closed before either).
    """

    ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    timing: Timing

    @classmethod
    def of(
        cls,
        text: str,
        ids: list[int],
        prompt_ids: list[int],
        finish_reason: str,
        logprobs: list[TokenLogprob] | None,
        timing: Timing,
    ) -> Completion:
        """Text with all that belongs to it."""
        made = cls(text)
        made.ids, made.prompt_ids, made.finish_reason = ids, prompt_ids, finish_reason
        made.logprobs, made.timing = logprobs, timing
        return made


class Stream(Iterator[str]):
    """Pieces of text as they become certain. After the last one, `completion` has the whole.

    Close it (or leave a `with` block) to stop early, also from another thread than the one that reads it.
    """

    def __init__(self, pieces: Generator[str, None, None], result: list[Completion], closed: threading.Event) -> None:
        self._pieces, self._result, self._closed = pieces, result, closed

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def completion(self) -> Completion | None:
        """The whole answer; None while it is not finished, and where it ended in an error."""
        return self._result[0] if self._result else None

    def close(self) -> None:
        """Stop here: at once, or after the token that another thread is waiting for."""
        self._closed.set()
        with suppress(ValueError):  # "generator already executing"
            self._pieces.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
