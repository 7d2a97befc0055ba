"""The public tokenizer: that of the package `text`, made from a file."""

from __future__ import annotations

import os
from pathlib import Path

from .. import text
from ..errors import ModelError
from ..formats.gguf import GgufFile


class Tokenizer(text.Tokenizer):
    """Encodes and decodes with one vocabulary. Safe to share between threads."""

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a GGUF file, also of one that holds only a vocabulary, or of a Hugging Face folder."""
        if Path(path).is_dir():
            files = {name: Path(path, name) for name in text.hugging_face.FILES}
            contents = {name: file.read_bytes() for name, file in files.items() if file.is_file()}
            try:
                return cls(text.Vocabulary.from_metadata(text.hugging_face.metadata_of(contents)))
            except ModelError as problem:
                raise ModelError(f"{path}: {problem}") from None
        with GgufFile.open(path) as file, file.named_in_errors():
            return cls(text.Vocabulary.from_metadata(file.metadata))
