"""A model that runs steps of a token batch: rows of any number of sequences at once, on a GPU or in NumPy.

A step takes parts: the next tokens of a sequence (of a prompt, or the token that was sampled last), and what its last
row gives: nothing, logits, its final hidden state, or a sampled token, which stays on the device as the next input and
comes back later. Steps may be submitted before the tokens of earlier ones are known.

Locks: `lock` covers the pool, the tables and everything that is submitted; nobody holds it while waiting for a token.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError, InputError
from ..gpu.caps import DeviceCaps
from ..graph.batch import LAST, NONE, PAGE, REACH, RUN, RUN_ROWS
from ..graph.fuse import RejectedFusion, fuse
from ..graph.graph import Graph, Node
from ..graph.ops import resolve
from ..graph.reference import rope_table
from ..graph.sampling import OUTPUT
from ..models.architecture import Architecture
from ..models.config import Config, StepSpec
from .adjusted import LogitAdjustments, LogprobRequest, Logprobs, adjusted, check_settings, read_report
from .cache_share import LEAST_PAGES, MOST_EMPTY_PAGES, free_memory, share_of
from .image_rows import FeatureRows, ImageChunk, step_rows, text_records
from .pages import MAX_SEQUENCES, KvSequence, PagePool, Reserved
from .row_scores import REPORT_WORDS, RowScores, ScoreGroup, check_scores, score_groups
from .sampler_settings import GREEDY, SamplerSettings
from .states import FIRST_STATES, MAX_SNAPSHOTS, StatePool, max_snapshots
from .weights import Source

F32 = NDArray[np.float32]
U32 = NDArray[np.uint32]
# "tokens": each row gives one, drawn with settings of its own, and a place for it that is no other row's.
OutputKind = Literal["nothing", "token", "tokens", "logits", "all logits", "hidden"]
FIRST_PAGES = 4  # of the pool: 512 positions, the least that attention over a contiguous cache expects
MAX_OUTPUTS = 256  # rows of logits at once
_FIXED_CHUNK = 2 * PAGE  # of a prompt: larger chunks are read faster, smaller ones are found in a cache more often


class SequenceChunk(NamedTuple):
    """The next tokens of one sequence in a step. `ids` None: the token that was sampled last for it."""

    sequence: KvSequence
    ids: Sequence[int] | None
    gives: OutputKind = "token"
    settings: SamplerSettings = GREEDY
    scores: RowScores | None = None  # beside what the last row gives
    drafted: Sequence[SamplerSettings] = ()  # of "tokens": of the rows after the first
    places: Sequence[int] = ()  # and where their tokens go: slots that no sequence has
    images: ImageChunk | None = None  # of its rows, where its prompt has some

    @property
    def rows(self) -> int:
        """Rows of the batch that it takes."""
        return 1 if self.ids is None else len(self.ids)

    @property
    def gives_all(self) -> bool:
        """Does each of its rows give something?"""
        return self.gives in ("tokens", "all logits")

    @property
    def outputs(self) -> int:
        """Rows that give something."""
        return self.rows if self.gives_all else int(self.gives != "nothing")

    @property
    def is_decoding(self) -> bool:
        """One row, or rows that are computed like those of so many sequences: they are in no run."""
        return self.rows == 1 or self.gives == "tokens"

    @property
    def is_run(self) -> bool:
        """Are its rows a run (`graph.batch.RUN_ROWS`)? Those of an image that see all of it are one, however few."""
        sees_image = self.images is not None and bool(self.images.records[:, REACH].any())
        return (self.rows >= RUN_ROWS or sees_image) and not self.is_decoding

    @property
    def row_settings(self) -> Sequence[SamplerSettings]:
        """Of each row that gives something."""
        return (self.settings, *self.drafted) if self.gives == "tokens" else (self.settings,) * self.outputs

    @property
    def slots(self) -> Sequence[int]:
        """Of each row that gives something: where its token goes."""
        slot = self.sequence.slot
        return (slot, *self.places) if self.gives == "tokens" else (slot,) * self.outputs


def decode_chunks(sequences: Sequence[KvSequence], settings: Sequence[SamplerSettings]) -> list[SequenceChunk]:
    """The last token of each, from which the next one is sampled."""
    return [SequenceChunk(each, None, "token", how) for each, how in zip(sequences, settings, strict=True)]


@dataclass
class Tokens:
    """The tokens of a step, on their way. What nobody refers to any more is not read back."""

    wait_for_words: Callable[[], U32]  # the last tokens of all sequence slots; with `requests`, a report
    requests: Sequence[LogprobRequest] | None = None  # of every output, where log probabilities come with the tokens
    # No `cached_property`: in Python 3.11 all instances share its lock, and this waits for a device.
    _report: tuple[U32, dict[int, Logprobs]] | None = field(default=None, init=False)

    def wait(self) -> U32:
        """Tokens by sequence slot, of the sequences that got one in this step. May be called again."""
        if self._report is None:
            words = self.wait_for_words()
            self._report = (words, {}) if self.requests is None else read_report(words, self.requests)
        return self._report[0]

    def logprobs(self, slot: int) -> Logprobs | None:
        """What the settings of a sequence ask for, by its slot; None: nothing."""
        self.wait()
        assert self._report is not None
        return self._report[1].get(slot)


@dataclass
class StepResult:
    """Of a step: the tokens that were sampled, if any, and the logits, states and scores that were asked for.

    They may be on their way.
    """

    tokens: Tokens | None = None
    wait_for_logits: Callable[[], F32] | None = None
    wait_for_hidden: Callable[[], F32] | None = None
    wait_for_rows: Callable[[], object] | None = None  # of a step on its way that gives nothing else to wait for
    wait_for_scores: Callable[[], U32] | None = None
    _logits: F32 | None = field(default=None, init=False)  # no `cached_property`: see Tokens
    _hidden: F32 | None = field(default=None, init=False)
    _scores: U32 | None = field(default=None, init=False)

    @property
    def logits(self) -> F32 | None:
        """[rows, vocabulary], in the order of the step's outputs, up to the last that asks for them. Waits for them."""
        if self._logits is None and self.wait_for_logits is not None:
            self._logits = self.wait_for_logits()
        return self._logits

    @property
    def hidden(self) -> F32 | None:
        """Final hidden states, after the output norm: [rows, hidden], in the same order. Waits for them, too."""
        if self._hidden is None and self.wait_for_hidden is not None:
            self._hidden = self.wait_for_hidden()
        return self._hidden

    @property
    def scores(self) -> U32 | None:
        """What the op logprobs reports of the scored rows, [rows, 21, 2], in the order of the parts. Waits, too."""
        if self._scores is None and self.wait_for_scores is not None:
            self._scores = self.wait_for_scores()
        return self._scores

    def wait(self) -> None:
        """Until all that it gives is there; where it gives nothing, until its rows are run."""
        if self.wait_for_rows is not None:
            self.wait_for_rows()
        _ = self.scores
        if self.tokens is not None:
            self.tokens.wait()
        _ = self.logits, self.hidden


