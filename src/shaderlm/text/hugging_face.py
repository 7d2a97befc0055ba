"""The tokenizer of a Hugging Face folder as metadata with GGUF's names, from the contents of its files."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from ..errors import ModelError
from . import sentencepiece
from .vocabulary import BYTE, BYTE_TOKEN, CONTROL, NORMAL, USER_DEFINED

# The files that `metadata_of` reads. All but one of the first two may be absent.
FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_UNUSED = 5


def metadata_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Tokens and rules, from `tokenizer.json` or else from `tokenizer.model`, with what the other files add."""
    config = _json(files, "tokenizer_config.json")
    if "tokenizer.json" in files:
        found = _of_json(_json(files, "tokenizer.json"))
    elif "tokenizer.model" in files:
        found = sentencepiece.metadata_of(files["tokenizer.model"])
        _add_tokens(found, config.get("added_tokens_decoder", {}))
    else:
        raise ModelError("the folder must have tokenizer.json or tokenizer.model, it has neither")
    ids = {text: i for i, text in enumerate(found["tokenizer.ggml.tokens"])}
    for name, key in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        given = config.get(key)
        text = given.get("content") if isinstance(given, dict) else given
        if isinstance(text, str) and text in ids:
            found[f"tokenizer.ggml.{name}_token_id"] = ids[text]
        elif key in config and given is None:
            found.pop(f"tokenizer.ggml.{name}_token_id", None)
    for key in ("add_bos_token", "add_eos_token"):
        if isinstance(config.get(key), bool):
            found[f"tokenizer.ggml.{key}"] = config[key]
    ends = _json(files, "generation_config.json").get("eos_token_id")
    found["tokenizer.ggml.end_token_ids"] = ends if isinstance(ends, list) else [] if ends is None else [ends]
    template = _template(files, config)
    return found if template is None else found | {"tokenizer.chat_template": template}


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        found = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as failure:
        raise ModelError(f"{name} is not JSON: {failure}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{name} must be a JSON object, the file has {reprlib.repr(found)}")
    return found


def _template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> object:
    """A file of its own, or in the configuration: one text, or several with names, of which "default" is taken."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8", errors="replace")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        return named.get("default")
    return found


def _add_tokens(found: dict[str, Any], added: Any) -> None:
    """Tokens that the folder adds to those of a tokenizer.model, by id."""
    tokens, scores, types = (found[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    if not isinstance(added, dict) or not all(
        key.isascii() and key.isdigit() and isinstance(each, dict) and isinstance(each.get("content"), str)
        for key, each in added.items()
    ):
        given = reprlib.repr(added)
        raise ModelError(f"added_tokens_decoder must be an object of tokens by id, tokenizer_config.json has {given}")
    for i, each in sorted((int(key), each) for key, each in added.items()):
        if i > len(tokens):
            raise ModelError(f"added_tokens_decoder must go on at {len(tokens)}, tokenizer_config.json has {i}")
        if i == len(tokens):
            tokens.append(each["content"])
            scores.append(-1000.0)
            types.append(NORMAL)
        elif tokens[i] != each["content"]:
            given = f"{each['content']!r} for {i}"
            raise ModelError(f"added_tokens_decoder must agree with tokenizer.model, {tokens[i]!r}; it has {given}")
        if types[i] in (NORMAL, USER_DEFINED, _UNUSED):
            types[i] = CONTROL if each.get("special") is True else USER_DEFINED


def _of_json(document: dict[str, Any]) -> dict[str, Any]:
    model = document.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind not in ("BPE", "Unigram"):
        raise ModelError(f"tokenizer.json must have a model of the type BPE or Unigram, it has {reprlib.repr(kind)}")
    texts = _texts(model, document.get("added_tokens") or [])
    size = max(texts, default=-1) + 1
    if size > 2 * len(texts) + 1000:
        raise ModelError(f"tokenizer.json must number its tokens one by one, it has {len(texts):,} up to {size - 1:,}")
    special = {each["id"]: each.get("special") is True for each in document.get("added_tokens") or []}
    byte_level = '"ByteLevel"' in json.dumps([document.get("pre_tokenizer"), document.get("decoder")])
    types = [NORMAL] * size
    for i in range(size):
        if i not in texts:
            texts[i], types[i] = f"[unused {i}]", _UNUSED
        elif i in special:
            types[i] = CONTROL if special[i] else USER_DEFINED
        elif not byte_level and BYTE_TOKEN.fullmatch(texts[i]):
            types[i] = BYTE
    pipeline = {key: document.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    found = {
        "model": "gpt2" if byte_level else "llama",
        "tokens": [texts[i] for i in range(size)],
        "token_type": types,
        "scores": [0.0] * size,
        "merges": [],
        "add_space_prefix": not byte_level and _prepends(document),
        "add_bos_token": _begins_with_special(document.get("post_processor")),
        "add_eos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()} | {
        "tokenizer.json": json.dumps({"version": "1.0", **pipeline})
    }


def _texts(model: Mapping[str, Any], added: Any) -> dict[int, str]:
    """Token id → text, of the model's vocabulary and of the tokens that are added to it."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict) and all(type(i) is int and i >= 0 for i in vocab.values()):
        texts = {i: text for text, i in vocab.items()}
    elif isinstance(vocab, list) and all(isinstance(each, list) and each and type(each[0]) is str for each in vocab):
        texts = {i: each[0] for i, each in enumerate(vocab)}
    else:
        raise ModelError("tokenizer.json must have a vocabulary: token ids by text, or a list of texts with scores")
    if not isinstance(added, list) or not all(
        isinstance(each, dict) and type(each.get("id")) is int and each["id"] >= 0 and type(each.get("content")) is str
        for each in added
    ):
        raise ModelError(f"added_tokens must be a list of objects with id and content, it is {reprlib.repr(added)}")
    return texts | {each["id"]: each["content"] for each in added}


def _prepends(document: Mapping[str, Any]) -> bool:
    """Is a space put before the text, which decoding takes away?"""
    text = json.dumps([document.get("normalizer"), document.get("pre_tokenizer")])
    return '"Prepend"' in text or ('"Metaspace"' in text and '"prepend_scheme": "never"' not in text)


def _begins_with_special(processor: Any) -> bool:
    """Does the template that is applied to one text begin with a special token?"""
    if not isinstance(processor, dict):
        return False
    if isinstance(processor.get("processors"), list):
        return any(map(_begins_with_special, processor["processors"]))
    single = processor.get("single")
    return bool(isinstance(single, list) and single and isinstance(single[0], dict) and "SpecialToken" in single[0])
