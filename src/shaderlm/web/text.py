"""What a page needs to know of text: tokenizer.json with the rules of its tokenizer, and the numbers of special tokens.

`tokenizer.js` runs the rules. They are those of the encoder of `tokenizers`, in fewer kinds: see `docs/web.md`. A
tokenizer with other rules is refused.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from tokenizers import normalizers, pre_tokenizers

from ..errors import ModelError
from ..text import Tokenizer
from ..text.chat_output import thinking_tags
from ..text.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED
from .charsmap import pairs
from .expressions import (
    Classes,
    Ranges,
    UnsupportedError,
    all_characters,
    pieces,
    quoted,
    ranges_of,
    translated,
)

Rule = dict[str, Any]

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BEHAVIORS = {
    "Isolated": "isolated",
    "Removed": "removed",
    "MergedWithPrevious": "previous",
    "MergedWithNext": "next",
    "Contiguous": "contiguous",
}
_FLAGS = ("normalized", "lstrip", "rstrip", "single_word")
# Of models, beside their vocabulary: what must have no effect.
_NEUTRAL = {"dropout": (None, 0), "continuing_subword_prefix": (None, ""), "end_of_word_suffix": (None, "")}


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The file, in as few bytes as it takes."""
    encoder, vocabulary, classes = json.loads(tokenizer.encoder_json()), tokenizer.vocabulary, Classes()
    normalizer = _rules(encoder["normalizer"], "normalizer", _NORMALIZERS, classes)
    splits = _rules(encoder["pre_tokenizer"], "pre_tokenizer", _PRE_TOKENIZERS, classes)
    # The place of a first word in the text is not known where something before it may be gone.
    shortening = [rule for rule in normalizer if rule["kind"] == "characters" or rule.get("by") == ""]
    if any(rule.get("first") for rule in splits[0 if shortening else 2 :]):
        raise _refused("it puts a space before the first word alone, behind rules that may take text away")
    shown = (USER_DEFINED, BYTE)
    file = {
        "tokens": list(vocabulary.tokens),
        **_model(encoder["model"]),
        "added": [_added(token, tokenizer) for token in encoder["added_tokens"]],
        "byte_ids": [i for i in vocabulary.not_normal if vocabulary.types[i] == BYTE],
        "normalizer": normalizer,
        "splits": splits,
        "classes": classes.listed(),
    }
    if "scores" in file:
        file["hidden"] = [i for i in vocabulary.not_normal if vocabulary.types[i] not in shown]
    return json.dumps(file, ensure_ascii=False, separators=(",", ":"))


def _refused(reason: str) -> ModelError:
    return ModelError(f"the tokenizer of this model cannot run in a browser: {reason}")


def _model(model: Rule) -> dict[str, Any]:
    for name, neutral in _NEUTRAL.items():
        if model.get(name) not in neutral:
            raise _refused(f"its model has a {name}, {model[name]!r:.40}")
    if model["type"] == "Unigram":
        if model["unk_id"] is None:
            raise _refused("its model has no unknown token")
        options = {"unknown": model["unk_id"], "byte_fallback": model["byte_fallback"]}
        return {"model": options, "scores": [score for _, score in model["vocab"]]}
    names = {"fuse_unknown": "fuse_unk", "byte_fallback": "byte_fallback", "ignore_merges": "ignore_merges"}
    unknown = model["unk_token"]
    if unknown is not None and unknown not in model["vocab"]:
        raise _refused(f"its vocabulary lacks its unknown token, {unknown!r:.40}")
    options = {"unknown": model["vocab"].get(unknown), **{name: model[theirs] for name, theirs in names.items()}}
    return {"model": options, "merges": _merges(model["vocab"], model["merges"])}


