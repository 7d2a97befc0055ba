"""A model on a GPU: weights in buffers, plans by shape of the step, and what its sessions share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from ..compile.plan import NONE, Launch, Lowering, Plan
from ..compile.tuner import tuned
from ..compile.tuning import Tuning
from ..errors import KernelError, ShaderlmError
from ..gpu import Array, Device, DeviceCaps, Loaded, Program
from ..graph.fuse import RejectedFusion, fuse
from ..graph.graph import Builder, Graph
from ..graph.ops import CHOICE
from ..models.architecture import Architecture, Config, Step
from .gpu_session import GpuSession
from .session import F32, Model, Session
from .weights import Progress, Source, upload

# Rows of a prompt at once: enough to fill a large GPU, little enough for a software adapter to be interrupted.
CHUNK, SOFTWARE_CHUNK = 512, 128
# While weights are on their way, the kernels of decoding and of a short prompt are compiled: they are the first ones
# wanted, and most of them serve longer prompts too.
_COMPILED_ROWS = (1, 32)
KEPT_GRAPHS = 4
MOST_PLANS, MOST_PARAMS = 32, 512  # of a model: prompts come in many lengths, each with a plan of its own


def plan_of(
    architecture: Architecture,
    config: Config,
    caps: DeviceCaps,
    rows: int,
    capacity: int,
    fusions: Sequence[str] | None = None,
    cache: str | None = None,
    precision: str = "fast",
    tuning: Tuning | None = None,
) -> Plan:
    """The plan of a step on a device that has these caps."""
    step = Step(rows, capacity, cache or cache_format(caps))
    lowering = Lowering(caps, precision, tuning)
    graph, rejected = fuse(architecture.build(config, step), fusions, lowering.unsupported_reason)
    return lowering.plan(step_name(step), graph, rejected, rows, capacity)


def cache_format(caps: DeviceCaps) -> str:
    """The cache is f16 where the GPU has f16."""
    return "f16" if caps.f16 else "f32"


def largest_context(config: Config, caps: DeviceCaps, cache: str) -> int:
    """Positions for which every operand that grows with the context still fits one binding."""
    width = -(-config.head_width // 4) * 4
    per_position = (
        config.kv_heads * width * (2 if cache == "f16" else 4),  # one cache
        4 * config.rope.rotary,  # the table of turns
        4 * config.heads * max(1, width // 32),  # scores of a query; partial sums of a split of 32 keys
    )
    return caps.max_operand // max(per_position)


def most_rows(config: Config, caps: DeviceCaps) -> int:
    """Rows at once: what is worth it, and no more than lets every hidden tensor fit one binding."""
    head = config.head_width
    widest = max(config.hidden, 2 * config.ffn, (config.heads + 2 * config.kv_heads) * head)
    return max(1, min(SOFTWARE_CHUNK if caps.software else CHUNK, caps.max_operand // (4 * widest)))


def make_room(kept: dict[Any, Any], most: int) -> None:
    """Forget the oldest entries. Buffers among them live on as long as a bound plan uses them."""
    while len(kept) >= most:
        del kept[next(iter(kept))]


def step_name(step: Step) -> str:
    """What people call a step."""
    return "decode" if step.rows == 1 else "prefill"


class GpuModel(Model):
    """Weights and everything that sessions share: the arena, parameters, logits."""

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
    ) -> None:
        factors = source.vector(config.rope.factors) if config.rope.factors else None
        self.device = device
        self.cache = cache or cache_format(device.caps)
        room = largest_context(config, device.caps, self.cache)
        self._lowering = Lowering(device.caps, precision)
        fitting = replace(config, context=min(config.context, room))
        super().__init__(architecture, fitting, factors, fusions, self._lowering.unsupported_reason)
        self.chunk = most_rows(config, device.caps)
        # A software adapter computes on the host's cores: nothing is gained by running ahead there.
        self.ahead = 1 if device.caps.software else 2
        self.closed = False
        self._planning = threading.RLock()
        self._preparing: threading.Thread | None = None
        self._graphs: dict[Step, tuple[Graph, tuple[RejectedFusion, ...]]] = {}
        self._plans: dict[Step, Plan] = {}
        self._choosers: dict[tuple[str, bool], Plan] = {}
        self._sessions: weakref.WeakSet[GpuSession] = weakref.WeakSet()
        self._arena: dict[str, Any] = {}
        self._params: dict[bytes, Any] = {}
        self._table: tuple[int, Any] = (0, None)
        if tune:  # while nothing else keeps the GPU busy
            decode = Step(1, self.capacity(1), self.cache)
            self._lowering.tuning = tuned(device, self.graph(decode)[0], precision)
        # Says what this device cannot do before anything is uploaded.
        steps = [step for rows in _COMPILED_ROWS for step in self._first_plan(rows).program.steps]
        with ThreadPoolExecutor(1, "compile") as pool:
            compiled = pool.submit(device.compile, [*steps, *self._chooser_plan("argmax", True).program.steps])
            self._own = {NONE: device.buffer(16), "logits": device.buffer(4 * config.vocabulary)}
            self._weights = upload(device, self.graph(Step(1, 1, self.cache))[0], source, progress)
            try:
                compiled.result()
            except BaseException:
                self.close()
                raise

    def _first_plan(self, rows: int) -> Plan:
        rows = min(rows, self.config.context)
        return self.plan(Step(rows, self.capacity(rows), self.cache))

    def graph(self, step: Step) -> tuple[Graph, tuple[RejectedFusion, ...]]:
        """The fused graph of a step; the last few are kept."""
        with self._planning:
            if step not in self._graphs:
                made = super().graph(step)
                make_room(self._graphs, KEPT_GRAPHS)
                self._graphs[step] = made
            return self._graphs[step]

    def plan(self, step: Step) -> Plan:
        """The plan of a step, made once."""
        with self._planning:
            if step not in self._plans:
                graph, rejected = self.graph(step)
                make_room(self._plans, MOST_PLANS)
                self._plans[step] = self._lowering.plan(step_name(step), graph, rejected, step.rows, step.capacity)
            return self._plans[step]

    def planned(self, step: Step) -> bool:
        """Is there a plan of this step already?"""
        with self._planning:
            return step in self._plans

    def prepare(self, step: Step) -> None:
        """Have the plan of a step made and compiled by another thread, for when it is wanted."""
        if not self.planned(step) and (self._preparing is None or not self._preparing.is_alive()):
            self._preparing = threading.Thread(target=self._prepare, args=(step,), name="plan")
            self._preparing.start()

    def _prepare(self, step: Step) -> None:
        with suppress(ShaderlmError):  # whoever wants the plan is told
            self.device.compile(self.plan(step).program.steps)

    def load(self, step: Step, own: Mapping[str, Any]) -> Loaded:
        """A plan bound to buffers: `own` are the session's."""
        return self._bound(self.plan(step), {**own, "rope_table": self._rope_table(step.capacity)})

    def _bound(self, plan: Plan, own: Mapping[str, Any]) -> Loaded:
        shared: dict[str, Any] = {**self._weights, **self._own, **own}
        for name, size in plan.arena.items():
            shared[name] = self._slot(name, size)
        for name, packed in plan.params.items():
            shared[name] = self._parameters(packed)
        missing = [name for name in plan.program.buffers if name not in shared]
        if missing:
            raise KernelError(f"the plan of {plan.name} wants buffers that nobody made: {missing}")
        return self.device.load(plan.program, shared)

    def _slot(self, name: str, size: int) -> Any:
        """A buffer of the arena, replaced by a larger one when that is needed; who bound the old one keeps it."""
        if name not in self._arena or self._arena[name].size < size:
            self._arena[name] = self.device.buffer(size)
        return self._arena[name]

    def _parameters(self, packed: Array) -> Any:
        key = packed.tobytes()
        if key not in self._params:
            make_room(self._params, MOST_PARAMS)
            self._params[key] = self.device.buffer(packed)
        return self._params[key]

    def _rope_table(self, positions: int) -> Any:
        if self._table[0] < positions:
            self._table = (positions, self.device.buffer(self.rope_table(positions)))
        return self._table[1]

    def chooser(self, op: str, moving: bool, own: Mapping[str, Any]) -> Loaded:
        """argmax or sample, from the logits into the session's ids; `moving` ends a step: the position moves on too."""
        return self._bound(self._chooser_plan(op, moving), own)

    def _chooser_plan(self, op: str, moving: bool) -> Plan:
        if (op, moving) not in self._choosers:
            vocabulary = self.config.vocabulary
            builder = Builder()
            builder.tensor("logits", 1, vocabulary, role="input")
            builder.tensor("choice", CHOICE.itemsize // 4, role="input")
            builder.tensor("positions", 1, role="state")
            builder.tensor("ids", 1)
            greedy = op == "argmax"
            dims = {"rows": 1, "width": vocabulary} if greedy else {"width": vocabulary}
            inputs = {"x": "logits"} if greedy else {"logits": "logits", "choice": "choice"}
            builder.add(op, dims, inputs, "choose", out="ids")
            if moving:
                builder.add("next_position", {}, {"positions": "positions"}, "choose", positions="positions")
            with self._planning:
                self._choosers[op, moving] = self._lowering.plan("choose", builder.graph("ids"), (), 1, 1)
        return self._choosers[op, moving]

    def launches(self, program: Program) -> tuple[str, int, tuple[Launch, ...]]:
        """The name, the rows and the dispatches of a plan of this model, by its program."""
        with self._planning:
            plans = (*self._plans.values(), *self._choosers.values())
        plan = next(plan for plan in plans if plan.program is program)
        return plan.name, plan.rows, plan.launches

    def read_logits(self) -> F32:
        """What is in the buffer of logits. Waits."""
        return self.device.read(self._own["logits"], 4 * self.config.vocabulary).view(np.float32)

    def session(self) -> Session:
        """A new, empty conversation."""
        session = GpuSession(self)
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """Give all memory back. Sessions give theirs back themselves, but record nothing more from now on."""
        self.closed = True
        if self._preparing is not None:
            self._preparing.join()
        for session in list(self._sessions):
            session.drop_stock()
        for kept in (self._weights, self._arena, self._params, self._own):
            for native in kept.values():
                native.destroy()
            kept.clear()
        if self._table[1] is not None:
            self._table[1].destroy()
        self._table = (0, None)

    def report(self) -> Mapping[str, Any]:
        """Where it runs, and how much memory its weights take."""
        caps = self.device.caps
        held = sum(native.size for native in self._weights.values())
        return {
            "device": f"{caps.name} ({caps.backend})",
            "weight_bytes": held,
            "cache": self.cache,
            # Software adapters gain nothing by rounding, and do not.
            "precision": "exact" if caps.software else self._lowering.precision,
        }
