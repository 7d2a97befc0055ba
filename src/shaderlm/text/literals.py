"""Values as JSON or Python writes them, or between marks of a chat template's own. Reads them, and finds their end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_MAX_DEPTH = 100
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_BARE_KEY = re.compile(r"[^\s:{}\[\],\"']+")
_SPACE = re.compile(r"[ \t\r\n]*")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(.))", re.S)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_JSON = json.JSONDecoder()


def read_literal(text: str, at: int = 0, quotes: tuple[str, str] | None = None) -> tuple[Any, int]:
    """The value that begins here, and where it ends. ValueError: there is none.

    quotes: the marks around strings, which are as they are; keys are bare then.
    """
    if quotes is None:
        try:
            return _JSON.raw_decode(text, _skip(text, at))
        except (ValueError, RecursionError):
            pass
    return _value(text, _skip(text, at), quotes, 0)


def whole_literal(text: str, quotes: tuple[str, str] | None = None) -> Any:
    """The value that is this text. ValueError: it is none."""
    value, end = read_literal(text, 0, quotes)
    if _skip(text, end) != len(text):
        raise ValueError("more than one value")
    json.dumps(value, allow_nan=False)
    return value


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _value(text: str, at: int, quotes: tuple[str, str] | None, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    first = text[at : at + 1]
    if quotes is not None and text.startswith(quotes[0], at):
        return _marked(text, at, quotes)
    if first in ("'", '"') and first and quotes is None:
        return _string(text, at)
    if first == "{":
        return _object(text, at + 1, quotes, depth)
    if first == "[":
        return _array(text, at + 1, quotes, depth)
    if word := _WORD.match(text, at):
        if word[0] not in _WORDS:
            raise ValueError(f"{word[0]} is no value")
        return _WORDS[word[0]], word.end()
    number = _NUMBER.match(text, at)
    if number is None:
        raise ValueError("no value")
    return json.loads(number[0]), number.end()


def _marked(text: str, at: int, quotes: tuple[str, str]) -> tuple[str, int]:
    end = text.find(quotes[1], at + len(quotes[0]))
    if end < 0:
        raise ValueError("a string does not end")
    return text[at + len(quotes[0]) : end], end + len(quotes[1])


def _string(text: str, at: int) -> tuple[str, int]:
    quote, end = text[at], at + 1
    while end < len(text) and text[end] != quote:
        end += 2 if text[end] == "\\" else 1
    if end >= len(text):
        raise ValueError("a string does not end")
    return unescaped(text[at + 1 : end]), end + 1


def unescaped(text: str) -> str:
    """A string without its escapes, those of JSON and of Python."""

    def character(match: re.Match[str]) -> str:
        code = match[1] or match[2] or match[3]
        if code:
            return chr(int(code, 16))
        return "" if match[4] == "\n" else _ESCAPED.get(match[4], match[4])

    text = _ESCAPE.sub(character, text)
    return text.encode("utf-16", "surrogatepass").decode("utf-16")  # two escapes may be one character


def _object(text: str, at: int, quotes: tuple[str, str] | None, depth: int) -> tuple[dict[str, Any], int]:
    items: dict[str, Any] = {}
    at = _skip(text, at)
    if text[at : at + 1] == "}":
        return items, at + 1
    while True:
        key, at = _key(text, at, quotes)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("no colon")
        items[key], at = _value(text, _skip(text, at + 1), quotes, depth + 1)
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return items, at + 1
        if text[at : at + 1] != ",":
            raise ValueError("no comma")
        at = _skip(text, at + 1)


def _key(text: str, at: int, quotes: tuple[str, str] | None) -> tuple[str, int]:
    if quotes is None:
        if text[at : at + 1] not in ("'", '"') or at == len(text):
            raise ValueError("no key")
        return _string(text, at)
    if text.startswith(quotes[0], at):
        return _marked(text, at, quotes)
    match = _BARE_KEY.match(text, at)
    if match is None:
        raise ValueError("no key")
    return match[0], match.end()


def _array(text: str, at: int, quotes: tuple[str, str] | None, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    at = _skip(text, at)
    if text[at : at + 1] == "]":
        return items, at + 1
    while True:
        value, at = _value(text, at, quotes, depth + 1)
        items.append(value)
        at = _skip(text, at)
        if text[at : at + 1] == "]":
            return items, at + 1
        if text[at : at + 1] != ",":
            raise ValueError("no comma")
        at = _skip(text, at + 1)


def literal_end(quotes: tuple[str, str] | None = None) -> Callable[[str], int | None]:
    """Finds the end of a value whose text comes in pieces: how many characters of the piece belong to it.

    None: all, and more comes. Of a number or a word, the end is where something else begins. Strings and brackets alone
    are looked at.
    """
    depth, quote, escaped, begun, tail = 0, "", False, False, ""

    def push(piece: str) -> int | None:
        nonlocal depth, quote, escaped, begun, tail
        for i, character in enumerate(piece):
            if quote:
                if quotes is not None:
                    tail = (tail + character)[-len(quote) :]
                    if tail != quote:
                        continue
                elif escaped or character != quote:
                    escaped = character == "\\" and not escaped
                    continue
                quote, tail = "", ""
                if depth == 0:
                    return i + 1
                continue
            if not begun and character in " \t\r\n":
                continue
            if quotes is None and character in "\"'":
                quote = character
            elif quotes is not None and (tail := (tail + character)[-len(quotes[0]) :]) == quotes[0]:
                quote, tail = quotes[1], ""
            elif character in "{[":
                depth += 1
            elif depth and character in "}]":
                depth -= 1
                if depth == 0:
                    return i + 1
            elif depth == 0 and begun and not (character.isalnum() or character in "+-." or tail_of(quotes, tail)):
                return i
            begun = True
        return None

    return push


def tail_of(quotes: tuple[str, str] | None, tail: str) -> bool:
    """May the mark before a string have begun?"""
    return quotes is not None and bool(tail) and quotes[0].startswith(tail)
