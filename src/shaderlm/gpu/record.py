"""Records dispatches into a compute pass: through wgpu's native functions with kept handles, or its classes.

Recording costs 2 µs a dispatch the first way, 6 to 8 the second; a token takes hundreds. The classes are the tested
fallback for a wgpu whose native functions have other names. What is recorded and finished may wait to be submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .mailbox import Mailbox
from .program import Program

Bound = tuple[Any, Any, tuple[int, int, int]]  # pipeline, bind group, grid
Recorder = Callable[[Any], None]  # into an open compute pass


def through_classes(steps: Sequence[Bound]) -> Recorder:
    """Public functions of wgpu."""

    def record(compute_pass: Any) -> None:
        for pipeline, group, grid in steps:
            compute_pass.set_pipeline(pipeline)
            compute_pass.set_bind_group(0, group)
            compute_pass.dispatch_workgroups(*grid)

    return record


def through_handles(steps: Sequence[Bound]) -> Recorder | None:
    """Native functions with the handles looked up once; None where this wgpu does not have them."""
    try:
        from wgpu.backends.wgpu_native import ffi, lib

        set_pipeline = lib.wgpuComputePassEncoderSetPipeline
        set_group = lib.wgpuComputePassEncoderSetBindGroup
        dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
        handles = [(pipeline._internal, group._internal, *grid) for pipeline, group, grid in steps]
        nothing = ffi.NULL
    except (ImportError, AttributeError):
        return None

    def record(compute_pass: Any) -> None:
        encoder, last = compute_pass._internal, None
        for pipeline, group, x, y, z in handles:
            if pipeline is not last:
                set_pipeline(encoder, pipeline)
                last = pipeline
            set_group(encoder, 0, group, 0, nothing)
            dispatch(encoder, x, y, z)

    return record


def recorder(steps: Sequence[Bound]) -> Recorder:
    """The faster way that this wgpu offers."""
    return through_handles(steps) or through_classes(steps)


@dataclass(frozen=True)
class Loaded:
    """A program on the device: its buffers, and per step its pipeline and bind group."""

    program: Program
    buffers: Mapping[str, Any]
    steps: tuple[Bound, ...]
    encode: Recorder  # records every step into an open compute pass

    @cached_property
    def single(self) -> tuple[Recorder, ...]:
        """Records one step each."""
        return tuple(recorder([step]) for step in self.steps)


def release(loaded: Loaded) -> None:
    """Give a loaded program's memory back now rather than when Python gets to it."""
    for native in loaded.buffers.values():
        native.destroy()


def encode(encoder: Any, queue: Sequence[Loaded]) -> None:
    """Programs one after the other, in one compute pass."""
    compute_pass = encoder.begin_compute_pass()
    for loaded in queue:
        loaded.encode(compute_pass)
    compute_pass.end()


@dataclass(slots=True)
class Prepared:
    """A finished command buffer, good for one submission."""

    commands: Any
    staging: Any = None  # what its last copy goes into, for the letter
    watched: Any = None  # what a watch wants to know of it once it is submitted


AT_ONCE = nullcontext()


def prepared(
    native: Any, mailbox: Mailbox, queue: Sequence[Loaded], post: Any, turn: AbstractContextManager[Any] = AT_ONCE
) -> Prepared:
    """Programs recorded and finished, on any thread; recorded while it is its turn. `post` is copied for a letter."""
    with turn:
        encoder = native.create_command_encoder()
        encode(encoder, queue)
        staging = mailbox.stage(encoder, post) if post is not None else None
    return Prepared(encoder.finish(), staging)
