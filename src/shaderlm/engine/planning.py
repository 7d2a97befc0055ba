"""Plans and tuning of a model on a device, from its header: no weight is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..compile.backend_timing import timings_by
from ..compile.lowering import Lowering
from ..compile.plan import Plan
from ..compile.steps import Head, body_plan, head_plan, step_plan
from ..compile.tuner import shapes_of, tune_shapes
from ..compile.tuning import Entry, Tuning, key_of, path_of, read, save
from ..errors import DeviceError, InputError
from ..formats.checkpoint import Checkpoint
from ..formats.find import find
from ..formats.opening import open_checkpoint
from ..gpu import (
    WEBGPU_DEFAULT,
    Adapter,
    Backend,
    Device,
    DeviceCaps,
    Implementation,
    backend_missing,
    backends,
    open_device,
)
from ..gpu.adapters import choose as choose_adapter
from ..graph.batch import CONTEXTS, PAGE, context_class
from ..graph.fuse import fuse
from ..graph.graph import Graph, Node
from ..models.architecture import Architecture
from ..models.checkpoint import architecture_of
from ..models.config import Config, StepSpec
from ..runtime.numpy_runner import FIRST_POSITIONS as CPU_POSITIONS
from ..runtime.packed_cpu.lowering import lower
from ..runtime.packed_cpu.sizes import weight_bytes
from ..runtime.pages import MAX_SEQUENCES, pages_for, table_stride
from ..runtime.runner import bucket, buckets
from ..runtime.sizes import Memory, cache_format, max_outputs, max_tokens, memory_of, pages_of
from ..runtime.states import FIRST_STATES
from .cpu import is_cpu
from .loading import Progress, check_context, check_precision, config_of_file

PREFILL_TOKENS = 128  # of a plan, unless others are asked for
LARGE_GPU = replace(
    WEBGPU_DEFAULT,
    name="a large GPU",
    kind="discrete",
    backend="Vulkan",
    f16=True,
    subgroups=True,
    timestamps=True,
    max_binding=(2 << 30) - 4,
    max_buffer=4 << 30,
    max_invocations=1024,
    max_workgroup_memory=48 << 10,
    max_storage_buffers=16,
)
# Devices that plans can be made for on any machine: there need not be one like it.
TARGETS: Mapping[str, DeviceCaps] = {"large-gpu": LARGE_GPU, "webgpu-default": WEBGPU_DEFAULT}


def read_header(
    model: str | os.PathLike[str] | None, progress: Progress | None = None, ignore_keys: Collection[str] = ()
) -> tuple[Architecture, Config]:
    """The architecture and sizes of a model file, from its header. `progress` is told of files that are fetched."""
    with open_checkpoint(find(model, progress)) as file:
        return described_by(file, ignore_keys)


def described_by(file: Checkpoint, ignore_keys: Collection[str] = ()) -> tuple[Architecture, Config]:
    """The architecture and sizes of an open checkpoint."""
    with file.named_in_errors():
        kind = architecture_of(file)
        return kind, config_of_file(kind, file, None, dense=False, ignore_keys=ignore_keys)


def open_adapter(device: str | int | Device | None, purpose: str, backend: Backend = "auto") -> Device:
    """An open device, which is not the CPU; `purpose` is what needs it."""
    if is_cpu(device):
        raise InputError(
            f"{purpose} needs a WebGPU adapter, real or in software; {device!r} has no dispatches. "
            "`shaderlm devices` lists adapters"
        )
    return device if isinstance(device, Device) else open_device(None if is_auto(device) else device, backend=backend)


def measure_backends(
    device: str | int | None, again: bool, say: Callable[[str], None] = lambda text: None
) -> backends.Choice | None:
    """Time both implementations of WebGPU on an adapter and keep it; which is taken from then on, and why.

    What was measured before is not measured again unless `again`. None where there is one implementation only.
    """
    if backend_missing("dawn") is not None:
        return None
    adapters: dict[Implementation, Adapter] = {}
    for name in backends.IMPLEMENTATIONS:
        with suppress(DeviceError):  # Dawn has no OpenGL
            adapters[name] = choose_adapter(device, name)
    if len({adapter.caps.name for adapter in adapters.values()}) != 1 or len(adapters) < len(backends.IMPLEMENTATIONS):
        return None
    caps = adapters["dawn"].caps
    if again or backends.read(caps) is None:
        say("implementations of WebGPU")
        timings = timings_by(adapters)
        if len(timings) < len(adapters):
            return None
        backends.save(caps, timings)
    return backends.choice(caps)


def is_auto(device: str | int | Device | None) -> bool:
    """Is the choice of a device left to us?"""
    return device is None or (isinstance(device, str) and device.strip().lower() == "auto")


def plans(
    kind: Architecture,
    config: Config,
    caps: DeviceCaps,
    *,
    tokens: int | None = None,
    depth: int = 0,
    fusions: Sequence[str] | None = None,
    precision: str = "fast",
    tuning: Tuning | None = None,
) -> list[Plan]:
    """The plans of a prefill of so many tokens and of a decode step, greedy, for a device.

    Before them, `depth` tokens are in the cache. A plan is made for the next power of two of tokens, and for a class of
    contexts.
    """
    largest = max_tokens(config, caps)
    if tokens is None:
        tokens = max(2, min(PREFILL_TOKENS, largest, config.context - depth))
    if not 2 <= tokens <= largest:
        raise InputError(f"a prefill takes 2 to {largest:,} tokens at once on {caps.name}, got {tokens:,}")
    if depth + tokens > config.context:
        raise InputError(
            f"{depth:,} tokens in the cache and {tokens:,} more do not fit the model's context of {config.context:,}"
        )
    lowering = Lowering(caps, precision, tuning)

    def plan_of(rows: int, keys: int, paged: bool) -> Plan:
        step = StepSpec(rows, context_class(keys, config.head_width), cache_format(caps), paged)
        return step_plan(lowering, kind, config, step, Head(1, rows, "greedy", paged), fusions)

    return [plan_of(bucket(tokens), depth + tokens, True), plan_of(1, depth + 1, False)]


def memory(kind: Architecture, config: Config, caps: DeviceCaps, context: int, *, precision: str = "fast") -> Memory:
    """What a model takes on a device with `context` tokens in its cache."""
    check_context(context, config.context)
    lowering, largest, cache = Lowering(caps, precision), max_tokens(config, caps), cache_format(caps)
    bodies, heads = [], []
    for tokens in (1, largest):
        step = StepSpec(tokens, context_class(context, config.head_width), cache, tokens > 1)
        head = Head(1, tokens, "greedy", tokens > 1)
        body = fuse(kind.build(config, step), None, lowering.unsupported_reason)
        bodies.append(body_plan(lowering, *body, step, config))
        fused_head = fuse(kind.head(config, 1, tokens), None, lowering.unsupported_reason)
        heads.append(head_plan(lowering, *fused_head, head, config))
    return memory_of(bodies, heads, config, caps, context)


def cache_bytes(kind: Architecture, config: Config, tokens: int, cache: str = "f16") -> int:
    """What keys and values of so many tokens take, in whole pages, and states, as every device allocates them."""
    tensors = kind.build(config, StepSpec(1, cache=cache)).tensors.values()
    states = sum(each.nbytes for each in tensors if each.role == "recurrent") * FIRST_STATES
    return sum(each.nbytes for each in tensors if each.role == "state") * PAGE * pages_of(tokens) + states


def cpu_memory(
    kind: Architecture, config: Config, context: int, *, packed: bool, precision: str = "fast"
) -> tuple[Memory, int]:
    """What a model takes on the CPU with `context` tokens in its cache, and how many bytes of packed weights are dense.

    `config` has the formats of the file. Without `packed` NumPy computes, with all weights in f32.
    """
    check_context(context, config.context)
    body, head = kind.build(config, StepSpec(1, paged=True)), kind.head(config, 1, 1)
    sizes = weight_bytes([lower(body, precision), lower(head, precision)])
    everything = {tensor.name: 4 * tensor.size for graph in (body, head) for tensor in graph.weights()}
    positions = min(config.context, max(CPU_POSITIONS, 2 * context))
    scratch = 4 * MAX_SEQUENCES * (1 + table_stride(pages_for(config.context), config.recurrent))
    scratch += positions * sum(4 * rope.rotary for rope in config.ropes.values())
    weights = sizes.total if packed else sum(everything.values())
    return Memory(weights, cache_bytes(kind, config, context, "f32"), scratch), sizes.dense if packed else 0


def step_graph(
    kind: Architecture,
    config: Config,
    caps: DeviceCaps,
    rows: int,
    unsupported_reason: Callable[[Node], str | None],
) -> Graph:
    """The fused graph of a step of so many rows, as models run it on a device; without the head."""
    step = StepSpec(rows, CONTEXTS[0], cache_format(caps), rows > 1)
    return fuse(kind.build(config, step), None, unsupported_reason)[0]


def tunable_nodes(kind: Architecture, config: Config, caps: DeviceCaps, precision: str) -> list[Node]:
    """One matmul of each shape that `tune` times: of layers for every bucket, of heads for every bucket of outputs."""
    unsupported_reason = Lowering(caps, precision).unsupported_reason
    graphs = [step_graph(kind, config, caps, rows, unsupported_reason) for rows in buckets(max_tokens(config, caps))]
    heads = [kind.head(config, rows, rows) for rows in buckets(max_outputs(config, caps))]
    graphs += [fuse(graph, None, unsupported_reason)[0] for graph in heads]
    return shapes_of(graphs, caps, precision)


def tune(
    kind: Architecture,
    config: Config,
    *,
    device: str | int | Device | None = None,
    backend: Backend = "auto",
    precision: str = "fast",
    again: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[str, Entry | None, Path | None]]:
    """Time the candidates of each matmul: of one row, and of every bucket where a route has several configurations.

    Thoroughly. Yields shapes in words, what was found, and where it is.
    Entries are kept as they are found. Those that were timed before are not timed again unless `again`. `say` is told
    what is next.
    """
    check_precision(precision)
    target = open_adapter(device, "tuning", backend)
    caps = target.caps
    path = path_of(caps)  # before anything is timed: there may be no place for caches
    if not caps.policy.tune and is_auto(device):
        raise DeviceError(
            "no GPU was found, and tuning a software adapter gains nothing; --device software does it nevertheless"
        )
    tuned = Tuning() if again else read(caps)
    untuned = []
    for node in tunable_nodes(kind, config, caps, precision):
        entry = tuned.entry(node.op, node.dims, precision)
        if entry is not None and entry.thorough:
            yield key_of(node.op, node.dims), entry, path
        else:
            untuned.append(node)

    def announced() -> Iterator[Node]:
        for i, node in enumerate(untuned, 1):
            say(f"{i} of {len(untuned)}: {key_of(node.op, node.dims)}")
            yield node

    for node, entry in tune_shapes(target, announced(), precision):
        key = key_of(node.op, node.dims)
        yield key, entry, save(caps, {(precision, key): entry}) if entry is not None else None
