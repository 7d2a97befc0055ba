"""hf:ORG/REPO and hf:ORG/REPO/FILE.gguf → local paths, through huggingface_hub and its cache.

The package is imported when it is needed: that takes 0.3 s.
"""

from __future__ import annotations

import errno
import glob
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..errors import InputError, ModelError, ShaderlmError
from .default_model import Progress
from .gguf import all_parts, first_parts
from .hub_transfer import Remote, ask, folder_of, package_bar, silent_bar, transfer
from .safetensors import INDEX, SINGLE, weight_map

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

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
    "LocalEntryNotFoundError": "the hub cannot be reached and the {what} is not in its cache; connect to the network "
    "once",
    "OfflineModeIsEnabled": "{offline} is set and the {what} is not in the hub's cache; unset it once",
    "EntryNotFoundError": "there is no {what} in {repo}",
}
_REFUSED = (401, 403)
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def fetch(text: str, progress: Progress | None = None) -> Path:
    """The file or the folder of such a name, fetched unless it is there. `progress(label, done, total)` is in bytes."""
    parts = text.removeprefix(PREFIX).split("/")
    wrong = any(part.strip() in ("", ".", "..") for part in parts)
    if wrong or len(parts) < 2 or (len(parts) > 2 and not text.lower().endswith(".gguf")):
        raise InputError(f"{text!r} must have the form {FORM}")
    repo, file = "/".join(parts[:2]), "/".join(parts[2:])
    return _file(text, repo, file, progress) if file else _repository(text, repo, progress)


def _file(text: str, repo: str, file: str, progress: Progress | None) -> Path:
    names = all_parts(file)
    if file not in names:
        raise InputError(f"{text}: there is no such part; parts are numbered from 00001 to the number after -of-")
    offline, files = not _answers(), list[Remote | Path]()
    for name in names:
        with _explained(text, repo, f"file {name}"):
            files.append(_cached(repo, name) if offline else _remote(repo, name))
    with _explained(text, repo, f"file {file}"):
        label = f"fetching {names[0].rpartition('/')[2]}"
        transfer([each for each in files if isinstance(each, Remote)], label, progress)
        paths = [each if isinstance(each, Path) else _fetched(each, label, progress) for each in files]
    return paths[names.index(file)]


