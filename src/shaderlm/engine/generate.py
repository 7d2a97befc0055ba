"""One answer: the prompt is fed, then tokens are chosen until something ends it.

Where tokens are chosen on the device, the next step is under way before the last token has come back.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


def answer(
    session: Session,
    tokenizer: Tokenizer,
    request: Request,
    lock: threading.RLock,
    result: list[Completion],
    known: int = 0,
) -> Iterator[str]:
    """Pieces of text; the completion goes into `result`. The first `known` tokens of the prompt are in the cache.

    The lock is held while the device is asked for something, not while the caller has a piece of text.
    """
    text = TextStream(tokenizer, request.stop)
    ids: list[int] = []
    pieces: list[str] = []
    logprobs: list[TokenLogprob] = []
    reason = "length"
    started = time.perf_counter()
    decoding = ended = started
    source: _OnDevice | _OnHost | None = None
    try:
        while len(ids) < request.max_tokens:
            with lock:
                if source is None:
                    session.feed(request.prompt_ids[known:])
                    source = _OnDevice(session, request) if request.sampling.on_device else _OnHost(session, request)
                    token, logprob = source.first()
                    decoding = time.perf_counter()
                elif len(request.prompt_ids) + len(ids) > request.context:
                    break
                else:
                    token, logprob = source.next()
                ended = time.perf_counter()
            if token in request.stop_ids:
                reason = "stop"
                break
            ids.append(token)
            if logprob is not None:
                logprobs.append(logprob)
            piece = text.push(token)
            if piece:
                pieces.append(piece)
                yield piece
            if text.stopped:
                reason = "stop"
                break
        rest = text.finish()
        if rest:
            pieces.append(rest)
            yield rest
    finally:
        with lock:
            # Steps that were under way when the answer ended are forgotten; so is what was never fed.
            session.rewind(min(session.length, len(request.prompt_ids) + len(ids)))
        timing = Timing(decoding - started, ended - decoding, max(0, len(ids) - 1))
        wanted = logprobs if request.sampling.logprobs is not None else None
        result.append(Completion.of("".join(pieces), ids, list(request.prompt_ids), reason, wanted, timing))
