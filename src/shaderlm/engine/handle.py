"""`Handle`: a request that was made, to be read from a thread or from asyncio, and cancelled from anywhere."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..models.config import ImageRows
from ..runtime.image_rows import Features, place
from ..runtime.row_scores import RowScores
from ..runtime.runner import StepResult
from ..runtime.sampler_settings import SamplerSettings
from ..text import TextStream
from .completion import Completion, PromptLogprobs, Timing, TokenLogprob
from .dry import Dry
from .host_sampler import HostSampler
from .masks import Mask
from .request import Constraint, Delta, ForkableConstraint, Request, SequenceInfo, Usage
from .sampler_order import chain_of, dry_of
from .sampling import settings_of, without_tokens
from .scheduler import SequenceState
from .step_core import OutputRows

if TYPE_CHECKING:
    import asyncio

    from ..text import Tokenizer


_DRAFT_SECONDS = 1e-3  # that the masks of one draft may take, where all requests wait for them


class Driver(Protocol):
    """What a handle asks of the engine that made it."""

    tokenizer: Tokenizer

    @property
    def image_rows(self) -> ImageRows | None:
        """What its model does with rows of images."""

    @property
    def has_thread(self) -> bool:
        """Does the engine's own thread step?"""

    @property
    def in_step(self) -> bool:
        """Does the calling thread step?"""

    def start(self, handle: Handle) -> None:
        """Submit a handle that is not submitted yet."""

    def cancel(self, handle: Handle) -> None:
        """End a request before the next step, or now if nobody steps."""

    def drive_or_wait(self, handle: Handle) -> None:
        """Step once, or wait until the engine's thread has something for a handle."""


# What one token brought. No text: it is made when it is read. No token: text that was held back until the end.
_Item = tuple[str | None, int | None, TokenLogprob | None]


