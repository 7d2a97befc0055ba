"""A model on a GPU: weights and the pool of pages in buffers, plans by bucket of rows, and steps that run them.

A step is two plans: from the batch to hidden states, for a bucket of rows and a context class; and from there to logits
and tokens, for a bucket of outputs. What a step needs is written to the same few buffers each time, in the order of
submissions. No plan depends on the length of a prompt or on the size of the pool.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..compile.lowering import Lowering
from ..compile.plan import BufferSpec, Launch, Plan, Role
from ..compile.steps import Head, body_plan, head_plan
from ..compile.tuner import tuned
from ..errors import DeviceError, KernelError, ShaderlmError
from ..gpu import BoundProgram, Buffer, Copy, Device, PendingReadBack, Program
from ..graph.batch import CONTEXTS, PAGE, RUN_ROWS, context_class
from ..graph.sampling import ADJUSTMENT
from ..models.architecture import Architecture
from ..models.config import Config, StepSpec
from .adjusted import REPORT, LogitAdjustments, LogprobRequest
from .device_features import put_features
from .pages import MAX_SEQUENCES, Reserved
from .row_scores import ScoreGroup
from .runner import (
    F32,
    U32,
    DecodeBatch,
    Runner,
    SequenceChunk,
    StepResult,
    Tokens,
    bucket,
    buckets,
    head_kind,
    is_decode_step,
    joined_scores,
    padded_batch,
    rope_factors,
)
from .sizes import (
    FIRST_POSITIONS,
    Memory,
    cache_format,
    cache_row,
    check_memory,
    input_sizes,
    max_context,
    max_outputs,
    max_tokens,
    memory_of,
    pages_of,
    weights_of,
)
from .states import FIRST_STATES
from .weights import Progress, Source, upload

# Compiled while weights are uploaded, with that of decoding: a short question in a chat template takes 33 to 64 tokens,
# and most kernels serve other buckets too.
_FIRST_BUCKET = 64
_DETERMINISTIC_ROWS = 64


class GpuSteps(Runner):
    """Weights, the pool and everything that sequences share."""

    def __init__(
        self,
        architecture: Architecture,
        config: Config,
        source: Source,
        device: Device,
        *,
        fusions: Sequence[str] | None = None,
        cache: str | None = None,
        precision: str = "fast",
        progress: Progress | None = None,
        tune: bool = False,
        measure: bool = False,
        reserve: int = 0,
        deterministic: bool = False,
    ) -> None:
        """`reserve`: tokens whose keys and values have their memory from the beginning; the cache grows beyond them.

        `tune`: take kernels that were measured to be faster. `measure`: measure those of new shapes, for two seconds.
        """
        factors = rope_factors(config, source)
        self.device = device
        self.cache = cache or cache_format(device.caps)
        self._lowering = Lowering(device.caps, precision)
        fitting = replace(config, context=min(config.context, max_context(config, device.caps, self.cache)))
        super().__init__(architecture, fitting, factors, fusions, self._lowering.unsupported_reason)
        self.max_tokens = max_tokens(config, device.caps)
        self.max_outputs = max_outputs(config, device.caps)
        if deterministic:  # a decode step has the rows of the largest, however few sequences run
            self.max_outputs = min(self.max_outputs, _DETERMINISTIC_ROWS)
        self.max_pages = device.caps.max_operand // (cache_row(config, self.cache) * PAGE)
        self.deterministic, self.decode_rows = deterministic, min(self.max_outputs, self.max_tokens)
        # Without subgroups a context class reads as many keys as its rows may have, of runs too.
        self.runs_have_any_length = device.caps.subgroups
        self.steps_ahead = device.caps.policy.steps_ahead
        self.steps_ahead_alone = device.caps.policy.steps_ahead_alone
        self.warm_up_seconds = device.caps.policy.warm_up_seconds
        self._plans: dict[StepSpec | Head, Plan] = {}
        self._planning = threading.RLock()
        self._background: threading.Thread | None = None
        self._ready_rows = 1  # of decode steps whose kernels are compiled, with those of fewer
        self._rows_thread: threading.Thread | None = None
        self._bound: dict[StepSpec | Head, BoundProgram] = {}
        self._decodes: weakref.WeakSet[DecodeBatch] = weakref.WeakSet()
        self._buffers: dict[str, Any] = {}  # inputs, pools, tables, scratch and parameters, by the names in plans
        if tune:  # while nothing else keeps the GPU busy
            decode_graphs = [self.graph(StepSpec(1, CONTEXTS[0], self.cache))[0], self.head_graph(1, 1)[0]]
            self._lowering.tuning = tuned(device, decode_graphs, precision, measure)
        self._weights: dict[str, Any] = {}
        self._page_copies: Any = None  # a buffer for pages that are read back
        self._state_copy: Any = None  # one for a row of the states that is copied
        first, reserve = min(_FIRST_BUCKET, self.max_tokens), min(reserve, self.config.context)
        keys: list[StepSpec | Head] = [StepSpec(1, CONTEXTS[0], self.cache), self.head(1, 1, "greedy", paged=False)]
        keys += [StepSpec(first, CONTEXTS[0], self.cache, True), self.head(1, first, "greedy")]
        compiled: list[Future[None]] = []
        with ThreadPoolExecutor(len(keys), "compile") as pool:
            try:
                # Says what this device cannot do before anything is uploaded.
                for key in keys:
                    steps = [launch.step for launch in self.plan(key).launches]
                    compiled.append(pool.submit(device.compile, steps))  # while the next plan is made
                if reserve:
                    check_memory(self.memory(reserve), reserve, device.caps)
                self._make_inputs(reserve)  # before weights are copied: there may be too little memory
                self._weights = upload(device, weights_of(map(self.plan, keys)), source, progress)
                taken = sum(each.size for each in (*self._weights.values(), *self._buffers.values()))
                pool_bytes = self.pool.pages * self.page_bytes
                self.share_memory(device.caps, taken - pool_bytes, pages_of(reserve) if reserve else 0)
                for each in compiled:
                    each.result()
            except BaseException:
                wait(compiled)
                self.close()
                raise

    def _make_inputs(self, reserve: int) -> None:
        for name, size in input_sizes(self.config, self.device.caps).items():
            self._buffers[name] = self.device.buffer(size)
        if rows := [spec.nbytes for spec in self._kept("recurrent").values()]:
            self.max_states = min(self.max_states, self.device.caps.max_operand // max(rows))
            self._grow_states(min(FIRST_STATES, self.max_states))
        self._reserve_positions(max(1, reserve))
        self._grow(pages_of(reserve))

    def memory(self, tokens: int) -> Memory:
        """What this model takes with so many tokens in the cache."""
        counts, context = (1, self.max_tokens), context_class(tokens, self.config.head_width)
        steps = [StepSpec(count, context, self.cache, count > 1) for count in counts]
        heads = [self.head(1, count, "greedy", paged=count > 1) for count in counts]
        return memory_of(map(self.plan, steps), map(self.plan, heads), self.config, self.device.caps, tokens)

    @property
    def usable(self) -> bool:
        """Not closed, and its device is not lost."""
        return not self.closed and self.device.usable

    # plans -----------------------------------------------------------------------------------------------

    def plan(self, key: StepSpec | Head) -> Plan:
        """The plan of a step or of a head, made once."""
        with self._planning:
            if key not in self._plans:
                if isinstance(key, StepSpec):
                    graph, rejected = self.graph(key)
                    plan = body_plan(self._lowering, graph, rejected, key, self.config)
                else:
                    graph, rejected = self.head_graph(key.rows, key.tokens, logits=key.kind != "hidden")
                    plan = head_plan(self._lowering, graph, rejected, key, self.config)
                self._plans[key] = plan
            return self._plans[key]

    def warm_up(self) -> None:
        """Make and compile every plan that any step can want. Takes seconds: for servers and tests."""
        tokens_of = buckets(self.max_tokens)
        steps = [StepSpec(tokens, context, self.cache, True) for tokens in reversed(tokens_of) for context in CONTEXTS]
        steps += [StepSpec(1, context, self.cache) for context in CONTEXTS]
        decoded = [tokens for tokens in tokens_of if self._has_decode_plan(tokens)]
        steps += [StepSpec(tokens, context, self.cache, True, True) for tokens in decoded for context in CONTEXTS]
        if self.config.images is not None:
            steps += [step._replace(images=True) for step in steps]
        kinds = ("greedy", "sample", "adjusted", "logits", "hidden", "scores")
        rows = buckets(self.max_outputs)
        heads = [self.head(count, 2, kind) for kind in kinds for count in rows]
        heads += [self.head(1, 1, kind, paged) for kind in kinds for paged in (False, True)]
        keys: list[StepSpec | Head] = [*steps, *heads]
        for key in keys:
            self.device.compile([launch.step for launch in self.plan(key).launches])
        self._ready_rows = self.max_outputs

    def ready_rows(self, rows: int) -> int:
        """Compiling takes longer than what several rows gain in a short text: another thread does it."""
        if self.deterministic or not self.device.caps.policy.record_ahead:
            return rows
        busy = self._rows_thread is not None and self._rows_thread.is_alive()
        wanted = min(bucket(rows), self.max_outputs)
        if self._ready_rows < wanted and not busy and not self.closed:
            self._rows_thread = threading.Thread(target=self._prepare_rows, args=(wanted,), name="plan")
            self._rows_thread.start()
        return min(rows, self._ready_rows)

    def _prepare_rows(self, most: int) -> None:
        with suppress(ShaderlmError):  # whoever wants the plan is told
            while self._ready_rows < most:
                tokens = 2 * self._ready_rows
                decode = self._has_decode_plan(tokens)
                keys: list[StepSpec | Head] = [StepSpec(tokens, each, self.cache, True, decode) for each in CONTEXTS]
                keys += [self.head(tokens, tokens, kind) for kind in ("greedy", "sample")]
                for key in keys:
                    if self.closed:
                        return
                    self.device.compile([launch.step for launch in self.plan(key).launches])
                self._ready_rows = tokens

    def head(self, rows: int, tokens: int, kind: str, paged: bool = True) -> Head:
        """The head of a step: of one row, or of any number of them."""
        return Head(bucket(rows), 1 if tokens == 1 else self.max_tokens, kind, paged)

    def prepare(self, step: StepSpec) -> None:
        """Have the plan of a step made and compiled by another thread, for when a conversation gets there."""
        busy = self._background is not None and self._background.is_alive()
        if step not in self._plans and not busy and self.device.caps.policy.record_ahead:
            self._background = threading.Thread(target=self._prepare, args=(step,), name="plan")
            self._background.start()

    def _prepare(self, step: StepSpec) -> None:
        with suppress(ShaderlmError):  # whoever wants the plan is told
            self.device.compile([launch.step for launch in self.plan(step).launches])

    def launches(self, program: Program) -> tuple[str, int, tuple[Launch, ...]]:
        """The name, the rows and the dispatches of a plan of this model, by its program."""
        with self._planning:
            plans = list(self._plans.values())
        plan = next(plan for plan in plans if plan.program is program)
        return plan.name, plan.tokens, plan.launches

    # buffers ---------------------------------------------------------------------------------------------

    def bound(self, key: StepSpec | Head) -> BoundProgram:
        """A plan with its buffers, kept until a buffer is replaced."""
        if key not in self._bound:
            plan = self.plan(key)
            buffers = {name: self._buffer(name, spec) for name, spec in plan.buffers.items()}
            self._bound[key] = self.device.bind(plan.program, buffers)
        return self._bound[key]

    def bound_all(self, keys: Sequence[StepSpec | Head]) -> list[BoundProgram]:
        """Several plans with their buffers. Binding one may replace a buffer of another, which is then bound again."""
        for key in keys:
            self.bound(key)
        return [self.bound(key) for key in keys]

    def _buffer(self, name: str, spec: BufferSpec) -> Any:
        if spec.role == "weight":
            return self._weights[name]
        if spec.role == "params":
            name = f"params {spec.words}"
            if name not in self._buffers:
                self._buffers[name] = self.device.buffer(np.array(spec.words, np.uint32))
            return self._buffers[name]
        known = self._buffers.get(name)
        if spec.role in ("scratch", "output") and (known is None or known.size < spec.nbytes):
            self._replace({name: self.device.buffer(spec.nbytes)})
        elif known is None:
            raise KernelError(f"a plan wants the buffer {name!r}, which nobody made")
        return self._buffers[name]

    def _replace(self, buffers: Mapping[str, Any]) -> None:
        """Other buffers under known names. What was bound to the old ones is bound again when it is wanted."""
        for decode in list(self._decodes):
            decode.close()
        self._bound.clear()
        old = [self._buffers[name] for name in buffers if name in self._buffers]
        self._buffers.update(buffers)
        for buffer in old:
            buffer.destroy()

    def _kept(self, role: Role) -> dict[str, BufferSpec]:
        """What lives from step to step, as every plan has it."""
        return self.plan(StepSpec(1, CONTEXTS[0], self.cache)).of_role(role)

    def _grow(self, pages: int) -> None:
        self._enlarge({name: spec.nbytes * pages * PAGE for name, spec in self._kept("state").items()})
        self.pool.grow(pages)

    def _grow_states(self, rows: int) -> None:
        self._enlarge({name: spec.nbytes * rows for name, spec in self._kept("recurrent").items()})
        self.states.grow(rows)

    def _enlarge(self, sizes: Mapping[str, int]) -> None:
        """Larger buffers, which begin with what was in the smaller ones."""
        grown: dict[str, Any] = {}
        try:
            for name, nbytes in sizes.items():
                grown[name] = self.device.buffer(nbytes)
                if name in self._buffers:
                    self.device.copy(Copy(self._buffers[name], grown[name], self._buffers[name].size))
        except BaseException:
            for buffer in grown.values():
                buffer.destroy()
            raise
        self._replace(grown)

    def _copy_state(self, source: int, target: int) -> None:
        # By way of a buffer that stays, all of them first: making one for each copy takes as long as a decode step.
        rows = [(self._buffers[name], nbytes) for name, nbytes in self.state_tensors]
        if self._state_copy is None:
            self._state_copy = self.device.buffer(sum(nbytes for _, nbytes in rows))
        places = itertools.accumulate((nbytes for _, nbytes in rows), initial=0)
        there, back = list[Copy](), list[Copy]()
        for (buffer, nbytes), at in zip(rows, places, strict=False):
            there.append(Copy(buffer, self._state_copy, nbytes, source * nbytes, at))
            back.append(Copy(self._state_copy, buffer, nbytes, at, target * nbytes))
        self.device.copy(*there, *back)

    def _write_table(self, index: int, word: int) -> None:
        self.device.write(self._buffers["page_table"], np.array([word], np.uint32), 4 * index)

    def _write_counts(self, slot: int, counts: U32) -> None:
        self._reserve_counts(slot)
        self.device.write(self._buffers["counts"], counts, slot * counts.nbytes)

    def _reserve_counts(self, slot: int) -> None:
        """Counts of tokens for every sequence slot up to this one. Most models never need any."""
        row, known = 4 * self.config.vocabulary, self._buffers.get("counts")
        if known is not None and known.size >= (slot + 1) * row:
            return
        most = self.device.caps.max_operand // row
        if slot >= most:
            holds = f"this device counts the tokens of {most} sequences at a time"
            raise DeviceError(f"{holds}, and penalties or log probabilities want more. Free a sequence first")
        grown = self.device.buffer(min(bucket(slot + 1), most) * row)
        if known is not None:
            self.device.copy(Copy(known, grown, known.size))
        self._replace({"counts": grown})

    def reserve_adjusted(self, changes: LogitAdjustments, slots: Iterable[int]) -> None:
        """Buffers for what is done with logits. They are made when they are first wanted, and grow."""
        sizes = {"adjustments": ADJUSTMENT.itemsize * self.max_outputs}
        sizes |= {"biases": changes.biases.nbytes, "masks": changes.masks.nbytes}
        small = {name: size for name, size in sizes.items() if self._size(name) < size}
        for name, size in small.items():
            self._replace({name: self.device.buffer(bucket(size))})
        self._reserve_counts(max(slots))

    def _size(self, name: str) -> int:
        size: int = self._buffers[name].size if name in self._buffers else 0
        return size

    def _reserve_positions(self, positions: int) -> None:
        ropes = self.config.ropes.items()
        if any(self._size(name) < positions * 4 * rope.rotary for name, rope in ropes):
            count = min(self.config.context, max(FIRST_POSITIONS, 2 * positions))
            self._replace({name: self.device.buffer(table) for name, table in self.rope_tables(count).items()})

    def _apply(self, changed: Sequence[Reserved]) -> None:
        copies = []
        for source, target in (copied for reserved in changed for copied in reserved.copies):
            for name, spec in self._kept("state").items():
                pool, nbytes = self._buffers[name], spec.nbytes * PAGE
                copies.append(Copy(pool, pool, nbytes, source * nbytes, target * nbytes))
        if copies:  # before the table changes: copying takes memory, of which there may be none
            self.device.copy(*copies)
        for reserved in changed:
            for first, pages in _together(reserved.entries):
                self.device.write(self._buffers["page_table"], np.array(pages, np.uint32), 4 * first)

    @property
    def page_tensors(self) -> tuple[tuple[str, int], ...]:
        """The tensors that a page is made of: names, and bytes of a page."""
        states = self.plan(StepSpec(1, CONTEXTS[0], self.cache)).of_role("state").items()
        return tuple((name, spec.nbytes * PAGE) for name, spec in states)

    def read_pages(self, pages: Sequence[int]) -> Callable[[], list[NDArray[np.uint8]]]:
        """The contents of pages as the steps that were submitted leave them; nothing is waited for under the lock.

        They are gathered on the device, so that one read-back brings them.
        """
        return self._read(self.page_tensors, pages)

    def _read(self, sizes: Sequence[tuple[str, int]], pages: Sequence[int]) -> Callable[[], list[NDArray[np.uint8]]]:
        """Rows of some buffers, of so many bytes each: [rows, bytes]."""
        at, copies = 0, []
        total = len(pages) * sum(nbytes for _, nbytes in sizes)
        with self.lock:
            self._check_open()
            if self._page_copies is None or self._page_copies.size < total:
                if self._page_copies is not None:
                    self._page_copies.destroy()
                self._page_copies = self.device.buffer(total)
            for name, nbytes in sizes:
                for first, count in _runs(pages):
                    copied = count * nbytes
                    copies.append(Copy(self._buffers[name], self._page_copies, copied, first * nbytes, at))
                    at += copied
            self.device.copy(*copies)
            pending = self.device.submit([], (self._page_copies, total))
            assert pending is not None

        def wait() -> list[NDArray[np.uint8]]:
            contents = np.split(pending.wait(), np.cumsum([len(pages) * nbytes for _, nbytes in sizes])[:-1])
            return [each.reshape(len(pages), -1) for each in contents]

        return wait

    def write_pages(self, pages: Sequence[int], contents: Sequence[NDArray[np.uint8]]) -> Callable[[], object]:
        """Contents into pages, in the order of submissions; one write for neighbouring pages of a tensor."""
        return self._write(self.page_tensors, pages, contents)

    @property
    def state_tensors(self) -> tuple[tuple[str, int], ...]:
        """The tensors that a row of the states is made of, and their bytes."""
        return tuple((name, spec.nbytes) for name, spec in self._kept("recurrent").items())

    def read_state(self, row: int, tensors: Sequence[tuple[str, int]]) -> Callable[[], list[NDArray[np.uint8]]]:
        """Some tensors of a row of the states, as the steps that were submitted leave it."""
        return self._read(tensors, [row])

    def write_state(
        self, row: int, tensors: Sequence[tuple[str, int]], contents: Sequence[NDArray[np.uint8]]
    ) -> Callable[[], object]:
        """Some tensors of a row, in the order of submissions."""
        return self._write(tensors, [row], contents)

    def _write(
        self, sizes: Sequence[tuple[str, int]], pages: Sequence[int], contents: Sequence[NDArray[np.uint8]]
    ) -> Callable[[], object]:
        with self.lock:
            self._check_open()
            for (name, nbytes), data in zip(sizes, contents, strict=True):
                at = 0
                for first, count in _runs(pages):
                    self.device.write(self._buffers[name], data[at : at + count], first * nbytes)
                    at += count
            pending = self.device.submit([], (self._buffers["tokens"], 4))  # what is written is freed then
            assert pending is not None
            return pending.wait

    # steps -----------------------------------------------------------------------------------------------

    def _run(self, records: U32, outputs: NDArray[Any], keys: int, parts: Sequence[SequenceChunk]) -> StepResult:
        decode, kind, gives = is_decode_step(parts), head_kind(parts), {part.gives for part in parts}
        if self.config.recurrent:  # whose plans of decode rows take each row for another sequence
            decode = decode and all(part.rows == 1 for part in parts)
        images = self.has_images(parts)
        step, rows = self.step_of(len(records), keys, decode, images=images), self.step_rows(len(outputs), decode)
        if images:
            self.write_images(parts)
        plans: list[StepSpec | Head] = [step]
        if "hidden" in gives:  # first: a sampler moves the records on
            plans.append(self.head(rows, step.tokens, "hidden"))
        if gives - {"nothing", "hidden"}:
            plans.append(self.head(rows, step.tokens, kind))
        changes = self._adjusted(parts) if kind == "adjusted" else None
        if changes is not None:
            self.reserve_adjusted(changes, outputs["slot"].tolist())
        scores = None
        if groups := self._score_groups(parts):
            scores = self._scored(step, records, groups)
            del plans[0]  # its hidden states are there
            if not plans:
                return StepResult(wait_for_scores=scores)
        programs = self.bound_all(plans)
        self.written_by = None
        self.write_batch(padded_batch(records, step.tokens, len(outputs)), outputs, changes)
        if gives == {"nothing"}:  # something must come back for who waits
            done = self.device.submit(programs, (self._buffers["tokens"], 4))
            return StepResult(wait_for_rows=None if done is None else done.wait)
        requests = None if changes is None else changes.requests
        pending = self.device.submit(programs, self.token_region(requests) if gives & {"token", "tokens"} else None)
        tokens = None if pending is None else self.tokens(pending, requests)
        # Copied before any later step writes others; waited for by whoever asks, without the lock.
        logits = self._rows_of("logits", _rows_with_logits(parts)) if gives & {"logits", "all logits"} else None
        hidden = self._rows_of("states", len(outputs)) if "hidden" in gives else None
        return StepResult(tokens, logits, hidden, wait_for_scores=scores)

    def _scored(self, step: StepSpec, records: U32, groups: Sequence[ScoreGroup]) -> Callable[[], U32]:
        """Run the rows of a step to their hidden states, and a head for each group of rows that are scored.

        Before a sampler, which moves the records on. Only reports of log probabilities are read back.
        """
        self._reserve_scores()
        pending, plans = list[PendingReadBack](), list[StepSpec | Head]([step])
        self.written_by = None
        for group in groups:
            rows = len(group.outputs)
            programs = self.bound_all([*plans, self.head(rows, step.tokens, "scores")])
            self.write_batch(padded_batch(records, step.tokens, rows), group.outputs, None)
            self.device.write(self._buffers["adjustments"], group.adjustments.view(np.uint32))
            self.device.write(self._buffers["targets"], group.targets)
            reports = self.device.submit(programs, (self._buffers["logprobs"], REPORT * rows))
            assert reports is not None
            pending.append(reports)
            plans = []
        return lambda: joined_scores([each.wait().view(np.uint32) for each in pending])

    def _reserve_scores(self) -> None:
        """Buffers for what the op logprobs reads of scored rows. Most models never need any."""
        sizes = {"adjustments": ADJUSTMENT.itemsize * self.max_outputs, "targets": 4 * self.max_outputs}
        missing = {name: size for name, size in sizes.items() if self._size(name) < size}
        if missing:
            self._replace({name: self.device.buffer(size) for name, size in missing.items()})

    def tokens(self, pending: PendingReadBack, requests: Sequence[LogprobRequest] | None) -> Tokens:
        """What is read back from `token_region`."""
        return Tokens(lambda: pending.wait().view(np.uint32), requests)

    def step_of(self, rows: int, keys: int, decode: bool, paged: bool = True, *, images: bool = False) -> StepSpec:
        """The step of so many rows of which the longest sees so many keys. `decode`: each is of another sequence."""
        tokens, context = self.step_rows(rows, decode), self.step_context(keys, decode)
        return StepSpec(tokens, context, self.cache, paged, decode and self._has_decode_plan(tokens), images)

    def _has_decode_plan(self, tokens: int) -> bool:
        """Do decode rows have a plan of their own? Among fewer rows there is no run in any step."""
        return RUN_ROWS <= tokens <= self.max_outputs

    def step_rows(self, rows: int, decode: bool) -> int:
        """The bucket of so many rows. Decode rows that must not depend on others have one for all counts."""
        return self.decode_rows if decode and self.deterministic else bucket(max(1, rows))

    def step_context(self, keys: int, decode: bool) -> str:
        """The context class of a step whose longest row sees so many keys; for such decode rows there is one, too."""
        return context_class(self.config.context if decode and self.deterministic else keys, self.config.head_width)

    def _rows_of(self, name: str, rows: int) -> Callable[[], F32]:
        """What a head gave for the first outputs of the step that was submitted last, on its way."""
        width = self.config.vocabulary if name == "logits" else self.config.hidden
        pending = self.device.submit([], (self._buffers[name], 4 * rows * width))
        assert pending is not None
        return lambda: pending.wait().view(np.float32).reshape(rows, width)

    def write_batch(self, batch: U32, outputs: NDArray[Any], changes: LogitAdjustments | None) -> None:
        """The records of a step, in the order of submissions."""
        self.device.write(self._buffers["batch"], batch)
        if len(outputs):
            self.device.write(self._buffers["outputs"], outputs.view(np.uint32))
        if changes is not None:
            for name, array in (("adjustments", changes.records), ("biases", changes.biases), ("masks", changes.masks)):
                self.device.write(self._buffers[name], array.view(np.uint32))

    def write_images(self, parts: Sequence[SequenceChunk]) -> None:
        """The records of rows of images, and their features, in the order of submissions."""
        records, features = self._image_rows(parts)
        self.device.write(self._buffers["image_rows"], records)
        put_features(self.device, features, self._buffers["features"])

    def token_region(self, requests: Sequence[LogprobRequest] | None) -> tuple[Buffer, int]:
        """Where the tokens of a step lie: a buffer, and how many of its bytes.

        The last token of every sequence slot; where outputs report log probabilities, the tokens come with these.
        """
        if requests is None:
            return self._buffers["tokens"], 4 * MAX_SEQUENCES
        return self._buffers["logprobs"], REPORT * bucket(len(requests))  # the same for all counts of a bucket

    @property
    def forked(self) -> bool:
        """Is this another process than the one that opened the device?"""
        return self.device.forked

    def check_device(self) -> None:
        """A device that is closed, lost or of another process is a DeviceError."""
        self.device.check()

    def close(self) -> None:
        """Give all memory back."""
        if self.forked:  # it is the other process's, and so are the threads
            self.closed = True
            return
        with self.lock:
            self.closed = True
            for decode in list(self._decodes):
                decode.close()
        for thread in (self._background, self._rows_thread):
            if thread is not None:
                thread.join()
        with self.lock:
            self._bound.clear()
            for buffers in (self._weights, self._buffers):
                for buffer in buffers.values():
                    buffer.destroy()
                buffers.clear()
            for copies in (self._page_copies, self._state_copy):
                if copies is not None:
                    copies.destroy()
            self._page_copies = self._state_copy = None

    def report(self) -> Mapping[str, Any]:
        """Where it runs, and how much memory its weights take."""
        caps = self.device.caps
        nbytes = sum(buffer.size for buffer in self._weights.values())
        return {
            "device": f"{caps.name} ({caps.backend})",
            "weight_bytes": nbytes,
            "cache": self.cache,
            "precision": self._lowering.precision if caps.policy.round_inputs else "exact",
        }


def _rows_with_logits(parts: Sequence[SequenceChunk]) -> int:
    """How many outputs there are up to the last one that asks for logits."""
    rows = last = 0
    for part in parts:
        rows += part.outputs
        last = rows if part.gives in ("logits", "all logits") else last
    return last


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring pages as (first, how many)."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


def _together(entries: Sequence[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    """Entries with neighbouring indices as (first index, values)."""
    groups: list[tuple[int, list[int]]] = []
    for index, value in entries:
        if groups and groups[-1][0] + len(groups[-1][1]) == index:
            groups[-1][1].append(value)
        else:
            groups.append((index, [value]))
    return groups
