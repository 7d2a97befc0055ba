"""Expressions of Oniguruma, which `tokenizers` reads, as JavaScript reads them: the same matches in the same order.

Classes of characters are written out: `tokenizers` is asked which characters each of them has. So the versions of
Unicode that browsers have do not count. In an expression {{7}} is class 7.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from tokenizers import PreTokenizedString, Regex, pre_tokenizers

from ..text.tokenizer_errors import wrap_tokenizer_errors

Ranges = tuple[tuple[int, int], ...]  # first character, and the one after the last

_SURROGATES = (0xD800, 0xE000)
_CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7, "e": 27, "0": 0}
_ANCHORS = {"A": "^", "z": "$", "Z": r"(?=\n?$)"}
_LINE = {"^": r"(?:^|(?<=\n)(?!$))", "$": r"(?=\n|$)"}
_QUANTIFIER = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}|\{,\d+\}")
_HEX = re.compile(r"\\(?:x\{([0-9A-Fa-f]{1,6})\}|x([0-7][0-9A-Fa-f])|u([0-9A-Fa-f]{4}))")
_PROPERTY = re.compile(r"\\[pP]\{\^?[\w -]+\}|\\[sSdDwWhH]")
_GROUPS = ("(?:", "(?=", "(?!", "(?<=", "(?<!")


class UnsupportedError(Exception):
    """What an expression has and JavaScript has not."""


class Classes:
    """The classes of characters of an export, each once."""

    def __init__(self) -> None:
        self._numbers: dict[Ranges, int] = {}

    def add(self, ranges: Ranges) -> str:
        """How an expression names a class."""
        return f"{{{{{self._numbers.setdefault(ranges, len(self._numbers))}}}}}"

    def listed(self) -> list[list[int]]:
        """Where each class begins and ends, again and again: numbers are distances from the one before."""
        return [_distances(ranges) for ranges in self._numbers]


def _distances(ranges: Ranges) -> list[int]:
    ends = [end for both in ranges for end in both]
    return [end - before for before, end in zip([0, *ends], ends, strict=False)]


@cache
def all_characters() -> str:
    """Every character of Unicode, assigned or not, in order."""
    return "".join(map(chr, (*range(_SURROGATES[0]), *range(_SURROGATES[1], 0x110000))))


def ranges_of(texts: Iterable[str]) -> Ranges:
    """Characters, given parts of `all_characters` in order."""
    ranges: list[tuple[int, int]] = []
    for text in texts:
        begin, end = ord(text[0]), ord(text[-1]) + 1
        if ranges and ranges[-1][1] in (begin, _SURROGATES[0] if begin == _SURROGATES[1] else begin):
            begin = ranges.pop()[0]
        ranges.append((begin, end))
    return tuple(ranges)


def pieces(rule: pre_tokenizers.PreTokenizer) -> list[str]:
    """What a rule makes of all characters in a row."""
    text = PreTokenizedString(all_characters())
    rule.pre_tokenize(text)
    return [piece for piece, _, _ in text.get_splits("normalized", "byte")]  # other offsets take a second


@cache
def members(atom: str) -> Ranges:
    """The characters that an expression for one character matches."""
    with wrap_tokenizer_errors(f"the expression {atom!r:.60} cannot be read"):
        return ranges_of(pieces(pre_tokenizers.Split(Regex(f"(?:{atom})+"), "removed", invert=True)))


@cache
def _foldings() -> tuple[frozenset[str], frozenset[int]]:
    """What several letters fold to one character, and these characters."""
    folded = {i: chr(i).casefold() for i in range(0x110000) if len(chr(i).casefold()) > 1}
    return frozenset(folded.values()), frozenset(folded)


def quoted(text: str) -> str:
    """An expression that matches a text."""
    return "".join(each if each.isascii() and each.isalnum() else f"\\u{{{ord(each):x}}}" for each in text)


def translated(expression: str, classes: Classes) -> str:
    """An expression for JavaScript, with the flag u. One that JavaScript cannot have is an UnsupportedError."""
    return _Translation(expression, classes).whole()


class _Translation:
    def __init__(self, expression: str, classes: Classes) -> None:
        self.text, self.at, self.classes = expression, 0, classes
        self.ignore_case = False
        self.behind = 0  # lookbehinds around this place
        self.names = 0  # of groups, so far

    def whole(self) -> str:
        translated = self._alternatives(0)
        if self.at < len(self.text):
            raise UnsupportedError(")")
        return translated

    def _alternatives(self, depth: int) -> str:
        """Up to the end of a group."""
        ignore_case = self.ignore_case
        done, items = "", list[str]()
        literals = ""  # neighbours, where case is ignored
        while self.at < len(self.text) and self.text[self.at] != ")":
            here = self.text[self.at :]
            if here.startswith("|"):
                self.at += 1
                done, items, literals = f"{done}{''.join(items)}|", [], ""
            elif here.startswith("\\K"):
                if depth or any("(?<k" in item for item in items):
                    raise UnsupportedError("\\K")
                self.at += 2
                items = [f"(?<k{self._name()}>{''.join(items)})"]
            elif here.startswith("(?i)") and not items and not done:
                self.at += 4
                self.ignore_case = True
            else:
                item, literal = self._atom(here, depth)
                item, is_repeated = self._quantified(item)
                literals = literals + literal if literal else ""
                if self.ignore_case and any(each in literals.casefold() for each in _foldings()[0]):
                    raise UnsupportedError(f"{literals!r} in any case")
                literals = "" if is_repeated else literals
                items.append(item)
        self.ignore_case = ignore_case
        return done + "".join(items)

    def _name(self) -> int:
        self.names += 1
        return self.names

    def _atom(self, here: str, depth: int) -> tuple[str, str]:
        """The next part, and its character if it stands for itself."""
        if here[0] == "(":
            return self._group(here, depth), ""
        if here[0] == "[":
            return self._class(_bracketed(here)), ""
        if here[0] == ".":
            return self._class("."), ""
        if here[0] in _LINE:
            self.at += 1
            return _LINE[here[0]], ""
        if here[0] == "\\":
            return self._escape(here)
        return self._literal(here[0], here[0])

    def _literal(self, written: str, character: str) -> tuple[str, str]:
        if self.ignore_case and character.casefold() != character.upper():
            return self._class(written), character
        self.at += len(written)
        return quoted(character), character

    def _class(self, source: str) -> str:
        self.at += len(source)
        ranges = members(f"(?i:{source})" if self.ignore_case else source)
        if self.ignore_case and any(begin <= i < end for i in _foldings()[1] for begin, end in ranges):
            raise UnsupportedError(f"{source} in any case")
        return self.classes.add(ranges)

    def _escape(self, here: str) -> tuple[str, str]:
        following = here[1:2]
        if match := _PROPERTY.match(here):
            return self._class(match[0]), ""
        if match := _HEX.match(here):
            return self._literal(match[0], chr(int(match[1] or match[2] or match[3], 16)))
        if following in _ANCHORS:
            self.at += 2
            return _ANCHORS[following], ""
        if following in ("b", "B"):
            self.at += 2
            word = self.classes.add(members(r"\w"))
            sides = ("(?<={0})(?!{0})|(?<!{0})(?={0})", "(?<={0})(?={0})|(?<!{0})(?!{0})")[following == "B"]
            return f"(?:{sides.replace('{0}', word)})", ""
        if following in _CONTROLS and not here[2:3].isdigit():
            return self._literal(here[:2], chr(_CONTROLS[following]))
        if following and not following.isalnum():
            return self._literal(here[:2], following)
        raise UnsupportedError(here[:2])

    def _group(self, here: str, depth: int) -> str:
        ignore_case = self.ignore_case
        opened = next((each for each in _GROUPS if here.startswith(each)), "")
        is_atomic = here.startswith("(?>")
        if match := re.match(r"\(\?(-?)i:", here):
            self.ignore_case, length, opened = not match[1], len(match[0]), "(?:"
        elif opened or is_atomic:
            length = len(opened or "(?>")
        elif here.startswith("(?"):
            raise UnsupportedError(here[:4].partition(")")[0])
        else:
            length, opened = 1, "(?:"  # nothing can refer to a group
        self.at += length
        behind = opened.startswith("(?<")
        self.behind += behind
        inside = self._alternatives(depth + 1)
        self.behind -= behind
        if self.at >= len(self.text):
            raise UnsupportedError(f"{here[:3]} without an end")
        self.at += 1
        self.ignore_case = ignore_case
        return self._atomic(inside) if is_atomic else f"{opened}{inside})"

    def _atomic(self, inside: str) -> str:
        """What matched is never tried again with less: a lookahead does not go back into what it has seen."""
        if self.behind:
            raise UnsupportedError("(?> in a lookbehind")
        name = f"a{self._name()}"
        return f"(?=(?<{name}>{inside}))\\k<{name}>"

    def _quantified(self, item: str) -> tuple[str, bool]:
        is_repeated = False
        while match := _QUANTIFIER.match(self.text, self.at):
            how = match[0]
            self.at += len(how)
            more = self.text[self.at : self.at + 1]
            lazy, possessive = more == "?", more == "+" and how[0] != "{"
            self.at += lazy or possessive
            if lazy and "," not in how and how[0] == "{":
                raise UnsupportedError(f"{how}?")  # all or none of them
            how = how.replace("{,", "{0,")
            simple = re.fullmatch(r"\{\{\d+\}\}|\\u\{\w+\}|\w|\(\?:[^()]*\)", item)
            item = f"{item if simple else f'(?:{item})'}{how}{'?' if lazy else ''}"
            item, is_repeated = self._atomic(item) if possessive else item, True
        return item, is_repeated


def _bracketed(here: str) -> str:
    """A class in brackets, with those within it."""
    depth, at = 0, 0
    while at < len(here):
        if here[at] == "\\":
            at += 1
        elif here[at] == "[":
            depth += 1
            if here[at + 1 : at + 2] == "^":
                at += 1
            if here[at + 1 : at + 2] == "]":
                at += 1
        elif here[at] == "]":
            depth -= 1
            if depth == 0:
                return here[: at + 1]
        at += 1
    raise UnsupportedError("[ without an end")
