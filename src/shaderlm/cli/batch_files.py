"""The two files of a batch: requests that are read, and results that are appended. Knows no model.

A result is one line, appended with one write. So whatever ends a run, the file has whole results, and at most its last
line is cut off; the next run repairs that and goes on with the requests that have none. What belongs together is known
by `custom_id`, and by an id that is made from the request: a request that was changed is not taken for the old one.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

from ..errors import InputError, ShaderlmError
from ..files import atomic_write
from ..server.batch_ids import PREFIX, request_id

SHOWN = 3  # problems of a file that are told
_BEGINNING = f'{{"id":"{PREFIX}'.encode()  # of each result

Text = TypeVar("Text")


class Line(NamedTuple):
    """Where a request is in its file, and how its result will be known."""

    number: int  # from 1
    offset: int
    custom_id: str
    id: str


@contextmanager
def request_file(path: str) -> Iterator[RequestFile]:
    """The requests of a file, or of standard input for `-`."""
    try:
        file: BinaryIO
        with io.BytesIO(sys.stdin.buffer.read()) if path == "-" else open(path, "rb") as file:
            yield RequestFile(file, "standard input" if path == "-" else path)
    except OSError as problem:
        if problem.filename != path:
            raise
        raise InputError(f"cannot read {path}: {problem.strerror}") from None


class Requests(Generic[Text]):
    """The requests of a batch. Each is read again when it is needed: there may be many."""

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit = name, unit
        self.models: dict[str, int] = {}  # that requests name, and the first line of each
        self.lines = list(self._checked())
        if not self.lines:
            raise InputError(f"{self.name} has no requests; each {unit} must be one, as OpenAI's batches have it")

    def read(self, line: Line) -> dict[str, Any]:
        """A request. Only its `custom_id` has been checked."""
        raise NotImplementedError

    def _texts(self) -> Iterator[tuple[int, int, Text]]:
        """Each request as it is stored, with its number and its offset."""
        raise NotImplementedError

    def _parse(self, text: Text) -> Any:
        """It as JSON; a ValueError or RecursionError says why it is not."""
        raise NotImplementedError

    def _checked(self) -> Iterator[Line]:
        seen: dict[str, int] = {}
        problems: list[str] = []
        for number, offset, text in self._texts():
            line = self._line(number, offset, text)
            if isinstance(line, Line) and line.custom_id in seen:
                line = f"has the custom_id {line.custom_id!r} of {self.unit} {seen[line.custom_id]}"
            if isinstance(line, str):
                problems.append(f"{self.unit} {number} {line}")
            else:
                seen[line.custom_id] = number
                yield line
        if problems:
            more = f"; and {len(problems) - SHOWN:,} more" if len(problems) > SHOWN else ""
            raise InputError(f"{self.name}: {'; '.join(problems[:SHOWN])}{more}. Nothing was run")

    def _line(self, number: int, offset: int, text: Text) -> Line | str:
        """The line, or what is wrong with it."""
        try:
            request = self._parse(text)
        except (ValueError, RecursionError) as problem:
            return f"must be JSON in UTF-8: {problem}"
        custom_id = request.get("custom_id") if isinstance(request, dict) else None
        if not isinstance(custom_id, str) or not custom_id or any("\ud800" <= each <= "\udfff" for each in custom_id):
            got = f"custom_id {custom_id!r}" if isinstance(request, dict) else type(request).__name__
            return f"must be an object with a custom_id, a text; got {got}"
        body = request.get("body")
        model = body.get("model") if isinstance(body, dict) else None
        if isinstance(model, str):
            self.models.setdefault(model, number)
        return Line(number, offset, custom_id, request_id(request))


class RequestFile(Requests[bytes]):
    """The requests of a file, one in each line."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        super().__init__(name, "line")

    def read(self, line: Line) -> dict[str, Any]:
        """A request. Only its `custom_id` has been checked."""
        self._file.seek(line.offset)
        text = self._file.readline()
        checked = self._line(line.number, line.offset, text)
        if checked != line:
            raise InputError(f"{self.name} line {line.number} has changed since the batch began; run it again")
        request: dict[str, Any] = json.loads(text)
        return request

    def _texts(self) -> Iterator[tuple[int, int, bytes]]:
        offset = 0
        for number, text in enumerate(self._file, 1):
            if text.strip():
                yield number, offset, text
            offset += len(text)

    def _parse(self, text: bytes) -> Any:
        return json.loads(text)


