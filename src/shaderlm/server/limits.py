"""What a request may cost: sizes, times and counts, each with its default. `serve --limit NAME=VALUE` sets another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from ..errors import InputError


@dataclass(frozen=True)
class Limits:
    """Bytes and seconds of a request before it is read as a whole."""

    head_bytes: int = 64 << 10
    head_seconds: float = 10.0
    body_bytes: int = 16 << 20  # a prompt of a million tokens has a third of it
    body_seconds: float = 60.0


def limits_of(given: Iterable[str]) -> Limits:
    """Limits from texts such as body_bytes=33554432."""
    kinds = {each.name: type(getattr(Limits, each.name)) for each in fields(Limits)}
    values = dict[str, float]()
    for text in given:
        name, _, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in kinds:
            raise InputError(f"--limit must be NAME=VALUE with one of {', '.join(kinds)}; got {text!r}")
        try:
            values[name] = kinds[name](value)
        except ValueError:
            values[name] = 0
        if not 0 < values[name] < 1 << 53:
            kind = "a whole number" if kinds[name] is int else "a number"
            raise InputError(f"--limit {name} must be {kind} above 0, got {value!r}")
    return Limits(**values)  # type: ignore[arg-type]  # each has the type of its default
