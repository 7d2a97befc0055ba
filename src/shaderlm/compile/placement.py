"""Where hidden tensors and scratch lie: few buffers, used again when what they held is no longer needed.

A dispatch's output never shares a buffer with its inputs: those are alive until it has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..graph.graph import Graph, Node


@dataclass(frozen=True)
class Arena:
    """The slot of each hidden tensor, of each scratch buffer (by node and name), and the slots' bytes."""

    slots: Mapping[str, str]
    scratch: Mapping[tuple[int, str], str]
    sizes: Mapping[str, int]


class _Slots:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.free: list[int] = []

    def take(self, nbytes: int) -> int:
        """The smallest free slot that is large enough, else the largest free one, grown; else a new one."""
        fitting = [i for i in self.free if self.sizes[i] >= nbytes]
        if fitting:
            slot = min(fitting, key=lambda i: (self.sizes[i], i))
        elif self.free:
            slot = max(self.free, key=lambda i: (self.sizes[i], -i))
        else:
            slot = len(self.sizes)
            self.sizes.append(0)
            self.free.append(slot)
        self.free.remove(slot)
        self.sizes[slot] = max(self.sizes[slot], nbytes)
        return slot


def arena_of(graph: Graph, nodes: Sequence[tuple[Node, Mapping[str, int]]]) -> Arena:
    """Place every hidden tensor that is no output. `nodes` come with the bytes of each buffer of their launch_lists."""
    last = {name: i for i, (node, _) in enumerate(nodes) for name in (*node.inputs.values(), *node.outputs.values())}
    pool = _Slots()
    slots: dict[str, int] = {}
    scratch: dict[tuple[int, str], int] = {}
    for i, (node, buffers) in enumerate(nodes):
        for name in dict.fromkeys(node.outputs.values()):
            tensor = graph.tensors[name]
            if tensor.role == "hidden" and name not in graph.outputs:
                slots[name] = pool.take(tensor.nbytes)
        operands = {*node.inputs, *node.outputs, "weight", "scales", "bias", "residual"}
        temporary = [key for key in buffers if key.split(".")[0] not in operands]
        for key in temporary:
            scratch[i, key] = pool.take(buffers[key])
        pool.free.extend(scratch[i, key] for key in temporary)
        for name in {*node.inputs.values(), *node.outputs.values()}:
            if last[name] == i and name in slots:
                pool.free.append(slots[name])
    return Arena(
        {name: f"arena.{slot}" for name, slot in slots.items()},
        {key: f"arena.{slot}" for key, slot in scratch.items()},
        {f"arena.{i}": size for i, size in enumerate(pool.sizes)},
    )
