"""JSON that came from elsewhere: an object, without repeated names, in bounded memory. Knows no format above it."""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .mapped import map_file, unmap

# A list or an object of Python takes 64 bytes and more, in JSON two. What has that many of them is no configuration.
_BYTES_PER_BRACKET, _FREE_BRACKETS = 8, 10_000
_LARGE = re.compile(rb"[0-9]{20}")
_DIGITS, _MAX_DIGITS = 19, 1000  # of a whole number that 64 bits hold; of any number


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """The object that a file holds."""
    data = map_file(path, "a JSON file")
    try:
        if len(data) > max_bytes:
            raise ModelError(f"{path} has {len(data):,} bytes, at most {max_bytes:,} can be real; download it again")
        return parse_json(data[:], str(path))
    finally:
        unmap(data)


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """The object in these bytes; anything else is a ModelError that begins with `where`."""
    if data.count(b"[") + data.count(b"{") > len(data) // _BYTES_PER_BRACKET + _FREE_BRACKETS:
        raise ModelError(f"{where}: the JSON text has more lists and objects than can be real; download it again")
    try:
        whole = _whole if _LARGE.search(data) else None  # it takes time
        parsed = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=whole)
        if b"\\ud" in data.lower():  # half a character is no text; both halves are
            json.dumps(parsed, ensure_ascii=False).encode()
    except RecursionError:
        raise ModelError(f"{where}: the JSON text is nested too deeply; download it again") from None
    except (
        ValueError
    ) as problem:  # not UTF-8, not JSON, a number of thousands of digits, a name twice, half a character
        raise ModelError(f"{where}: the JSON text is broken, {str(problem)[:200]}; download it again") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{where}: a JSON object was expected, got {reprlib.repr(parsed)}")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        names = [name for name, _ in pairs]
        twice = Counter(names).most_common(1)[0][0]
        raise ValueError(f"the name {reprlib.repr(twice)} is there twice")
    return unique


def _whole(digits: str) -> int | float:
    """What no 64 bits hold is no size of anything, and computing with it may overflow: a float says about how much."""
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits) if len(digits.lstrip("-")) <= _DIGITS else float(digits)


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")
