"""A text in windows, as llama-perplexity takes it: so many tokens each, of which those of the second half count.

The first half gives the others something to follow. BOS takes the place of a window's first token, where the model
wants it before a text. What is left after the last whole window is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine import LanguageModel
from ..errors import InputError

WINDOW = 512  # tokens, unless others are asked for


@dataclass(frozen=True)
class Windows:
    """Windows of `size` tokens, one after the other in `tokens`."""

    tokens: Sequence[int]
    size: int
    bos: int | None  # in the place of each one's first token

    def __len__(self) -> int:
        return len(self.tokens) // self.size

    @property
    def first_row(self) -> int:
        """The first row of a window whose next token counts."""
        return self.size // 2

    @property
    def counted(self) -> int:
        """Tokens of a window that count."""
        return self.size - 1 - self.first_row

    def ids(self, index: int) -> list[int]:
        """What the model reads."""
        ids = list(self.tokens[index * self.size : (index + 1) * self.size])
        return ids if self.bos is None else [self.bos, *ids[1:]]

    def targets(self, index: int) -> Sequence[int]:
        """The tokens that count."""
        return self.tokens[index * self.size + self.first_row + 1 : (index + 1) * self.size]


def text_tokens(model: LanguageModel, text: str) -> list[int]:
    """Token ids of a text. What looks like a special token is plain text."""
    ids, bos = model.tokenizer.encode(text, parse_special=False), bos_of(model)
    return ids if bos is None else [bos, *ids]


def windows_of(model: LanguageModel, tokens: Sequence[int], size: int, most: int | None = None) -> Windows:
    """The windows of a text, or the first of them."""
    if len(tokens) < 2 * size:
        needed = f"two windows of {size:,} tokens are the least"
        raise InputError(
            f"the text has {len(tokens):,} tokens, and {needed}. Give a longer text, or a smaller --context"
        )
    count = len(tokens) // size
    count = count if most is None else min(count, most)
    return Windows(tokens[: count * size], size, bos_of(model))


def bos_of(model: LanguageModel) -> int | None:
    """What goes before a text, where the model wants it."""
    vocabulary = model.tokenizer.vocabulary
    return vocabulary.bos if vocabulary.add_bos else None
