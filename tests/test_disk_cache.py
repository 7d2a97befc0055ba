"""Pages of the prefix cache on disk: found again, or ignored, and never wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm import load
from shaderlm.engine import EngineOptions, LanguageModel, disk_pages
from shaderlm.engine.loading import load_with
from shaderlm.errors import InputError
from shaderlm.gpu import Device
from shaderlm.graph.batch import PAGE
from shaderlm.runtime import disk_cache, page_records
from shaderlm.runtime.disk_cache import DiskCache, DiskStats, read_salt

from .tiny_models import write_tiny_llama

IDS = [3 + i * 7 % 200 for i in range(3 * PAGE + 20)]
TENSORS = (("a", 32), ("b", 8))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("disk") / "tiny.gguf", context=1024)


def cache(folder: Path, *, limit: int = 1 << 20, binding: bytes = b"model") -> DiskCache:
    return DiskCache(folder, limit, binding, TENSORS)


def contents(pages: int, seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (pages, nbytes), np.uint8) for _, nbytes in TENSORS]


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pages"))


def found(made: DiskCache, ids: list[int], client: str | None = None) -> int:
    """Tokens that can be read, as an engine would read them."""
    tokens = 0
    for stored in made.find(ids, made.client_binding(client)):
        if made.read(stored) is None:
            break
        tokens += stored.pages * PAGE
    return tokens


# The folder ----------------------------------------------------------------------------------------------


def test_what_was_written_is_found(tmp_path: Path) -> None:
    """By another process too, to the page where prompts part; a part of a record is read and checked by itself."""
    made = cache(tmp_path / "new" / "folder")
    binding, data = made.client_binding(None), contents(3)
    assert made.write(IDS, binding, 0, [each[:2] for each in data])
    assert made.write(IDS, binding, 2, [each[2:] for each in data])
    other = cache(tmp_path / "new" / "folder")
    stored = other.find(IDS, other.client_binding(None))
    assert [each.pages for each in stored] == [2, 1]
    read = [np.concatenate(parts) for parts in zip(*(other.read(each) for each in stored), strict=True)]
    assert all(map(np.array_equal, read, data))
    parted = [*IDS[: PAGE + 5], 0, *IDS[PAGE + 5 :]]
    (part,) = other.find(parted, other.client_binding(None))
    one = other.read(part)
    assert one is not None
    assert part.pages == 1
    assert all(np.array_equal(a, b[:1]) for a, b in zip(one, data, strict=True))
    assert found(other, [0, *IDS]) == 0
    assert other.find(IDS, other.client_binding(None), 2) == stored[1:]


def test_a_page_is_found_after_all_the_pages_before_it(tmp_path: Path) -> None:
    """Two prompts that differ in their first page alone share none: keys and values depend on all tokens before."""
    made, other = cache(tmp_path), [0] * PAGE + IDS[PAGE : 3 * PAGE]
    binding = made.client_binding(None)
    assert made.write(IDS, binding, 0, contents(2))
    assert made.write(IDS, binding, 2, contents(1))
    assert made.write(other, binding, 0, contents(2, seed=1))
    assert found(made, other) == 2 * PAGE
    assert found(made, IDS) == 3 * PAGE


def test_files_are_private(tmp_path: Path) -> None:
    made = cache(tmp_path / "folder")
    assert made.write(IDS, made.client_binding("secret-key"), 0, contents(1))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "folder").iterdir()}
    assert set(modes.values()) == {0o600}
    assert len(modes) == 2, "the record, and the salt of keys"
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700
    assert all(b"secret-key" not in path.read_bytes() for path in (tmp_path / "folder").iterdir())


def test_nobody_finds_what_is_anothers(tmp_path: Path) -> None:
    """Another key, another model; the same key in a copy of the folder without its salt."""
    made = cache(tmp_path)
    assert made.write(IDS, made.client_binding("mine"), 0, contents(3))
    assert found(made, IDS, "mine") == 3 * PAGE
    assert found(made, IDS, "theirs") == found(made, IDS) == 0
    assert found(cache(tmp_path, binding=b"other"), IDS, "mine") == 0
    (tmp_path / ".salt").unlink()
    assert found(cache(tmp_path), IDS, "mine") == 0


def test_the_salt_is_made_once(tmp_path: Path) -> None:
    salt = read_salt(tmp_path)
    assert read_salt(tmp_path) == salt
    (tmp_path / ".salt").write_bytes(b"short")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: None)
        read_salt(tmp_path)
    assert len(read_salt(tmp_path)) == 32


@pytest.mark.parametrize(
    "where", ["magic", "length", "header", "first data", "last byte", "cut", "empty", "longer header"]
)
def test_a_file_that_was_changed_is_ignored_and_removed(where: str, tmp_path: Path) -> None:
    made = cache(tmp_path)
    assert made.write(IDS, made.client_binding(None), 0, contents(3))
    (path,) = records(tmp_path)
    raw = bytearray(path.read_bytes())
    at = {"magic": 0, "length": 8, "header": 100, "first data": 4096, "last byte": -1}
    if where == "cut":
        del raw[-1:]
    elif where == "empty":
        raw.clear()
    elif where == "longer header":
        raw[8:16] = (1 << 62).to_bytes(8, "little")
    else:
        raw[at[where]] ^= 1
    path.write_bytes(raw)
    assert found(made, IDS) == 0
    assert not records(tmp_path)
    assert made.stats().invalid == 1
    assert made.write(IDS, made.client_binding(None), 0, contents(3))
    assert found(made, IDS) == 3 * PAGE


def test_every_bit_of_the_data_is_checked(tmp_path: Path) -> None:
    made = cache(tmp_path)
    made.write(IDS, made.client_binding(None), 0, contents(1))
    (path,) = records(tmp_path)
    raw = path.read_bytes()
    for at in range(4096, len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        assert found(made, IDS) == 0, f"byte {at}"


def test_a_record_under_the_name_of_another_is_not_used(tmp_path: Path) -> None:
    made = cache(tmp_path)
    other = [*reversed(IDS)]
    made.write(IDS, made.client_binding(None), 0, contents(1))
    (path,) = records(tmp_path)
    raw = path.read_bytes()
    path.unlink()
    made.write(other, made.client_binding(None), 0, contents(1, seed=1))
    (path,) = records(tmp_path)
    path.write_bytes(raw)
    assert found(made, other) == 0


def test_a_record_that_does_not_belong_and_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cache(tmp_path)
    other = DiskCache(tmp_path, 1 << 20, b"model", (("a", 16),))
    other.write(IDS, other.client_binding(None), 0, [np.zeros((1, 16), np.uint8)])

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "the folder cannot be written")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert made.find(IDS, made.client_binding(None)) == []
    assert made.stats().invalid == 1


@pytest.mark.parametrize("value", ["1e999", "-1e999", "NaN", "[]", '"x"', "1" * 5000])
def test_numbers_in_a_header_that_are_none(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cache(tmp_path)
    dumps = json.dumps
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", lambda *a, **k: dumps(*a, **k).replace('"first":0', f'"first":{value}'))
        made.write(IDS, made.client_binding(None), 0, contents(1))
    assert found(made, IDS) == 0
    assert (records(tmp_path), made.stats().invalid) == ([], 1)


def test_records_of_another_format_or_kind_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cache(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(page_records, "FORMAT", 2)
        made.write(IDS, made.client_binding(None), 0, contents(1))
    assert found(made, IDS) == 0
    made.write(IDS, made.client_binding(None), 0, contents(1))
    with monkeypatch.context() as patch:
        patch.setattr(page_records, "SUFFIXES", {"other": ".other"})
        assert found(made, IDS) == 0


def test_states_lie_beside_pages(tmp_path: Path) -> None:
    """After whole pages, checked and counted like these; a record of one kind is none of the other."""
    states = (("s", 48), ("t", 16))
    made = DiskCache(tmp_path, 1 << 20, b"model", TENSORS, states)
    binding, rng = made.client_binding(None), np.random.default_rng(1)
    rows = {n: [rng.integers(0, 256, (1, nbytes), np.uint8) for _, nbytes in states] for n in (1, 3)}
    for pages, row in rows.items():
        assert made.write_state(IDS[: pages * PAGE], binding, row)
    assert made.stats().used_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.states"))
    other = DiskCache(tmp_path, 1 << 20, b"model", TENSORS, states)
    stored = other.states_of(IDS, binding)
    assert set(stored) == {1, 3}
    for pages, row in rows.items():
        read = other.read(stored[pages])
        assert read is not None
        assert all(map(np.array_equal, read, row))
    assert set(other.states_of([*IDS[: 2 * PAGE], 0, *IDS[2 * PAGE :]], binding)) == {1}
    assert not other.states_of(IDS, other.client_binding("theirs"))
    assert found(other, IDS) == 0, "states are no pages"
    path = stored[1].path
    path.rename(path.with_suffix(".pages"))
    assert found(other, IDS) == 0
    assert other.stats().invalid == 1
    raw = bytearray(stored[3].path.read_bytes())
    raw[-1] ^= 1
    stored[3].path.write_bytes(raw)
    assert other.read(stored[3]) is None
    assert not other.states_of(IDS, binding)


def test_states_are_forgotten_with_their_pages(tmp_path: Path) -> None:
    """Those of another prompt that begins alike stay."""
    made = DiskCache(tmp_path, 1 << 20, b"model", TENSORS, (("s", 48),))
    binding, row = made.client_binding(None), [np.zeros((1, 48), np.uint8)]
    other = [*IDS[:PAGE], *range(PAGE)]
    assert made.write(IDS, binding, 0, contents(3))
    assert all(made.write_state(ids, binding, row) for ids in (IDS[:PAGE], IDS[: 3 * PAGE], other))
    nothing: Any = None  # of a runner: forgetting reads none of its pages
    pages = disk_pages.DiskPages(nothing, nothing, made)
    pages.forget(IDS, None)
    pages.close()
    assert not records(tmp_path)
    assert set(made.states_of(other, binding)) == {2}
    assert len(list(tmp_path.glob("*.states"))) == 1


def test_what_was_used_least_recently_goes_first(tmp_path: Path) -> None:
    """And of a prompt its end: without the beginning nobody finds the rest."""
    one = cache(tmp_path)
    binding = one.client_binding(None)
    prompts = [[i, *IDS] for i in range(4)]
    for i, ids in enumerate(prompts[:3]):
        one.write(ids, binding, 0, contents(1, i))
        os.utime(max(records(tmp_path), key=lambda path: path.stat().st_mtime_ns), ns=(i, i * 10**9))
    size = records(tmp_path)[0].stat().st_size
    one.touch(one.find(prompts[0], binding))
    two = cache(tmp_path, limit=3 * size)
    assert two.write(prompts[3], binding, 0, contents(1, 3)), "another process has a smaller limit"
    assert [found(two, ids) > 0 for ids in prompts] == [True, False, True, True]
    assert two.stats().evicted == 1
    stored = one.find(prompts[3], binding)
    one.write(prompts[3], binding, 1, contents(1))
    stored = one.find(prompts[3], binding)
    one.touch(stored)
    times = [each.path.stat().st_mtime_ns for each in stored]
    assert times == sorted(times, reverse=True)
    assert len(times) == 2


def test_the_limit_holds(tmp_path: Path) -> None:
    made = cache(tmp_path, limit=200_000)
    for i in range(20):
        made.write([i, *IDS], made.client_binding(None), 0, contents(3, i))
        assert sum(path.stat().st_size for path in records(tmp_path)) <= 200_000
    assert made.stats().used_bytes <= 200_000
    small = cache(tmp_path, limit=10)
    assert not small.write(IDS, small.client_binding(None), 0, contents(1))
    assert records(tmp_path), "what does not fit at all pushes nothing out"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_takes_nothing(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is left alone for a while. What is there is found, and nothing is half written."""
    made = cache(tmp_path)
    made.write(IDS, made.client_binding(None), 0, contents(1))

    def fails(file: Any, data: Any) -> None:
        file.write(memoryview(data)[:10])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(page_records, "_write_all", fails)
    assert not made.write([0, *IDS], made.client_binding(None), 0, contents(1))
    assert not made.takes_writes
    assert made.stats().failed_writes == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".salt", records(tmp_path)[0].name]
    assert found(made, IDS) == PAGE
    monkeypatch.undo()
    monkeypatch.setattr(disk_cache, "_RETRY_SECONDS", 0.0)
    made.note_failure(OSError())
    assert made.takes_writes


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="cannot use the folder"):
            cache(path)


