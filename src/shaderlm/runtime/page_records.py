"""The file format of pages on disk: a header with the tokens and checksums of its pages, then their keys and values.

The states of recurrent layers after a page are a record of one page of another kind.

A record holds pages of one sequence that follow each other. Its data are those of the first tensor for all pages, then
those of the second, and so on: what goes to a device in one write lies in one piece. Any part of a file that is not as
it was written is a `RecordError`: the checksum of the header covers the header, and each page has one of its own. They
tell accidents, not attacks: who may write the file may write its checksums, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..files import open_private
from ..graph.batch import PAGE
from .pages import pages_for

Bytes = NDArray[np.uint8]

FORMAT = 1  # of the file; another one is not read
# Kinds of records: pages of keys and values; the states of recurrent layers after one page, whose tokens it has.
PAGES, STATES = "pages", "states"
SUFFIXES = {PAGES: ".pages", STATES: ".states"}
_MAGIC = b"shaderlm"
_ALIGNMENT = 4096  # of the data in a file
_MAX_HEADER = 32 << 20  # bytes that are read before anything is known of a file
_DIGEST = 16


class RecordError(Exception):
    """A file is no record that can be used. Never seen by users."""


@dataclass(frozen=True)
class Header:
    """What a record says of its pages. `binding` is what they depend on beside their tokens, as a hash."""

    binding: str
    parent: str  # the hash of the pages before the first one
    first: int  # how many pages come before
    ids: tuple[int, ...]  # tokens of its pages; the last page may hold fewer than others
    tensors: tuple[tuple[str, int], ...]  # names, and bytes of a page
    sums: tuple[int, ...]  # of each page
    kind: str = PAGES

    @property
    def pages(self) -> int:
        """How many pages it holds."""
        return len(self.sums)

    @property
    def data_bytes(self) -> int:
        """Bytes after the header."""
        return self.pages * sum(nbytes for _, nbytes in self.tensors)

    def page_ids(self, page: int) -> tuple[int, ...]:
        """The tokens of one of its pages."""
        return self.ids[page * PAGE : (page + 1) * PAGE]


def checksums(contents: Sequence[Bytes]) -> tuple[int, ...]:
    """Of each page of tensors [pages, bytes]: a CRC-32 over all of its tensors.

    3.1 GB/s on a core, where SHA-256 and BLAKE2 take 0.3 (docs/log.md).
    """
    sums = []
    for page in range(len(contents[0])):
        total = 0
        for tensor in contents:
            total = zlib.crc32(tensor[page], total)
        sums.append(total)
    return tuple(sums)


def header_bytes(header: Header) -> bytes:
    """A header as it is written: its length and checksum, then JSON, up to where the data begin."""
    fields = {
        "format": FORMAT,
        "kind": header.kind,
        "page": PAGE,
        "binding": header.binding,
        "parent": header.parent,
        "first": header.first,
        "ids": header.ids,
        "tensors": header.tensors,
        "sums": header.sums,
    }
    text = json.dumps(fields, separators=(",", ":")).encode()
    raw = _MAGIC + len(text).to_bytes(8, "little") + hashlib.blake2b(text, digest_size=_DIGEST).digest() + text
    return raw + bytes(-len(raw) % _ALIGNMENT)


def write_record(path: Path, *records: tuple[Header, Sequence[Bytes]]) -> int:
    """A new file of records, whole or not at all, that its owner alone can read; its size.

    It is not flushed to the disk: what a crash of the system leaves of it is found out by checksums.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    size = 0
    try:
        with open(temporary, "xb", buffering=0, opener=open_private) as file:
            for header, contents in records:
                head = header_bytes(header)
                _write_all(file, head)
                for tensor in contents:
                    _write_all(file, np.ascontiguousarray(tensor).data.cast("B"))
                size += len(head) + header.data_bytes
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    return size


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view.nbytes:
        view = view[file.write(view) :]


def read_header(file: IO[bytes], at: int = 0) -> tuple[Header, int]:
    """The header of a record of an open file, which begins somewhere, and where its data begin."""
    file.seek(at)
    raw = file.read(len(_MAGIC) + 8 + _DIGEST)
    if len(raw) < len(_MAGIC) + 8 + _DIGEST or not raw.startswith(_MAGIC):
        raise RecordError("it does not begin as a record does")
    length = int.from_bytes(raw[len(_MAGIC) : len(_MAGIC) + 8], "little")
    if length > _MAX_HEADER:
        raise RecordError(f"its header has {length:,} bytes")
    text = file.read(length)
    if len(text) < length or hashlib.blake2b(text, digest_size=_DIGEST).digest() != raw[-_DIGEST:]:
        raise RecordError("its header is not as it was written")
    try:
        header = _header(json.loads(text))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as problem:
        raise RecordError(f"its header cannot be read: {problem!r:.100}") from None
    begin = len(raw) + length
    return header, at + begin + -begin % _ALIGNMENT


def _header(fields: Mapping[str, Any]) -> Header:
    kind = fields["kind"]
    if (fields["format"], fields["page"]) != (FORMAT, PAGE) or kind not in SUFFIXES:
        raise RecordError(f"it is of format {fields['format']!r:.20}, kind {fields['kind']!r:.40}")
    tensors = tuple((str(name), int(nbytes)) for name, nbytes in fields["tensors"])
    header = Header(
        str(fields["binding"]),
        str(fields["parent"]),
        int(fields["first"]),
        tuple(map(int, fields["ids"])),
        tensors,
        tuple(map(int, fields["sums"])),
        kind,
    )
    if header.pages != pages_for(len(header.ids)) or min((nbytes for _, nbytes in tensors), default=0) < 1:
        raise RecordError("its numbers contradict each other")
    return header


def read_contents(file: IO[bytes], header: Header, begin: int, pages: int) -> list[Bytes]:
    """The first pages of an open record, checked: of each tensor [pages, bytes].

    Read and not mapped: a mapped file that somebody truncates ends the process.
    """
    if os.fstat(file.fileno()).st_size < begin + header.data_bytes:
        raise RecordError("it is shorter than its header says")
    contents = []
    if pages == header.pages:
        data = np.empty(header.data_bytes, np.uint8)
        _read_into(file, begin, data)
        at = 0
        for _, nbytes in header.tensors:
            contents.append(data[at : at + pages * nbytes].reshape(pages, nbytes))
            at += pages * nbytes
    else:
        for _, nbytes in header.tensors:
            tensor = np.empty((pages, nbytes), np.uint8)
            _read_into(file, begin, tensor.reshape(-1))
            contents.append(tensor)
            begin += header.pages * nbytes
    if checksums(contents) != header.sums[:pages]:
        raise RecordError("its pages are not as they were written")
    return contents


def _read_into(file: IO[bytes], offset: int, target: Bytes) -> None:
    file.seek(offset)
    view = target.data
    while view.nbytes:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise RecordError("it ends too early")
        view = view[count:]
