"""Programs from what a graph was lowered to: stages, memory for what ops write, and rows of words that threads read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .code import host
from .lowering import Kernel, Lowered, NumpyNode, Op
from .threads import ARGUMENTS, BATCH, CHUNKS, FUNCTION, PAGE_TABLE, ROWS, STAGE, STEP_WORDS, WORDS, run

Arrays = Mapping[str, NDArray[Any]]
_ALIGNMENT = 64


class Memory:
    """What a graph's ops write, for so many rows. Buffers share it once nobody reads them any more."""

    def __init__(self, lowered: Lowered, stages: Sequence[int]) -> None:
        self._offsets, self._row_bytes = _places(lowered, stages)
        self._bytes = lowered.buffers
        self.rows = 0
        self._array = np.empty(0, np.uint8)
        self._first = 0

    def reserve(self, rows: int) -> bool:
        """For so many rows; True if everything lies elsewhere now."""
        if rows <= self.rows:
            return False
        room = 1 << (rows - 1).bit_length()
        array = np.zeros(self._row_bytes * room + _ALIGNMENT, np.uint8)  # may fail: then nothing has changed
        self._array, self._first, self.rows = array, -array.ctypes.data % _ALIGNMENT, room
        return True

    def __contains__(self, name: object) -> bool:
        return name in self._offsets

    def address(self, name: str) -> int:
        """Of a buffer."""
        return int(self._array.ctypes.data) + self._first + self._offsets[name] * self.rows

    def view(self, name: str, rows: int) -> NDArray[np.float32]:
        """A tensor [rows, values], until the next step."""
        first = self._first + self._offsets[name] * self.rows
        return self._array[first : first + self._bytes[name] * rows].view(np.float32).reshape(rows, -1)


def _places(lowered: Lowered, stages: Sequence[int]) -> tuple[dict[str, int], int]:
    """Where each buffer lies, in bytes for each row, and how many there are in all."""
    begin: dict[str, int] = {}
    end: dict[str, int] = {}
    for item, stage in zip(lowered.items, stages, strict=True):
        names = item.arguments if isinstance(item, Op) else (*item.node.inputs.values(), *item.node.outputs.values())
        for name in names:
            if isinstance(name, str) and name in lowered.buffers:
                begin.setdefault(name, stage)
                end[name] = stage
    last = max(stages, default=0) + 1
    end |= {name: last for name in lowered.graph.outputs if name in end}
    inputs = {
        name for name in begin if lowered.graph.tensors[name.split(".rounded.")[0].split(".sums.")[0]].role == "input"
    }
    offsets: dict[str, int] = {}
    blocks: list[tuple[int, int, int]] = []  # offset, bytes, last stage
    total = 0
    for name in sorted(begin, key=lambda name: (name not in inputs, begin[name])):
        size = -(-lowered.buffers[name] // _ALIGNMENT) * _ALIGNMENT
        free = [block for block in blocks if block[2] < begin[name] and block[1] >= size and name not in inputs]
        block = min(free, key=lambda block: block[1], default=None)
        if block is None:
            block = (total, size, 0)
            total += size
        else:
            blocks.remove(block)
        blocks.append((block[0], block[1], end[name]))
        offsets[name] = block[0]
    return offsets, total


def stages_of(lowered: Lowered) -> list[int]:
    """The stage of each item: one that reads what its own stage writes begins another; NumPy's nodes are alone."""
    stages: list[int] = []
    stage, written = 0, set[str]()
    for i, item in enumerate(lowered.items):
        alone = isinstance(item, NumpyNode) or (i and isinstance(lowered.items[i - 1], NumpyNode))
        if alone or (isinstance(item, Op) and any(_owner(name) in written for name in item.reads)):
            stage, written = stage + 1, set()
        if isinstance(item, Op):
            written.add(_owner(item.writes))
        stages.append(stage)
    return stages


def _owner(name: str) -> str:
    """What rounding writes has three names."""
    return name.removesuffix(".scales").removesuffix(".sums") if ".rounded." in name else name


class Program:
    """Consecutive ops of a graph."""

    def __init__(self, ops: Sequence[Op], stages: Sequence[int], memory: Memory, weights: Arrays) -> None:
        self._ops, self._memory, self._weights = ops, memory, weights
        self._words = np.zeros((len(ops) + 1, WORDS), np.int64)
        self._step = np.zeros(STEP_WORDS, np.int64)
        begins = [i for i in range(len(ops)) if i and stages[i] != stages[i - 1]]
        self._words[:, STAGE] = -1
        for before, first in zip([0, *begins], [*begins, len(ops)], strict=True):
            self._words[first, STAGE] = before
        addresses = {kernel: _address(kernel) for kernel in {op.kernel for op in ops}}
        self._words[: len(ops), FUNCTION] = [addresses[op.kernel] for op in ops]
        self._chunks = np.array([*(op.chunks for op in ops), 0], np.int64)
        self._row_tiles = np.array([*(op.rows for op in ops), 0], np.int64)
        self._rows = 0

    def bind(self, arrays: Arrays) -> None:
        """Write the addresses of buffers, weights and `arrays`: pools and tables."""
        known: dict[str, int] = {}

        def word(argument: int | str | None) -> int:
            if argument is None or isinstance(argument, int):
                return argument or 0
            if argument not in known:
                if argument in self._memory:
                    known[argument] = self._memory.address(argument)
                else:
                    array = self._weights[argument] if argument in self._weights else arrays[argument]
                    known[argument] = array.ctypes.data
            return known[argument]

        for row, op in zip(self._words, self._ops, strict=False):
            row[ARGUMENTS : ARGUMENTS + len(op.arguments)] = [word(each) for each in op.arguments]

    def run(self, rows: int, batch: NDArray[np.uint32] | None, page_table: NDArray[np.uint32] | None) -> None:
        """All ops, for so many rows."""
        if rows != self._rows:
            tiles = -(-rows // np.maximum(self._row_tiles, 1))
            self._words[:, CHUNKS] = np.where(self._row_tiles, self._chunks * tiles, self._chunks)
            self._rows = rows
        self._step[ROWS] = rows
        self._step[BATCH] = 0 if batch is None else batch.ctypes.data
        self._step[PAGE_TABLE] = 0 if page_table is None else page_table.ctypes.data
        run(self._words, self._step)


def _address(kernel: Kernel) -> int:
    features = (_vector_features(),) if kernel.host else ()
    return host().address(kernel.name, kernel.write, *kernel.how, *features)


def _vector_features() -> tuple[str, ...]:
    """What products ask of the processor."""
    return tuple(sorted(host().features & {"avx2", "avx512bw", "avx512vnni"}))
