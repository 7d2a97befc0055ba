"""Files of the hub → contents in the cache of huggingface_hub. A transfer that broke off goes on where it was.

The package resumes within a process; what a process leaves behind it does not take up. So contents come here first,
through its functions, and it finds them in its cache.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .embedded import Progress

# The package's cache counts files with this ending as unfinished.
_UNFINISHED = ".shaderlm.incomplete"
_SHA256 = re.compile("[0-9a-f]{64}")
_READ_BYTES = 1 << 20


def transfer(repo: str, names: Sequence[str], label: str, progress: Progress | None) -> None:
    """Put the contents of files into the cache, where they are missing."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    headers = import_module("huggingface_hub.utils").build_hf_headers()
    urls = {name: hf_hub_url(repo, name) for name in names}
    found = {name: get_hf_file_metadata(url, headers=headers) for name, url in urls.items()}
    total, done = sum(each.size or 0 for each in found.values()), 0
    for name, each in found.items():
        if each.etag and each.size is not None and each.size <= _limit():
            blob = folder_of(repo) / "blobs" / each.etag
            bar = silent_bar(None if progress is None else _told(progress, label, done, total))
            with _locked(repo, each.etag):
                if not blob.exists():
                    _transfer(urls[name], headers, blob, each.size, bar)
        done += each.size or 0
        if progress is not None:
            progress(label, done, total)


def folder_of(repo: str) -> Path:
    """What the cache has of a repository."""
    constants, files = (import_module(f"huggingface_hub.{name}") for name in ("constants", "file_download"))
    return Path(constants.HF_HUB_CACHE) / str(files.repo_folder_name(repo_id=repo, repo_type="model"))


def unfinished(repo: str) -> list[Path]:
    """What transfers that broke off have left."""
    return sorted((folder_of(repo) / "blobs").glob("*.incomplete"))


def silent_bar(tell: Callable[[int], None] | None) -> Any:
    """A class for the package's progress bars that draws nothing; `tell` gets the bytes."""
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
                    tell(int(self.n))

    return Bar


def _told(progress: Progress, label: str, before: int, total: int) -> Callable[[int], None]:
    return lambda count: progress(label, before + count, total)


def _limit() -> int:
    """Larger files are not served in one piece."""
    return int(getattr(import_module("huggingface_hub.constants"), "MAX_HTTP_DOWNLOAD_SIZE", 50 * 10**9))


def _locked(repo: str, etag: str) -> Any:
    """The lock that the package has for the same content."""
    folder = folder_of(repo)
    path = folder.parent / ".locks" / folder.name / f"{etag}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return import_module("huggingface_hub.utils").WeakFileLock(path)


def _transfer(url: str, headers: Mapping[str, str], blob: Path, size: int, bar: Any) -> None:
    http_get: Any = import_module("huggingface_hub.file_download").http_get
    options = {"tqdm_class": bar} if "tqdm_class" in inspect.signature(http_get).parameters else {}
    part = blob.with_name(blob.name + _UNFINISHED)
    part.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        there = part.stat().st_size if part.exists() else 0
        there = there if there <= size else 0
        with part.open("r+b" if there else "wb") as file:
            file.seek(there)
            http_get(url, file, resume_size=there, headers=dict(headers), expected_size=size, **options)
        if not there or _is_content(part, blob.name):
            part.replace(blob)
            return
        part.unlink()  # what was there is not of this file: once more from the beginning
    raise ModelError(f"{url} is not what the hub says of it; try again later")


def _is_content(path: Path, etag: str) -> bool:
    """Has it the digest by which the hub names contents? Only those of large files are digests."""
    if not _SHA256.fullmatch(etag):
        return True
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            found.update(part)
    return found.hexdigest() == etag
