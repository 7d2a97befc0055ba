"""`Engine`: runs the requests of one model together. Requests come from any thread; one thread at a time steps.

A turn waits for the oldest step on its way, takes its tokens, submits the next step, and then makes text of the tokens:
the device does not wait for text. Up to `Runner.steps_ahead` steps are on their way (`StepCore`).

Who steps: the engine's own thread, as long as there are several requests or one that was submitted with `submit`. A
single caller of `generate` or `stream` steps the engine itself, while it reads: no token changes threads.

A sequence with a constraint is left out of steps until its mask is there (`MaskQueue`). If nothing but masks is on its
way, the turn waits for one, or until `_masks.wake` is called.

Locks, in the order in which they are taken:
- `_step_lock`: who has it steps. It is held while a token is awaited. `_driver` is the thread that is inside a turn: a
  signal handler runs in the thread that it interrupts, which may be this one.
- `Runner.lock` covers the pool, the prefix cache, the scheduler and what is submitted. Nobody waits under it.
- `Inbox.lock` covers which requests there are, and whether the thread runs.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ..errors import ContextSizeError, DeviceError, InputError, QueueFullError, UnavailableError
from ..graph.batch import PAGE
from ..runtime.pages import pages_for
from ..runtime.prefix_cache import PrefixCache
from ..runtime.runner import U32, Runner, bucket
from ..text import Tokenizer
from .completion import TokenLogprob
from .counters import Counters
from .handle import Handle, wake
from .inbox import Inbox
from .mask_queue import MaskQueue
from .masks import Mask
from .recovery import failed_handles
from .request import EngineOptions, EngineStats, Request, SequenceInfo
from .scheduler import DoesNotFitError, Scheduler, SchedulerLimits, SequenceState
from .step_core import InFlightStep, StepCore

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()

Confirmed = list[tuple[Handle, int | None, TokenLogprob | None]]


class Engine:
    """Runs the requests of one model together."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.options = tokenizer, EngineOptions()
        self.lost: DeviceError | None = None
        self._runner = runner
        self._core = StepCore(runner)
        self._cache = PrefixCache(runner.pool)
        self._scheduler = Scheduler(runner.pool, self._cache, self._limits(), runner.share, runner.free)
        self._scheduler.preempted = self._core.forget
        runner.reclaim = self._cache.reclaim
        self._step_lock = threading.RLock()  # reentrant for a signal that comes between taking it and `_driver`
        self._driver = 0  # the thread that is inside a turn
        self._inbox = Inbox()
        self._masks = MaskQueue(runner.config.vocabulary)
        self._counters = Counters()
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count()
        self._growth_error: BaseException | None = None
        self._closed = self._draining = False
        _engines.add(self)

    # Limits --------------------------------------------------------------------------------------------------

    def _limits(self) -> SchedulerLimits:
        runner, options = self._runner, self.options
        rows, outputs = runner.max_tokens, min(runner.max_outputs, runner.max_tokens)
        running = outputs if options.parallel is None else min(options.parallel, outputs)
        chunk = options.chunk_tokens or rows
        return SchedulerLimits(rows, running, chunk, runner.fixed_chunk, options.share_prefixes, outputs)

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
        if active := self._inbox.all_active():
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

    def tokens_for(self, nbytes: int) -> int:
        """How many positions of the cache so many bytes hold."""
        return nbytes // self._runner.page_bytes * PAGE

    # Requests ------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        """Start a request; its handle is read from a thread or in asyncio. Does not wait for the device."""
        (handle,) = self.submit_all([request])
        return handle

    def submit_all(self, requests: Sequence[Request]) -> list[Handle]:
        """The same for several requests, which may share their first step: all of them, or none."""
        handles = [self._create_handle(request, pulled=False) for request in requests]
        try:
            self.start(*handles)
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return handles

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
        handle = Handle(self, request, next(self._numbers), pulled=pulled)
        generates = request.output in ("text", "tokens")
        handle.sequence.remaining = min(request.max_tokens, context - prompt + 1) if generates else 1
        return handle

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

    def start(self, *handles: Handle) -> None:
        """Submit handles that are not submitted yet."""
        inbox = self._inbox
        if all(handle.submitted_at or handle.finish_reason is not None for handle in handles):
            return
        with inbox.lock:
            for handle in handles:
                if handle.submitted_at or handle.finish_reason is not None:  # by another thread, meanwhile
                    continue
                self._check_open()
                self.check_queue()
                if not handle.pulled or inbox.active:
                    self._start_thread()  # which waits for the lock; before there is anything to undo
                inbox.add(handle)
        self._masks.wake()
        if inbox.cancels:
            self._process_cancels_if_idle()

    @property
    def max_requests(self) -> int | None:
        """How many requests run and wait at most; None: any number."""
        limit = self.options.queue
        return None if limit is None else self._scheduler.limits.max_running + limit

    def check_queue(self) -> None:
        """Is there a place for one more request?"""
        limit, running, active = self.options.queue, self._scheduler.limits.max_running, len(self._inbox.active)
        if limit is None or active < running + limit:
            return
        waiting = active - running
        after = max(1.0, self._counters.seconds_per_request * (waiting + 1) / running)
        full = f"{running} requests run and {waiting} wait, which is the most"
        raise QueueFullError(f"{full}; try again in about {after:.0f} s", waiting, limit, after)

    def cancel(self, handle: Handle) -> None:
        """End a request before the next step, or now if nobody steps."""
        if not handle.submitted_at:
            with self._inbox.lock:
                if not handle.submitted_at:
                    handle.finish("closed")
                    return
        self._inbox.cancels.append(handle)
        self._masks.wake()
        self._process_cancels_if_idle()

    def _process_cancels_if_idle(self) -> None:
        """Whoever steps attends to it otherwise, or looks again when it is done."""
        while self._inbox.cancels and self._step_lock.acquire(blocking=False):
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
            if self._inbox.cancels:  # by a thread that did not get the lock
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
        """With `Inbox.lock` held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            try:
                self._thread.start()
            except BaseException:
                self._thread = None
                raise

    def _run(self) -> None:
        inbox = self._inbox
        while True:
            with inbox.lock:
                if self._thread is not threading.current_thread():  # its start was interrupted
                    return
                left = next(iter(inbox.active.values()), None)
                if not inbox.cancels and (left is None or (len(inbox.active) == 1 and left.pulled)):
                    self._thread = None
                    if left is not None:
                        left.release()  # its reader steps
                    return
            with self._step_lock, suppress(BaseException):  # readers are told
                self._guarded(self._iterate)

    def _iterate(self) -> None:
        """Wait for the oldest step, submit the next one, make text of its tokens."""
        in_flight, ahead = self._core.in_flight, self._runner.steps_ahead
        self._process_control()
        self._dispatch_masks()
        if len(in_flight) < ahead:
            self._fill(ahead)
        if not in_flight:
            self._wait_for_masks()
            return
        step = in_flight[0]
        tokens = step.wait()
        in_flight.popleft()
        confirmed = self._confirm(step, tokens, time.perf_counter())
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
        inbox = self._inbox
        if inbox.new:
            with self._runner.lock:
                self._admit()
        ended = list[Handle]()
        while inbox.cancels:
            ended.append(inbox.cancels.popleft())
            self._finish(ended[-1], "closed")
        for handle in inbox.late():
            self._finish(handle, "deadline")
            ended.append(handle)
        if self._closed:
            for handle in inbox.all_active():
                self._finish(handle, "error", UnavailableError("this model is closed; load it again"))
                ended.append(handle)
        if ended:
            wake(ended)

    def _admit(self) -> None:
        """New requests wait for a place, with `Runner.lock` held. Those that are being submitted are waited for."""
        scheduler, inbox = self._scheduler, self._inbox
        if not scheduler.running and not scheduler.waiting:  # a pool that could not grow may do so now
            self._runner.pool.max_pages = self._max_pages()
        with inbox.lock:
            while inbox.new:
                handle = inbox.new.popleft()
                scheduler.add(handle.sequence)
                if handle.constraint is not None:
                    self._masks.add(handle)

    def _fill(self, ahead: int) -> None:
        """Submit steps until so many are on their way, or there is nothing to do until tokens come."""
        core = self._core
        with self._runner.lock:
            if self._inbox.new:
                self._admit()
            for mask in self._masks.ready():
                self._take_mask(mask)
            while len(core.in_flight) < ahead:
                try:
                    batch = self._scheduler.schedule()
                except DoesNotFitError as problem:
                    self._fail(problem.state.owner, self._growth_error or problem)
                    continue
                if batch is None:
                    return
                if not batch.decode:
                    for rows in batch.rows:
                        self._note_start(rows.state)
                try:
                    core.submit(batch)
                except (DeviceError, MemoryError) as problem:
                    if not core.could_not_grow(batch):
                        raise
                    self._growth_error = problem
                    continue
                self._scheduler.submitted(batch)

    def _note_start(self, state: SequenceState) -> None:
        handle: Handle = state.owner
        if not handle.started:
            handle.started = handle.first = handle.last = time.perf_counter()
            self._counters.prompt_tokens += state.prompt_tokens

    def _confirm(self, step: InFlightStep, tokens: U32 | None, now: float) -> Confirmed:
        """What a step gave is known. Sequences that end by their ids or their number end here."""
        confirmed: Confirmed = []
        if step.outputs:
            assert step.result is not None
            for state, rows in step.outputs.items():
                state.owner.take_output(step.result, rows)
        before = list[float]()  # when sequences had their last tokens
        for state, slot in step.sampled:
            handle: Handle = state.owner
            state.in_flight -= 1
            last, handle.last = handle.last, now
            is_first = len(state.tokens) == state.prompt_tokens
            if is_first:
                handle.first = now
            if handle.request.output in ("hidden", "logits"):
                self._stop(handle, "stop")
                confirmed.append((handle, None, None))
                continue
            assert tokens is not None
            token = int(tokens[slot])
            if token in handle.request.stop_ids:
                handle.stop_match = token
                self._stop(handle, self._stop_reason(handle))
                confirmed.append((handle, None, None))
                continue
            state.tokens.append(token)
            self._counters.generation_tokens += 1
            if not is_first:
                before.append(last)
            goes_on = True if handle.constraint is None else self._accepted(handle, token)
            if handle.finish_reason is not None:
                continue
            if goes_on is False:
                self._stop(handle, "stop")
            elif goes_on and not state.remaining and not state.in_flight:
                self._stop(handle, "length")
            logprob = None
            if handle.settings.logprobs is not None and step.tokens is not None:
                report = step.tokens.logprobs(slot)
                logprob = TokenLogprob(token, *report) if report is not None else None
            confirmed.append((handle, token, logprob))
        self._counters.observe_gaps(now, before)
        return confirmed

    # Masks ---------------------------------------------------------------------------------------------------

    def _accepted(self, handle: Handle, token: int) -> bool | None:
        """Does the text go on after this token? None: its mask will say."""
        assert handle.constraint is not None
        state, handle.masked = handle.sequence, None
        try:
            goes_on = handle.constraint.accept(token)
        except Exception as problem:  # of this request alone
            self._fail(handle, problem)
            return False
        if goes_on is False or (goes_on and not state.remaining):
            return goes_on
        state.mask_pending = True
        if not self._masks.in_place(handle, self._inbox.active):
            self._masks.add(handle)
            return goes_on
        mask = self._masks.compute(handle)
        if mask.error is None and (mask.settings is None or not state.remaining):
            return mask.settings is not None
        self._take_mask(mask)
        return True

    def _dispatch_masks(self) -> None:
        if self._masks:
            for mask in self._masks.dispatch(self._inbox.active):
                self._take_mask(mask)

    def _take_mask(self, mask: Mask) -> None:
        """The next token of a sequence can be sampled, or its constraint ends it."""
        handle = self._inbox.active.get(mask.number)
        if handle is None:  # it is over
            return
        state = handle.sequence
        state.mask_pending = False
        if mask.error is not None:
            self._fail(handle, mask.error)
            return
        if len(state.tokens) > state.prompt_tokens:  # the first is often there already, and says nothing of the others
            handle.mask_seconds = max(mask.seconds, 0.8 * (handle.mask_seconds or 0.0))
        if mask.settings is not None and state.remaining:
            handle.masked = mask.settings
            return
        self._finish(handle, "stop" if mask.settings is None else "length")
        wake([handle])

    def _wait_for_masks(self) -> None:
        """Nothing is on its way but masks: until one is there, or there is something else to do."""
        inbox = self._inbox
        until = inbox.seconds_to_deadline()
        for mask in self._masks.wait(until, lambda: inbox.new or inbox.cancels or self._closed):
            self._take_mask(mask)

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
                self._stop(handle, self._stop_reason(handle))
            if handle.ending is not None:
                self._finish(handle, handle.ending)
            awaited = awaited or handle.awaited
        if awaited:
            wake(handle for handle, _, _ in confirmed)

    # Ends ----------------------------------------------------------------------------------------------------

    def _stop(self, handle: Handle, reason: str, *, keep: bool = True) -> None:
        """Its sequence leaves the batch, and what is on its way for it is not wanted. Its text may not be made yet.

        Pages stay for others to begin with, unless they are not to be kept.
        """
        if handle.ending is None:
            with self._runner.lock:
                if self._inbox.new:  # it may be among them
                    self._admit()
                self._core.forget(handle.sequence)
                self._scheduler.finish(handle.sequence, keep)
        handle.ending = reason

    def _fail(self, handle: Handle, error: BaseException) -> None:
        self._finish(handle, "error", error)
        wake([handle])

    def _finish(self, handle: Handle, reason: str, error: BaseException | None = None) -> None:
        """The end of a request that is not over yet: count it, and tell its reader, who finds it counted."""
        if handle.id not in self._inbox.active:
            return
        self._stop(handle, reason, keep=error is None)
        with self._inbox.lock:
            self._counters.finish(handle.timing, reason)
            if handle.finish_reason is None:
                if error is None:
                    handle.finish(reason)
                else:
                    handle.fail(error)
            self._masks.drop(handle)
            if self._inbox.remove(handle):
                self._masks.release()
                # What was submitted last is not wanted any more: its states and tracebacks refer to much.
                self._core.release()
                self._growth_error = None

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
        with self._inbox.lock:
            self.lost = self.lost or DeviceError(f"the engine failed ({problem!r}); close this model and load it again")
            failed = self._inbox.all_active()
            self._inbox.new.clear()
            self._finish_all(failed, self.lost)
        wake(failed)

    def _finish_all(self, handles: Sequence[Handle], error: BaseException) -> None:
        """Of sequences that are not in the batch any more."""
        for handle in handles:
            handle.ending = "error"
            self._finish(handle, "error", error)

    def _recover(self, problem: BaseException, raising: Handle | None) -> None:
        inbox, interrupted = self._inbox, not isinstance(problem, Exception)
        with self._runner.lock:
            self._core.clear()
            if isinstance(problem, DeviceError) and not self._runner.usable:
                self.lost = DeviceError(str(problem))  # without what its traceback refers to
            active = inbox.all_active()
            failed: Sequence[Handle] = active
            if self.lost is None:
                failed = failed_handles(active, raising, self._scheduler.waiting, inbox.new, self._masks, interrupted)
            for handle in failed:
                if handle.sequence.sequence is not None:
                    self._runner.free(handle.sequence.sequence)
                    handle.sequence.sequence = None
            with inbox.lock:
                for handle in failed:
                    if handle in inbox.new:
                        inbox.new.remove(handle)
            self._scheduler.forget([handle.sequence for handle in failed])
            self._cache.clear()
        error = problem
        if interrupted:  # Ctrl-C is for the thread that got it
            error = UnavailableError("the thread that ran the steps of this request was interrupted; ask again")
        self._finish_all(failed, error)
        if raising is not None and raising in failed:
            raising.fail(None)
        wake(failed)

    def drain(self, timeout: float | None = None) -> bool:
        """No more requests; wait for those that there are. False: time is over, and some are left."""
        with self._inbox.lock:
            self._draining = True
        return self._inbox.wait_until_idle(timeout)

    async def adrain(self, timeout: float | None = None) -> bool:
        """The same in asyncio. In a thread of its own: others may be taken for long."""
        own = ThreadPoolExecutor(1, "drain")
        try:
            return await asyncio.get_running_loop().run_in_executor(own, self.drain, timeout)
        finally:
            own.shutdown(wait=False)

    def close(self) -> None:
        """End all requests with an error, and let go of the cache. Waits for the token and masks that are awaited."""
        with self._inbox.lock:
            self._closed = True
        self._masks.wake()
        if self.in_step:
            return  # a signal handler: whoever steps looks again
        with self._step_lock:
            self._guarded(self._let_go)
        thread = self._thread
        if thread is not None:
            thread.join()
        self._masks.threads.join()

    def _let_go(self) -> None:
        self._process_control()
        with self._runner.lock:
            self._cache.clear()
            self._core.close()

    # Numbers -------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """What it does and did."""
        active = len(self._inbox.all_active())  # before: whoever has its lock may be about to take the runner's
        with self._runner.lock:
            pool, cache, scheduler, counters = self._runner.pool, self._cache, self._scheduler, self._counters
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
                prompt_tokens=counters.prompt_tokens,
                generation_tokens=counters.generation_tokens,
                prompt_seconds=counters.prompt_seconds,
                decode_seconds=counters.decode_seconds,
                finished=dict(counters.finished),
                preemptions=scheduler.preemptions,
                steps=self._core.steps,
                rows=self._core.rows,
                token_gaps=counters.token_gaps.copy(),
                options=self.options,
            )

    def sequences(self) -> list[SequenceInfo]:
        """The requests that are not over."""
        now = time.perf_counter()
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
            for handle in self._inbox.all_active()
        ]


if hasattr(os, "register_at_fork"):  # the threads of engines are not in the child
    os.register_at_fork(after_in_child=_engines.clear)


@atexit.register
def _end_threads() -> None:
    """A thread inside the GPU's library while the interpreter goes away would take the process with it."""
    for engine in list(_engines):
        if engine.has_thread or engine._masks.threads.has_threads:
            engine.close()
