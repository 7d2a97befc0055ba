"""What a user typed → the path of a .gguf file or of a Hugging Face folder. Knows names and paths, not contents."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from ..errors import InputError, ModelError
from . import default_model, hub, quantize
from .default_model import Progress
from .gguf import first_parts
from .short_names import SHORT_NAMES

EMBEDDED = default_model.NAME
_LISTED = 8
_NEAREST = 3


def find(model: str | os.PathLike[str] | None, progress: Progress | None = None) -> Path:
    """The local file or folder of a model: None or a known name, hf:ORG/REPO, hf:ORG/REPO/FILE.gguf, or a path.

    `progress(label, done, total)` is called while a model is fetched, which happens once.
    """
    if model is None or model == EMBEDDED:
        return default_model.locate(progress)
    if not isinstance(model, (str, os.PathLike)) or not isinstance(os.fspath(model), str):
        raise InputError(f"model must be a name or a path, got {type(model).__name__}")
    text = os.fspath(model)
    if not text.strip():
        raise InputError(f"model must be a name or a path, got an empty text; the default is {EMBEDDED}")
    if isinstance(model, str) and text in SHORT_NAMES and not Path(text).exists():
        text = SHORT_NAMES[text].model
    if isinstance(model, str) and text.startswith(hub.PREFIX):
        return hub.fetch(text, progress)
    if isinstance(model, str) and os.sep not in text and text in (copies := quantize.copies()):
        return copies[text]
    return _local(text, typed=isinstance(model, str))


def shown_name(model: str | os.PathLike[str] | None, path: Path) -> str:
    """The name of a model wherever one is shown: what it was asked for by; of a path, the file's without its ending.

    `path` is what `find` made of it. A folder has no ending, though there may be a dot in its name.
    """
    if is_remote(model):
        return EMBEDDED if model is None else os.fspath(model)
    if not path.is_dir():
        return path.stem
    from .hf.folder import name_of  # late: it takes 15 ms to import

    return name_of(path.resolve())


def is_remote(model: str | os.PathLike[str] | None) -> bool:
    """May it have to be fetched? Otherwise it is a path, or a quantised copy."""
    if model is None or model == EMBEDDED:
        return True
    text = os.fspath(model)
    return text.startswith(hub.PREFIX) or (text in SHORT_NAMES and not Path(text).exists())


# Paths ---------------------------------------------------------------------------------------------------


def _local(text: str, *, typed: bool) -> Path:
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return _in_folder(path)
        if path.exists():
            return path
    except ModelError:  # a ValueError, too
        raise
    except PermissionError:
        raise ModelError(f"{text} may not be read: permission denied") from None
    except (OSError, RuntimeError, ValueError) as problem:  # too long, an unknown ~user, a NUL
        reason = getattr(problem, "strerror", None) or problem
        raise ModelError(f"{text!r} cannot be a path: {reason}") from None
    raise ModelError(_missing(text, path, typed=typed))


def _missing(text: str, path: Path, *, typed: bool) -> str:
    if "://" in text:
        return f"{text}: addresses are not fetched; download the file and give its path, or give {hub.FORM}"
    if path.is_symlink():
        return f"{path} is a link to {os.readlink(path)}, which does not exist"
    if not typed or text.lower().endswith(".gguf") or "/" in text or os.sep in text:
        repository = typed and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text) and not text.lower().endswith(".gguf")
        hint = f"; a repository of the hub is {hub.PREFIX}{text}" if repository else ""
        return f"{path} does not exist; expected a .gguf file or a Hugging Face folder{hint}"
    near = _nearest(text)
    either = " or ".join([", ".join(near[:-1]), near[-1]]) if len(near) > 1 else "".join(near)
    hint = f"did you mean {either}? Otherwise" if near else "`shaderlm models` lists names; otherwise"
    return f"there is no model or file {text!r}: {hint} give the path of a .gguf file or {hub.FORM}"


def _nearest(text: str) -> list[str]:
    """Short names that begin with a text, or else are spelt almost like it. Ollama has a colon before the size."""
    names, typed = [EMBEDDED, *SHORT_NAMES], text.lower().replace(":", "-")
    if typed in names:
        return [typed]
    begin = [name for name in names if name.startswith(typed)]
    return begin[:_NEAREST] or difflib.get_close_matches(typed, names, _NEAREST, 0.5)


def _in_folder(folder: Path) -> Path:
    """The folder itself if it is one of Hugging Face's, with weights as .safetensors; else its only .gguf file."""
    if any(folder.glob("*.safetensors")):
        return folder
    files = first_parts(path.name for path in folder.iterdir() if path.is_file())
    if len(files) == 1:
        return folder / files[0]
    if not files:
        raise ModelError(f"there is no .gguf file in the directory {folder}, and no .safetensors file")
    names = ", ".join(files[:_LISTED])
    more = f" and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
    raise ModelError(f"the directory {folder} holds {len(files)} .gguf files, name one of them: {names}{more}")
