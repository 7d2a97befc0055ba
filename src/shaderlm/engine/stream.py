"""`Stream` and `AsyncStream`: text as it is generated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

from ..errors import ShaderlmError
from .completion import Completion
from .handle import Handle


class _TextOfHandle:
    """What both kinds of streams share."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """Tokens of the prompt that have been submitted to the device, and all of them. For progress bars."""
        return self._handle.prompt_progress

    @property
    def completion(self) -> Completion | None:
        """The whole generation; None until it is finished, and after an error."""
        return self._handle.completion

    def close(self) -> None:
        """Stop before the next step."""
        self._handle.cancel()

    def __del__(self) -> None:
        with suppress(Exception):  # at exit, what it uses may be gone
            self._handle.cancel()


class Stream(_TextOfHandle, Iterator[str]):
    """Text as it is generated, in deltas of whole characters. After the last one, `completion` has all of it.

    Close it (or leave a `with` block) to stop early. Any thread may close it, also while another one reads it.
    """

    def __next__(self) -> str:
        delta = self._handle.next_text()
        if delta is None:
            raise StopIteration
        return delta

    def close(self) -> None:
        """Stop: now, or after the token that is awaited."""
        self._handle.cancel()
        self._handle.wait_for_end()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(_TextOfHandle, AsyncIterator[str]):
    """The same for asyncio: `async for delta in stream`. Leave an `async with` block, or call `close`, to stop."""

    async def __anext__(self) -> str:
        delta = await self._handle.anext_text()
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is not None:  # a task that is cancelled does not wait
            return
        with suppress(ShaderlmError):  # whoever reads it is told
            await self._handle.aresult()
