"""Draws sequences.svg from sequences.json: `python docs/sequences.py [ROWS.json …]`.

ROWS.json is what `shaderlm bench -np 1,2,4 --save ROWS.json` writes: its numbers replace those of the same model and
implementation of WebGPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from row_times import HEIGHT, PANELS, TOP, panel

from shaderlm.bench.svg import card

HERE = Path(__file__).parent
NAMES = {"Dawn": "shaderlm, Dawn", "wgpu": "shaderlm, wgpu", "llama.cpp": "llama.cpp, CUDA"}
LEGEND = (20, 180, 340)
STYLES = (
    ".l0{stroke:#0969da}.l1{stroke:#1a7f37}.l2{stroke:#8c959f}.d0{fill:#0969da}.d1{fill:#1a7f37}.d2{fill:#8c959f}.grid{stroke:#d0d7de}",
    ".l0{stroke:#4493f8}.l1{stroke:#3fb950}.l2{stroke:#7d8590}.d0{fill:#4493f8}.d1{fill:#3fb950}.d2{fill:#7d8590}.grid{stroke:#30363d}",
    ".line{fill:none;stroke-width:2}.tick{font-size:11px}.name{font-weight:600}",
)


def draw(data: dict[str, Any]) -> str:
    """A chart for each model, logarithmic: tokens per second of all sequences. A line for each program."""
    parts, description = [], []
    for i, (x, name) in enumerate(zip(LEGEND, NAMES.values(), strict=True)):
        parts.append(f'<circle class="d{i}" cx="{x + 5}" cy="74" r="5"/>')
        parts.append(f'<text class="text" x="{x + 16}" y="79">{name}</text>')
    for (left, right), (model, series) in zip(PANELS, data["models"].items(), strict=True):
        lines = [[(int(count), speed) for count, speed in series[by].items()] for by in NAMES]
        parts.append(f'<text class="text name" x="{left - 44}" y="{TOP - 10}">{model}</text>')
        parts += panel(left, right, lines)
        for name, line in zip(NAMES.values(), lines, strict=True):
            speeds = ", ".join(f"{count} sequences {speed:,}" for count, speed in line)
            description.append(f"{model}, {name}: {speeds}")
    return card(data["title"], data["note"], "; ".join(description), HEIGHT, parts, STYLES)


def take(data: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Speeds of `shaderlm bench`, of generated tokens alone."""
    new = dict[tuple[str, str], dict[str, int]]()
    for row in rows:
        model = next((name for name in data["models"] if name in f"{row['model_filename']} {row['model_type']}"), None)
        if model is not None and not row["n_prompt"] and not row["n_depth"]:
            by = "Dawn" if "dawn" in row["backends"].lower() else "wgpu"
            new.setdefault((model, by), {})[str(row["n_parallel"])] = round(row["avg_ts"])
    for (model, by), speeds in new.items():
        data["models"][model][by] = dict(sorted(speeds.items(), key=lambda pair: int(pair[0])))


if __name__ == "__main__":
    file = HERE / "sequences.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    for path in sys.argv[1:]:
        take(found, json.loads(Path(path).read_text(encoding="utf-8")))
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (HERE / "sequences.svg").write_text(draw(found), encoding="utf-8")
