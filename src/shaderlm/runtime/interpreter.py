"""A model in the NumPy interpreter: the same graph, weights dense in memory. The oracle, and a way without a GPU."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from ..graph import interpret
from ..graph.graph import Graph
from ..graph.reference import argmax, sample
from ..models.architecture import Architecture, Config, Step
from .session import F32, Choice, Model, Session
from .weights import Progress, Source, dense

_blas_lock = threading.Lock()


@functools.cache
def _blas() -> Any:
    return ThreadpoolController()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """BLAS with one thread. The setting belongs to the whole process, so models take turns with it.

    With one row at a time the threads of a BLAS wait for each other after each of 120 small products: with one thread a
    token took 41 ms on two busy cores (Neoverse N1), with two 365 ms.
    """
    with _blas_lock, _blas().limit(limits=1, user_api="blas"):
        yield


@dataclass(frozen=True)
class Known:
    """A token that is already here."""

    id: int

    def wait(self) -> int:
        """The token's id."""
        return self.id


class Interpreter(Model):
    """Weights in f32, and the graphs of the steps that were run."""

    def __init__(
        self,
        architecture: Architecture,
        config: Config,
        source: Source,
        *,
        fusions: Sequence[str] | None = None,
        cache: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        factors = source.vector(config.rope.factors) if config.rope.factors else None
        super().__init__(architecture, config, factors, fusions)
        self.weights = dense(self.graph(Step(1, 1))[0], source, progress)
        self.cache = cache or "f32"
        self._graphs: dict[Step, Graph] = {}

    def graph_of(self, step: Step) -> Graph:
        """The fused graph of a step, kept for the next time; a few of them."""
        if step not in self._graphs:
            if len(self._graphs) >= 8:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[step] = self.graph(step)[0]
        return self._graphs[step]

    def session(self) -> Session:
        """A new, empty conversation."""
        return _Session(self)

    def close(self) -> None:
        """Let go of the weights."""
        self.weights = {}

    def report(self) -> Mapping[str, Any]:
        """Where it runs, and how much memory its weights take."""
        held = sum(array.nbytes for array in self.weights.values())
        return {"device": "cpu (NumPy)", "weight_bytes": held, "cache": self.cache, "precision": "exact"}


class _Session(Session):
    chunk = 512
    ahead = 1

    def __init__(self, model: Interpreter) -> None:
        super().__init__(model)
        self._model = model
        self._capacity = 0
        self._states: dict[str, NDArray[Any]] = {}
        self._logits: F32 | None = None
        self._token = 0

    def _grow(self, positions: int) -> None:
        if positions <= self._capacity:
            return
        capacity = self._model.capacity(positions)
        table = self._model.rope_table(capacity)
        states = {}
        for name, tensor in self._model.graph_of(Step(1, capacity, self._model.cache)).tensors.items():
            if tensor.role == "state":
                states[name] = np.zeros(tensor.shape, np.float16 if tensor.format == "f16" else np.float32)
                if name in self._states:
                    states[name][: self.length] = self._states[name][: self.length]
        self._capacity, self._table, self._states = capacity, table, states  # all or nothing

    def _outputs(self, ids: NDArray[np.uint32], logits: Literal["last", "all", "none"]) -> dict[str, F32]:
        self._grow(self.length + len(ids))
        graph = self._model.graph_of(Step(len(ids), self._capacity, self._model.cache, logits))
        positions = np.arange(self.length, self.length + len(ids))
        inputs: dict[str, NDArray[Any]] = {"ids": ids, "positions": positions, "rope_table": self._table}
        with one_blas_thread() if len(ids) == 1 else nullcontext():
            return interpret.run(graph, {**self._model.weights, **self._states, **inputs})

    def _run(self, ids: NDArray[np.uint32], *, last: bool) -> None:
        outputs = self._outputs(ids, "last" if last else "none")
        self._logits = outputs["logits"][0] if last else None

    def _run_all(self, ids: NDArray[np.uint32]) -> F32:
        return self._outputs(ids, "all")["logits"]

    def logits(self) -> F32:
        """Logits of the last token that was fed, [vocabulary]."""
        assert self._logits is not None, "feed comes first"
        return self._logits

    def choose(self, choice: Choice) -> Known:
        """Choose the next token from the logits."""
        logits = self.logits()
        self._token = int(argmax(logits) if choice is None else sample(logits, choice)[0])
        return Known(self._token)

    def advance(self, choice: Choice) -> Known:
        """Run the token that was chosen last and choose the next."""
        self.feed([self._token])
        return self.choose(choice)

    def close(self) -> None:
        """Let go of the cache."""
        self._states = {}
