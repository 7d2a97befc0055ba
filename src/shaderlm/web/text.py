"""What a page needs to know of text: tokenizer.json, and the numbers of special tokens.

The page's tokenizer is the package @huggingface/tokenizers. What it reads differently from `tokenizers` is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ..errors import ModelError
from ..text import Tokenizer
from ..text.vocabulary import CONTROL, UNKNOWN

# Rules that the page's tokenizer has, by the entry of tokenizer.json.
_KNOWN = {
    "normalizer": "Sequence Replace NFC NFD NFKC NFKD Strip StripAccents Lowercase Prepend",
    "pre_tokenizer": "Sequence Whitespace WhitespaceSplit Metaspace ByteLevel Split Punctuation Digits",
}
_MISSING_IN_JAVASCRIPT = re.compile(r"\\[KGXRyY]|\(\?~")


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The encoder that reads special tokens, with the decoder that belongs to it, in as few bytes as it takes.

    Merges are written as texts "a b" where no token has a space: two thirds of the bytes of pairs.
    """
    found = json.loads(tokenizer.encoder_json())
    _check(found)
    model = found["model"]
    if not any(" " in part for pair in model["merges"] for part in pair):
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
    for token in found["added_tokens"]:
        token["special"] = token["content"] in tokenizer.special_tokens
    found["decoder"] = _decoder(tokenizer)
    return json.dumps(found, ensure_ascii=False, separators=(",", ":"))


def _check(found: dict[str, Any]) -> None:
    kind = found["model"]["type"]
    if kind != "BPE":
        raise _refused(f"its vocabulary is of the type {kind}; BPE is read")
    for entry, known in _KNOWN.items():
        for rule in _rules(found[entry]):
            if rule["type"] not in known.split():
                raise _refused(f"it has a {entry} {rule['type']}; {', '.join(known.split())} are read")
            pattern = rule.get("pattern")
            text = pattern.get("Regex", "") if isinstance(pattern, dict) else ""
            missing = _MISSING_IN_JAVASCRIPT.search(text)
            if missing:
                raise _refused(f"it splits text by an expression with {missing[0]}, which JavaScript does not have")


def _refused(reason: str) -> ModelError:
    return ModelError(f"the tokenizer of this model cannot run in a browser: {reason}")


def _rules(given: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A rule, and those that it consists of."""
    if given is not None:
        yield given
        for inner in (*given.get("normalizers", ()), *given.get("pretokenizers", ())):
            yield from _rules(inner)


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
    return {
        "bos_token": "" if vocabulary.bos is None else vocabulary.tokens[vocabulary.bos],
        "eos_token": "" if vocabulary.eos is None else vocabulary.tokens[vocabulary.eos],
        "bos_id": vocabulary.bos,
        "eos_id": vocabulary.eos,
        "add_bos": vocabulary.add_bos,
        "add_eos": vocabulary.add_eos,
        "stop_ids": sorted(tokenizer.stop_ids),
        "special_tokens": dict(tokenizer.special_tokens),
        "silent_ids": [i for i in vocabulary.not_normal if vocabulary.types[i] in (CONTROL, UNKNOWN)],
        "decoder": "byte_level" if vocabulary.kind == "bpe" else "sentencepiece",
        "add_space_prefix": vocabulary.add_space_prefix,
        "clean_spaces": False,
        "template": template,
        "sampling": {},
    }
