"""Which runs of kernels are tested: every route, on every case, planned for every kind of device; and which by default.

All of them take a software adapter many minutes: nearly all of it for compiling shaders. So the default is a cover.
A shader is a kernel with files that it is concatenated with and with values of its constants. The runs of a cover have,
of every kernel, every such file and every kind of such values somewhere, but not all of their combinations: a format's
functions do not depend on what is done with the sums, and kernels that call the same ones share them. A kernel that
several ops have is covered once, by runs of any of them. On Dawn what differs is the compiler. There every route and
every file is covered once. Chromium has the same compiler: it gets a run of every route.

| stack | by default | with --full | with --all |
|---|---|---|---|
| wgpu | a run of every route | the cover, and other runs whose shaders it compiles anyway | all runs, case by case |
| Dawn | – | the smaller cover | all runs |
| Chromium | – | a run of every route | all runs |
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from shaderlm.compile import lower
from shaderlm.errors import RouteError
from shaderlm.gpu import WEBGPU_DEFAULT, DeviceCaps, Program
from shaderlm.kernels import LaunchList, Route, choose, routes_of
from shaderlm.kernels.route import shader_of
from shaderlm.kernels.wgsl import Constant, Kernel, read

from .cases import CASES, Case
from .operands import Arrays


class WithCaps(Protocol):
    """A device of `gpu/`, or one in a browser."""

    caps: DeviceCaps

    def __hash__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Run:
    """A route on a case, with the launch list that is taken for some capabilities of a device."""

    case: Case
    route: Route
    plan: str
    device: Any
    caps: DeviceCaps
    launch_list: LaunchList
    taken: bool  # a device with these capabilities chooses this route for this case

    @property
    def label(self) -> str:
        return f"{self.case.name}: {self.route.name} ({self.plan})"

    def program(self, operands: Arrays) -> Program:
        return lower(self.route, self.case.dims, self.caps, operands, launch_list=self.launch_list)

    def shaders(self) -> frozenset[tuple[bool, str]]:
        """What is compiled, on the device with subgroups or on the one without."""
        dispatches = self.launch_list.dispatches
        return frozenset((self.caps.subgroups, shader_of(each, self.caps.implementation).source) for each in dispatches)

    def parts(self, thin: bool) -> frozenset[Hashable]:
        """What the shaders are made of, each part with the kernel that it is a part of. `thin`: routes and files."""
        found: set[Hashable] = {(self.case.op, self.route.name)}
        for each in self.launch_list.dispatches:
            kernel = each.kernel.path
            formats = [name for name in each.kernel.include if name.startswith("shared/format_")]
            found |= {(name, each.constants.get("SUPERBLOCKS")) for name in formats}  # q4_1 and q4_k share a file
            if thin:
                found |= {kernel, *(_file(name) for name in each.kernel.include)}
            else:
                found |= {_use(each.kernel, name) for name in each.kernel.include}
                used = frozenset(_use(each.kernel, name) for name in formats)
                for name, value in each.constants.items():  # those of a format go with its functions
                    found.add((used if name in _OF_FORMATS else kernel, name, _kind(kernel, name, value)))
                found |= {(kernel, each.specialised, name) for name in ("", *each.unbound)}
                found.add((kernel, self.caps.subgroups))
        return frozenset(found)


_OF_FORMATS = ("BF16", "MXFP4", "OFFSET", "SUPERBLOCKS")


def _file(name: str) -> str:
    """How blocks are staged in tiles of 16 bits counts once: tiles take long to compile, and formats differ little."""
    return "staged" if name.startswith("shared/staged_") else name


@cache
def _use(kernel: Kernel, name: str) -> Hashable:
    """A file that a kernel includes. Of a format it counts once which of its functions are called, by any kernel."""
    if name.startswith("shared/int16_") and name != "shared/int16_round":
        return name
    if not name.startswith("shared/format_"):
        return kernel.path, name
    others = "\n".join(read(path) for path in (kernel.path, *kernel.include) if path != name)
    exported = re.findall(r"^fn (\w+)", read(name), re.M)
    return name, frozenset(function for function in exported if re.search(rf"\b{function}\(", others))


def _kind(kernel: str, name: str, value: Constant) -> Hashable:
    """A constant's value, or what kind of size it is: every model has others, and they are bounds of loops."""
    if name in ("MOST", "SOFTCAP", "WINDOW"):  # numbers in a formula, if they are there at all
        return True
    if not isinstance(value, int):
        return value
    if kernel.startswith("attention/") and name == "QUADS":  # of a head; lanes take them in steps of 16 or 32
        return value == 1, value % 2 if value <= 32 else None
    if kernel.startswith("attention/") and name == "GROUP":  # heads of queries, which are computed in fours
        return value == 1, value % 4 == 0, value > 4
    if kernel.startswith("attention/") and name == "WG":
        return value > 64
    if name in ("EXPERTS", "SLOTS", "STAGE", "LANES_PER_ROW"):
        return value == 1, value & (value - 1) == 0, value % 2, value > 32
    return value


def _plans(device: WithCaps, plain_device: WithCaps) -> dict[str, tuple[WithCaps, DeviceCaps]]:
    """Ways to plan for this adapter: as if it were a GPU, as it is but for the size of subgroups, and as the least."""
    least = {
        name: min(getattr(plain_device.caps, name), getattr(WEBGPU_DEFAULT, name))
        for name in ("max_binding", "max_buffer", "max_workgroups", "max_invocations", "max_workgroup_memory")
    }
    return {
        "as a GPU": (device, replace(device.caps, kind="discrete", subgroup_size=device.caps.subgroup_max)),
        "as it is": (device, replace(device.caps, subgroup_size=0)),
        # Of few processors, which larger tiles fill.
        "as the least GPU": (plain_device, replace(plain_device.caps, kind="discrete", processors=1, **least)),
        "without dot4": (device, replace(device.caps, kind="integrated", dot4=False, processors=4)),
    }


