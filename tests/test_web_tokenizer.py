"""tokenizer.js in Node: the ids and texts of Python, for every vocabulary, split and rule that an export can have."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shaderlm.errors import ModelError
from shaderlm.formats.gguf import GgufFile
from shaderlm.text import Tokenizer, Vocabulary
from shaderlm.text.splits import SPLITS
from shaderlm.text.vocabulary import CONTROL, USER_DEFINED
from shaderlm.web.expressions import all_characters
from shaderlm.web.text import tokenizer_json

from .test_sentencepiece import RECORDED, file_of
from .test_sentencepiece import tokenizer_of as sentencepiece
from .test_text import DATA, VOCABULARIES, recorded
from .tokenizer_cases import different, load_job, random_texts, run

NAMES = (*VOCABULARIES, *RECORDED)
# One name of each split.
BY_SPLIT = {split: name for name, split in SPLITS.items()}


@cache
def tokenizer_of(name: str) -> Tokenizer:
    if name not in VOCABULARIES:
        return sentencepiece(file_of(name))
    with GgufFile.open(DATA / "vocab" / f"{name}.gguf") as file:
        return Tokenizer(Vocabulary.from_metadata(file.metadata))


@cache
def small_vocabulary() -> Vocabulary:
    """The first tokens of GPT-2, and some that are added."""
    whole = tokenizer_of("gpt-2").vocabulary
    added = ["<|end|>", "<|end|>x", " _ ", "<tool>", "İé"]
    tokens = [*whole.tokens[:3000], *added]
    known = set(tokens)
    merges = [merge for merge in whole.merges[:3000] if merge.replace(" ", "") in known]
    types = [*whole.types[:3000], CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, USER_DEFINED]
    return replace(whole, tokens=tokens, types=types, merges=merges, scores=[], bos=None, eos=3000)


def with_rules(vocabulary: Vocabulary, **rules: Any) -> Tokenizer:
    """By the rules of a tokenizer.json."""
    return Tokenizer(replace(vocabulary, rules=json.dumps(rules)))


# Vocabularies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_text(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    texts = recorded(name) if name in VOCABULARIES else RECORDED[name]
    special = name in VOCABULARIES
    jobs: list[dict[str, Any]] = [load_job(tokenizer)]
    jobs += [{"encode": text, "parseSpecial": special} for text, _ in texts]
    jobs += [{"decode": ids} for _, ids in texts]
    found = run(tmp_path, jobs)[1:]
    assert found[: len(texts)] == [ids for _, ids in texts]
    assert found[len(texts) :] == [tokenizer.decode(ids, skip_special=True) for _, ids in texts]


@pytest.mark.parametrize("name", NAMES)
def test_random_texts(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    texts = [*random_texts(300, tokenizer, 3), "", "\0", "\0\0a\0", "▁", " ▁ ", "<0x41>", "\ufeffa"]
    assert different(tmp_path, 3, {name: (tokenizer, texts)}) == []


@pytest.mark.full
def test_many_random_texts(tmp_path: Path) -> None:
    """A million of them were compared when tokenizer.js was written: `random_texts` of other seeds."""
    cases = {name: (tokenizer_of(name), [*random_texts(1000, tokenizer_of(name), 4)]) for name in NAMES}
    assert different(tmp_path, 4, cases) == []


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_in_messages_are_text(name: str, tmp_path: Path) -> None:
    """A mark within them, which is left out, keeps them from being tokens; others are tokens."""
    tokenizer, mark = tokenizer_of(name), "\U000f0000"
    special = [text for text in tokenizer.special_tokens if len(text) > 1]
    texts = [f"a {each[0]}{mark}{each[1:]} b{other} c" for each in special[:9] for other in special[:9]]
    texts += [
        text.replace(each, each[0] + mark + each[1:]) for each in special[:3] for text in ("x", each, f"{each}\n")
    ]
    assert texts
    found = run(tmp_path, [load_job(tokenizer), *({"encode": text, "mark": mark} for text in texts)])[1:]
    assert found == [tokenizer.encode_marked(text, mark) for text in texts]


# Rules -------------------------------------------------------------------------------------------------------


def compared(folder: Path, tokenizers: Mapping[str, Tokenizer], count: int) -> list[tuple[Any, ...]]:
    return different(folder, 7, {name: (each, [*random_texts(count, each, 7)]) for name, each in tokenizers.items()})


@pytest.mark.parametrize("begin", range(4))
def test_every_split(begin: int, tmp_path: Path) -> None:
    splits = {name: Tokenizer(replace(small_vocabulary(), pre=name)) for name in [*BY_SPLIT.values()][begin::4]}
    assert compared(tmp_path, splits, 100) == []


# Ideographs and Korean syllables: neighbours are alike.
ALIKE = (("\u3400", "\u9f00"), ("\uac00", "\ud700"), ("\U00020000", "\U00032000"))


def characters() -> list[str]:
    """Of the planes that have letters all but most of those that are alike, and some of the others."""

    def is_wanted(each: str) -> bool:
        if any(first < each < last for first, last in ALIKE):
            return ord(each) % 7 == 0
        return each < "\U00032000" or "\U000e0000" < each < "\U000e0200" or ord(each) % 101 == 0

    return [each for each in all_characters() if is_wanted(each)]


@pytest.mark.full
@pytest.mark.parametrize("name", ["default", "deepseek-v3", "gpt-4o", "kimi-k2"])
def test_every_character_is_in_the_same_classes(name: str, tmp_path: Path) -> None:
    """Also those that other versions of Unicode have, or have in other classes."""
    tokenizer = Tokenizer(replace(small_vocabulary(), pre=name))
    texts = ["".join(f"a{character}1 {character}" for character in characters())]
    found = run(tmp_path, [load_job(tokenizer), *({"encode": text} for text in texts)])[1:]
    assert [tokenizer.encode(text) == ids for text, ids in zip(texts, found, strict=True)] == [True] * len(texts)


@pytest.mark.full
@pytest.mark.parametrize("name", ["NFC", "NFKD", "Lowercase"])
def test_every_character_is_normalised_alike(name: str, tmp_path: Path) -> None:
    """Before, browsers composed and lowered characters that are too new for `tokenizers`."""
    tokenizer = with_rules(small_vocabulary(), normalizer={"type": name}, pre_tokenizer=GPT2)
    texts = [f"a{each}\u0301{unicodedata.normalize('NFD', each)}\u0334" for each in characters() if each < "\U0001f000"]
    joined = ["\n".join(texts[i : i + 5000]) for i in range(0, len(texts), 5000)]
    found = run(tmp_path, [load_job(tokenizer), *({"encode": text} for text in joined)])[1:]
    wrong = [i for i, (text, ids) in enumerate(zip(joined, found, strict=True)) if tokenizer.encode(text) != ids]
    assert wrong == []


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = BYTES | {"use_regex": True}
PREFIX = GPT2 | {"add_prefix_space": True}
SPACES = {"type": "Split", "pattern": {"String": " "}, "invert": False, "behavior": "Isolated"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
ALL = ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")


def splitting(expression: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": behavior, "invert": invert}


EXPRESSIONS = [
    r"\p{L}++|\p{N}{1,3}+| ?+[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s+(?!\S)|\s",
    r"(?>a+|the)x?|(?>\d+)(?!1)",
    r"(?i:'[sdmt]|'ll|'ve|'re)|\w+?e|.",
    r"(?i)the|an(?-i:d)|[k-n]+",
    r"^\s*\w+|\S+$|\A.|.\z|o\Z",
    r"\b\w|\B\S\b",
    r"[[:upper:]]+|[[a-z]&&[^aeiou]]{2,}|[]x\]^-]|[^\]a-z ]",
    r"(?<=[a-z])(?=[A-Z])|(?<!\s)\s{2,3}?|\h{,4}",
    r"\x41|\x{e9}|\u00df|\t\n\r|a{x|\/|\-|\p{^L}\P{N}|\p{Greek}|\p{Alpha}",
    r"(a|e)(?:b|c)*|x*|",
    r"\d*\K\d{3}|[a-f]+\K[g-z]+",
]


def test_expressions(tmp_path: Path) -> None:
    tokenizers = {}
    for expression in EXPRESSIONS:
        for behavior, invert in (("Isolated", False), ("MergedWithNext", True)):
            rule = {"type": "Sequence", "pretokenizers": [splitting(expression, behavior, invert), BYTES]}
            tokenizers[f"{expression} {behavior}"] = with_rules(small_vocabulary(), pre_tokenizer=rule)
    assert compared(tmp_path, tokenizers, 30) == []


RULES: Mapping[str, Sequence[dict[str, Any]]] = {
    "digits": [{"type": "Digits", "individual_digits": True}, BYTES],
    "runs of digits": [{"type": "Digits", "individual_digits": False}, GPT2],
    "prefix": [PREFIX],
    "falcon": [{"type": "Punctuation", "behavior": "Contiguous"}, GPT2, {"type": "Digits", "individual_digits": False}],
    "spaces": [{"type": "WhitespaceSplit"}, BYTES],
    **{f"punctuation {each}": [{"type": "Punctuation", "behavior": each}, BYTES] for each in ALL},
    **{f"text {each}": [SPACES | {"behavior": each}, BYTES] for each in ALL},
    **{f"others {each}": [splitting(r"\p{L}+ ?", each, invert=True), BYTES] for each in ALL},
    **{f"empty {each}": [splitting(r"(?=[A-Z])| (?=\d)", each), BYTES] for each in ALL},
}


def test_rules_of_a_byte_level_vocabulary(tmp_path: Path) -> None:
    tokenizers = {
        name: with_rules(small_vocabulary(), pre_tokenizer={"type": "Sequence", "pretokenizers": rules})
        for name, rules in RULES.items()
    }
    assert compared(tmp_path, tokenizers, 30) == []


NORMALIZERS: Mapping[str, dict[str, Any] | list[dict[str, Any]]] = {
    **{form: {"type": form} for form in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")},
    "Strip": {"type": "Strip", "strip_left": True, "strip_right": True},
    "Strip right": {"type": "Strip", "strip_left": False, "strip_right": True},
    "Prepend": {"type": "Prepend", "prepend": "x"},
    "Replace": {"type": "Replace", "pattern": {"Regex": r"\s+|e+"}, "content": "$&▁"},
    "Sequence": [{"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}],
}


@pytest.mark.full
@pytest.mark.parametrize("flag", ["normalized", "lstrip", "rstrip", "single_word"])
def test_normalizers_and_flags_of_added_tokens(flag: str, tmp_path: Path) -> None:
    vocabulary = small_vocabulary()
    words = vocabulary.tokens[-5:]
    added = [{"content": text, flag: i != 3} for i, text in enumerate(words)]
    cases = {}
    for name, rule in NORMALIZERS.items():
        rule = {"type": "Sequence", "normalizers": rule} if isinstance(rule, list) else rule
        tokenizer = with_rules(vocabulary, normalizer=rule, pre_tokenizer=GPT2, added_tokens=added)
        texts = [f"{a}{text}{b}" for text in words for a in ("", "x ", "é", "\n\t") for b in ("", "_", " y")]
        cases[name] = (tokenizer, [*texts, *random_texts(40, tokenizer, 13)])
    assert different(tmp_path, 13, cases) == []


PIECES: Mapping[str, dict[str, Any]] = {
    "never": METASPACE | {"prepend_scheme": "never"},
    "always": METASPACE,
    "first": METASPACE | {"prepend_scheme": "first", "split": False},
    "xlm-r": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, METASPACE]},
    "gemma": SPACES | {"behavior": "MergedWithPrevious"},
}
MODELS: Sequence[dict[str, Any]] = [
    {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"},
    {"fuse_unk": True, "unk_token": "<unk>"},
    {"unk_token": "<unk>", "ignore_merges": True},
    {},
]


def test_rules_of_pieces(tmp_path: Path) -> None:
    own = tokenizer_of("bpe-bytes")
    merges = [" ".join(pair) for pair in json.loads(own.encoder_json())["model"]["merges"]]
    bpe, unigram = replace(own.vocabulary, merges=merges), tokenizer_of("unigram-bytes").vocabulary
    tokenizers = {}
    for name, rule in PIECES.items():
        for i, options in enumerate(MODELS):
            model = {"type": "BPE", **options}
            tokenizers[f"BPE {i} {name}"] = with_rules(bpe, model=model, pre_tokenizer=rule)
        for byte_fallback in (True, False):
            model = {"type": "Unigram", "unk_id": unigram.unknown, "byte_fallback": byte_fallback}
            tokenizers[f"unigram {byte_fallback} {name}"] = with_rules(unigram, model=model, pre_tokenizer=rule)
    assert compared(tmp_path, tokenizers, 40) == []


def charsmap() -> bytes:
    """A table of characters and what replaces them, as SentencePiece writes it: see `shaderlm.web.charsmap`."""
    pairs = {
        "ﬁ": "fi",
        "①": "1",
        "A": "a",
        "é": "e",
        "e\u0301": "E",
        "\r": " ",
        "\n": "\n ",
        "🄰": "",
        "©": "(c)",
        "\u0600": "-",
    }
    pairs |= {"か\u3099": "が", "x\u0301y": "never"}
    texts, places = b"", {}
    for key, text in pairs.items():
        places[key.encode()] = len(texts)
        texts += text.encode() + b"\0"
    units = {0: 0}
    free = iter(range(1, 400))  # blocks of 256 units, one for each node

    def add(node: int, prefix: bytes) -> None:
        """The nodes below one: unit 0 of a block has the value, unit c the child of the byte c."""
        block = 256 * next(free)
        units[node] = units.get(node, 0) | (node ^ block) << 10
        if prefix in places:
            units[node] |= 1 << 8
            units[block] = places[prefix] | 1 << 31
        for byte in sorted({key[len(prefix)] for key in places if key.startswith(prefix) and key != prefix}):
            units[block ^ byte] = byte
            add(block ^ byte, prefix + bytes([byte]))

    add(0, b"")
    size = 256 * next(free)
    array = b"".join(units.get(i, 0x80000000).to_bytes(4, "little") for i in range(size))
    return len(array).to_bytes(4, "little") + array + texts


def test_characters_that_a_table_replaces(tmp_path: Path) -> None:
    """A character with what combines with it, too; lines' ends are one."""
    vocabularies = {name: tokenizer_of(name).vocabulary for name in ("unigram-bytes", "bpe-bytes")}
    tokenizers = {name: Tokenizer(replace(each, charsmap=charsmap())) for name, each in vocabularies.items()}
    hard = [
        f"{a}{b}{c}" for a in "ﬁ①Aée©🄰\r\u0600" for b in ("", "\u0301", "\u0301\u0302", "\n") for c in "yA\u0301\u200d"
    ]
    cases = {name: (each, [*random_texts(200, each, 19), *hard]) for name, each in tokenizers.items()}
    assert tokenizers["unigram-bytes"].encode("ﬁ\u0301") == tokenizers["unigram-bytes"].encode("fi")
    assert different(tmp_path, 19, cases) == []


