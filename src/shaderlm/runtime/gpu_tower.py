"""A tower on a GPU: pixels in, features out, by one submission for each picture."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..compile.lowering import Lowering
from ..compile.plan import BufferSpec, Plan
from ..gpu import BoundProgram, Device
from ..graph.fuse import fuse
from ..graph.graph import Graph
from ..models.vision import Tower, patches_graph, patches_inputs, tower_inputs
from ..vision.processors import Layout
from .sizes import weights_of
from .tower import F32, joined
from .weights import Progress, Source, upload

_KEPT_PLANS = 8  # of layouts, and of numbers of patches


class GpuTower:
    """Weights in buffers; plans by the layout of a picture, and by its number of patches."""

    def __init__(
        self, tower: Tower, source: Source, device: Device, *, precision: str = "fast", progress: Progress | None = None
    ) -> None:
        self.tower, self.device = tower, device
        self._lowering = Lowering(device.caps, precision)
        self._plans: OrderedDict[int | Layout, Plan] = OrderedDict()
        self._bound: dict[int | Layout, BoundProgram] = {}
        self._buffers: dict[str, Any] = {}  # scratch, inputs and outputs, by the names in plans
        first = self._plan(tower.side**2 // tower.merge**2 * tower.merge**2)
        self._weights = upload(device, weights_of([first]), source, progress)
        self.weight_bytes = sum(buffer.size for buffer in self._weights.values())

    def _plan(self, key: int | Layout) -> Plan:
        """Of a number of patches: the tower. Of a layout: from pixels to patches."""
        if key not in self._plans:
            while len(self._plans) >= _KEPT_PLANS:
                self._bound.pop(self._plans.popitem(last=False)[0], None)
            name = "tower" if isinstance(key, int) else "pixels"
            self._plans[key] = self._made(name, self.tower.build(key) if isinstance(key, int) else self._pixels(key))
        self._plans.move_to_end(key)
        return self._plans[key]

    def _pixels(self, layout: Layout) -> Graph:
        return patches_graph(layout, self.tower.processor)

    def _made(self, name: str, graph: Graph) -> Plan:
        fused, rejected = fuse(graph, None, self._lowering.unsupported_reason)
        return self._lowering.plan(name, fused, rejected)

    def encode(self, pixels: NDArray[np.uint8], layout: Layout) -> F32:
        """Features of a picture, [tokens, levels · out]."""
        plans = [self._plan(layout), self._plan(layout.patches)]
        inputs: dict[str, NDArray[Any]] = {
            "pixels": pixels.astype(np.float32),
            **patches_inputs(layout, self.tower.processor),
            **tower_inputs(self.tower, layout),
        }
        device = self.device
        for plan in plans:
            for name, spec in plan.buffers.items():
                self._reserve(name, spec)
        for name, array in inputs.items():
            if name in self._buffers:  # a picture that needs no resizing has fewer
                device.write(self._buffers[name], array)
        bound = [self._bind(layout), self._bind(layout.patches)]
        nbytes = 4 * layout.tokens * self.tower.out
        names = ["features", *(f"features.{level}" for level in range(1, self.tower.levels))]
        pending = [device.submit([] if i else bound, (self._buffers[name], nbytes)) for i, name in enumerate(names)]
        outputs = {}
        for name, each in zip(names, pending, strict=True):
            assert each is not None
            outputs[name] = each.wait().view(np.float32).reshape(layout.tokens, self.tower.out)
        return joined(outputs, self.tower)

    def _bind(self, key: int | Layout) -> BoundProgram:
        """A plan with its buffers, kept until one of them is replaced."""
        plan = self._plan(key)
        if key not in self._bound:
            self._bound[key] = self.device.bind(plan.program, {name: self._buffer(name, plan) for name in plan.buffers})
        return self._bound[key]

    def _reserve(self, name: str, spec: BufferSpec) -> None:
        if spec.role in ("weight", "params"):
            return
        known = self._buffers.get(name)
        if known is None or known.size < spec.nbytes:
            self._buffers[name] = self.device.buffer(spec.nbytes)
            if known is not None:
                self._bound.clear()
                known.destroy()

    def _buffer(self, name: str, plan: Plan) -> Any:
        spec = plan.buffers[name]
        if spec.role == "weight":
            return self._weights[name]
        if spec.role == "params":
            key = f"params {spec.words}"
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
