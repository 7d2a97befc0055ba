"""A GPU that is not there: it compiles and runs nothing, and says how long each candidate takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from shaderlm.compile import lower
from shaderlm.engine.planning import LARGE_GPU
from shaderlm.errors import KernelError
from shaderlm.gpu import Copy, Device, DeviceCaps, Program, Step
from shaderlm.kernels import Dims, Option, options

TIMED_GPU = replace(LARGE_GPU, name="Timed GPU 1", driver="driver 1")


class TimedDevice:
    """`seconds` says how long a call takes, by the name of the candidate; those of `broken` do not compile."""

    def __init__(self, op: str, dims: Dims, seconds: Callable[[str], float], precision: str = "fast") -> None:
        self.caps: DeviceCaps = TIMED_GPU
        self.broken: set[str] = set()
        self.compiled: list[str] = []
        self.timed: list[str] = []
        self.made = 0
        self._seconds, self._names = seconds, dict[str, str]()
        self.know(op, dims, precision)

    @property
    def device(self) -> Device:
        return cast("Device", self)

    def know(self, op: str, dims: Dims, precision: str) -> list[Option]:
        """Recognise the programs of a shape."""
        found = options(op, dims, self.caps, precision)
        for option in found:
            made = lower(option.route, dims, self.caps, {}, launch_list=option.launch_list)
            self._names[made.steps[0].source] = option.name
        return found

    def compile(self, steps: Iterable[Step]) -> None:
        names = [self._names.get(step.source, "") for step in steps]
        if self.broken & set(names):
            raise KernelError("too many registers")
        self.compiled += names

    def buffer(self, contents: Any) -> Any:
        self.made += 1

        def destroy() -> None:
            self.made -= 1

        return SimpleNamespace(size=contents if isinstance(contents, int) else contents.nbytes, destroy=destroy)

    def copy(self, *copies: Copy) -> None:
        for each in copies:
            assert each.nbytes <= min(each.source.size, each.target.size)

    def bind(self, program: Program, shared: Any = None) -> Any:
        own = {name: self.buffer(contents) for name, contents in program.buffers.items() if name not in (shared or {})}
        buffers = {**(shared or {}), **own}

        def release() -> None:
            for buffer in buffers.values():
                buffer.destroy()

        return SimpleNamespace(program=program, buffers=buffers, release=release)

    def time(self, programs: Sequence[Any], warm_up: Sequence[Any] = ()) -> float:
        names = [self._names.get(bound.program.steps[0].source, "") for bound in programs]
        self.timed += sorted(set(names) - {""})
        return sum(self._seconds(name) if name else 1e-4 for name in names)
