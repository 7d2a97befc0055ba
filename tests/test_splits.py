"""How text is split into words: every expression as the `regex` package reads it, in linear time, as published."""

from __future__ import annotations

import itertools
import random
import time
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import regex
from tokenizers import Regex, pre_tokenizers

from shaderlm.text.splits import SPLITS

BY_PATTERNS = {split.patterns: name for name, split in SPLITS.items()}
# What the expressions ask about: spaces, ends of lines, contractions, digits, signs, scripts, marks, odd foldings.
LETTERS = (
    " \t\r\n  \n'''sStTdDmMlLrReEvVaAzZ019½Ⅷ٣.,!?-_/()$+<=>^~|`…。，、中文漢かカ한글éÉßǅʰאع"
    "\u0301\u3000\u00a0\u0085\x1c\u200b😀ſ\u212a\x00"
)
SOME = [chr(i) for i in range(0x30000) if unicodedata.category(chr(i)) not in ("Cs", "Cn", "Co")]


def texts(count: int, letters: str = LETTERS) -> list[str]:
    rng = random.Random(7)
    return [
        "".join(rng.choice(letters if rng.random() < 0.85 else SOME) for _ in range(rng.randrange(1, 30)))
        for _ in range(count)
    ]


@cache
def pre_tokenizer(patterns: tuple[str, ...]) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])


def split(patterns: tuple[str, ...], text: str) -> list[str]:
    """As the tokenizers package splits."""
    return [part for part, _ in pre_tokenizer(patterns).pre_tokenize_str(text)]


def expected(patterns: Sequence[str], text: str) -> list[str]:
    parts = [text]
    for pattern in patterns:
        cut: list[str] = []
        for part in parts:
            ends = sorted({0, len(part), *(i for found in regex.finditer(pattern, part) for i in found.span())})
            cut += [part[a:b] for a, b in itertools.pairwise(ends)]
        parts = cut
    return parts


@pytest.mark.parametrize("patterns", BY_PATTERNS, ids=BY_PATTERNS.values())
def test_the_regex_package_splits_the_same(patterns: tuple[str, ...]) -> None:
    for text in texts(60):
        found = split(patterns, text)
        assert "".join(found) == text
        assert found == expected(patterns, text), repr(text)


HAN_UPPER, HAN_LOWER = (rf"[{each}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for each in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PUBLISHED = {
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "deepseek-llm": (*SPLITS["deepseek-llm"].patterns[:3], r"\s+$", *SPLITS["deepseek-llm"].patterns[4:]),
    "kimi-k2": (
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{HAN_UPPER}*{HAN_LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{HAN_UPPER}+"
        rf"{HAN_LOWER}*{ENDING}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_expressions_that_are_written_differently_split_as_published(name: str) -> None:
    for text in [*texts(150), *texts(150, "77771½٣ "), *texts(100, "  中a\n")]:
        assert split(SPLITS[name].patterns, text) == split(PUBLISHED[name], text), repr(text)


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("llama-bpe", "I'LL take 12345 of  them\n\n x", "I|'LL| take| |123|45| of| | them|\n\n| x"),
        ("qwen2", "a 123", "a| |1|2|3"),
        ("gpt-2", "a 123 I'LL it's", "a| 123| I|'|LL| it|'s"),
        ("smollm", "a 12", "a| |1|2"),
        ("gpt-4o", "HTTPServer's a/b//\n", "HTTPServer's| a|/b|//\n"),
        ("tekken", "aBc's 12", "a|Bc|'s| |1|2"),
        ("deepseek-v3", "a.b 1234 中文かな", "a|.b| |123|4| |中文かな"),
        ("superbpe", "a cat 12345", "a cat |12|345"),
        ("bloom", "yes, no.", "yes|,| no|."),
        ("falcon", "a,b 1234", "a|,|b| |123|4"),
        ("kimi-k2", "a中文b", "a|中文|b"),
        ("seed-coder", "a::\nb", "a|::|\n|b"),
    ],
)
def test_splits_worked_out_by_hand(name: str, text: str, parts: str) -> None:
    assert split(SPLITS[name].patterns, text) == parts.split("|")


@pytest.mark.parametrize("patterns", BY_PATTERNS, ids=BY_PATTERNS.values())
def test_time_is_in_proportion_to_the_text(patterns: tuple[str, ...]) -> None:
    for unit in ("a", "A", " ", "7", "\n", "中", "\u0301", " '"):
        begun = time.thread_time()
        assert split(patterns, unit * 10_000 + "中")
        assert time.thread_time() - begun < 2, "a square of the length takes longer"