class Handle(Iterator[Delta], AsyncIterator[Delta]):
    """A request and what came of it so far. Iterating gives deltas; each has all that came since the last one.

    Any number of threads or tasks may read it, one delta goes to one of them. A `pulled` handle is submitted when it is
    first read, and the thread that reads it steps the engine, as long as nothing else runs.
    """

    def __init__(self, engine: Driver, request: Request, number: int, *, pulled: bool = False) -> None:
        self.id, self.request, self.pulled = number, request, pulled
        self.generates, self.stop_ids = request.generates, request.stop_ids  # asked for at every token
        self.finish_reason: str | None = None
        self.stop_match: str | int | None = None  # after "stop": the stop string or token id that came
        self.completion: Completion | None = None
        self.hidden: NDArray[np.float32] | None = None  # [hidden]
        self.logits: NDArray[np.float32] | None = None  # [rows of the prompt, vocabulary]
        self.stop_logprob: TokenLogprob | None = None  # of the token id that ended it, where they are reported
        self.settings = without_tokens(settings_of(request.sampling), engine.tokenizer.vocabulary.suppressed)
        self.early_settings = self.settings  # before min_tokens
        if request.min_tokens > 0:
            self.early_settings = without_tokens(self.settings, request.stop_ids)
        chain = (
            chain_of(request.sampling, self.settings, always=request.reports_remaining) if request.generates else None
        )
        dry = dry_of(request.sampling) if request.generates else None
        self._host_sampler = None if chain is None else HostSampler(chain, reports_remaining=request.reports_remaining)
        self._dry = None if dry is None else Dry(dry, request.prompt_ids, engine.tokenizer.piece)
        self.image_features: list[Features] = []  # of its first pictures, until all are known
        self.looked_up = False  # was its prompt looked for on disk?
        self.masked: SamplerSettings | None = None  # for the next token, by its constraint
        self.drafted_settings: list[SamplerSettings] = []  # for the tokens after the drafted ones
        self.drafted = self.accepted = 0  # tokens so far
        self.mask_seconds: float | None = None  # that its masks take, the slow ones among the last; None: unknown
        self.submitted_at = self.started = self.first = self.last = self._ended = 0.0
        self.cancelled = False
        prompt = list(request.prompt_ids)
        all_outputs = request.output == "logits"
        self._scores: PromptLogprobs | None = None
        if request.prompt_logprobs is not None:
            self._scores = PromptLogprobs(prompt, request.first_row + 1, request.prompt_logprobs)
            self._scored = self._scores.first  # tokens whose log probabilities are known, or not wanted
        # What is cached gives nothing.
        cached = request.cache_prompt and not all_outputs and self._scores is None
        self.sequence = SequenceState(number, prompt, len(prompt), 0, request.priority, cached)
        self.sequence.all_outputs, self.sequence.first_output = all_outputs, request.first_row
        self.sequence.owner, self.sequence.contiguous, self.sequence.cache_on_finish = self, pulled, request.keep_cache
        self.sequence.client = request.client
        if request.images:
            assert engine.image_rows is not None
            self.sequence.images = place(
                request.prompt_ids, [each.placed for each in request.images], engine.image_rows
            )
        self.constraint = None if request.constraint is None else request.constraint.start()
        self.sequence.mask_pending = self.constraint is not None
        self.sequence.host_sampled = chain is not None
        on_host = (self.constraint, self._host_sampler, self._dry)  # what its next row depends on
        self.sequence.needs_host_token = any(each is not None for each in on_host)
        # How all of its tokens are sampled, where that does not depend on those before.
        varies = self.sequence.needs_host_token or self.early_settings is not self.settings or self.settings.penalizes
        self.fixed_settings = None if varies else self.settings
        self._engine = engine
        makes_text = request.output == "text"
        options = (request.stop, request.shown_ids, request.lines.min_indent)
        self._text = TextStream(engine.tokenizer, *options) if makes_text else None
        # Does its text end nothing? Then it is made by who reads it, of all tokens that came meanwhile: the engine's
        # thread has hundreds of others to look after.
        self._late_text = self._text is not None and not self._text.ends and request.lines.seconds is None
        self._has_line_end = False
        self._items: deque[_Item] = deque()
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if request.sampling.logprobs is None else []
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._decoding = threading.RLock()  # what is read comes in the order of its tokens, whoever reads
        self._reading = threading.RLock()  # reentrant: a signal handler that reads it gets an error, see `serve`
        self._event = threading.Event()  # for the thread that reads it: look again
        self._over = threading.Event()
        self.waiters: list[asyncio.Future[None]] = []  # of tasks that wait for the next token
        self.end_waiter: asyncio.Future[None] | None = None  # of a task that reads later, unless it ends before

    @property
    def awaited(self) -> bool:
        """Is there a task to be woken?"""
        return bool(self.waiters) or (self.end_waiter is not None and self.finish_reason is not None)

    # Reading -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Handle:
        return self

    def __next__(self) -> Delta:
        with self._reading:
            self._wait_for_items()
            delta = self._next_delta()
        if delta is None:
            raise StopIteration
        return delta

    def next_text(self) -> str | None:
        """More text; None after the last. What tokens bring no text of their own is skipped."""
        items, text = self._items, ""
        with self._reading:
            while not text:
                self._wait_for_items()
                if not items:
                    self._raise_error()
                    return None
                text = self._take_items()[0]
        return text

    def _wait_for_items(self) -> None:
        try:
            while not self._items and self.finish_reason is None:
                self._engine.drive_or_wait(self)
        except BaseException:  # Ctrl-C, while the engine's thread is at it
            if not self._engine.in_step:  # as a signal handler would, which must not read; what it interrupts may
                self.cancel()
            raise

    def wait_in_thread(self) -> None:
        """Until something came, or the engine's thread says that it does not step any more."""
        self._event.clear()
        if not self._items and self.finish_reason is None and self._engine.has_thread:
            self._event.wait()

    def wait_for_end(self) -> None:
        """Until it has ended, where the engine's thread is at it. Whoever steps the engine does not wait for itself."""
        while self.finish_reason is None and self._engine.has_thread and not self._engine.in_step:
            self._over.wait(0.1)  # the engine's thread may leave it to its reader

    def __aiter__(self) -> Handle:
        return self

    async def __anext__(self) -> Delta:
        delta = await self.next_delta()
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def next_delta(self) -> Delta | None:
        """All that came since the last one, as soon as there is something; None after the end."""
        if not self.submitted_at:
            self._engine.start(self)
        while not self._items and self.finish_reason is None:
            from asyncio import get_running_loop  # late: it takes 25 ms to import

            waiter = get_running_loop().create_future()
            self.waiters.append(waiter)
            try:
                if not self._items and self.finish_reason is None:
                    await waiter
            finally:
                self.waiters.remove(waiter)
        return self._next_delta()

    async def anext_text(self) -> str | None:
        """More text, in asyncio; None after the last."""
        async for delta in self:
            if delta.text:
                return delta.text
        return None

    def _next_delta(self) -> Delta | None:
        """All that there is, as one delta."""
        if not self._items:
            self._raise_error()
            return None
        return Delta(*self._take_items(), self.last)

    def _take_items(self) -> tuple[str, tuple[int, ...], tuple[TokenLogprob, ...]]:
        """The text, tokens and log probabilities of all items."""
        items = self._items
        with self._decoding:
            new = [items.popleft() for _ in range(len(items))]
            ids = tuple([token for _, token, _ in new if token is not None])
            if self._late_text:
                assert self._text is not None
                text = self._text.push_all(ids)
            else:
                text = "".join([text for text, _, _ in new if text])
            return text, ids, tuple([logprob for _, _, logprob in new if logprob is not None])

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        traceback, self._traceback = self._traceback, None
        try:
            if error is not None:
                raise error.with_traceback(traceback)  # several readers may raise the same one
        finally:
            del error, traceback  # the traceback refers to them

    def result(self) -> Completion | None:
        """Read to the end: the completion; None for a request that generates nothing."""
        for _ in self:
            pass
        return self.completion

    async def aresult(self) -> Completion | None:
        """The same in asyncio."""
        async for _ in self:
            pass
        return self.completion

    def embedding(self, *, normalize: bool = True) -> NDArray[np.float32]:
        """What a request for a hidden state gave, [hidden]; divided by its length if it is normalised."""
        assert self.hidden is not None
        state = self.hidden.astype(np.float32)
        return state / max(float(np.linalg.norm(state)), 1e-12) if normalize else state

    def cancel(self) -> None:
        """End it: before the next step, wherever it is. What came before can be read. Twice does no harm."""
        if not self.cancelled and self.finish_reason is None:
            self.cancelled = True
            self._engine.cancel(self)

    # Numbers -------------------------------------------------------------------------------------------------

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Those of the prompt, if they are asked for, and once all of them are there."""
        return self._scores if self._scores is not None and self._scored >= len(self._scores) else None

    @property
    def state(self) -> str:
        """waiting, prefill, decode or finished."""
        if self.finish_reason is not None:
            return "finished"
        if not self.sequence.running:
            return "decode" if self._ids else "waiting"  # who was preempted does not notice
        return "decode" if self._ids or self.sequence.in_flight else "prefill"

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """Tokens of the prompt that were submitted to the device, and all of them."""
        sequence, total = self.sequence.sequence, self.sequence.prompt_tokens
        if self._ids or self.finish_reason is not None:
            return total if self.started else 0, total
        return (0 if sequence is None else min(sequence.length, total)), total

    @property
    def prompt_seconds(self) -> float:
        """How long its prompt was read, or is being read."""
        if not self.started:
            return 0.0
        return (self.first if self._ids or self._ended else time.perf_counter()) - self.started

    @property
    def waits_for_features(self) -> bool:
        """Are its pictures being read, so that it has no rows yet?"""
        return self.sequence.images is not None and not self.sequence.images.features

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompt, cached = self.sequence.prompt_tokens, self.sequence.cached_tokens or 0
        seen = sum(len(image.positions) for image in self.request.images)
        return Usage(prompt, len(self._ids), cached, self.drafted, self.accepted, seen)

    @property
    def timing(self) -> Timing:
        """Seconds in the queue, until the first token, and for the others."""
        if not self.started:
            until = self._ended or time.perf_counter()
            return Timing(queue_seconds=until - self.submitted_at if self.submitted_at else 0.0)
        decoded = max(0, len(self._ids) - 1)
        return Timing(self.first - self.started, self.last - self.first, decoded, self.started - self.submitted_at)

    @property
    def info(self) -> SequenceInfo:
        """What it does now."""
        usage, request = self.usage, self.request
        return SequenceInfo(
            id=self.id,
            state=self.state,
            prompt_tokens=usage.prompt_tokens,
            prompt_done=self.prompt_progress[0],
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            max_tokens=request.max_tokens,
            priority=request.priority,
            seconds=time.perf_counter() - self.submitted_at,
            request=request,
        )

    # What the engine does ------------------------------------------------------------------------------------

    def take_token(self, token: int, logprob: TokenLogprob | None) -> bool:
        """One more token. True: a stop string or the last of its lines came, and it is over."""
        self._ids.append(token)
        if self._logprobs is not None and logprob is not None:
            self._logprobs.append(logprob)
        if self._late_text:
            self._items.append((None, token, logprob))
            if not self._event.is_set():  # whoever waits clears it, and then looks for items
                self._event.set()
            return False
        text = "" if self._text is None else self._text.push(token)
        if text:
            self._texts.append(text)
        self._items.append((text, token, logprob))
        if not self._event.is_set():
            self._event.set()
        if self._text is not None and self._text.stopped:
            self.stop_match, self.stop_logprob = self._text.stop_match, None  # whatever came after it in the same step
            return True
        return self._is_late(text)

    def _is_late(self, text: str = "") -> bool:
        """Has it a line end, and taken longer than it may?"""
        seconds = self.request.lines.seconds
        if seconds is None:
            return False
        self._has_line_end = self._has_line_end or "\n" in text
        return self._has_line_end and self.last - self.first > seconds

    def take_output(self, result: StepResult, rows: OutputRows) -> None:
        """The hidden state of its last token, or logits of some."""
        if self.request.output == "hidden":
            assert result.hidden is not None
            (self.hidden,) = result.hidden[rows.places]
            return
        assert result.logits is not None
        logits, first = result.logits[rows.places], self.request.first_row
        logits = logits[max(0, first - rows.position) :]
        at = max(first, rows.position)
        if self.request.take_logits is not None:
            self.request.take_logits(at, logits)
            return
        if self.logits is None:
            self.logits = np.empty((self.sequence.prompt_tokens - first, logits.shape[1]), np.float32)
        self.logits[at - first : at - first + len(logits)] = logits

    def scores_of(self, first: int, rows: int) -> RowScores | None:
        """What rows of it, from a position on, say of the prompt; None: nothing that is wanted."""
        if self._scores is None:
            return None
        tokens, top = self._scores.ids, self._scores.top_ids.shape[1]
        begin, end = max(self._scored, first + 1), min(len(tokens), first + rows + 1)
        return RowScores(begin - first - 1, tokens[begin:end], top) if begin < end else None

    def take_scores(self, result: StepResult, rows: OutputRows) -> None:
        """Log probabilities of its prompt, of the tokens after some rows."""
        assert result.scores is not None
        assert self._scores is not None
        reports = result.scores[rows.places]
        self._scores.set(rows.position + 1, reports)
        self._scored = rows.position + 1 + len(reports)

    def draw(self, result: StepResult, rows: OutputRows) -> tuple[int, TokenLogprob | None]:
        """Its next token, where the host samples."""
        assert self._host_sampler is not None
        assert result.logits is not None
        (logits,) = result.logits[rows.places]
        dry = {} if self._dry is None else self._dry.penalties
        return self._host_sampler.draw(logits, self.sequence.tokens, self.next_settings(), dry)

    def take_mask(self, mask: Mask) -> str | None:
        """Its next token can be sampled, or nothing can follow: then the reason why it ends."""
        state = self.sequence
        state.mask_pending = False
        if mask.error is not None:
            return "error"
        if len(state.tokens) > state.prompt_tokens:  # the first is often there already, and says nothing of the others
            self.mask_seconds = max(mask.seconds, 0.8 * (self.mask_seconds or 0.0))
        if mask.settings is None:
            return "stop"
        if not state.remaining:
            return "length"
        self.masked = mask.settings
        return None

    def next_settings(self) -> SamplerSettings:
        """How its next token is sampled."""
        if self.constraint is None:
            return self.unmasked_settings()
        assert self.masked is not None  # it stays where the sequence is preempted
        return self.masked

    def unmasked_settings(self) -> SamplerSettings:
        """The same without the mask of its constraint."""
        return self._settings_after(self.sequence.in_flight, self._dry)

    def _settings_after(self, more: int, dry: Dry | None) -> SamplerSettings:
        """Those of the token after so many more than are known, which DRY knows."""
        least, state, settings = self.request.min_tokens, self.sequence, self.settings
        if least and len(state.tokens) - state.prompt_tokens + more < least:
            settings = self.early_settings
        if dry is None or self._host_sampler is not None or not dry.penalties:
            return settings
        biases = dict(settings.bias)
        for token, penalty in dry.penalties.items():
            biases[token] = biases.get(token, 0.0) - penalty
        return settings._replace(bias=tuple(sorted(biases.items())))

    @property
    def can_draft(self) -> bool:
        """Can drafts of its next tokens be verified?"""
        forkable = self.constraint is None or isinstance(self.constraint, ForkableConstraint)
        return self.request.generates and self._host_sampler is None and forkable

    def draft(self, drafts: Sequence[int]) -> int:
        """Make `drafted_settings`: how tokens are sampled after these drafts. How many of them can be accepted.

        A draft that the constraint does not allow cannot be, nor one that ends the text.
        """
        self.drafted_settings, dry = [], None if self._dry is None else copy(self._dry)
        constraint = self.constraint.fork() if isinstance(self.constraint, ForkableConstraint) else None
        until = time.perf_counter() + _DRAFT_SECONDS
        for i, token in enumerate(drafts, 1):
            if token in self.request.stop_ids:
                break
            if dry is not None:
                dry.accept(token)
            settings = self._settings_after(i, dry)
            if settings.penalizes:
                settings = settings._replace(recent=tuple(drafts[:i]))
            if constraint is not None:
                mask = _mask_after(constraint, token)
                if mask is None or time.perf_counter() > until:
                    break
                settings = settings._replace(mask=mask)
            self.drafted_settings.append(settings)
        return len(self.drafted_settings)

    def accept_draft(self, i: int) -> None:
        """Draft i came, and the text goes on."""
        if self.constraint is not None:
            self.constraint.accept(self.sequence.tokens[-1])
            self.masked = self.drafted_settings[i]

    def note_token(self, token: int) -> None:
        """A token is known, before its text is made: what is asked for next depends on it."""
        if self._dry is not None:
            self._dry.accept(token)

    def _dropped(self) -> tuple[int, bytes]:
        """How many of the last tokens a stop string touches, and the bytes of them that come before it.

        Tokens that came after it in the same step are dropped, too.
        """
        if self._text is None:
            return 0, b""
        cut, tokens = self._text.cut_bytes, 0
        later = len(self.sequence.tokens) - self.sequence.prompt_tokens - len(self._ids) if self._text.stopped else 0
        while cut > 0 and tokens < len(self._ids):  # a broken character is shorter than U+FFFD, which stands for it
            tokens += 1
            raw = self._text.bytes_of(self._ids[-tokens])
            if len(raw) > cut:
                return later + tokens, raw[: len(raw) - cut]
            cut -= len(raw)
        return later + tokens, b""

    def stop_reason(self) -> str:
        """Why it ends where a stop id, a stop string or a line ends it. A form that is not complete is cut."""
        if (self._text is not None and self._text.outdented) or self._is_late():
            return "length"
        try:
            return "stop" if self.constraint is None or self.constraint.is_complete(*self._dropped()) else "length"
        except Exception:  # of this request alone: nobody says that it is complete
            return "length"

    def note_start(self) -> int:
        """The first of its rows are submitted. Tokens of the prompt, where this is new."""
        if self.started:
            return 0
        self.started = self.first = self.last = time.perf_counter()
        return self.sequence.prompt_tokens

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """The end. An error is raised after what came before it is read; None: it is raised elsewhere."""
        if self._late_text:
            assert self._text is not None
            self._texts = [self._text.text_of(self._ids)]
        elif self._text is not None and reason != "error" and (text := self._text.finish()):
            self._texts.append(text)
            self._items.append((text, None, None))
        self._ended = time.perf_counter()
        if reason != "error" and self.submitted_at and self.request.generates:
            completion = Completion("".join(self._texts))
            completion.ids, completion.logprobs, completion.finish_reason = self._ids, self._logprobs, reason
            completion.prompt_ids = self.sequence.tokens[: self.sequence.prompt_tokens]
            completion.timing, completion.chat = self.timing, self.request.chat
            self.completion = completion
        self._error, self._traceback = error, error.__traceback__ if error is not None else None
        self.finish_reason = reason
        self.sequence.owner = None  # which refers to this
        self._event.set()
        self._over.set()

    def release(self) -> None:
        """A thread that waits looks again."""
        self._event.set()


def _mask_after(constraint: Constraint, token: int) -> bytes | None:
    """What may come after one more token; None: it may not come, or the text is complete with it."""
    try:
        return None if constraint.accept(token) is False else constraint.mask()
    except Exception:  # whoever samples without drafts is told
        return None


def wake(handles: Iterable[Handle]) -> None:
    """Tasks that wait for these handles go on: one call for each event loop, however many handles there are."""
    loops: dict[Any, list[asyncio.Future[None]]] = {}
    for handle in handles:
        waiters = handle.waiters.copy()
        if handle.finish_reason is not None and handle.end_waiter is not None:
            waiters.append(handle.end_waiter)
        for waiter in waiters:
            loops.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, waiters in loops.items():
        try:
            loop.call_soon_threadsafe(_set_all, waiters)
        except RuntimeError:  # the event loop is closed: nobody waits any more
            continue


def _set_all(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
