"""An open device: buffers, a pipeline cache, runs programs and times them. Knows nothing of ops or models."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError, KernelError
from .adapters import Adapter, choose
from .caps import DeviceCaps
from .mailbox import Letter, Mailbox
from .modules import checked_module, unchecked_module
from .program import Array, Program, Slot, Step, as_bytes, padded
from .record import Loaded, Prepared, encode, prepared, recorder, release
from .stock import Stock
from .watch import BY_PASS, IN_PASS, WALL, Grain, Watch

# DeviceCaps' names for what may be switched off or capped, and wgpu's.
_FEATURES = {
    "f16": "shader-f16",
    "subgroups": "subgroup",
    "timestamps": "timestamp-query",
    "pass_timestamps": "timestamp-query-inside-passes",
}
_LIMITS = {
    "max_binding": "max-storage-buffer-binding-size",
    "max_buffer": "max-buffer-size",
    "max_workgroups": "max-compute-workgroups-per-dimension",
    "max_invocations": "max-compute-invocations-per-workgroup",
    "max_workgroup_memory": "max-compute-workgroup-storage-size",
    "max_storage_buffers": "max-storage-buffers-per-shader-stage",
}


class Device:
    """One adapter opened at its full limits and features, less what `without` and `limits` take away."""

    def __init__(
        self,
        adapter: Adapter,
        *,
        without: Sequence[str] = (),
        limits: Mapping[str, int] | None = None,
        checked: bool | None = None,
    ) -> None:
        import wgpu

        lowered = dict(limits or {})
        for word, names, known in (("feature", without, _FEATURES), ("limit", lowered, _LIMITS)):
            unknown = [name for name in names if name not in known]
            if unknown:
                raise DeviceError(f"unknown {word} {unknown}; known: {list(known)}")
        for name, value in lowered.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise DeviceError(f"limit {name} must be a whole number of at least 1, got {value!r}")
        caps = adapter.caps
        kept = {name: bool(getattr(caps, name)) and name not in without for name in _FEATURES}
        kept["pass_timestamps"] &= kept["timestamps"]  # these are written into the same sets of queries
        capped = {name: min(value, getattr(caps, name)) for name, value in lowered.items()}
        changes: dict[str, Any] = {**kept, **capped}
        self.caps: DeviceCaps = replace(caps, **changes)
        wanted = dict(adapter.native.limits)
        wanted.update({_LIMITS[name]: value for name, value in capped.items()})
        if "max_invocations" in capped:
            for axis in "xyz":
                key = f"max-compute-workgroup-size-{axis}"
                wanted[key] = min(wanted[key], capped["max_invocations"])
        try:
            self._native = adapter.native.request_device_sync(
                required_features=[_FEATURES[name] for name, on in kept.items() if on],
                required_limits=wanted,
            )
        except (wgpu.GPUError, RuntimeError) as problem:
            raise DeviceError(f"{caps.name} could not be opened: {problem}") from problem
        self._gpu_error = wgpu.GPUError
        self._usage = wgpu.BufferUsage
        self._queue = self._native.queue
        # Software adapters are where kernels are tested: by default they check.
        self.checks = caps.software if checked is None else checked
        self._pipelines: dict[tuple[str, tuple[str, ...]], tuple[Any, Any]] = {}
        self._lock = threading.RLock()
        self._mailbox = Mailbox(self._native)
        self._watch: Watch | None = None
        # Whether steps are recorded ahead by other threads. A software adapter computes on the cores they would need.
        self.records_ahead = not caps.software
        self._stocks: weakref.WeakSet[Stock[Prepared]] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<Device {self.caps.name} ({self.caps.kind}, {self.caps.backend})>"

    # buffers ---------------------------------------------------------------------------------------------

    def buffer(self, contents: Array | int) -> Any:
        """A storage buffer with these contents, or zeros of this many bytes."""
        nbytes = contents if isinstance(contents, int) else contents.nbytes
        if padded(nbytes) > self.caps.max_buffer:
            raise DeviceError(
                f"a buffer of {nbytes:,} bytes was asked for; {self.caps.name} allows {self.caps.max_buffer:,}"
            )
        usage = self._usage.STORAGE | self._usage.UNIFORM | self._usage.COPY_DST | self._usage.COPY_SRC
        try:
            native = self._native.create_buffer(size=padded(nbytes), usage=usage)
            if not isinstance(contents, int):
                self._queue.write_buffer(native, 0, as_bytes(contents))
        except (self._gpu_error, MemoryError) as problem:
            raise DeviceError(f"{self.caps.name} has no room for {nbytes:,} bytes: {problem}") from problem
        return native

    def read(self, native: Any, nbytes: int) -> NDArray[np.uint8]:
        """The first `nbytes` bytes of a buffer. Waits for everything that was submitted before."""
        with self._translated("read results back"):
            return np.frombuffer(self._queue.read_buffer(native, 0, padded(nbytes)), np.uint8)[:nbytes].copy()

    def write(self, native: Any, data: Array, offset: int = 0) -> None:
        """Bytes into a buffer, in the order of submissions. The offset must be a multiple of 4.

        So must the size be: zeros are added, which is right for the last bytes of a buffer only.
        """
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        with self._translated("take data"):
            self._queue.write_buffer(native, offset, np.pad(raw, (0, -raw.size % 4)) if raw.size % 4 else raw)

    def write_words(self, native: Any, words: NDArray[np.uint32]) -> None:
        """What is written in every step: a few words to the beginning of a buffer that has room for them."""
        try:
            with self._lock:
                self._mailbox.write(native, words)
        except (self._gpu_error, MemoryError) as problem:
            raise DeviceError(f"{self.caps.name} refused to take data: {problem}") from problem

    def flush(self) -> None:
        """Wait until everything that was written has arrived, so that the host's copies are freed."""
        fence = self.buffer(16)  # on_submitted_work_done raises a TypeError in wgpu 0.32
        self.read(fence, 16)
        fence.destroy()

    def copy(self, source: Any, target: Any, nbytes: int) -> None:
        """The first bytes of a buffer into another."""
        with self._translated("copy a buffer"):
            encoder = self._native.create_command_encoder()
            encoder.copy_buffer_to_buffer(source, 0, target, 0, nbytes)
            self._queue.submit([encoder.finish()])

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except (self._gpu_error, MemoryError) as problem:
            raise DeviceError(f"{self.caps.name} refused to {what}: {problem}") from problem

    # pipelines -------------------------------------------------------------------------------------------

    def compile(self, steps: Iterable[Step]) -> None:
        """Compile what is not compiled yet, on all cores: drivers take from milliseconds to seconds for a kernel."""
        missing = {_key(step): step for step in steps if _key(step) not in self._pipelines}
        if len(missing) < 2:
            self._pipelines.update({key: self._compile(step) for key, step in missing.items()})
            return
        with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1), "compile") as pool:
            self._pipelines.update(zip(missing, pool.map(self._compile, missing.values()), strict=True))

    def _compile(self, step: Step) -> tuple[Any, Any]:
        try:
            create = checked_module if self.checks else unchecked_module
            module = create(self._native, step.label, step.source)
            layout = self._native.create_bind_group_layout(
                entries=[
                    {"binding": i, "visibility": 4, "buffer": {"type": slot.access}}
                    for i, slot in enumerate(step.slots)
                ]
            )
            pipeline = self._native.create_compute_pipeline(
                label=step.label,
                layout=self._native.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": module, "entry_point": "main"},
            )
        except self._gpu_error as problem:
            raise KernelError(explain_wgsl_error(step.label, step.source, str(problem))) from problem
        return pipeline, layout

    # running ---------------------------------------------------------------------------------------------

    def load(self, program: Program, shared: Mapping[str, Any] | None = None) -> Loaded:
        """Create (or take from `shared`) the buffers of a program, its pipelines and its bind groups."""
        self.compile(program.steps)
        with self._lock:
            buffers = {
                name: shared[name] if shared and name in shared else self.buffer(contents)
                for name, contents in program.buffers.items()
            }
            steps = []
            for step in program.steps:
                pipeline, layout = self._pipelines[_key(step)]
                try:
                    group = self._native.create_bind_group(layout=layout, entries=_entries(step.slots, buffers))
                except self._gpu_error as problem:
                    raise DeviceError(f"{self.caps.name} refused the buffers of {step.label}: {problem}") from problem
                steps.append((pipeline, group, step.grid))
            return Loaded(program, buffers, tuple(steps), recorder(steps))

    def run(self, program: Program) -> dict[str, NDArray[np.uint8]]:
        """Run a program once and read its outputs back as raw bytes."""
        with self._lock:
            loaded = self.load(program)
            try:
                encoder = self._native.create_command_encoder()
                encode(encoder, [loaded])
                self._queue.submit([encoder.finish()])
                return {name: self.read(loaded.buffers[name], _size(program, name)) for name in program.outputs}
            except self._gpu_error as problem:
                labels = ", ".join(dict.fromkeys(step.label for step in program.steps))
                raise DeviceError(f"{self.caps.name} refused to run {labels}: {problem}") from problem
            finally:
                release(loaded)

    def submit(self, queue: Sequence[Loaded], post: Any = None) -> Letter | None:
        """Run programs one after the other in one compute pass, without waiting.

        `post` is a buffer whose first 16 bytes, as they are afterwards, come back in a letter.
        """
        with self._lock, self._translated("run a plan"):
            if self._watch is not None:
                return self._watch.submit(queue, post)
            made = prepared(self._native, self._mailbox, queue, post)
            return self._mailbox.submit(made.commands, made.staging)

    def stock(self, queue: Sequence[Loaded], post: Any) -> Stock[Prepared] | None:
        """What `submit` would record, recorded ahead by other threads for `submit_from`; None where that is no use.

        It serves as long as it is not closed: a watch that begins or ends closes it too.
        """
        if not self.records_ahead or (self._watch is not None and not self._watch.takes_prepared):
            return None
        mailbox = self._mailbox
        record = partial(prepared, self._native, mailbox) if self._watch is None else self._watch.prepared
        turn = threading.Lock()

        def make() -> Prepared:
            with self._translated("run a plan"):
                return record(queue, post, turn)

        found: Stock[Prepared] = Stock(make, lambda made: mailbox.give_back(made.staging))
        self._stocks.add(found)
        return found

    def submit_from(self, stock: Stock[Prepared]) -> Letter:
        """`submit` of what is in stock. Where this fails, the stock is one short and of no more use."""
        try:
            if self._watch is not None:
                with self._lock:
                    letter = self._watch.submit_from(stock)
            else:
                made = stock.take()
                with self._lock:
                    letter = self._mailbox.submit(made.commands, made.staging)
                del made  # a worker lets go of it
        except (self._gpu_error, MemoryError) as problem:
            raise DeviceError(f"{self.caps.name} refused to run a plan: {problem}") from problem
        stock.order()
        assert letter is not None, "a stock is made with something to post"
        return letter

    @property
    def clock(self) -> str:
        """The finest clock for single dispatches that this device has, in words."""
        return IN_PASS if self.caps.pass_timestamps else BY_PASS if self.caps.timestamps else WALL

    @contextmanager
    def watched(self, grain: Grain) -> Iterator[Watch]:
        """Submissions are watched as long as this context is open. One watch at a time."""
        assert self._watch is None, "this device is watched already"
        self._close_stocks()
        tick_ns = self._tick_seconds() * 1e9
        self._watch = Watch(self._native, self._mailbox, self.clock, grain, tick_ns, self._close_stocks)
        try:
            yield self._watch
        finally:
            self._watch = None
            self._close_stocks()

    def _close_stocks(self) -> None:
        for stock in list(self._stocks):
            stock.close()
        self._stocks.clear()

    def time(self, queue: Sequence[Loaded], heat: Sequence[Loaded] = ()) -> float:
        """Seconds of GPU time for these programs back to back in one compute pass, by timestamps.

        `heat` runs just before, untimed, in the same submission: a GPU that has been idle clocks low.
        """
        if not self.caps.timestamps:
            raise DeviceError(f"{self.caps.name} has no timestamp queries; GPU time cannot be measured")
        with self._lock:
            queries = self._native.create_query_set(type="timestamp", count=2)
            ticks = self._native.create_buffer(size=16, usage=self._usage.QUERY_RESOLVE | self._usage.COPY_SRC)
            encoder = self._native.create_command_encoder()
            encode(encoder, heat)
            compute_pass = encoder.begin_compute_pass(
                timestamp_writes={
                    "query_set": queries,
                    "beginning_of_pass_write_index": 0,
                    "end_of_pass_write_index": 1,
                }
            )
            for loaded in queue:
                loaded.encode(compute_pass)
            compute_pass.end()
            encoder.resolve_query_set(queries, 0, 2, ticks, 0)
            self._queue.submit([encoder.finish()])
            start, end = np.frombuffer(self._queue.read_buffer(ticks), np.uint64)
            return float(end - start) * self._tick_seconds()

    def time_wall(self, queue: Sequence[Loaded], heat: Sequence[Loaded] = ()) -> float:
        """Seconds by the host's clock for the same, from submission to completion: for want of timestamps."""
        with self._lock:
            encoder = self._native.create_command_encoder()
            encode(encoder, heat)
            self._queue.submit([encoder.finish()])
            encoder = self._native.create_command_encoder()
            encode(encoder, queue)
            commands = encoder.finish()
            done = self.buffer(16)
            self.read(done, 16)  # waits for the heat
            start = time.perf_counter()
            self._queue.submit([commands])
            self.read(done, 16)  # waits for the queue
            return time.perf_counter() - start

    def _tick_seconds(self) -> float:
        from wgpu.backends.wgpu_native import lib  # the one number wgpu-py does not wrap

        return float(lib.wgpuQueueGetTimestampPeriod(self._queue._internal)) * 1e-9


