"""A profile in words and tables, and two of them side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..compile.roofline import Roofline
from ..errors import InputError
from .files import Profile
from .measure import Phase, Timed

if TYPE_CHECKING:
    from rich.table import Table


WALLS_DIFFER = 0.1  # from here on, wall times of two runs deserve a remark


@dataclass(frozen=True)
class Group:
    """Dispatches that have something in common, added up over one step."""

    name: str
    calls: int
    us: float
    bytes: int
    flops: int
    floor_us: float  # by the device's two roofs

    @property
    def roof(self) -> float:
        """Percent of what the device could do at best."""
        return 100 * self.floor_us / self.us if self.us else 0.0


def grouped(dispatches: Sequence[Timed], roofline: Roofline, key: str) -> list[Group]:
    """By the attribute `key`, in the order in which each group first comes."""
    members: dict[str, list[Timed]] = {}
    for timed in dispatches:
        members.setdefault(getattr(timed, key), []).append(timed)
    return [
        Group(
            name,
            len(group),
            sum(timed.us for timed in group),
            sum(timed.bytes for timed in group),
            sum(timed.flops for timed in group),
            sum(roofline.floor_us(timed.bytes, timed.flops, timed.matrix_units) for timed in group),
        )
        for name, group in members.items()
    ]


def head(profile: Profile) -> list[str]:
    """What was measured, and the device's roofs."""
    roofs = profile.roofline
    return [
        f"{profile.model} on {profile.device} ({profile.backend}), shaderlm {profile.package}, {profile.date}",
        f"this device at best: {roofs}, {duration(roofs.dispatch_us)} per dependent dispatch (all measured)",
        *(f"note: {note}" for note in profile.notes),
    ]


def summary(phase: Phase, roofline: Roofline) -> list[str]:
    """One step of a phase in a few lines."""
    rows, steps = counted(phase.rows, "token"), counted(phase.steps, "step")
    lines = [
        f"{phase.name}: {rows} per step, {phase.depth:,} in the cache before, {steps}",
        f"  wall    {duration(phase.wall_us)} per step, {phase.rows * 1e6 / phase.wall_us:,.1f} tokens/s",
    ]
    if phase.gpu_us is not None and phase.gap_us is not None and phase.traced_wall_us:
        # With idle time beside it, not even by rounding all of it.
        busy = min(100 * phase.gpu_us / phase.traced_wall_us, 99.9 if phase.gap_us else 100.0)
        lines.append(
            f"  GPU     {duration(phase.gpu_us)} busy + {duration(phase.gap_us)} idle; busy for {busy:.1f} % of the "
            f"{duration(phase.traced_wall_us)} per step of that run"
        )
        if abs(phase.traced_wall_us / phase.wall_us - 1) > WALLS_DIFFER:
            lines.append("          its wall time differs: the machine had other work to do, or its clocks changed")
    if phase.host_us:
        each = phase.host_us_per_dispatch
        outside = f"; without waiting {duration(each)} per dispatch" if each is not None else ""
        lines.append(f"  host    {_parts(phase.host_us)}{outside}")
    if phase.ahead_us:
        lines.append(
            f"  ahead   recorded ahead by other threads: {_parts(phase.ahead_us)}, "
            f"together {duration(sum(phase.ahead_us.values()))} per step"
        )
    if phase.dispatches:
        count = len(phase.dispatches)
        launches = counted(count, "dispatch", "dispatches")
        total = count * roofline.dispatch_us
        lines.append(
            f"  launch  {launches} × {duration(roofline.dispatch_us)} = {duration(total)}, "
            "which only fewer dispatches would save"
        )
    if phase.timestamped_us is not None and phase.gpu_us:
        lines.append(
            f"  traced  with a timestamp after each dispatch {duration(phase.timestamped_us)}; "
            f"{duration(roofline.timestamp_us)} are taken off each, and the rest is scaled by {phase.scale:.2f} to the "
            "GPU time above"
        )
    if not phase.dispatches:
        lines.append("  interrupted before single dispatches were timed")
    return lines


def counted(number: int, name: str, plural: str | None = None) -> str:
    """1 step, 1,024 tokens."""
    return f"{number:,} {name if number == 1 else plural or f'{name}s'}"


