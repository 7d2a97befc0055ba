"""Decides what the next step holds: who joins, who leaves, and how many rows each sequence gets. Knows no device.

Sequences that decode have a row each in every step. Prompts take the rows that are left, in chunks, so that a long one
holds nobody up. Sequences start in the order of priority and arrival, and each begins after the longest prefix of its
tokens that is cached. A pool without free pages grows first, gives up cached pages next, and then the youngest sequence
is preempted: it loses its pages, waits, and is computed again later from the tokens that are known.

With a fixed chunk the rows of a sequence do not depend on its company: chunks of prompts end at multiples of it and run
alone, and what was generated before a preemption is run again row by row, beside decode rows, as it was the first time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import DeviceError
from ..graph.batch import PAGE
from ..runtime.image_rows import PromptImages
from ..runtime.pages import MAX_SEQUENCES, KvSequence, PagePool, pages_for
from ..runtime.prefix_cache import Match, PrefixCache, PrefixNode
from ..runtime.states import snapshot_ends


@dataclass(eq=False, slots=True)
class SequenceState:
    """One request as the scheduler sees it.

    `tokens` are known: those of the prompt and those that were sampled and came back. A sequence that runs has
    `sequence.length` rows submitted. `in_flight` tokens are being sampled: they are on the device, unknown.
    """

    number: int  # in order of arrival
    tokens: list[int]
    prompt_tokens: int
    remaining: int  # tokens that may still be sampled
    priority: int = 0
    cached: bool = True  # begin after what is in the prefix cache
    cache_on_finish: bool = True  # leave pages in it
    client: Hashable = None  # whose prefixes it shares
    contiguous: bool = False  # where it is alone, its pages are worth more than others' cached ones
    needs_host_token: bool = False  # a row can be made only when the token before it is known
    host_sampled: bool = False  # tokens are drawn on the host, from logits: the device does not have them
    mask_pending: bool = False  # no token can be sampled yet: its mask is being computed
    is_drafting: bool = False  # its next rows verify drafts: they are made when the token before them is known
    drafts: Sequence[int] = ()  # what may come after the known tokens, to be verified in the next step
    all_outputs: bool = False  # the rows of the prompt give something, not the last one alone
    first_output: int = 0  # the first of them
    over: bool = False  # it has left the batch, or never joins
    owner: Any = None
    sequence: KvSequence | None = None
    in_flight: int = 0
    on_device: bool = False  # the last token was sampled for this sequence, and is where a decode row finds it
    cached_tokens: int | None = None  # that were not computed when it first started
    published_tokens: int = 0  # tokens of the prompt whose pages are in the prefix cache
    saved_tokens: int = 0  # of whole pages that `Scheduler.on_cached` was told of
    last_published_node: PrefixNode | None = None  # the last of these pages there
    images: PromptImages | None = None  # of its prompt, where it has some
    snapshots: dict[int, int] = field(default_factory=dict)  # rows that the cache does not have, by their positions
    snapshot_ends: tuple[int, ...] = ()  # positions of its prompt where it leaves some

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: the smaller one."""
        return self.priority, self.number

    @property
    def cache_ids(self) -> Sequence[int]:
        """What a prefix cache compares: known tokens, and in place of those of images what the images are."""
        if self.images is None:
            return self.tokens
        return [*self.images.cache_ids, *self.tokens[self.prompt_tokens :]]

    @property
    def kv_sequence(self) -> KvSequence:
        """Its cache, while it runs."""
        assert self.sequence is not None
        return self.sequence

    @property
    def running(self) -> bool:
        """Does it have a cache?"""
        return self.sequence is not None

    @property
    def waits_for_token(self) -> bool:
        """Can its next row be made only when the token before it is known?"""
        return self.needs_host_token or self.is_drafting


