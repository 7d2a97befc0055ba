"""What keys and values depend on beside tokens: the contents of the model's files, and how this model computes.

Files are read once. What their contents are is remembered by path, size and times, as long as these stay.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..files import atomic_write_text, cache_directory
from ..graph.batch import PAGE
from ..runtime.page_records import FORMAT
from ..runtime.runner import Runner
from ..version import __version__
from .report import LoadReport

_CHUNK = 4 << 20
_THREADS = 8
_REMEMBERED = 256  # files


def identity_of(runner: Runner, report: LoadReport) -> bytes:
    """A hash of all that two loads must have in common for one to go on with the keys and values of the other."""
    config = runner.config
    factors = sorted((name, rope.factors_for(config.context)) for name, rope in config.ropes.items())
    facts = {
        "format": FORMAT,
        "version": __version__,  # kernels of another one may round otherwise, or mend an error
        "contents": contents_of(report),
        # All that was read from the file, and what was ignored of it; the longest text that may be run says nothing.
        "config": repr(replace(config, context=0)),
        "factors": factors,
        "formats": sorted(config.formats.items()),
        "page": [PAGE, runner.page_tensors],
        "cache": report.cache,
        "precision": report.precision,
        "device": report.device,
        "implementation": report.backend.partition(":")[0],
        "chunk": runner.fixed_chunk,
    }
    if runner.state_tensors:
        facts["states"] = runner.state_tensors
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=32).digest()


def contents_of(report: LoadReport) -> str:
    """What the files of a model hold, as a hash. One without files has random weights of its own name."""
    if not report.files:
        return f"{report.name} {report.types}"
    return hashlib.blake2b(json.dumps(hashes_of(report.files)).encode(), digest_size=32).hexdigest()


def hashes_of(paths: Sequence[Path]) -> list[str]:
    """What each of these files holds."""
    known = _remembered()
    hashes, changed = list[str](), False
    for path in paths:
        about = os.stat(path)
        name = os.path.realpath(path)
        stamp = [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]
        entry = known.pop(name, None)
        if entry is None or entry[0] != stamp:
            entry, changed = [stamp, _hash_of(path, about.st_size)], True
        known[name] = entry  # as the last one
        hashes.append(entry[1])
    if changed:
        _remember(known)
    return hashes


def _hash_of(path: Path, size: int) -> str:
    """A hash of checksums of its parts: 3 GB/s for each core, where a hash of all bytes takes ten times as long."""

    def checksum(first: int) -> int:
        with open(path, "rb", buffering=0) as file:
            file.seek(first)
            return zlib.crc32(file.read(_CHUNK))

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "checksum") as pool:
        sums = list(pool.map(checksum, range(0, size, _CHUNK)))
    return hashlib.blake2b(json.dumps([size, sums]).encode(), digest_size=32).hexdigest()


def _path() -> Path:
    return cache_directory() / "contents.json"


def _remembered() -> dict[str, Any]:
    """[size and times, hash] of files by path, as far as it is there and can be read."""
    with suppress(OSError, ValueError, ModelError, RecursionError):
        entries = json.loads(_path().read_text(encoding="utf-8"))
        if isinstance(entries, dict):
            return {
                name: entry
                for name, entry in entries.items()
                if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)
            }
    return {}


def _remember(entries: dict[str, Any]) -> None:
    """The last ones; without a place for caches files are read again."""
    with suppress(OSError, ModelError):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps(dict(list(entries.items())[-_REMEMBERED:])), private=True)
