"""SentencePiece's `tokenizer.model`, a protocol buffer, under GGUF's names without tokenizer.ggml."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from ..errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces, and GGUF's of tokens

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_KINDS = {1: "t5", 2: "llama"}  # TrainerSpec.model_type → tokenizer.ggml.model: unigram, BPE
_OTHER_KINDS = {3: "words", 4: "characters"}


def pieces_metadata(data: bytes) -> dict[str, Any]:
    """Pieces, scores, types and rules of a `tokenizer.model`. What is no such file is a ModelError."""
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = _message(value)
            tokens.append(_text(piece.get(1, b"")))
            scores.append(_float(piece.get(2, bytes(4))))
            types.append(_int(piece.get(3, NORMAL)))
        elif number == 2:
            trainer |= _message(value)
        elif number == 3:
            normalizer |= _message(value)
    if not tokens:
        raise ModelError("tokenizer.model must be a SentencePiece model, it has no pieces")
    kind = _int(trainer.get(3, 1))
    if kind not in _KINDS:
        other = _OTHER_KINDS.get(kind, f"model_type {kind}")
        raise ModelError(f"tokenizer.model must be a SentencePiece model of type unigram or BPE, it is of {other}")
    if trainer.get(24):
        raise ModelError("tokenizer.model has treat_whitespace_as_suffix, which is not supported")
    metadata: dict[str, Any] = {
        "model": _KINDS[kind],
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "add_space_prefix": bool(normalizer.get(3, 1)),
        "remove_extra_whitespaces": bool(normalizer.get(4, 1)),
        "escape_whitespaces": bool(normalizer.get(5, 1)),
        "precompiled_charsmap": normalizer.get(2, b""),
    }
    if not isinstance(metadata["precompiled_charsmap"], bytes):
        raise _broken("precompiled_charsmap is a number")
    for name, field, default in (("unknown", 40, 0), ("bos", 41, 1), ("eos", 42, 2), ("padding", 43, -1)):
        token = _int(trainer.get(field, default))
        if 0 <= token < len(tokens) and types[token] in (CONTROL, UNKNOWN):
            metadata[f"{name}_token_id"] = token
    return metadata


# The wire format: a key (number · 8 + wire type), then a value -------------------------------------------


def _broken(why: str) -> ModelError:
    return ModelError(f"tokenizer.model is damaged: {why}")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire)
        if wire == _BYTES:
            size, at = _varint(data, at)
        if size is None:
            raise _broken(f"a field has the wire type {wire}")
        if size > len(data) - at:
            raise _broken(f"a field of {size:,} bytes begins {len(data) - at:,} bytes before its end")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise _broken("it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _broken("a number has more than ten bytes")


def _message(value: Any) -> dict[int, Any]:
    """The last value of each field. None of those that are read is repeated."""
    if not isinstance(value, bytes):
        raise _broken("a message is a number")
    return dict(_fields(value))


def _text(value: Any) -> str:
    try:
        return str(value, "utf-8")
    except (UnicodeDecodeError, TypeError):
        raise _broken("a piece is not text in UTF-8") from None


def _float(value: Any) -> float:
    if not isinstance(value, bytes) or len(value) != 4:
        raise _broken("a score is not a number of four bytes")
    return float(struct.unpack("<f", value)[0])


def _int(value: Any) -> int:
    """A number of 32 bits, which may be negative."""
    if not isinstance(value, int):
        raise _broken("a text is where a number must be")
    return (value & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
