"""What is decided from the kind of a device, by name, in this one place. Everything else asks for the decision.

A GPU computes beside the host and pays for memory and launches. A software adapter computes on the host's own cores:
it pays for compiling, for barriers and for every thread that takes a core away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DevicePolicy:
    """Decisions that follow from a device's capabilities."""

    specialise_constants: bool  # compile a kernel for one shape: faster to run, one more kernel to compile
    check_bounds: bool  # keep the compiler's checks of array bounds: software adapters are where kernels are tested
    record_ahead: bool  # other threads record the next command buffers
    prefer_few_barriers: bool  # routes with few barriers and few threads go first
    half_cache: (
        bool  # keys and values are kept in f16: half the bytes to read. Needs no feature; a CPU pays to unpack it
    )
    round_inputs: bool  # precision "fast" rounds inputs to fewer bits: it must save time to be worth it
    large_workgroups: bool  # more than 512 threads for a large kernel: Metal may have fewer for it than its limit says
    tune: bool  # timing the candidates of a route finds a faster one
    steps_ahead: int  # steps submitted before the first of them is waited for
    steps_ahead_alone: int  # where one sequence decodes alone: its steps are short, and nobody waits for a place in one
    max_prefill_tokens: int  # rows of a prompt in one step: enough to fill the device, few enough to be interrupted
    warm_up_seconds: float  # clocks are low after idling: run something for so long before anything is timed
    short_measurements: bool  # measure with little work and few samples
    own_memory: bool  # its memory is not the system's: what that has free says nothing
    cache_share: float  # of the memory that is free, which the KV cache may take where nobody says how much


ON_GPU = DevicePolicy(
    specialise_constants=True,
    check_bounds=False,
    record_ahead=True,
    prefer_few_barriers=False,
    half_cache=True,
    round_inputs=True,
    large_workgroups=False,
    tune=True,
    steps_ahead=2,
    steps_ahead_alone=2,
    max_prefill_tokens=512,
    warm_up_seconds=1.0,
    short_measurements=False,
    own_memory=True,
    cache_share=0.8,
)
IN_SOFTWARE = DevicePolicy(
    specialise_constants=False,
    check_bounds=True,
    record_ahead=False,
    prefer_few_barriers=True,
    half_cache=False,
    round_inputs=False,
    large_workgroups=False,
    tune=False,
    steps_ahead=1,
    steps_ahead_alone=1,
    max_prefill_tokens=128,
    warm_up_seconds=0.0,
    short_measurements=True,
    own_memory=False,
    cache_share=0.5,
)


# Dawn translates a command buffer when it is submitted, and nobody records meanwhile: recording ahead gains nothing,
# and threads that take turns lose time. H200, steps of 120 dispatches: 440 µs by one thread, 530 µs with others. A host
# that hesitates then leaves the GPU idle: SmolLM2-135M took 840 to 870 µs a token with two steps ahead, 680 to 695 with
# three, and 677 through wgpu.
ON_GPU_BY_DAWN = replace(ON_GPU, record_ahead=False, steps_ahead_alone=3)


def policy_of(kind: str, implementation: str, backend: str) -> DevicePolicy:
    """The policy of a device of this kind (`KINDS` in caps.py) by an implementation of WebGPU over a graphics API."""
    if kind == "software":
        return IN_SOFTWARE
    policy = ON_GPU_BY_DAWN if implementation == "dawn" else ON_GPU
    # Memory that the device does not share is there for such programs; of the system's, half is left to others.
    own = kind == "discrete"
    share = policy.cache_share if own else IN_SOFTWARE.cache_share
    return replace(policy, large_workgroups=backend == "Vulkan", own_memory=own, cache_share=share)
