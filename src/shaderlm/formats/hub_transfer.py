"""Files of the hub → contents in the cache of huggingface_hub. A transfer that broke off goes on where it was.

The package resumes within a process; what a process leaves behind it does not take up. So contents come here first,
through its functions and as one HTTP stream each, and the package finds them in its cache.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from ..errors import ModelError
from .default_model import Progress

# The package's cache counts files with this ending as unfinished.
_UNFINISHED = ".shaderlm.incomplete"
_NAME_LENGTH = 120  # of what is kept of a file's name
_SHA256 = re.compile("[0-9a-f]{64}")
_READ_BYTES = 1 << 20
_LARGE = 1_000_000  # bytes; an index or a configuration is there at once
_log = logging.getLogger("shaderlm.downloads")


class Remote(NamedTuple):
    """A file of the hub as it is now. `cached` is where the cache has it."""

    repo: str
    name: str
    url: str
    etag: str | None
    size: int | None
    cached: Path | None

    @property
    def blob(self) -> Path:
        """Where the cache has the content."""
        return folder_of(self.repo) / "blobs" / str(self.etag)

    @property
    def part(self) -> Path:
        """Where the content is until it is complete."""
        return self.blob.with_name(f"{self.etag}.{quote(self.name, safe='')[-_NAME_LENGTH:]}{_UNFINISHED}")


def ask(repo: str, names: Sequence[str]) -> list[Remote]:
    """What the hub says of files."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    headers, remotes = _headers(), []
    for name in names:
        url = hf_hub_url(repo, name)
        each = get_hf_file_metadata(url, headers=headers)
        cached = try_to_load_from_cache(repo, name, revision=each.commit_hash) if each.commit_hash else None
        remotes.append(Remote(repo, name, url, each.etag, each.size, Path(cached) if isinstance(cached, str) else None))
    return remotes


def transfer(files: Sequence[Remote], label: str, progress: Progress | None) -> None:
    """Put contents into the cache, where they are missing. What cannot be resumed is left to the package."""
    total, done = sum(each.size or 0 for each in files), 0
    _announce([each for each in files if each.cached is None and not each.blob.exists()], label)
    for each in files:
        if each.cached is None and _can_resume(each) and not each.blob.exists():
            bar = silent_bar(progress and partial(_report, progress, label, done, total))
            with _locked(each):
                if not each.blob.exists():
                    _transfer(each, int(each.size or 0), bar)
        done += each.size or 0
        if progress is not None and (each.cached is not None or _can_resume(each)):
            progress(label, done, total)


def _announce(files: Sequence[Remote], label: str) -> None:
    """Say how much is downloaded, and refuse it where the disk is too full: before the first byte."""
    if not files:
        return
    parts = [each.part for each in files]
    here = sum(part.stat().st_size for part in parts if part.exists())
    total = sum(each.size or 0 for each in files)
    if total >= _LARGE:
        resumed = f", {decimal(here)} are here" if here else ""
        _log.info("%s from %s: %s%s", label, files[0].repo, decimal(total), resumed)
    cache = folder_of(files[0].repo)
    with suppress(OSError):
        place = next(folder for folder in (cache, *cache.parents) if folder.exists())
        disk = shutil.disk_usage(place)
        if disk.total and disk.free < total - here:  # some file systems tell no sizes at all
            raise ModelError(
                f"{label} needs {decimal(total - here)}, {decimal(disk.free)} are free in {place}; remove a model "
                "(`shaderlm models` lists them), or set HF_HOME to a folder on another disk"
            )


