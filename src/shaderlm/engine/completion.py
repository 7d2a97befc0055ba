"""What a generation returns: `Completion`, text with its tokens and timing; `Stream`, text as it is generated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..errors import ShaderlmError
from ..text import ChatFormat


class TokenLogprob(NamedTuple):
    """Log probability of the sampled token, and the most likely tokens, best first."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Timing:
    """Seconds until the first token (the prompt is read), and for all the others."""

    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    decoded: int = 0  # tokens after the first
    queue_seconds: float = 0.0  # before any of it

    @property
    def tokens_per_second(self) -> float:
        """Decode speed; 0 where nothing was decoded."""
        return self.decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0


class Completion(str):
    """Generated text: a str with its tokens, the reason why it ended, and its timing.

    finish_reason is "stop" (the model ended its turn, or a stop string came), "length" (max_tokens, a full context, or
    a stop string within JSON or another form that was asked for), "closed" (the stream was closed before either) or
    "deadline" (its time was over).
    """

    ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    timing: Timing
    chat: ChatFormat | None = None  # of an answer in a chat

    @property
    def message(self) -> dict[str, Any]:
        """As a message in OpenAI's form, to be appended to the conversation: role, content, and where there is any,
        reasoning_content and tool_calls. `content` is None where there are only calls; a call's id is its number.
        """
        found = (self.chat or ChatFormat()).message(self, self.finish_reason)
        if "tool_calls" in found:
            found["tool_calls"] = [{"id": f"call_{i}", **call} for i, call in enumerate(found["tool_calls"])]
        return found

    @classmethod
    def of(
        cls,
        text: str,
        ids: list[int],
        prompt_ids: list[int],
        finish_reason: str,
        logprobs: list[TokenLogprob] | None,
        timing: Timing,
    ) -> Completion:
        """Text with everything that belongs to it."""
        made = cls(text)
        made.ids, made.prompt_ids, made.finish_reason = ids, prompt_ids, finish_reason
        made.logprobs, made.timing = logprobs, timing
        return made


class Generation(Protocol):
    """What a stream reads: `engine.handle.Handle`."""

    completion: Completion | None

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """Tokens of the prompt that were submitted, and all of them."""
        ...

    def next_text(self) -> str | None:
        """More text; None after the last."""
        ...

    async def anext_text(self) -> str | None:
        """The same in asyncio."""
        ...

    def cancel(self) -> None:
        """End it early."""
        ...

    def wait_for_end(self) -> None:
        """Until it has ended, where the engine's own thread ends it."""
        ...

    async def aresult(self) -> Completion | None:
        """Read to the end, in asyncio."""
        ...


class Stream(Iterator[str]):
    """Text as it is generated, in deltas of whole characters. After the last one, `completion` has all of it.

    Close it (or leave a `with` block) to stop early. Any thread may close it, also while another one reads it.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._next_text = generation.next_text

    def __next__(self) -> str:
        delta = self._next_text()
        if delta is None:
            raise StopIteration
        return delta

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """Tokens of the prompt that have been submitted to the device, and all of them. For progress bars."""
        return self._generation.prompt_progress

    @property
    def completion(self) -> Completion | None:
        """The whole generation; None until it is finished, and after an error."""
        return self._generation.completion

    def close(self) -> None:
        """Stop: now, or after the token that is awaited."""
        self._generation.cancel()
        self._generation.wait_for_end()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # at exit, what it uses may be gone
            self._generation.cancel()


class AsyncStream(AsyncIterator[str]):
    """The same for asyncio: `async for delta in stream`. Leave an `async with` block, or call `close`, to stop."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def __anext__(self) -> str:
        delta = await self._generation.anext_text()
        if delta is None:
            raise StopAsyncIteration
        return delta

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """Tokens of the prompt that have been submitted to the device, and all of them."""
        return self._generation.prompt_progress

    @property
    def completion(self) -> Completion | None:
        """The whole generation; None until it is finished, and after an error."""
        return self._generation.completion

    def close(self) -> None:
        """Stop before the next step."""
        self._generation.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is not None:  # a task that is cancelled does not wait
            return
        with suppress(ShaderlmError):  # whoever reads it is told
            await self._generation.aresult()

    def __del__(self) -> None:
        with suppress(Exception):  # at exit, what it uses may be gone
            self.close()
