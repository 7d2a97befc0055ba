"""A prompt in a file: its tokens with their keys and values, in one record that a model of the same contents reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import DeviceError, InputError
from ..runtime.page_records import Bytes, Header, RecordError, checksums, read_contents, read_header, write_record
from ..runtime.prefix_cache import Match
from .page_transfer import PageTransfer


class SavedPrompt(NamedTuple):
    """What is in a file."""

    ids: tuple[int, ...]
    nbytes: int


def save_prompt(pages: PageTransfer, ids: Sequence[int], client: str | None, path: Path, binding: bytes) -> SavedPrompt:
    """Write what is cached of these tokens of a client, whole or not at all. There may be fewer than were given.

    binding: what a model that reads it must have in common with this one.
    """
    if not pages.runner.page_tensors:
        raise InputError("the model has no layer with keys and values: there are no pages to save")
    match = Match()

    def find() -> Sequence[int]:
        nonlocal match
        match = pages.cache.match([*ids, 0], 1, client)  # less than the whole prompt is looked for
        return match.pages

    contents = pages.read(find) or []
    if match.pages and not contents:
        raise DeviceError(f"a step failed while {path.name} was to be written; run the prompt and save it again")
    held = tuple(map(int, ids[: match.length])) if contents else ()
    sums = checksums(contents) if contents else ()
    header = Header(binding.hex(), "", 0, held, pages.runner.page_tensors, sums)
    try:
        return SavedPrompt(held, write_record(path, header, contents))
    except OSError as problem:
        raise InputError(f"cannot write {path.name}: {problem.strerror}") from None


def restore_prompt(pages: PageTransfer, client: str | None, path: Path, binding: bytes) -> SavedPrompt:
    """Put what a file holds into the prefix cache of a client: requests that begin with its tokens find it."""
    header, contents, size = _read(path, binding, pages.runner.page_tensors)
    at_once = pages.pages_at_once
    with pages.runner.lock:
        known = len(pages.cache.pages_of(header.ids, client))
    firsts = range(known, header.pages, at_once)
    parts = ([tensor[first : first + at_once] for tensor in contents] for first in firsts)
    count = header.pages - known
    if pages.write(header.ids, client, known, count, parts) < count:
        raise InputError(f"{path.name} cannot be restored: there is no room for its {count:,} pages, or a step failed")
    return SavedPrompt(header.ids, size)


def _read(path: Path, binding: bytes, tensors: Sequence[tuple[str, int]]) -> tuple[Header, list[Bytes], int]:
    try:
        with path.open("rb", buffering=0) as file:
            header, begin = read_header(file)
            if header.binding != binding.hex() or header.first or header.tensors != tuple(tensors):
                raise InputError(f"{path.name} was saved by another model, with other settings or for another key")
            return header, read_contents(file, header, begin, header.pages), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise InputError(f"there is no {path.name}; save it first") from None
    except OSError as problem:
        raise InputError(f"cannot read {path.name}: {problem.strerror}") from None
    except RecordError as problem:
        raise InputError(f"{path.name} holds no saved prompt that can be used: {problem}") from None
