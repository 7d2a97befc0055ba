"""The form in which a chat model writes calls of functions: texts, and between them names, ids, keys and values.

`call_probe` finds the form of a chat template; `call_reader` reads calls by it, and grammars hold answers to it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from ..errors import InputError


class Hole(Enum):
    """What stands between the texts of a form."""

    NAME = "name"  # of the function
    ID = "id"  # of the call: the model makes it up
    INDEX = "index"  # of the call among those of its answer
    KEY = "key"  # of an argument


Parts = tuple[str | Hole, ...]
# wrapped: a string with characters that the form has no place for elsewhere.
Kind = Literal["string", "number", "boolean", "null", "array", "object", "wrapped"]
KINDS: tuple[Kind, ...] = ("string", "number", "boolean", "null", "array", "object")
# raw: a string as it is, up to the text after it. literal: JSON, or what Python writes for the same value.
# quoted: as JSON, but strings stand between the marks of the form, as they are, and keys have no marks.
Codec = Literal["raw", "literal", "quoted"]


@dataclass(frozen=True)
class ValueForm:
    """A value of one kind: the text between its key and itself, how it is written, and the text after it."""

    before: str
    codec: Codec
    after: Parts


@dataclass(frozen=True)
class JsonArguments:
    """All arguments are one JSON object, right after `first` and `between`."""


@dataclass(frozen=True)
class KeyedArguments:
    """Each argument is a key and a value. Texts: without arguments; before the first key, between two, after all."""

    empty: str
    open: str
    separator: str
    close: str
    values: Mapping[Kind, ValueForm]
    quotes: tuple[str, str] = ("", "")  # around strings, where a value is `quoted`
    python: bool = False  # lists and words are as Python writes them


@dataclass(frozen=True)
class CallForm:
    """How calls are written: `first`, arguments, (`between`, arguments)…, `last`."""

    first: Parts  # before the arguments of the first call
    between: Parts  # before those of the next one; (): an answer has one call
    last: Parts
    arguments: JsonArguments | KeyedArguments
    alone: bool = False  # calls begin an answer: nothing is before them
    as_text: bool = False  # the template takes arguments as JSON text
    empty_content: bool = False  # the template takes "" where a message has calls alone
    short_ids: bool = False  # the template takes ids of nine letters and digits alone
    told: bool = False  # the template tells it in words, and shows no calls
    content: tuple[str, str] = ("", "")  # texts before and after the content of an answer
    thought: tuple[str, str] = ("", "")  # texts before and after thoughts, where the template shows those

    @property
    def begin(self) -> str:
        """What a text has where calls begin; "": a name."""
        text = self.first[0]
        if not isinstance(text, str):
            return ""
        word = re.match(r"\S*", text)
        assert word is not None
        return word[0] if re.search(r"[<\[|\]>]", word[0]) and len(word[0]) > 2 else text

    @property
    def parallel(self) -> bool:
        """May an answer have several calls?"""
        return bool(self.between)

    @property
    def texts(self) -> Iterator[str]:
        """All texts of the form, in which special tokens may be."""
        yield from (*self.content, *self.thought)
        for parts in (self.first, self.between, self.last):
            yield from (each for each in parts if isinstance(each, str))
        if isinstance(self.arguments, JsonArguments):
            return
        yield from (self.arguments.empty, self.arguments.open, self.arguments.separator, self.arguments.close)
        yield from self.arguments.quotes
        for value in self.arguments.values.values():
            yield value.before
            yield from (each for each in value.after if isinstance(each, str))

    def cut(self, ends: Collection[str]) -> CallForm:
        """Without what comes after the end of a turn: of these texts, the first in `last`."""
        begin, end = self.content
        places = [end.find(each) for each in ends if each in end]
        content = begin, end[: min(places)] if places else end
        thought = ("", "") if any(each in self.thought[1] for each in ends) else self.thought
        cut: list[str | Hole] = []
        for part in self.last:
            places = [part.find(end) for end in ends if end in part] if isinstance(part, str) else []
            cut.append(part[: min(places)] if isinstance(part, str) and places else part)
            if places:
                break
        between = self.between
        if any(end in part for end in ends for part in between if isinstance(part, str)):
            between = ()  # the model's turn is over before the next call
        last = tuple(part for part in cut if part != "")
        return replace(self, last=last, between=between, content=content, thought=thought)


# The form for templates that know no tools. What they are told is in `tools`.
TAGGED = CallForm(
    first=('<tool_call>\n{"name": "', Hole.NAME, '", "arguments": '),
    between=('}\n</tool_call>\n<tool_call>\n{"name": "', Hole.NAME, '", "arguments": '),
    last=("}\n</tool_call>",),
    arguments=JsonArguments(),
)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function as far as a form needs them: which kinds of values each may have."""

    schema: Mapping[str, Any]
    kinds: Mapping[str, frozenset[Kind]] = field(init=False)
    required: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        work = _Work()
        properties, required = _properties(self.schema, self.schema, 0, work)
        kinds = {key: kinds_of(each, self.schema, 0, work) for key, each in properties.items()}
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "required", frozenset(required) & kinds.keys())
        object.__setattr__(self, "properties", properties)

    properties: Mapping[str, Any] = field(init=False)