def _key(step: Step) -> tuple[str, tuple[str, ...]]:
    return step.source, tuple(slot.access for slot in step.slots)


def _size(program: Program, name: str) -> int:
    contents = program.buffers[name]
    return contents if isinstance(contents, int) else contents.nbytes


def _entries(slots: Sequence[Slot], buffers: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "binding": i,
            "resource": {"buffer": buffers[slot.buffer], "offset": 0, "size": buffers[slot.buffer].size},
        }
        for i, slot in enumerate(slots)
    ]


def explain_wgsl_error(label: str, source: str, message: str) -> str:
    """The compiler's message with the numbered WGSL lines around the place it names."""
    lines = source.splitlines()
    place = re.search(r"wgsl:(\d+):(\d+)", message)
    if not place:
        return f"kernel {label} does not compile: {message}"
    line = int(place.group(1))
    around = range(max(1, line - 3), min(len(lines), line + 3) + 1)
    excerpt = "\n".join(f"{'>' if n == line else ' '}{n:5} | {lines[n - 1]}" for n in around)
    return f"kernel {label} does not compile, line {line}:\n{excerpt}\n{message}"


_by_number: dict[int, Device] = {}
_number_of: dict[str | int | None, int] = {}
_open_lock = threading.Lock()


def open_device(
    spec: str | int | None = None, *, without: Sequence[str] = (), limits: Mapping[str, int] | None = None
) -> Device:
    """Open an adapter by kind, number or part of its name (default: the best one found).

    `without` switches features off ("f16", "subgroups", "timestamps") and `limits` lowers limits, both by
    their names in `DeviceCaps`: that is how tests see a smaller device. Plain calls share one device per adapter.
    """
    if without or limits:
        return Device(choose(spec), without=without, limits=limits)
    with _open_lock:
        if spec not in _number_of:
            adapter = choose(spec)
            if adapter.number not in _by_number:
                _by_number[adapter.number] = Device(adapter)
            _number_of[spec] = adapter.number
        return _by_number[_number_of[spec]]
