"""Compiled kernels of a device, each compiled once, on all cores: drivers take from milliseconds to seconds for one."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..errors import KernelError
from .caps import DeviceCaps
from .program import Access, Step
from .webgpu_h import NativeDevice, NativeError

Key = tuple[str, tuple[Access, ...]]


def key_of(step: Step) -> Key:
    """Steps with equal keys share a pipeline."""
    return step.source, tuple(slot.access for slot in step.slots)


class Pipelines:
    """A cache. Its lock covers the table alone: nobody compiles or waits under it."""

    def __init__(self, native: NativeDevice, caps: DeviceCaps) -> None:
        self._native, self._caps = native, caps
        self._lock = threading.Lock()
        self._futures: dict[Key, Future[Any]] = {}

    def __getitem__(self, step: Step) -> Any:
        return self._futures[key_of(step)].result()

    def __len__(self) -> int:
        return len(self._futures)

    def compile(self, steps: Iterable[Step]) -> None:
        """Compile what is not compiled yet, and wait for what other threads compile."""
        by_key = {key_of(step): step for step in steps}
        mine: dict[Key, Future[Any]] = {}
        try:
            with self._lock:
                mine.update({key: Future() for key in by_key if key not in self._futures})
                self._futures.update(mine)
                futures = [self._futures[key] for key in by_key]
            if len(mine) == 1:
                ((key, future),) = mine.items()
                future.set_result(self._compile(by_key[key]))
            elif mine:
                with ThreadPoolExecutor(min(len(mine), os.cpu_count() or 1), "compile") as pool:
                    pipelines = pool.map(lambda key: self._compile(by_key[key]), mine)
                    for future, pipeline in zip(mine.values(), pipelines, strict=True):
                        future.set_result(pipeline)
        except BaseException as problem:  # those that wait for it are told, and it may be tried again
            interrupted = KernelError("another thread was interrupted while it compiled this kernel; try again")
            with self._lock:
                for key, future in mine.items():
                    if not future.done():
                        self._futures.pop(key, None)
                        future.set_exception(problem if isinstance(problem, KernelError) else interrupted)
            raise
        for future in futures:
            future.result()

    def _compile(self, step: Step) -> Any:
        check_bindings(step)
        if not _ENTRY_POINT.search(step.source):  # Dawn without validation ends the process
            raise KernelError(explain(step.label, step.source, "there is no entry point main", self._caps))
        sizes = workgroup_size(step.source).split(" × ")
        if all(map(str.isdecimal, sizes)) and math.prod(map(int, sizes)) > self._caps.max_invocations:
            # Dawn knows no limit that is lower than WebGPU's default.
            raise KernelError(explain(step.label, step.source, "too many threads per workgroup", self._caps))
        try:
            return self._native.create_pipeline(step.label, step.source, key_of(step)[1])
        except NativeError as problem:
            raise KernelError(explain(step.label, step.source, str(problem), self._caps)) from problem


_ENTRY_POINT = re.compile(r"@compute\b[^{;]*\bfn\s+main\s*\(")
_BINDING = re.compile(r"@binding\((\d+)\)\s*var<\s*(storage|uniform)\s*(?:,\s*(\w+)\s*)?>")


def check_bindings(step: Step) -> None:
    """The source must declare what the step binds. A device that is opened without validation would read zeros."""
    declared: dict[int, Access] = {}
    for number, space, access in _BINDING.findall(step.source):
        writable = access == "read_write"
        declared[int(number)] = "uniform" if space == "uniform" else "storage" if writable else "read-only-storage"
    bound = dict(enumerate(slot.access for slot in step.slots))
    if declared != bound:
        raise KernelError(f"kernel {step.label} declares the bindings {_listed(declared)}; bound are {_listed(bound)}")


def _listed(bindings: Mapping[int, Access]) -> str:
    return ", ".join(f"{number} {access}" for number, access in sorted(bindings.items())) or "none"


def explain(label: str, source: str, message: str, caps: DeviceCaps) -> str:
    """The compiler's message with the numbered WGSL lines around the place it names, or with the sizes it is about."""
    lines = source.splitlines()
    location = re.search(r"wgsl:(\d+):(\d+)", message)
    if location:
        line = int(location.group(1))
        numbers = range(max(1, line - 3), min(len(lines), line + 3) + 1)
        excerpt = "\n".join(f"{'>' if n == line else ' '}{n:5} | {lines[n - 1]}" for n in numbers)
        return f"kernel {label} does not compile, line {line}:\n{excerpt}\n{message}"
    if re.search("workgroup.size|invocation|threads?(group| per)", message, re.I):
        limit = f"{caps.name} allows {caps.max_invocations} threads, and fewer for a kernel that needs many registers"
        return f"kernel {label} has workgroups of {workgroup_size(source)} threads; {limit}: {message}"
    return f"kernel {label} does not compile: {message}"


def workgroup_size(source: str) -> str:
    """The size of a kernel's workgroups, x × y × z, with constants looked up as far as they are plain numbers."""
    size = re.search(r"@workgroup_size\(([^)]*)\)", source)
    terms = [term.strip() for term in size.group(1).split(",") if term.strip()] if size else []
    for i, term in enumerate(terms):
        constant = re.search(rf"\bconst\s+{re.escape(term)}\b[^=;]*=\s*(\d+)", source)
        terms[i] = constant.group(1) if constant else term.rstrip("u")
    return " × ".join(terms) or "an unknown number of"
