"""Exports of checkpoints, for tests of what runs in a browser."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from shaderlm.engine.tokenizer import Tokenizer
from shaderlm.engine.loading import FileSource, config_of_file
from shaderlm.formats.opening import open_checkpoint
from shaderlm.models.checkpoint import architecture_of
from shaderlm.text import Vocabulary
from shaderlm.web.export import Model, export


def export_file(path: Path, folder: Path, *, context: int | None = None) -> dict[str, Any]:
    """Export a GGUF file; what its plan.json holds."""
    with open_checkpoint(path) as file, file.named_in_errors():
        kind = architecture_of(file)
        config = config_of_file(kind, file, context, dense=False)
        tokenizer = Tokenizer(Vocabulary.from_metadata(file.metadata))
        types = dict(Counter(info.kind for info in file.tensors.values()))
        name = str(file.metadata.get("general.name") or path.stem)
        return export(Model(name, kind, config, FileSource(file), tokenizer, types), folder)
