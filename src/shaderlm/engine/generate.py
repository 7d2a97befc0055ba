"""One answer: the prompt is fed, then tokens are chosen until something ends it.

Where tokens are chosen on the device, the next step is under way before the last token has come back.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from ..runtime.session import Choice, Session, Token
from ..text import TextStream, Tokenizer
from .answer import Completion, Timing, TokenLogprob
from .sampling import Sampling, choose, device_choice, log_probabilities, uniforms


@dataclass(frozen=True)
class Request:
    """What is wanted of one answer."""

    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: Sampling
    stop: Sequence[str]
    stop_ids: frozenset[int]
    context: int
    closed: threading.Event = field(default_factory=threading.Event)  # set to end the answer early


class _OnDevice:
    """Tokens that the device chooses; `ahead` of them are under way at a time."""

    def __init__(self, session: Session, request: Request) -> None:
        self._session, self._sampling = session, request.sampling
        self._uniforms = uniforms(request.sampling.seed)
        # The last token that is chosen is never run.
        self._left = min(request.max_tokens, request.context - session.length + 1)
        self._pending: deque[Token] = deque()

    def first(self) -> tuple[int, None]:
        self._pending.append(self._session.choose(self._choice()))
        self._left -= 1
        return self.next()

    def next(self) -> tuple[int, None]:
        while len(self._pending) < self._session.ahead and self._left > 0:
            self._pending.append(self._session.advance(self._choice()))
            self._left -= 1
        return self._pending.popleft().wait(), None

    def _choice(self) -> Choice:
        return None if self._sampling.greedy else device_choice(self._sampling, next(self._uniforms))


class _OnHost:
    """Tokens that are chosen here, from logits that are read back: penalties, biases, log probabilities."""

    def __init__(self, session: Session, request: Request) -> None:
        self._session, self._sampling = session, request.sampling
        self._uniforms = uniforms(request.sampling.seed)
        self._history = Counter(request.prompt_ids)
        self._last = -1

    def first(self) -> tuple[int, TokenLogprob | None]:
        logits = self._session.logits()
        self._last = choose(logits, self._sampling, self._history, next(self._uniforms))
        self._history[self._last] += 1
        if self._sampling.logprobs is None:
            return self._last, None
        chosen, top = log_probabilities(logits, self._last, self._sampling.logprobs)
        return self._last, TokenLogprob(self._last, chosen, top)

    def next(self) -> tuple[int, TokenLogprob | None]:
        self._session.feed([self._last])
        return self.first()


class Answer:
    """One answer as it comes about. `pieces` may be read once; the completion goes into `result`."""

    def __init__(self, session: Session, tokenizer: Tokenizer, request: Request, known: int) -> None:
        self._session, self._request, self._known = session, request, known
        self._text = TextStream(tokenizer, request.stop)
        self._source: _OnDevice | _OnHost | None = None
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self.ids: list[int] = []
        self._started = self._first = self._last = time.perf_counter()

    def pieces(self, turn: Callable[[], AbstractContextManager[None]], result: list[Completion]) -> Iterator[str]:
        """Pieces of text. The first `known` tokens of the prompt are in the cache.

        `turn` gives the device to this answer: it is held while the device is asked for something, not while the caller
        has a piece of text; and it refuses once the model is closed.
        """
        reason = "length"
        try:
            while len(self.ids) < self._request.max_tokens and not self._request.closed.is_set():
                with turn():
                    token = self._next()
                if token is None:
                    break
                if token in self._request.stop_ids:
                    reason = "stop"
                    break
                self.ids.append(token)
                yield from self._told(self._text.push(token))
                if self._text.stopped:
                    reason = "stop"
                    break
            yield from self._told(self._text.finish())
            if self._request.closed.is_set():
                reason = "closed"
        except GeneratorExit:
            reason = "closed"
            raise
        except BaseException:
            reason = ""
            raise
        finally:
            # Steps that were under way when the answer ended are forgotten.
            self._session.rewind(min(self._session.length, len(self._request.prompt_ids) + len(self.ids)))
            if reason:
                result.append(self._completion(reason))

    def _told(self, piece: str) -> Iterator[str]:
        if piece:
            self._pieces.append(piece)
            yield piece

    def _next(self) -> int | None:
        """The next token; None where the context is full."""
        request = self._request
        if self._source is None:
            self._session.feed(request.prompt_ids[self._known :])
            kind = _OnDevice if request.sampling.on_device else _OnHost
            self._source = kind(self._session, request)
            token, logprob = self._source.first()
            self._first = time.perf_counter()
        elif len(request.prompt_ids) + len(self.ids) > request.context:
            return None
        else:
            token, logprob = self._source.next()
        self._last = time.perf_counter()
        if logprob is not None and token not in request.stop_ids:
            self._logprobs.append(logprob)
        return token

    def _completion(self, reason: str) -> Completion:
        timing = Timing(self._first - self._started, self._last - self._first, max(0, len(self.ids) - 1))
        wanted = self._logprobs if self._request.sampling.logprobs is not None else None
        return Completion.of("".join(self._pieces), self.ids, list(self._request.prompt_ids), reason, wanted, timing)