class DecodeBatch(ABC):
    """Sequences that decode together: every step runs the last token of each and samples the next one."""

    @abstractmethod
    def step(self) -> Tokens:
        """Run one step without waiting for it."""

    @abstractmethod
    def replace(self, sequences: Sequence[KvSequence], settings: Sequence[SamplerSettings]) -> None:
        """Other sequences from now on, or other settings. What is recorded ahead and still fits is kept."""

    @abstractmethod
    def close(self) -> None:
        """Nothing is recorded ahead any more. The sequences stay."""


class Runner(ABC):
    """What both kinds of runner share: config, graphs, sequences and the records of a step."""

    max_tokens: int  # rows of a step
    max_outputs: int  # rows of logits of a step
    max_pages: int  # of the pool, on this device
    cache_share = 0.0  # of free memory: what the pool takes where nobody says how much
    cache_pages: int | None = None  # as many pages; None: it is not known what is free
    memory_pages = 1 << 31  # that fit into free memory, as far as is known
    max_states = MAX_SEQUENCES + MAX_SNAPSHOTS  # rows of the states of recurrent layers, on this device
    cache: str  # the format of keys and values
    runs_have_any_length = True  # kernels of every context class read the keys of a run, however many there are
    steps_ahead: int  # steps worth submitting before the first of them is waited for
    steps_ahead_alone: int  # the same where one sequence decodes alone
    warm_up_seconds = 0.0  # that the device works before its clocks are up
    # The bits of a row do not depend on the rest of its step: a step has one row of each sequence, by a plan of
    # `decode_rows` rows however many there are, or it has one part.
    deterministic = False
    decode_rows: int

    def __init__(
        self,
        architecture: Architecture,
        config: Config,
        factors: Mapping[str, Any],
        fusions: Sequence[str] | None,
        unsupported_reason: Callable[[Node], str | None] | None = None,
    ) -> None:
        self.config = config
        self.lock = threading.RLock()
        self.closed = False
        self.pool = PagePool(config.context, states=config.recurrent)
        self.states = StatePool()
        self._state_bytes = 0  # of a sequence, once somebody asks
        self.evict_snapshot: Callable[[], bool] | None = None  # gives a row back that a prefix cache has
        # Frees so many pages of a prefix cache, or all that can be, where the pool cannot grow.
        self.reclaim: Callable[[int], None] | None = None
        self.written_by: object = None  # whose records are in the batch, as the device has moved them on
        self._architecture, self._factors, self._fusions = architecture, factors, fusions
        self._unsupported_reason = unsupported_reason
        self._last_graph: tuple[StepSpec, tuple[Graph, tuple[RejectedFusion, ...]]] | None = None
        self._decode_graph: tuple[StepSpec, tuple[Graph, tuple[RejectedFusion, ...]]] | None = None  # of one row

    @property
    def fixed_chunk(self) -> int:
        """Chunks of prompts must end at multiples of it, for rows that do not depend on their company. 0: anywhere."""
        return min(self.max_tokens, _FIXED_CHUNK) if self.deterministic else 0

    @property
    def usable(self) -> bool:
        """Not closed, and its device is not lost."""
        return not self.closed

    @property
    def forked(self) -> bool:
        """Has it a device, and is this another process than the one that opened it?"""
        return False

    def check_device(self) -> None:  # noqa: B027 (without a device there is nothing to check)
        """A device that is closed, lost or of another process is a DeviceError."""

    def warm_up(self) -> None:  # noqa: B027 (a runner that compiles nothing has nothing to do)
        """Make whatever steps may want, for servers. Nothing where nothing is compiled."""

    def ready_rows(self, rows: int) -> int:
        """Up to how many decode rows, of so many, a step has without compiling anything; others are made meanwhile."""
        return rows

    # graphs ----------------------------------------------------------------------------------------------

    def graph(self, step: StepSpec) -> tuple[Graph, tuple[RejectedFusion, ...]]:
        """The fused graph of a step, to the hidden states. The last one is kept: it is asked for twice."""
        known = self._last_graph
        if known is None or known[0] != step:
            known = (step, self._of_context(step) or self._fused(step))
            self._last_graph = known
            if step.tokens == 1:
                self._decode_graph = known
        return known[1]

    def _fused(self, step: StepSpec) -> tuple[Graph, tuple[RejectedFusion, ...]]:
        return fuse(self._architecture.build(self.config, step), self._fusions, self._unsupported_reason)

    def _of_context(self, step: StepSpec) -> tuple[Graph, tuple[RejectedFusion, ...]] | None:
        """The graph of decoding that is known, for another context class; None if it is not known.

        It is made while a generation runs, which has better use for the time.
        """
        known = self._decode_graph
        if known is None or known[0]._replace(context=step.context) != step:
            return None
        graph, rejected = known[1]
        if any(node.op.startswith("rms_norm_rope_attention") for node in graph.nodes):  # only short contexts have it
            return None
        nodes = (
            replace(node, dims=resolve(node.op, {**node.dims, "context": step.context}))
            if "context" in node.dims
            else node
            for node in graph.nodes
        )
        return replace(graph, nodes=tuple(nodes)), rejected

    def head_graph(self, rows: int, tokens: int, *, logits: bool = True) -> tuple[Graph, tuple[RejectedFusion, ...]]:
        """The fused graph from the hidden states of `tokens` rows to the logits of `rows` of them, or to the norm."""
        graph = self._architecture.head(self.config, rows, tokens, logits=logits)
        return fuse(graph, self._fusions, self._unsupported_reason)

    def rope_tables(self, positions: int) -> dict[str, F32]:
        """(cos, sin) [positions, rotary / 2, 2] of every table."""
        tables = {}
        for name, rope in self.config.ropes.items():
            where = np.arange(positions, dtype=np.float64) / rope.linear_scale
            named = rope.factors_for(self.config.context)
            factors = self._factors[named] if named else None
            table = rope_table(where, rope.rotary, rope.theta, factors, rope.yarn, rope.magnitude)
            tables[name] = table.astype(np.float32)
        return tables

    # sequences -------------------------------------------------------------------------------------------

    def add(self) -> KvSequence:
        """A new, empty sequence."""
        with self.lock:
            self._check_open()
            return self.pool.add()

    def fork(self, sequence: KvSequence) -> KvSequence:
        """A sequence that begins with all of another. Pages are shared until one of them writes.

        Its history, which penalties read, is not the other's: `set_history` gives it one.
        """
        with self.lock:
            self._check_not_freed(sequence)
            child = self.share(sequence.pages, sequence.length, sequence.state)
            child.shift = sequence.shift
            return child

    def share(self, pages: Sequence[int], length: int, state: int | None = None) -> KvSequence:
        """A sequence whose first `length` positions are in pages that are in use, by another or by a prefix cache.

        `state`: the row of the states that stands for them, which is copied.
        """
        with self.lock:
            self._check_open()
            child, changed = self.pool.share(pages, length)
            if changed.entries:
                try:
                    self._apply([changed])
                except BaseException:
                    self.pool.remove(child)
                    raise
            self.written_by = None  # what the device would write next may be shared now
            if self.config.recurrent:
                try:
                    self._reserve_states([child])
                    assert child.state is not None
                    if state is not None and child.state != state:  # it may have been given back for this sequence
                        self._copy_state(state, child.state)
                except BaseException:
                    self.free(child)
                    raise
            return child

    @property
    def max_snapshots(self) -> int:
        """How many copies of states a prefix cache may have."""
        return max_snapshots(self.state_bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of recurrent layers of a sequence."""
        if self.config.recurrent and not self._state_bytes:
            tensors = self._architecture.build(self.config, StepSpec(1, cache=self.cache)).tensors.values()
            self._state_bytes = sum(each.nbytes for each in tensors if each.role == "recurrent")
        return self._state_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of all pages and states, as many as there are now."""
        return self.pool.pages * self.page_bytes + self.states.rows * self.state_bytes

    def snapshot(self, sequence: KvSequence) -> int | None:
        """A copy of the state of a sequence, after all steps that were submitted: its row. None if there is no room.

        `release_state` gives it back, unless a prefix cache took it.
        """
        with self.lock:
            self._check_open()
            row = None if sequence.state is None else self.take_snapshot()
            if row is not None:
                assert sequence.state is not None
                try:
                    self._copy_state(sequence.state, row)
                except BaseException:
                    self.states.release(row)
                    raise
            return row

    @property
    def max_spares(self) -> int:
        """How many spare rows of the states there may be: rows that verify drafts have one each but the last."""
        return 0 if self.deterministic else self.max_snapshots

    def reserve_spares(self, sequence: KvSequence, count: int) -> int:
        """Spare rows of the states for a step that verifies so many drafts; for how many there are some.

        Without states as many as are asked for: nothing is needed then.
        """
        with self.lock:
            states = self.states
            if not self.config.recurrent or len(sequence.spares) >= count:
                return count
            self._release_spares(sequence)
            count = min(count, self.max_spares - states.spares)
            if count < 1:
                return 0
            run = states.take_run(count)
            if run is None and states.rows + count <= self.max_states:
                try:
                    self._grow_states(states.rows + count)
                except (DeviceError, MemoryError):  # the memory of the device is full
                    return 0
                run = states.take_run(count)
            if run is None:
                return 0
            sequence.spares = run
            states.spares += count
            self._write_table(self.pool.table_index(sequence) - 2, run.start)
            return count

    def _release_spares(self, sequence: KvSequence) -> None:
        if sequence.spares:
            for row in sequence.spares:
                self.states.release(row)
            self.states.spares -= len(sequence.spares)
            sequence.spares = sequence.verified = range(0)
            if not sequence.freed:
                self._write_table(self.pool.table_index(sequence) - 2, NONE)

    def reserve_state(self) -> bool:
        """A row of the states for one sequence more; snapshots give way. False: there is none, or no memory for it."""
        with self.lock:
            try:
                if self.config.recurrent:
                    self._grow_for_states(1)
            except (DeviceError, MemoryError):
                return False
            return True

    def take_snapshot(self) -> int | None:
        """A row of the states for a snapshot, whatever is in it. None if there is no room."""
        with self.lock:
            self._check_open()
            states = self.states
            while len(states.snapshots) >= self.max_snapshots:
                if self.evict_snapshot is None or not self.evict_snapshot():
                    return None
            if not states.free and states.rows >= self.max_states:
                return None
            try:
                self._grow_for_states(1)
            except (DeviceError, MemoryError):  # the memory of the device is full: sequences matter more
                return None
            row = states.take()
            states.snapshots.add(row)
            return row

    def release_state(self, row: int) -> None:
        """Give a snapshot back."""
        with self.lock:
            self.states.release(row)

    def reserve_pages(self, pages: int) -> None:
        """Memory for so many pages in all, at once: for those who know how many there will be."""
        with self.lock:
            self._check_open()
            if pages > self.max_pages:
                most = f"the cache of this device holds {self.max_pages * PAGE:,} tokens"
                raise DeviceError(f"{most}, {pages * PAGE:,} were asked for")
            if pages > self.pool.pages:
                self._grow(pages)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: the keys and values of all layers."""
        return sum(nbytes for _, nbytes in self.page_tensors)

    @property
    @abstractmethod
    def page_tensors(self) -> tuple[tuple[str, int], ...]:
        """The tensors that a page is made of: names, and bytes of a page."""

    def share_memory(self, caps: DeviceCaps | None, taken: int, reserved: int = 0) -> None:
        """Let the pool take a share of the memory that is free beside `taken` bytes, but at least `reserved` pages.

        Up to there cached pages are kept, where no other sequence waits while the pool grows.
        """
        free = free_memory(caps, taken, loaded=True)
        if free is not None:
            free = max(0, free - self.max_snapshots * self._state_bytes)
            nbytes, self.cache_share = max(1, self.page_bytes), share_of(caps)
            pages = int(free * self.cache_share) // nbytes if self.page_bytes else MOST_EMPTY_PAGES
            self.cache_pages = self.pool.pages_kept_alone = max(pages, reserved, LEAST_PAGES)
            self.memory_pages = max(free // nbytes, reserved + self.pool.pages, 2 * LEAST_PAGES)

    @property
    @abstractmethod
    def state_tensors(self) -> tuple[tuple[str, int], ...]:
        """The tensors that a row of the states is made of, and their bytes; none of a model without states."""

    def take_pages(self, count: int) -> list[int]:
        """Pages for what comes from elsewhere, with one user: who gives them back. A DeviceError if there are too few.

        `lock` is to be held until they are known to a cache, or longer.
        """
        with self.lock:
            self._check_open()
            self.make_room(count)
            return self.pool.take(count)

    def make_room(self, count: int) -> None:
        """So many free pages. A DeviceError if there cannot be as many."""
        with self.lock:
            self._check_open()
            self._make_room(lambda: max(0, count - self.pool.free))

    @abstractmethod
    def read_pages(self, pages: Sequence[int]) -> Callable[[], list[NDArray[np.uint8]]]:
        """The contents of pages as they are now, of each tensor [pages, bytes]. Waited for without the lock."""

    @abstractmethod
    def write_pages(self, pages: Sequence[int], contents: Sequence[NDArray[np.uint8]]) -> Callable[[], object]:
        """Contents that `read_pages` gave, into pages that no step writes. Waited for without the lock."""

    @abstractmethod
    def read_state(self, row: int, tensors: Sequence[tuple[str, int]]) -> Callable[[], list[NDArray[np.uint8]]]:
        """Some tensors of a row of the states as it is now, each [1, bytes]. Waited for without the lock."""

    @abstractmethod
    def write_state(
        self, row: int, tensors: Sequence[tuple[str, int]], contents: Sequence[NDArray[np.uint8]]
    ) -> Callable[[], object]:
        """Some tensors of a row that nobody else uses. Waited for without the lock."""

    def truncate(self, sequence: KvSequence, length: int) -> int:
        """Forget what comes after the first `length` positions of a sequence. Answers how many are left.

        A state can be cut back to a row of the last step that verified drafts. Otherwise nothing is left of a model
        that has one, unless nothing is cut off. Run what is missing again.
        """
        with self.lock:
            sequence.has_history = sequence.has_history and length == sequence.length
            if self.config.recurrent and 0 <= length < sequence.length:
                verified = sequence.verified
                if length in verified:
                    assert sequence.state is not None
                    self._copy_state(sequence.spares[verified.index(length)], sequence.state)
                    sequence.verified = range(verified.start, length)  # what comes after may be another text
                else:
                    length, sequence.verified = 0, range(0)  # another text may follow
            self.pool.truncate(sequence, length)
            return length

    def set_history(self, sequence: KvSequence, ids: Sequence[int]) -> None:
        """Penalties of a sequence count these tokens, and those that are sampled with penalties from now on.

        Tokens that are only run are not counted: give all that is to count when a generation starts. A sequence that
        is new, forked or truncated has no history, and one loses it that gives anything without penalties.
        """
        with self.lock:
            self._check_open()
            self._check_not_freed(sequence)
            self.check_ids(ids)
            counts = np.bincount(np.asarray(ids, np.int64), minlength=self.config.vocabulary)
            self._write_counts(sequence.slot, counts.astype(np.uint32))
            sequence.has_history = True

    def free(self, sequence: KvSequence) -> None:
        """Give the pages of a sequence back."""
        with self.lock:
            self.pool.remove(sequence)
            self._release_spares(sequence)
            if sequence.state is not None:
                self.states.release(sequence.state)
                sequence.state = None
            self.written_by = None  # the device must not go on with a sequence whose pages are others' now

    # steps -----------------------------------------------------------------------------------------------

    def step(self, parts: Sequence[SequenceChunk]) -> StepResult:
        """Run one step. Its rows are those of the parts, in this order; their sequences must differ."""
        with self.lock:
            self._check_open()
            self._check_parts(parts)
            if self.config.recurrent:
                self._choose_spares(parts)
            self._reserve([(part.sequence, part.rows) for part in parts])
            records = self._records(parts)
            outputs = self._outputs(parts)
            counted = [part for part in parts if part.ids is None or not (part.is_run and self.runs_have_any_length)]
            keys = max((part.sequence.length + part.rows for part in counted), default=1)
            result = self._run(records, outputs, keys, parts)
            for part in parts:
                first = part.sequence.length
                part.sequence.length += part.rows
                if part.sequence.spares and part.rows > 1:
                    part.sequence.verified = range(first + 1, first + part.rows)
            self._end_histories(parts)
            return result

    def _choose_spares(self, parts: Sequence[SequenceChunk]) -> None:
        """Spare rows of the states for those that verify drafts, and none for other rows."""
        for part in parts:
            if part.gives != "tokens":
                if part.rows > 1:
                    self._release_spares(part.sequence)
            elif self.reserve_spares(part.sequence, part.rows - 1) < part.rows - 1:
                holds = f"this device holds {self.max_spares} states of rows that verify drafts"
                raise DeviceError(f"{holds}, and more were wanted. Verify fewer")

    def feed(
        self,
        sequence: KvSequence,
        ids: Sequence[int],
        gives: OutputKind = "nothing",
        settings: SamplerSettings = GREEDY,
    ) -> StepResult:
        """Run tokens of one sequence, in as many steps as they take; the result of the last one.

        They are waited for as they go: what is submitted cannot be cancelled by Ctrl-C.
        """
        self.check_ids(ids)
        self._check_length(sequence.length, len(ids))
        in_flight: deque[StepResult] = deque()
        for first in range(0, len(ids), self.max_tokens):
            chunk = ids[first : first + self.max_tokens]
            if len(in_flight) == self.steps_ahead:
                in_flight.popleft().wait()
            last = first + self.max_tokens >= len(ids)
            in_flight.append(self.step([SequenceChunk(sequence, chunk, gives if last else "nothing", settings)]))
        return in_flight[-1]

    def _end_histories(self, parts: Sequence[SequenceChunk]) -> None:
        """What these sequences give is counted, or their histories are not complete any more. Of drafts, some is."""
        for part in parts:
            if part.gives != "nothing" and not (part.gives == "token" and part.settings.penalizes):
                part.sequence.has_history = False

    @abstractmethod
    def decode_batch(self, sequences: Sequence[KvSequence], settings: Sequence[SamplerSettings]) -> DecodeBatch:
        """Sequences to decode together. Each must have a token that was sampled for it."""

    def _check_open(self) -> None:
        if self.closed:
            raise InputError("this model is closed; load it again")

    def _check_not_freed(self, sequence: KvSequence) -> None:
        if sequence.freed:
            raise InputError("this sequence was freed; add another one")

    def _check_parts(self, parts: Sequence[SequenceChunk]) -> None:
        rows, outputs, slots, places = 0, 0, set[int](), 0
        for part in parts:
            slots.add(part.sequence.slot)
            if part.ids is None:  # most parts of most steps
                rows, outputs = rows + 1, outputs + (part.gives != "nothing")
                continue
            self.check_ids(part.ids)
            rows += part.rows
            outputs += part.outputs
            if part.places:
                slots.update(part.places)
                places += len(part.places)
        if not 1 <= rows <= self.max_tokens:
            raise InputError(f"a step takes 1 to {self.max_tokens} rows, got {rows}")
        if self.deterministic and len(parts) > 1 and not is_decode_step(parts):
            raise InputError("a deterministic step has one part, or rows that decode")
        if len(slots) < len(parts) + places:
            raise InputError("a sequence may have one part in a step, and a token one place")
        context, vocabulary = self.config.context, self.config.vocabulary
        for part in parts:
            sequence, settings, rows = part.sequence, part.settings, part.rows
            if sequence.freed:
                self._check_not_freed(sequence)
            if sequence.length + rows > context:
                self._check_length(sequence.length, rows)
            if part.scores is not None:
                check_scores(part.scores, rows, vocabulary)
            if part.gives == "tokens" and not len(part.drafted) == len(part.places) == rows - 1:
                raise InputError(f"{rows} rows that give tokens need settings and places of all but the first")
            if settings.adjusted:
                check_settings(settings, vocabulary, sequence.has_history)
            for drafted in part.drafted:
                if drafted.adjusted:
                    check_settings(drafted, vocabulary, sequence.has_history)
        if outputs > self.max_outputs:
            most = f"at most {self.max_outputs} rows"
            raise InputError(f"a step gives the logits or tokens of {most}, asked for {outputs}")

    def check_ids(self, ids: Sequence[int]) -> None:
        """Token ids that the model has."""
        if not len(ids):
            raise InputError("expected at least one token, got none")
        if min(ids) < 0 or max(ids) >= self.config.vocabulary:
            wrong = next(i for i in ids if not 0 <= i < self.config.vocabulary)
            raise InputError(f"a token id must lie in 0 … {self.config.vocabulary - 1}, got {wrong}")

    def _check_length(self, length: int, more: int) -> None:
        if length + more > self.config.context:
            raise InputError(
                f"the context holds {self.config.context:,} tokens; {length:,} are there and {more:,} more "
                "were given. Shorten the prompt, or load the model with a longer context"
            )

    def _reserve(self, counts: Sequence[tuple[KvSequence, int]]) -> None:
        """Pages for what a step writes. All or nothing: the pool grows first."""
        needed = self.pool.needed
        taking = [each for each in counts if needed(*each)]
        self._make_room(lambda: self.pool.missing(taking))
        self._reserve_positions(max(sequence.length + count for sequence, count in counts))
        if self.config.recurrent:
            self._reserve_states([sequence for sequence, _ in counts])
        if not taking:  # most decode rows stay in their pages
            return
        changed = [self.pool.reserve(sequence, count) for sequence, count in taking]
        try:
            self._apply(changed)
        except BaseException:
            for (sequence, _), reserved in reversed(list(zip(taking, changed, strict=True))):
                self.pool.revert(sequence, reserved)
            raise

    def _make_room(self, missing: Callable[[], int]) -> None:
        """Free pages: as many more as are missing. The pool grows first, then cached pages are given up."""
        pool, pages = self.pool, missing()
        if pages:
            fitting = self.memory_pages - pool.pages  # the old pool is copied into the new one
            most = max(pool.pages, min(pool.max_pages, self.max_pages, fitting))
            limit = min(most, pool.pages_worth_keeping(pages))
            if self.reclaim is not None and pool.pages + pages > limit:
                self.reclaim(pool.pages + pages - limit)
                pages = missing()
        if pages:
            pages += pool.pages
            if pages > most:
                holds = f"{most * PAGE:,} tokens of all sequences"
                raise DeviceError(f"the cache holds {holds} on this device, and it is full. Free a sequence first")
            # Twice as many, so that growing is rare; but no more than the sequences can ever fill, or the cache keeps.
            useful = max(limit if pool.idle else 0, pool.sequences * pool.pages_per_sequence)
            self._grow(min(most, max(pages, min(2 * pool.pages, useful), FIRST_PAGES)))

    def _reserve_states(self, sequences: Sequence[KvSequence]) -> None:
        """A row of the states for each, where it has none yet."""
        new = [each for each in sequences if each.state is None]
        self._grow_for_states(len(new))
        for each in new:
            each.state = self.states.take()
            index = self.pool.table_index(each)
            self._write_table(index - 1, each.state)
            if not each.spares:
                self._write_table(index - 2, NONE)

    def _grow_for_states(self, count: int) -> None:
        """So many free rows of the states. Where there can be no more rows, snapshots give way."""
        states = self.states
        while states.missing(count) > self.max_states - states.rows:
            if self.evict_snapshot is None or not self.evict_snapshot():
                holds = f"this device holds the states of {self.max_states} sequences"
                raise DeviceError(f"{holds}, and more were begun. Free a sequence first")
        if missing := states.missing(count):
            # Twice as many, so that growing is rare; but no more than those in use and all snapshots.
            useful = min(2 * states.rows, states.rows - states.free - len(states.snapshots) + self.max_snapshots)
            self._grow_states(min(self.max_states, max(states.rows + missing, useful, FIRST_STATES)))

    def _records(self, parts: Sequence[SequenceChunk]) -> U32:
        """The records of a step's rows, [rows, 4]."""
        records = np.empty((sum(part.rows for part in parts), 4), np.uint32)
        singles, words, at, table_index = list[int](), list[int](), 0, self.pool.table_index
        for part in parts:
            sequence, ids, first = part.sequence, part.ids, part.sequence.length
            if ids is None or len(ids) == 1:  # all of them are written at once: 1 µs instead of 6
                page, place = divmod(first, PAGE)
                token = LAST | sequence.slot if ids is None else ids[0]
                words += (token, first, sequence.pages[page] * PAGE + place, table_index(sequence))
                singles.append(at)
                at += 1
                continue
            rows = records[at : at + len(ids)]
            positions = np.arange(first, first + len(ids), dtype=np.uint32)
            pages = np.asarray(sequence.pages, np.uint32)
            rows[:, 0] = ids
            rows[:, 1] = positions
            rows[:, 2] = pages[positions // PAGE] * np.uint32(PAGE) + positions % PAGE
            rows[:, 3] = table_index(sequence) | (RUN if part.is_run else 0)
            at += len(ids)
        if singles:
            records[singles] = np.array(words, np.uint32).reshape(-1, 4)
        return records

    def has_images(self, parts: Sequence[SequenceChunk]) -> bool:
        """Are there rows of images in a step, or positions that follow some?"""
        if self.config.images is None:
            return False
        return any(part.sequence.shift if part.images is None else part.images.records.any() for part in parts)

    def _image_rows(self, parts: Sequence[SequenceChunk]) -> tuple[U32, list[FeatureRows]]:
        """The records of images of a step's rows, and the features that they name."""
        return step_rows([part.images or ImageChunk(text_records(part.rows, part.sequence.shift)) for part in parts])

    def _outputs(self, parts: Sequence[SequenceChunk]) -> NDArray[Any]:
        """The records of a step's outputs."""
        rows, slots, settings, at = list[int](), list[int](), list[SamplerSettings](), 0
        for part in parts:
            at += part.rows
            if part.gives == "token":
                rows.append(at - 1)
                slots.append(part.sequence.slot)
                settings.append(part.settings)
            else:
                rows += range(at - part.outputs, at)
                slots += part.slots
                settings += part.row_settings
        return output_records(rows, slots, settings)

    def _adjusted(self, parts: Sequence[SequenceChunk]) -> LogitAdjustments:
        """What is done with the logits of a step's outputs beside sampling."""
        settings = [each for part in parts for each in part.row_settings]
        slots = [slot for part in parts for slot in part.slots]
        histories = [part.sequence.slot for part in parts for _ in range(part.outputs)]
        return adjusted(settings, slots, histories, self.config.vocabulary)

    def _score_groups(self, parts: Sequence[SequenceChunk]) -> list[ScoreGroup]:
        """The rows of a step whose tokens are scored, as its heads give them; most steps have none."""
        if all(part.scores is None for part in parts):
            return []
        return list(score_groups([(part.rows, part.scores) for part in parts], self.max_outputs))

    @abstractmethod
    def _write_counts(self, slot: int, counts: U32) -> None:
        """How often each token is in the history of a sequence slot, [vocabulary]."""

    @abstractmethod
    def _grow(self, pages: int) -> None:
        """So many pages in the pool; what was in it stays. All or nothing."""

    @abstractmethod
    def _apply(self, changed: Sequence[Reserved]) -> None:
        """Copy pages and write entries of the page table."""

    @abstractmethod
    def _grow_states(self, rows: int) -> None:
        """So many rows of the states; what was in them stays. All or nothing."""

    @abstractmethod
    def _copy_state(self, source: int, target: int) -> None:
        """A row of the states of all layers becomes as another is."""

    @abstractmethod
    def _write_table(self, index: int, word: int) -> None:
        """A word of the page table."""

    @abstractmethod
    def _reserve_positions(self, positions: int) -> None:
        """A rope table for so many positions."""

    @abstractmethod
    def _run(self, records: U32, outputs: NDArray[Any], keys: int, parts: Sequence[SequenceChunk]) -> StepResult:
        """Run rows of which the longest that is in no run sees so many keys."""

    @abstractmethod
    def close(self) -> None:
        """Give all memory back."""

    @abstractmethod
    def report(self) -> Mapping[str, Any]:
        """Where it runs, and how much memory its weights take."""


def joined_scores(groups: Sequence[U32]) -> U32:
    """What heads reported of groups of rows, as one: [rows, 21, 2]."""
    return np.concatenate([words.reshape(-1, *REPORT_WORDS) for words in groups])


def rope_factors(config: Config, source: Source) -> dict[str, Any]:
    """The tensors that divide frequencies of rope, by name."""
    named = {name for rope in config.ropes.values() for name in (rope.factors, rope.long_factors) if name}
    return {name: source.vector(name) for name in sorted(named)}


def output_records(rows: Sequence[int], slots: Sequence[int], settings: Sequence[SamplerSettings]) -> NDArray[Any]:
    """The array of outputs. By columns: as tuples, 256 of them take 0.6 ms."""
    records = np.empty(len(rows), OUTPUT)
    records["row"], records["slot"] = rows, slots
    for i, name in enumerate(("temperature", "top_k", "top_p", "min_p")):
        records[name] = [each[i] for each in settings]
    seeds = np.array([each.seed % (1 << 64) for each in settings], np.uint64)
    records["seed_low"], records["seed_high"] = seeds & np.uint64(0xFFFF_FFFF), seeds >> np.uint64(32)
    return records


def head_kind(parts: Sequence[SequenceChunk]) -> str:
    """What is done with the logits of a step (`compile.steps.Head`)."""
    settings = [part.settings for part in parts if part.gives == "token"]
    settings += [each for part in parts if part.gives == "tokens" for each in part.row_settings]
    if any(each.adjusted for each in settings):
        return "adjusted"
    return "logits" if not settings else "greedy" if all(each.greedy for each in settings) else "sample"


def is_decode_step(parts: Sequence[SequenceChunk]) -> bool:
    """Is it a step of decode rows?"""
    return all(part.ids is None or part.is_decoding for part in parts)


def bucket(rows: int) -> int:
    """The number of rows that a plan is made for: the next power of two."""
    return 1 << (rows - 1).bit_length()


def buckets(most: int) -> list[int]:
    """1, 2, 4, … up to `most`."""
    return [1 << i for i in range(most.bit_length())]


def padded_batch(records: U32, tokens: int, output_count: int) -> U32:
    """The batch as kernels read it: counts, records, and rows that write nothing."""
    batch = np.zeros((1 + tokens, 4), np.uint32)
    batch[0] = (len(records), output_count, 0, 0)
    batch[1 : 1 + len(records)] = records
    batch[1 + len(records) :, 2] = NONE
    return batch
