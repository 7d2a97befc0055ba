"""A checkpoint's vocabulary as plain, checked data. Reads metadata by GGUF's names; knows no files."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import ModelError
from .splits import SPLITS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # GGUF's token types
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_PREFIX = "tokenizer.ggml."
# Of tokenizer.ggml.model: encoders and models of other kinds have them.
_NONE = ("none", "no_vocab")  # what converters write for a file without a vocabulary
_OTHERS = {"bert": "WordPiece", "rwkv": "RWKV's own", "plamo2": "PLaMo-2's own"}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and the rules that turn text into them. `kind` is "bpe" (byte-level), "spm", "unigram" or "none".

    "none" is that of files without a vocabulary: they run with token ids, and the text of a token is its number.
    "spm" merges pieces in the order of their scores, or of `merges` if it is `ranked`; "unigram" takes the pieces with
    the highest sum of scores: the two algorithms of SentencePiece.
    """

    kind: str
    pre: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    bos: int | None
    eos: int | None
    unknown: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    # As the file has it: a model whose template is not even text can still continue text. `ChatTemplate` judges it.
    chat_template: object
    # Rules of SentencePiece: runs of spaces become one, and none is at an end; a space is written ▁; a table of
    # characters and what replaces them.
    remove_extra_whitespaces: bool = False
    escape_whitespaces: bool = True
    charsmap: bytes = b""
    # Tokens that end a turn or a message, beside EOS.
    ends: Sequence[int] = ()
    # The rules of a tokenizer.json, which take the place of `pre`: see `huggingface`.
    rules: str | None = None
    # Added tokens that take spaces and line ends before them, or after them, as a part of themselves.
    strip_before: frozenset[int] = frozenset()
    strip_after: frozenset[int] = frozenset()
    ranked: bool = False  # pieces are merged in the order of `merges`
    suppressed: Sequence[int] = ()  # tokens that are never generated

    @classmethod
    def _none(cls, size: int) -> Vocabulary:
        tokens = [f"[{i}]" for i in range(size)]
        return cls("none", "", tokens, [NORMAL] * size, [], [], None, None, None, False, False, False, None)

    @cached_property
    def not_normal(self) -> Sequence[int]:
        """The few tokens that are not plain text: special ones, bytes, those that a user defined."""
        return [i for i, kind in enumerate(self.types) if kind != NORMAL]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], size: int = 0) -> Vocabulary:
        """Take the vocabulary out of a GGUF file's metadata; what is missing or contradictory is a ModelError.

        size: how many tokens there are where the file has no vocabulary.
        """
        model = _text(metadata, "model", None)
        if model in _NONE:
            return cls._none(size)
        if model in _OTHERS:
            raise ModelError(
                f"{_PREFIX}model {model!r} ({_OTHERS[model]}) is not supported; 'gpt2', 'llama', 't5' and 'gemma4' are"
            )
        kind = {"gpt2": "bpe", "llama": "spm", "t5": "unigram", "gemma4": "spm"}.get(model)
        if kind is None:
            raise _wrong("model", "'gpt2', 'llama', 't5' or 'gemma4'", model)
        ranked = kind == "bpe" or model == "gemma4"
        tokens = _list(metadata, "tokens", "strings", {str}, _any, None)
        if "" in tokens:
            raise _wrong("tokens", "strings that are not empty", f"an empty one at {tokens.index('')}")
        repeated = len(tokens) - len(set(tokens))
        if repeated:
            raise ModelError(f"tokenizer.ggml.tokens must differ, {repeated} are repeated")
        types = _list(
            metadata, "token_type", f"whole numbers from 0 to {BYTE}", {int}, _is_type, [NORMAL] * len(tokens)
        )
        scores = _list(metadata, "scores", "numbers", {int, float}, _is_number, [])
        _same_length("token_type", types, tokens)
        if not ranked:
            _same_length("scores", scores, tokens)
        pre = _text(metadata, "pre", "default")
        before, after = _stripping(metadata, tokens, types)
        known = SPLITS.get(pre) if kind == "bpe" else None
        return cls(
            kind=kind,
            pre=pre,
            tokens=tokens,
            types=types,
            scores=scores,
            merges=_list(metadata, "merges", "strings", {str}, _any, None if ranked else []),
            bos=_token(metadata, "bos", tokens),
            eos=_token(metadata, "eos", tokens),
            unknown=_token(metadata, "unknown", tokens),
            add_bos=_switch(metadata, "add_bos_token", kind == "spm" or (known is not None and known.add_bos)),
            add_eos=_switch(metadata, "add_eos_token", kind == "unigram"),
            add_space_prefix=_switch(metadata, "add_space_prefix", kind != "bpe"),
            chat_template=metadata.get("tokenizer.chat_template"),
            remove_extra_whitespaces=_switch(metadata, "remove_extra_whitespaces", False),
            escape_whitespaces=_switch(metadata, "escape_whitespaces", True),
            charsmap=_bytes(metadata, "precompiled_charsmap"),
            ends=_ends(metadata, tokens),
            rules=_rules(metadata),
            strip_before=before,
            strip_after=after,
            ranked=ranked,
            suppressed=_suppressed(metadata, len(tokens)),
        )


