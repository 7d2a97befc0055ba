"""Texts that tokenizers may read differently, and tokenizer.js in Node, which reads them."""

from __future__ import annotations

import json
import random
import subprocess
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from shaderlm.text import Tokenizer
from shaderlm.web.text import text_entry, tokenizer_json

from . import node

TOKENIZER_JS = Path(__file__).parent.parent / "src" / "shaderlm" / "web" / "assets" / "tokenizer.js"
SCRIPT = Path(__file__).parent / "web" / "tokenize.mjs"

SPACES = [" ", "  ", "\t", "\n", "\r\n", "\r", "\n\n", "\v", "\f", "\x1c", "\x85", "\xa0", "\u1680", "\u2003", "\u2028"]
SPACES += ["\u2029", "\u202f", "\u205f", "\u3000", "\u200b", "\ufeff", "\u180e", "▁", "▁▁"]
ENDINGS = [f"{mark}{end}" for mark in "'’" for end in ("s", "T", "re", "VE", "m", "lL", "D", "ſ", "x", "")]
SIGNS = [*'!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~§±×÷€£₽…—«»“”。，、؟।๛', "...", "!!", "://", "=>", "\\n"]
EMOJI = ["😀", "👍🏽", "👩\u200d👩\u200d👧", "🇩🇪", "🇩", "❤\ufe0f", "©\u200d", "#\ufe0f\u20e3", "\u200d", "\ufe0f"]
COMBINING = [
    "e\u0301",
    "ﬁ\u0301",
    "a\u0308\u0304",
    "\u0301",
    "\u0345",
    "か\u3099",
    "ก็",
    "क्षि",
    "각",
    "\u1112\u1161\u11ab",
]
COMBINING += ["\u0600a", "क\u094d\u200dष"]
CONTROLS = [*"\x00\x01\x07\x1b\x7f\x80\x9f\xad\u200e\u2060\ufffd\ufffe\uffff"]
LINES = (
    "the The THE of and people time don't I'LL we've HTTPServer camelCase naïve Straße café ÀÉ ß ǅ ŉ ﬀ ſt",
    "日本語 カタカナ ひらがな 한국어 Привет мир नमस्ते السلام שלום ไทย ελληνικά Ꭰꭰ 𝒜𝓁 ①② Ⅷ ½ ² ٣٤ １２３ ﷺ ㎏",
    "№7 x86_64 0x1F 3.14 1,000,000 <0x41> <0x4 0xFF> [PAD1]",
)
WORDS = [word for line in LINES for word in line.split()]


@cache
def scripts() -> Sequence[Sequence[str]]:
    """Characters by the first word of their names, such as LATIN, and those that have none."""
    by_script: dict[str, list[str]] = {}
    for code in (
        *range(0xD800),
        *range(0xE000, 0x20000),
        *range(0x20000, 0xF0000, 97),
        *range(0xF0000, 0x110000, 4999),
    ):
        character = chr(code)
        name = unicodedata.name(character, "").split(" ")[0].split("-")[0] or f"none {code >> 12}"
        by_script.setdefault(name, []).append(character)
    return list(by_script.values())


def random_texts(count: int, tokenizer: Tokenizer, seed: int) -> Iterator[str]:
    """All scripts, spaces, signs, contractions, digits, emoji, controls, long words, and parts of special tokens."""
    rng = random.Random(seed)
    vocabulary = tokenizer.vocabulary
    special = [vocabulary.tokens[i] for i in vocabulary.not_normal] or ["<|x|>"]

    def special_like() -> str:
        text = rng.choice(special)
        cut = rng.randrange(len(text) + 1)
        return rng.choice([text, text, f" {text}", f"{text} \n", f"a{text}b", text[:cut], text[cut:], text.upper()])

    def long_word() -> str:
        return rng.choice(["a", "A", "7", " ", "\n", "中", "e\u0301", "ab", "😀", "'", "▁"]) * rng.randrange(1, 90)

    def of_one_script() -> str:
        return "".join(rng.choices(rng.choice(scripts()), k=rng.randrange(1, 8)))

    def digits() -> str:
        return "".join(rng.choices("0123456789", k=rng.randrange(1, 12)))

    def letters() -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", k=rng.randrange(1, 15)))

    def token() -> str:
        return vocabulary.tokens[rng.randrange(len(vocabulary.tokens))]

    listed = [(SPACES, 3), ((" ",), 2), (ENDINGS, 1), (SIGNS, 1), (EMOJI, 1), (COMBINING, 1), (CONTROLS, 1), (WORDS, 3)]
    makers: list[tuple[Callable[[], str], float]] = [(partial(rng.choice, texts), weight) for texts, weight in listed]
    makers += [(of_one_script, 4), (special_like, 2), (long_word, 0.3), (token, 1), (digits, 1), (letters, 1)]
    functions, weights = zip(*makers, strict=True)
    for _ in range(count):
        yield "".join(make() for make in rng.choices(functions, weights, k=rng.randrange(1, 9)))


def load_job(tokenizer: Tokenizer) -> dict[str, Any]:
    """Takes the rules of an export; BOS is added by Python's engine, and so not here."""
    about = {**text_entry(tokenizer, None), "add_bos": False}
    return {"load": json.loads(tokenizer_json(tokenizer)), "about": about}


def run(folder: Path, jobs: Iterable[dict[str, Any]]) -> list[Any]:
    """The results of jobs, of one process: see the script."""
    path = folder / "jobs.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for job in jobs:
            file.write(json.dumps(job) + "\n")
    done = subprocess.run(
        [node.find(), str(SCRIPT), str(TOKENIZER_JS), str(path)], capture_output=True, text=True, timeout=node.PATIENCE
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def different(folder: Path, seed: int, cases: Mapping[str, tuple[Tokenizer, Sequence[str]]]) -> list[tuple[Any, ...]]:
    """What Python and JavaScript read or write differently: texts with and without special tokens, and random ids."""
    rng = random.Random(seed)
    jobs, expected, names = list[dict[str, Any]](), list[Any](), list[str]()
    for name, (tokenizer, texts) in cases.items():
        count, few = len(tokenizer.vocabulary.tokens), list(tokenizer.vocabulary.not_normal) or [0]
        jobs.append(load_job(tokenizer))
        expected.append(None)
        for text in texts:
            sources = rng.choices([range(count), range(min(count, 300)), few], k=rng.randrange(9))
            ids = [rng.choice(source) for source in sources]
            jobs += [{"encode": text}, {"encode": text, "parseSpecial": False}, {"decode": ids}]
            expected += [tokenizer.encode(text), tokenizer.encode(text, parse_special=False)]
            expected.append(tokenizer.decode(ids, skip_special=True))
        names += [name] * (len(jobs) - len(names))
    found = run(folder, jobs)
    return [each for each in zip(names, jobs, expected, found, strict=True) if each[2] != each[3]]
