"""SentencePiece's table of characters and what replaces them (a trie of bytes, and texts) → pairs of texts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import ModelError

# `tokenizers` looks a character up, or one with what combines with it, if both have less than six bytes.
_LONGEST = 5


def pairs(charsmap: bytes) -> list[list[str]]:
    """Texts and what replaces them. A text that begins with another one of the table is never found, and left out."""
    size = int.from_bytes(charsmap[:4], "little")
    units = np.frombuffer(charsmap[4 : 4 + size], "<u4").astype(np.int64)
    texts = charsmap[4 + size :]
    try:
        found = [
            [key.decode(), texts[at : texts.index(b"\0", at) if b"\0" in texts[at:] else None].decode()]
            for key, at in _leaves(units)
        ]
    except UnicodeDecodeError:
        raise ModelError("tokenizer.ggml.precompiled_charsmap replaces what is not whole characters") from None
    return sorted(found)


def _leaves(units: np.ndarray) -> Iterator[tuple[bytes, int]]:
    """The shortest keys of the trie, and where their texts begin."""
    labels = np.arange(1, 256)
    level = [(b"", _offset(int(units[0])))]
    for _ in range(_LONGEST):
        following = []
        for key, node in level:
            places = node ^ labels
            places = np.where(places < len(units), places, 0)
            for place in places[(units[places] & 0x800000FF) == labels]:
                unit = int(units[place])
                longer, below = key + bytes([unit & 0xFF]), int(place) ^ _offset(unit)
                if unit >> 8 & 1:
                    yield longer, int(units[below]) & 0x7FFFFFFF
                else:
                    following.append((longer, below))
        level = following


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)
