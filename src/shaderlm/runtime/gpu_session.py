"""A conversation on a GPU: its cache, its inputs, and what a step costs the host.

Per token: one submission of what another thread has recorded. The chosen token stays on the GPU as the next input, and
so does the position: nothing is written for a step, except the random number of one that samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..compile.plan import tensor_bytes
from ..errors import InputError
from ..gpu import Letter, Loaded, Prepared, Stock
from ..models.architecture import Step
from .session import F32, Choice, Session

if TYPE_CHECKING:
    from .gpu_model import GpuModel

KEPT_PLANS = 4  # per session; each is a few hundred bind groups


@dataclass(frozen=True)
class Posted:
    """A token on its way from the GPU."""

    letter: Letter

    def wait(self) -> int:
        """The token's id."""
        return int(self.letter.open().view(np.uint32)[0])


class GpuSession(Session):
    """One conversation. Made by `GpuModel.session`."""

    def __init__(self, model: GpuModel) -> None:
        super().__init__(model)
        self._model, self._device = model, model.device
        self.chunk, self.ahead = model.chunk, model.ahead
        self.most_logits = max(1, model.device.caps.max_operand // (4 * model.config.vocabulary))
        self._capacity = 0
        self._caches: dict[str, Any] = {}
        self._loaded: dict[Step, Loaded] = {}
        device = self._device
        self._inputs = {
            "ids": device.buffer(4 * self.chunk),
            "positions": device.buffer(4 * self.chunk),
            "choice": device.buffer(32),
        }
        self._choosers: dict[tuple[str, bool], Loaded] = {}
        # What a step consists of that takes the largest logit, and of one that samples; bound for this capacity.
        self._steps: dict[bool, list[Loaded]] = {}
        self._stock: Stock[Prepared] | None = None
        self._stocked: list[Loaded] | None = None  # of which step the stock is
        self._stands = -1  # the position on the GPU, if it is known
        self._prepare_at: float = math.inf  # the position where the plan of the next capacity is wanted soon

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
        self.drop_stock()
        old, self._caches, self._capacity = self._caches, grown, capacity
        # Half of the room is left then: a fraction of a second, which is what making and compiling a plan takes.
        larger = self._device.records_ahead and capacity < self._config.context
        self._prepare_at = capacity // 2 if larger else math.inf
        self._loaded.clear()
        self._steps.clear()
        _destroy(old)

    def _check_open(self) -> None:
        """The library ends the process where a buffer that was given back is used."""
        if self._model.closed:
            raise InputError("this model is closed; load it again")

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
        self._stands = -1
        self._device.write(self._inputs["positions"], positions)
        self._stands = self.length

    def _run(self, ids: NDArray[np.uint32], *, last: bool) -> None:
        self._check_open()
        plan = self._plan(len(ids), "last" if last else "none")
        self._device.write(self._inputs["ids"], ids)
        self._write_positions(len(ids))
        self._device.submit([plan])

    def _run_all(self, ids: NDArray[np.uint32]) -> F32:
        self._check_open()
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
        self._check_open()
        return self._model.read_logits()

    def _chooser(self, choice: Choice, moving: bool) -> Loaded:
        key = ("argmax" if choice is None else "sample", moving)
        if key not in self._choosers:
            self._choosers[key] = self._model.chooser(*key, self._inputs)
        return self._choosers[key]

    def choose(self, choice: Choice) -> Posted:
        """Choose the next token from the logits; it stays on the device for `advance`."""
        self._check_open()
        chooser = self._chooser(choice, moving=False)
        if choice is not None:
            self._device.write_words(self._inputs["choice"], choice)
        letter = self._device.submit([chooser], post=self._inputs["ids"])
        assert letter is not None
        return Posted(letter)

    def advance(self, choice: Choice) -> Posted:
        """Run the token that was chosen last and choose the next, without waiting for either."""
        self._check_open()
        length = self.length
        if length >= self._config.context:
            self._check([0])  # says so
        step = self._steps.get(choice is None) if length < self._capacity else None
        if step is None:
            step = self._steps[choice is None] = [self._plan(1), self._chooser(choice, moving=True)]
        if length >= self._prepare_at:
            self._prepare_at = math.inf
            self._model.prepare(Step(1, self._model.capacity(self._capacity + 1), self._model.cache))
        if self._stands != length:
            self._write_positions(1)
        if choice is not None:
            self._device.write_words(self._inputs["choice"], choice)
        self._stands = -1  # if this fails, nobody knows how far the GPU came
        letter = self._submitted(step)
        self._stands = self.length = length + 1
        return Posted(letter)

    def _submitted(self, step: list[Loaded]) -> Letter:
        stock = self._stock
        if stock is None or stock.closed or self._stocked is not step:
            self.drop_stock()
            stock = self._stock = self._device.stock(step, self._inputs["ids"])
            self._stocked = step
        if stock is None:
            letter = self._device.submit(step, post=self._inputs["ids"])
            assert letter is not None
            return letter
        try:
            return self._device.submit_from(stock)
        except BaseException:  # Ctrl-C too: the stock may be one short
            self.drop_stock()
            raise

    def drop_stock(self) -> None:
        """Nothing is recorded ahead any more, until the next step."""
        stock, self._stock, self._stocked = self._stock, None, None
        if stock is not None:
            stock.close()

    def close(self) -> None:
        """Give the cache back."""
        self.drop_stock()
        _destroy(self._caches)
        _destroy(self._inputs)
        self._loaded.clear()
        self._choosers.clear()
        self._steps.clear()


def _destroy(buffers: dict[str, Any]) -> None:
    for native in buffers.values():
        native.destroy()
    buffers.clear()
