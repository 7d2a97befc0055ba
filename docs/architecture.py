"""Draws architecture.svg from architecture.json: `python docs/architecture.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shaderlm.bench.svg import WIDTH, card

DATA = Path(__file__).parent / "architecture.json"
TOP, HEIGHT, GAP, MARGIN = 68, 52, 12, 20
STYLES = (
    ".box{fill:#f6f8fa;stroke:#d0d7de}",
    ".box{fill:#151b23;stroke:#3d444d}",
    ".name{font-weight:600}",
)


def draw(data: dict[str, Any]) -> str:
    """One box per package, in rows from what people start to what touches a GPU or a file."""
    parts = []
    for i, row in enumerate(data["rows"]):
        wide = (WIDTH - 2 * MARGIN - GAP * (len(row) - 1)) / len(row)
        y = TOP + i * (HEIGHT + GAP)
        for j, (name, what) in enumerate(row):
            x = round(MARGIN + j * (wide + GAP), 1)
            middle = round(x + wide / 2, 1)
            parts += [
                f'<rect class="box" x="{x}" y="{y}" width="{round(wide, 1)}" height="{HEIGHT}" rx="6"/>',
                f'<text class="text name" x="{middle}" y="{y + 22}" text-anchor="middle">{name}</text>',
                f'<text class="soft" x="{middle}" y="{y + 40}" text-anchor="middle">{what}</text>',
            ]
    height = TOP + len(data["rows"]) * (HEIGHT + GAP) + 8
    description = "; ".join(", ".join(f"{name}: {what}" for name, what in row) for row in data["rows"])
    return card(data["title"], data["note"], description, height, parts, STYLES)


if __name__ == "__main__":
    DATA.with_suffix(".svg").write_text(draw(json.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")
