"""`Engine`: steps the batch of all requests. Requests come from any thread; one thread at a time steps.

A turn of the loop waits for the oldest step on its way, takes its tokens, submits the next step, and then makes text of
the tokens: the device does not wait for text. Up to `Runner.steps_ahead` steps are on their way.

Who steps: the engine's own thread, as long as there are several requests or one that was submitted with `submit`. A
single caller of `generate` or `stream` steps the engine itself, while it reads: no token changes threads.

Constraints: whoever steps computes masks that are known to be quick, and those of a single caller. Threads of `Masks`
compute the others. A sequence is left out of steps until its mask is there. A constraint is handed over after the text
of the last token was made, which may end the request and ask it for the last time: two threads never use it at once. If
nothing but masks is on its way, the turn waits for one, or until `_wake` is called.

Locks, in the order in which they are taken:
- `_step_lock`: who has it steps. It is held while a token is awaited. `_driver` is the thread that is inside a turn: a
  signal handler runs in the thread that it interrupts, which may be this one.
- `Runner.lock` covers the pool, the prefix cache, the scheduler and what is submitted. Nobody waits under it.
- `_lock` covers which requests there are, and whether the thread runs.
"""

from __future__ import annotations

import asyncio
import atexit
import heapq
import itertools
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import is_not

from ..errors import ContextSizeError, DeviceError, InputError, QueueFullError, UnavailableError
from ..graph.batch import PAGE
from ..runtime.pages import KvSequence, pages_for
from ..runtime.prefix_cache import PrefixCache
from ..runtime.runner import U32, DecodeBatch, OutputKind, Runner, SequenceChunk, StepResult, Tokens, bucket
from ..runtime.sampler_settings import SamplerSettings
from ..text import Tokenizer
from .completion import TokenLogprob
from .handle import Handle, wake
from .histogram import Histogram
from .masks import IN_PLACE_SECONDS, Mask, Masks, computed
from .request import EngineOptions, EngineStats, Request, SequenceInfo
from .scheduler import Batch, DoesNotFitError, Rows, Scheduler, SchedulerLimits, SequenceState


@dataclass(eq=False, slots=True)
class InFlightStep:
    """A step on its way: the sequences that it runs, and those that get a token or a hidden state, with their slots."""

    states: list[SequenceState]
    sampled: list[tuple[SequenceState, int]]
    tokens: Tokens | None
    result: StepResult | None = None
    outputs: dict[SequenceState, int] | None = None  # places among the step's outputs, where states come back

    def wait(self) -> U32 | None:
        """Until the step is run. Its tokens by sequence slot, if it gives any."""
        if self.tokens is not None:
            return self.tokens.wait()
        assert self.result is not None
        if self.outputs is not None:
            assert self.result.hidden is not None
        self.result.wait()
        return None


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()

# Seconds from a token to the next, for counting them.
_GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

_RETRY_SECONDS = 0.001  # where nothing says when there are pages again

Confirmed = list[tuple[Handle, int | None, TokenLogprob | None]]