def _merges(vocabulary: Mapping[str, int], merges: list[tuple[str, str]]) -> list[int]:
    """The token that each makes, as its distance from the one before, and the length of its first part in UTF-16."""
    numbers, before = list[int](), 0
    for first, second in merges:
        token = vocabulary[first + second]
        numbers += (token - before, len(first) if first.isascii() else len(first.encode("utf-16-le")) // 2)
        before = token
    return numbers


def _added(token: Rule, tokenizer: Tokenizer) -> Rule:
    flags = {name: True for name in _FLAGS if token[name]}
    special = {"special": True} if token["content"] in tokenizer.special_tokens else {}
    return {"id": token["id"], **special, **flags}


# Rules -----------------------------------------------------------------------------------------------------

_Translate = Callable[[Rule, Classes], list[Rule]]


def _rules(rule: Rule | None, entry: str, known: Mapping[str, _Translate], classes: Classes) -> list[Rule]:
    """A rule of `tokenizers`, or those of a sequence, as rules of `tokenizer.js`."""
    if rule is None:
        return []
    if rule["type"] == "Sequence":
        parts = rule["normalizers" if entry == "normalizer" else "pretokenizers"]
        return [each for part in parts for each in _rules(part, entry, known, classes)]
    if rule["type"] not in known:
        raise _refused(f"it has a {entry} {rule['type']}; Sequence, {', '.join(known)} are read")
    try:
        return known[rule["type"]](rule, classes)
    except UnsupportedError as what:
        raise _refused(f"its {rule['type']} has an expression with {what}, which JavaScript does not have") from None


def _expression(pattern: Rule, classes: Classes) -> str:
    """Of a pattern, {"Regex": …} or {"String": …}."""
    return translated(pattern["Regex"], classes) if "Regex" in pattern else quoted(pattern["String"])


def _replaced(expression: str, by: str) -> Rule:
    return {"kind": "replace", "expression": expression, "by": by}


def _form(rule: Rule, classes: Classes) -> list[Rule]:
    characters = classes.add(_composing(rule["type"][:-1] + "D"))
    return [{"kind": "form", "expression": f"{characters}+", "form": rule["type"]}]


@cache
def _composing(form: str) -> Ranges:
    """All characters that a form of Unicode changes or moves, and those that they consist of.

    Those that came to Unicode later are none of them. Browsers may know them, and must leave them as they are, too.
    """
    normalizer = getattr(normalizers, form)()

    def normalized(before: str = "", after: str = "") -> list[str]:
        text = "\0".join(f"{before}{character}{after}" for character in all_characters()[1:])
        return str(normalizer.normalize_str(text)).split("\0")

    low, high = "\u0334", "\u0345"  # marks that come before, and after, nearly all others
    forms = zip(all_characters()[1:], normalized(), normalized(before=high), normalized(after=low), strict=True)
    parts = set[str]()
    for character, text, first, last in forms:
        if text != character or first != high + text or last != text + low:
            parts.update(character, text)
    return ranges_of(sorted(parts))


def _lowercase(rule: Rule, classes: Classes) -> list[Rule]:
    upper = (each for each in all_characters() if each != "\0" and normalizers.Lowercase().normalize_str(each) != each)
    return [{"kind": "lowercase", "expression": classes.add(ranges_of(upper))}]


def _strip(rule: Rule, classes: Classes) -> list[Rule]:
    space = classes.add(_spaces())
    sides = {f"^{space}+": rule["strip_left"], f"(?<!{space}){space}+$": rule["strip_right"]}
    return [_replaced(side, "") for side, wanted in sides.items() if wanted]


def _strip_accents(rule: Rule, classes: Classes) -> list[Rule]:
    remaining = set(normalizers.StripAccents().normalize_str(all_characters()))
    return [_replaced(classes.add(ranges_of(each for each in all_characters() if each not in remaining)), "")]


def _characters(rule: Rule, classes: Classes) -> list[Rule]:
    return [{"kind": "characters", "pairs": pairs(base64.b64decode(rule["precompiled_charsmap"]))}]


_NORMALIZERS: Mapping[str, _Translate] = {
    **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD"), _form),
    "Lowercase": _lowercase,
    "Prepend": lambda rule, classes: [{"kind": "prepend", "by": rule["prepend"]}],
    "Precompiled": _characters,
    "Replace": lambda rule, classes: [_replaced(_expression(rule["pattern"], classes), rule["content"])],
    "Strip": _strip,
    "StripAccents": _strip_accents,
}


def _split(expression: str, behavior: str, invert: bool = False) -> Rule:
    return {"kind": "split", "expression": expression, "behavior": _BEHAVIORS[behavior], "invert": invert}


@cache
def _spaces() -> Ranges:
    remaining = set("".join(pieces(pre_tokenizers.WhitespaceSplit())))
    return ranges_of(character for character in all_characters() if character not in remaining)


def _every_second(rule: pre_tokenizers.PreTokenizer) -> Ranges:
    """Characters of a rule that keeps their runs apart, and of which U+0000 is none."""
    return ranges_of(pieces(rule)[1::2])


def _digits(rule: Rule, classes: Classes) -> list[Rule]:
    digits = classes.add(_every_second(pre_tokenizers.Digits(individual_digits=False)))
    return [_split(digits, "Isolated" if rule["individual_digits"] else "Contiguous")]


def _punctuation(rule: Rule, classes: Classes) -> list[Rule]:
    return [_split(classes.add(_every_second(pre_tokenizers.Punctuation("contiguous"))), rule["behavior"])]


def _metaspace(rule: Rule, classes: Classes) -> list[Rule]:
    sign, scheme = rule["replacement"], rule["prepend_scheme"]
    rules = [_replaced(quoted(" "), sign)]
    if scheme != "never":
        rules.append({"kind": "prefix", "by": sign, "first": scheme == "first"})
    return [*rules, _split(quoted(sign), "MergedWithNext")] if rule["split"] else rules


def _byte_level(rule: Rule, classes: Classes) -> list[Rule]:
    prefix = [{"kind": "prefix", "by": " ", "first": False}] if rule["add_prefix_space"] else []
    words = [_split(translated(_GPT2, classes), "Isolated")] if rule["use_regex"] else []
    return [*prefix, *words, {"kind": "bytes"}]


_PRE_TOKENIZERS: Mapping[str, _Translate] = {
    "ByteLevel": _byte_level,
    "Digits": _digits,
    "Metaspace": _metaspace,
    "Punctuation": _punctuation,
    "Split": lambda rule, classes: [_split(_expression(rule["pattern"], classes), rule["behavior"], rule["invert"])],
    "WhitespaceSplit": lambda rule, classes: [_split(classes.add(_spaces()), "Removed")],
}


# Of plan.json ----------------------------------------------------------------------------------------------


def text_entry(tokenizer: Tokenizer, template: str | None, source: str = "") -> dict[str, Any]:
    """The entry "text" of plan.json. `template`: the name of its file, `source`: what is in it."""
    vocabulary = tokenizer.vocabulary
    tags = thinking_tags(source) or ()
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
