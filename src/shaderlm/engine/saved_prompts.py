"""A prompt in a file: its tokens with their keys and values, in a record that a model of the same contents reads.

Of a model with recurrent layers there are whole pages of tokens, and after them a record of the states there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import DeviceError, InputError
from ..graph.batch import PAGE
from ..runtime.page_records import (
    PAGES,
    STATES,
    Bytes,
    Header,
    RecordError,
    checksums,
    read_contents,
    read_header,
    write_record,
)
from ..runtime.prefix_cache import Match
from .page_transfer import PageTransfer, page_tensors


class SavedPrompt(NamedTuple):
    """What is in a file."""

    ids: tuple[int, ...]
    nbytes: int


def save_prompt(pages: PageTransfer, ids: Sequence[int], client: str | None, path: Path, binding: bytes) -> SavedPrompt:
    """Write what is cached of these tokens of a client, whole or not at all. There may be fewer than were given.

    binding: what a model that reads it must have in common with this one.
    """
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
    records = [(Header(binding.hex(), "", 0, held, page_tensors(pages.runner), sums), contents)]
    if tensors := pages.runner.state_tensors if held else ():
        row = pages.read_state(lambda: pages.cache.snapshots_of(held, client).get(len(held) // PAGE))
        if row is None:
            raise DeviceError(f"the cache is too small to write {path.name}; run the prompt and save it again")
        last = (len(held) // PAGE - 1, held[-PAGE:])
        records.append((Header(binding.hex(), "", *last, tensors, checksums(row), STATES), row))
    try:
        return SavedPrompt(held, write_record(path, *records))
    except OSError as problem:
        raise InputError(f"cannot write {path.name}: {problem.strerror}") from None


def restore_prompt(pages: PageTransfer, client: str | None, path: Path, binding: bytes) -> SavedPrompt:
    """Put what a file holds into the prefix cache of a client: requests that begin with its tokens find it."""
    header, contents, state, size = _read(path, binding, pages)
    at_once = pages.pages_at_once
    with pages.runner.lock:
        known = len(pages.cache.pages_of(header.ids, client))
    firsts = range(known, header.pages, at_once)
    parts = ([tensor[first : first + at_once] for tensor in contents] for first in firsts)
    count = header.pages - known
    if pages.write(header.ids, client, known, count, parts) < count:
        raise InputError(f"{path.name} cannot be restored: there is no room for its {count:,} pages, or a step failed")
    if state and not pages.write_state(header.ids, client, state):
        with pages.runner.lock:
            has_state = header.pages in pages.cache.snapshots_of(header.ids, client)
        if not has_state:
            raise InputError(f"{path.name} cannot be restored: there is no room for its states, or a step failed")
    return SavedPrompt(header.ids, size)


def _read(path: Path, binding: bytes, pages: PageTransfer) -> tuple[Header, list[Bytes], list[Bytes], int]:
    """The header of the pages, their contents, the states after them, and the bytes of the file."""
    tensors, states = page_tensors(pages.runner), pages.runner.state_tensors
    other = InputError(f"{path.name} was saved by another model, with other settings or for another key")
    try:
        with path.open("rb", buffering=0) as file:
            header, begin = read_header(file)
            if header.binding != binding.hex() or header.first or header.tensors != tensors or header.kind != PAGES:
                raise other
            contents = read_contents(file, header, begin, header.pages)
            state = list[Bytes]()
            if states and header.pages:
                after, begin = read_header(file, begin + header.data_bytes)
                place = (after.binding, after.kind, after.first + 1, after.ids)
                if place != (header.binding, STATES, header.pages, header.ids[-PAGE:]) or after.tensors != states:
                    raise other
                state = read_contents(file, after, begin, 1)
            return header, contents, state, os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise InputError(f"there is no {path.name}; save it first") from None
    except OSError as problem:
        raise InputError(f"cannot read {path.name}: {problem.strerror}") from None
    except RecordError as problem:
        raise InputError(f"{path.name} holds no saved prompt that can be used: {problem}") from None
