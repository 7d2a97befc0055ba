"""What a user typed → the path of a .gguf file or of a Hugging Face folder. Knows names and paths, not contents."""

from __future__ import annotations

import difflib
import logging
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import InputError, ModelError
from . import embedded
from .embedded import Progress
from .gguf import PART_NAME

EMBEDDED = embedded.NAME
_HF = "hf:"
_HF_FORM = "hf:ORG/REPO/FILE.gguf"
_LISTED = 8
_HUB, _HUB_SECONDS = "https://huggingface.co", 5.0


def find(model: str | os.PathLike[str] | None, progress: Progress | None = None) -> Path:
    """The local file of a model: None or a known name, `hf:ORG/REPO/FILE.gguf`, or the path of a file or folder.

    `progress(label, done, total)` is called while the default model is fetched, which happens once.
    """
    if model is None or model == EMBEDDED:
        return embedded.locate(progress)
    if not isinstance(model, (str, os.PathLike)) or not isinstance(os.fspath(model), str):
        raise InputError(f"model must be a name or a path, got {type(model).__name__}")
    text = os.fspath(model)
    if not text.strip():
        raise InputError(f"model must be a name or a path, got an empty text; the default is {EMBEDDED}")
    if isinstance(model, str) and text.startswith(_HF):
        return _from_hub(text)
    return _local(text, typed=isinstance(model, str))


# Paths ---------------------------------------------------------------------------------------------------


def _local(text: str, *, typed: bool) -> Path:
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return _in_folder(path)
        if path.exists():
            return path
    except PermissionError:
        raise ModelError(f"{text} may not be read: permission denied") from None
    except (OSError, RuntimeError, ValueError) as problem:  # too long, an unknown ~user, a NUL
        reason = getattr(problem, "strerror", None) or problem
        raise ModelError(f"{text!r} cannot be a path: {reason}") from None
    raise ModelError(_missing(text, path, typed=typed))


def _missing(text: str, path: Path, *, typed: bool) -> str:
    if "://" in text:
        return f"{text}: addresses are not fetched; download the file and give its path, or give {_HF_FORM}"
    if not typed or text.lower().endswith(".gguf") or "/" in text or os.sep in text:
        return f"{path} does not exist; expected a .gguf file"
    close = difflib.get_close_matches(text.lower(), [EMBEDDED], 1, 0.5)
    hint = f"did you mean {close[0]}?" if close else f"known is {EMBEDDED};"
    return f"there is no model or file {text!r}: {hint} otherwise give the path of a .gguf file or {_HF_FORM}"


def _in_folder(folder: Path) -> Path:
    """The folder itself if it is one of Hugging Face's, with weights as .safetensors; else its only .gguf file."""
    if any(folder.glob("*.safetensors")):
        return folder
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf" and path.is_file())
    found = [path for path in found if not _later_part(path.name)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ModelError(f"there is no .gguf file in the directory {folder}, and no .safetensors file")
    names = ", ".join(path.name for path in found[:_LISTED])
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    raise ModelError(f"the directory {folder} holds {len(found)} .gguf files, name one of them: {names}{more}")


def _later_part(name: str) -> bool:
    """Is it a part of a checkpoint, but not the first one?"""
    part = PART_NAME.fullmatch(name)
    return part is not None and int(part[2]) != 1


# The Hugging Face hub ------------------------------------------------------------------------------------


def _from_hub(text: str) -> Path:
    parts = text.removeprefix(_HF).split("/")
    if len(parts) < 3 or any(part.strip() in ("", ".", "..") for part in parts) or not text.lower().endswith(".gguf"):
        raise InputError(f"{text!r} must have the form {_HF_FORM}")
    return _hub_file(text, "/".join(parts[:2]), "/".join(parts[2:]))


# The hub's exceptions by name, since they moved between its versions, and what to say.
_HUB_PROBLEMS = {
    "HFValidationError": "{repo} cannot be the name of a repository",
    "GatedRepoError": "{repo} is gated: accept its terms on its page, then run `hf auth login`",
    "RepositoryNotFoundError": "there is no public repository {repo}; if it is private, run `hf auth login`",
    "LocalEntryNotFoundError": "the hub cannot be reached and the file is not in its cache; connect once",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set and the file is not in the hub's cache; unset it once",
    "EntryNotFoundError": "there is no file {file} in {repo}",
}


def _hub_file(text: str, repo: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of every attempt; the one line below is enough
    try:
        return Path(hf_hub_download(repo_id=repo, filename=file, local_files_only=not _hub_answers()))
    except Exception as failure:
        known = [_HUB_PROBLEMS[kind.__name__] for kind in type(failure).__mro__ if kind.__name__ in _HUB_PROBLEMS]
        lines = str(failure).strip().splitlines() or [type(failure).__name__]
        problem = known[0].format(repo=repo, file=file) if known else f"the hub could not be used, {lines[0][:200]}"
        raise ModelError(f"{text}: {problem}") from None
    finally:
        log.setLevel(level)


def _hub_answers() -> bool:
    """Can the hub be reached? The package itself tries for 23 s before it looks into its cache."""
    import urllib.request  # late: it takes 20 ms to import

    address = urlsplit(os.environ.get("HF_ENDPOINT") or _HUB)
    if address.hostname is None or urllib.request.getproxies().get(address.scheme):
        return True  # what is behind a proxy is for the package to find out
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname, port), _HUB_SECONDS).close()
    except OSError:
        return False
    return True
