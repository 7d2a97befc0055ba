"""A plan in words: one line per dispatch, equal layers once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from .plan import Launch, Plan

_COLUMNS = ("op", "route", "kernel", "workgroups", "reads and writes")


def describe(plan: Plan) -> str:
    """The dispatches of a plan as a table, what was fused into what, and what was not and why."""
    layers = [(name, list(group)) for name, group in groupby(plan.launches, key=lambda launch: launch.layer)]
    rows: list[tuple[str, ...]] = []
    titles: dict[int, str] = {}
    i = 0
    while i < len(layers):
        name, launches = layers[i]
        end = i + 1
        while end < len(layers) and _signature(*layers[end]) == _signature(name, launches):
            end += 1
        same = f"{name} … {layers[end - 1][0]} ({end - i} layers alike)" if end - i > 1 else name
        titles[len(rows)] = f"{same}: {len(launches)} dispatch{'es' if len(launches) > 1 else ''}"
        rows += [_row(launch) for launch in launches]
        i = end
    head = f"{plan.name}: {plan.rows} row{'s' if plan.rows > 1 else ''}, room for {plan.capacity:,} positions, "
    text = [head + f"{len(plan.launches)} dispatches, arena {sum(plan.arena.values()) / 1e6:.1f} MB"]
    widths = [max(len(row[c]) for row in (_COLUMNS, *rows)) for c in range(len(_COLUMNS) - 1)]
    text.append("  " + _line(_COLUMNS, widths))
    for at, row in enumerate(rows):
        if at in titles:
            text.append(titles[at])
        text.append("  " + _line(row, widths))
    for refusal, count in _counted(plan):
        times = f" (and {count - 1} more like it)" if count > 1 else ""
        text.append(f"not fused, {refusal}{times}")
    return "\n".join(text)


def _row(launch: Launch) -> tuple[str, ...]:
    x, y, _ = launch.step.grid
    grid = str(x) if y == 1 else f"{x} × {y}"
    own = [name.removeprefix(f"{launch.layer}.") for name in dict.fromkeys(launch.buffers)]
    return launch.op, launch.route, launch.step.label, grid, ", ".join(own)


def _signature(layer: str, launches: Sequence[Launch]) -> list[tuple[str, ...]]:
    """What makes two layers alike: everything but their names. A layer may read what the one before it made."""
    rows = []
    for launch in launches:
        *what, _ = _row(launch)
        shown = [name if name.startswith(f"{layer}.") else "…" for name in launch.buffers]
        rows.append((*what, *(name.removeprefix(layer) for name in shown), launch.step.source))
    return rows


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    return "  ".join([*padded, cells[-1]]).rstrip()


def _counted(plan: Plan) -> list[tuple[str, int]]:
    found: dict[str, int] = {}
    first: dict[str, str] = {}
    for refusal in plan.refusals:
        key = f"{refusal.fusion}: " + refusal.reason.replace(refusal.layer, "blk")
        found[key] = found.get(key, 0) + 1
        first.setdefault(key, f"{refusal.fusion} in {refusal.layer}: {refusal.reason}")
    return [(first[key], count) for key, count in found.items()]