class Results:
    """The results of a batch on standard output. `ids` and `failed` say what is in it, by custom_id."""

    name = "standard output"
    hint = ""  # what to do after a run that did not end

    def __init__(self) -> None:
        self.ids: dict[str, str] = {}
        self.failed: set[str] = set()
        self.model: str | None = None  # that a result names

    def add(self, custom_id: str, line: bytes, *, failed: bool) -> None:
        """Append a result, a line of JSON."""
        with self._writing():
            self._write(line + b"\n")
        self.ids[custom_id] = ""
        if failed:
            self.failed.add(custom_id)

    def _write(self, line: bytes) -> None:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()

    def drop_failed(self) -> None:
        """Take errors out of the results, all at once. There are none before the first is written."""

    def sync(self) -> None:
        """Have what was written survive a loss of power, where it can."""

    def close(self) -> None:
        """Write no more."""

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A problem has the name of the file."""
        try:
            yield
        except BrokenPipeError:  # who reads has seen enough
            raise
        except OSError as problem:
            written = f"{len(self.ids):,} results are written{self.hint}"
            raise ShaderlmError(f"cannot write {self.name}: {problem.strerror or problem}. {written}") from None


class ResultFile(Results):
    """The results of a batch in a file."""

    def __init__(self, path: Path, name: str = "") -> None:
        super().__init__()
        self._path, self.name, self.hint = path, name or str(path), "; the same command goes on"
        try:
            self._fd = self._opened()
            try:
                self._read()
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as problem:
            raise InputError(f"cannot write {path}: {problem.strerror}") from None

    def _write(self, line: bytes) -> None:
        unwritten = memoryview(line)
        while unwritten:
            unwritten = unwritten[os.write(self._fd, unwritten) :]

    def drop_failed(self) -> None:
        """Take errors out of the file, all at once."""
        with self._writing(), atomic_write(self._path) as successes, open(self._path, "rb") as file:
            for text in file:
                result = result_of(text)
                if result is not None and not result.failed:
                    successes.write(text)
        before, self._fd = self._fd, self._opened()
        os.close(before)
        for custom in self.failed:
            del self.ids[custom]
        self.failed.clear()

    def sync(self) -> None:
        """Have what was written survive a loss of power, too."""
        with self._writing():
            os.fsync(self._fd)

    def close(self) -> None:
        """Write no more."""
        os.close(self._fd)

    def _opened(self) -> int:
        if self._path.exists() and not self._path.is_file():
            raise InputError(f"cannot write {self._path}: it is not a file")
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
            try:
                import fcntl

                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:  # Windows, where two runs into one file are not noticed
                return fd
            except BlockingIOError:
                os.close(fd)
                raise InputError(
                    f"{self.name} is being written by another run; wait for it, or give another -o"
                ) from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self._path)):
                    return fd
            os.close(fd)  # another run had it, and has replaced or removed it since it was opened here

    def _read(self) -> None:
        whole = 0  # bytes of whole lines
        with open(self._path, "rb") as file:
            for number, text in enumerate(file, 1):
                result = result_of(text)
                ended = text.endswith(b"\n")
                if result is None and text.strip():
                    if ended or text[: len(_BEGINNING)] != _BEGINNING[: len(text)]:
                        raise InputError(
                            f"{self._path} line {number} is not the result of a request. Give another -o, or remove it"
                        )
                    os.truncate(self._path, whole)  # the run before was killed while it wrote this
                    return
                if not ended:
                    os.write(self._fd, b"\n")
                whole += len(text)
                if result is not None:
                    self.ids[result.custom_id] = result.id
                    self.model = result.model or self.model
                    if result.failed:
                        self.failed.add(result.custom_id)


class Result(NamedTuple):
    """What a line of results says."""

    custom_id: str
    id: str
    failed: bool
    model: str | None


def result_of(text: bytes) -> Result | None:
    """What a line says; None where it is not a result."""
    try:
        record = json.loads(text)
        response = record["response"]
        failed = record["error"] is not None or response["status_code"] != 200
        result = Result(record["custom_id"], record["id"], failed, None if failed else response["body"]["model"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return result if isinstance(result.custom_id, str) and isinstance(result.id, str) else None