class Engine:
    """Runs the requests of one model together."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.options = tokenizer, EngineOptions()
        self.lost: DeviceError | None = None
        self._runner = runner
        self._cache = PrefixCache(runner.pool)
        self._scheduler = Scheduler(runner.pool, self._cache, self._limits(), runner.share, runner.free)
        self._scheduler.preempted = _weak(self._forget)
        runner.reclaim = self._cache.reclaim
        self._step_lock = threading.RLock()  # reentrant for a signal that comes between taking it and `_driver`
        self._driver = 0  # the thread that is inside a turn
        self._lock = threading.RLock()  # reentrant: a signal handler may close the model
        self._idle = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count()
        self._active: dict[int, Handle] = {}
        self._new: deque[Handle] = deque()
        self._cancels: deque[Handle] = deque()
        self._deadlines: list[tuple[float, int]] = []  # with ids; a heap
        self._in_flight: deque[InFlightStep] = deque()
        self._decode: DecodeBatch | None = None
        self._members: list[KvSequence] = []  # of the decode batch
        self._steady: tuple[Batch | None, list[SequenceState], list[tuple[SequenceState, int]]] = (None, [], [])
        self._settings: list[SamplerSettings] = []
        self._masks = Masks()
        self._unmasked: deque[Handle] = deque()  # whose masks are to be computed
        self._masking: set[int] = set()  # ids of those whose masks are being computed
        self._waits_for_masks = False
        self._growth_error: BaseException | None = None
        self._closed = self._draining = False
        self._finished: Counter[str] = Counter()
        self._prompt_tokens = self._generation_tokens = self._steps = self._rows = 0
        self._prompt_seconds = self._decode_seconds = 0.0
        self._token_gaps = Histogram(_GAPS)
        _engines.add(self)

    # Limits --------------------------------------------------------------------------------------------------

    def _limits(self) -> SchedulerLimits:
        runner, options = self._runner, self.options
        rows, outputs = runner.max_tokens, min(runner.max_outputs, runner.max_tokens)
        running = outputs if options.parallel is None else min(options.parallel, outputs)
        return SchedulerLimits(rows, running, options.chunk_tokens or rows, runner.fixed_chunk, options.share_prefixes)

    def _max_pages(self) -> int:
        """Of the pool, if the device has the memory."""
        tokens = self.options.cache_tokens
        return self._runner.max_pages if tokens is None else min(pages_for(tokens), self._runner.max_pages)

    @property
    def context(self) -> int:
        """The most tokens of a sequence. A pool that is smaller must hold the position after them, too."""
        context, pool = self._runner.config.context, self._max_pages() * PAGE
        return context if context <= pool else pool - 1

    def configure(self, options: EngineOptions) -> None:
        """Other limits. Only while there are no requests."""
        for name in ("parallel", "cache_tokens", "chunk_tokens"):
            value = getattr(options, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be None or a whole number of at least 1, got {value!r}")
        if options.queue is not None and options.queue < 0:
            raise InputError(f"queue must be None or a whole number of at least 0, got {options.queue!r}")
        if active := self._all_active():
            raise InputError(f"the engine has {len(active)} requests; configure it before the first one")
        with self._step_lock, self._runner.lock:
            self._driver = threading.get_ident()
            try:
                if options.cache_tokens is not None:
                    self._runner.reserve_pages(pages_for(options.cache_tokens))
                self.options = options
                self._scheduler.limits = limits = self._limits()
                self._runner.pool.max_pages = self._max_pages()
                self._runner.decode_rows = bucket(limits.max_running)
            finally:
                self._driver = 0

    @contextmanager
    def visit(self) -> Iterator[None]:
        """A sequence that somebody steps beside the engine: requests that find no pages meanwhile wait."""
        self._visit(1)
        try:
            yield
        finally:
            self._visit(-1)

    def _visit(self, more: int) -> None:
        with self._runner.lock:
            self._scheduler.visitors += more

    def tokens_for(self, nbytes: int) -> int:
        """How many positions of the cache so many bytes hold."""
        return nbytes // self._runner.page_bytes * PAGE

    # Requests ------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        """Start a request; its handle is read from a thread or in asyncio. Does not wait for the device."""
        made = self._create_handle(request, pulled=False)
        self.start(made)
        return made

    def submit_lazy(self, request: Request) -> Handle:
        """A request that starts when it is first read, by a thread, which may step the engine."""
        return self._create_handle(request, pulled=True)

    def _create_handle(self, request: Request, *, pulled: bool) -> Handle:
        self._check_open()
        prompt, context = len(request.prompt_ids), self.context
        if not prompt:
            raise InputError("the prompt is empty; give at least one token")
        if prompt > context:
            holds = f"the prompt has {prompt:,} tokens, the context holds {context:,}"
            raise ContextSizeError(f"{holds}. Shorten the prompt, or give the cache more memory", prompt, context)
        self._check(request)
        made = Handle(self, request, next(self._numbers), pulled=pulled)
        made.sequence.remaining = 1 if request.output == "hidden" else min(request.max_tokens, context - prompt + 1)
        return made

    def _check(self, request: Request) -> None:
        """Before it shares steps with others: what a step refuses would end them, too."""
        vocabulary = self._runner.config.vocabulary
        self._runner.check_ids(request.prompt_ids)
        if request.stop_ids:
            self._runner.check_ids(list(request.stop_ids))
        request.sampling.check_vocabulary(vocabulary)
        if request.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, got {request.max_tokens}")

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("this model is closed; load it again")
        if self._draining:
            raise UnavailableError("this model takes no more requests: it is about to end")
        if self.lost is not None:
            raise self.lost

    def start(self, handle: Handle) -> None:
        """Submit a handle that is not submitted yet."""
        if handle.submitted_at or handle.finish_reason is not None:
            return
        with self._lock:
            if handle.submitted_at or handle.finish_reason is not None:  # by another thread, meanwhile
                return
            self._check_open()
            self.check_queue()
            if not handle.pulled or self._active:
                self._start_thread()  # which waits for `_lock`; before there is anything to undo
            handle.submitted_at = time.monotonic()
            if handle.request.timeout is not None:
                if len(self._deadlines) > 64 + 2 * len(self._active):  # most of them are over
                    self._deadlines = sorted(each for each in self._deadlines if each[1] in self._active)
                heapq.heappush(self._deadlines, (handle.submitted_at + handle.request.timeout, handle.id))
            self._new.append(handle)
            self._active[handle.id] = handle
            if handle.cancelled:  # during one of the lines above
                self._cancels.append(handle)
        self._wake()
        if self._cancels:
            self._process_cancels_if_idle()

    @property
    def max_requests(self) -> int | None:
        """How many requests run and wait at most; None: any number."""
        limit = self.options.queue
        return None if limit is None else self._scheduler.limits.max_running + limit

    def check_queue(self) -> None:
        """Is there a place for one more request?"""
        limit, running = self.options.queue, self._scheduler.limits.max_running
        if limit is None or len(self._active) < running + limit:
            return
        waiting = len(self._active) - running
        each = (self._prompt_seconds + self._decode_seconds) / max(1, self._finished.total())
        after = max(1.0, each * (waiting + 1) / running)
        given = f"{running} requests run and {waiting} wait, which is the most"
        raise QueueFullError(f"{given}; try again in about {after:.0f} s", waiting, limit, after)

    def cancel(self, handle: Handle) -> None:
        """End a request before the next step, or now if nobody steps."""
        if not handle.submitted_at:
            with self._lock:
                if not handle.submitted_at:
                    handle.finish("closed")
                    return
        self._cancels.append(handle)
        self._wake()
        self._process_cancels_if_idle()

    def _process_cancels_if_idle(self) -> None:
        """Whoever steps attends to it otherwise, or looks again when it is done."""
        while self._cancels and self._step_lock.acquire(blocking=False):
            try:
                if self.in_step:
                    return
                self._guarded(self._process_control)
            finally:
                self._step_lock.release()

    # Who steps -----------------------------------------------------------------------------------------------

    @property
    def has_thread(self) -> bool:
        """Does the engine's own thread step?"""
        return self._thread is not None

    @property
    def in_step(self) -> bool:
        """Does the calling thread step?"""
        return self._driver == threading.get_ident()

    def drive_or_wait(self, handle: Handle) -> None:
        """Step once, or wait until the engine's thread has something for a handle. The reader looks again then."""
        if self.in_step:
            raise InputError(
                "this thread is in the middle of a step of this model: a signal handler or a constraint asked for "
                "text. Have it set a flag, and generate where the flag is read"
            )
        if not handle.submitted_at:
            self.start(handle)
        if self._thread is not None:
            handle.wait_in_thread()
            return
        try:
            with self._step_lock:
                if self._thread is None and handle.finish_reason is None:
                    self._guarded(self._iterate, handle)
        finally:
            if self._cancels:  # by a thread that did not get the lock
                self._process_cancels_if_idle()

    def _guarded(self, work: Callable[[], None], raising: Handle | None = None) -> None:
        """Do a part of a turn, with `_step_lock` held. After an error, nothing is left half done."""
        self._driver = threading.get_ident()
        try:
            work()
        except BaseException as problem:
            self._reset(problem, raising)
            raise
        finally:
            self._driver = 0

    def _start_thread(self) -> None:
        """With `_lock` held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            try:
                self._thread.start()
            except BaseException:
                self._thread = None
                raise

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._thread is not threading.current_thread():  # its start was interrupted
                    return
                left = next(iter(self._active.values()), None)
                if not self._cancels and (left is None or (len(self._active) == 1 and left.pulled)):
                    self._thread = None
                    if left is not None:
                        left.release()  # its reader steps
                    return
            with self._step_lock, suppress(BaseException):  # readers are told
                self._guarded(self._iterate)

    def _iterate(self) -> None:
        """Wait for the oldest step, submit the next one, make text of its tokens."""
        in_flight, ahead = self._in_flight, self._runner.steps_ahead
        self._process_control()
        self._dispatch_masks()
        if len(in_flight) < ahead:
            self._fill(ahead)
        if not in_flight:
            self._wait_for_masks()
            if self._scheduler.visitors and not self._masking and not self._unmasked:  # their pages may be missing
                time.sleep(_RETRY_SECONDS)
            return
        flight = in_flight[0]
        tokens = flight.wait()
        in_flight.popleft()
        confirmed = self._confirm(flight, tokens, time.monotonic())
        try:
            if ahead > 1:
                # Before text is made. Nothing is gained by that where one step at a time is on its way.
                self._fill(ahead)
        finally:
            self._deliver(confirmed)  # a sequence that goes on after an error has these tokens
        self._dispatch_masks()

    # Steps ---------------------------------------------------------------------------------------------------

    def _process_control(self) -> None:
        """Requests that are new, cancelled or late."""
        if self._new:
            with self._runner.lock:
                self._admit()
        ended = list[Handle]()
        while self._cancels:
            ended.append(self._cancels.popleft())
            self._end(ended[-1], "closed")
        deadlines = self._deadlines
        if deadlines and deadlines[0][0] <= time.monotonic():
            for handle in self._late():
                self._end(handle, "deadline")
                ended.append(handle)
        if self._closed:
            error = UnavailableError("this model is closed; load it again")
            for handle in self._all_active():
                self._stop(handle.sequence, keep=False)
                self._over(handle, error)
                ended.append(handle)
        if ended:
            wake(ended)

    def _admit(self) -> None:
        """New requests wait for a place, with `Runner.lock` held. Those that are being submitted are waited for."""
        scheduler = self._scheduler
        if not scheduler.running and not scheduler.waiting:  # a pool that could not grow may do so now
            self._runner.pool.max_pages = self._max_pages()
        with self._lock:
            while self._new:
                handle = self._new.popleft()
                scheduler.add(handle.sequence)
                if handle.constraint is not None:
                    self._unmasked.append(handle)

    def _all_active(self) -> list[Handle]:
        with self._lock:
            return list(self._active.values())

    def _late(self) -> list[Handle]:
        found, now = [], time.monotonic()
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                handle = self._active.get(heapq.heappop(self._deadlines)[1])
                if handle is not None:
                    found.append(handle)
        return found

    def _fill(self, ahead: int) -> None:
        with self._runner.lock:
            if self._new:
                self._admit()
            for mask in self._masks.taken():
                self._take_mask(mask)
            while len(self._in_flight) < ahead:
                try:
                    batch = self._scheduler.schedule()
                except DoesNotFitError as problem:
                    self._fail(problem.state, self._growth_error or problem)
                    continue
                if batch is None:
                    return
                try:
                    flight = self._submitted(batch)
                except (DeviceError, MemoryError) as problem:
                    if not self._could_not_grow(batch):
                        raise
                    self._growth_error = problem
                    continue
                self._scheduler.submitted(batch)
                self._in_flight.append(flight)

    def _could_not_grow(self, batch: Batch) -> bool:
        """Is the pool as large as it can be, which is now known? Then its pages must do."""
        pool, context = self._runner.pool, self._runner.config.context
        wanted = []
        for rows in batch.rows:
            sequence = _sequence(rows.state)
            # A decode batch reserves the position after the next, too.
            wanted.append((sequence, min(2, context - sequence.length) if batch.decode else len(rows.ids or (0,))))
        if not self._runner.usable or pool.missing(wanted) == 0 or pool.max_pages == pool.pages:
            return False
        pool.max_pages = pool.pages
        return True

    def _submitted(self, batch: Batch) -> InFlightStep:
        if batch is self._steady[0]:  # nothing changed since the last step
            assert self._decode is not None
            tokens = self._decode.step()
            self._count_step(len(batch.rows))
            return InFlightStep(*self._steady[1:], tokens)
        states = [rows.state for rows in batch.rows]
        sampled = [(rows.state, _sequence(rows.state).slot) for rows in batch.rows if rows.samples]
        if batch.decode:
            tokens = self._decode_step(states)
            self._count_step(len(states))
            fixed = all(
                settings is state.owner.settings for settings, state in zip(self._settings, states, strict=True)
            )
            self._steady = (batch if fixed else None, states, sampled)
            return InFlightStep(states, sampled, tokens)
        for state in states:
            self._note_start(state)
        parts = [self._part(rows) for rows in batch.rows]
        result = self._runner.step(parts)
        self._count_step(sum(part.rows for part in parts))
        outputs = None
        if any(part.gives == "hidden" for part in parts):
            giving = [state for state, part in zip(states, parts, strict=True) if part.gives != "nothing"]
            outputs = {state: i for i, state in enumerate(giving)}
        return InFlightStep(states, sampled, result.tokens, result, outputs)

    def _count_step(self, rows: int) -> None:
        self._steps += 1
        self._rows += rows

    def _note_start(self, state: SequenceState) -> None:
        handle: Handle = state.owner
        if not handle.started:
            handle.started = handle.first = handle.last = time.monotonic()
            self._prompt_tokens += state.prompt_tokens

    def _decode_step(self, states: list[SequenceState]) -> Tokens:
        settings = [_settings(state) for state in states]
        sequences = [_sequence(state) for state in states]
        batch = self._decode
        if batch is None or sequences != self._members or any(map(is_not, settings, self._settings)):
            self._members, self._settings = [], settings
            if batch is None:
                batch = self._decode = self._runner.decode_batch(sequences, settings)
            else:
                batch.replace(sequences, settings)
            self._members = sequences
        return batch.step()

    def _part(self, rows: Rows) -> SequenceChunk:
        state, sequence = rows.state, _sequence(rows.state)
        if not rows.samples:
            return SequenceChunk(sequence, rows.ids, "nothing")
        handle: Handle = state.owner
        gives: OutputKind = "token" if handle.request.output == "text" else "hidden"
        settings = _settings(state)
        if settings.penalizes and not sequence.has_history:
            self._runner.set_history(sequence, state.tokens)
        return SequenceChunk(sequence, rows.ids, gives, settings)

    def _confirm(self, flight: InFlightStep, tokens: U32 | None, now: float) -> Confirmed:
        """The tokens of a step are known. Sequences that end by their ids or their number end here."""
        found: Confirmed = []
        before, after_it = 0.0, 0  # most sequences have their last tokens from the same step: these are counted at once
        for state, slot in flight.sampled:
            handle: Handle = state.owner
            state.in_flight -= 1
            last, handle.last = handle.last, now
            is_first = len(state.tokens) == state.prompt_tokens
            if is_first:
                handle.first = now
            if handle.request.output == "hidden":
                self._take_hidden(flight, state)
                found.append((handle, None, None))
                continue
            assert tokens is not None
            token = int(tokens[slot])
            if token in handle.request.stop_ids:
                handle.ending, handle.stop_match = self._stop_reason(handle), token
                self._stop(state)
                found.append((handle, None, None))
                continue
            state.tokens.append(token)
            self._generation_tokens += 1
            if not is_first:
                if last != before and after_it:
                    self._token_gaps.observe(now - before, after_it)
                    after_it = 0
                before, after_it = last, after_it + 1
            goes_on = True if handle.constraint is None else self._accepted(handle, token)
            if handle.finish_reason is not None:
                continue
            if goes_on is False:
                handle.ending = "stop"
                self._stop(state)
            elif goes_on and not state.remaining and not state.in_flight:
                handle.ending = "length"
                self._stop(state)
            logprob = None
            if handle.settings.logprobs is not None and flight.tokens is not None:
                report = flight.tokens.logprobs(slot)
                logprob = TokenLogprob(token, *report) if report is not None else None
            found.append((handle, token, logprob))
        if after_it:
            self._token_gaps.observe(now - before, after_it)
        return found

    def _take_hidden(self, flight: InFlightStep, state: SequenceState) -> None:
        assert flight.result is not None
        assert flight.result.hidden is not None
        assert flight.outputs is not None
        handle: Handle = state.owner
        handle.hidden, handle.ending = flight.result.hidden[flight.outputs[state]], "stop"
        self._stop(state)

    def _accepted(self, handle: Handle, token: int) -> bool | None:
        """Does the text go on after this token? None: its mask will say."""
        assert handle.constraint is not None
        state, handle.masked = handle.sequence, None
        try:
            goes_on = handle.constraint.accept(token)
        except Exception as problem:  # of this request alone
            self._fail(state, problem)
            return False
        if goes_on is False or (goes_on and not state.remaining):
            return goes_on
        state.mask_pending = True
        if not self._masks_in_place(handle):
            self._unmasked.append(handle)
            return goes_on
        mask = self._computed(handle)
        if mask.error is None and (mask.settings is None or not state.remaining):
            return mask.settings is not None
        self._take_mask(mask)
        return True

    # Masks ---------------------------------------------------------------------------------------------------

    def _masks_in_place(self, handle: Handle) -> bool:
        """Is its next mask not worth another thread?"""
        if handle.pulled and len(self._active) == 1:
            return True  # nobody else waits
        return handle.mask_seconds is not None and handle.mask_seconds <= IN_PLACE_SECONDS

    def _computed(self, handle: Handle) -> Mask:
        assert handle.constraint is not None
        return computed(handle.id, handle.constraint, _plain_settings(handle), self._runner.config.vocabulary)

    def _dispatch_masks(self) -> None:
        """Have masks computed, of requests that are not over."""
        while self._unmasked:
            handle = self._unmasked.popleft()
            if handle.id not in self._active:
                continue
            if self._masks_in_place(handle):
                self._take_mask(self._computed(handle))
                continue
            assert handle.constraint is not None
            settings, vocabulary = _plain_settings(handle), self._runner.config.vocabulary
            try:
                self._masks.submit(handle.id, handle.constraint, settings, vocabulary)
            except RuntimeError as problem:  # no thread can be started
                self._fail(handle.sequence, problem)
                continue
            self._masking.add(handle.id)

    def _take_mask(self, mask: Mask) -> None:
        """The next token of a sequence can be sampled, or its constraint ends it."""
        self._masking.discard(mask.number)
        handle = self._active.get(mask.number)
        if handle is None:  # it is over
            return
        state = handle.sequence
        state.mask_pending = False
        if mask.error is not None:
            self._fail(state, mask.error)
            return
        if len(state.tokens) > state.prompt_tokens:  # the first is often there already, and says nothing of the others
            handle.mask_seconds = max(mask.seconds, 0.8 * (handle.mask_seconds or 0.0))
        if mask.settings is not None and state.remaining:
            handle.masked = mask.settings
            return
        handle.ending = "stop" if mask.settings is None else "length"
        self._stop(state)
        self._over(handle)
        wake([handle])

    def _mask_pending(self, handle: Handle) -> bool:
        """Will there be a mask for it?"""
        return handle.id in self._masking or handle in self._unmasked

    def _wait_for_masks(self) -> None:
        """Nothing is on its way but masks: until one is there, or there is something else to do."""
        if not self._masking or self._unmasked:  # those that came during this turn are handed over in the next
            return
        self._waits_for_masks = True
        try:
            if self._new or self._cancels or self._closed:
                return
            deadlines = self._deadlines  # which another thread may replace
            until = deadlines[0][0] - time.monotonic() if deadlines else None
            found = self._masks.wait(None if until is None else max(0.0, until))
        finally:
            self._waits_for_masks = False
        for mask in found:
            self._take_mask(mask)

    def _wake(self) -> None:
        """Whoever waits for masks looks again."""
        if self._waits_for_masks:
            self._masks.wake()

    # Ends of texts -------------------------------------------------------------------------------------------

    def _stop_reason(self, handle: Handle) -> str:
        """Why a generation ends that a stop id or a stop string ends. A form that is not complete is cut."""
        constraint = handle.constraint
        try:
            return "stop" if constraint is None or constraint.is_complete(*handle.dropped()) else "length"
        except Exception:  # of this request alone: nobody says that it is complete
            return "length"

    def _deliver(self, confirmed: Confirmed) -> None:
        """Text for the readers."""
        awaited = False
        for handle, token, logprob in confirmed:
            if handle.finish_reason is not None:
                continue
            if token is not None and handle.take_token(token, logprob):
                if handle.ending is None:
                    self._stop(handle.sequence)
                handle.ending = self._stop_reason(handle)
            if handle.ending is not None:
                self._over(handle)
            awaited = awaited or handle.awaited
        if awaited:
            wake(handle for handle, _, _ in confirmed)

    # Ends ----------------------------------------------------------------------------------------------------

    def _end(self, handle: Handle, reason: str) -> None:
        """From outside: what is on its way is not wanted any more."""
        if handle.id in self._active:
            handle.ending = reason
            self._stop(handle.sequence)
            self._over(handle)

    def _stop(self, state: SequenceState, *, keep: bool = True) -> None:
        """A sequence leaves the batch. Its pages stay for others to begin with."""
        with self._runner.lock:
            if self._new:  # it may be among them
                self._admit()
            self._forget(state)
            self._scheduler.finish(state, keep)

    def _forget(self, state: SequenceState) -> None:
        """Nobody waits for its rows any more; nor for steps that have no others."""
        for flight in list(self._in_flight):
            if state in flight.states:
                flight.states = [each for each in flight.states if each is not state]
                flight.sampled = [each for each in flight.sampled if each[0] is not state]
                if not flight.states:
                    self._in_flight.remove(flight)

    def _fail(self, state: SequenceState, error: BaseException) -> None:
        handle: Handle = state.owner
        self._stop(state, keep=False)
        self._over(handle, error)
        wake([handle])

    def _over(self, handle: Handle, error: BaseException | None = None) -> None:
        """Count it, and tell its reader, who finds it counted."""
        with self._lock:
            timing = handle.timing
            self._prompt_seconds += timing.prompt_seconds
            self._decode_seconds += timing.decode_seconds
            reason = handle.ending if error is None else "error"
            assert reason is not None
            self._finished[reason] += 1
            if handle.finish_reason is None:
                if error is None:
                    handle.finish(reason)
                else:
                    handle.fail(error)
            self._active.pop(handle.id, None)
            if handle.id in self._masking:
                self._masking.discard(handle.id)
                self._masks.drop(handle.id)
            if not self._active:
                self._unmasked.clear()
                self._masks.release()
                # What was submitted last is not wanted any more: its states and tracebacks refer to much.
                self._members, self._steady, self._growth_error = [], (None, [], []), None
                self._idle.notify_all()

    def _reset(self, problem: BaseException, raising: Handle | None = None) -> None:
        """A step failed, or was interrupted: nobody knows what is in the cache. What ran ends with the error.

        `raising` is the handle whose reader gets the exception as it is. Requests that wait go on, unless the device is
        lost.
        """
        try:
            self._recover(problem, raising)
        except Exception as second:
            self._give_up(second)
        except BaseException:  # interrupted once more
            self._recover(problem, raising)
            raise

    def _give_up(self, problem: Exception) -> None:
        """Nobody knows which sequences and pages there are: no request can run any more."""
        with self._lock:
            self.lost = self.lost or DeviceError(f"the engine failed ({problem!r}); close this model and load it again")
            failed = list(self._active.values())
            self._new.clear()
            for handle in failed:
                self._over(handle, self.lost)
        wake(failed)

    def _recover(self, problem: BaseException, raising: Handle | None) -> None:
        with self._runner.lock:
            self._in_flight.clear()
            self._members, self._steady = [], (None, [], [])
            scheduler, waiting = self._scheduler, set(self._scheduler.waiting)
            if isinstance(problem, DeviceError) and not self._runner.usable:
                self.lost = DeviceError(str(problem))  # without what its traceback refers to
            active, interrupted = self._all_active(), not isinstance(problem, Exception)
            failed = [
                handle
                for handle in active
                if self.lost is not None
                or handle is raising
                or (handle.sequence not in waiting and handle not in self._new)
                # Its mask may have been on its way from one thread to the other.
                or (
                    handle.sequence.mask_pending
                    and handle not in self._new
                    and (interrupted or not self._mask_pending(handle))
                )
            ]
            failed = failed or active  # a turn that fails with nothing on its way would fail again
            for handle in failed:
                if handle.sequence.sequence is not None:
                    self._runner.free(handle.sequence.sequence)
                    handle.sequence.sequence = None
            with self._lock:
                for handle in failed:
                    if handle in self._new:
                        self._new.remove(handle)
            scheduler.forget([handle.sequence for handle in failed])
            self._cache.clear()
        error = problem
        if interrupted:  # Ctrl-C is for the thread that got it
            error = UnavailableError("the thread that ran the steps of this request was interrupted; ask again")
        for handle in failed:
            self._over(handle, error)
            if handle is raising:
                handle.fail(None)
        wake(failed)

    def drain(self, timeout: float | None = None) -> bool:
        """No more requests; wait for those that there are. False: time is over, and some are left."""
        with self._idle:
            self._draining = True
            return self._idle.wait_for(lambda: not self._active, timeout)

    async def adrain(self, timeout: float | None = None) -> bool:
        """The same in asyncio. In a thread of its own: others may be taken for long."""
        own = ThreadPoolExecutor(1, "drain")
        try:
            return await asyncio.get_running_loop().run_in_executor(own, self.drain, timeout)
        finally:
            own.shutdown(wait=False)

    def close(self) -> None:
        """End all requests with an error, and let go of the cache. Waits for the token and masks that are awaited."""
        with self._lock:
            self._closed = True
        self._wake()
        if self.in_step:
            return  # a signal handler: whoever steps looks again
        with self._step_lock:
            self._guarded(self._let_go)
        thread = self._thread
        if thread is not None:
            thread.join()
        self._masks.join()

    def _let_go(self) -> None:
        self._process_control()
        with self._runner.lock:
            self._cache.clear()
            if self._decode is not None:
                self._decode.close()
                self._decode = None

    # Numbers -------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """What it does and did."""
        active = len(self._all_active())  # before: whoever has `_lock` may be about to take the runner's
        with self._runner.lock:
            pool, cache, scheduler = self._runner.pool, self._cache, self._scheduler
            idle = len(pool.idle)
            return EngineStats(
                running=len(scheduler.running),
                waiting=max(0, active - len(scheduler.running)),
                pages=pool.pages,
                max_pages=pool.max_pages,
                pages_used=pool.pages - pool.free - idle,
                pages_cached=idle,
                prefix_queries=cache.queries,
                prefix_hits=cache.hits,
                evicted_pages=cache.evicted,
                prompt_tokens=self._prompt_tokens,
                generation_tokens=self._generation_tokens,
                prompt_seconds=self._prompt_seconds,
                decode_seconds=self._decode_seconds,
                finished=dict(self._finished),
                preemptions=scheduler.preemptions,
                steps=self._steps,
                rows=self._rows,
                token_gaps=self._token_gaps.copy(),
                options=self.options,
            )

    def sequences(self) -> list[SequenceInfo]:
        """The requests that are not over."""
        now = time.monotonic()
        return [
            SequenceInfo(
                handle.id,
                handle.state,
                handle.usage.prompt_tokens,
                handle.prompt_progress[0],
                handle.usage.cached_tokens,
                handle.usage.completion_tokens,
                handle.request.max_tokens,
                handle.request.priority,
                now - handle.submitted_at,
                handle.request,
            )
            for handle in self._all_active()
        ]


def _sequence(state: SequenceState) -> KvSequence:
    assert state.sequence is not None
    return state.sequence


def _settings(state: SequenceState) -> SamplerSettings:
    """How the next token of a sequence is sampled."""
    handle: Handle = state.owner
    if handle.constraint is None:
        return _plain_settings(handle)
    assert handle.masked is not None  # it stays where the sequence is preempted
    return handle.masked


def _plain_settings(handle: Handle) -> SamplerSettings:
    """The same without a mask."""
    request, state = handle.request, handle.sequence
    if request.min_tokens and len(state.tokens) - state.prompt_tokens + state.in_flight < request.min_tokens:
        return handle.early_settings
    return handle.settings


def _weak(method: Callable[[SequenceState], None]) -> Callable[[SequenceState], None]:
    """Calls a method of an object that is there still, and does not keep it."""
    known = weakref.WeakMethod(method)

    def call(state: SequenceState) -> None:
        found = known()
        if found is not None:
            found(state)

    return call


if hasattr(os, "register_at_fork"):  # the threads of engines are not in the child
    os.register_at_fork(after_in_child=_engines.clear)


@atexit.register
def _end_threads() -> None:
    """A thread inside the GPU's library while the interpreter goes away would take the process with it."""
    for engine in list(_engines):
        if engine.has_thread or engine._masks.has_threads:
            engine.close()
