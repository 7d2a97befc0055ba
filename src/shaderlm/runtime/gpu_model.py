"""A model on a GPU: weights in buffers, plans by shape of the step, sessions with their caches.

Per token: one small write, the recorded plan, one submission; the chosen token stays on the GPU as the next input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import KernelError
from ..gpu import Array, Device, Facts, Letter, Loaded, Program
from ..graph.fuse import fuse
from ..graph.graph import Builder
from ..graph.ops import CHOICE
from ..models.architecture import Architecture, Config, Step
from .plan import NONE, Launch, Lowering, Plan, tensor_bytes
from .session import F32, Choice, Model, Session
from .weights import Progress, Source, upload

# Rows of a prompt at once: enough to fill a large GPU, little enough for a software adapter to be interrupted.
CHUNK, SOFTWARE_CHUNK = 512, 128
# While weights are on their way, the kernels of decoding and of a short prompt are compiled: they are the first ones
# wanted, and most of them serve longer prompts too.
_COMPILED_ROWS = (1, 32)
KEPT_PLANS = 4  # per session; each is a few hundred bind groups
MOST_PLANS, MOST_PARAMS = 32, 512  # of a model: prompts come in many lengths, each with a plan of its own


@dataclass(frozen=True)
class Posted:
    """A token on its way from the GPU."""

    letter: Letter

    def wait(self) -> int:
        """The token's id."""
        return int(self.letter.open().view(np.uint32)[0])


def plan_of(
    architecture: Architecture,
    config: Config,
    facts: Facts,
    rows: int,
    capacity: int,
    fusions: Sequence[str] | None = None,
    cache: str | None = None,
    precision: str = "fast",
) -> Plan:
    """The plan of a step on a device that has these facts."""
    step = Step(rows, capacity, cache or cache_format(facts))
    lowering = Lowering(facts, precision)
    graph, refusals = fuse(architecture.build(config, step), fusions, lowering.why_not)
    return lowering.plan(step_name(step), graph, refusals, rows, capacity)


def cache_format(facts: Facts) -> str:
    """The cache is f16 where the GPU has f16."""
    return "f16" if facts.f16 else "f32"


