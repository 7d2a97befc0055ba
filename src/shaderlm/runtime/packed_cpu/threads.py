"""Threads that walk over an array of ops, taking chunks of each; whoever is first does the most.

An op is a row of 64-bit words: its function, how many chunks it has, how far it is, and its arguments. A stage is ops
that do not need each other; an op that begins one waits for those of the stage before. Nobody waits for a thread that
has not taken a chunk, so that a thread that the system does not run costs little.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .code import host
from .ir import I64, PTR, Function, Module, Value

WORDS = 32  # of an op
FUNCTION, CHUNKS, NEXT, DONE, STAGE = range(5)  # STAGE: the first op of the stage before, or −1 within a stage
ARGUMENTS = 8
_SPINS = 200  # looks, of 140 cycles each, before the rest of the time is given to others
STEP_WORDS = 16
ROWS, BATCH, PAGE_TABLE, YIELD = range(4)  # of a step: what ops read beside their arguments


_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time in a period, or "max"


def cores() -> int:
    """Cores that this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = map(int, _QUOTA.read_text().split())
        count = max(1, min(count, -(-quota // period)))
    return count


def define(module: Module, name: str) -> tuple[Function, Value, Value, Value]:
    """An op's function: its row, the chunk, and the step."""
    f = module.function(name, PTR, I64, PTR)
    op, chunk, step = f.parameters
    return f, op, chunk, step


def argument(f: Function, op: Value, index: int, kind: str = I64) -> Value:
    """One of an op's arguments: a whole number or an address."""
    return op.at(I64, ARGUMENTS + index).load(kind)


def _walk(features: Collection[str]) -> str:
    """walk(ops, count, step, epoch): what a thread does. Counters hold the epoch in their upper half: a thread that
    comes late to a step that is over takes nothing."""
    module = Module()
    f = module.function("walk", PTR, I64, PTR, I64)
    ops, count, step, epoch = f.parameters
    i, taken, spins = f.variable(I64), f.variable(I64), f.variable(I64)

    def word(row: Value, index: int) -> Value:
        return row.at(I64, index)

    def atomic(where: Value) -> Value:
        return f.emit(I64, f"load atomic i64, ptr {where.name} acquire, align 8")

    labels = {name: f.label() for name in ("op", "begin", "wait", "check", "spin", "again", "yield", "earlier", "take")}
    labels |= {name: f.label() for name in ("try", "swap", "run", "next", "end", "left", "same", "calm")}
    at = labels.__getitem__

    def row_of(index: Value) -> Value:
        return ops.at(I64, index * WORDS)

    f.place(at("op"))
    f.branch(i.value.compare("slt", count), at("begin"), at("end"))
    f.line(f"{at('begin')}:")
    first = word(row_of(i.value), STAGE).load(I64)
    earlier = f.variable(I64, first)
    spins.set(0)
    f.branch(first.compare("slt", 0), at("take"), at("wait"))
    # All ops of the stage before must be done.
    f.line(f"{at('wait')}:")
    f.branch(earlier.value.compare("slt", i.value), at("check"), at("take"))
    f.line(f"{at('check')}:")
    row = row_of(earlier.value)
    state = atomic(word(row, DONE))
    f.branch((state >> 32).compare("eq", epoch), at("same"), at("end"))
    f.line(f"{at('same')}:")
    f.branch((state & 0xFFFFFFFF).compare("ult", word(row, CHUNKS).load(I64)), at("spin"), at("earlier"))
    f.line(f"{at('earlier')}:")
    earlier.set(earlier.value + 1)
    f.line(f"br label %{at('wait')}")
    f.line(f"{at('spin')}:")
    spins.set(spins.value + 1)
    f.branch(spins.value.compare("slt", _SPINS), at("calm"), at("yield"))
    f.line(f"{at('calm')}:")
    if "sse2" in features:
        f.run("llvm.x86.sse2.pause")
    f.line(f"br label %{at('check')}")
    f.line(f"{at('yield')}:")
    give = step.at(I64, YIELD).load(PTR)
    f.line(f"call i32 {give.name}()")
    f.line(f"br label %{at('check')}")
    # Take a chunk, unless there is none.
    f.line(f"{at('take')}:")
    row = row_of(i.value)
    f.line(f"br label %{at('again')}")
    f.line(f"{at('again')}:")
    taken.set(atomic(word(row, NEXT)))
    f.branch((taken.value >> 32).compare("eq", epoch), at("try"), at("end"))
    f.line(f"{at('try')}:")
    chunk = taken.value & 0xFFFFFFFF
    f.branch(chunk.compare("ult", word(row, CHUNKS).load(I64)), at("swap"), at("next"))
    f.line(f"{at('swap')}:")
    now = taken.value
    pair = f.emit(
        "{ i64, i1 }", f"cmpxchg ptr {word(row, NEXT).name}, i64 {now.name}, i64 {(now + 1).name} acq_rel acquire"
    )
    swapped = f.emit("i1", f"extractvalue {{ i64, i1 }} {pair.name}, 1")
    f.branch(swapped, at("run"), at("again"))
    f.line(f"{at('run')}:")
    function = word(row, FUNCTION).load(PTR)
    f.line(f"call void {function.name}(ptr {row.name}, i64 {chunk.name}, ptr {step.name})")
    f.emit(I64, f"atomicrmw add ptr {word(row, DONE).name}, i64 1 acq_rel")
    f.line(f"br label %{at('again')}")
    f.line(f"{at('next')}:")
    i.set(i.value + 1)
    f.line(f"br label %{at('op')}")
    f.line(f"{at('end')}:")
    return module.text()


@functools.cache
def _walker() -> Any:
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    return kind(host().address("walk", _walk, tuple(sorted(host().features & {"sse2"}))))


@functools.cache
def _yield_address() -> int:
    if sys.platform == "win32":
        function = ctypes.windll.kernel32.SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class _Workers:
    """Threads that sleep until a program runs. They keep no process alive."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.busy = threading.Lock()
        self._wake = threading.Semaphore(0)
        self._work: tuple[Any, ...] = ()
        self.count = 0
        with suppress(RuntimeError):  # no more threads may be started: those that there are do
            for i in range(cores() - 1):
                threading.Thread(target=self._serve, name=f"shaderlm-cpu-{i}", daemon=True).start()
                self.count += 1

    def start(self, *work: Any) -> None:
        self._work = work
        if self.count:
            self._wake.release(self.count)

    def _serve(self) -> None:
        walk = _walker()
        while True:
            self._wake.acquire()
            ops, count, step, epoch = self._work
            walk(ops.ctypes.data, count, step.ctypes.data, epoch)
            del ops, step


_workers: _Workers | None = None
_making = threading.Lock()
_epoch = 0


def _renew_lock() -> None:
    global _making
    _making = threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread of the parent may hold it
    os.register_at_fork(after_in_child=_renew_lock)


def _get_workers() -> _Workers:
    global _workers
    with _making:
        if _workers is None or _workers.process != os.getpid():
            _workers = _Workers()
        return _workers


def run(ops: NDArray[np.int64], step: NDArray[np.int64]) -> None:
    """All ops, on all cores; on one if another program has them. The last one must wait, and have no chunks."""
    global _epoch
    workers = _get_workers()
    with _making:
        _epoch = epoch = _epoch % 0x3FFFFFFF + 1
    step[YIELD] = _yield_address()
    ops[:, NEXT] = ops[:, DONE] = epoch << 32
    walk = functools.partial(_walker(), ops.ctypes.data, len(ops), step.ctypes.data, epoch)
    over, shared = False, False
    try:
        shared = workers.busy.acquire(blocking=False)
        if shared:
            workers.start(ops, len(ops), step, epoch)
        walk()
        over = True
    finally:
        if not over:  # Ctrl-C: others may be in a chunk, and what they read must not change or go away
            walk()
        ops[:, NEXT] = 0  # no epoch: whoever is late takes nothing, though chunks and arguments change
        if shared:
            workers.busy.release()
