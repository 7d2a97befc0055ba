"""`export`: a model as a folder of static files. plan.json, which names all others, is written last."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..graph.batch import PAGE
from ..models.config import Config
from ..page import service_worker
from ..runtime.runner import rope_factors
from ..version import __version__
from .document import FORMAT, Shaders, distinct, probes, tables, variant_entry
from .folder import check, new_folder
from .model import Progress, WebModel
from .plans import DeviceVariant, variants, web_config
from .static import static_files
from .text import text_entry, tokenizer_json
from .weights import layout, write_weights

PLAN, TOKENIZER, TEMPLATE, WORKER = "plan.json", "tokenizer.json", "chat_template.jinja", "sw.js"
_READ_BYTES = 1 << 20
_ROOM = 16 << 20  # for plan.json, the tokenizer and the page, before they are made


def export(model: WebModel, folder: Path, *, force: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Write a folder; what its plan.json holds."""
    check_folder(folder, force)  # before plans are made, which takes seconds
    config = web_config(model.config)
    texts = _texts(model)  # before anything is written: they may be refused
    found, weights = variants(model.architecture, config)
    places, total = layout(weights)
    with new_folder(folder, _own(), PLAN, total + _ROOM, force) as made:
        moved = (lambda done, of: progress("writing weights", done, of)) if progress else None
        files = write_weights(made, weights, model.source, moved)
        files += [_written(made / name, content) for name, content in texts.items()]
        static = static_files()
        for name, content in static.items():
            (made / name).parent.mkdir(exist_ok=True)
            _written(made / name, content)
        document = {
            "format": FORMAT,
            "generator": f"shaderlm {__version__}",
            "model": _about(model, config, total),
            "text": _text(model, texts),
            "files": _hashed(files, progress),
            "weights": {name: list(place) for name, place in places.items()},
            "tables": tables(found, config, rope_factors(config, model.source)),
            "page": PAGE,
            "max_sequences": 1,
            **_plans(found, config),
        }
        plan = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        kept = {**static, PLAN: plan}  # the runtime keeps the others
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in kept.items()}
        _written(made / WORKER, service_worker(hashes))
        _written(made / PLAN, plan)
    return document


def _text(model: WebModel, texts: Mapping[str, bytes]) -> dict[str, Any] | None:
    if model.tokenizer is None:
        return None
    template = TEMPLATE if TEMPLATE in texts else None
    return text_entry(model.tokenizer, template, texts.get(TEMPLATE, b"").decode())


def check_folder(folder: Path, force: bool) -> None:
    """Refuse a folder that an export cannot be written to."""
    check(Path(os.path.realpath(folder)), _own(), force)


def _own() -> set[str]:
    """What the folder of an export has, beside weights."""
    return {PLAN, TOKENIZER, TEMPLATE, WORKER, *(path.partition("/")[0] for path in static_files())}


def _plans(found: list[DeviceVariant], config: Config) -> dict[str, Any]:
    shaders = Shaders()
    entries = distinct([variant_entry(each, config, shaders) for each in found])
    lanes = probes(shaders)
    return {"probes": lanes, "variants": entries, "shaders": shaders.used_by(entries, lanes)}


def _about(model: WebModel, config: Config, weight_bytes: int) -> dict[str, Any]:
    return {
        "name": model.name,
        "architecture": config.architecture,
        "parameters": sum(math.prod(shape) for shape in config.shapes.values()),
        "context": config.context,
        "vocabulary": config.vocabulary,
        "weight_bytes": weight_bytes,
        "types": {name.upper(): count for name, count in model.types.items()},
    }


def _texts(model: WebModel) -> Mapping[str, bytes]:
    """The files that text is read and written with."""
    if model.tokenizer is None:
        return {}
    found = {TOKENIZER: tokenizer_json(model.tokenizer).encode()}
    template = model.tokenizer.vocabulary.chat_template
    return found | ({TEMPLATE: template.encode()} if isinstance(template, str) else {})


def _written(path: Path, content: bytes) -> Path:
    """A file that is on the disk afterwards."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return path


def _hashed(paths: list[Path], progress: Progress | None) -> list[dict[str, Any]]:
    """The entries of "files". They are on the disk afterwards."""
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
