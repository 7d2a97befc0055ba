"""Compiles grammars to see whether that ends in time: this file runs in a limited process, with `llguidance`.

Of a cost little depends on the tokens, so single bytes stand for them. A schema of forty bytes can take minutes and
gigabytes: {"type": "integer", "multipleOf": 9999991}. What has passed here may be compiled for a vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark


def make() -> Callable[[dict[str, Any]], tuple[str, str]]:
    """What the process answers with: the word "lark" and a grammar, or "passed"; or "refused" and the reason."""
    return _answer


def _answer(question: dict[str, Any]) -> tuple[str, str]:
    if "gbnf" in question:
        try:
            return "lark", any_to_lark(question["gbnf"])
        except MemoryError:
            raise
        except Exception as problem:  # it raises what it likes
            return "refused", str(problem)
    limits = llguidance.LLParserLimits(verbose_errors=False)
    tokenizer = _tokenizer(question["vocabulary"], json.dumps(question["special"]))
    matcher = llguidance.LLMatcher(tokenizer, question["grammar"], log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return ("refused", matcher.get_error()) if matcher.is_error() else ("passed", "")


@lru_cache(maxsize=4)
def _tokenizer(vocabulary: int, special: str) -> llguidance.LLTokenizer:
    """As many tokens as there are, of which only special ones have a text; bytes and an end after them."""
    wrapped: Any = llguidance.TokenizerWrapper(_Bytes(vocabulary, json.loads(special)))
    return llguidance.LLTokenizer(wrapped, eos_token=[wrapped.eos_token_id])


class _Bytes:
    """Grammars may name special tokens by their text, and all tokens by their number."""

    def __init__(self, vocabulary: int, special: dict[str, int]) -> None:
        self.tokens = [*[b""] * vocabulary, *(bytes([i]) for i in range(256)), b"<end>"]
        special = {text: number for text, number in special.items() if number < vocabulary}
        for text, number in special.items():
            self.tokens[number] = text.encode()
        self._first, self.eos_token_id, self.bos_token_id = vocabulary, vocabulary + 256, None
        self.special_token_ids = [*special.values(), self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        return [self._first + each for each in text.encode()]
