"""One generation: the prompt is fed, then tokens are sampled until something ends it.

The device samples. The next steps are submitted before the last token has come back, and before its text is made: the
device does not wait for text.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

from ..errors import DeviceError
from ..runtime.runner import Token
from ..runtime.session import Session
from ..text import TextStream, Tokenizer
from .completion import Completion, Timing, TokenLogprob
from .sampling import SamplingParams, settings_of

Turn = AbstractContextManager[object]


@dataclass(frozen=True)
class Request:
    """What one generation is to do."""

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    context: int  # tokens of prompt and generation together, the last one excepted: it is never run
    stop: Sequence[str] = ()
    stop_ids: frozenset[int] = frozenset()


class _Tokens:
    """Tokens that the device samples; up to `session.steps_ahead` of them are under way at a time."""

    logprob: TokenLogprob | None = None  # of the last token, where the request wants it

    def __init__(self, session: Session, request: Request, turn: Turn) -> None:
        self._session, self._turn, self._settings = session, turn, settings_of(request.sampling)
        self._prompt_ids, self._stop_ids = request.prompt_ids, request.stop_ids
        self._left = min(request.max_tokens, request.context - len(request.prompt_ids) + 1)  # steps to submit
        self._pending: deque[Token] = deque()

    def start(self, ids: Sequence[int]) -> None:
        """Submit the first steps, with what is left of the prompt. Penalties count all of it."""
        if self._settings.penalizes:
            self._session.set_history(self._prompt_ids)
        self._pending.append(self._session.sample(ids, self._settings))
        self._left -= 1
        if self._session.steps_ahead > 1:
            self._fill()

    def next(self) -> int | None:
        """The next token; None at max_tokens, or where the context is full. No lock is held while it is awaited."""
        pending = self._pending
        if not pending:
            if self._left <= 0:
                return None
            with self._turn:
                self._fill()
        token = pending[0].wait()
        logprobs = pending[0].logprobs() if self._settings.logprobs is not None else None
        pending.popleft()
        self.logprob = TokenLogprob(token, *logprobs) if logprobs is not None else None
        # Before the text of this token is made. Nothing is gained by that where one step at a time is under way.
        if self._left > 0 and self._session.steps_ahead > 1 and token not in self._stop_ids:
            with self._turn:
                self._fill()
        return token

    def _fill(self) -> None:
        while self._left > 0 and len(self._pending) < self._session.steps_ahead:
            self._pending.append(self._session.advance(self._settings))
            self._left -= 1

    def close(self) -> None:
        """Give back what steps that nobody waits for any more would have returned."""
        while self._pending:
            with suppress(DeviceError):  # a lost device has nothing to give back
                self._pending.popleft().discard()


class Generation:
    """One generation as it comes about: `next_delta` until it returns None. Then `completion` has all of it.

    `open_session` gives a session and how many tokens of the prompt are in its cache already. `close_session` gets it
    back once, with the completion, or None after an error. Both the opening and every submission happen inside `turn`,
    which gives the device to one thread. A lock of its own lets one thread at a time read a generation.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        open_session: Callable[[], tuple[Session, int]],
        close_session: Callable[[Session, Completion | None], None] = lambda session, completion: None,
        turn: Turn | None = None,
    ) -> None:
        self.completion: Completion | None = None
        self._request, self._turn = request, turn or nullcontext()
        self._open_session, self._close_session = open_session, close_session
        self._text = TextStream(tokenizer, request.stop)
        self._source: _Tokens | None = None
        self._session: Session | None = None
        self._deltas: list[str] = []
        self._logprobs: list[TokenLogprob] | None = None if request.sampling.logprobs is None else []
        self._ids: list[int] = []
        self._started = self._first = self._last = 0.0
        self._ended = self._cancelled = self._running = False
        self._error: BaseException | None = None
        # Reentrant: a signal handler may close the stream that its own thread is reading.
        self._lock = threading.RLock()

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """Tokens of the prompt that were submitted, and all of them. Any thread may ask while another one reads."""
        session, total = self._session, len(self._request.prompt_ids)
        return (0 if session is None else min(session.length, total)), total

    def next_delta(self) -> str | None:
        """The next text that is certain: whole characters, no part of a stop string. None after the last."""
        with self._lock:
            if self._ended:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                return None
            self._running = True
            try:
                delta = self._advance()
            except BaseException:
                self._end(None)
                raise
            finally:
                self._running = False
        if self._cancelled and not self._ended:  # by a thread that did not get the lock
            self.close()
        return delta

    def _advance(self) -> str | None:
        source = self._source or self._start()
        while not self._cancelled:
            token = source.next()
            if token is None:
                return self._finish("length")
            self._last = time.perf_counter()
            if not self._ids:
                self._first = self._last
            if token in self._request.stop_ids:
                return self._finish("stop")
            self._ids.append(token)
            if self._logprobs is not None and source.logprob is not None:
                self._logprobs.append(source.logprob)
            delta = self._text.push(token)
            if self._text.stopped:
                return self._finish("stop", delta)
            if delta:
                self._deltas.append(delta)
                return delta
        return self._finish("closed")

    def _start(self) -> _Tokens:
        self._started = self._first = self._last = time.perf_counter()
        request = self._request
        with self._turn:
            self._session, cached = self._open_session()
            self._source = _Tokens(self._session, request, self._turn)
            self._source.start(request.prompt_ids[cached:])
        return self._source

    def _finish(self, reason: str, delta: str = "") -> str | None:
        """End with this reason; the last text, if there is any."""
        delta += self._text.finish()
        if delta:
            self._deltas.append(delta)
        self._end(reason)
        return delta or None

    def _end(self, reason: str | None) -> None:
        """Give the session back; after an error (None) there is no completion."""
        self._ended = True
        source, self._source = self._source, None
        session, self._session = self._session, None
        if reason is not None and self._started:
            timing = Timing(self._first - self._started, self._last - self._first, max(0, len(self._ids) - 1))
            prompt = list(self._request.prompt_ids)
            text = "".join(self._deltas)
            self.completion = Completion.of(text, self._ids, prompt, reason, self._logprobs, timing)
        try:
            if source is not None:
                source.close()
        finally:
            if session is not None:
                self._close_session(session, self.completion)

    def close(self) -> None:
        """End early: now, or after the token that another thread is waiting for."""
        self._cancelled = True
        if self._lock.acquire(blocking=False):
            try:
                if not self._ended and not self._running:
                    self._end("closed")
            finally:
                self._lock.release()

    def abort(self, error: BaseException) -> None:
        """End with an error, which the next read raises. Waits for the thread that is reading, if there is one."""
        with self._lock:
            if not self._ended and not self._running:
                self._error = error
                self._end(None)
