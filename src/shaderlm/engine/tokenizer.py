"""The public tokenizer: that of the package `text`, made from a file."""

from __future__ import annotations

import os

from .. import text
from ..formats.opening import open_checkpoint


class Tokenizer(text.Tokenizer):
    """Encodes and decodes with one vocabulary. Safe to share between threads."""

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a GGUF file, also of one that holds only a vocabulary, or of a Hugging Face folder."""
        with open_checkpoint(path) as file, file.named_in_errors():
            return cls(text.Vocabulary.from_metadata(file.metadata, file.vocabulary))
