"""Routes that generate: what their requests have in common once they are prepared, and the streams of their answers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, Struct

from ..engine import Delta, Handle, Request
from .durations import seconds_of
from .errors import ApiError
from .generation import Progress, timings_of
from .output import new_id
from .response_store import ResponseStore
from .served import FINGERPRINT, ServedModel
from .types.common import Usage
from .types.openai import ChatChunk, CompletionResponse

encode = msgspec.json.Encoder().encode


def model_of(body: Any) -> str | None:
    """The model that a body names. Ollama has an older word for it, too."""
    return getattr(body, "model", None) or getattr(body, "name", None)


def keep_seconds(body: Any) -> float | None:
    """How long the model is wanted after the answer; None: nothing is said."""
    return seconds_of(getattr(body, "keep_alive", None))


def sse(body: Any, name: str = "") -> bytes:
    """One event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: %b\n\n" % encode(body)


class Writer(ABC):
    """Writes the events of a stream. Each method gives whole events, or nothing."""

    media_type: ClassVar[str] = "text/event-stream"

    @abstractmethod
    def delta(self, index: int, delta: Delta) -> bytes:
        """What came for one of the handles."""

    def progress(self, index: int, report: Progress) -> bytes:
        """Its prompt is being read. Not all streams say so."""
        return b""

    @abstractmethod
    def finish(self, index: int) -> bytes:
        """One of the handles is finished."""

    def end(self) -> bytes:
        """All of them are. Not all streams have a mark of it."""
        return b""

    def keep_alive(self) -> bytes:
        """What says, after a long silence, that the server is still there."""
        return b": waiting\n\n"

    def error(self, problem: ApiError) -> bytes:
        """The stream ends with an error."""
        return sse(problem.body(), "error")


@dataclass(frozen=True)
class Endpoint:
    """One route: what answers it, and what the OpenAPI document says about it."""

    path: str
    summary: str
    body: Any = None  # the type of the request's body
    response: Any = None  # of a whole answer; None: text
    events: tuple[Any, ...] = ()  # of a stream's events; none: it has no stream
    method: str = "POST"
    api: str = "llama-server"
    done: bool = False  # does a stream end with [DONE]?
    errors: tuple[int, ...] = ()  # beside those that every route has
    media_type: str = "application/json"
    parameters: tuple[str, ...] = ()
    handler: Any = None  # a function of the service and the HTTP request
    aliases: tuple[str, ...] = ()  # other paths of it

    @property
    def paths(self) -> tuple[str, ...]:
        """Where it answers."""
        return (self.path, *self.aliases)


class Prepared(ABC):
    """A request that is decoded, checked and tokenised. The engine runs `requests`; then there is a response.

    stream: is the answer a stream? return_progress: does it say how much of the prompt is read?
    """

    route: ClassVar[Endpoint]
    reads_images: ClassVar[bool] = False  # then it is made with the `Images` of its request
    served: ServedModel
    body: Any
    requests: Sequence[Request]

    def __init__(self, served: ServedModel, body: Any, id_prefix: str = "") -> None:
        served.check_name(body.model)
        self.served, self.body = served, body
        self.stream, self.return_progress = bool(body.stream), bool(body.return_progress)
        self.id, self.created = new_id(id_prefix), int(time.time())

    def identity(self) -> dict[str, Any]:
        """What all of OpenAI's answers, and the chunks of a stream, say of themselves."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": FINGERPRINT,
        }

    @classmethod
    def recall(cls, body: Any, store: ResponseStore, client: str | None) -> Any:
        """The body with what it goes on from, of what the server keeps for this client."""
        return body

    def remember(self, body: Any, store: ResponseStore, client: str | None) -> None:  # noqa: B027 (most are not kept)
        """The answer to a body is to be kept, if it can be continued."""

    @classmethod
    def unloads(cls, body: Any) -> bool:
        """Does a request ask for nothing but that its model is closed?"""
        return False

    @classmethod
    def unloaded(cls, name: str) -> Struct:
        """The answer to it."""
        raise NotImplementedError

    @abstractmethod
    def response(self, handles: Sequence[Handle]) -> Struct | dict[str, Any] | list[Any]:
        """The whole answer, after every handle is finished."""

    def writer(self, handles: Sequence[Handle]) -> Writer:
        """What writes the answer as a stream, where there are streams."""
        raise NotImplementedError


class ChunkWriter(Writer):
    """Chunks with choices, and with usage and timings where they are asked for."""

    def __init__(
        self, prepared: Prepared, handles: Sequence[Handle], chunk_type: type[ChatChunk | CompletionResponse]
    ) -> None:
        self._prepared, self._handles, self._chunk_type = prepared, handles, chunk_type
        options = prepared.body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._with_timings = bool(prepared.body.timings_per_token)
        self._around = dict[int, tuple[bytes, bytes]]()

    def _text_chunk(self, index: int, text: str) -> bytes:
        """A chunk that has text alone. All but the text is the same each time, so it is encoded once."""
        if index not in self._around:
            mark = f"{self._prepared.id} text"  # is nowhere else
            before, _, after = self._encode_text(index, mark).partition(encode(mark))
            self._around[index] = before, after
        before, after = self._around[index]
        return before + encode(text) + after

    @abstractmethod
    def _encode_text(self, index: int, text: str) -> bytes:
        """The same, encoded as any other chunk."""

    def _chunk(self, choices: list[Any], **fields: Any) -> bytes:
        fields.setdefault("usage", None if self._with_usage else UNSET)
        return sse(self._chunk_type(**self._prepared.identity(), choices=choices, **fields))

    def progress(self, index: int, report: Progress) -> bytes:
        """A chunk that says how much of the prompt is read."""
        timings = report.timings if self._with_timings else UNSET
        return self._chunk([], prompt_progress=report.prompt, timings=timings)

    def end(self) -> bytes:
        """Usage, if it is asked for, and the end."""
        end = b"data: [DONE]\n\n"
        if not self._with_usage:
            return end
        return self._chunk([], usage=self.usage(), timings=timings_of(self._handles[0])) + end

    @abstractmethod
    def usage(self) -> Usage:
        """Tokens of all handles, after their end."""
