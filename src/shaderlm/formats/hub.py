"""hf:ORG/REPO and hf:ORG/REPO/FILE.gguf → local paths, through huggingface_hub, which keeps and resumes.

The package is imported when it is needed: that takes 0.3 s.
"""

from __future__ import annotations

import glob
import inspect
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import InputError, ModelError
from .embedded import Progress
from .folder import FILES
from .gguf import PART_NAME, first_parts, part_paths
from .safetensors import INDEX, SINGLE, weight_map

PREFIX = "hf:"
FORM = "hf:ORG/REPO or hf:ORG/REPO/FILE.gguf"
_HUB, _HUB_SECONDS = "https://huggingface.co", 5.0
_LISTED = 8

# The hub's exceptions by name, since they moved between its versions, and what to say.
_PROBLEMS = {
    "HFValidationError": "{repo} cannot be the name of a repository",
    "GatedRepoError": "{repo} is gated: accept its terms on {hub}/{repo}, then run `hf auth login`, or set HF_TOKEN to "
    "a token that may read it",
    "RepositoryNotFoundError": "there is no public repository {repo}; if it is private, run `hf auth login`",
    "LocalEntryNotFoundError": "the hub cannot be reached and the {what} is not in its cache; connect once",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set and the {what} is not in the hub's cache; unset it once",
    "EntryNotFoundError": "there is no {what} in {repo}",
}


def fetch(text: str, progress: Progress | None = None) -> Path:
    """The file or the folder of such a name, fetched unless it is there. `progress(label, done, total)` is in bytes."""
    parts = text.removeprefix(PREFIX).split("/")
    wrong = any(part.strip() in ("", ".", "..") for part in parts)
    if wrong or len(parts) < 2 or (len(parts) > 2 and not text.lower().endswith(".gguf")):
        raise InputError(f"{text!r} must have the form {FORM}")
    repo, file = "/".join(parts[:2]), "/".join(parts[2:])
    return _file(text, repo, file, progress) if file else _repository(text, repo, progress)


def _file(text: str, repo: str, file: str, progress: Progress | None) -> Path:
    from huggingface_hub import hf_hub_download

    part = PART_NAME.fullmatch(file.rpartition("/")[2])
    names = [file] if part is None else [path.as_posix() for path in part_paths(Path(file), int(part[3]))]
    offline = not _answers()
    paths = []
    for name in names:
        with _explained(text, repo, f"file {name}"):
            bar = _bar(hf_hub_download, name.rpartition("/")[2], progress)
            paths.append(Path(str(hf_hub_download(repo_id=repo, filename=name, local_files_only=offline, **bar))))
    return paths[names.index(file)]


def _repository(text: str, repo: str, progress: Progress | None) -> Path:
    """A repository with .safetensors is a folder; one with a single GGUF checkpoint is that file."""
    from huggingface_hub import HfApi, snapshot_download

    offline = not _answers()
    with _explained(text, repo, "repository"):
        if offline:
            # No patterns: where it is. With some, the package wants all files that fit, also those that are not read.
            folder = Path(str(snapshot_download(repo_id=repo, allow_patterns=[], local_files_only=True)))
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        else:
            names = HfApi().list_repo_files(repo)
        weights = [name for name in names if "/" not in name and name.endswith(".safetensors")]
        if weights and offline:
            return folder
        if weights:
            wanted = [*FILES, *_weights(text, repo, names, weights, progress)]
            patterns = [glob.escape(name) for name in wanted if name in names]
            bar = _bar(snapshot_download, repo, progress)
            return Path(str(snapshot_download(repo_id=repo, allow_patterns=patterns, **bar)))
    return _file(text, repo, _only_gguf(text, names), progress)


def _weights(
    text: str, repo: str, names: Sequence[str], weights: Sequence[str], progress: Progress | None
) -> list[str]:
    """The weights that are read. A repository may have the same ones under other names, or in other folders."""
    if INDEX in names:
        return sorted(set(weight_map(_file(text, repo, INDEX, progress)).values()))
    if SINGLE in weights or len(weights) == 1:
        return [SINGLE if SINGLE in weights else weights[0]]
    raise ModelError(
        f"{text}: the repository has {len(weights)} .safetensors files, but neither {SINGLE} nor {INDEX}, which names "
        "the parts of a checkpoint"
    )


def _bar(download: Callable[..., Any], label: str, progress: Progress | None) -> dict[str, Any]:
    """The argument that hands the package's progress on, where its version has one; else it shows its own bar."""
    if progress is None or "tqdm_class" not in inspect.signature(download).parameters:
        return {}
    tell, seen, lock = progress, [0, 0], threading.Lock()
    shown: Any = import_module("huggingface_hub.utils").tqdm

    class Bar(shown):  # type: ignore[misc]
        """Draws nothing. One download may have several: of what is received, and of what is written."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._bytes = options.get("unit") == "B"
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            with lock:
                self.n += n or 0
                if self._bytes:
                    seen[:] = max(seen[0], int(self.n)), max(seen[1], int(self.total or 0))
                    tell(f"fetching {label}", *seen)

    return {"tqdm_class": Bar}


def _only_gguf(text: str, names: Sequence[str]) -> str:
    found = first_parts(names)
    if len(found) == 1:
        return found[0]
    if not found:
        raise ModelError(f"{text}: the repository has neither .safetensors nor .gguf files")
    listed = ", ".join(f"{text}/{name}" for name in found[:_LISTED])
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    raise ModelError(f"{text}: the repository has {len(found)} .gguf files, name one of them: {listed}{more}")


@contextmanager
def _explained(text: str, repo: str, what: str) -> Iterator[None]:
    """What the package raises becomes one line that says what to do."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of every attempt; the one line below is enough
    try:
        yield
    except ModelError:
        raise
    except Exception as failure:
        known = [_PROBLEMS[kind.__name__] for kind in type(failure).__mro__ if kind.__name__ in _PROBLEMS]
        lines = str(failure).strip().splitlines() or [type(failure).__name__]
        problem = (
            known[0].format(repo=repo, what=what, hub=_address())
            if known
            else f"the hub could not be used, {lines[0][:200]}"
        )
        raise ModelError(f"{text}: {problem}") from None
    finally:
        log.setLevel(level)


def _address() -> str:
    return (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")


def _answers() -> bool:
    """Can the hub be reached? The package itself tries for 23 s before it looks into its cache."""
    import urllib.request  # late: it takes 20 ms to import

    address = urlsplit(_address())
    if address.hostname is None or urllib.request.getproxies().get(address.scheme):
        return True  # what is behind a proxy is for the package to find out
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname, port), _HUB_SECONDS).close()
    except OSError:
        return False
    return True
