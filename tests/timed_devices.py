"""A GPU that is not there: it compiles and runs nothing, and says how long each candidate takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from shaderlm.compile import lower
from shaderlm.errors import KernelError
from shaderlm.gpu import Device, DeviceCaps, Program, Step
from shaderlm.kernels import Dims, Option, options

from .test_plan import LARGE_GPU

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
            route = replace(option.route, launch_list=lambda *_, launch_list=option.launch_list: launch_list)
            self._names[lower(route, dims, self.caps, {}).steps[0].source] = option.name
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

    def copy(self, source: Any, target: Any, nbytes: int) -> None:
        assert nbytes <= source.size
        assert nbytes <= target.size

    def load(self, program: Program, shared: Any = None) -> Any:
        own = {name: self.buffer(contents) for name, contents in program.buffers.items() if name not in (shared or {})}
        return SimpleNamespace(program=program, buffers={**(shared or {}), **own})

    def time(self, queue: Sequence[Any], heat: Sequence[Any] = ()) -> float:
        names = [self._names.get(loaded.program.steps[0].source, "") for loaded in queue]
        self.timed += sorted(set(names) - {""})
        return sum(self._seconds(name) if name else 1e-4 for name in names)