def _by_default(case: Case, caps: DeviceCaps) -> set[str]:
    """The routes that a device with these caps takes for this shape, in either precision."""
    found = set()
    for precision in ("exact", "fast"):
        with suppress(RouteError):
            found.add(choose(case.op, case.dims, caps, None, precision).name)
    return found


def unspecialised(route: Route, dims: dict[str, Any], caps: DeviceCaps) -> LaunchList:
    """With parameters and operands bound as software adapters have them: one kernel for all shapes."""
    found = route.launch_list(dims, caps)
    in_software = route.launch_list(dims, replace(caps, kind="software")).dispatches
    unbinds = any(each.unbound for each in in_software)
    shared = (replace(each, specialised=False, unbound=each.unbound if unbinds else ()) for each in found.dispatches)
    return replace(found, dispatches=tuple(shared))


_TAKEN_FLOPS = 2_000_000


@cache
def _small(op: str) -> Case | None:
    """A case of several workgroups that is quick: the ops with routes that are specialised have one."""

    def quick(case: Case) -> bool:
        d = case.dims
        return d.get("tokens") == 1 and d.get("N", 0) >= 64 and case.flops < 1e6

    return next((case for case in CASES if case.op == op and quick(case)), None)


def all_runs(
    case: Case, device: WithCaps, plain_device: WithCaps, everything: bool = False, route_name: str | None = None
) -> Iterator[Run]:
    """Every route that applies, or one of them, once per plan that makes a difference.

    Compiling takes a software adapter a second, so that `everything` is for --all. Otherwise kernels are specialised
    only where a GPU would take the route, and by all routes and plans for one case of each op; and the least GPU gets
    two formats and groups of one block: what it lacks matters to the kernels, not to the functions of a format. It and
    the one without dot4 get those shapes with one row that are below 1 MFLOP, which take several workgroups, stages
    and splits already. Shapes from 2 MFLOP on are there for the routes that some device takes for them: those alone
    run them.
    """
    everything = everything or case == _small(case.op)
    plans = _plans(device, plain_device)
    dims = case.dims
    large = dims.get("tokens") == 1 and case.flops > 1e6
    formats = {dims.get(name, "f32") for name in ("format", "cache")}
    if not everything and (large or not formats <= {"f32", "q4_0"} or dims.get("group_size", 32) > 32):
        del plans["as the least GPU"]
    if not everything and large:
        del plans["without dot4"]
    for route in routes_of(case.op):
        if route_name not in (None, route.name):
            continue
        seen: list[LaunchList] = []
        for plan, (chosen, caps) in plans.items():
            if route.reason(dims, caps) is None:
                launch_list = route.launch_list(dims, caps)
                plain = launch_list if everything else unspecialised(route, dims, caps)
                if plain not in seen:
                    seen.append(plain)
                    taken = plan != "as the least GPU" and route.name in _by_default(case, caps)
                    if not everything and not taken and case.flops > _TAKEN_FLOPS:
                        continue
                    yield Run(case, route, plan, chosen, caps, launch_list if taken else plain, taken)


def _size(run: Run) -> tuple[int, int]:
    return run.case.flops, sum(run.launch_list.buffers.values())


def _cover(runs: list[Run], thin: bool) -> list[Run]:
    """Few runs that have the parts of all: always the one with most that are new. Later ones may make it needless."""
    parts = {run: run.parts(thin) for run in runs}
    left, missing, cover = sorted(runs, key=_size), set().union(*parts.values()), list[Run]()
    while missing:
        cover.append(max(left, key=lambda run: len(parts[run] & missing) / len(run.launch_list.dispatches)))
        missing -= parts[cover[-1]]
    for run in cover[::-1]:
        if parts[run] <= set().union(*(parts[other] for other in cover if other is not run)):
            cover.remove(run)
    return cover


@cache
def _default_runs(device: WithCaps, plain_device: WithCaps, wide: bool) -> list[Run]:
    """Of all ops, because some have the same kernels."""
    found = [run for case in CASES if not case.long for run in all_runs(case, device, plain_device)]
    cover = _cover(found, thin=not wide)
    if not wide:
        return cover
    compiled = {shader for run in cover for shader in run.shaders()}
    return [run for run in found if run.shaders() <= compiled]


def default_runs(op: str, route: str, device: WithCaps, plain_device: WithCaps, *, wide: bool = False) -> list[Run]:
    """What is run of a route by default: the smaller cover, or `wide`, the larger one and all runs of its shaders."""
    runs = _default_runs(device, plain_device, wide)
    return [run for run in runs if (run.case.op, run.route.name) == (op, route)]


_SMALL_FLOPS = 400_000


def small_run(op: str, route: str, device: WithCaps, plain_device: WithCaps, among: Sequence[Run] = ()) -> list[Run]:
    """One run of a route, if there is one: of the shaders with the shortest texts, the largest case that is quick."""
    cases = [] if among else [case for case in CASES if case.op == op and not case.long]
    runs = [*among, *(run for case in cases for run in all_runs(case, device, plain_device, route_name=route))]
    quick = [run for run in runs if run.case.flops <= _SMALL_FLOPS] or runs

    def length(run: Run) -> int:
        return sum(len(source) for _, source in run.shaders())

    return sorted(quick, key=lambda run: (length(run), -run.case.flops, -sum(run.launch_list.buffers.values())))[:1]


def every_run(op: str, route: str, device: WithCaps, plain_device: WithCaps) -> list[Run]:
    """All runs of a route."""
    return [run for case in CASES if case.op == op for run in all_runs(case, device, plain_device, True, route)]
