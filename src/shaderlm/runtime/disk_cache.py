"""Pages of the prefix cache in a folder: found by the tokens before and in them, within a number of bytes.

A file is named by a hash of everything that its first page depends on: the model, how it computes, the client, and all
tokens up to the end of that page. So nothing is found that another model, format or key wrote, and no index is needed:
processes may share a folder, and what one of them writes another one finds. Which file was used last is its time of
change. No method raises `OSError`: what cannot be read is not there, and what cannot be written is left out.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import IO

import numpy as np

from ..errors import InputError
from ..graph.batch import PAGE
from .page_records import (
    PAGES,
    STATES,
    SUFFIXES,
    Bytes,
    Header,
    RecordError,
    checksums,
    header_bytes,
    read_contents,
    read_header,
    write_record,
)

_DIGEST = 16
_SALT, _SALT_BYTES = ".salt", 32
_STALE_SECONDS = 600.0  # after which a file that is half written belongs to nobody
_RETRY_SECONDS = 30.0  # after a write that failed
_log = logging.getLogger("shaderlm")


@dataclass(frozen=True)
class DiskStats:
    """What a cache on disk did since it was opened. `hits` are tokens that came from it."""

    limit: int
    used_bytes: int  # of all records in its folder
    hits: int
    read_bytes: int
    written_bytes: int
    evicted: int  # files
    invalid: int  # files that were not as they were written
    failed_writes: int


@dataclass(frozen=True)
class Stored:
    """A file, and how many of its first pages begin a prompt with those before."""

    path: Path
    header: Header
    pages: int


@dataclass
class DiskCache:
    """A folder with records of one model (`binding`), and of others, which are not found but counted.

    tensors: names, and bytes of a page. limit: bytes of all records. states: those of a row of the states, of a model
    that has some.
    """

    folder: Path
    limit: int
    binding: bytes
    tensors: tuple[tuple[str, int], ...]
    states: tuple[tuple[str, int], ...] = ()
    read_bytes: int = field(default=0, init=False)
    written_bytes: int = field(default=0, init=False)
    evicted: int = field(default=0, init=False)
    invalid: int = field(default=0, init=False)
    failed_writes: int = field(default=0, init=False)
    hits: int = field(default=0, init=False)
    used_bytes: int = field(default=0, init=False)  # of all records, when they were last counted

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.listdir(self.folder)
        except OSError as problem:
            raise InputError(
                f"cannot use the folder {self.folder} for a cache: {problem.strerror}; give a folder that can be read "
                "and written, or one that can be made"
            ) from None
        self._salt, self._lock = read_salt(self.folder), Lock()
        self._retry_at = float("-inf")
        self._count()

    def stats(self) -> DiskStats:
        """Numbers so far."""
        names = ("hits", "read_bytes", "written_bytes", "evicted", "invalid", "failed_writes")
        return DiskStats(self.limit, self.used_bytes, **{name: getattr(self, name) for name in names})

    # Finding -----------------------------------------------------------------------------------------------

    def client_binding(self, client: str | None) -> bytes:
        """What the pages of a client depend on. `client` is its key, of which only a keyed hash is ever written."""
        return keyed(self.binding, b"" if client is None else keyed(self._salt, client.encode()))

    def digests(self, ids: Sequence[int], binding: bytes) -> Iterator[bytes]:
        """Hashes of the whole pages of these tokens, each of all tokens up to its end."""
        digest = b""
        for first in range(0, len(ids) // PAGE * PAGE, PAGE):
            digest = page_digest(binding, digest, ids[first : first + PAGE])
            yield digest

    def find(self, ids: Sequence[int], binding: bytes, first: int = 0) -> list[Stored]:
        """The records that hold whole pages of these tokens, from page `first` on, without a gap."""
        names = [b"", *self.digests(ids, binding)]
        stored = list[Stored]()
        page = first
        while page < len(names) - 1:
            path, header = self._path(names[page + 1]), None
            with self._opened(path) as file:
                if file is not None:
                    header = self._checked(file, binding, names[page], page)
            if header is None:
                break
            pages, most = 0, min(header.pages, len(names) - 1 - page)
            while pages < most and header.page_ids(pages) == tuple(ids[(page + pages) * PAGE :][:PAGE]):
                pages += 1
            if not pages:  # a hash that two prompts share, or a file that was renamed
                break
            stored.append(Stored(path, header, pages))
            page += pages
        return stored

    def states_of(self, ids: Sequence[int], binding: bytes) -> dict[int, Stored]:
        """The records of states after whole pages of these tokens, by how many pages come before."""
        names, found = [b"", *self.digests(ids, binding)], dict[int, Stored]()
        for page in range(1, len(names)):
            path = self._path(names[page], STATES)
            if not path.exists():
                continue
            with self._opened(path) as file:
                if file is not None:
                    header = self._checked(file, binding, names[page - 1], page - 1, STATES)
                    if header.ids == tuple(ids[(page - 1) * PAGE : page * PAGE]):
                        found[page] = Stored(path, header, 1)
        return found

    def _checked(self, file: IO[bytes], binding: bytes, parent: bytes, first: int, kind: str = PAGES) -> Header:
        """The header of a record that belongs to this place; otherwise it is a `RecordError`."""
        header, _ = read_header(file)
        place = (header.binding, header.parent, header.first, header.kind)
        if place != (binding.hex(), parent.hex(), first, kind):
            raise RecordError("it belongs to another place")
        if header.tensors != (self.tensors if kind == PAGES else self.states):
            raise RecordError("its pages have another form")
        return header

    def read(self, stored: Stored) -> list[Bytes] | None:
        """What a record holds, of each tensor [pages, bytes]. None: it is not as it was written, and removed."""
        contents = None
        with self._opened(stored.path) as file:
            if file is not None:
                header, begin = read_header(file)
                if header != stored.header:
                    raise RecordError("it was replaced")
                contents = read_contents(file, header, begin, stored.pages)
        if contents is not None:
            with self._lock:
                self.read_bytes += sum(each.nbytes for each in contents)
        return contents

    @contextmanager
    def _opened(self, path: Path) -> Iterator[IO[bytes] | None]:
        """A file; None if it cannot be opened. One that is not as it was written is removed."""
        try:
            file = path.open("rb", buffering=0)
        except OSError:
            yield None
            return
        with file:
            try:
                yield file
            except RecordError as problem:
                _log.warning("%s is not used, and removed: %s", path, problem)
                with self._lock:
                    self.invalid += 1
                with suppress(OSError):
                    path.unlink()
            except (OSError, MemoryError) as problem:
                _log.warning("%s cannot be read: %s", path, problem)

    def touch(self, stored: Sequence[Stored]) -> None:
        """These were used just now. The first one last: without it nobody finds the others."""
        for each in reversed(stored):
            with suppress(OSError):
                os.utime(each.path)

    def remove(self, stored: Sequence[Stored]) -> None:
        """Forget records."""
        for each in stored:
            with suppress(OSError):
                each.path.unlink()

    def _path(self, digest: bytes, kind: str = PAGES) -> Path:
        return self.folder / f"{digest.hex()}{SUFFIXES[kind]}"

    # Writing -----------------------------------------------------------------------------------------------

    @property
    def takes_writes(self) -> bool:
        """Not for a while after one has failed: the disk is full, or the folder cannot be written."""
        return time.monotonic() >= self._retry_at

    def write(self, ids: Sequence[int], binding: bytes, first: int, contents: Sequence[Bytes]) -> bool:
        """Whole pages of these tokens, those from page `first` on; `contents` of each tensor [pages, bytes]."""
        names = [b"", *self.digests(ids, binding)]
        held = tuple(map(int, ids[first * PAGE : (first + len(contents[0])) * PAGE]))
        header = Header(binding.hex(), names[first].hex(), first, held, self.tensors, checksums(contents))
        return self._write(self._path(names[first + 1]), header, contents)

    def write_state(self, ids: Sequence[int], binding: bytes, contents: Sequence[Bytes]) -> bool:
        """The states after these tokens, which are whole pages; `contents` of each tensor [1, bytes]."""
        *_, parent, name = [b"", *self.digests(ids, binding)]
        held = tuple(map(int, ids[-PAGE:]))
        place = (binding.hex(), parent.hex(), len(ids) // PAGE - 1, held)
        return self._write(self._path(name, STATES), Header(*place, self.states, checksums(contents), STATES), contents)

    def _write(self, path: Path, header: Header, contents: Sequence[Bytes]) -> bool:
        try:
            if not self._make_room(len(header_bytes(header)) + header.data_bytes):
                return False
            size = write_record(path, (header, contents))
        except (OSError, MemoryError) as problem:
            self.note_failure(problem)
            return False
        with self._lock:
            self.written_bytes += size
            self.used_bytes += size
        return True

    def note_failure(self, problem: BaseException) -> None:
        """Something could not be written."""
        if not self.failed_writes:
            _log.warning("%s takes no pages of the cache: %s; generations go on without", self.folder, problem)
        with self._lock:
            self.failed_writes += 1
        self._retry_at = time.monotonic() + _RETRY_SECONDS

    def _make_room(self, nbytes: int) -> bool:
        """Remove what was used least recently, until so many bytes more are within the limit."""
        if nbytes > self.limit:
            return False
        files = self._count()
        total = self.used_bytes
        for _, size, path in sorted(files):
            if total + nbytes <= self.limit:
                break
            with suppress(OSError):
                path.unlink()
                total -= size
                self.evicted += 1
        with self._lock:
            self.used_bytes = total
        return total + nbytes <= self.limit

    def _count(self) -> list[tuple[int, int, Path]]:
        """Time of use, size and path of all records, of all processes; what a process left half written is removed."""
        files = list[tuple[int, int, Path]]()
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(OSError):  # another process has removed it
                    about = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(tuple(SUFFIXES.values())):
                        files.append((about.st_mtime_ns, about.st_size, Path(entry.path)))
                    elif entry.name.endswith(".tmp") and time.time() - about.st_mtime > _STALE_SECONDS:
                        os.unlink(entry.path)
        with self._lock:
            self.used_bytes = sum(size for _, size, _ in files)
        return files


def keyed(key: bytes, data: bytes) -> bytes:
    """A keyed hash."""
    return hmac.digest(key, data, "sha256")[:32]


def page_digest(binding: bytes, parent: bytes, ids: Sequence[int]) -> bytes:
    """The hash of a page: of its tokens and of the pages before it."""
    data = parent + np.asarray(ids, np.uint32).tobytes()
    return hashlib.blake2b(data, digest_size=_DIGEST, key=binding).digest()


def read_salt(folder: Path) -> bytes:
    """The secret of a folder, with which keys of clients are hashed. Made by the first process that looks for it."""
    path, made = folder / _SALT, secrets.token_bytes(_SALT_BYTES)
    for _ in range(20):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            with suppress(OSError):
                known = path.read_bytes()
                if len(known) == _SALT_BYTES:
                    return known
            time.sleep(0.05)  # another process writes it
            continue
        except OSError:  # it cannot be written: what is found in it is of no key
            return made
        with suppress(OSError), open(descriptor, "wb") as file:
            file.write(made)
        return made
    with suppress(OSError):  # a process that was killed left it half written
        path.unlink()
    return made
