"""Requests in OpenAI's batch format through an engine, many at once: each becomes a line of a file of results."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from ..engine import Handle
from .batch_ids import request_id
from .errors import ApiError, api_error
from .prepare import prepare
from .routes import Prepared
from .served import ServedModel

# How often handles are looked at. Nobody waits for their tokens, so no thread is woken for each of them.
POLL_SECONDS = 0.01
AHEAD = 2  # requests that are prepared, for each one that runs: a sequence that ends is replaced in the same step
Key = TypeVar("Key")


class BatchResult(NamedTuple):
    """A line of JSON, and whether it is an error."""

    line: bytes
    failed: bool


@dataclass(frozen=True)
class _Job(Generic[Key]):
    """A request that runs: one handle, or several for several choices or inputs."""

    key: Key
    call: Mapping[str, Any]
    prepared: Prepared
    handles: Sequence[Handle]

    @property
    def finished(self) -> bool:
        return all(handle.finish_reason is not None for handle in self.handles)


class BatchEngine:
    """Runs requests on a served model."""

    def __init__(self, served: ServedModel) -> None:
        self._served, self._engine = served, served.model.engine

    def run(self, calls: Iterable[tuple[Key, Mapping[str, Any]]]) -> Iterator[tuple[Key, BatchResult]]:
        """Results in the order in which they come, each with the key of its request."""
        for result in self.run_or_wait(calls):
            if result is not None:
                yield result
            else:
                time.sleep(POLL_SECONDS)

    def run_or_wait(self, calls: Iterable[tuple[Key, Mapping[str, Any]]]) -> Iterator[tuple[Key, BatchResult] | None]:
        """The same, with None where nothing has come yet. A lost device is raised, and is no result of a request."""
        ahead = AHEAD * (self._engine.options.parallel or self._served.model.runner.max_outputs)
        waiting, more, running = iter(calls), True, list[_Job[Key]]()
        try:
            while more or running:
                while more and sum(len(job.handles) for job in running) < ahead:
                    pair = next(waiting, None)
                    more = pair is not None
                    if pair is not None:
                        started = self._started(*pair)
                        if isinstance(started, BatchResult):
                            yield pair[0], started
                        else:
                            running.append(started)
                looked = [(job, job.finished) for job in running]  # once: the engine goes on meanwhile
                finished = [job for job, ended in looked if ended]
                running = [job for job, ended in looked if not ended]
                for job in finished:
                    yield job.key, self._result(job)
                if self._engine.lost is not None:
                    raise self._engine.lost
                if not finished:
                    yield None
        finally:
            for job in running:
                for handle in job.handles:
                    handle.cancel()

    def _started(self, key: Key, call: Mapping[str, Any]) -> _Job[Key] | BatchResult:
        """The request on its way, or the error that it is."""
        handles: list[Handle] = []
        try:
            method, url, body = (call.get(name) for name in ("method", "url", "body"))
            if method != "POST":
                raise ApiError(405, f"method must be POST, got {method!r}", param="method")
            if not isinstance(url, str) or not isinstance(body, dict):
                raise ApiError(400, f"url must be a text and body an object, got {url!r} and {type(body).__name__}")
            prepared = prepare(self._served, url, json.dumps(body).encode())
            if prepared.stream:
                raise ApiError(400, "stream: a batch has whole answers; leave it out", param="stream")
            for request in prepared.requests:
                handles.append(self._engine.submit(request))
            return _Job(key, call, prepared, handles)
        except Exception as problem:
            for handle in handles:
                handle.cancel()
            return self._error(call, problem)

    def _result(self, job: _Job[Key]) -> BatchResult:
        try:
            for handle in job.handles:
                handle.result()
            body = job.prepared.response(job.handles)
        except Exception as problem:
            return self._error(job.call, problem)
        return _line(job.call, 200, body, None)

    def _error(self, call: Mapping[str, Any], problem: Exception) -> BatchResult:
        """There is no log: an unexpected problem is named. A lost device is raised: the request runs again later."""
        if self._engine.lost is not None:
            raise self._engine.lost
        error = api_error(problem)
        if error.status == 500:
            error = ApiError(500, f"{type(problem).__name__}: {problem}")
        return _line(call, error.status, error.body(), {"code": error.type, "message": str(error)})


def _line(call: Mapping[str, Any], status: int, body: Any, error: dict[str, str] | None) -> BatchResult:
    whole = request_id(call)
    response = {"status_code": status, "request_id": whole.removeprefix("batch_"), "body": body}
    result = {"id": whole, "custom_id": call["custom_id"], "response": response, "error": error}
    return BatchResult(msgspec.json.encode(result), error is not None)
