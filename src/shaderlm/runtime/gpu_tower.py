"""A tower on a GPU: pixels in, features out.

Features stay on the device, a buffer for each picture, and steps copy the rows that they read. Where they would take
more memory than there is for them, or the device cannot bind them, they come back to the host.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from ..compile.lowering import Lowering
from ..compile.plan import BufferSpec, Plan
from ..errors import DeviceError, InputError, ModelError
from ..gpu import BoundProgram, Copy, Device
from ..graph.fuse import fuse
from ..graph.graph import Builder, Graph
from ..models.vision import Tower, patches_graph, patches_inputs, tower_inputs
from ..vision.processors import Layout
from .device_features import DeviceFeatures
from .image_rows import Features
from .sizes import weights_of
from .tower import F32, joined, output_names
from .weights import Progress, Source, upload

_WARM_SIZES = (200, 150), (640, 480), (1000, 750), (2000, 1500)
_KEPT_PLANS = 8  # of layouts, and of numbers of patches
_DISPATCHES = 48  # that are submitted at a time: the device begins while others are recorded
DEVICE_BYTES = 1 << 30  # of features on a device: of pictures that are kept, and of requests that run
_Key = int | Layout | tuple[str, int]  # of a plan: patches, a layout, and tokens whose levels are brought together


class GpuTower:
    """Weights in buffers; plans by the layout of a picture, and by its number of patches."""

    def __init__(
        self, tower: Tower, source: Source, device: Device, *, precision: str = "fast", progress: Progress | None = None
    ) -> None:
        self.tower, self.device = tower, device
        self._lowering = Lowering(device.caps, precision)
        self._plans: OrderedDict[_Key, Plan] = OrderedDict()
        self._bound: dict[_Key, list[BoundProgram]] = {}  # a plan in parts
        self._buffers: dict[str, Any] = {}  # scratch, inputs and outputs, by the names in plans
        self._layout: Layout | None = None  # whose inputs the buffers hold
        self._features = WeakSet[DeviceFeatures]()  # that somebody has
        first = self._plan(tower.side**2 // tower.merge**2 * tower.merge**2)
        self._weights = upload(device, weights_of([first]), source, progress)
        self.weight_bytes = sum(buffer.size for buffer in self._weights.values())

    def _plan(self, key: _Key) -> Plan:
        """Of a number of patches: the tower. Of a layout: from pixels to patches. Of tokens: their levels."""
        if key not in self._plans:
            while len(self._plans) >= _KEPT_PLANS:
                self._forget(next(iter(self._plans)))
            fused, rejected = fuse(self._graph(key), None, self._lowering.unsupported_reason)
            name = "tower" if isinstance(key, int) else "pixels" if isinstance(key, Layout) else key[0]
            self._plans[key] = self._lowering.plan(name, fused, rejected)
        self._plans.move_to_end(key)
        return self._plans[key]

    def _forget(self, key: _Key) -> None:
        """A plan, and the params that no other one has: each size of pictures brings some."""
        self._bound.pop(key, None)
        own = _params_of(self._plans.pop(key))
        for name in own.difference(*map(_params_of, self._plans.values())) & self._buffers.keys():
            self._buffers.pop(name).destroy()

    def _graph(self, key: _Key) -> Graph:
        if isinstance(key, int):
            return self.tower.build(key)
        if isinstance(key, Layout):
            return patches_graph(key, self.tower.processor)
        return _levels_graph(self.tower, key[1])

    def warm_up(self) -> None:
        """Compile what pictures of some sizes want: kernels are the same for many sizes."""
        for width, height in _WARM_SIZES:
            layout = self.tower.processor.layout(width, height)
            with suppress(ModelError):  # a picture too large for the device: who shows it is told
                for key in self._keys(layout, on_device=True):
                    self.device.compile([launch.step for launch in self._plan(key).launches])

    def _keys(self, layout: Layout, *, on_device: bool) -> list[_Key]:
        """The plans that a picture takes, in order. on_device: its features stay there."""
        levels: list[_Key] = [("levels", layout.tokens)] if on_device and self.tower.levels > 1 else []
        return [layout, layout.patches, *levels]

    def encode(self, pixels: NDArray[np.uint8], layout: Layout) -> Features:
        """Features of a picture, [tokens, levels · out]. They may still be on their way."""
        tower, nbytes = self.tower, 4 * layout.tokens * self.tower.out * self.tower.levels
        room = DEVICE_BYTES - sum(each.nbytes for each in self._features)
        on_device = nbytes <= min(room, self.device.caps.max_operand)
        keys = self._keys(layout, on_device=on_device)
        try:
            plans = [self._plan(key) for key in keys]
        except ModelError as problem:
            rows, columns = layout.source
            words = f"a picture of {columns:,} × {rows:,} is too large for this device; make it smaller"
            raise InputError(f"{words} ({problem})") from None
        for plan in plans:
            for name, spec in plan.buffers.items():
                self._reserve(name, spec)
        self._write_inputs(pixels, layout)
        bound = [part for key in keys for part in self._bind(key)]
        own = self._feature_buffer(nbytes) if on_device else None
        for part in bound:
            self.device.submit([part])
        if own is None:
            return self._read(layout)
        self.device.copy(Copy(self._buffers["levels" if tower.levels > 1 else "features"], own, nbytes))
        features = DeviceFeatures(self.device, own, layout.tokens)
        self._features.add(features)
        return features

    def _write_inputs(self, pixels: NDArray[np.uint8], layout: Layout) -> None:
        """Pixels, and what follows from the layout unless it is there from the picture before."""
        inputs: dict[str, NDArray[Any]] = {"pixels": pixels}
        if layout != self._layout:
            inputs |= patches_inputs(layout, self.tower.processor)
            inputs |= tower_inputs(self.tower, layout) | _levels_inputs(self.tower, layout.tokens)
        for name, array in inputs.items():
            if name in self._buffers:  # a picture that needs no resizing has fewer
                self.device.write(self._buffers[name], array)
        self._layout = layout

    def _feature_buffer(self, nbytes: int) -> Any:
        """None: the device has no memory left for it."""
        try:
            return self.device.buffer(nbytes)
        except DeviceError:
            self.device.check()
            return None

    def _read(self, layout: Layout) -> F32:
        """Read features back."""
        names, nbytes = output_names(self.tower), 4 * layout.tokens * self.tower.out
        pending = [self.device.submit([], (self._buffers[name], nbytes)) for name in names]
        outputs = {}
        for name, each in zip(names, pending, strict=True):
            assert each is not None
            outputs[name] = each.wait().view(np.float32).reshape(layout.tokens, self.tower.out)
        return joined(outputs, self.tower)

    def wait(self) -> None:
        """Until the features of all pictures are there."""
        self.device.flush()

    def _bind(self, key: _Key) -> list[BoundProgram]:
        """The parts of a plan with its buffers, kept until one of them is replaced."""
        plan = self._plan(key)
        if key not in self._bound:
            steps, buffers = plan.program.steps, {name: self._buffer(name, plan) for name in plan.buffers}
            self.device.compile(steps)  # all at once
            parts = [steps[first : first + _DISPATCHES] for first in range(0, len(steps), _DISPATCHES)]
            self._bound[key] = [self.device.bind(replace(plan.program, steps=part), buffers) for part in parts]
        return self._bound[key]

    def _reserve(self, name: str, spec: BufferSpec) -> None:
        if spec.role in ("weight", "params"):
            return
        known = self._buffers.get(name)
        if known is None or known.size < spec.nbytes:
            self._buffers[name] = self.device.buffer(spec.nbytes)
            self._layout = None
            if known is not None:
                self._bound.clear()
                known.destroy()

    def _buffer(self, name: str, plan: Plan) -> Any:
        spec = plan.buffers[name]
        if spec.role == "weight":
            return self._weights[name]
        if spec.role == "params":
            key = _params_name(spec)
            if key not in self._buffers:
                self._buffers[key] = self.device.buffer(np.array(spec.words, np.uint32))
            return self._buffers[key]
        return self._buffers[name]

    def close(self) -> None:
        """Give all memory back."""
        self._bound.clear()
        for buffers in (self._weights, self._buffers):
            for buffer in buffers.values():
                buffer.destroy()
            buffers.clear()


def _params_name(spec: BufferSpec) -> str:
    return f"params {spec.words}"


def _params_of(plan: Plan) -> set[str]:
    """The names of its params."""
    return {_params_name(spec) for spec in plan.buffers.values() if spec.role == "params"}


def _levels_graph(tower: Tower, tokens: int) -> Graph:
    """The outputs of a tower → levels [tokens · levels, out]: those of a token side by side."""
    b, names, count = Builder(), output_names(tower), tokens * tower.out
    for name in names:
        b.tensor(name, tokens, tower.out, role="input")
    stacked = names[0]
    for i, name in enumerate(names[1:], 1):
        out = b.tensor(f"stacked.{i}", (i + 1) * count)
        b.add("concat", {"a": i * count, "b": count}, {"a": stacked, "b": name}, "levels", out=out)
        stacked = out
    rows = tokens * tower.levels
    inputs = {
        "weight": stacked,
        "rows": b.tensor("level_rows", rows, 1, role="input", format="u32"),
        "factors": b.tensor("level_factors", rows, 1, role="input"),
    }
    out = b.tensor("levels", rows, tower.out)
    b.add("weighted_rows", {"tokens": rows, "N": rows, "K": tower.out, "taps": 1}, inputs, "levels", out=out)
    return b.graph(out)


def _levels_inputs(tower: Tower, tokens: int) -> dict[str, NDArray[Any]]:
    """Where the rows of `levels` are among the stacked ones."""
    rows = np.arange(tokens * tower.levels, dtype=np.uint32).reshape(tower.levels, tokens).T
    return {"level_rows": np.ascontiguousarray(rows), "level_factors": np.ones(rows.size, np.float32)}
