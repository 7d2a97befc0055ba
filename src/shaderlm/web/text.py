"""What a page needs to know of text: tokenizer.json, and the numbers of special tokens.

The page's tokenizer is the package @huggingface/tokenizers. What it reads differently from `tokenizers` is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ..errors import ModelError
from ..text import Tokenizer
from ..text.chat_output import END_OF_THINK, THINK
from ..text.vocabulary import CONTROL, UNKNOWN

_NORMALIZERS = "Sequence Replace NFC NFD NFKC NFKD Strip StripAccents Lowercase Prepend"
_PRE_TOKENIZERS = "Sequence WhitespaceSplit ByteLevel Split"  # and those that can be written as a Split
_MISSING_IN_JAVASCRIPT = re.compile(r"\\[KGXRyY]|\(\?~|\(\?[imsx-]+\)")
_PUNCTUATION = r"[!-/:-@\[-`{-~\p{P}]"


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The encoder that reads special tokens, with the decoder that belongs to it, in as few bytes as it takes.

    Merges are written as texts "a b" where no token has a space: two thirds of the bytes of pairs.
    """
    encoder = _checked(json.loads(tokenizer.encoder_json()))
    model = encoder["model"]
    if not any(" " in part for pair in model["merges"] for part in pair):
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
    for token in encoder["added_tokens"]:
        token["special"] = token["content"] in tokenizer.special_tokens
    encoder["decoder"] = _decoder(tokenizer)
    return json.dumps(encoder, ensure_ascii=False, separators=(",", ":"))


def _checked(encoder: dict[str, Any]) -> dict[str, Any]:
    """The same with rules that the page's tokenizer reads alike."""
    kind = encoder["model"]["type"]
    if kind != "BPE":
        raise _refused(f"its vocabulary is of the type {kind}; BPE is read")
    words = [token["content"] for token in encoder["added_tokens"] if token["single_word"]]
    if words:
        raise _refused(f"it finds {words[0]!r} as a single word alone")
    normalizer, pre_tokenizer = encoder["normalizer"], encoder["pre_tokenizer"]
    return {
        **encoder,
        "normalizer": normalizer and _rule("normalizer", normalizer, _NORMALIZERS.split()),
        "pre_tokenizer": pre_tokenizer and _rule("pre_tokenizer", pre_tokenizer, _PRE_TOKENIZERS.split()),
    }


def _refused(reason: str) -> ModelError:
    return ModelError(f"the tokenizer of this model cannot run in a browser: {reason}")


def _rule(entry: str, rule: dict[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """A rule, and those that it consists of."""
    parts = "normalizers" if entry == "normalizer" else "pretokenizers"
    if parts in rule:
        return {**rule, parts: [_rule(entry, each, known) for each in rule[parts]]}
    rule = _as_split(rule)
    if rule["type"] not in known:
        raise _refused(f"it has a {entry} {rule['type']}; {', '.join(known)} are read")
    pattern = rule.get("pattern", {})
    missing = _MISSING_IN_JAVASCRIPT.search(pattern.get("Regex", ""))
    if missing:
        raise _refused(f"it splits text by an expression with {missing[0]}, which JavaScript does not have")
    if rule["type"] == "Split" and not (
        (rule["behavior"], rule["invert"]) == ("Isolated", False)
        or (rule["behavior"] == "Removed" and "Regex" in pattern)
    ):
        how = f"{rule['behavior']}{' of what does not match' if rule['invert'] else ''}"
        raise _refused(f"it splits text by {pattern}, {how}; Isolated is read, and Removed of an expression")
    return rule


def _as_split(rule: dict[str, Any]) -> dict[str, Any]:
    """Rules that the page's tokenizer has, but reads differently, as a split by an expression.

    Its digits are those of ASCII, its punctuation comes in runs, and it merges no match with its neighbours.
    """
    kind, behavior = rule["type"], rule.get("behavior")
    regex = None
    if kind == "Digits":
        regex = r"\p{N}" if rule["individual_digits"] else r"\p{N}+"
    elif kind == "Punctuation" and behavior in ("Isolated", "Contiguous"):
        regex = _PUNCTUATION if behavior == "Isolated" else f"{_PUNCTUATION}+"
    elif kind == "Split" and "String" in rule["pattern"] and not rule["invert"]:
        text = re.escape(rule["pattern"]["String"])
        other = rf"(?:(?!{text})[\s\S])"
        merged = {
            "MergedWithPrevious": f"{other}+(?:{text})?|{text}",  # takes time in proportion to a text without any, too
            "MergedWithNext": f"{text}{other}*",
            "Contiguous": f"(?:{text})+",
        }
        regex = merged.get(str(behavior))
    if regex is None:
        return rule
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _decoder(tokenizer: Tokenizer) -> dict[str, Any]:
    if tokenizer.vocabulary.kind == "bpe":
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if tokenizer.vocabulary.add_space_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def text_entry(tokenizer: Tokenizer, template: str | None, source: str = "") -> dict[str, Any]:
    """The entry "text" of plan.json. `template`: the name of its file, `source`: what is in it."""
    vocabulary = tokenizer.vocabulary
    tags = (THINK, END_OF_THINK) if END_OF_THINK in source else ()
    return {
        "bos_token": "" if vocabulary.bos is None else vocabulary.tokens[vocabulary.bos],
        "eos_token": "" if vocabulary.eos is None else vocabulary.tokens[vocabulary.eos],
        "bos_id": vocabulary.bos,
        "add_bos": vocabulary.add_bos,
        "stop_ids": sorted(tokenizer.stop_ids),
        "special_tokens": dict(tokenizer.special_tokens),
        "silent_ids": [i for i in vocabulary.not_normal if vocabulary.types[i] in (CONTROL, UNKNOWN)],
        "shown_ids": [tokenizer.special_tokens[tag] for tag in tags if tag in tokenizer.special_tokens],
        "decoder": "byte_level" if vocabulary.kind == "bpe" else "sentencepiece",
        "add_space_prefix": vocabulary.add_space_prefix,
        "template": template,
    }
