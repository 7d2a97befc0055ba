"""Requests and results of a batch as Parquet: a file, or a folder of files. Comes with the extra `ray`.

Requests have the columns custom_id, method, url and body, which is JSON or a struct. Results are a folder of parts,
each written whole or not at all: what a killed run has not written runs again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import atomic_write
from ..install import install_command
from ..server.batch_ids import request_id
from .batch_files import Line, RequestFile, Results, result_of

PARQUET = ".parquet"
PART_ROWS = 1000
_COLUMNS = ("custom_id", "method", "url", "body")


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"Parquet needs the package pyarrow: {install_command('ray')}") from None
    return parquet


@contextmanager
def parquet_requests(path: str) -> Iterator[RequestFile]:
    """The requests of a file or a folder."""
    parquet = _parquet()
    try:
        rows = parquet.read_table(path, columns=[*_COLUMNS]).to_pylist()
    except Exception as problem:  # pyarrow has its own kinds
        raise InputError(f"cannot read {path}: {str(problem).splitlines()[0]}") from None
    yield ParquetRequests(rows, path)


class ParquetRequests(RequestFile):
    """Requests that are in memory."""

    def __init__(self, rows: list[dict[str, Any]], name: str) -> None:
        self.name, self.models = name, {}
        self._rows = [_request(row, number, name) for number, row in enumerate(rows, 1)]
        ids = [each["custom_id"] for each in self._rows]
        if len({*ids}) < len(ids):
            twice = next(each for number, each in enumerate(ids) if each in ids[:number])
            raise InputError(f"{name} has the custom_id {twice!r} twice. Nothing was run")
        if not ids:
            raise InputError(f"{name} has no requests")
        self.lines = [Line(n, n - 1, each["custom_id"], request_id(each)) for n, each in enumerate(self._rows, 1)]

    def read(self, line: Line) -> dict[str, Any]:
        """A request."""
        return self._rows[line.offset]


def _request(row: dict[str, Any], number: int, name: str) -> dict[str, Any]:
    if not isinstance(row["custom_id"], str) or not row["custom_id"]:
        raise InputError(f"{name} row {number} must have a custom_id, a text; got {row['custom_id']!r}")
    body = row["body"]
    if isinstance(body, (str, bytes)):
        try:
            body = json.loads(body)
        except ValueError as problem:
            raise InputError(f"{name} row {number}: the body must be JSON: {problem}. Nothing was run") from None
    elif isinstance(body, dict):  # a struct has every field of every row
        body = {key: value for key, value in body.items() if value is not None}
    return {**row, "body": body}


class ParquetResults(Results):
    """A folder of parts. One run writes at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._arrow, self._folder = _parquet(), folder
        self.name, self.hint = str(folder), "; the same command goes on"
        self._waiting: list[tuple[str, str, bool, str]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as problem:
            raise InputError(f"cannot write {folder}: {problem.strerror}; it must be a folder") from None
        with suppress(ImportError):  # Windows
            import fcntl

            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise InputError(f"{folder} is being written by another run; wait for it, or give another -o") from None
        for part in self._parts():
            for row in self._arrow.read_table(part).to_pylist():
                self._note(row["custom_id"], row["id"], row["failed"], row["result"])

    def add(self, custom_id: str, line: bytes, *, failed: bool) -> None:
        """Append a result. It is in the folder after the next `sync`, or when there are many."""
        text = line.decode()
        request = json.loads(text)["id"]
        self._note(custom_id, request, failed, text)
        self._waiting.append((custom_id, request, failed, text))
        if len(self._waiting) >= PART_ROWS:
            self.sync()

    def _note(self, custom_id: str, request: str, failed: bool, text: str) -> None:
        self.ids[custom_id] = request
        if failed:
            self.failed.add(custom_id)
        elif self.model is None:
            result = result_of(text.encode())
            self.model = None if result is None else result.model

    def sync(self) -> None:
        """Write what waits, as one part."""
        if self._waiting:
            self._write_part(self._waiting)
            self._waiting = []

    def drop_failed(self) -> None:
        """Take errors out of the folder: a part at a time."""
        for part in self._parts():
            rows = self._arrow.read_table(part).to_pylist()
            keep = [(row["custom_id"], row["id"], False, row["result"]) for row in rows if not row["failed"]]
            if len(keep) < len(rows):
                if keep:
                    self._write_part(keep, part)
                else:
                    part.unlink()
        for custom_id in self.failed:
            del self.ids[custom_id]
        self.failed.clear()

    def close(self) -> None:
        """Write what waits, and no more."""
        self.sync()
        os.close(self._lock)
        with suppress(OSError):
            (self._folder / ".lock").unlink()

    def _parts(self) -> list[Path]:
        return sorted(self._folder.glob(f"part-*{PARQUET}"))

    def _write_part(self, rows: list[tuple[str, str, bool, str]], path: Path | None = None) -> None:
        import pyarrow

        columns = dict(zip(("custom_id", "id", "failed", "result"), map(list, zip(*rows, strict=True)), strict=True))
        if path is None:
            numbers = [int(part.stem.removeprefix("part-")) for part in self._parts()]
            path = self._folder / f"part-{max(numbers, default=-1) + 1:06d}{PARQUET}"
        with self._writing(), atomic_write(path) as file:
            self._arrow.write_table(pyarrow.table(columns), file)
