"""Draws decode-speed.svg and prompt-speed.svg from JSON files of these names: `python docs/engine_speed.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shaderlm.bench.svg import WIDTH, card

HERE = Path(__file__).parent
LEFT, RIGHT, TOP = 150, 80, 66
BAR, GAP, GROUP = 22, 6, 50  # heights: a bar, the space between bars, the title of a model with its margins
STYLES = (
    ".bar0{fill:#0969da}.bar1,.bar2{fill:#afb8c1}",
    ".bar0{fill:#4493f8}.bar1,.bar2{fill:#656c76}",
    ".model,.first{font-weight:600}",
)


def draw(data: dict[str, Any]) -> str:
    """The chart as SVG: for each model one bar per engine, with its number."""
    engines: dict[str, list[float]] = data["engines"]
    group = GROUP + len(engines) * (BAR + GAP)
    height = TOP + len(data["models"]) * group + 10
    scale = (WIDTH - LEFT - RIGHT) / max(value for values in engines.values() for value in values)
    description = [
        f"{model}: " + ", ".join(f"{engine} {values[i]:,}" for engine, values in engines.items())
        for i, model in enumerate(data["models"])
    ]
    parts = []
    for i, model in enumerate(data["models"]):
        y = TOP + i * group
        parts.append(f'<text class="text model" x="20" y="{y + 32}">{model}</text>')
        for j, (engine, values) in enumerate(engines.items()):
            top, wide = y + GROUP - 6 + j * (BAR + GAP), round(values[i] * scale)
            weight = " first" if j == 0 else ""
            parts += [
                f'<text class="text{weight}" x="{LEFT - 10}" y="{top + 16}" text-anchor="end">{engine}</text>',
                f'<rect class="bar{j}" x="{LEFT}" y="{top}" width="{wide}" height="{BAR}" rx="3"/>',
                f'<text class="text{weight}" x="{LEFT + wide + 8}" y="{top + 16}">{values[i]:,}</text>',
            ]
    return card(data["title"], data["note"], "; ".join(description), height, parts, STYLES)


if __name__ == "__main__":
    for name in ("decode-speed", "prompt-speed"):
        found = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
        (HERE / f"{name}.svg").write_text(draw(found), encoding="utf-8")
