"""Requests and results of a batch as Parquet: a file, or a folder of files. Comes with the extra `ray`.

Requests have the columns custom_id, method, url and body, which is JSON or a struct. Results are a folder of parts,
each written whole or not at all. Results that are in no part yet are in a file of lines in that folder, so that a kill
loses none of them, and parts are few.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import atomic_write
from ..install import install_command
from ..ray.rows import request_of
from .batch_files import Line, Requests, ResultFile, result_of

PARQUET = ".parquet"
PART_BYTES = 64 << 20  # of results as lines
_COLUMNS = ("custom_id", "method", "url", "body")
_PART = ("custom_id", "id", "failed", "result")
_ROWS = 1024  # that are objects of Python at once
_NEWEST = ".newest.jsonl"  # readers of Parquet folders pass over such names


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"Parquet needs the package pyarrow: {install_command('ray')}") from None
    return parquet


def _read(path: str | Path, columns: tuple[str, ...]) -> Any:
    """Columns of a file or a folder, as an Arrow table."""
    try:
        return _parquet().read_table(path, columns=[*columns])
    except FileNotFoundError:
        raise InputError(f"cannot read {path}: No such file or directory") from None
    except InputError:
        raise
    except Exception as problem:  # pyarrow has its own kinds
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise InputError(f"cannot read {path}, which must have the columns {', '.join(columns)}: {reason}") from None


@contextmanager
def parquet_requests(path: str) -> Iterator[ParquetRequests]:
    """The requests of a file or a folder."""
    yield ParquetRequests(_read(path, _COLUMNS), path)


class ParquetRequests(Requests[dict[str, Any]]):
    """Requests that are in memory, as an Arrow table."""

    def __init__(self, table: Any, name: str) -> None:
        self._table = table
        super().__init__(name, "row")

    def read(self, line: Line) -> dict[str, Any]:
        """A request. Only its `custom_id` has been checked."""
        return self._parse(self._table.slice(line.offset, 1).to_pylist()[0])

    def _texts(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        rows = (row for batch in self._table.to_batches(_ROWS) for row in batch.to_pylist())
        yield from ((number, number - 1, row) for number, row in enumerate(rows, 1))

    def _parse(self, text: dict[str, Any]) -> dict[str, Any]:
        return request_of(text)


class ParquetResults(ResultFile):
    """A folder of parts, and the file of what is in none yet. One run writes at a time."""

    def __init__(self, folder: Path) -> None:
        _parquet()
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise InputError(f"cannot write {folder}: {problem.strerror}; it must be a folder") from None
        super().__init__(folder / _NEWEST, str(folder))
        try:
            self._read_parts()
        except BaseException:
            os.close(self._fd)
            raise

    def _read_parts(self) -> None:
        """What they hold. The file's results may be in a part already: the run before was killed in between."""
        newest, parts = {*self.ids}, set[str]()
        for part in self._parts():
            for row in _read(part, ("custom_id", "id", "failed")).to_pylist():
                parts.add(row["custom_id"])
                self.ids[row["custom_id"]] = row["id"]
                if row["failed"]:
                    self.failed.add(row["custom_id"])
            if self.model is None:
                self.model = _model(part)
        if not newest.isdisjoint(parts):
            os.ftruncate(self._fd, 0)
            for custom_id in newest - parts:  # of no run of ours
                del self.ids[custom_id]
                self.failed.discard(custom_id)
        for killed in self._folder.glob(f".part-*{PARQUET}.*"):
            killed.unlink(missing_ok=True)

    def add(self, custom_id: str, line: bytes, *, failed: bool) -> None:
        """Append a result, a line of JSON."""
        super().add(custom_id, line, failed=failed)
        if os.fstat(self._fd).st_size >= PART_BYTES:
            self._write_part()

    def drop_failed(self) -> None:
        """Take errors out of the folder: a part at a time."""
        from pyarrow import compute

        for part in self._parts():
            table = _read(part, _PART)
            successes = table.filter(compute.invert(table["failed"]))
            if not len(successes):
                part.unlink()
            elif len(successes) < len(table):
                self._write_table(part, successes)
        super().drop_failed()

    def close(self) -> None:
        """Write what is in no part yet, and no more."""
        try:
            self._write_part()
            if os.name != "nt":  # while it is locked: who has opened it meanwhile sees that it is gone
                self._path.unlink(missing_ok=True)
        finally:
            super().close()
        if os.name == "nt":  # no open file is removed there
            self._path.unlink(missing_ok=True)

    def _parts(self) -> list[Path]:
        return sorted(self._folder.glob(f"part-*{PARQUET}"))

    def _write_part(self) -> None:
        """The file's results as a part, and none in the file."""
        import pyarrow

        rows = []
        with open(self._path, "rb") as file:
            for text in file:
                result = result_of(text)
                if result is not None:
                    rows.append((result.custom_id, result.id, result.failed, text.decode().rstrip("\n")))
        if rows:
            numbers = [int(part.stem.removeprefix("part-")) for part in self._parts()]
            columns = dict(zip(_PART, map(list, zip(*rows, strict=True)), strict=True))
            path = self._folder / f"part-{max(numbers, default=-1) + 1:06d}{PARQUET}"
            self._write_table(path, pyarrow.table(columns))
            os.ftruncate(self._fd, 0)

    def _write_table(self, path: Path, table: Any) -> None:
        with self._writing(), atomic_write(path) as file:
            _parquet().write_table(table, file)


def _model(part: Path) -> str | None:
    """That a result of a part names."""
    table = _read(part, ("failed", "result"))
    for row in range(len(table)):
        if not table["failed"][row].as_py():
            result = result_of(table["result"][row].as_py().encode())
            return None if result is None else result.model
    return None
