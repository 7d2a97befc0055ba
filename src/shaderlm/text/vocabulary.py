"""A checkpoint's vocabulary as plain, checked data. Reads metadata by GGUF's names; knows no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # GGUF's token types
_PREFIX = "tokenizer.ggml."


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and the rules that turn text into them. `kind` is "bpe" (byte-level) or "spm" (SentencePiece-like)."""

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
    chat_template: str | None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Take the vocabulary out of a GGUF file's metadata; what is missing or contradictory is an InputError."""
        model = metadata.get(f"{_PREFIX}model")
        kind = {"gpt2": "bpe", "llama": "spm"}.get(str(model))
        if kind is None:
            raise InputError(f"tokenizer.ggml.model must be 'gpt2' or 'llama', got {model!r}")
        tokens = _strings(metadata, "tokens", required=True)
        if len(set(tokens)) != len(tokens):
            raise InputError(f"tokenizer.ggml.tokens must differ, {len(tokens) - len(set(tokens))} are repeated")
        types = [int(t) for t in metadata.get(f"{_PREFIX}token_type") or [NORMAL] * len(tokens)]
        scores = [float(s) for s in metadata.get(f"{_PREFIX}scores") or []]
        _same_length("token_type", types, tokens)
        if kind == "spm":
            _same_length("scores", scores, tokens)
        return cls(
            kind=kind,
            pre=str(metadata.get(f"{_PREFIX}pre", "default")),
            tokens=tokens,
            types=types,
            scores=scores,
            merges=_strings(metadata, "merges", required=kind == "bpe"),
            bos=_token(metadata, "bos", tokens),
            eos=_token(metadata, "eos", tokens),
            unknown=_token(metadata, "unknown", tokens),
            add_bos=bool(metadata.get(f"{_PREFIX}add_bos_token", kind == "spm")),
            add_eos=bool(metadata.get(f"{_PREFIX}add_eos_token", False)),
            add_space_prefix=bool(metadata.get(f"{_PREFIX}add_space_prefix", kind == "spm")),
            chat_template=metadata.get("tokenizer.chat_template"),
        )


def _strings(metadata: Mapping[str, Any], name: str, *, required: bool) -> list[str]:
    value = metadata.get(f"{_PREFIX}{name}")
    if value is None and not required:
        return []
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise InputError(f"tokenizer.ggml.{name} must be a list of strings, got {type(value).__name__}")
    return value


def _same_length(name: str, values: Sequence[Any], tokens: Sequence[str]) -> None:
    if len(values) != len(tokens):
        raise InputError(f"tokenizer.ggml.{name} must have one entry per token, {len(tokens)}; it has {len(values)}")


def _token(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    value = metadata.get(f"{_PREFIX}{name}_token_id")
    if value is None:
        return None
    if not 0 <= int(value) < len(tokens):
        raise InputError(f"tokenizer.ggml.{name}_token_id must lie in 0 … {len(tokens) - 1}, got {value}")
    return int(value)
