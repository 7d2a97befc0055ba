"""Folders that look like exports: the page is the real one, the runtime is a fake that computes nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from shaderlm.page import export_files, service_worker

RUNTIME = Path(__file__).parent / "web" / "fake_runtime.js"
WEIGHTS = (3_000_000, 1_200_000)  # bytes of each file


def fake_export(
    folder: Path,
    *,
    name: str = "Tiny Chat",
    weights: tuple[int, ...] = WEIGHTS,
    context: int = 2048,
    sees: bool = False,
    **fake: Any,
) -> Path:
    """An export with a fake runtime, which `fake` tells how to behave. `sees`: its model reads pictures."""
    (folder / "assets").mkdir(parents=True, exist_ok=True)
    made: dict[str, bytes] = {**export_files(), "shaderlm.js": RUNTIME.read_bytes(), "tokenizer.json": b"{}"}
    made |= {f"weights-{i:03}.bin": bytes([i + 1]) * size for i, size in enumerate(weights)}
    listed = [name for name in made if name.startswith("weights-")] + ["tokenizer.json"]
    files = [{"name": each, "bytes": len(made[each]), "sha256": _digest(made[each])} for each in listed]
    about = {"name": name, "architecture": "llama", "parameters": 134_515_008, "context": context}
    vision: dict[str, Any] | None = {} if sees else None
    plan = {"format": 1, "model": {**about, "weight_bytes": sum(weights)}, "vision": vision}
    made["plan.json"] = json.dumps({**plan, "files": files, "fake": fake}).encode()
    kept = {path: _digest(content) for path, content in made.items() if path not in listed}
    for path, content in made.items():
        (folder / path).write_bytes(content)
    (folder / "sw.js").write_bytes(service_worker(kept))
    return folder


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
