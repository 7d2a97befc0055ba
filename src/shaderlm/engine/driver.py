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

import atexit
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from ..errors import ContextSizeError, DeviceError, InputError, QueueFullError, UnavailableError
from ..graph.batch import PAGE
from ..graph.sampling import MAX_LOGPROBS
from ..models.config import ImageRows
from ..runtime.pages import pages_for
from ..runtime.prefix_cache import PrefixCache
from ..runtime.runner import U32, Runner, bucket
from ..text import Tokenizer
from .completion import TokenLogprob
from .counters import Counters
from .drafts import Drafter, Drafts
from .handle import Handle, wake
from .inbox import Inbox
from .mask_queue import MaskQueue
from .masks import Mask
from .recovery import Recovery
from .request import EngineOptions, EngineStats, Request, SequenceInfo
from .scheduler import DoesNotFitError, Scheduler, SequenceState
from .step_core import DraftedRows, InFlightStep, StepCore
from .vision import Vision, check_placeholders, placeholder_ids

if TYPE_CHECKING:
    from ..runtime.disk_cache import DiskCache
    from .disk_pages import DiskPages
    from .page_transfer import PageTransfer

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()

# A token of a request, if there is one, and why the request ends with it, if it does.
Confirmed = tuple[Handle, int | None, TokenLogprob | None, str | None]

# Of requests that have features of pictures and no place yet. Further pictures are not read before.
WAITING_FEATURE_BYTES = 1 << 30
_FEW = 16  # tokens of a step: more are taken out of their array at once


