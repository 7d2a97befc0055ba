"""How long a conversation takes that is on disk: from the request to its first token, after a restart."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..engine import LanguageModel
from ..engine.disk_pages import READERS
from ..errors import DeviceError, InputError
from ..graph.batch import PAGE

LIMIT = 1 << 40  # bytes: all of a measurement is kept


@dataclass(frozen=True)
class Restored:
    """Seconds from a request to its first token, and bytes of what is on disk."""

    model: str
    device: str
    cache: str
    tokens: int
    restored_tokens: int
    files: int
    nbytes: int
    cold: bool
    computed: float
    first: float  # after a restart: the pool grows, too
    restored: tuple[float, ...]
    read: tuple[float, ...]  # of it: reading and checking alone, by as many threads

    @property
    def median(self) -> float:
        """Of the restores with a pool that is large enough."""
        return statistics.median(self.restored)


def measure(
    load: Callable[[], LanguageModel],
    folder: Path,
    tokens: int,
    repetitions: int,
    *,
    cold: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Restored:
    """Compute a prompt and leave it in a folder, load the model again, and restore it.

    cold: its files are not in the memory of the system. The first token must be the same each time.
    """
    say("the prompt, computed")
    with _opened(load, folder) as model:
        context, vocabulary = model.config.context, model.config.vocabulary
        if not 2 * PAGE <= tokens < context:
            raise InputError(f"a restore is measured with {2 * PAGE} to {context - 1:,} tokens, got {tokens:,}")
        ids = [int(i) for i in np.random.default_rng(0).integers(0, vocabulary, tokens)]
        _first_token(model, ids[::-1], keep=False)  # clocks are up, and the pool is large enough
        token, computed = _first_token(model, ids)
    files = list(folder.glob("*.pages"))
    nbytes = sum(path.stat().st_size for path in files)
    restored, read = list[float](), list[float]()
    with _opened(load, folder) as model:
        _first_token(model, ids[: PAGE // 2])
        for i in range(1 + repetitions):
            say(f"restore {i + 1} of {1 + repetitions}")
            if cold:
                _drop(files)
            found, seconds = _first_token(model, ids)
            if found != token:
                raise DeviceError(f"the first token after a restore is {found}, computed it was {token}")
            restored.append(seconds)
            model.engine.clear_cache()
        disk = model.engine.stats().disk
        assert disk is not None
        for _ in range(repetitions):
            if cold:
                _drop(files)
            read.append(_read(model, ids))
        report = model.report
        return Restored(
            report.name,
            report.device,
            report.cache,
            tokens,
            disk.hits // (1 + repetitions),
            len(files),
            nbytes,
            cold,
            computed,
            restored[0],
            tuple(restored[1:]),
            tuple(read),
        )


@contextmanager
def _opened(load: Callable[[], LanguageModel], folder: Path) -> Iterator[LanguageModel]:
    with load() as model:
        model.use_cache_dir(folder, LIMIT)
        model.runner.warm_up()
        yield model


def _first_token(model: LanguageModel, ids: list[int], *, keep: bool = True) -> tuple[int, float]:
    """The token that follows a prompt, and the seconds until it is there. `keep`: it stays in the cache."""
    request = replace(model.request(ids, max_tokens=1, ignore_eos=True), keep_cache=keep)
    began = time.perf_counter()
    completion = model.engine.submit(request).result()
    seconds = time.perf_counter() - began
    assert completion is not None
    return completion.ids[0], seconds


def _read(model: LanguageModel, ids: list[int]) -> float:
    """Seconds to find, read and check what is on disk of a prompt, without a device."""
    disk = model.engine.disk
    assert disk is not None
    began = time.perf_counter()
    stored = disk.find(ids[: (len(ids) - 1) // PAGE * PAGE], disk.client_binding(None))
    with ThreadPoolExecutor(READERS) as pool:
        whole = all(each is not None for each in pool.map(disk.read, stored))
    seconds = time.perf_counter() - began
    if not whole:
        raise DeviceError("a file was not as it was written")
    return seconds


def _drop(files: list[Path]) -> None:
    """Let the system forget files: the next read comes from the disk. Not every system can."""
    if not hasattr(os, "posix_fadvise"):
        raise InputError("this system does not let files be dropped from its memory; leave out --cold")
    for path in files:
        with suppress(OSError), path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def lines(result: Restored) -> list[str]:
    """The result in a few lines."""
    from ..gpu.caps import size

    files = f"{result.restored_tokens:,} of them in {result.files} files, {size(result.nbytes)}"
    what = f"{result.tokens:,} tokens, {files}"
    median, read = 1000 * result.median, 1000 * statistics.median(result.read)
    spread = f"{1000 * min(result.restored):.1f} to {1000 * max(result.restored):.1f}"
    where = "the disk" if result.cold else "the system's memory"
    rate = result.nbytes / statistics.median(result.read) / 1e9
    return [
        f"{result.model} on {result.device}, cache {result.cache}: {what}",
        f"computed            {1000 * result.computed:9.1f} ms   to the first token",
        f"restored, first     {1000 * result.first:9.1f} ms   after a restart: the pool grows",
        f"restored            {median:9.1f} ms   median of {len(result.restored)} ({spread})",
        f"  read and checked  {read:9.1f} ms   {rate:.1f} GB/s from {where}",
    ]