# One entry of the metadata each: its value, `default` where the file has none, or a ModelError ----------------


def _wrong(name: str, expected: str, value: object) -> ModelError:
    return ModelError(f"{_PREFIX}{name} must be {expected}, the file has {reprlib.repr(value)}")


def _text(metadata: Mapping[str, Any], name: str, default: str | None) -> str:
    value = metadata.get(f"{_PREFIX}{name}", default)
    if not isinstance(value, str):
        raise _wrong(name, "a string", value)
    return value


def _switch(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"{_PREFIX}{name}", default)
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _bytes(metadata: Mapping[str, Any], name: str) -> bytes:
    value = metadata.get(f"{_PREFIX}{name}", b"")
    if isinstance(value, bytes):
        return value
    # GGUF has a list of numbers. A converter may have written them with a sign.
    if not isinstance(value, list) or not all(type(item) is int and -128 <= item < 256 for item in value):
        raise _wrong(name, "a list of bytes", value)
    return bytes(item & 255 for item in value)


def _list(
    metadata: Mapping[str, Any],
    name: str,
    of: str,
    types: Set[type],
    right: Callable[[Any], bool],
    default: list[Any] | None,
) -> list[Any]:
    """A list whose items have one of the types and are `right`. Without a default it must be there, not empty."""
    value = metadata.get(f"{_PREFIX}{name}")
    if value is None and default is not None:
        return default
    if not isinstance(value, list) or (default is None and not value):
        raise _wrong(name, f"a list of {of}", value)
    # There are 100,000 of them: their types are compared in C, and `right` is not asked about the same value twice.
    if not set(map(type, value)) <= types or (right is not _any and not all(map(right, set(value)))):
        i, item = next((i, item) for i, item in enumerate(value) if type(item) not in types or not right(item))
        raise ModelError(f"{_PREFIX}{name} must be a list of {of}, the file has {reprlib.repr(item)} at {i}")
    return value


def _any(item: object) -> bool:
    return True


def _is_type(item: int) -> bool:
    return 0 <= item <= BYTE


def _is_number(item: float) -> bool:
    """NaN is none: pieces are put in the order of their scores."""
    return not math.isnan(item)


def _same_length(name: str, values: Sequence[Any], tokens: Sequence[str]) -> None:
    if len(values) != len(tokens):
        raise ModelError(f"{_PREFIX}{name} must have one entry per token, {len(tokens)}; the file has {len(values)}")


def _ends(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    ends = _list(metadata, "end_token_ids", "token ids", {int}, lambda i: 0 <= i < len(tokens), [])
    return [*ends, *(i for i in (_token(metadata, name, tokens) for name in ("eot", "eom")) if i is not None)]


def _suppressed(metadata: Mapping[str, Any], count: int) -> list[int]:
    """Those that are no token never come."""
    listed = _list(metadata, "suppress_tokens", "whole numbers", {int}, _any, [])
    return sorted({each for each in listed if 0 <= each < count})


def _token(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    value = metadata.get(f"{_PREFIX}{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(tokens):
        raise _wrong(f"{name}_token_id", f"a whole number from 0 to {len(tokens) - 1}, the id of a token", value)
    return value


# No key of GGUF: of folders, as JSON, {"before": [ids], "after": [ids]}.
STRIPPING = "tokenizer.stripping"
# Of the tokens that Phi-3 adds to Llama's, those that take no spaces after them. No GGUF file says so.
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")


def _stripping(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Which added tokens take spaces before them, and after them."""
    listed = metadata.get(STRIPPING)
    if listed is not None:
        return _listed_stripping(listed, len(tokens))
    name = str(metadata.get("general.name", "")).lower()
    phi3 = metadata.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name
    if not phi3 or metadata.get(f"{_PREFIX}model") != "llama":
        return frozenset(), frozenset()
    added = {i for i, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED) or tokens[i] == "</s>"}
    return frozenset(), frozenset(i for i in added if tokens[i] not in _PHI3_PLAIN)


def _listed_stripping(listed: object, count: int) -> tuple[frozenset[int], frozenset[int]]:
    try:
        read = json.loads(listed) if isinstance(listed, str) else {}
        sides = [frozenset(read[name]) for name in ("before", "after")]
    except (ValueError, RecursionError, TypeError, KeyError):
        raise ModelError(f"{STRIPPING} must list ids before and after, the file has {reprlib.repr(listed)}") from None
    if not all(type(i) is int and 0 <= i < count for ids in sides for i in ids):
        raise ModelError(f"{STRIPPING} must have ids of tokens, the file has {reprlib.repr(listed)}")
    return sides[0], sides[1]


def _rules(metadata: Mapping[str, Any]) -> str | None:
    """The rules of a tokenizer.json, where the file does not name one of the known ones."""
    rules = metadata.get("tokenizer.huggingface.json")
    return rules if isinstance(rules, str) and f"{_PREFIX}pre" not in metadata else None
