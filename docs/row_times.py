"""Draws row-times.svg from row-times.json, what `shaderlm bench rows --json` prints: `python docs/row_times.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from shaderlm.bench.svg import WIDTH, card

HERE = Path(__file__).parent
TITLE = "Products of one layer over the number of rows"
TOP, BOTTOM, HEIGHT = 112, 330, 372
PANELS = ((64, 366), (438, WIDTH - 20))  # left and right ends: time, and time per row
STYLES = (
    ".l0{stroke:#0969da}.l1{stroke:#bc4c00}.d0{fill:#0969da}.d1{fill:#bc4c00}.grid{stroke:#d0d7de}",
    ".l0{stroke:#4493f8}.l1{stroke:#f0883e}.d0{fill:#4493f8}.d1{fill:#f0883e}.grid{stroke:#30363d}",
    ".line{fill:none;stroke-width:2}.tick{font-size:11px}.name{font-weight:600}",
)


def draw(models: list[dict[str, Any]]) -> str:
    """Two charts, logarithmic: microseconds of all rows, and of each. A line per model, a dot per number of rows."""
    first = models[0]
    names = [model["model"].split(":")[1] for model in models]
    formats = ", ".join(dict.fromkeys(model["model"].split(":")[2].upper() for model in models))
    by = {"wgpu": "wgpu", "dawn": "Dawn"}[first["implementation"]]
    note = f"{formats}, {first['device']}, {by}; shaderlm {first['version']}, {first['date'][:10]}"
    description = [
        f"{name}: " + ", ".join(f"{each['rows']} rows {each['us']:.0f} µs" for each in model["rows"])
        for name, model in zip(names, models, strict=True)
    ]
    parts = []
    for i, name in enumerate(names):
        x = 20 + 160 * i
        parts.append(f'<circle class="d{i}" cx="{x + 5}" cy="74" r="5"/>')
        parts.append(f'<text class="text name" x="{x + 16}" y="79">{name}</text>')
    for (left, right), title, per_row in zip(PANELS, ("µs of all rows", "µs per row"), (False, True), strict=True):
        lines = [
            [(each["rows"], each["us"] / (each["rows"] if per_row else 1)) for each in model["rows"]]
            for model in models
        ]
        parts.append(f'<text class="soft tick" x="{left - 44}" y="{TOP - 10}">{title}</text>')
        parts += panel(left, right, lines)
    return card(TITLE, note, "; ".join(description), HEIGHT, parts, STYLES)


def panel(left: int, right: int, lines: list[list[tuple[int, float]]]) -> list[str]:
    """Axes with a line at every bucket and at 1, 2 and 5 of a decade, and the lines of the models."""
    most_rows = max(rows for line in lines for rows, _ in line)
    times = [us for line in lines for _, us in line]
    ticks = [digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5)]
    low = max(tick for tick in ticks if tick <= min(times))
    high = min(tick for tick in ticks if tick >= max(times))

    def px(rows: float) -> float:
        return round(left + (right - left) * math.log2(rows) / math.log2(most_rows), 1)

    def py(us: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * math.log(us / low) / math.log(high / low), 1)

    parts = []
    for bucket in (1 << i for i in range(most_rows.bit_length())):
        x = px(bucket)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{BOTTOM}"/>')
        parts.append(f'<text class="soft tick" x="{x}" y="{BOTTOM + 18}" text-anchor="middle">{bucket}</text>')
    for tick in (tick for tick in ticks if low <= tick <= high):
        y = py(tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="soft tick" x="{left - 8}" y="{y + 4}" text-anchor="end">{tick:,g}</text>')
    for i, line in enumerate(lines):
        points = [(px(rows), py(us)) for rows, us in line]
        parts.append(f'<polyline class="line l{i}" points="{" ".join(f"{x},{y}" for x, y in points)}"/>')
        parts += [f'<circle class="d{i}" cx="{x}" cy="{y}" r="3"/>' for x, y in points]
    return parts


if __name__ == "__main__":
    found = json.loads((HERE / "row-times.json").read_text(encoding="utf-8"))
    (HERE / "row-times.svg").write_text(draw(found), encoding="utf-8")
