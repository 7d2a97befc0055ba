"""An open device: buffers, a pipeline cache, runs programs and times them. Knows nothing of ops or models.

Any thread may use a device. What needs a lock has its own: the queue (queue.py: submitting), the pipeline cache
(pipelines.py: its table), a tracer (tracer.py: its queries) and the table of open devices (opening.py). No lock of a
device is held while a thread waits for the GPU or for a compiler, and none is taken while another is held.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError, MemoryFullError
from .adapters import Adapter
from .caps import DeviceCaps
from .command_pool import CommandBufferPool
from .drivers import DRIVERS
from .lanes import with_probed_lanes
from .matrices import with_probed_matrices
from .pipelines import Pipelines
from .processors import with_counted_processors
from .program import Array, Program, Slot, Step, as_bytes, bytes_of, padded
from .queue import Queue
from .read_back import PendingReadBack
from .recording import BoundProgram, CommandBuffer, ReadBack, encode
from .tracer import BY_PASS, IN_PASS, WALL, Grain, Tracer
from .webgpu_h import LIMITS, Buffer, NativeError, NativeMemoryError

FEATURES = ("f16", "subgroups", "subgroup_matrix", "timestamps", "pass_timestamps")  # that may be switched off


class Copy(NamedTuple):
    """Bytes of one buffer into another, or into another place of the same. All numbers are multiples of 4."""

    source: Buffer
    target: Buffer
    nbytes: int
    source_offset: int = 0
    target_offset: int = 0


class Device:
    """One adapter opened at its full limits and features, less what `without` and `limits` take away.

    Close it, or share one by `open_device`.
    """

    def __init__(
        self,
        adapter: Adapter,
        *,
        without: Sequence[str] = (),
        limits: Mapping[str, int] | None = None,
    ) -> None:
        lowered = dict(limits or {})
        for word, names, known in (("feature", without, FEATURES), ("limit", lowered, tuple(LIMITS))):
            unknown = [name for name in names if name not in known]
            if unknown:
                raise DeviceError(f"unknown {word} {unknown}; known: {list(known)}")
        for name, value in lowered.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise DeviceError(f"limit {name} must be a whole number of at least 1, got {value!r}")
        caps = adapter.caps
        features = {name: bool(getattr(caps, name)) and name not in without for name in FEATURES}
        features["pass_timestamps"] &= features["timestamps"]  # these are written into the same sets of queries
        features["subgroup_matrix"] &= features["f16"] and features["subgroups"]
        capped = {name: min(value, getattr(caps, name)) for name, value in lowered.items()}
        self.backend_reason = adapter.reason
        native = adapter.native.open([name for name, on in features.items() if on], capped, caps.policy.check_bounds)
        self._native, self._queue = native, Queue(native)
        shapes = caps.matrix_shapes if features.pop("subgroup_matrix") else ()
        changes: dict[str, Any] = {**features, **capped, "matrix_shapes": shapes}
        self.caps: DeviceCaps = replace(caps, **changes)
        self._pipelines = Pipelines(native, self.caps)
        self._tracer: Tracer | None = None
        self._pools: weakref.WeakSet[CommandBufferPool[CommandBuffer]] = weakref.WeakSet()
        self.caps = with_probed_lanes(self, adapter.native.key)
        self.caps = with_probed_matrices(self, adapter.native.key)
        self.caps = with_counted_processors(self, whole=not (without or lowered))

    def __repr__(self) -> str:
        return f"<Device {self.caps.name} ({self.caps.kind}, {self.caps.backend}, {self.caps.implementation})>"

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back: buffers, pipelines, what is recorded. Waits for the GPU. Twice is as good as once."""
        if not self._queue.closed and not self.forked:
            self._close_pools()
            self._queue.closed = True
            self._native.close()

    @property
    def usable(self) -> bool:
        """Neither closed nor lost."""
        return not self._queue.closed and self._native.lost is None

    @property
    def forked(self) -> bool:
        """Was it opened by another process, which this one is a fork of?"""
        return DRIVERS.forked

    def check(self) -> None:
        """Closed, lost, and opened by another process: these are DeviceErrors."""
        self._queue.check()

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """An implementation's errors in words for people."""
        self._queue.check()
        try:
            yield
        except (NativeError, MemoryError) as problem:
            self._queue.check()  # a loss has its own words
            raise _refusal(f"{self.caps.name} refused to {what}: {problem}", problem) from problem

    # buffers ---------------------------------------------------------------------------------------------

    def buffer(self, contents: Array | int) -> Buffer:
        """A storage buffer with these contents, or zeros of this many bytes."""
        nbytes = bytes_of(contents)
        if padded(nbytes) > self.caps.max_buffer:
            raise DeviceError(
                f"a buffer of {nbytes:,} bytes was asked for; {self.caps.name} allows {self.caps.max_buffer:,}"
            )
        self._queue.check()
        try:
            buffer = self._native.create_buffer(padded(nbytes), "storage")
            if not isinstance(contents, int):
                self._native.write(buffer, 0, as_bytes(contents))
        except (NativeError, MemoryError) as problem:
            self._queue.check()
            raise _refusal(f"{self.caps.name} cannot allocate {nbytes:,} bytes: {problem}", problem) from problem
        return buffer

    def read(self, buffer: Buffer, nbytes: int, offset: int = 0) -> NDArray[np.uint8]:
        """Bytes of a buffer. Waits for everything that was submitted before."""
        buffer.check()
        with self._translated("read results back"):
            return self._queue.read(self._native.create_encoder(), (buffer, nbytes, offset))

    def write(self, buffer: Buffer, data: Array, offset: int = 0) -> None:
        """Bytes into a buffer, in the order of submissions. The offset must be a multiple of 4.

        So must the size be: zeros are added, which is right for the last bytes of a buffer only.
        """
        if not data.flags.c_contiguous or data.nbytes % 4:
            raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            data = np.pad(raw, (0, -raw.size % 4))
        buffer.check()
        self._queue.check()
        try:  # not `_translated`: steps may write, and a context takes 1.5 µs
            self._native.write(buffer, offset, data)
        except (NativeError, MemoryError) as problem:
            self._queue.check()
            raise _refusal(f"{self.caps.name} refused to take data: {problem}", problem) from problem

    def copy(self, *copies: Copy) -> None:
        """Copies in one submission, in this order. WebGPU has none within a buffer: those go by way of another."""
        for each in copies:
            for buffer, offset in ((each.source, each.source_offset), (each.target, each.target_offset)):
                buffer.check()
                if offset + each.nbytes > buffer.size:  # Dawn without its checks would copy
                    raise DeviceError(
                        f"a copy of {each.nbytes:,} bytes from byte {offset:,} on was asked for; "
                        f"the buffer has {buffer.size:,}"
                    )
        within = sum(each.nbytes for each in copies if each.source is each.target)
        between = self.buffer(within) if within else None
        with self._translated("copy a buffer"):
            encoder, at = self._native.create_encoder(), 0
            for each in copies:
                if between is not None and each.source is each.target:
                    encoder.copy(each.source, each.source_offset, between, at, each.nbytes)
                    encoder.copy(between, at, each.target, each.target_offset, each.nbytes)
                    at += each.nbytes
                else:
                    encoder.copy(each.source, each.source_offset, each.target, each.target_offset, each.nbytes)
            self._queue.submit(CommandBuffer(encoder.finish()))
        if between is not None:
            between.destroy()

    def flush(self) -> None:
        """Wait until everything that was written has arrived, so that the host's copies are freed."""
        with self._translated("take data"):
            self._queue.run(self._native.create_encoder().finish())

    # programs --------------------------------------------------------------------------------------------

    def compile(self, steps: Iterable[Step]) -> None:
        """Compile what is not compiled yet, on all cores."""
        self._queue.check()
        self._pipelines.compile(steps)

    def bind(self, program: Program, shared: Mapping[str, Buffer] | None = None) -> BoundProgram:
        """Create (or take from `shared`) the buffers of a program, its pipelines and its bind groups."""
        self.compile(program.steps)
        shared = shared or {}
        buffers = {
            name: shared[name] if name in shared else self.buffer(contents)
            for name, contents in program.buffers.items()
        }
        dispatches = []
        for step in program.steps:
            pipeline = self._pipelines[step]
            if max(step.grid) > self.caps.max_workgroups:
                raise DeviceError(
                    f"{step.label} has a grid of {' × '.join(map(str, step.grid))} workgroups; {self.caps.name} allows "
                    f"{self.caps.max_workgroups:,} in each dimension"
                )
            with self._translated(f"bind the buffers of {step.label}"):
                ranges = [self._range(step, slot, buffers[slot.buffer]) for slot in step.slots]
                dispatches.append((pipeline, self._native.create_bind_group(pipeline, ranges), step.grid))
        return BoundProgram(self._native, program, buffers, dispatches)

    def _range(self, step: Step, slot: Slot, buffer: Buffer) -> tuple[Buffer, int, int]:
        size = buffer.size - slot.offset if slot.size is None else slot.size
        if slot.offset % self.caps.offset_alignment:
            raise DeviceError(
                f"{step.label} binds {slot.buffer} from byte {slot.offset:,}; {self.caps.name} wants a multiple of "
                f"{self.caps.offset_alignment}"
            )
        if slot.access != "uniform" and size > self.caps.max_binding:
            raise DeviceError(
                f"{step.label} binds {size:,} bytes of {slot.buffer}; {self.caps.name} allows {self.caps.max_binding:,}"
            )
        buffer.check()
        return buffer, slot.offset, size

    def run(self, program: Program) -> dict[str, NDArray[np.uint8]]:
        """Run a program once and read its outputs back as raw bytes."""
        bound = self.bind(program)
        labels = ", ".join(dict.fromkeys(step.label for step in program.steps))
        try:
            with self._translated(f"run {labels}"):
                encoder = self._native.create_encoder()
                encode(encoder, [bound])
                self._queue.submit(CommandBuffer(encoder.finish()))
            return {name: self.read(bound.buffers[name], bytes_of(program.buffers[name])) for name in program.outputs}
        finally:
            bound.release()

    def submit(self, programs: Sequence[BoundProgram], read_back: ReadBack | None = None) -> PendingReadBack | None:
        """Run programs one after the other in one compute pass, without waiting.

        `read_back`: (buffer, nbytes); these bytes, as they are afterwards, come back.
        """
        with self._translated("run a plan"):
            if self._tracer is not None:
                return self._tracer.run(programs, read_back)
            return self._queue.submit(self._queue.record(programs, read_back))

    # recording ahead -------------------------------------------------------------------------------------

    def command_pool(
        self, programs: Sequence[BoundProgram], read_back: ReadBack | None = None
    ) -> CommandBufferPool[CommandBuffer] | None:
        """What `submit` would record, recorded ahead by other threads for `submit_from`; None where that is no use.

        It serves as long as it is not closed: a tracer that begins or ends closes it too.
        """
        tracer = self._tracer
        if not self.caps.policy.record_ahead or (tracer is not None and not tracer.takes_recorded):
            return None
        record = self._queue.record if tracer is None else tracer.record
        turn = threading.Lock()

        def make() -> CommandBuffer:
            with self._translated("run a plan"):
                return record(programs, read_back, turn)

        pool = CommandBufferPool(make, self._queue.discard)
        self._pools.add(pool)
        return pool

    def submit_from(self, pool: CommandBufferPool[CommandBuffer]) -> PendingReadBack | None:
        """`submit` of what a pool holds. Where this fails, the pool is one short and of no more use."""
        tracer = self._tracer
        began = time.perf_counter_ns() if tracer is not None else 0
        commands = pool.take()
        if tracer is None:
            pending = self._queue.submit(commands)
        else:
            tracer.note(commands, "take", began)
            pending = tracer.submit(commands)
        del commands  # a worker lets go of it
        pool.request()
        return pending

    def _close_pools(self) -> None:
        for pool in list(self._pools):
            pool.close()
        self._pools.clear()

    # time ------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> str:
        """The finest clock for single dispatches that this device has, in words."""
        return IN_PASS if self.caps.pass_timestamps else BY_PASS if self.caps.timestamps else WALL

    @contextmanager
    def traced(self, grain: Grain) -> Iterator[Tracer]:
        """Submissions are traced as long as this context is open. One tracer at a time."""
        assert self._tracer is None, "this device is traced already"
        self._close_pools()
        self._tracer = Tracer(self._queue, self.clock, grain, self._close_pools)
        try:
            yield self._tracer
        finally:
            self._tracer = None
            self._close_pools()

    def time(self, programs: Sequence[BoundProgram], warm_up: Sequence[BoundProgram] = ()) -> float:
        """Seconds of GPU time for these programs back to back in one compute pass, by timestamps.

        `warm_up` runs just before, untimed, in the same submission: a GPU that has been idle clocks low.
        """
        if not self.caps.timestamps:
            raise DeviceError(f"{self.caps.name} has no timestamp queries; GPU time cannot be measured")
        with self._translated("time a program"):
            queries = self._native.create_query_set(2)
            ticks = self._native.create_buffer(16, "timestamps")
            encoder = self._native.create_encoder()
            encode(encoder, warm_up)
            compute_pass = encoder.begin_pass((queries, 0, 1))
            for bound in programs:
                bound.record(compute_pass)
            compute_pass.end()
            encoder.resolve(queries, 0, 2, ticks)
            start, end = self._queue.read(encoder, (ticks, 16)).view(np.uint64)
            return float(end - start) * self._native.tick_ns * 1e-9

    def time_wall(self, programs: Sequence[BoundProgram], warm_up: Sequence[BoundProgram] = ()) -> float:
        """Seconds by the host's clock for the same, from submission to completion: for want of timestamps."""
        with self._translated("time a program"):
            before, timed = self._native.create_encoder(), self._native.create_encoder()
            encode(timed, programs)
            encode(before, warm_up)
            commands = timed.finish()
            self._queue.run(before.finish())
            start = time.perf_counter()
            self._queue.run(commands)
            return time.perf_counter() - start


def _refusal(words: str, problem: Exception) -> DeviceError:
    """The error for what an implementation refused."""
    is_full = isinstance(problem, (NativeMemoryError, MemoryError))
    return MemoryFullError(words) if is_full else DeviceError(words)
