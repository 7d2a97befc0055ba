"""A model in the NumPy interpreter: the same graphs, weights dense in memory. The oracle, and a way without a GPU."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from ..graph import interpret
from ..graph.batch import PAGE
from ..graph.graph import Graph, Tensor
from ..graph.sampling import MAX_LOGPROBS, adjust_logits, logprobs, sample
from ..models.architecture import Architecture
from ..models.config import Config, StepSpec
from .image_rows import host_features
from .pages import MAX_SEQUENCES, KvSequence, Reserved
from .row_scores import REPORT_WORDS, ScoreGroup
from .runner import (
    F32,
    MAX_OUTPUTS,
    U32,
    DecodeBatch,
    Runner,
    SequenceChunk,
    StepResult,
    Tokens,
    decode_chunks,
    head_kind,
    is_decode_step,
    joined_scores,
    padded_batch,
    rope_factors,
)
from .sampler_settings import SamplerSettings
from .weights import Progress, Source, dense

FIRST_POSITIONS = 256  # of the rope tables
_KEPT_GRAPHS = 8
_FEW_ROWS = 8  # up to which the threads of a BLAS wait for each other more than they compute
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


class NumpyRunner(Runner):
    """Weights in f32, the pool of pages, and the graphs of the steps that were run."""

    max_tokens = 512
    max_outputs = MAX_OUTPUTS
    max_pages = 1 << 31
    steps_ahead = steps_ahead_alone = 1

    def __init__(
        self,
        architecture: Architecture,
        config: Config,
        source: Source,
        *,
        fusions: Sequence[str] | None = None,
        cache: str | None = None,
        progress: Progress | None = None,
        deterministic: bool = False,
    ) -> None:
        factors = rope_factors(config, source)
        super().__init__(architecture, config, factors, fusions or ())  # NumPy gains nothing from chains
        self.cache = cache or "f32"
        self.deterministic, self.decode_rows = deterministic, 1
        self._graphs: dict[tuple[Any, ...], Graph] = {}
        body, head = self.graph_of(1), self.head_of(1, 1)
        self.weights = self._load_weights(body, head, source, progress)
        self._kept = {name: tensor for name, tensor in body.tensors.items() if tensor.role == "state"}
        self._pools: dict[str, NDArray[Any]] = {}
        self._recurrent = {
            name: np.zeros((0, *each.shape[1:]), np.float32)
            for name, each in body.tensors.items()
            if each.role == "recurrent"
        }
        self._tables: dict[str, F32] = {}
        self._page_table = np.zeros(self.pool.table_words, np.uint32)
        self._tokens = np.zeros(MAX_SEQUENCES, np.uint32)
        self._counts: U32 | None = None  # [sequence slots, vocabulary], once a step counts tokens
        self.share_memory(None, 0)

    def _load_weights(self, body: Graph, head: Graph, source: Source, progress: Progress | None) -> dict[str, F32]:
        """What the nodes that NumPy runs read."""
        return dense((*body.weights(), *head.weights()), source, progress)

    def graph_of(self, tokens: int) -> Graph:
        """The graph of so many rows, kept for the next time; a few of them."""
        return self._graph(("step", tokens), lambda: self.graph(self._step_spec(tokens))[0])

    def _step_spec(self, tokens: int) -> StepSpec:
        """One graph for all steps of so many rows: without images their records are zeros."""
        return StepSpec(tokens, cache=self.cache, paged=True, images=self.config.images is not None)

    def head_of(self, rows: int, tokens: int, *, logits: bool = True) -> Graph:
        """The graph from hidden states to logits, or to the output norm; kept too."""
        return self._graph(("head", rows, tokens, logits), lambda: self.head_graph(rows, tokens, logits=logits)[0])

    def _graph(self, key: tuple[Any, ...], make: Any) -> Graph:
        if key not in self._graphs:
            while len(self._graphs) >= _KEPT_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = make()
        return self._graphs[key]

    def _grow(self, pages: int) -> None:
        pools = {}
        for name, tensor in self._kept.items():
            pools[name] = np.zeros(self._pool_shape(tensor, pages), _dtype(tensor))
            if name in self._pools:
                pools[name][: len(self._pools[name])] = self._pools[name]
        self._pools = pools  # all or nothing
        self.pool.grow(pages)

    def _apply(self, changed: Sequence[Reserved]) -> None:
        for reserved in changed:
            for source, target in reserved.copies:
                for pool in self._pools.values():
                    self._copy_page(pool, source, target)
            for index, page in reserved.entries:
                self._page_table[index] = page

    def _grow_states(self, rows: int) -> None:
        grown = {}
        for name, before in self._recurrent.items():
            grown[name] = np.zeros((rows, *before.shape[1:]), np.float32)
            grown[name][: len(before)] = before
        self._recurrent = grown  # all or nothing
        self.states.grow(rows)

    def _copy_state(self, source: int, target: int) -> None:
        for states in self._recurrent.values():
            states[target] = states[source]

    def _write_table(self, index: int, word: int) -> None:
        self._page_table[index] = word

    def _pool_shape(self, tensor: Tensor, pages: int) -> tuple[int, ...]:
        """Of the keys or values of a layer."""
        return (pages * PAGE, *tensor.shape[1:])

    def _copy_page(self, pool: NDArray[Any], source: int, target: int) -> None:
        pool[target * PAGE : (target + 1) * PAGE] = pool[source * PAGE : (source + 1) * PAGE]

    @property
    def page_tensors(self) -> tuple[tuple[str, int], ...]:
        """The tensors that a page is made of, as they lie in memory here."""
        sizes = {name: math.prod(self._pool_shape(each, 1)) for name, each in self._kept.items()}
        return tuple((name, size * _dtype(self._kept[name]).itemsize) for name, size in sizes.items())

    def read_pages(self, pages: Sequence[int]) -> Callable[[], list[NDArray[np.uint8]]]:
        """The contents of pages, copied."""
        with self.lock:
            contents = [self._bytes_of(name)[list(pages)] for name, _ in self.page_tensors]
        return lambda: contents

    def write_pages(self, pages: Sequence[int], contents: Sequence[NDArray[np.uint8]]) -> Callable[[], object]:
        """Contents into pages."""
        with self.lock:
            for (name, _), data in zip(self.page_tensors, contents, strict=True):
                self._bytes_of(name)[list(pages)] = data
        return lambda: None

    @property
    def state_tensors(self) -> tuple[tuple[str, int], ...]:
        """The tensors that a row of the states is made of, and their bytes."""
        return tuple((name, 4 * math.prod(states.shape[1:])) for name, states in self._recurrent.items())

    def read_state(self, row: int, tensors: Sequence[tuple[str, int]]) -> Callable[[], list[NDArray[np.uint8]]]:
        """Some tensors of a row of the states, copied."""
        with self.lock:
            contents = [self._recurrent[name][row].reshape(1, -1).view(np.uint8).copy() for name, _ in tensors]
        return lambda: contents

    def write_state(
        self, row: int, tensors: Sequence[tuple[str, int]], contents: Sequence[NDArray[np.uint8]]
    ) -> Callable[[], object]:
        """Some tensors of a row."""
        with self.lock:
            for (name, _), data in zip(tensors, contents, strict=True):
                self._recurrent[name][row] = data.view(np.float32).reshape(self._recurrent[name].shape[1:])
        return lambda: None

    def _bytes_of(self, name: str) -> NDArray[np.uint8]:
        """A pool as bytes, [pages, bytes of a page]."""
        return self._pools[name].reshape(self.pool.pages, -1).view(np.uint8)

    def _reserve_positions(self, positions: int) -> None:
        if any(len(self._tables.get(name, ())) < positions for name in self.config.ropes):
            self._tables = self.rope_tables(min(self.config.context, max(FIRST_POSITIONS, 2 * positions)))

    def _run(self, records: U32, outputs: NDArray[Any], keys: int, parts: Sequence[SequenceChunk]) -> StepResult:
        rows = len(records)
        values: dict[str, Any] = {
            **self.weights,
            **self._pools,
            **self._recurrent,
            "batch": padded_batch(records, rows, len(outputs)),
            "page_table": self._page_table,
            "tokens": self._tokens,
            **self._tables,
            "outputs": outputs,
        }
        if self.config.images:
            values["image_rows"], features = self._image_rows(parts)
            values["features"] = host_features(features)
        gives = {part.gives for part in parts}
        # A BLAS adds up in another order for another number of rows: rows that must not depend on others run alone.
        alone = self.deterministic and is_decode_step(parts)
        with one_blas_thread() if rows <= _FEW_ROWS or alone else nullcontext():
            values["hidden"] = self._hidden(values, rows, 1 if alone else rows)
            scores = [self._scored(values, group, alone) for group in self._score_groups(parts)]
            states = self._head(values, outputs, "states", alone) if "hidden" in gives else None
            logits = self._head(values, outputs, "logits", alone) if gives - {"nothing", "hidden"} else None
        tokens = None
        if gives & {"token", "tokens"}:
            assert logits is not None
            tokens = self._sampled(logits, outputs, values["batch"], parts)
        wait_for_logits = (lambda: logits) if logits is not None else None
        return StepResult(
            tokens,
            wait_for_logits,
            wait_for_hidden=(lambda: states) if states is not None else None,
            wait_for_scores=(lambda: joined_scores(scores)) if scores else None,
        )

    def _hidden(self, values: dict[str, Any], rows: int, together: int) -> F32:
        """Hidden states of all rows, so many at a time."""
        records = values["batch"][1:]
        if together == rows:
            return self._run_layers(values, rows)
        hidden = []
        for i in range(0, rows, together):
            some = {**values, "batch": padded_batch(records[i : i + together], together, 0)}
            if "image_rows" in values:
                some["image_rows"] = values["image_rows"][i : i + together]
            hidden.append(self._run_layers(some, together))
        return np.concatenate(hidden)

    def _run_layers(self, values: dict[str, Any], rows: int) -> F32:
        return np.asarray(interpret.run(self.graph_of(rows), values)["hidden"])

    def _head(self, values: dict[str, Any], outputs: NDArray[Any], name: str, alone: bool) -> F32:
        if alone and len(values["hidden"]) > 1:
            one = outputs[:1].copy()
            one["row"] = 0
            rows = [{**values, "hidden": values["hidden"][i : i + 1], "outputs": one} for i in outputs["row"]]
            return np.concatenate([self._head(row, one, name, alone) for row in rows])
        return self._run_head(values, outputs, name)

    def _run_head(self, values: dict[str, Any], outputs: NDArray[Any], name: str) -> F32:
        graph = self.head_of(len(outputs), len(values["hidden"]), logits=name == "logits")
        return np.asarray(interpret.run(graph, dict(values))[name])

    def _scored(self, values: dict[str, Any], group: ScoreGroup, alone: bool) -> U32:
        """Log probabilities of the tokens that follow some rows."""
        words = np.zeros((len(group.outputs), *REPORT_WORDS), np.uint32)
        batch = values["batch"].copy()
        batch[0, 1] = len(group.outputs)
        logits = self._head({**values, "batch": batch, "outputs": group.outputs}, group.outputs, "logits", alone)
        logprobs(logits, group.outputs, group.adjustments, group.targets, words)
        return words

    def _sampled(self, logits: F32, outputs: NDArray[Any], batch: U32, parts: Sequence[SequenceChunk]) -> Tokens:
        tokens = self._tokens = self._tokens.copy()  # who has the old ones keeps them
        if head_kind(parts) != "adjusted":
            sample(logits, outputs, batch, tokens)
            return Tokens(lambda: tokens)
        changes, counts = self._adjusted(parts), self._all_counts()
        adjusted = adjust_logits(logits, changes.records, counts, changes.biases, changes.masks)
        sample(adjusted, outputs, batch, tokens, counts=counts)
        if changes.requests is None:
            return Tokens(lambda: tokens)
        words = np.zeros((len(outputs), 1 + MAX_LOGPROBS, 2), np.uint32)
        logprobs(logits, outputs, changes.records, tokens, words)
        return Tokens(lambda: words, changes.requests)

    def _all_counts(self) -> U32:
        if self._counts is None:
            self._counts = np.zeros((MAX_SEQUENCES, self.config.vocabulary), np.uint32)
        return self._counts

    def _write_counts(self, slot: int, counts: U32) -> None:
        self._all_counts()[slot] = counts

    def decode_batch(self, sequences: Sequence[KvSequence], settings: Sequence[SamplerSettings]) -> DecodeBatch:
        """Sequences to decode together."""
        return _NumpyDecode(self, decode_chunks(sequences, settings))

    def close(self) -> None:
        """Let go of weights and cache."""
        self.closed = True
        self.weights, self._pools, self._recurrent = {}, {}, {}

    def report(self) -> Mapping[str, Any]:
        """Where it runs, and how much memory its weights take."""
        nbytes = sum(array.nbytes for array in self.weights.values())
        return {"device": "cpu (NumPy)", "weight_bytes": nbytes, "cache": self.cache, "precision": "exact"}


def _dtype(tensor: Tensor) -> np.dtype[Any]:
    return np.dtype(np.float16 if tensor.format == "f16" else np.float32)


class _NumpyDecode(DecodeBatch):
    def __init__(self, runner: NumpyRunner, parts: Sequence[SequenceChunk]) -> None:
        self._runner, self._parts = runner, parts

    def step(self) -> Tokens:
        tokens = self._runner.step(self._parts).tokens
        assert tokens is not None
        return tokens

    def replace(self, sequences: Sequence[KvSequence], settings: Sequence[SamplerSettings]) -> None:
        self._parts = decode_chunks(sequences, settings)

    def close(self) -> None:
        pass
