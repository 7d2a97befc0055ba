"""`PageTransfer`: contents of cached pages from a device to the host and back, a few at a time, beside its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ..errors import DeviceError
from ..graph.batch import PAGE
from ..runtime.page_records import Bytes
from ..runtime.prefix_cache import PrefixCache
from ..runtime.runner import Runner

RECORD_BYTES = 16 << 20  # written at once: several threads read a conversation, and a bad file loses little of it
_COPY_BYTES = 4 << 20  # read back at once: a fifth of a millisecond of a GPU's link


def page_tensors(runner: Runner) -> tuple[tuple[str, int], ...]:
    """The tensors of a page in a record. Of a model without keys and values, which has states alone, it is a byte."""
    return runner.page_tensors or (("no keys", 1),)


@dataclass(frozen=True)
class PageTransfer:
    """Between the pages of a runner's prefix cache and arrays, of each tensor [pages, bytes]."""

    runner: Runner
    cache: PrefixCache

    @property
    def pages_at_once(self) -> int:
        """How many make a record."""
        return max(1, RECORD_BYTES // max(1, self.runner.page_bytes))

    def read(self, find: Callable[[], Sequence[int]]) -> list[Bytes] | None:
        """The contents of the cached pages that `find` gives, with the lock. None: there are none, or a step failed."""
        runner, cache = self.runner, self.cache
        with runner.lock:
            age, pages = cache.age, list(find())
            if not runner.page_tensors:
                return [np.zeros((len(pages), 1), np.uint8)] if pages else None
            runner.pool.retain(pages)
        try:
            at_once = max(1, _COPY_BYTES // max(1, runner.page_bytes))
            parts = [runner.read_pages(pages[i : i + at_once])() for i in range(0, len(pages), at_once)]
        finally:
            with runner.lock:
                runner.pool.release(reversed(pages))
        if not parts or cache.age != age:  # nobody knows what is in pages after an error
            return None
        return [np.concatenate(tensor) for tensor in zip(*parts, strict=True)]

    def read_state(self, find: Callable[[], int | None]) -> list[Bytes] | None:
        """The row of the states that `find` gives, with the lock: of each tensor [1, bytes]. None as for `read`."""
        runner, cache = self.runner, self.cache
        with runner.lock:
            age, row = cache.age, find()
            if row is None:
                return None
            runner.states.retain(row)
        contents = list[Bytes]()
        try:
            for tensors in self._state_parts():
                contents += runner.read_state(row, tensors)()
        finally:
            with runner.lock:
                runner.states.release(row)
        return contents if cache.age == age else None

    def write_state(self, ids: Sequence[int], client: str | None, contents: Sequence[Bytes]) -> bool:
        """States into a snapshot after these tokens, whose pages are cached. False: they are not, or there is no room.

        Whole pages of tokens. Nobody finds the row before all of it is written.
        """
        runner, cache = self.runner, self.cache
        with runner.lock:
            age, row = cache.age, runner.take_snapshot()
        if row is None:
            return False
        snapshots = {len(ids): row}
        try:
            at = 0
            for tensors in self._state_parts():
                runner.write_state(row, tensors, contents[at : at + len(tensors)])()
                at += len(tensors)
            with runner.lock:
                pages = cache.pages_of(ids, client)
                if cache.age == age and len(pages) * PAGE == len(ids):
                    cache.insert(ids, pages, len(ids), client, snapshots=snapshots)
            return not snapshots
        finally:
            with runner.lock:
                for left in snapshots.values():
                    runner.states.release(left)

    def _state_parts(self) -> Iterator[Sequence[tuple[str, int]]]:
        """The tensors of a state, a few at a time: steps wait no longer for them than for pages."""
        part, nbytes = list[tuple[str, int]](), 0
        for tensor in self.runner.state_tensors:
            if part and nbytes + tensor[1] > _COPY_BYTES:
                yield part
                part, nbytes = [], 0
            part, nbytes = [*part, tensor], nbytes + tensor[1]
        if part:
            yield part

    def write(
        self, ids: Sequence[int], client: str | None, known: int, count: int, contents: Iterable[Sequence[Bytes]]
    ) -> int:
        """Contents of `count` pages into the prefix cache of a client, some at a time. How many came: there may be no
        room for all.

        They are those of these tokens, but for the first `known`, which were cached a moment ago.
        """
        runner, cache = self.runner, self.cache
        with runner.lock:
            age, pages = cache.age, cache.pages_of(ids, client)[:known]
            runner.pool.retain(pages)
            with suppress(DeviceError, MemoryError):
                runner.make_room(count)  # at once: growing takes time, each time
        arrived: Callable[[], object] = int
        try:
            for part in contents if len(pages) == known else ():
                with runner.lock:
                    if cache.age != age:
                        break
                    try:
                        taken = runner.take_pages(len(part[0]))
                    except (DeviceError, MemoryError):
                        break
                    pages += taken  # which are given back in any case
                    written = runner.write_pages(taken, part if runner.page_tensors else ())
                    cache.insert(ids, pages, min(len(ids), len(pages) * PAGE), client)
                arrived()  # of the part before: one is on its way while the next is read
                arrived = written
            return len(pages) - known
        finally:
            with runner.lock:
                runner.pool.release(reversed(pages))
