"""Writing is all or nothing, whoever writes and whatever fails."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from shaderlm.files import atomic_write, atomic_write_text, state_directory


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    for text in ("Grüße\n", "again"):
        atomic_write_text(tmp_path / "a.txt", text)
        assert (tmp_path / "a.txt").read_bytes() == text.encode()
        assert names(tmp_path) == ["a.txt"]


def test_readers_see_the_old_contents_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("existing", [True, False])
def test_a_failure_leaves_what_was_there_and_nothing_else(existing: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    if existing:
        path.write_text("old")

    def interrupted() -> None:
        with atomic_write(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == (["a.txt"] if existing else [])
    assert not existing or path.read_text() == "old"


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_disk_that_refuses(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "a.txt").write_text("old")
    monkeypatch.setattr(os, function, refuse)
    with pytest.raises(OSError, match="No space"):
        atomic_write_text(tmp_path / "a.txt", "new")
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "a.txt")
    atomic_write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a.txt").read_text() == "new"


def test_two_threads_do_not_mix(tmp_path: Path) -> None:
    texts = [letter * 100_000 for letter in "abcd"]
    threads = [threading.Thread(target=atomic_write_text, args=(tmp_path / "a.txt", text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (tmp_path / "a.txt").read_text() in texts
    assert names(tmp_path) == ["a.txt"]


def test_names_as_long_as_the_system_allows(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)
    atomic_write_text(path, "text")
    assert path.read_text() == "text"


def test_where_state_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("SHADERLM_STATE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert state_directory() == tmp_path / ".local" / "state" / "shaderlm"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_directory() == tmp_path / ".local" / "state" / "shaderlm", "the standard: it is ignored"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_directory() == tmp_path / "xdg" / "shaderlm"
    monkeypatch.setenv("SHADERLM_STATE", str(tmp_path / "own"))
    assert state_directory() == tmp_path / "own"


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_a_private_file_is_private_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic_write(path, private=True) as file:
        assert all(each.stat().st_mode & 0o077 == 0 for each in tmp_path.iterdir() if each != path)
        file.write(b"new")
    assert path.stat().st_mode & 0o777 == 0o600
