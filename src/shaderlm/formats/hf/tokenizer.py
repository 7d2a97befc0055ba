"""The tokenizer files of a Hugging Face folder → GGUF's keys tokenizer.ggml.*. Knows tables of tokens, no text rules.

The rules that split text are handed on as JSON, under GGUF's key tokenizer.huggingface.json: tokenizer.json without its
vocabulary. A SentencePiece model, which has no tokenizer.json, needs none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ModelError
from ..json_files import read_json
from ..mapped import map_file, unmap
from ..sampling_keys import SAMPLING_KEYS
from ..sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, pieces_metadata

JSON, MODEL, CONFIG = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
MODEL_CONFIG = "config.json"
_GENERATION, _TEMPLATE = "generation_config.json", "chat_template.jinja"
FILES = (JSON, MODEL, CONFIG, _GENERATION, _TEMPLATE)  # beside config.json
_MAX_JSON, _MAX_PIECES, _MAX_CONFIG, _MAX_TEMPLATE = 128 << 20, 64 << 20, 16 << 20, 4 << 20
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # GGUF's name: Hugging Face's


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, which must be there."""
    return read_json(folder / MODEL_CONFIG, _MAX_CONFIG)


def tokenizer_metadata(folder: Path, vocabulary: int) -> dict[str, Any]:
    """The keys of a folder's tokenizer, with as many tokens as the model has rows."""
    config = _optional(folder / CONFIG)
    if (folder / JSON).exists():
        table = _from_json(folder / JSON, read_json(folder / JSON, _MAX_JSON))
    elif (folder / MODEL).exists():
        table = _from_pieces(folder / MODEL)
    else:
        todo = "download the whole folder again"
        if (folder / "tekken.json").exists():
            todo = "tekken.json is not read. GGUF files of the model have its tokens inside"
        raise ModelError(f"{folder} has no tokenizer: {JSON} or {MODEL} is needed; {todo}")
    table.add_tokens(_added_by_config(folder / CONFIG, config))
    table.pad(vocabulary)
    metadata = table.metadata()
    metadata |= _special_ids(folder, config, table)
    for key in ("add_bos_token", "add_eos_token"):
        if isinstance(config.get(key), bool):
            metadata[f"tokenizer.ggml.{key}"] = config[key]
    template = _template(folder, config)
    return metadata if template is None else {**metadata, "tokenizer.chat_template": template}


class _Added(NamedTuple):
    """A token beside the vocabulary. lstrip, rstrip: spaces before it, and after it, are a part of it."""

    text: str
    special: bool
    lstrip: bool
    rstrip: bool


class _Table:
    """Tokens by id, as GGUF lists them."""

    def __init__(self, path: Path, model: str) -> None:
        self.path, self.model = path, model
        self.texts: dict[int, str] = {}
        self.types: dict[int, int] = {}
        self.scores: dict[int, float] = {}
        self.more: dict[str, Any] = {}  # other keys, without tokenizer.ggml.
        self.strips: dict[str, set[int]] = {"before": set(), "after": set()}
        self.rules: str | None = None

    def add_tokens(self, added: Mapping[int, _Added]) -> None:
        """Tokens beside the vocabulary."""
        for i, token in added.items():
            if self.types.get(i) not in (UNKNOWN, BYTE) or self.texts[i] != token.text:
                self.texts[i], self.types[i] = token.text, CONTROL if token.special else USER_DEFINED
            for side, strips in (("before", token.lstrip), ("after", token.rstrip)):
                if strips:
                    self.strips[side].add(i)

    def pad(self, count: int) -> None:
        """One token for every row of the embedding matrix: models have more rows than tokens."""
        if self.texts and max(self.texts) >= count:
            raise ModelError(f"{self.path}: the token {max(self.texts)} is past vocab_size, {count:,}")
        for i in range(count):
            if i not in self.texts:
                self.texts[i], self.types[i] = f"[PAD{i}]", UNUSED

    def ids(self) -> dict[str, int]:
        """The id of every token."""
        return {text: i for i, text in self.texts.items()}

    def metadata(self) -> dict[str, Any]:
        """GGUF's keys."""
        order = range(len(self.texts))
        listed: dict[str, Any] = {
            "model": self.model,
            "tokens": [self.texts[i] for i in order],
            "token_type": [self.types.get(i, NORMAL) for i in order],
        }
        if self.model != "gpt2":
            listed["scores"] = [self.scores.get(i, 0.0) for i in order]
        metadata = {f"tokenizer.ggml.{key}": value for key, value in {**listed, **self.more}.items()}
        if self.rules is not None:
            return {**metadata, "tokenizer.huggingface.json": self.rules}
        strips = {side: sorted(ids) for side, ids in self.strips.items()}
        return {**metadata, "tokenizer.stripping": json.dumps(strips)}


# tokenizer.model -----------------------------------------------------------------------------------------


