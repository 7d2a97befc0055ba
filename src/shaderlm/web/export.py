"""`export`: a model as a folder of static files. All or nothing: plan.json is written last, the folder is renamed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import InputError
from ..graph.batch import PAGE
from ..models.architecture import Architecture, Config
from ..runtime.runner import rope_factors
from ..runtime.weights import Source
from ..text import Tokenizer
from .document import FORMAT, Shaders, tables, variant_entry
from .plans import variants, web_config
from .text import text_entry, tokenizer_json
from .weights import layout, write_weights

Progress = Callable[[str, int, int], None]  # what is done, bytes done, bytes in total
PLAN, TOKENIZER, TEMPLATE = "plan.json", "tokenizer.json", "chat_template.jinja"
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Model:
    """What is exported. `types`: how many tensors of the checkpoint have which format."""

    name: str
    architecture: Architecture
    config: Config
    source: Source
    tokenizer: Tokenizer | None
    types: dict[str, int]


def export(model: Model, folder: Path, *, force: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Write a folder; what its plan.json holds."""
    config = web_config(model.config)
    found, weights = variants(model.architecture, config)
    places, total = layout(weights)
    with _new_folder(folder, force) as made:
        names = _write_text(model.tokenizer, made)
        moved = (lambda done, of: progress("writing weights", done, of)) if progress else None
        names = [*(path.name for path in write_weights(made, weights, model.source, moved)), *names]
        shaders = Shaders()
        entries = [variant_entry(each, config, shaders) for each in found]
        document = {
            "format": FORMAT,
            "generator": f"shaderlm {__version__}",
            "model": {
                "name": model.name,
                "architecture": config.architecture,
                "parameters": sum(math.prod(shape) for shape in config.shapes.values()),
                "context": config.context,
                "vocabulary": config.vocabulary,
                "weight_bytes": total,
                "types": model.types,
            },
            "text": text_entry(model.tokenizer, TEMPLATE if TEMPLATE in names else None) if model.tokenizer else None,
            "files": _hashed([made / name for name in names], progress),
            "weights": {name: list(place) for name, place in places.items()},
            "tables": tables(config, rope_factors(config, model.source)),
            "shaders": shaders.listed,
            "page": PAGE,
            "max_sequences": 1,
            "variants": entries,
        }
        (made / PLAN).write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    return document


def _write_text(tokenizer: Tokenizer | None, folder: Path) -> list[str]:
    """Names of the files that were written."""
    if tokenizer is None:
        return []
    (folder / TOKENIZER).write_text(tokenizer_json(tokenizer), encoding="utf-8")
    template = tokenizer.vocabulary.chat_template
    if not isinstance(template, str):
        return [TOKENIZER]
    (folder / TEMPLATE).write_text(template, encoding="utf-8", newline="\n")
    return [TOKENIZER, TEMPLATE]


def _hashed(paths: list[Path], progress: Progress | None) -> list[dict[str, Any]]:
    """The entries of files, which are on the disk afterwards."""
    total, done, found = sum(path.stat().st_size for path in paths), 0, []
    for path in paths:
        seen = hashlib.sha256()
        with path.open("r+b", buffering=0) as file:
            while data := file.read(_READ_BYTES):
                seen.update(data)
                done += len(data)
                if progress:
                    progress("hashing", done, total)
            os.fsync(file.fileno())
        found.append({"name": path.name, "bytes": path.stat().st_size, "sha256": seen.hexdigest()})
    return found


@contextmanager
def _new_folder(folder: Path, force: bool) -> Iterator[Path]:
    """A folder beside the wanted one, which takes its place at the end. Nothing is left of it where anything fails."""
    made = folder.with_name(f".{folder.name[:100]}.{os.getpid()}.partial")
    made.mkdir()
    try:
        yield made
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