class Engine:
    """Runs the requests of one model together."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.options, self._runner = tokenizer, EngineOptions(), runner
        self._core, self._cache = (
            StepCore(runner),
            PrefixCache(runner.pool, runner.states if runner.config.recurrent else None),
        )
        limits = self._core.limits(self.options)
        self._scheduler = Scheduler(runner.pool, self._cache, limits, runner.share, runner.free)
        self._scheduler.snapshot, self._scheduler.release_state = runner.snapshot, runner.release_state
        self._scheduler.reserve_spares, self._scheduler.reserve_state = runner.reserve_spares, runner.reserve_state
        runner.evict_snapshot = self._cache.evict_snapshot
        self._scheduler.preempted = self._core.forget
        runner.reclaim = self._cache.reclaim
        runner.pool.max_pages = limits.max_pages
        self._step_lock = threading.RLock()  # reentrant for a signal that comes between taking it and `_driver`
        self._driver = 0  # the thread that is inside a turn
        self._inbox = Inbox()
        self._masks = MaskQueue(runner.config.vocabulary)
        self._recovery = Recovery(runner, self._core, self._scheduler, self._inbox, self._masks)
        self._counters = Counters()
        self._drafts: Drafts | None = None
        self._thread: threading.Thread | None = None
        self._thread_of_parent = False
        self._disk: DiskPages | None = None
        self._vision: Vision | None = None
        self._placeholders = placeholder_ids(tokenizer)
        self._encoding: deque[Handle] = deque()  # requests with pictures whose features are not all known
        self._numbers = itertools.count()
        _engines.add(self)

    # Limits --------------------------------------------------------------------------------------------------

    @property
    def context(self) -> int:
        """The most tokens of a sequence. A pool that is smaller must hold the position after them, too."""
        context, pool = self._runner.config.context, self._scheduler.limits.max_pages * PAGE
        return context if context <= pool else pool - 1

    def configure(self, options: EngineOptions) -> None:
        """Other limits. Only while there are no requests."""
        if active := self._inbox.all_active():
            raise InputError(f"the engine has {len(active)} requests; configure it before the first one")
        with self._step_lock, self._runner.lock:
            self._driver = threading.get_ident()
            try:
                if options.cache_tokens is not None:
                    self._runner.reserve_pages(pages_for(options.cache_tokens))
                self.options = options
                self._scheduler.limits = limits = self._core.limits(options)
                self._runner.pool.max_pages = limits.max_pages
                self._runner.decode_rows = bucket(limits.max_running)
            finally:
                self._driver = 0

    def use_disk(self, disk: DiskCache, keys: Sequence[str] = ()) -> None:
        """Keep pages of the prefix cache in a folder, too. Only while there are no requests.

        keys: of the clients that requests name by their places in it. Requests of other clients leave nothing there.
        """
        if self._disk is not None:
            raise InputError(f"this model has a cache on disk already, in {self._disk.disk.folder}")
        if active := self._inbox.all_active():
            raise InputError(f"the engine has {len(active)} requests; give it a folder before the first one")
        from .disk_pages import DiskPages

        self._disk = DiskPages(self._runner, self._cache, disk, keys)
        self._scheduler.on_cached = self._save_pages

    def warm_up(self) -> None:
        """Compile whatever steps, pictures and drafts may want, for servers. Takes seconds."""
        self._runner.warm_up()
        if self._vision is not None:
            self._vision.runner.warm_up()
        if self._drafts is not None:
            self._drafts.drafter.warm_up()

    @property
    def drafter(self) -> Drafter | None:
        """What drafts for it."""
        return None if self._drafts is None else self._drafts.drafter

    def use_drafts(self, drafts: Drafts | None) -> None:
        """Draft tokens from now on, or none. Only while there are no requests."""
        if active := self._inbox.all_active():
            raise InputError(f"the engine has {len(active)} requests; say how it drafts before the first one")
        self._drafts = drafts

    @property
    def disk(self) -> DiskCache | None:
        """The cache on disk, if there is one."""
        return None if self._disk is None else self._disk.disk

    @property
    def vision(self) -> Vision | None:
        """The part that reads images, if there is one."""
        return self._vision

    @property
    def image_rows(self) -> ImageRows | None:
        """What its model does with rows of images."""
        return self._runner.config.images

    def use_vision(self, vision: Vision) -> None:
        """Read images from now on. Only while there are no requests."""
        if active := self._inbox.all_active():
            raise InputError(f"the engine has {len(active)} requests; say how it reads images before the first one")
        self._vision = vision

    def clear_cache(self) -> None:
        """Forget what is cached of prompts, but not what is on disk. Only while there are no requests."""
        if active := self._inbox.all_active():
            raise InputError(f"the engine has {len(active)} requests; empty its cache when they are over")
        with self._runner.lock:
            self._cache.clear()

    @property
    def pages(self) -> PageTransfer:
        """The contents of cached pages, for who keeps them elsewhere."""
        from .page_transfer import PageTransfer

        return PageTransfer(self._runner, self._cache)

    def forget(self, ids: Sequence[int], client: str | None) -> None:
        """Let go of what is cached of these tokens, on disk too."""
        with self._runner.lock:
            self._cache.forget(ids, client)
        if self._disk is not None:
            self._disk.forget(ids, client)

    def tokens_for(self, nbytes: int) -> int:
        """How many positions of the cache so many bytes hold."""
        return nbytes // max(1, self._runner.page_bytes) * PAGE

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
        """Checks it before it shares steps with others: what a step refuses would end them, too."""
        self._inbox.check_open()
        if self._runner.forked:
            self._runner.check_device()
        if self._thread_of_parent:
            raise UnavailableError(
                "this process is a fork, made while another thread generated with this model; load it again here"
            )
        prompt, context = len(request.prompt_ids), self.context
        if not prompt:
            raise InputError("the prompt is empty; give at least one token")
        if prompt > context:
            holds = f"the prompt has {prompt:,} tokens, the context holds {context:,}"
            raise ContextSizeError(f"{holds}. Shorten the prompt, or give the cache more memory", prompt, context)
        self._runner.check_ids(request.prompt_ids)
        check_placeholders(request.prompt_ids, request.images, self._placeholders)
        self._check_images(request)
        if request.stop_ids:
            self._runner.check_ids(list(request.stop_ids))
        request.sampling.check_vocabulary(self._runner.config.vocabulary)
        if request.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, got {request.max_tokens}")
        if request.prompt_logprobs is not None and not 0 <= request.prompt_logprobs <= MAX_LOGPROBS:
            expected = f"None or a whole number in 0 … {MAX_LOGPROBS}"
            raise InputError(f"prompt_logprobs must be {expected}, got {request.prompt_logprobs}")
        handle = Handle(self, request, next(self._numbers), pulled=pulled)
        handle.sequence.remaining = min(request.max_tokens, context - prompt + 1) if request.generates else 1
        return handle

    def _check_images(self, request: Request) -> None:
        """Are there images that this engine cannot read?"""
        if not request.images:
            return
        if self._vision is None or self.image_rows is None:
            raise InputError("this model does not read images, or was loaded without the part that does")
        most = self._scheduler.limits.max_rows
        for image in request.images:
            if self.image_rows.sees_itself and len(image.positions) > most:
                raise InputError(f"a step has {most} rows; an image of {len(image.positions)} must be in one")

    def start(self, *handles: Handle) -> None:
        """Submit handles that are not submitted yet."""
        inbox = self._inbox
        if all(handle.submitted_at or handle.finish_reason is not None for handle in handles):
            return
        with inbox.lock:
            for handle in handles:
                if handle.submitted_at or handle.finish_reason is not None:  # by another thread, meanwhile
                    continue
                inbox.check_open()
                self.check_queue()
                if not handle.pulled or inbox.active:
                    self._start_thread()  # which waits for the lock; before there is anything to undo
                inbox.add(handle)
        self._masks.wake()
        self._process_cancels_if_idle()

    @property
    def lost(self) -> DeviceError | None:
        """Why no request can run any more; None: they can."""
        return self._inbox.lost

    @property
    def max_requests(self) -> int | None:
        """How many requests run and wait at most; None: any number."""
        limit = self.options.queue
        return None if limit is None else self._scheduler.limits.max_running + limit

    def check_queue(self) -> None:
        """Is there a place for one more request?"""
        limit, running, active = self.max_requests, self._scheduler.limits.max_running, len(self._inbox.active)
        if limit is None or active < limit:
            return
        waiting = active - running
        after = max(1.0, self._counters.seconds_per_request * (waiting + 1) / running)
        full = f"{running} requests run and {waiting} wait, which is the most"
        raise QueueFullError(f"{full}; try again in about {after:.0f} s", waiting, limit - running, after)

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
            self._process_cancels_if_idle()  # of a thread that did not get the lock

    def _guarded(self, work: Callable[[], None], raising: Handle | None = None) -> None:
        """Do a part of a turn, with `_step_lock` held. After an error, nothing is left half done.

        `raising` is the handle whose reader gets the exception as it is.
        """
        self._driver = threading.get_ident()
        try:
            work()
        except BaseException as problem:
            self._recovery.recover(problem, raising, self._finish)
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
                first = next(iter(inbox.active.values()), None)
                if not inbox.cancels and (first is None or (len(inbox.active) == 1 and first.pulled)):
                    self._thread = None
                    if first is not None:
                        first.release()  # its reader steps
                    return
            with self._step_lock, suppress(BaseException):  # readers are told
                self._guarded(self._iterate)

    def _iterate(self) -> None:
        """One turn: wait for the oldest step, submit the next one, make text of its tokens."""
        inbox, in_flight = self._inbox, self._core.in_flight
        self._process_control()
        self._take_masks(self._masks.dispatch(inbox.active))
        self._fill()
        if encodes := self._may_encode():  # beside the step that was submitted
            self._encode_one()
            self._fill()
        if not in_flight and encodes and self._encoding:
            return
        if not in_flight:
            if self._drafts is not None:
                self._drafts.idle()
            until = inbox.seconds_to_deadline()
            woken = bool(inbox.restoring)
            work = lambda: inbox.new or inbox.cancels or inbox.closed  # noqa: E731
            self._take_masks(self._masks.wait(until, work, woken=woken))
            return
        step = in_flight[0]
        tokens = step.wait()
        in_flight.popleft()
        now = time.perf_counter()
        confirmed = self._confirm(step, tokens, now)
        if self._drafts is not None:
            self._drafts.observe(step, now)
        try:
            if self._runner.steps_ahead > 1:
                # Before text is made. Nothing is gained by that where one step at a time is on its way.
                self._fill()
        finally:
            self._deliver(confirmed)  # a sequence that goes on after an error has these tokens

    def _process_control(self) -> None:
        """Requests that are new, cancelled or late; all of them, and the cache, where the model is closed."""
        inbox = self._inbox
        if inbox.new:
            with self._runner.lock:
                self._admit()
        while inbox.cancels:
            self._finish([inbox.cancels.popleft()], "closed")
        if late := inbox.late():
            self._finish(late, "deadline")
        if inbox.closed:
            self._finish(inbox.all_active(), "error", UnavailableError("this model is closed; load it again"))
            with self._runner.lock:
                self._cache.clear()
                self._core.close()
            if self._disk is not None:
                self._disk.close()
            if self._vision is not None:
                self._vision.close()
            if self._drafts is not None:
                self._drafts.close()

    # Steps ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """New requests wait for a place, with `Runner.lock` held. Those that are being submitted are waited for."""
        scheduler, inbox = self._scheduler, self._inbox
        if not scheduler.running and not scheduler.waiting:  # a pool that could not grow may do so now
            self._runner.pool.max_pages = scheduler.limits.max_pages
        with inbox.lock:
            while inbox.new:
                handle = inbox.new.popleft()
                if self._is_restored_first(handle):
                    continue
                if handle.sequence.images is not None:
                    self._encoding.append(handle)
                    continue
                self._join(handle)

    def _join(self, handle: Handle) -> None:
        """A request may have rows from now on. With both locks held."""
        self._scheduler.add(handle.sequence)
        if handle.constraint is not None:
            self._masks.add(handle)

    @property
    def _are_features_many(self) -> bool:
        """Do requests without a place have as many as they may?"""
        groups = [state.images.features for state in self._scheduler.waiting if state.images is not None]
        groups += [tuple(handle.image_features) for handle in self._encoding]
        sizes = {id(each): each.nbytes for group in groups for each in group}  # requests share those that are known
        return sum(sizes.values()) >= WAITING_FEATURE_BYTES

    def _may_encode(self) -> bool:
        """Is there a picture to be read, and room for its features? Those who wait with theirs have a place first."""
        if not self._encoding:
            return False
        waits = any(state.images is not None for state in self._scheduler.waiting)
        return not (waits and self._are_features_many)

    def _encode_one(self) -> None:
        """The features of one picture; a request whose pictures are all known joins. An error is that of its request.

        One at a time: between two pictures the sequences that run have a step.
        """
        handle = self._encoding[0]
        images, features = handle.sequence.images, handle.image_features
        if images is None or handle.finish_reason is not None:
            self._encoding.popleft()
            return
        vision, request = self._vision, handle.request
        assert vision is not None
        client = None if self.options.share_prefixes else request.client
        try:
            features.append(vision.features(request.images[len(features)], client))
        except Exception as problem:  # of this request alone: those that run have nothing to do with it
            self._encoding.popleft()
            self._finish([handle], "error", problem)
            return
        if len(features) < len(request.images):
            if not self._are_features_many:
                self._encoding.rotate(-1)  # others have a picture each meanwhile
            return
        self._encoding.popleft()
        images.features = tuple(features)
        features.clear()
        with self._runner.lock, self._inbox.lock:
            if handle.finish_reason is None:
                self._join(handle)

    def _is_restored_first(self, handle: Handle) -> bool:
        """Is the prompt of a new request looked for on disk, once? It is new again afterwards. With both locks held."""
        state = handle.sequence
        if self._disk is None or handle.looked_up or not state.cached or state.images is not None:
            return False
        handle.looked_up = True
        self._inbox.restoring.add(handle.id)
        if not self._disk.restore(state.tokens, self._owner_of(state), lambda: self._restored(handle)):
            self._inbox.restoring.discard(handle.id)
            return False
        return True

    def _restored(self, handle: Handle) -> None:
        """What there was of its prompt is in the prefix cache. Called by another thread."""
        with self._inbox.lock:
            self._inbox.restoring.discard(handle.id)
            if handle.id in self._inbox.active:
                self._inbox.new.append(handle)
        self._masks.wake()

    def _save_pages(self, state: SequenceState, tokens: int) -> None:
        if self._disk is not None and state.images is None:  # files name pages by their tokens
            self._disk.save(state.tokens[:tokens], self._owner_of(state))

    def _owner_of(self, state: SequenceState) -> str | None:
        """Whose prefixes a request shares."""
        return None if self.options.share_prefixes else cast("str | None", state.client)

    @property
    def _ahead(self) -> int:
        """How many steps may be on their way. Where sequences draft, one: all have their rows in the same steps."""
        if self._drafts is not None and self._drafts.active:
            return 1
        return self._runner.steps_ahead_alone if self._scheduler.decodes_alone else self._runner.steps_ahead

    def _fill(self) -> None:
        """Submit steps until as many are on their way as may be, or there is nothing to do until tokens come."""
        core = self._core
        if len(core.in_flight) >= self._ahead:
            return
        if self._drafts is not None:  # a model may draft: nobody waits for it under the lock
            is_quick = lambda handle: self._masks.in_place(handle, self._inbox.active)  # noqa: E731
            self._drafts.choose(self._scheduler, is_quick, self._runner.ready_rows)
        with self._runner.lock:
            if self._inbox.new:
                self._admit()
            self._take_masks(self._masks.ready())
            while len(core.in_flight) < self._ahead:
                try:
                    batch = self._scheduler.schedule()
                except DoesNotFitError as problem:
                    self._finish([problem.state.owner], "error", core.growth_error or problem)
                    continue
                if batch is None:
                    return
                if not batch.decode:
                    self._counters.prompt_tokens += sum(rows.state.owner.note_start() for rows in batch.rows)
                if core.submit(batch):
                    self._scheduler.submitted(batch)

    def _confirm(self, step: InFlightStep, tokens: U32 | None, now: float) -> list[Confirmed]:
        """What a step gave is known. Sequences that end by their ids or their number leave the batch here."""
        confirmed: list[Confirmed] = []
        if step.outputs:
            assert step.result is not None
            for state, rows in step.outputs.items():
                if not state.host_sampled:
                    state.owner.take_output(step.result, rows)
        if step.scores:
            assert step.result is not None
            for state, rows in step.scores.items():
                state.owner.take_scores(step.result, rows)
        before = list[float]()  # when sequences had their last tokens
        words = None if tokens is None else tokens.tolist() if len(step.sampled) > _FEW else tokens
        for state, slot in step.sampled:
            state.in_flight -= 1
            if step.drafted and (drafted := step.drafted.get(state)) is not None:
                assert tokens is not None
                confirmed += self._confirm_drafted(step, state, drafted, tokens, now, before)
                continue
            token = int(words[slot]) if words is not None and state.owner.generates else None
            if (each := self._confirm_token(step, state, slot, token, now, before)) is not None:
                confirmed.append(each)
        self._counters.observe_gaps(now, before)
        return confirmed

    def _confirm_token(
        self, step: InFlightStep, state: SequenceState, slot: int, token: int | None, now: float, before: list[float]
    ) -> Confirmed | None:
        """The next token of a sequence is known; `slot` is its place in the step. None: it has ended with an error."""
        handle: Handle = state.owner
        last, handle.last = handle.last, now
        is_first = len(state.tokens) == state.prompt_tokens
        if is_first:
            handle.first = now
        logprob, reason = None, None
        if state.host_sampled:
            assert step.result is not None
            token, logprob = handle.draw(step.result, step.outputs[state])
        if token is None:
            reason = "stop"
        elif token in handle.stop_ids:
            handle.stop_match, reason = token, handle.stop_reason()
            if handle.settings.logprobs is not None:
                handle.stop_logprob = logprob if state.host_sampled else step.logprob(token, slot)
            token = None
        else:
            self._add_token(state, handle, token)
            if not is_first:
                before.append(last)
            if handle.constraint is None:
                reason = "length" if not state.remaining and not state.in_flight else None
            elif (mask := self._masks.accept(handle, token, self._inbox.active)) is not None:
                reason = handle.take_mask(mask)
                if reason == "error":
                    self._finish([handle], reason, mask.error)
                    return None
            if handle.settings.logprobs is not None and not state.host_sampled:
                logprob = step.logprob(token, slot)
        if reason is not None:
            self._leave(handle)
        return handle, token, logprob, reason

    def _add_token(self, state: SequenceState, handle: Handle, token: int) -> None:
        state.tokens.append(token)
        if state.needs_host_token:
            handle.note_token(token)
        self._counters.generation_tokens += 1

    def _confirm_drafted(
        self, step: InFlightStep, state: SequenceState, rows: DraftedRows, tokens: U32, now: float, before: list[float]
    ) -> Iterator[Confirmed]:
        """The drafts of a sequence that its rows drew, and the token after them. What else is in its cache is wrong."""
        assert self._drafts is not None
        handle: Handle = state.owner
        slots = (state.kv_sequence.slot, *rows.places)
        accepted = self._drafts.accepted(rows.drafts, [int(tokens[slot]) for slot in slots])
        self._counters.drafts += 1
        self._counters.drafted_tokens += len(rows.drafts)
        self._counters.accepted_tokens += accepted
        handle.drafted += len(rows.drafts)
        handle.accepted += accepted
        with self._runner.lock:
            self._runner.truncate(state.kv_sequence, len(state.tokens) + accepted)
            self._scheduler.verified(state)
        for i, (token, slot) in enumerate(zip(rows.drafts[:accepted], slots, strict=False)):
            self._add_token(state, handle, token)
            before.append(handle.last)
            handle.last = now
            handle.accept_draft(i)
            state.remaining -= 1
            yield handle, token, None if handle.settings.logprobs is None else step.logprob(token, slot), None
        last = slots[accepted]
        if (each := self._confirm_token(step, state, last, int(tokens[last]), now, before)) is not None:
            yield each
        self._drafts.drafter.verified(state, len(rows.drafts), accepted)

    def _deliver(self, confirmed: list[Confirmed]) -> None:
        """Text for the readers, and the end of those that are over."""
        awaited = False
        for handle, token, logprob, reason in confirmed:
            if handle.finish_reason is not None:
                continue
            if token is not None and handle.take_token(token, logprob):
                reason = handle.stop_reason()
            if reason is not None:
                self._end(handle, reason)
            awaited = awaited or handle.awaited
        if awaited:
            wake(handle for handle, _, _, _ in confirmed)

    def _take_masks(self, masks: Iterable[Mask]) -> None:
        """Sequences can go on, or end by their constraints."""
        for mask in masks:
            handle = self._inbox.active.get(mask.number)  # None: it is over
            if handle is not None and (reason := handle.take_mask(mask)) is not None:
                self._finish([handle], reason, mask.error)

    # Ends ----------------------------------------------------------------------------------------------------

    def _leave(self, handle: Handle, *, keep: bool = True) -> None:
        """Its sequence leaves the batch, and what is on its way for it is not wanted. Its text may not be made yet.

        Pages stay for others to begin with, unless they are not to be kept.
        """
        state = handle.sequence
        if state.over:
            return
        state.over = True
        with self._runner.lock:
            self._core.forget(state)
            self._scheduler.finish(state, keep)

    def _end(self, handle: Handle, reason: str, error: BaseException | None = None) -> None:
        """The end of a request that is not over yet: count it, and tell its reader, who finds it counted."""
        if handle.id not in self._inbox.active:
            return
        self._leave(handle, keep=reason != "error")
        with self._inbox.lock:
            self._counters.finish(handle.timing, reason)
            if handle.finish_reason is None:
                handle.finish(reason, error)
            self._masks.drop(handle)
            if self._drafts is not None:
                self._drafts.forget(handle.sequence)
            if self._inbox.remove(handle):
                self._masks.release()
                # What was submitted last is not wanted any more: its states and tracebacks refer to much.
                self._core.release()
                self._core.growth_error = None

    def _finish(self, handles: Sequence[Handle], reason: str, error: BaseException | None = None) -> None:
        """The end of requests; tasks that wait for them go on."""
        for handle in handles:
            self._end(handle, reason, error)
        wake(handles)

    def drain(self, timeout: float | None = None) -> bool:
        """No more requests; wait for those that there are. False: time is over, and some are left."""
        self._inbox.draining = True
        return self._inbox.wait_until_idle(timeout)

    async def adrain(self, timeout: float | None = None) -> bool:
        """The same in asyncio. In a thread of its own: others may be taken for long."""
        from asyncio import get_running_loop

        executor = ThreadPoolExecutor(1, "drain")
        try:
            return await get_running_loop().run_in_executor(executor, self.drain, timeout)
        finally:
            executor.shutdown(wait=False)

    def close(self) -> None:
        """End all requests with an error, and let go of the cache. Waits for the token and masks that are awaited."""
        if self._runner.forked or self._thread_of_parent:  # nobody gives back the locks that other threads had
            self._inbox.closed = True
            return
        if self._disk is not None and not self.in_step:
            self._disk.flush()
        with self._inbox.lock:
            self._inbox.closed = True
        self._masks.wake()
        if self.in_step:
            return  # a signal handler: whoever steps looks again
        with self._step_lock:
            self._guarded(self._process_control)
        if (thread := self._thread) is not None:
            thread.join()
        self._masks.join()

    # Numbers -------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """What it does and did."""
        active = len(self._inbox.all_active())  # before: whoever has its lock may be about to take the runner's
        with self._runner.lock:
            numbers = self._scheduler.numbers()
            return EngineStats(
                waiting=max(0, active - numbers["running"]),
                steps=self._core.steps,
                rows=self._core.rows,
                sequences=self._core.sequences,
                options=self.options,
                disk=None if self._disk is None else self._disk.disk.stats(),
                **numbers,
                **self._counters.numbers(),
            )

    def sequences(self) -> list[SequenceInfo]:
        """The requests that are not over."""
        return [handle.info for handle in self._inbox.all_active()]


def _after_fork() -> None:
    """In the child: the threads of engines are not there."""
    for engine in list(_engines):
        engine._thread_of_parent = engine.has_thread
    _engines.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _end_threads() -> None:
    """A thread inside the GPU's library while the interpreter goes away would take the process with it."""
    for engine in list(_engines):
        if engine.has_thread or engine._masks.has_threads or (engine._disk is not None and engine._disk.has_threads):
            engine.close()
