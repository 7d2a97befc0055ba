"""What a request may cost: sizes, times and counts, each with its default. `serve --limit NAME=VALUE` sets another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from ..errors import InputError
from ..graph.sampling import MAX_LOGPROBS
from ..text.json_size import MAX_CHARACTERS, check_json_size
from .errors import ApiError


@dataclass(frozen=True)
class Limits:
    """Bytes, seconds and numbers, in the order in which a request meets them."""

    head_bytes: int = 64 << 10
    head_seconds: float = 10.0
    body_bytes: int = 16 << 20  # a prompt of a million tokens has a third of it
    image_body_bytes: int = 64 << 20  # where a model that reads images may answer
    body_seconds: float = 60.0
    image_seconds: float = 10.0  # to fetch the pictures of a request
    choices: int = 16
    logprobs: int = MAX_LOGPROBS
    prompt_logprobs: int = 2_000_000  # numbers of a request: 50 MB of JSON
    stop_strings: int = 16
    tools: int = 128
    grammar_bytes: int = MAX_CHARACTERS  # of a schema, a grammar or all tools
    grammar_seconds: float = 2.0
    template_seconds: float = 1.0
    template_bytes: int = 4_000_000


# Those that have a largest value.
_MOST = {"logprobs": MAX_LOGPROBS, "grammar_bytes": MAX_CHARACTERS}


def limits_of(assignments: Iterable[str]) -> Limits:
    """Limits from texts such as body_bytes=33554432."""
    kinds = {each.name: type(getattr(Limits, each.name)) for each in fields(Limits)}
    values = dict[str, float]()
    for text in assignments:
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
        if values[name] > _MOST.get(name, values[name]):
            raise InputError(f"--limit {name} must be at most {_MOST[name]:,}, got {value!r}")
    return Limits(**values)  # type: ignore[arg-type]  # each has the type of its default


# Fields of bodies, of any API, by the limit that they have.
_COUNTS = {"n": "choices", "top_logprobs": "logprobs", "logprobs": "logprobs", "n_probs": "logprobs"}
_LISTS = {"stop": "stop_strings", "stop_sequences": "stop_strings", "tools": "tools"}
_GRAMMARS = ("grammar", "json_schema", "response_format", "format", "text", "output_config", "tools")


def check_limits(body: Any, limits: Limits) -> None:
    """A body that asks for more than it may is an ApiError."""
    for name, limit in (*_COUNTS.items(), *_LISTS.items()):
        value, most = getattr(body, name, None), getattr(limits, limit)
        count = len(value) if name in _LISTS and isinstance(value, list) else value
        if isinstance(count, int) and not isinstance(count, bool) and count > most:
            excess = f"{name} has {count:,} items" if name in _LISTS else f"{name} is {count:,}"
            raise ApiError(400, f"{excess}; this server takes at most {most:,}", param=name)
    for name in _GRAMMARS:
        try:
            check_json_size(name, _values(getattr(body, name, None)), limits.grammar_bytes)
        except InputError as problem:
            raise ApiError(400, str(problem), param=name) from None


def _values(value: Any) -> Any:
    """Of structs, which JSON has no word for, the values."""
    if isinstance(value, list):
        return [_values(each) for each in value]
    names = getattr(value, "__struct_fields__", None)
    return value if names is None else [_values(getattr(value, name)) for name in names]
