"""What a page needs to know of text: tokenizer.json, the chat template, and the numbers of special tokens."""

from __future__ import annotations

import json
from typing import Any

from ..text import Tokenizer
from ..text.vocabulary import CONTROL, UNKNOWN


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The encoder that reads special tokens, with the decoder that belongs to it, without spaces between.

    Merges are written as texts "a b" where no token has a space: two thirds of the bytes of pairs.
    """
    found = json.loads(tokenizer.encoder_json())
    model = found["model"]
    if model["type"] == "BPE" and not any(" " in part for pair in model["merges"] for part in pair):
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
    for token in found["added_tokens"]:
        token["special"] = token["content"] in tokenizer.special_tokens
    found["decoder"] = _decoder(tokenizer)
    return json.dumps(found, ensure_ascii=False, separators=(",", ":"))


def _decoder(tokenizer: Tokenizer) -> dict[str, Any]:
    if tokenizer.vocabulary.kind == "bpe":
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if tokenizer.vocabulary.add_space_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def text_entry(tokenizer: Tokenizer, template: str | None) -> dict[str, Any]:
    """The entry "text" of plan.json. `template`: the name of its file."""
    vocabulary = tokenizer.vocabulary
    silent = [i for i in vocabulary.not_normal if vocabulary.types[i] in (CONTROL, UNKNOWN)]
    return {
        "bos_token": "" if vocabulary.bos is None else vocabulary.tokens[vocabulary.bos],
        "eos_token": "" if vocabulary.eos is None else vocabulary.tokens[vocabulary.eos],
        "bos_id": vocabulary.bos,
        "eos_id": vocabulary.eos,
        "add_bos": vocabulary.add_bos,
        "add_eos": vocabulary.add_eos,
        "stop_ids": sorted(tokenizer.stop_ids),
        "special_tokens": dict(tokenizer.special_tokens),
        "silent_ids": silent,
        "decoder": "byte_level" if vocabulary.kind == "bpe" else "sentencepiece",
        "add_space_prefix": vocabulary.add_space_prefix,
        "clean_spaces": False,
        "template": template,
        "sampling": {},
    }
