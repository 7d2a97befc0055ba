"""A plan in words: one line per dispatch, equal layers once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ..graph.ops import label
from .plan import Launch, Plan
from .tuning import Entry, Tuning, key_of

_COLUMNS = ("op", "route", "kernel", "workgroups", "reads and writes")


def describe(plan: Plan) -> str:
    """The dispatches of a plan as a table, what was fused into what, and what was not and why."""
    layers = [(name, list(group)) for name, group in groupby(plan.launches, key=lambda launch: launch.layer)]
    rows: list[tuple[str, ...]] = []
    titles: dict[int, str] = {}
    for _, group in groupby(layers, key=lambda layer: _signature(*layer)):
        alike = list(group)
        name, launches = alike[0]
        names = f"{name} … {alike[-1][0]} ({len(alike)} layers alike)" if len(alike) > 1 else name
        titles[len(rows)] = f"{names}: {len(launches)} dispatch{'es' if len(launches) > 1 else ''}"
        rows += [_row(launch) for launch in launches]
    scratch = sum(spec.nbytes for spec in plan.of_role("scratch").values())
    head = f"{plan.name}: {plan.tokens} token{'s' if plan.tokens > 1 else ''}, "
    text = [head + f"{len(plan.launches)} dispatches, scratch {scratch / 1e6:.1f} MB"]
    widths = [max(len(row[c]) for row in (_COLUMNS, *rows)) for c in range(len(_COLUMNS) - 1)]
    text.append("  " + _line(_COLUMNS, widths))
    for at, row in enumerate(rows):
        if at in titles:
            text.append(titles[at])
        text.append("  " + _line(row, widths))
    for rejection, count in _counted(plan):
        times = f" (and {count - 1} more like it)" if count > 1 else ""
        text.append(f"not fused, {rejection}{times}")
    return "\n".join(text)


def _row(launch: Launch) -> tuple[str, ...]:
    x, y, _ = launch.step.grid
    grid = str(x) if y == 1 else f"{x} × {y}"
    names = [name.removeprefix(f"{launch.layer}.") for name in dict.fromkeys(launch.buffers)]
    return label(launch.op, launch.dims), launch.candidate, launch.step.label, grid, ", ".join(names)


def _signature(layer: str, launches: Sequence[Launch]) -> list[tuple[str, ...]]:
    """What makes two layers alike: everything but their names, and those of what comes in from others and goes out."""
    rows = []
    for launch in launches:
        *what, _ = _row(launch)
        shown = [name if name.startswith(f"{layer}.") else "…" for name in launch.buffers]
        if launch is launches[-1]:
            shown[-1] = "…"
        rows.append((*what, *(name.removeprefix(layer) for name in shown), launch.step.source))
    return rows


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    return "  ".join([*padded, cells[-1]]).rstrip()


def _counted(plan: Plan) -> list[tuple[str, int]]:
    """What was refused first for each reason, and how often."""
    alike: dict[tuple[str, str], list[str]] = {}
    for each in plan.rejected:
        key = (each.fusion, each.reason.replace(each.layer, "blk"))
        alike.setdefault(key, []).append(f"{each.fusion} in {each.layer}: {each.reason}")
    return [(texts[0], len(texts)) for texts in alike.values()]


def describe_choices(plan: Plan, tuning: Tuning, precision: str) -> str:
    """For each matmul of a decode step which candidates were timed and by how much the winner won."""
    text = [f"why these routes in a {plan.name} step ({precision}; {tuning.origin}):"]
    shown: dict[str, Launch] = {}
    for launch in plan.launches:
        if launch.op in ("linear", "linear_experts"):
            shown.setdefault(key_of(launch.op, launch.dims), launch)
    for key, launch in shown.items():
        entry = tuning.entry(launch.op, launch.dims, precision)
        text.append(key)
        if entry is None:
            text.append(f"  {launch.candidate}, built-in order: not tuned")
        elif launch.candidate != entry.winner:
            text.append(f"  {launch.candidate}, built-in order: {entry.winner} won, but cannot be taken here")
        else:
            text += _contest(entry)
    return "\n".join(text)


def _contest(entry: Entry) -> list[str]:
    times = entry.microseconds
    others = {name: time for name, time in times.items() if name != entry.winner}
    if entry.winner != entry.built_in:
        won = [f"{100 * entry.gain:.1f} % less than the built-in {entry.built_in}"]
    else:
        won = ["the built-in choice, which no other beats by 3 %"]
    following = min(others, key=lambda name: others[name], default=None)
    if following is not None and following != entry.built_in:
        mine, theirs = times[entry.winner], others[following]
        if mine <= theirs:
            won.append(f"{100 * (1 - mine / theirs):.1f} % less than the next, {following}")
        else:
            won.append(f"{following} takes {100 * (1 - theirs / mine):.1f} % less")
    how = "thoroughly" if entry.thorough else "in short, at a load"
    lines = [f"  {entry.winner}, {times[entry.winner]:.2f} µs: {'; '.join(won)} (timed {how})"]
    ranking = sorted(times.items(), key=lambda pair: pair[1])
    return lines + [f"    {time:10.2f} µs  {name}" for name, time in ranking]