MAX_DEPTH = 20  # of references
_MAX_WORK = 50_000  # schemas and properties; a fifth of a second


class _Work:
    """What is looked at in a schema. Schemas that refer to each other twice each would never end."""

    def __init__(self) -> None:
        self._left = _MAX_WORK

    def add(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise InputError("tools: the parameters of a function are composed of too many schemas; give simpler ones")


def _properties(schema: Any, root: Mapping[str, Any], depth: int, work: _Work) -> tuple[dict[str, Any], set[str]]:
    """The properties of an object, and those that are required, whatever the schema is composed of."""
    schema = resolved(schema, root)
    work.add(1 + len(schema) + _count(schema.get("properties")) + _count(schema.get("required")))
    properties = dict(schema["properties"]) if isinstance(schema.get("properties"), Mapping) else {}
    required = {name for name in _list(schema.get("required")) if isinstance(name, str)}
    if depth < MAX_DEPTH:
        for key in ("allOf", "anyOf", "oneOf"):
            parts = [_properties(each, root, depth + 1, work) for each in _list(schema.get(key))]
            for more, _ in parts:
                work.add(len(properties))
                properties = {**more, **properties}
            if parts:
                names = [names for _, names in parts]
                required |= set.union(*names) if key == "allOf" else set.intersection(*names)
    return properties, required


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0, work: _Work | None = None) -> frozenset[Kind]:
    """The kinds of values that a schema allows."""
    kinds = frozenset(KINDS)
    if depth > MAX_DEPTH:
        return kinds
    work, schema = work or _Work(), resolved(schema, root)
    work.add(1 + len(schema) + _count(schema.get("enum")))
    named = schema.get("type")
    if isinstance(named, (str, list, tuple)):
        words = [named] if isinstance(named, str) else named
        kinds = frozenset(kind for kind in KINDS if kind in words or (kind == "number" and "integer" in words)) or kinds
    if isinstance(schema.get("enum"), (list, tuple)):
        kinds &= {kind_of(value) for value in schema["enum"]}
    if "const" in schema:
        kinds &= {kind_of(schema["const"])}
    for key in ("anyOf", "oneOf"):
        if parts := _list(schema.get(key)):
            kinds &= frozenset[Kind]().union(*(kinds_of(each, root, depth + 1, work) for each in parts))
    for each in _list(schema.get("allOf")):
        kinds &= kinds_of(each, root, depth + 1, work)
    return kinds or frozenset(KINDS)


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a reference stands for."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        target: Any = root
        for step in reference[1:].split("/")[1:]:
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        schema = {**target, **{k: v for k, v in schema.items() if k != "$ref"}} if isinstance(target, Mapping) else {}
    return schema if isinstance(schema, Mapping) else {}


def kind_of(value: Any) -> Kind:
    """The kind of a JSON value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if value is None:
        return "null"
    return "string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array"


def _count(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple, Mapping)) else 0


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


class Spelled:
    """Names as they may be written: as they are, and as in JSON. A thousand are found as fast as ten."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names: dict[str, str] = {}
        for name in names:
            for text in (name, json.dumps(name, ensure_ascii=False)[1:-1], json.dumps(name)[1:-1]):
                self._names.setdefault(text, name)
        self._lengths = sorted({len(text) for text in self._names if text}, reverse=True)
        self._sorted = sorted(self._names)

    def __bool__(self) -> bool:
        return bool(self._lengths)

    def at(self, text: str, at: int) -> Iterator[tuple[int, str]]:
        """The names that stand here, with where they end."""
        for length in self._lengths:
            name = self._names.get(text[at : at + length])
            if name is not None and at + length <= len(text):
                yield at + length, name

    def may_begin(self, text: str, at: int) -> bool:
        """Is the rest of the text the beginning of a name that is longer?"""
        rest = text[at:]
        if self._lengths and len(rest) >= self._lengths[0]:
            return False
        place = bisect_left(self._sorted, rest)
        following = self._sorted[place : place + 2]
        return any(each.startswith(rest) and each != rest for each in following)