def _parts(times: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {duration(us)}" for name, us in times.items())


def tables(phase: Phase, roofline: Roofline) -> Iterator[Table]:
    """By kernel, by op and by layer."""
    if phase.dispatches:
        for key in ("kernel", "op", "layer"):
            yield _table(phase, roofline, key)


def _table(phase: Phase, roofline: Roofline, key: str) -> Table:
    from rich.text import Text

    groups = grouped(phase.dispatches, roofline, key)
    if key != "layer":  # layers stay in their order
        groups.sort(key=lambda group: -group.us)
    total = sum(group.us for group in groups)
    whole, each = unit_of(max(group.us for group in groups)), unit_of(max(group.us / group.calls for group in groups))
    times = (whole.name, "share", f"{each.name} each")
    fastest = max(group.flops / group.us if group.us else 0.0 for group in groups)  # per µs
    unit, flops_per_us, digits = ("TFLOP/s", 1e6, 2) if fastest >= 1e6 else ("GFLOP/s", 1e3, 1)
    table = new_table(f"{phase.name} by {key}", key, "calls", *times, "GB/s", unit, "% of roof")
    for group in groups:
        table.add_row(
            Text(group.name),  # names come from files: no markup
            str(group.calls),
            f"{group.us / whole.us:,.1f}",
            f"{100 * group.us / total:.1f} %" if total else "–",
            f"{group.us / group.calls / each.us:,.1f}",
            f"{group.bytes / group.us / 1e3:,.1f}" if group.bytes and group.us else "–",
            f"{group.flops / group.us / flops_per_us:,.{digits}f}" if group.flops and group.us else "–",
            f"{group.roof:.1f}",
        )
    return table


def new_table(title: str, first: str, *numbers: str) -> Table:
    """Left-aligned names, right-aligned numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


class Unit(NamedTuple):
    """A unit of time, in microseconds."""

    name: str
    us: float


UNITS = (Unit("s", 1e6), Unit("ms", 1e3), Unit("µs", 1.0))


def unit_of(us: float) -> Unit:
    """The unit in which a time is short."""
    return next((unit for unit in UNITS if us >= unit.us), UNITS[-1])


def duration(us: float) -> str:
    """1.194 ms, 951.3 µs: four digits."""
    unit = unit_of(us)
    value = us / unit.us
    return f"{value:,.{3 if value < 10 else 2 if value < 100 else 1}f} {unit.name}"


# comparing -----------------------------------------------------------------------------------------------


def comparison(before: Profile, after: Profile) -> Iterator[Table | str]:
    """Op by op, for the phases that both have: time, change, share."""
    for what in ("model", "device", "driver", "clock"):
        one, other = getattr(before, what), getattr(after, what)
        if one != other:
            yield f"note: {what} differs: {one} before, {other} after"
    shared = [(b, a) for b in before.phases for a in after.phases if b.name == a.name and b.dispatches and a.dispatches]
    if not shared:
        raise InputError("the two profiles have no phase in common whose dispatches were timed")
    for old, new in shared:
        if (old.rows, old.depth) != (new.rows, new.depth):
            yield (
                f"note: {old.name} differs: {old.rows} rows at depth {old.depth} before, "
                f"{new.rows} rows at depth {new.depth} after"
            )
        yield _compared(before, after, old, new)


def _compared(before: Profile, after: Profile, old: Phase, new: Phase) -> Table:
    from rich.text import Text

    olds = {g.name: g for g in grouped(old.dispatches, before.roofline, "op")}
    news = {g.name: g for g in grouped(new.dispatches, after.roofline, "op")}
    sums = sum(g.us for g in olds.values()), sum(g.us for g in news.values())
    calls = ("calls", "calls after")
    unit = unit_of(max(old.wall_us, new.wall_us))
    title = f"{old.name}, {unit.name} per step"
    table = new_table(title, "op", *calls, "before", "after", "change", "share", "share after")
    names = sorted({*olds, *news}, key=lambda name: -max(g.us for g in (olds.get(name), news.get(name)) if g))
    for name in names:
        pair = (olds.get(name), news.get(name))
        table.add_row(
            Text(name),
            *(str(g.calls) if g else "–" for g in pair),
            *(f"{g.us / unit.us:,.1f}" if g else "–" for g in pair),
            change(*(g.us if g else None for g in pair)),
            *(f"{100 * g.us / total:.1f} %" if g and total else "–" for g, total in zip(pair, sums, strict=True)),
        )
    table.add_section()
    counts = (str(len(old.dispatches)), str(len(new.dispatches)))
    table.add_row("all dispatches", *counts, *(f"{total / unit.us:,.1f}" for total in sums), change(*sums), "", "")
    for name, key in (("GPU busy", "gpu_us"), ("GPU idle", "gap_us"), ("wall", "wall_us")):
        one, other = getattr(old, key), getattr(new, key)
        values = (f"{value / unit.us:,.1f}" if value is not None else "–" for value in (one, other))
        table.add_row(name, "", "", *values, change(one, other), "", "")
    hosts = old.host_us_per_dispatch, new.host_us_per_dispatch
    values = (duration(value) if value is not None else "–" for value in hosts)
    table.add_row("host per dispatch", "", "", *values, change(*hosts), "", "")
    return table


def change(before: float | None, after: float | None) -> str:
    """In percent; "new" and "gone" where one of them is not there."""
    if before is not None and after is not None:
        return f"{100 * (after / before - 1):+.1f} %" if before else "–"
    return "gone" if before is not None else "new" if after is not None else "–"
