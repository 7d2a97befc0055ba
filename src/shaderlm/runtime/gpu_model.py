"""A model on a GPU: weights in buffers, plans by shape of the step, sessions with their caches.

Per token: one small write, the recorded plan, one submission; the chosen token stays on the GPU as the next input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..gpu import Array, Device, Facts, Letter, Loaded, Program
from ..graph import resolve
from ..graph.fuse import fuse
from ..graph.graph import Node
from ..models.architecture import Architecture, Config, Step
from .execute import lower
from .plan import NONE, Lowering, Plan, tensor_bytes
from .session import F32, Choice, Model, Session
from .weights import Progress, Source, upload

# Rows of a prompt at once: enough to fill a large GPU, little enough for a software adapter to be interrupted.
CHUNK, SOFTWARE_CHUNK = 512, 128
# While weights are on their way, the kernels of decoding and of a short prompt are compiled: they are the first ones
# wanted, and most of them serve longer prompts too.
_COMPILED_ROWS = (1, 32)
KEPT_PLANS = 4  # per session; each is a few hundred bind groups


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
) -> Plan:
    """The plan of a step on a device that has these facts."""
    step = Step(rows, capacity, cache or cache_format(facts))
    graph, refusals = fuse(architecture.build(config, step), fusions)
    return Lowering(facts).plan(step_name(step), graph, refusals, rows, capacity)


def cache_format(facts: Facts) -> str:
    """The cache is f16 where the GPU has f16."""
    return "f16" if facts.f16 else "f32"


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
        progress: Progress | None = None,
    ) -> None:
        factors = source.vector(config.rope.factors) if config.rope.factors else None
        super().__init__(architecture, config, factors, fusions)
        self.device = device
        self.cache = cache or cache_format(device.facts)
        self.chunk = SOFTWARE_CHUNK if device.facts.software else CHUNK
        self._lowering = Lowering(device.facts)
        self._plans: dict[Step, Plan] = {}
        # Says what this device cannot do before anything is uploaded.
        steps = [step for rows in _COMPILED_ROWS for step in self._first_plan(rows).program.steps]
        with ThreadPoolExecutor(1, "compile") as pool:
            compiled = pool.submit(device.compile, [*steps, *self._chooser_program("argmax").steps])
            self._weights = upload(device, self.graph(Step(1, 1, self.cache))[0], source, progress)
            compiled.result()
        self._none = device.buffer(16)
        self._logits = device.buffer(4 * config.vocabulary)
        self._arena: dict[str, Any] = {}
        self._params: dict[bytes, Any] = {}
        self._table: tuple[int, Any] = (0, None)

    def _first_plan(self, rows: int) -> Plan:
        rows = min(rows, self.config.context)
        return self.plan(Step(rows, self.capacity(rows), self.cache))

    def plan(self, step: Step) -> Plan:
        """The plan of a step, made once."""
        if step not in self._plans:
            graph, refusals = self.graph(step)
            self._plans[step] = self._lowering.plan(step_name(step), graph, refusals, step.rows, step.capacity)
        return self._plans[step]

    def load(self, step: Step, own: Mapping[str, Any]) -> Loaded:
        """A plan bound to buffers: `own` are the session's."""
        plan = self.plan(step)
        shared: dict[str, Any] = {**self._weights, NONE: self._none, "logits": self._logits, **own}
        shared["rope_table"] = self._rope_table(step.capacity)
        for name, size in plan.arena.items():
            shared[name] = self._slot(name, size)
        for name, packed in plan.params.items():
            shared[name] = self._parameters(packed)
        return self.device.load(plan.program, shared)

    def _slot(self, name: str, size: int) -> Any:
        """A buffer of the arena, replaced by a larger one when that is needed; who bound the old one keeps it."""
        if name not in self._arena or self._arena[name].size < size:
            self._arena[name] = self.device.buffer(size)
        return self._arena[name]

    def _parameters(self, packed: Array) -> Any:
        key = packed.tobytes()
        if key not in self._params:
            self._params[key] = self.device.buffer(packed)
        return self._params[key]

    def _rope_table(self, positions: int) -> Any:
        if self._table[0] < positions:
            self._table = (positions, self.device.buffer(self.rope_table(positions)))
        return self._table[1]

    def chooser(self, op: str, own: Mapping[str, Any]) -> Loaded:
        """argmax or sample, from the logits into the session's ids."""
        program = self._chooser_program(op)
        names = {"x": self._logits, "logits": self._logits, "out": own["ids"], "choice": own["choice"]}
        return self.device.load(program, {key: names[key] for key in program.buffers if key in names})

    def _chooser_program(self, op: str) -> Program:
        vocabulary = self.config.vocabulary
        dims = resolve(op, {"rows": 1, "width": vocabulary} if op == "argmax" else {"width": vocabulary})
        route, _ = self._lowering.route(Node(op, dims, {}, {}))
        return lower(route, dims, self.device.facts, {})

    def read_logits(self) -> F32:
        """What is in the buffer of logits. Waits."""
        return self.device.read(self._logits, 4 * self.config.vocabulary).view(np.float32)

    def session(self) -> Session:
        """A new, empty conversation."""
        return _Session(self)

    def close(self) -> None:
        """Give all memory back. Sessions give theirs back themselves."""
        buffers = [*self._weights.values(), *self._arena.values(), *self._params.values(), self._none, self._logits]
        for native in (*buffers, self._table[1]):
            if native is not None:
                native.destroy()
        self._weights, self._arena, self._params, self._table = {}, {}, {}, (0, None)

    def report(self) -> Mapping[str, Any]:
        """Where it runs, and how much memory its weights take."""
        facts = self.device.facts
        held = sum(native.size for native in self._weights.values())
        return {"device": f"{facts.name} ({facts.backend})", "weight_bytes": held, "cache": self.cache}


class _Session(Session):
    def __init__(self, model: GpuModel) -> None:
        super().__init__(model)
        self._model, self._device = model, model.device
        self.chunk = model.chunk
        # A software adapter computes on the host's cores: nothing is gained by running ahead there.
        self.ahead = 1 if self._device.facts.software else 2
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
        """More room in the cache: new buffers, what was there copied over, plans bound again."""
        if positions <= self._capacity:
            return
        self._capacity = self._model.capacity(positions)
        graph = self._model.graph(Step(1, self._capacity, self._model.cache))[0]
        old, self._caches = self._caches, {}
        try:
            for name, tensor in graph.tensors.items():
                if tensor.role == "state":
                    self._caches[name] = self._device.buffer(tensor_bytes(tensor))
                    if name in old:
                        self._device.copy(old[name], self._caches[name], old[name].size)
        finally:
            self._loaded.clear()
            for native in old.values():
                native.destroy()

    def _plan(self, rows: int, all_logits: bool = False) -> Loaded:
        self._grow(self.length + rows)
        step = Step(rows, self._capacity, self._model.cache, all_logits)
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
        plan = self._plan(len(ids))
        self._device.write(self._inputs["ids"], ids)
        self._write_positions(len(ids))
        self._device.submit([plan])

    def _run_all(self, ids: NDArray[np.uint32]) -> F32:
        count = len(ids) * self._model.config.vocabulary
        logits = self._device.buffer(4 * count)
        try:
            self._grow(self.length + len(ids))
            step = Step(len(ids), self._capacity, self._model.cache, all_logits=True)
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
        for native in (*self._caches.values(), *self._inputs.values()):
            native.destroy()
        self._caches = {}
        self._loaded.clear()