def largest_context(config: Config, facts: Facts, cache: str) -> int:
    """Positions for which every operand that grows with the context still fits one binding."""
    width = -(-config.head_width // 4) * 4
    per_position = (
        config.kv_heads * width * (2 if cache == "f16" else 4),  # one cache
        4 * config.rope.rotary,  # the table of turns
        4 * config.heads * max(1, width // 32),  # scores of a query; partial sums of a split of 32 keys
    )
    return facts.max_operand // max(per_position)


def most_rows(config: Config, facts: Facts) -> int:
    """Rows at once: what is worth it, and no more than lets every hidden tensor fit one binding."""
    head = config.head_width
    widest = max(config.hidden, 2 * config.ffn, (config.heads + 2 * config.kv_heads) * head)
    return max(1, min(SOFTWARE_CHUNK if facts.software else CHUNK, facts.max_operand // (4 * widest)))


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
    ) -> None:
        factors = source.vector(config.rope.factors) if config.rope.factors else None
        self.device = device
        self.cache = cache or cache_format(device.facts)
        room = largest_context(config, device.facts, self.cache)
        self._lowering = Lowering(device.facts, precision)
        fitting = replace(config, context=min(config.context, room))
        super().__init__(architecture, fitting, factors, fusions, self._lowering.why_not)
        self.chunk = most_rows(config, device.facts)
        # A software adapter computes on the host's cores: nothing is gained by running ahead there.
        self.ahead = 1 if device.facts.software else 2
        self._plans: dict[Step, Plan] = {}
        self._choosers: dict[str, Plan] = {}
        self._arena: dict[str, Any] = {}
        self._params: dict[bytes, Any] = {}
        self._table: tuple[int, Any] = (0, None)
        # Says what this device cannot do before anything is uploaded.
        steps = [step for rows in _COMPILED_ROWS for step in self._first_plan(rows).program.steps]
        with ThreadPoolExecutor(1, "compile") as pool:
            compiled = pool.submit(device.compile, [*steps, *self._chooser_plan("argmax").program.steps])
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

    def plan(self, step: Step) -> Plan:
        """The plan of a step, made once."""
        if step not in self._plans:
            graph, refusals = self.graph(step)
            make_room(self._plans, MOST_PLANS)
            self._plans[step] = self._lowering.plan(step_name(step), graph, refusals, step.rows, step.capacity)
        return self._plans[step]

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

    def chooser(self, op: str, own: Mapping[str, Any]) -> Loaded:
        """argmax or sample, from the logits into the session's ids."""
        return self._bound(self._chooser_plan(op), own)

    def _chooser_plan(self, op: str) -> Plan:
        if op not in self._choosers:
            vocabulary = self.config.vocabulary
            builder = Builder()
            builder.tensor("logits", 1, vocabulary, role="input")
            builder.tensor("choice", CHOICE.itemsize // 4, role="input")
            builder.tensor("ids", 1)
            greedy = op == "argmax"
            dims = {"rows": 1, "width": vocabulary} if greedy else {"width": vocabulary}
            inputs = {"x": "logits"} if greedy else {"logits": "logits", "choice": "choice"}
            builder.add(op, dims, inputs, "choose", out="ids")
            self._choosers[op] = self._lowering.plan("choose", builder.graph("ids"), (), 1, 1)
        return self._choosers[op]

    def launches(self, program: Program) -> tuple[str, int, tuple[Launch, ...]]:
        """The name, the rows and the dispatches of a plan of this model, by its program."""
        plans = (*self._plans.values(), *self._choosers.values())
        plan = next(plan for plan in plans if plan.program is program)
        return plan.name, plan.rows, plan.launches

    def read_logits(self) -> F32:
        """What is in the buffer of logits. Waits."""
        return self.device.read(self._own["logits"], 4 * self.config.vocabulary).view(np.float32)

    def session(self) -> Session:
        """A new, empty conversation."""
        return _Session(self)

    def close(self) -> None:
        """Give all memory back. Sessions give theirs back themselves."""
        for kept in (self._weights, self._arena, self._params, self._own):
            for native in kept.values():
                native.destroy()
            kept.clear()
        if self._table[1] is not None:
            self._table[1].destroy()
        self._table = (0, None)

    def report(self) -> Mapping[str, Any]:
        """Where it runs, and how much memory its weights take."""
        facts = self.device.facts
        held = sum(native.size for native in self._weights.values())
        return {
            "device": f"{facts.name} ({facts.backend})",
            "weight_bytes": held,
            "cache": self.cache,
            # Software adapters gain nothing by rounding, and do not.
            "precision": "exact" if facts.software else self._lowering.precision,
        }


class _Session(Session):
    def __init__(self, model: GpuModel) -> None:
        super().__init__(model)
        self._model, self._device = model, model.device
        self.chunk, self.ahead = model.chunk, model.ahead
        self.most_logits = max(1, model.device.facts.max_operand // (4 * model.config.vocabulary))
        self._capacity = 0
        self._caches: dict[str, Any] = {}
        self._loaded: dict[Step, Loaded] = {}
        device = self._device
        self._inputs = {
            "ids": device.buffer(4 * self.chunk),
            "positions": device.buffer(4 * self.chunk),
            "choice": device.buffer(32),
        }
        self._choosers: dict[str, Loaded] = {}

    def _grow(self, positions: int) -> None:
        """More room in the cache: new buffers, what was there copied over, plans bound again. All or nothing."""
        if positions <= self._capacity:
            return
        capacity = self._model.capacity(positions)
        graph = self._model.graph(Step(1, capacity, self._model.cache))[0]
        grown: dict[str, Any] = {}
        try:
            for name, tensor in graph.tensors.items():
                if tensor.role == "state":
                    grown[name] = self._device.buffer(tensor_bytes(tensor))
                    if name in self._caches:
                        self._device.copy(self._caches[name], grown[name], self._caches[name].size)
        except BaseException:
            _destroy(grown)
            raise
        old, self._caches, self._capacity = self._caches, grown, capacity
        self._loaded.clear()
        _destroy(old)

    def _plan(self, rows: int, logits: Literal["last", "none"] = "last") -> Loaded:
        self._grow(self.length + rows)
        step = Step(rows, self._capacity, self._model.cache, logits)
        if step not in self._loaded:
            others = [kept for kept in self._loaded if kept.rows != 1]
            if len(others) >= KEPT_PLANS:
                del self._loaded[others[0]]
            self._loaded[step] = self._model.load(step, {**self._inputs, **self._caches})
        return self._loaded[step]

    def _write_positions(self, rows: int) -> None:
        positions = np.arange(self.length, self.length + rows, dtype=np.uint32)
        self._device.write(self._inputs["positions"], positions)

    def _run(self, ids: NDArray[np.uint32], *, last: bool) -> None:
        plan = self._plan(len(ids), "last" if last else "none")
        self._device.write(self._inputs["ids"], ids)
        self._write_positions(len(ids))
        self._device.submit([plan])

    def _run_all(self, ids: NDArray[np.uint32]) -> F32:
        count = len(ids) * self._model.config.vocabulary
        logits = self._device.buffer(4 * count)
        try:
            self._grow(self.length + len(ids))
            step = Step(len(ids), self._capacity, self._model.cache, "all")
            plan = self._model.load(step, {**self._inputs, **self._caches, "logits": logits})
            self._device.write(self._inputs["ids"], ids)
            self._write_positions(len(ids))
            self._device.submit([plan])
            return self._device.read(logits, 4 * count).view(np.float32).reshape(len(ids), -1)
        finally:
            logits.destroy()

    def logits(self) -> F32:
        """Logits of the last token that was fed, [vocabulary]. Waits."""
        return self._model.read_logits()

    def _chooser(self, choice: Choice) -> Loaded:
        op = "argmax" if choice is None else "sample"
        if op not in self._choosers:
            self._choosers[op] = self._model.chooser(op, self._inputs)
        if choice is not None:
            self._device.write(self._inputs["choice"], choice)
        return self._choosers[op]

    def choose(self, choice: Choice) -> Posted:
        """Choose the next token from the logits; it stays on the device for `advance`."""
        return self._posted([self._chooser(choice)])

    def advance(self, choice: Choice) -> Posted:
        """Run the token that was chosen last and choose the next, without waiting for either."""
        self._check([0])
        plan = self._plan(1)
        self._write_positions(1)
        token = self._posted([plan, self._chooser(choice)])
        self.length += 1
        return token

    def _posted(self, queue: list[Loaded]) -> Posted:
        letter = self._device.submit(queue, post=self._inputs["ids"])
        assert letter is not None
        return Posted(letter)

    def close(self) -> None:
        """Give the cache back."""
        _destroy(self._caches)
        _destroy(self._inputs)
        self._loaded.clear()
        self._choosers.clear()


def _destroy(buffers: dict[str, Any]) -> None:
    for native in buffers.values():
        native.destroy()
    buffers.clear()
