"""Draws speed.svg from speed.json: `python docs/engine_speed.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shaderlm.bench.svg import WIDTH, card

DATA = Path(__file__).parent / "speed.json"
LEFT, RIGHT, TOP = 110, 80, 62
BAR, GAP, GROUP = 18, 4, 36  # heights: a bar, the space between bars, the title of a test with its margins
STYLES = (
    ".bar0{fill:#0969da}.bar1{fill:#afb8c1}",
    ".bar0{fill:#4493f8}.bar1{fill:#656c76}",
    ".test,.first{font-weight:600}",
)


def draw(data: dict[str, Any]) -> str:
    """The chart as SVG: for each test one bar per engine, with its number. Each test has a scale of its own."""
    engines: list[str] = data["engines"]
    group = GROUP + len(engines) * (BAR + GAP)
    description, parts = [], []
    for i, (test, values) in enumerate(data["tests"]):
        y = TOP + i * group
        description.append(f"{test}: " + ", ".join(f"{e} {v:,}" for e, v in zip(engines, values, strict=True)))
        parts.append(f'<text class="text test" x="20" y="{y + 24}">{test}</text>')
        for j, (engine, value) in enumerate(zip(engines, values, strict=True)):
            top, wide = y + GROUP - 4 + j * (BAR + GAP), round(value * (WIDTH - LEFT - RIGHT) / max(values))
            weight = " first" if j == 0 else ""
            parts += [
                f'<text class="text{weight}" x="{LEFT - 10}" y="{top + 14}" text-anchor="end">{engine}</text>',
                f'<rect class="bar{j}" x="{LEFT}" y="{top}" width="{wide}" height="{BAR}" rx="3"/>',
                f'<text class="text{weight}" x="{LEFT + wide + 8}" y="{top + 14}">{value:,}</text>',
            ]
    height = TOP + len(data["tests"]) * group + 14
    return card(data["title"], data["note"], "; ".join(description), height, parts, STYLES)


if __name__ == "__main__":
    DATA.with_suffix(".svg").write_text(draw(json.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")
