"""The rules of a tokenizer.json, without its vocabulary → an encoder of the `tokenizers` package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from ..errors import ModelError
from .tokenizer_errors import wrap_tokenizer_errors
from .vocabulary import Vocabulary

# What a model has beside its vocabulary, by its type and tokenizer.json's names, and their defaults.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "BPE": {
        "unk_token": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    },
    "Unigram": {"unk_id": None, "byte_fallback": False},
}
_WITHOUT_EFFECT = {"dropout": (None, 0, 0.0)}


def encoder(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """An encoder with all tokens of the vocabulary, and the rules of the file. Added tokens are still to be added."""
    rules = _rules(vocabulary)
    model = rules.get("model") or {}
    kind = model.get("type") if isinstance(model, dict) else None
    kind = "BPE" if kind is None else kind
    if not isinstance(model, dict) or not isinstance(kind, str) or kind not in _OPTIONS:
        raise ModelError(
            f"tokenizer.huggingface.json: model must be of the type {' or '.join(_OPTIONS)}, it is {model!r:.60}"
        )
    model = {name: value for name, value in model.items() if name != "type"}
    options = {name: model.pop(name, default) for name, default in _OPTIONS[kind].items()}
    options = {name: value for name, value in options.items() if value is not None}  # the package takes no None
    for name in ("vocab", "merges"):
        model.pop(name, None)  # a GGUF file may have the whole text
    for name, value in model.items():
        if value not in _WITHOUT_EFFECT.get(name, ()):
            raise ModelError(f"tokenizer.json: model.{name} is {value!r:.60}, which is not supported")
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    parts = {"normalizer": rules.get("normalizer"), "pre_tokenizer": rules.get("pre_tokenizer"), "model": empty}
    with wrap_tokenizer_errors("tokenizer.json"):
        template = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], **parts}))
        encoder = tokenizers.Tokenizer((_unigram if kind == "Unigram" else _bpe)(vocabulary, options))
    # Each is None where the file has none, which the package takes in its place.
    encoder.normalizer, encoder.pre_tokenizer = template.normalizer, template.pre_tokenizer
    return encoder


def _bpe(vocabulary: Vocabulary, options: dict[str, Any]) -> models.Model:
    ids = {text: i for i, text in enumerate(vocabulary.tokens)}
    pairs: Any = [tuple(merge.split(" ", 1)) for merge in vocabulary.merges]
    return models.BPE(vocab=ids, merges=pairs, **options)


def _unigram(vocabulary: Vocabulary, options: dict[str, Any]) -> models.Model:
    return models.Unigram(vocab=list(zip(vocabulary.tokens, vocabulary.scores, strict=True)), **options)


def added_tokens(vocabulary: Vocabulary) -> Mapping[str, AddedToken]:
    """How tokens that are searched for in a text are found, by their text."""
    tokens = {}
    listed = _rules(vocabulary).get("added_tokens") or []
    for each in listed if isinstance(listed, list) else [listed]:
        if not isinstance(each, dict) or not isinstance(each.get("content"), str):
            raise ModelError(f"tokenizer.huggingface.json: added_tokens must have a content, there is {each!r:.60}")
        switches = {name: each.get(name) is True for name in ("single_word", "lstrip", "rstrip", "normalized")}
        tokens[each["content"]] = AddedToken(each["content"], **switches)
    return tokens


def _rules(vocabulary: Vocabulary) -> dict[str, Any]:
    try:
        rules = json.loads(vocabulary.rules or "{}")
    except (ValueError, RecursionError) as problem:
        raise ModelError(f"tokenizer.huggingface.json is no JSON: {problem}") from None
    if not isinstance(rules, dict):
        raise ModelError(f"tokenizer.huggingface.json must be an object, it is {rules!r:.60}")
    return rules
