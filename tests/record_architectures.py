"""Records `data/architectures.json` from checkpoints with known logits: python -m tests.record_architectures FOLDER.

FOLDER has one folder for each checkpoint: `model.gguf`, `oracle.json` with prompts and contexts, and `logits.npy` with
the last row of logits of each prompt, as another implementation gives them. Only a checkpoint whose logits are found is
recorded: its metadata, its shapes, and the logits of a checkpoint that is described by both and has other weights.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

import shaderlm
from shaderlm.errors import ShaderlmError

from . import architecture_files as files


def main(folder: Path, names: list[str]) -> None:
    """Record these checkpoints of a folder, or all."""
    found = files.recorded()
    for each in sorted(path for path in folder.iterdir() if not names or path.name in names):
        try:
            worst = check(each)
        except ShaderlmError as problem:
            print(f"{each.name}: not recorded: {problem}")
            continue
        print(f"{each.name}: worst logit at {worst:.3f} of the tolerance")
        if worst <= 1:
            found[each.name] = entry(each / "model.gguf")
    # One line for each entry of a checkpoint.
    lines = []
    for name, about in sorted(found.items()):
        parts = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in about.items())
        lines.append(f"{json.dumps(name)}: {{\n  {parts}}}")
    files.RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def check(folder: Path) -> float:
    """The largest error of a logit, as a part of what is allowed: 2e-4 · max(1, largest logit)."""
    about = json.loads((folder / "oracle.json").read_text(encoding="utf-8"))
    worst = 0.0
    for prompt, context, wanted in zip(
        about["prompts"], about["contexts"], np.load(folder / "logits.npy"), strict=True
    ):
        with shaderlm.load(folder / "model.gguf", device="cpu", context=context) as model:
            error = np.abs(model.logits(prompt)[-1] - wanted).max()
        worst = max(worst, float(error) / (2e-4 * max(1.0, float(np.abs(wanted).max()))))
    return worst


def entry(path: Path) -> dict[str, Any]:
    """What is recorded of a checkpoint."""
    reader = GGUFReader(path)
    own = str(reader.fields["general.architecture"].contents())
    metadata = {
        key.removeprefix(f"{own}."): field.contents()
        for key, field in reader.fields.items()
        if key.startswith(f"{own}.")
    }
    if "vocab_size" in metadata:
        metadata["vocab_size"] = files.VOCABULARY
    shapes = {each.name: [int(size) for size in each.shape[::-1]] for each in reader.tensors}
    for name in ("token_embd.weight", "output.weight"):
        if name in shapes:
            shapes[name][0] = files.VOCABULARY
    return recorded_entry(own, metadata, shapes)


def recorded_entry(own: str, metadata: dict[str, Any], shapes: dict[str, list[int]]) -> dict[str, Any]:
    """The entry of a checkpoint with these metadata and shapes."""
    made: dict[str, Any] = {"architecture": own, "metadata": metadata, "shapes": shapes}
    with tempfile.TemporaryDirectory() as folder:
        path = files.write(Path(folder) / "tiny.gguf", made)
        with shaderlm.load(path, device="cpu") as model:
            made["logits"] = [files.kept(model.logits(prompt)[-1]) for prompt in files.PROMPTS]
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