def decimal(nbytes: int) -> str:
    """A size as the hub shows it: 10^9 bytes are a GB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB" if nbytes >= 1e6 else f"{nbytes:,} B"


def _report(progress: Progress, label: str, before: int, total: int, count: int, _: int) -> None:
    progress(label, before + count, total)


def folder_of(repo: str) -> Path:
    """What the cache has of a repository."""
    constants, files = (import_module(f"huggingface_hub.{name}") for name in ("constants", "file_download"))
    return Path(constants.HF_HUB_CACHE) / str(files.repo_folder_name(repo_id=repo, repo_type="model"))


def folders() -> dict[str, Path]:
    """Where the cache has repositories of models, by name."""
    cache, kind = Path(import_module("huggingface_hub.constants").HF_HUB_CACHE), re.compile("models--(.+?)--(.+)")
    try:
        names = {path: kind.fullmatch(path.name) for path in sorted(cache.iterdir()) if path.is_dir()}
    except FileNotFoundError:
        return {}
    except OSError as problem:
        hint = "HF_HOME, if it is set, must name a folder"
        raise ModelError(f"the hub's cache cannot be read: {cache}: {problem.strerror}; {hint}") from None
    return {f"{named[1]}/{named[2]}": path for path, named in names.items() if named}


def unfinished(folder: Path) -> dict[Path, str]:
    """What transfers that broke off have left of the files of a repository, and the names of these files."""
    paths = sorted((folder / "blobs").glob(f"*{_UNFINISHED}"))
    return {path: unquote(path.name.removesuffix(_UNFINISHED).partition(".")[2]) for path in paths}


def silent_bar(tell: Callable[[int, int], None] | None) -> Any:
    """A class for the package's progress bars that draws nothing; `tell` gets the bytes, and how many there are."""
    shown: Any = import_module("huggingface_hub.utils").tqdm
    lock = threading.Lock()

    class Bar(shown):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._bytes = options.get("unit") == "B"
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            with lock:
                self.n += n or 0
                if self._bytes and tell is not None:
                    tell(int(self.n), int(self.total or 0))

    return Bar


def package_bar(download: Callable[..., Any], label: str, progress: Progress | None) -> dict[str, Any]:
    """The argument that hands the package's progress on, where its version has one; else it shows its own bar."""
    if progress is None or "tqdm_class" not in inspect.signature(download).parameters:
        return {}
    tell, seen = progress, [0, 0]

    def report(done: int, total: int) -> None:
        """One download may have several bars: of what is received, and of what is written."""
        seen[:] = max(seen[0], done), max(seen[1], total)
        tell(label, *seen)

    return {"tqdm_class": silent_bar(report)}


def _headers() -> dict[str, str]:
    return dict(import_module("huggingface_hub.utils").build_hf_headers())


def _can_resume(file: Remote) -> bool:
    """Larger files are not served in one piece. Without symbolic links, the package would copy contents."""
    constants, files = (import_module(f"huggingface_hub.{name}") for name in ("constants", "file_download"))
    limit = getattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 50 * 10**9)
    served = bool(file.etag) and file.size is not None and file.size <= limit
    return served and bool(files.are_symlinks_supported(constants.HF_HUB_CACHE))


def _locked(file: Remote) -> Any:
    """The lock that the package has for the same content."""
    folder = folder_of(file.repo)
    path = folder.parent / ".locks" / folder.name / f"{file.etag}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return import_module("huggingface_hub.utils").WeakFileLock(path)


def _transfer(file: Remote, size: int, bar: Any) -> None:
    http_get: Any = import_module("huggingface_hub.file_download").http_get
    options: Mapping[str, Any] = {"tqdm_class": bar} if "tqdm_class" in inspect.signature(http_get).parameters else {}
    part = file.part
    part.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        there = part.stat().st_size if part.exists() else 0
        there = there if there <= size else 0
        if there < size or not size:
            with part.open("r+b" if there else "wb") as written:
                written.seek(there)
                http_get(file.url, written, resume_size=there, headers=_headers(), expected_size=size, **options)
        if not there or _is_content(part, str(file.etag)):
            part.replace(file.blob)
            return
        part.unlink()  # what was there is not of this file: once more from the beginning
    raise ModelError(f"{file.url} is not what the hub says of it; try again later")


def _is_content(path: Path, etag: str) -> bool:
    """Has it the digest by which the hub names contents? Only those of large files are digests."""
    if not _SHA256.fullmatch(etag):
        return True
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest() == etag
