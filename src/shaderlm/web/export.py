"""`export`: a model as a folder of static files. plan.json, which names all others, is written last."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..graph.batch import PAGE
from ..models.config import Config
from ..page import export_files, service_worker
from ..runtime.runner import rope_factors
from ..version import __version__
from .document import FORMAT, Shaders, distinct, probes, tables, variant_entry
from .folder import check, new_folder
from .model import Progress, WebModel
from .plans import variants, web_config
from .template import compile_template
from .text import text_entry, tokenizer_json
from .vision import vision_entry
from .weights import layout, write_weights

PLAN, TOKENIZER, TEMPLATE, WORKER = "plan.json", "tokenizer.json", "chat_template.json", "sw.js"
# Files of exports by earlier versions.
_FORMER = {"chat_template.jinja", "jinja.js", "LICENSE-jinja.txt", "tokenizers.js", "LICENSE-tokenizers.txt"}
_ROOM = 16 << 20  # for plan.json, the tokenizer and the page, before they are made


def export(model: WebModel, folder: Path, *, force: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Write a folder; what its plan.json holds."""
    check_folder(folder, force)  # before plans are made, which takes seconds
    config = web_config(model.config)
    texts = _texts(model)  # before anything is written: they may be refused
    eyes = vision_entry(model.tower, model.tokenizer) if model.tower and model.tokenizer else None
    devices, weights = variants(model.architecture, config, model.tower)
    places, total = layout(weights)
    with new_folder(folder, _known_names(), PLAN, total + _ROOM, force) as partial:
        write_progress = (lambda done, of: progress("writing weights", done, of)) if progress else None
        paths = write_weights(partial, weights, model.source, write_progress)
        paths += [_write(partial / name, content) for name, content in texts.items()]
        static = static_files()
        for name, content in static.items():
            (partial / name).parent.mkdir(exist_ok=True)
            _write(partial / name, content)
        shaders = Shaders()
        entries = distinct([variant_entry(each, config, shaders) for each in devices])
        lanes = probes(shaders)
        document = {
            "format": FORMAT,
            "generator": f"shaderlm {__version__}",
            "model": _about(model, config, total),
            "text": _text(model, texts),
            "vision": eyes,
            "files": _hashed(paths, progress),
            "weights": {name: list(place) for name, place in places.items()},
            "tables": tables(devices, config, rope_factors(config, model.source)),
            "page": PAGE,
            "max_sequences": 1,
            "probes": lanes,
            "variants": entries,
            "shaders": shaders.used_by(entries, lanes),
        }
        plan = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        # The runtime keeps the others.
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in {**static, PLAN: plan}.items()}
        _write(partial / WORKER, service_worker(hashes))
        _write(partial / PLAN, plan)
    return document


def _text(model: WebModel, texts: Mapping[str, bytes]) -> dict[str, Any] | None:
    if model.tokenizer is None:
        return None
    template = TEMPLATE if TEMPLATE in texts else None
    return text_entry(model.tokenizer, template, str(model.chat_template or ""))


def check_folder(folder: Path, force: bool) -> None:
    """Refuse a folder that an export cannot be written to."""
    check(Path(os.path.realpath(folder)), _known_names(), force)


@cache
def static_files() -> dict[str, bytes]:
    """Files that every export has: path → bytes, of the runtime with what it imports, and of the page."""
    folder = files(__package__) / "assets"
    return {**{file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}, **export_files()}


def _known_names() -> set[str]:
    """What the folder of an export has, beside weights."""
    return {PLAN, TOKENIZER, TEMPLATE, WORKER, *_FORMER, *(path.partition("/")[0] for path in static_files())}


def _about(model: WebModel, config: Config, weight_bytes: int) -> dict[str, Any]:
    suppressed = model.tokenizer.vocabulary.suppressed if model.tokenizer else ()
    return {
        "name": model.name,
        "architecture": config.architecture,
        "parameters": sum(math.prod(shape) for shape in (*config.shapes.values(), *_tower_shapes(model))),
        "context": config.context,
        "vocabulary": config.vocabulary,
        "weight_bytes": weight_bytes,
        "types": {name.upper(): count for name, count in model.types.items()},
        **({"suppressed": list(suppressed)} if suppressed else {}),
    }


def _tower_shapes(model: WebModel) -> Iterable[tuple[int, ...]]:
    return model.tower.shapes.values() if model.tower else ()


def _texts(model: WebModel) -> Mapping[str, bytes]:
    """The files that text is read and written with."""
    if model.tokenizer is None:
        return {}
    texts = {TOKENIZER: tokenizer_json(model.tokenizer).encode()}
    return texts | ({TEMPLATE: compile_template(model.chat_template)} if model.chat_template else {})


def _write(path: Path, content: bytes) -> Path:
    """A file that is on the disk afterwards."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return path


def _hashed(paths: list[Path], progress: Progress | None) -> list[dict[str, Any]]:
    """The entries of "files". They are on the disk afterwards."""
    total, done, entries = sum(path.stat().st_size for path in paths), 0, []
    for path in paths:
        with path.open("r+b") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            done += file.tell()
            os.fsync(file.fileno())
        if progress:
            progress("hashing", done, total)
        entries.append({"name": path.name, "bytes": path.stat().st_size, "sha256": digest})
    return entries
