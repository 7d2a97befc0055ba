"""What a file must be to run, apart from its tokenizer: the one verdict of `load`, `plan` and `info`."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from ..errors import InputError, ModelError
from ..formats.checkpoint import Checkpoint
from ..formats.weight_formats import WEIGHT_FORMATS
from .architecture import Architecture
from .config import Config
from .metadata_keys import check_kind
from .supported import architecture


def architecture_of(file: Checkpoint) -> Architecture:
    """The architecture that a file names."""
    if not file.tensors:
        raise ModelError("the file holds only a vocabulary: it can turn text into tokens, not generate")
    check_kind(file.metadata)
    return architecture(file.metadata)


def read_config(kind: Architecture, file: Checkpoint, ignore_keys: Collection[str] = ()) -> Config:
    """The sizes of a file's model, with f32 as every format. The file is read as if it had none of `ignore_keys`."""
    ignored = _ignored(file, ignore_keys)
    shapes = {name: info.shape for name, info in file.tensors.items()}
    unsupported = sorted({info.kind for info in file.tensors.values()} - set(WEIGHT_FORMATS))
    if unsupported:
        raise ModelError(
            f"the file has tensors of the types {', '.join(unsupported)}; supported are {', '.join(WEIGHT_FORMATS)}"
        )
    metadata = {key: value for key, value in file.metadata.items() if key not in ignored}
    config = kind.read(metadata, shapes, dict.fromkeys(shapes, "f32"))
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != config.vocabulary:
        raise ModelError(f"the tokenizer has {len(tokens):,} tokens, the embedding matrix {config.vocabulary:,} rows")
    return config


def _ignored(file: Checkpoint, names: Collection[str]) -> set[str]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InputError(f"ignore_keys must be a list of metadata keys, got {names!r}")
    prefix = f"{file.metadata.get('general.architecture')}."
    known = [key for key in file.metadata if key.startswith(prefix)]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known) or 'none'}"
            raise InputError(f"{file.path} has no metadata key {name!r} that begins with {prefix}; {hint}")
    return set(names)
