"""How the lanes of a subgroup are numbered on this device, found out by running it.

Kernels share work among lanes by `local_invocation_index`, and expect that lanes of a subgroup are neighbours there, in
order. WGSL does not promise it. What a driver reports of subgroup sizes may say nothing (0, or 4 to 128). So a device
that claims subgroups is asked once: a kernel writes down which lane of its subgroup each thread is, and how large that
is, for several sizes of workgroups.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from . import probe_cache
from .program import Program, RunsPrograms, Slot, Step

if TYPE_CHECKING:
    from .caps import DeviceCaps, Implementation

_PROBE, FORMAT = "lanes", 1  # in the cache of probes
_ONE_SIZE = ("nvidia", "apple")  # vendors of GPUs whose subgroups always have the same size
_SIZES = (32, 64, 128, 256)  # threads of a workgroup: drivers may choose subgroups by it
_SOURCE = """
@group(0) @binding(0) var<storage, read_write> lanes: array<vec2<u32>>;
@compute @workgroup_size({threads})
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_invocation_id) lane: u32,
    @builtin(subgroup_size) size: u32,
) {{
    lanes[thread] = vec2<u32>(lane, size);
}}
"""


@dataclass(frozen=True)
class Lanes:
    """How the subgroups of a device are."""

    smallest: int
    largest: int
    consecutive: bool  # thread i of a workgroup is lane i % size of its subgroup


# By adapter: two devices on one adapter number their lanes alike.
_known: dict[tuple[str, int], Lanes] = {}


def with_probed_lanes(device: RunsPrograms, adapter: tuple[str, int]) -> DeviceCaps:
    """A device's capabilities with what is true of its subgroups; `subgroups` only if kernels may rely on them."""
    caps = device.caps
    if not caps.subgroups:
        return caps
    if adapter not in _known:
        _known[adapter] = _cached(caps) or _probed(device)
    lanes = _known[adapter]
    return replace(
        caps,
        subgroups=lanes.consecutive,
        subgroup_min=lanes.smallest,
        subgroup_max=lanes.largest,
        subgroup_reported=caps.subgroup_min,
        subgroup_size=_only_size(caps, lanes),
    )


def _cached(caps: DeviceCaps) -> Lanes | None:
    """As they were probed with this driver."""
    fields = probe_cache.read(caps, _PROBE, FORMAT)
    valid = isinstance(fields, list) and [type(each) for each in fields] == [int, int, bool]
    return Lanes(*fields) if valid and not caps.software else None


def _probed(device: RunsPrograms) -> Lanes:
    lanes = probe(device)
    if not device.caps.software:  # whose versions do not say what changed
        with suppress(OSError, ModelError):  # the next start probes again
            probe_cache.write(device.caps, _PROBE, FORMAT, [lanes.smallest, lanes.largest, lanes.consecutive])
    return lanes


def _only_size(reported: DeviceCaps, lanes: Lanes) -> int:
    """Lanes of every subgroup; 0 where other kernels than those of the probe may get other sizes."""
    known = reported.same_subgroup_size == lanes.smallest or reported.vendor in _ONE_SIZE
    return lanes.smallest if known and lanes.smallest == lanes.largest else 0


def probe(device: RunsPrograms) -> Lanes:
    """Run the kernel for every size of workgroups that the device allows."""
    sources = probe_sources(device.caps.implementation)
    fitting = {f"lanes of {n}": (n, text) for n, text in sources.items() if n <= device.caps.max_invocations}
    steps = tuple(Step("lanes", text, (Slot(name, "storage"),), (1, 1, 1)) for name, (_, text) in fitting.items())
    buffers = {name: 8 * threads for name, (threads, _) in fitting.items()}
    outputs = device.run(Program(buffers, steps, tuple(buffers)))
    return judge([raw.view(np.uint32).reshape(-1, 2) for raw in outputs.values()])


def probe_sources(implementation: Implementation) -> dict[int, str]:
    """The kernel by its threads. Its one buffer has (lane, size) for each thread afterwards."""
    enable = "" if implementation == "wgpu" else "enable subgroups;"
    return {threads: enable + _SOURCE.format(threads=threads) for threads in _SIZES}


def judge(tables: list[NDArray[np.uint32]]) -> Lanes:
    """What tables of (lane, size) per thread say."""
    sizes = np.concatenate([table[:, 1] for table in tables])
    consecutive = all(
        (table[:, 1] == table[0, 1]).all() and (table[:, 0] == np.arange(len(table)) % max(1, table[0, 1])).all()
        for table in tables
    )
    return Lanes(int(sizes.min()), int(sizes.max()), bool(consecutive))