class DoesNotFitError(DeviceError):
    """A sequence needs more pages than there are, with nobody left to make room for it."""

    def __init__(self, state: SequenceState, max_pages: int) -> None:
        holds = f"the cache holds {max_pages * PAGE:,} tokens of all sequences"
        needs = f"a text needs {len(state.tokens) + 1:,} and more"
        super().__init__(f"{holds}, {needs}. Ask for a shorter one, or give the cache more memory")
        self.state = state


@dataclass(eq=False, slots=True)
class Rows:
    """The next rows of a sequence. `ids` None: the token that was sampled last.

    Nothing changes them; where they are frozen, making them takes a microsecond for each row of each step.
    """

    state: SequenceState
    ids: Sequence[int] | None
    samples: bool  # the last row gives a token
    drafted: int = 0  # how many of the ids, the last ones, are drafts: then each row gives a token

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self.ids is None else len(self.ids)


@dataclass(frozen=True)
class Batch:
    """What a step holds. `decode`: one row of each, all of tokens that the device has."""

    rows: tuple[Rows, ...]
    decode: bool

    @property
    def has_prompt(self) -> bool:
        """Is a part of a prompt read? Otherwise all rows decode, or verify drafts."""
        return any(rows.count > 1 + rows.drafted for rows in self.rows)


@dataclass
class SchedulerLimits:
    """What a step may hold."""

    max_rows: int  # of a step
    max_running: int
    chunk: int  # rows of prompts in a step with decode rows
    fixed_chunk: int = 0  # 0: chunks end anywhere
    shares_prefixes: bool = False  # among all clients, in whole pages
    max_outputs: int = MAX_SEQUENCES  # rows of a step that give something; at least `max_running`
    max_decode: int = MAX_SEQUENCES  # rows of a step that decode or verify drafts; at least `max_running`
    max_pages: int = 1 << 31  # of the pool, if the device has the memory
    has_states: bool = False  # a sequence begins only where there is a snapshot of its state
    max_spares: int = 1 << 31  # states after rows that verify drafts, of all sequences


