"""Writes the plans that test_plan compares with: `python -m tests.record_plans`, then read the difference."""

from __future__ import annotations

import json

from shaderlm.compile.plan_text import describe
from shaderlm.models.shapes import SYNTHETIC

from .test_plan import CASES, DIGESTS, SNAPSHOTS, digests, plans

if __name__ == "__main__":
    SNAPSHOTS.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        text = "\n\n".join(map(describe, plans(*case))) + "\n"
        (SNAPSHOTS / f"{name}.txt").write_text(text, encoding="utf-8")
    DIGESTS.write_text(json.dumps({name: digests(name) for name in SYNTHETIC}, indent=1) + "\n", encoding="utf-8")