def test_what_a_dead_process_left_half_written_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.pages.1.tmp", tmp_path / ".b.pages.2.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    cache(tmp_path)
    assert not old.exists()
    assert new.exists(), "another process may be writing it"


_WRITES_FOR_EVER = """
import sys, itertools, numpy
from pathlib import Path
from shaderlm.runtime.disk_cache import DiskCache
made = DiskCache(Path(sys.argv[1]), 64 << 20, b"model", (("a", 1 << 20),))
data = [numpy.arange(4 << 20, dtype=numpy.uint32).view(numpy.uint8)[: 4 << 20].reshape(4, -1)]
print("begun", flush=True)
for i in itertools.count():
    made.write([i % 1000] * 512, made.client_binding(None), 0, data)
"""


def test_a_process_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    """Leaves whole records and half a file that nobody finds; so do two that write to one folder."""
    processes = [
        subprocess.Popen([sys.executable, "-c", _WRITES_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
        until = time.monotonic() + 60
        while len(records(tmp_path)) < 4 and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
    made = DiskCache(tmp_path, 64 << 20, b"model", (("a", 1 << 20),))
    expected = np.arange(4 << 20, dtype=np.uint32).view(np.uint8)[: 4 << 20].reshape(4, -1)
    count = 0
    for i in range(1000):
        for stored in made.find([i] * 512, made.client_binding(None)):
            read = made.read(stored)
            assert read is not None
            assert np.array_equal(read[0], expected[: stored.pages])
            count += 1
    assert count >= 4
    assert made.stats().invalid == 0


# Engines -------------------------------------------------------------------------------------------------


def opened(path: Path, folder: Path, device: Any = "numpy", **options: Any) -> LanguageModel:
    return load(path, device=device, cache_dir=folder, **options)


def disk_of(model: LanguageModel) -> DiskStats:
    stats = model.engine.stats().disk
    assert stats is not None
    return stats


def answer(model: LanguageModel, ids: list[int] = IDS, **options: Any) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt were not computed."""
    handle = model.engine.submit(model.request(ids, max_tokens=8, **options))
    completion = handle.result()
    assert completion is not None
    return completion.ids, handle.usage.cached_tokens


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_a_restart_finds_the_pages_of_a_conversation(device: str, tiny: Path, tmp_path: Path) -> None:
    """With the same tokens as without, and so does what follows the first answer."""
    plain = load(tiny, device=device)
    expected, _ = answer(plain)
    longer = [*IDS, *expected, *IDS]
    expected_longer, _ = answer(plain, longer, cache_prompt=False)
    plain.close()
    with opened(tiny, tmp_path, device) as model:
        assert answer(model) == (expected, 0)
        assert disk_of(model).hits == 0
    assert records(tmp_path), "closing waits for what is not written yet"
    with opened(tiny, tmp_path, device) as model:
        assert answer(model) == (expected, 3 * PAGE)
        assert disk_of(model).hits == 3 * PAGE
        assert answer(model)[0] == expected
        assert disk_of(model).hits == 3 * PAGE, "what is in memory is not read again"
        tokens, cached = answer(model, longer)
        assert tokens == expected_longer
        assert cached >= 3 * PAGE
    with opened(tiny, tmp_path, device) as model:
        tokens, cached = answer(model, longer)
        assert tokens == expected_longer
        assert cached == len(longer) // PAGE * PAGE
    with opened(tiny, tmp_path, device) as model:
        texts = list(model.stream(IDS, max_tokens=8))
        assert texts, "a caller that steps the engine itself waits for the disk, too"
        assert disk_of(model).hits == 3 * PAGE


def test_a_restart_of_a_deterministic_model(tiny: Path, tmp_path: Path) -> None:
    """Chunks of its prompts end at multiples of 256 tokens, and so does what it finds."""
    with opened(tiny, tmp_path, deterministic=True) as model:
        expected, cached = answer(model)
        assert cached == 0
    with opened(tiny, tmp_path, deterministic=True) as model:
        assert answer(model) == (expected, 2 * PAGE)
        assert disk_of(model).hits == 2 * PAGE


@pytest.mark.parametrize("name", ["device", "gpu"])
def test_on_a_device(name: str, tiny: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    device: Device = request.getfixturevalue(name)
    with load(tiny, device=device) as plain:
        expected, _ = answer(plain)
    with opened(tiny, tmp_path, device) as model:
        assert answer(model) == (expected, 0)
    with opened(tiny, tmp_path, device) as model:
        assert answer(model) == (expected, 3 * PAGE)
        assert disk_of(model).hits == 3 * PAGE


def test_another_model_finds_nothing(tiny: Path, tmp_path: Path) -> None:
    """Nor another format of the cache, other chunks of prompts, or a file of the same form with other weights."""
    with opened(tiny, tmp_path) as model:
        answer(model)
    other = write_tiny_llama(tmp_path / "tiny.gguf", context=1024, seed=5)
    for path, options in ((other, {}), (tiny, {"cache": "f16"}), (tiny, {"deterministic": True})):
        with load_with(path, device="numpy", cache_dir=tmp_path, **options) as model:
            assert answer(model)[1] == 0
            assert disk_of(model).hits == 0
    with opened(tiny, tmp_path, context=512) as model:
        assert disk_of(model).hits == 0
        assert answer(model)[1] == 3 * PAGE, "a shorter context changes no page"


def test_keys_have_pages_of_their_own(tiny: Path, tmp_path: Path) -> None:
    def cached(keys: tuple[str, ...], client: str | None) -> int:
        with load(tiny, device="numpy") as model:
            model.use_cache_dir(tmp_path, keys=keys)
            handle = model.engine.submit(replace(model.request(IDS, max_tokens=2), client=client))
            handle.result()
            return handle.usage.cached_tokens

    assert cached(("a", "b"), "0") == 0
    assert cached(("a", "b"), "1") == 0
    assert cached(("a", "b"), None) == 0
    assert cached(("x", "a"), "1") == 3 * PAGE, "a key is known by what it is, not by its place"
    assert cached(("x", "a"), "0") == 0
    assert cached((), None) == 3 * PAGE
    written = len(records(tmp_path))
    assert cached((), "7") == 0
    assert len(records(tmp_path)) == written, "nobody knows the key of this client"


def test_pages_that_were_changed_are_computed_again(tiny: Path, tmp_path: Path) -> None:
    with opened(tiny, tmp_path) as model:
        expected = answer(model)[0]
    for path in records(tmp_path):
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    with opened(tiny, tmp_path) as model:
        assert answer(model) == (expected, 0)
        assert disk_of(model).invalid == 1
    with opened(tiny, tmp_path) as model:
        assert answer(model) == (expected, 3 * PAGE), "they were written again"


def test_an_engine_goes_on_where_nothing_can_be_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny, device="numpy") as plain:
        expected = answer(plain)[0]

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(page_records, "_write_all", fails)
    with opened(tiny, tmp_path) as model:
        assert answer(model) == (expected, 0)
        assert answer(model)[0] == expected
        assert answer(model, [5, *IDS])[0]
    assert not records(tmp_path)
    with opened(tiny, tmp_path / "small", cache_disk=1000) as model:
        assert answer(model) == (expected, 0)
    assert not records(tmp_path / "small"), "one record is larger than the limit"


def test_two_engines_share_a_folder(tiny: Path, tmp_path: Path) -> None:
    """What one of them writes the other one finds at once."""
    with opened(tiny, tmp_path) as one, opened(tiny, tmp_path) as two:
        expected = answer(one)[0]
        pages = one.engine._disk
        assert pages is not None
        assert pages.flush()
        assert answer(two) == (expected, 3 * PAGE)
        assert disk_of(two).hits == 3 * PAGE


def test_a_pool_without_room_goes_on(tiny: Path, tmp_path: Path) -> None:
    with opened(tiny, tmp_path) as model:
        expected = answer(model)[0]
    with opened(tiny, tmp_path) as model:
        model.engine.configure(EngineOptions(cache_tokens=4 * PAGE))
        assert answer(model)[0] == expected
        assert answer(model, [5, *IDS])[0]
        assert answer(model)[0] == expected


def test_what_is_used_in_memory_stays_on_disk(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is used, too, and written again where it is gone; not for each request."""
    with opened(tiny, tmp_path) as model:
        expected = answer(model)
        pages = model.engine._disk
        assert pages is not None
        pages.flush()
        (path,) = records(tmp_path)
        path.unlink()
        assert answer(model)[0] == expected[0]
        pages.flush()
        assert records(tmp_path) == [path], "the first use that is noted"
        os.utime(path, (1, 1))
        answer(model)
        pages.flush()
        assert path.stat().st_mtime == 1, "a moment later nothing is noted"
        monkeypatch.setattr(disk_pages, "_USE_SECONDS", 0.0)
        answer(model)
        pages.flush()
        assert path.stat().st_mtime > 1


def test_a_request_that_is_cancelled_while_it_is_restored(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny, tmp_path) as model:
        answer(model)
    reading, go_on = threading.Event(), threading.Event()
    read = DiskCache.read

    def slow(self: DiskCache, stored: Any) -> Any:
        reading.set()
        assert go_on.wait(60)
        return read(self, stored)

    monkeypatch.setattr(DiskCache, "read", slow)
    with opened(tiny, tmp_path) as model:
        handle = model.engine.submit(model.request(IDS, max_tokens=8))
        assert reading.wait(60)
        other = model.engine.submit(model.request(IDS[:20], max_tokens=8))
        assert other.result() is not None, "others do not wait for it"
        handle.cancel()
        handle.result()
        assert handle.finish_reason == "closed"
        go_on.set()
        assert answer(model)[1] >= 0
    assert not model.engine._inbox.restoring


def test_wrong_arguments(tiny: Path, tmp_path: Path) -> None:
    for limit in (0, -1, True, "8G"):
        with pytest.raises(InputError, match="cache_disk must be a number of bytes"):
            load(tiny, device="numpy", cache_dir=tmp_path, cache_disk=limit)  # type: ignore[arg-type]
    with opened(tiny, tmp_path) as model, pytest.raises(InputError, match="already"):
        model.use_cache_dir(tmp_path)