@dataclass
class Scheduler:
    """`add` takes requests, `schedule` says what runs next, `submitted` that it was, `finish` lets go.

    `share(pages, length, state)` makes a sequence that begins with these pages of the pool and, of a model with states,
    with a copy of this row of them. `free` gives one back. `snapshot` copies the state of a sequence to a row, and
    `release_state` gives it back. `reserve_spares` says for how many of so many drafts there is room for states, and
    `reserve_state` whether there is room for that of one sequence more.
    """

    pool: PagePool
    cache: PrefixCache
    limits: SchedulerLimits
    share: Callable[[Sequence[int], int, int | None], KvSequence]
    free: Callable[[KvSequence], None]
    waiting: list[SequenceState] = field(default_factory=list)  # the first goes first
    running: list[SequenceState] = field(default_factory=list)  # the oldest is first
    preempted: Callable[[SequenceState], None] = lambda state: None  # is told
    # Is told of whole pages in the prefix cache: of a prompt that is read, and of a sequence that is over.
    on_cached: Callable[[SequenceState, int], None] | None = None
    snapshot: Callable[[KvSequence], int | None] = lambda sequence: None
    release_state: Callable[[int], None] = lambda row: None
    reserve_spares: Callable[[KvSequence, int], int] = lambda sequence, count: count
    reserve_state: Callable[[], bool] = lambda: True
    preemptions: int = 0
    _steady: Batch | None = None  # all that run decode, nobody can start: the next step is the same
    _blocked: bool = False  # the first that waits does not fit, as long as nobody leaves
    _claimed: int = 0  # pages that the batch in the making takes
    _chunk_was_last: bool = False

    def numbers(self) -> dict[str, Any]:
        """What `EngineStats` says of sequences and their pages."""
        pool, cache = self.pool, self.cache
        return {
            "running": len(self.running),
            "preemptions": self.preemptions,
            "pages": pool.pages,
            "max_pages": pool.max_pages,
            "pages_used": pool.pages - pool.free - len(pool.idle),
            "pages_cached": len(pool.idle),
            "prefix_queries": cache.queries,
            "prefix_hits": cache.hits,
            "evicted_pages": cache.evicted,
        }

    # who is there ----------------------------------------------------------------------------------------

    def add(self, state: SequenceState) -> None:
        """A new request, or one that was preempted."""
        insort(self.waiting, state, key=lambda each: each.order)
        self._steady, self._blocked = None, False

    def finish(self, state: SequenceState, keep: bool = True) -> None:
        """A request is over, perhaps before it was added. Its pages stay in the prefix cache, if they may."""
        if state.sequence is not None:
            if keep:
                self._report(state, self._insert(state, whole=False))
            self._release(state)
        elif state in self.waiting:
            self.waiting.remove(state)
            self._steady, self._blocked = None, False

    def reset(self, failed: Sequence[SequenceState]) -> None:
        """After an error nobody knows what is in the cache: nothing runs, and these do not wait any more either."""
        for state in failed:
            state.over = True
            if state.sequence is not None:
                self._release_snapshots(state)
                self.free(state.sequence)
                state.sequence = None
        gone = set(failed)
        self.waiting = [state for state in self.waiting if state not in gone]
        self.running = []
        self._steady, self._blocked = None, False
        self.cache.clear()

    def preempt(self, state: SequenceState) -> None:
        """Take the pages of a running sequence away. It goes on later."""
        self._insert(state, whole=True)
        self._release(state)
        self.preemptions += 1
        self.preempted(state)
        self.add(state)

    def _release(self, state: SequenceState) -> None:
        self._steady, self._blocked = None, False
        self.running.remove(state)
        self._release_snapshots(state)
        self.free(state.kv_sequence)
        state.sequence = None
        state.remaining += state.in_flight
        state.in_flight = state.published_tokens = 0
        state.on_device, state.last_published_node = False, None
        state.is_drafting, state.drafts = False, ()

    def _insert(self, state: SequenceState, *, whole: bool) -> int:
        """Keep the pages of known tokens; how many. Of fixed chunks, whole ones of the prompt: bits differ."""
        sequence, fixed_chunk = state.kv_sequence, self.limits.fixed_chunk
        known = min(sequence.length, len(state.tokens))
        if fixed_chunk:
            known = min(known, state.prompt_tokens) // max(fixed_chunk, PAGE) * max(fixed_chunk, PAGE)
        elif whole:
            known = known // PAGE * PAGE
        if self.limits.has_states:  # pages after the last snapshot are of no use
            known = max((position for position in state.snapshots if position <= known), default=0)
        if state.cache_on_finish and known:
            self._put(state, known)
        return known if state.cache_on_finish else 0

    def _report(self, state: SequenceState, known: int) -> None:
        """Say which pages are whole, once."""
        full = known // PAGE * PAGE
        if self.on_cached is not None and full > state.saved_tokens:
            state.saved_tokens = full
            self.on_cached(state, full)

    def _insert_prompt(self, state: SequenceState) -> None:
        """Pages of the prompt that are full can be shared before the request is over."""
        unit = max(self.limits.fixed_chunk, PAGE)
        full = min(state.kv_sequence.length, state.prompt_tokens) // unit * unit
        known = not self.limits.has_states or full in state.snapshots
        if state.cache_on_finish and known and full > state.published_tokens:
            self._put(state, full)
            state.published_tokens = full
        if state.cache_on_finish and state.kv_sequence.length >= state.prompt_tokens:
            self._report(state, full if known else state.published_tokens)

    def _put(self, state: SequenceState, length: int) -> None:
        """The first tokens of a sequence into the cache, from where it ended the last time."""
        client = None if self.limits.shares_prefixes else state.client
        after = state.last_published_node
        pages, snapshots = state.kv_sequence.pages, state.snapshots
        state.last_published_node = self.cache.insert(state.cache_ids, pages, length, client, after, snapshots)

    # states ----------------------------------------------------------------------------------------------

    def _snapshot(self, state: SequenceState) -> None:
        """Copy the state of a sequence that ends with a whole page: in a prompt some of them, then each."""
        length, unit = state.kv_sequence.length, max(self.limits.fixed_chunk, PAGE)
        if not state.cache_on_finish or length % unit or (self.limits.fixed_chunk and length > state.prompt_tokens):
            return
        if length + unit <= state.prompt_tokens and length not in state.snapshot_ends:
            return
        self._release_snapshots(state)  # what the cache did not take is older, or there already
        if (row := self.snapshot(state.kv_sequence)) is not None:
            state.snapshots[length] = row

    def _release_snapshots(self, state: SequenceState) -> None:
        for row in state.snapshots.values():
            self.release_state(row)
        state.snapshots.clear()

    # pages -----------------------------------------------------------------------------------------------

    def _claim(self, pages: int) -> bool:
        """Count pages for the batch in the making; False, and nothing is counted, where there are not as many.

        Pages that only the cache uses count: whoever takes pages gives up those, where the pool cannot grow.
        """
        if not self._fits(pages):
            return False
        self._claimed += pages
        return True

    def _fits(self, pages: int) -> bool:
        """Is there room for so many pages beside those claimed? Takes none."""
        pool = self.pool
        return self._claimed + pages <= pool.free + max(0, pool.max_pages - pool.pages) + len(pool.idle)

    # steps -----------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """The next step; None where there is nothing to do until tokens come back.

        The same object as the last time, if the same sequences decode and nothing else changed.
        """
        if self._steady is not None:
            for rows in self._steady.rows:
                state = rows.state
                sequence = state.sequence
                assert sequence is not None
                if not state.remaining or sequence.length + 2 > len(sequence.pages) * PAGE:
                    break
            else:
                return self._steady
        batch = self._schedule()
        full = not self.waiting or self._blocked or len(self.running) >= self._max_running
        steady = full and batch is not None and batch.decode and len(batch.rows) == len(self.running)
        self._steady = batch if steady and not any(state.waits_for_token for state in self.running) else None
        return batch

    def _schedule(self) -> Batch | None:
        self._claimed = 0
        limits = self.limits
        if limits.fixed_chunk:
            return self._schedule_fixed()
        rows_of_step = self._decode_rows()
        more = [len(rows.ids) - 1 for rows in rows_of_step if rows.ids is not None]
        decode, count = not more, len(rows_of_step) + sum(more)
        budget = limits.max_rows - count
        if rows_of_step:
            budget = min(budget, limits.chunk)
        if (self.waiting and not self._blocked) or any(self.is_prefilling(state) for state in self.running):
            chunks = self._chunks(budget, limits.max_outputs - count, limits.max_rows - count)
            decode = decode and not chunks
            rows_of_step += chunks
        if not rows_of_step and self._is_stuck:
            return self._make_progress()
        return Batch(tuple(rows_of_step), decode) if rows_of_step else None

    def submitted(self, batch: Batch) -> None:
        """What was scheduled is on its way to the device. Nothing may be scheduled in between."""
        for rows in batch.rows:
            if rows.samples:
                state = rows.state
                state.in_flight += 1
                state.remaining -= 1
                state.on_device = not state.host_sampled and not rows.drafted
            if self.limits.has_states and not rows.drafted:  # drafts are not confirmed
                self._snapshot(rows.state)
            if rows.ids is not None:
                self._insert_prompt(rows.state)

    def _schedule_fixed(self) -> Batch | None:
        """One chunk alone, or decode rows alone; where there are both, in turns."""
        limits = self.limits
        sizes = limits.fixed_chunk, limits.max_outputs, limits.max_rows
        chunk = list[Rows]() if self._chunk_was_last else self._chunks(*sizes)
        decode_rows = [] if chunk else self._decode_rows()
        if not chunk and not decode_rows:
            chunk = self._chunks(*sizes)
        self._chunk_was_last = bool(chunk)
        if chunk:
            return Batch(tuple(chunk), decode=False)
        if decode_rows:
            return Batch(tuple(decode_rows), all(rows.ids is None for rows in decode_rows))
        return self._make_progress() if self._is_stuck else None

    def verified(self, state: SequenceState) -> None:
        """Drafts were verified, and what was wrong is cut off."""
        if self.limits.has_states:
            self._snapshot(state)

    def set_drafting(self, state: SequenceState, on: bool) -> None:
        """Whether the next rows of a sequence verify drafts."""
        if state.is_drafting != on:
            state.is_drafting, self._steady = on, None

    @property
    def _is_stuck(self) -> bool:
        """Do sequences run without anything that is awaited?"""
        return bool(self.running) and not any(state.in_flight or state.mask_pending for state in self.running)

    def _make_progress(self) -> Batch | None:
        """Sequences run, no row fits the pool, and no token is awaited: the youngest makes room for the others."""
        if len(self.running) == 1:
            raise DoesNotFitError(self.running[0], self.pool.max_pages)
        self.preempt(self.running[-1])
        return self._schedule()

    @property
    def decodes_alone(self) -> bool:
        """Is there one sequence, which has read its prompt?"""
        return len(self.running) == 1 and not self.waiting and not self.is_prefilling(self.running[0])

    def is_prefilling(self, state: SequenceState) -> bool:
        """Does it have more than one known token to run?"""
        if state.in_flight:
            return False
        length = state.kv_sequence.length
        return length < (state.prompt_tokens if self.limits.fixed_chunk else len(state.tokens) - 1)

    def _decode_rows(self) -> list[Rows]:
        """One row of every sequence that is not reading. The youngest give way where pages are missing."""
        decode_rows: list[Rows] = []
        running, at = self.running, 0
        while at < len(running):
            state = running[at]
            at += 1
            sequence = state.sequence
            assert sequence is not None
            if state.in_flight:
                if not state.remaining or state.needs_host_token or state.is_drafting:
                    continue
            elif self.is_prefilling(state):
                continue
            replayed = None if state.on_device else state.tokens[sequence.length : sequence.length + 1]
            samples = replayed is None or sequence.length + 1 == len(state.tokens)
            if samples and state.mask_pending:
                continue
            # The device looks up the page of the position after the next, too. A first row may be in a shared page.
            if not state.on_device or sequence.length + 2 > len(sequence.pages) * PAGE:
                while not self._claim(self._needed(state, 2)):
                    if len(running) == 1 and state.in_flight:
                        return decode_rows
                    if len(running) == 1:
                        raise DoesNotFitError(state, self.pool.max_pages)
                    self.preempt(running[-1])  # never one that has its row already: those are older
                    if not state.running:
                        return decode_rows
            decode_rows.append(Rows(state, replayed, samples))
            if len(decode_rows) == self.limits.max_rows:
                break
        return self._with_drafts(decode_rows) if any(rows.state.drafts for rows in decode_rows) else decode_rows

    def drafts_that_fit(self, decode_rows: int) -> int:
        """How many drafts may be verified beside so many decode rows. Their tokens need slots that no sequence has."""
        limits, starting = self.limits, min(len(self.waiting), max(0, self._max_running - len(self.running)))
        most = min(limits.max_rows, limits.max_outputs, limits.max_decode) - decode_rows
        return max(0, min(most, MAX_SEQUENCES - self.pool.sequences - starting, limits.max_spares))

    def _with_drafts(self, decode_rows: list[Rows]) -> list[Rows]:
        """Rows for drafts beside decode rows, as many as there is room for: nobody gives way to them."""
        left, extended = self.drafts_that_fit(len(decode_rows)), list[Rows]()
        for rows in decode_rows:
            state, sequence = rows.state, rows.state.kv_sequence
            known = not state.in_flight and sequence.length + 1 == len(state.tokens)
            count = min(len(state.drafts), left, state.remaining - 1) if known and rows.samples else 0
            if self.limits.has_states and count > 0:  # a snapshot at the end of a page is not passed over
                count = self.reserve_spares(sequence, min(count, PAGE - 1 - sequence.length % PAGE))
            if count > 0 and self._claim(self._needed(state, count + 2) - self._needed(state, 2)):
                left -= count
                rows = Rows(state, [state.tokens[-1], *state.drafts[:count]], True, count)
            extended.append(rows)
        return extended

    def _needed(self, state: SequenceState, count: int) -> int:
        sequence = state.kv_sequence
        last = self.pool.pages_per_sequence * PAGE - sequence.length
        return self.pool.needed(sequence, min(count, last))

    def _clear_the_way(self, state: SequenceState, pages: Sequence[int], length: int) -> None:
        """Cached pages give way to a sequence that is alone: its own lie in one piece, from the first page on."""
        if list(pages) != list(range(len(pages))):
            return  # what is cached of it is worth more
        last = pages_for(len(state.tokens) + state.remaining)
        self.cache.give_up(range(len(pages) - (1 if length % PAGE else 0), min(last, self.pool.pages)))

    def _needed_in_all(self, state: SequenceState) -> int:
        """Pages that it takes to run all of its known tokens, and one more."""
        return self._needed(state, len(state.tokens) + 1 - state.kv_sequence.length)

    def _chunks(self, budget: int, outputs: int, room: int) -> list[Rows]:
        """Rows of prompts: of those that are being read, then of those that wait, as many as there is room for.

        At most `budget` rows, of which `outputs` give something; for an image that must be in one step, `room` rows. A
        quarter of the rows is left to others where several are to be read: a short prompt passes a long one.
        """
        chunks: list[Rows] = []
        readers = [state for state in self.running if self.is_prefilling(state)]
        while budget > 0 and outputs > 0 and len(chunks) < self.limits.max_running:
            if readers:
                state = readers.pop(0)
            elif (started := self._start()) is not None:
                state = started
            else:
                break
            others = bool(readers) or bool(self.waiting and len(self.running) < self.limits.max_running)
            limit = budget * 3 // 4 if others and not chunks and budget >= 8 else budget
            end = self._with_whole_images(state, self._chunk_end(state, limit, outputs), room)
            if end == state.kv_sequence.length:
                continue
            if state.mask_pending and end == len(state.tokens):
                continue
            rows = self._chunk(state, end)
            if rows is None:
                break
            chunks.append(rows)
            budget -= rows.count
            room -= rows.count
            outputs -= len(rows.ids or ()) if self._gives_all(state, end) else rows.samples
            if self.limits.fixed_chunk:
                break
        return chunks

    def _chunk_end(self, state: SequenceState, budget: int, outputs: int) -> int:
        """Where the next tokens of a prompt end that fit the budget of rows, and of rows that give something."""
        first, fixed_chunk = state.kv_sequence.length, self.limits.fixed_chunk
        if fixed_chunk:
            unit = min(fixed_chunk, self.limits.max_outputs) if state.all_outputs else fixed_chunk
            return min(state.prompt_tokens, (first // unit + 1) * unit)
        end = min(len(state.tokens), first + budget)
        if self.limits.has_states and state.cache_on_finish:  # where a snapshot is taken, or may be
            stop = next((each for each in state.snapshot_ends if first < each <= end), end // PAGE * PAGE)
            end = stop if stop > first else end
        if state.all_outputs and first < state.first_output:
            return min(end, state.first_output)
        return min(end, first + outputs) if state.all_outputs else end

    @staticmethod
    def _with_whole_images(state: SequenceState, end: int, room: int) -> int:
        """Where a chunk ends that does not cut an image whose rows see each other; its begin where there is no room."""
        first = state.kv_sequence.length
        for begin, stop in () if state.images is None else state.images.blocks:
            if begin < end < stop:
                if begin > first:
                    return begin
                return stop if stop - first <= room else first
        return end

    @staticmethod
    def _gives_all(state: SequenceState, end: int) -> bool:
        """Does each row of a chunk that ends there give something?"""
        return state.all_outputs and end > state.first_output

    def _chunk(self, state: SequenceState, end: int) -> Rows | None:
        """The next tokens of a prompt, if they fit the pool."""
        first = state.kv_sequence.length
        if not self._claim(self._needed(state, end - first + 1)):
            return None
        return Rows(state, state.tokens[first:end], end == len(state.tokens))

    def _start(self) -> SequenceState | None:
        """The next request that waits, if all that is known of it fits the pool beside the others."""
        if not self.waiting or self._blocked or len(self.running) >= self._max_running:
            return None
        state, match = self.waiting[0], Match()
        if state.cached:
            fixed_chunk = self.limits.fixed_chunk
            # With fixed chunks, what was generated is run again.
            ids = state.cache_ids[: state.prompt_tokens] if fixed_chunk else state.cache_ids
            shared = self.limits.shares_prefixes
            multiple = max(fixed_chunk, PAGE) if fixed_chunk else PAGE if shared else 1
            match = self.cache.match(ids, multiple, None if shared else state.client)
            if fixed_chunk:
                match = self._up_to_chunk_end(state, match, multiple)
        if not self._has_room(state, match) and match.length % PAGE:
            # A page that is shared in part is there twice, until its copy is made. Whole pages take none.
            whole = match.length // PAGE
            match = Match(match.pages[:whole], whole * PAGE)
        pages, length = match.pages, match.length
        if not self._has_room(state, match):
            if not self.running:
                raise DoesNotFitError(state, self.pool.max_pages)
            self._blocked = True  # until somebody leaves
            return None
        if self.running and not self.reserve_state():  # rows verify drafts, or the device has no memory for more
            self._blocked = True
            return None
        state.sequence = self.share(pages, length, match.state)
        state.sequence.expected = len(state.tokens) + state.remaining
        if self.limits.has_states:
            unit = max(self.limits.fixed_chunk, PAGE)
            state.snapshot_ends = snapshot_ends(length, match.reach, state.prompt_tokens, unit)
        if state.contiguous and not self.running and not self.limits.fixed_chunk:
            self._clear_the_way(state, pages, length)
        del self.waiting[0]
        if state.cached_tokens is None:
            state.cached_tokens = length
            state.saved_tokens = length // PAGE * PAGE  # of others, who said so
            if state.cached:
                self.cache.queries += state.prompt_tokens
                self.cache.hits += length
        insort(self.running, state, key=lambda each: each.order)
        return state

    @staticmethod
    def _up_to_chunk_end(state: SequenceState, match: Match, unit: int) -> Match:
        """As much of a match as ends where a chunk does: none ends in an image whose rows see each other."""
        length = match.length
        for begin, stop in () if state.images is None else reversed(state.images.blocks):
            if begin < length < stop:
                length = begin // unit * unit
        return match if length == match.length else Match(match.pages[: length // PAGE], length)

    @property
    def _max_running(self) -> int:
        return min(self.limits.max_running, MAX_SEQUENCES)

    def _has_room(self, state: SequenceState, match: Match) -> bool:
        """Does a request fit beside the others, if it begins with these pages?

        Those that are being read will take pages too, and so will the next token of somebody.
        """
        readers = [each for each in self.running if self.is_prefilling(each)]
        promised = sum(map(self._needed_in_all, readers)) + bool(self.running)
        # A page that is shared in part is copied. Pages that nobody uses cannot be given up any more.
        positions = min(len(state.tokens) + 1, self.pool.pages_per_sequence * PAGE)
        new_pages = pages_for(positions) - match.length // PAGE
        idle_pages = sum(self.pool.users(page) == 1 for page in match.pages)
        return self._fits(new_pages + idle_pages + promised)