# Long and refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "unigram-bytes"])
def test_time_is_in_proportion_to_the_text(name: str, tmp_path: Path) -> None:
    """A square of the length takes minutes."""
    units = ("a", "A", " ", "7", "\n", "中", "\u0301", " '", "<|")
    jobs = [load_job(tokenizer_of(name)), *({"time": unit * 25_000 + "x"} for unit in units)]
    assert max(run(tmp_path, jobs)[1:]) < 3


@pytest.mark.full
def test_every_split_takes_time_in_proportion_to_the_text(tmp_path: Path) -> None:
    units = ("a", "A", " ", "7", "\n", "中", "\u0301", " '", "Aa", "'S")
    names, jobs = list[str](), list[dict[str, Any]]()
    for name in BY_SPLIT.values():
        tokenizer = Tokenizer(replace(small_vocabulary(), pre=name))
        jobs += [load_job(tokenizer), *({"time": unit * 20_000 + "x"} for unit in units)]
        names += [name] * (len(jobs) - len(names))
    taken = zip(names, run(tmp_path, jobs), strict=True)  # nothing for a load
    assert not {name: seconds for name, seconds in taken if seconds is not None and seconds >= 5}


def test_rules_that_are_refused() -> None:
    """By their names, when a model is exported."""
    vocabulary, unigram = small_vocabulary(), tokenizer_of("unigram-bytes").vocabulary
    first = METASPACE | {"prepend_scheme": "first"}
    for rules, words in (
        ({"pre_tokenizer": {"type": "UnicodeScripts"}}, "it has a pre_tokenizer UnicodeScripts; Sequence, ByteLevel"),
        ({"normalizer": {"type": "Nmt"}}, "it has a normalizer Nmt; Sequence, NFC"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES, first]}}, "before the first word alone"),
        (
            {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": False}, "pre_tokenizer": first},
            "first word",
        ),
        ({"model": {"type": "BPE", "end_of_word_suffix": "</w>"}}, "its model has a end_of_word_suffix, '</w>'"),
        (
            {"pre_tokenizer": splitting(r"(a)\1")},
            r"its Split has an expression with \\1, which JavaScript does not have",
        ),
        ({"pre_tokenizer": splitting(r"\X")}, r"expression with \\X"),
        ({"pre_tokenizer": splitting(r"(?:a\Kb)")}, r"expression with \\K"),
        ({"pre_tokenizer": splitting(r"a(?x) b")}, r"expression with \(\?x"),
        ({"pre_tokenizer": splitting(r"(?i:ss)")}, "expression with 'ss' in any case"),
        ({"pre_tokenizer": splitting(r"(?i:[ß])")}, r"expression with \[ß\] in any case"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": r"\G."}, "content": ""}}, r"its Replace .* \\G"),
    ):
        with pytest.raises(ModelError, match=f"cannot run in a browser: .*{words}"):
            tokenizer_json(with_rules(vocabulary, **rules))
    with pytest.raises(ModelError, match="its model has no unknown token"):
        tokenizer_json(with_rules(unigram, model={"type": "Unigram"}))