def _cached(repo: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(str(hf_hub_download(repo_id=repo, filename=name, local_files_only=True)))


def _remote(repo: str, name: str) -> Remote | Path:
    """The file as the hub has it; where it is overloaded or no longer lets one in, what is in the cache will do."""
    try:
        (file,) = ask(repo, [name])
    except Exception as failure:
        try:
            return _cached(repo, name)
        except Exception:
            raise failure from None
    return file


def _fetched(file: Remote, label: str, progress: Progress | None) -> Path:
    """Where the cache has a file that was transferred. The package does it, where `transfer` could not."""
    from huggingface_hub import hf_hub_download

    bar = package_bar(hf_hub_download, label, progress)
    return file.cached or Path(str(hf_hub_download(repo_id=file.repo, filename=file.name, **bar)))


def _repository(text: str, repo: str, progress: Progress | None) -> Path:
    """A repository with .safetensors is a folder; one with a single GGUF checkpoint is that file."""
    with _explained(text, repo, "repository"):
        info = _described(repo)
        if info is None:
            folder = _kept_folder(repo)
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            if _safetensors(names):
                return folder
        else:
            names = [each.rfilename for each in info.siblings or ()]
            if weights := _safetensors(names):
                from .hf.folder import FILES

                read = (*FILES, *_weights(text, repo, names, weights, progress))
                return _fetched_folder(repo, str(info.sha), [name for name in read if name in names], progress)
    return _file(text, repo, _only_gguf(text, names), progress)


def _described(repo: str) -> ModelInfo | None:
    """What the hub says of a repository; None where it says nothing and the cache has to do."""
    if not _answers():
        return None
    from huggingface_hub import HfApi  # after that: it fails where HF_ENDPOINT is no address

    try:
        return HfApi().model_info(repo)
    except Exception:  # as for a file
        there = _newest(repo)
        if there is None or not there.is_dir():
            raise
        return None


def _safetensors(names: Sequence[str]) -> list[str]:
    return [name for name in names if "/" not in name and name.endswith(".safetensors")]


def _kept_folder(repo: str) -> Path:
    from huggingface_hub import snapshot_download

    # No patterns: where it is. With some, the package wants all files that fit, also those that are not read.
    snapshot = Path(str(snapshot_download(repo_id=repo, allow_patterns=[], local_files_only=True)))
    if snapshot != _newest(repo):
        raise ModelError(
            f"{repo} is damaged in the hub's cache: refs/main names no commit; `shaderlm rm hf:{repo}` removes it"
        )
    return snapshot


def _fetched_folder(repo: str, commit: str, names: Sequence[str], progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download

    there = _newest(repo)
    if there is not None and there.name == commit and all((there / name).exists() for name in names):
        return there  # the package would ask for each of them
    label, files = f"fetching {repo}", ask(repo, names)
    transfer(files, label, progress)
    complete = all(each.cached or each.blob.exists() for each in files)
    bar = {"tqdm_class": silent_bar(None)} if complete else package_bar(snapshot_download, label, progress)
    patterns = [glob.escape(name) for name in names]
    return Path(str(snapshot_download(repo_id=repo, allow_patterns=patterns, **bar)))


def _newest(repo: str) -> Path | None:
    """The folder in the cache of the commit that was the newest when it was fetched."""
    folder = folder_of(repo)
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return folder / "snapshots" / commit if re.fullmatch(r"\w+", commit) else None


def _weights(
    text: str, repo: str, names: Sequence[str], weights: Sequence[str], progress: Progress | None
) -> list[str]:
    """The weights that are read. A repository may have the same ones under other names, or in other folders."""
    if SINGLE in weights:
        return [SINGLE]
    if INDEX in names:
        return sorted(set(weight_map(_file(text, repo, INDEX, progress)).values()))
    if len(weights) == 1:
        return list(weights)
    raise ModelError(
        f"{text}: the repository has {len(weights)} .safetensors files, but neither {SINGLE} nor {INDEX}, which names "
        "the parts of a checkpoint"
    )


def _only_gguf(text: str, names: Sequence[str]) -> str:
    files = first_parts(names)
    if len(files) == 1:
        return files[0]
    if not files:
        raise ModelError(
            f"{text}: the repository has neither .safetensors nor .gguf files, which are what runs; look for a "
            "conversion of it, mostly one whose name ends with -GGUF"
        )
    listed = ", ".join(f"{text}/{name}" for name in files[:_LISTED])
    more = f" and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
    raise ModelError(f"{text}: the repository has {len(files)} .gguf files, name one of them: {listed}{more}")


@contextmanager
def _explained(text: str, repo: str, what: str) -> Iterator[None]:
    """What the package raises becomes one line that says what to do."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of every attempt; the one line below is enough
    try:
        yield
    except ShaderlmError:
        raise
    except Exception as failure:
        kinds = [kind.__name__ for kind in type(failure).__mro__ if kind.__name__ in _PROBLEMS]
        if kinds[:1] == ["LocalEntryNotFoundError"] and _offline_by():
            kinds = ["OfflineModeIsEnabled"]
        known = [_PROBLEMS[kind] for kind in kinds]
        lines = str(failure).strip().splitlines() or [type(failure).__name__]
        if getattr(getattr(failure, "response", None), "status_code", None) in _REFUSED and not known:
            known = ["the hub does not accept this request; is HF_TOKEN, or the token of `hf auth login`, still valid?"]
        problem = (
            known[0].format(repo=repo, what=what, hub=_address(), offline=_offline_by() or "HF_HUB_OFFLINE")
            if known
            else f"the hub could not be used, {lines[0][:200]}"
        )
        if isinstance(failure, OSError) and failure.errno in _NOT_WRITTEN:
            place = failure.filename or folder_of(repo)
            problem = f"{place} cannot be written: {failure.strerror}; make room, or set HF_HOME to another folder"
        raise ModelError(f"{text}: {problem}") from None
    finally:
        log.setLevel(level)


def _address() -> str:
    return (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")


def _offline_by() -> str | None:
    """The variable that keeps the package from asking the hub."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return next((name for name in names if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), None)


def _answers() -> bool:
    """Can the hub be reached? The package itself tries for 23 s before it looks into its cache."""
    import socket
    import urllib.request  # late: they take 20 ms to import

    if _offline_by():
        return False
    try:
        address = urlsplit(_address())
        port = address.port or (80 if address.scheme == "http" else 443)
        if address.hostname is None or urllib.request.getproxies().get(address.scheme):
            return True  # what is behind a proxy is for the package to find out
        socket.create_connection((address.hostname, port), _HUB_SECONDS).close()
    except ValueError as problem:
        raise InputError(f"HF_ENDPOINT must be an address such as {_HUB}, it is {_address()!r}: {problem}") from None
    except OSError:
        return False
    return True
