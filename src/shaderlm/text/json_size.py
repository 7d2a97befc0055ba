"""How large the JSON of a request may be: schemas, grammars and tools."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import InputError

MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 100  # of brackets: llguidance reads 128 levels, of which a grammar takes some


def check_json_size(option: str, value: Any, most: int = MAX_CHARACTERS) -> None:
    """Refuse what is too long or too deep. Other threads run meanwhile, as they do not while JSON is written."""
    size, pending = 0, [(value, 0)]
    while pending:
        each, depth = pending.pop()
        inner: Iterable[Any] = ()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, Mapping):
            inner = itertools.chain(each, each.values())
            size += 2 * len(each)
        elif isinstance(each, (list, tuple)):
            inner = each
            size += len(each)
        if size > most:
            raise InputError(f"{option} must have at most {most:,} characters; it has more")
        if isinstance(each, (Mapping, list, tuple)):
            if depth == MAX_DEPTH:
                raise InputError(f"{option} must be nested at most {MAX_DEPTH} levels deep; it has more")
            pending += [(part, depth + 1) for part in inner]