def _from_pieces(path: Path) -> _Table:
    data = map_file(path, "a SentencePiece model")
    try:
        if len(data) > _MAX_PIECES:
            raise ModelError(f"{path} has {len(data):,} bytes, at most {_MAX_PIECES:,} can be real; download it again")
        pieces = pieces_metadata(data[:])
    finally:
        unmap(data)
    table = _Table(path, pieces.pop("model"))
    table.texts = dict(enumerate(pieces.pop("tokens")))
    table.types = dict(enumerate(pieces.pop("token_type")))
    table.scores = dict(enumerate(pieces.pop("scores")))
    table.more = {"pre": "default", **pieces}
    return table


# tokenizer.json ------------------------------------------------------------------------------------------


def _from_json(path: Path, file: dict[str, Any]) -> _Table:
    model = file.get("model")
    if not isinstance(model, dict):
        raise ModelError(f"{path}: model must be an object, it is {model!r:.60}")
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind not in ("BPE", "Unigram"):
        raise ModelError(f"{path}: the tokenizer is of the type {kind!r:.60}; BPE and Unigram are supported")
    byte_level = '"ByteLevel"' in json.dumps([file.get("pre_tokenizer"), file.get("decoder")])
    table = _Table(path, "t5" if kind == "Unigram" else "gpt2" if byte_level else "llama")
    vocabulary = model.get("vocab")
    if kind == "Unigram":
        table.texts, table.scores = _unigram(path, vocabulary)
    else:
        table.texts = _by_id(path, vocabulary)
        table.more["merges"] = _merges(path, model.get("merges"))
    bytes_too = model.get("byte_fallback") is True
    number = model.get("unk_id")
    unknown = model.get("unk_token") if kind == "BPE" else table.texts.get(number) if type(number) is int else None
    for i, text in table.texts.items():
        if text == unknown:
            table.types[i] = UNKNOWN
        elif bytes_too and _BYTE_TOKEN.fullmatch(text):
            table.types[i] = BYTE
    table.add_tokens(_added(path, file.get("added_tokens") or []))
    if not byte_level:
        table.more["add_space_prefix"] = _adds_space(file)
    table.more |= _framing(file, table)
    rules = {key: file.get(key) for key in ("normalizer", "pre_tokenizer", "added_tokens")}
    rules["model"] = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    table.rules = json.dumps(rules, ensure_ascii=False)
    return table


def _by_id(path: Path, vocabulary: Any) -> dict[int, str]:
    if not isinstance(vocabulary, dict) or not all(type(i) is int and i >= 0 for i in vocabulary.values()):
        raise ModelError(f"{path}: the vocabulary must give every token an id")
    by_id = {i: text for text, i in vocabulary.items()}
    if len(by_id) < len(vocabulary):
        raise ModelError(f"{path}: {len(vocabulary) - len(by_id)} tokens of the vocabulary share an id with another")
    return by_id


def _unigram(path: Path, vocabulary: Any) -> tuple[dict[int, str], dict[int, float]]:
    right = isinstance(vocabulary, list) and all(
        isinstance(each, list) and len(each) == 2 and isinstance(each[0], str) and isinstance(each[1], (int, float))
        for each in vocabulary
    )
    if not right or not all(math.isfinite(score) for _, score in vocabulary):
        raise ModelError(f"{path}: the vocabulary must be a list of texts with scores")
    texts = {i: text for i, (text, _) in enumerate(vocabulary)}
    return texts, {i: float(score) for i, (_, score) in enumerate(vocabulary)}


def _merges(path: Path, merges: Any) -> list[str]:
    """Pairs of tokens, as texts "a b" or as lists of two."""
    if not isinstance(merges, list):
        raise ModelError(f"{path}: merges must be a list, it is {merges!r:.60}")
    texts = [" ".join(each) if isinstance(each, list) and _texts(each) else each for each in merges]
    wrong = next((each for each in texts if not isinstance(each, str) or each.count(" ") != 1), None)
    if wrong is not None:
        raise ModelError(f"{path}: merges must be pairs of tokens without spaces, there is {wrong!r:.60}")
    return texts


def _texts(items: list[Any]) -> bool:
    return len(items) == 2 and all(isinstance(item, str) for item in items)


def _added(path: Path, entries: Any) -> dict[int, _Added]:
    tokens = {}
    for each in entries if isinstance(entries, list) else [entries]:
        i, text = (each.get("id"), each.get("content")) if isinstance(each, dict) else (None, None)
        if type(i) is not int or i < 0 or not isinstance(text, str) or not text:
            raise ModelError(f"{path}: added_tokens must have an id and a content, there is {each!r:.60}")
        tokens[i] = _Added(text, *(each.get(key) is True for key in ("special", "lstrip", "rstrip")))
    return tokens


