"""`DiskPages`: pages of the prefix cache on their way to a disk cache and back, beside the steps of an engine.

Nothing of it runs in the thread that steps, but handing over lists of tokens. Pages that are complete are copied from
the device a few at a time, by a thread that writes files; whoever steps waits for none of it. A request whose prompt
may be on disk waits, without a place in the batch, until other threads have read, checked and uploaded what there is;
then it is admitted as any other, and finds the pages in the prefix cache.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from ..errors import DeviceError, InputError
from ..graph.batch import PAGE
from ..runtime.disk_cache import DiskCache, Stored
from ..runtime.page_records import Bytes
from ..runtime.prefix_cache import PrefixCache
from ..runtime.runner import Runner
from .page_transfer import PageTransfer

_WAITING = 64  # prompts that wait to be written; then the oldest is left out
_USE_SECONDS, _USES = 60.0, 1024  # between two uses of a prompt that are noted on disk; prompts that are remembered
_FLUSH_SECONDS = 10.0  # that the end of an engine waits for what is not written yet
READERS = min(8, os.cpu_count() or 1)  # threads that read files
_AHEAD = READERS + 2  # files that are read before they are uploaded
_log = logging.getLogger("shaderlm")


@dataclass(frozen=True)
class _Job:
    """Tokens whose whole pages are in the prefix cache of a client."""

    ids: Sequence[int]
    client: str | None


class DiskPages:
    """Between the prefix cache of a runner and a disk cache.

    keys: of the clients that requests name by their places; without any all requests are of one client.
    """

    def __init__(self, runner: Runner, cache: PrefixCache, disk: DiskCache, keys: Sequence[str] = ()) -> None:
        self.disk = disk
        self._pages, self._keys = PageTransfer(runner, cache), tuple(keys)
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._used = dict[tuple[str | None, int, tuple[int, ...]], float]()  # when prompts were, by their ends
        self._writing = self._closed = False
        self._writer: threading.Thread | None = None
        self._process = os.getpid()
        self._loaders = ThreadPoolExecutor(4, "restore")
        self._readers = ThreadPoolExecutor(READERS, "read pages")

    def binding_of(self, client: str | None) -> bytes | None:
        """What the pages of a client depend on; None: it has none on disk, for nobody knows its key."""
        if client is None:
            return self.disk.client_binding(None)
        if not client.isdecimal() or int(client) >= len(self._keys):
            return None
        return self.disk.client_binding(self._keys[int(client)])

    # From the device to the disk ---------------------------------------------------------------------------

    def save(self, ids: Sequence[int], client: str | None) -> None:
        """Whole pages of these tokens are in the prefix cache. Any thread; waits for nothing."""
        if self._closed or self._process != os.getpid() or len(ids) < PAGE or not self.disk.takes_writes:
            return
        with self._wake:
            if len(self._jobs) == _WAITING:
                self._jobs.popleft()
            self._jobs.append(_Job(ids, client))
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="write pages", daemon=True)
                self._writer.start()
            self._wake.notify_all()

    def flush(self, seconds: float = _FLUSH_SECONDS) -> bool:
        """Wait until all is written that was handed over. False: time is over."""
        if self._process != os.getpid():
            return False
        with self._wake:
            return self._wake.wait_for(lambda: not self._jobs and not self._writing, seconds)

    def close(self) -> None:
        """Nothing is read or written any more; what is on its way is waited for."""
        if self._process != os.getpid():
            return
        with self._wake:
            self._closed = True
            self._jobs.clear()
            self._wake.notify_all()
        if self._writer is not None and self._writer is not threading.current_thread():
            self._writer.join()
        self._loaders.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    @property
    def has_threads(self) -> bool:
        """Does a thread of it run?"""
        return not self._closed and self._process == os.getpid()

    def _write_all(self) -> None:
        while True:
            with self._wake:
                self._writing = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                job = self._jobs.popleft()
                self._writing = True
            try:
                self._write(job)
            except (DeviceError, InputError, MemoryError) as problem:  # closed, lost, or there is no memory for a copy
                _log.debug("pages are not written: %s", problem)
            except Exception:
                _log.exception("pages of the cache are not written")

    def _write(self, job: _Job) -> None:
        binding = self.binding_of(job.client)
        if binding is None:
            return
        pages = len(job.ids) // PAGE
        stored = self.disk.find(job.ids, binding)
        first = sum(each.pages for each in stored)
        while first < pages and not self._closed:
            end = min(first + self._pages.pages_at_once, pages)
            contents = self._pages.read(partial(self._cached, job, first, end))
            if contents is None or not self.disk.write(job.ids, binding, first, contents):
                break
            first = end
        if self.disk.states:
            self._write_states(job.ids[: first * PAGE], job.client, binding)
        self.disk.touch(self.disk.find(job.ids, binding))

    def _write_states(self, ids: Sequence[int], client: str | None, binding: bytes) -> None:
        """Snapshots along these pages, which are on disk: without one nobody begins after them."""
        pages = self._pages
        with pages.runner.lock:
            depths = list(pages.cache.snapshots_of(ids, client))
        stored = self.disk.states_of(ids, binding)
        self.disk.touch(list(stored.values()))
        for depth in depths:
            if depth in stored or self._closed:
                continue
            begin = ids[: depth * PAGE]
            contents = pages.read_state(partial(self._snapshot, begin, client))
            if contents is not None and not self.disk.write_state(begin, binding, contents):
                break

    def _snapshot(self, ids: Sequence[int], client: str | None) -> int | None:
        """The row of the snapshot after these whole pages, if it is still there."""
        return self._pages.cache.snapshots_of(ids, client).get(len(ids) // PAGE)

    def _cached(self, job: _Job, first: int, end: int) -> Sequence[int]:
        """The cached pages from one to another; none where some of them are not cached any more."""
        pages = self._pages.cache.pages_of(job.ids, job.client)[first:end]
        return pages if len(pages) == end - first else ()

    # From the disk to the device ---------------------------------------------------------------------------

    def restore(self, ids: Sequence[int], client: str | None, done: Callable[[], None]) -> bool:
        """Look for pages of a prompt and put them into the prefix cache, by other threads; `done` is called then.

        False: there is nothing to look for, and `done` is not called. With `Runner.lock` held.
        """
        if self._closed or self._process != os.getpid():
            return False
        usable = (len(ids) - 1) // PAGE  # the last token must be run
        if usable <= 0:
            return False
        if self._known(ids[: usable * PAGE], client) >= usable:
            self._note_use(ids[: usable * PAGE], client)
            return False
        try:
            future = self._loaders.submit(self._restore, ids[: usable * PAGE], client)
        except RuntimeError:  # closed meanwhile
            return False
        future.add_done_callback(lambda future: done())
        return True

    def _known(self, ids: Sequence[int], client: str | None) -> int:
        """After how many whole pages of these tokens a sequence may begin. With `Runner.lock` held."""
        cache = self._pages.cache
        if self.disk.states:
            return max(cache.snapshots_of(ids, client), default=0)
        return len(cache.pages_of(ids, client))

    def _note_use(self, ids: Sequence[int], client: str | None) -> None:
        """These were found in memory: now and then their files are used, too, and written if they are gone."""
        key, now = (client, len(ids), tuple(ids[-PAGE:])), time.monotonic()
        if now - self._used.get(key, float("-inf")) >= _USE_SECONDS:
            if len(self._used) >= _USES:
                self._used.clear()
            self._used[key] = now
            self.save(ids, client)

    def _restore(self, ids: Sequence[int], client: str | None) -> int:
        """The same, now. How many tokens came."""
        try:
            return self.load(ids, client)
        except (DeviceError, InputError, MemoryError) as problem:  # closed, lost, or no room for the pages
            _log.debug("pages are not restored: %s", problem)
        except Exception:
            _log.exception("pages of the cache are not restored")
        return 0

    def load(self, ids: Sequence[int], client: str | None) -> int:
        """Put what is on disk of these whole pages into the prefix cache of a client; how many tokens came."""
        binding, pages = self.binding_of(client), self._pages
        if binding is None:
            return 0
        with pages.runner.lock:
            known = len(pages.cache.pages_of(ids, client))
        stored = self.disk.find(ids, binding, known)
        if known and not stored:  # what is cached may end within a record
            stored = [each for each in self.disk.find(ids, binding) if each.header.first + each.pages > known]
            known = stored[0].header.first if stored else known
        state = None
        if self.disk.states:
            state = self._last_state(ids, client, binding, known + sum(each.pages for each in stored))
            if state is None:
                return 0
            end = state.header.first + 1
            stored, ids = _first_pages(stored, end - known), ids[: end * PAGE]
            known = min(known, end)
        if not stored and state is None:
            return 0
        count = sum(each.pages for each in stored)
        tokens = pages.write(ids, client, known, count, self._contents(stored)) * PAGE if stored else 0
        if state is not None:
            contents = self.disk.read(state) if tokens == count * PAGE else None
            if contents is None or not pages.write_state(ids, client, contents):
                return 0
            self.disk.touch([state])
            tokens = len(ids)
        self.disk.touch(stored)
        self.disk.hits += tokens
        return tokens

    def _last_state(self, ids: Sequence[int], client: str | None, binding: bytes, pages: int) -> Stored | None:
        """The record of the longest of these beginnings that has one, among so many pages; None if memory has it."""
        states = self.disk.states_of(ids[: pages * PAGE], binding)
        with self._pages.runner.lock:
            known = self._known(ids, client)
        deepest = max(states, default=0)
        return states[deepest] if deepest > known else None

    def forget(self, ids: Sequence[int], client: str | None) -> None:
        """Remove what is on disk of these tokens."""
        binding = self.binding_of(client)
        if binding is not None:
            self.flush()
            self.disk.remove([*self.disk.find(ids, binding), *self.disk.states_of(ids, binding).values()])

    def _contents(self, stored: Sequence[Stored]) -> Iterator[list[Bytes]]:
        """What records hold, in their order, until one is not as it was written. Some are read ahead."""
        waiting, reading = deque(stored), deque[Future[list[Bytes] | None]]()
        try:
            while waiting or reading:
                while waiting and len(reading) < _AHEAD:
                    reading.append(self._readers.submit(self.disk.read, waiting.popleft()))
                contents = reading.popleft().result()
                if contents is None or self._closed:
                    return
                yield contents
        finally:
            for future in reading:
                future.cancel()


def _first_pages(stored: Sequence[Stored], pages: int) -> list[Stored]:
    """As many pages of records, from the first on."""
    first = list[Stored]()
    for each in stored:
        if pages > 0:
            first.append(replace(each, pages=min(each.pages, pages)))
        pages -= each.pages
    return first