def _adds_space(rules: Mapping[str, Any]) -> bool:
    """Is a space put before the first word?"""
    for part in _parts(rules.get("normalizer"), "normalizers"):
        if part.get("type") == "Prepend":
            return True
    for part in _parts(rules.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "Metaspace":
            scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
            return bool(scheme != "never")
    return False


def _framing(rules: Mapping[str, Any], table: _Table) -> dict[str, Any]:
    """Are there tokens before and after a text? A template says which: the special tokens around A.

    Without a template there are none. (Where a GGUF file does not say, there may be.)
    """
    ids = table.ids()
    for part in _parts(rules.get("post_processor"), "processors"):
        single = part.get("single")
        if part.get("type") == "ByteLevel":
            continue
        if part.get("type") != "TemplateProcessing" or not isinstance(single, list):
            raise ModelError(f"{table.path}: the post_processor {part.get('type')!s:.60} is not supported")
        special = [each.get("SpecialToken") if isinstance(each, dict) else None for each in single]
        names = [str(each.get("id")) if isinstance(each, dict) else None for each in special]
        at = next((i for i, name in enumerate(names) if name is None), len(names))
        before, after = ([name for name in part if name is not None] for part in (names[:at], names[at:]))
        if len(before) > 1 or len(after) > 1 or any(name not in ids for name in (*before, *after)):
            many = f"{before} before a text and {after} after it"
            raise ModelError(f"{table.path}: the post_processor puts {many}; at most one token of the vocabulary each")
        framing: dict[str, Any] = {"add_bos_token": bool(before), "add_eos_token": bool(after)}
        framing |= {"bos_token_id": ids[before[0]]} if before else {}
        return framing | ({"eos_token_id": ids[after[0]]} if after else {})
    return {"add_bos_token": False, "add_eos_token": False}


def _parts(rule: Any, name: str) -> list[dict[str, Any]]:
    """A rule, or the rules of a sequence."""
    if not isinstance(rule, dict):
        return []
    listed = rule.get(name)
    if rule.get("type") == "Sequence" and isinstance(listed, list):
        return [each for each in listed if isinstance(each, dict)]
    return [rule]


# Other files ---------------------------------------------------------------------------------------------


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path, _MAX_CONFIG) if path.exists() else {}


def _added_by_config(path: Path, config: Mapping[str, Any]) -> dict[int, _Added]:
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(key.isdecimal() and len(key) < 9 for key in listed):
        raise ModelError(f"{path}: added_tokens_decoder must have ids as names, it is {listed!r:.60}")
    entries = [{**each, "id": int(key)} if isinstance(each, dict) else each for key, each in listed.items()]
    return _added(path, entries)


def _special_ids(folder: Path, config: Mapping[str, Any], table: _Table) -> dict[str, Any]:
    """The ids of BOS, EOS, unknown and padding: by their texts, else as the model's configuration has them.

    config.json and generation_config.json may each have one or several ids that end a generation: all of them do.
    """
    ids = table.ids()
    special: dict[str, Any] = {}
    configs = [_optional(folder / name) for name in (MODEL_CONFIG, _GENERATION)]
    numbers = {**configs[0], **configs[1]}
    for name, theirs in _SPECIAL.items():
        text = config.get(f"{theirs}_token")
        text = text.get("content") if isinstance(text, dict) else text
        number = numbers.get(f"{theirs}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        key = f"tokenizer.ggml.{name}_token_id"
        if isinstance(text, str) and text in ids:
            special[key] = ids[text]
        elif f"{name}_token_id" in table.more:
            continue
        elif type(number) is int and 0 <= number < len(table.texts):
            special[key] = number
    ends = {end for each in configs for end in _ends(each.get("eos_token_id"), len(table.texts))}
    others = sorted(ends - {special.get("tokenizer.ggml.eos_token_id")})
    suppressed = {"end_token_ids": others, "suppress_tokens": configs[1].get("suppress_tokens")}
    return special | {f"tokenizer.ggml.{key}": value for key, value in suppressed.items() if value}


def _ends(ids: Any, count: int) -> list[int]:
    """A number, several or none; those that are no token never come."""
    listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(each) is int for each in listed):
        raise ModelError(f"eos_token_id must be a whole number or a list of them, it is {ids!r:.60}")
    return [each for each in listed if 0 <= each < count]


def sampling_metadata(folder: Path) -> dict[str, Any]:
    """How the model wants its tokens to be sampled, by GGUF's keys. If `do_sample` is false, its values do not hold."""
    config = _optional(folder / _GENERATION)
    if config.get("do_sample") is False:
        return {}
    if config.get("do_sample") is True and config.get("temperature") is None:
        config = {**config, "temperature": 1.0}
    return {key: config[name] for name, key in SAMPLING_KEYS.items() if config.get(name) is not None}


def _template(folder: Path, config: Mapping[str, Any]) -> Any:
    """The chat template: a file, or a text of the tokenizer's configuration; of several the one called default."""
    path = folder / _TEMPLATE
    if path.exists():
        data = map_file(path, "a chat template")
        try:
            if len(data) > _MAX_TEMPLATE:
                raise ModelError(f"{path} has {len(data):,} bytes, at most {_MAX_TEMPLATE:,} can be real")
            return data[:].decode()
        except UnicodeDecodeError:
            raise ModelError(f"{path} is not UTF-8; download it again") from None
        finally:
            unmap(data)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
        return named[0].get("template") if named else None
    return template
