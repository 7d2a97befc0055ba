"""Reads calls of functions as they come, by the form of a chat template. Their arguments become JSON.

What the reader takes for certain does not depend on where the text is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .call_form import (
    KINDS,
    CallForm,
    Hole,
    JsonArguments,
    KeyedArguments,
    Kind,
    Parameters,
    Parts,
    Spelled,
    ValueForm,
    kind_of,
)
from .literals import literal_end, whole_literal
from .stream import overlap

_ID = re.compile(r"[A-Za-z0-9_.:\-]{0,64}")
_INDEX = re.compile(r"[0-9]{0,6}")
_KEY = re.compile(r"[^\s<>{}\[\]()\"'=:,|]{0,256}")
_SPACE = re.compile(r"\s*")

_NO_KEYS = Spelled(())
T = TypeVar("T")
_Reader = Generator[None, None, T]


@dataclass
class Pending:
    """Text that nothing is known about yet."""

    text: str = ""
    closed: bool = False  # nothing follows

    def take(self, count: int) -> str:
        """The first characters."""
        taken, self.text = self.text[:count], self.text[count:]
        return taken


@dataclass(frozen=True)
class _Match:
    """Parts that are there: where they end, and what is in their holes."""

    end: int
    holes: Mapping[Hole, str]


_MORE = "more"  # text that may still become the parts
_Matched = _Match | str | None


def match(
    parts: Parts,
    text: str,
    names: Spelled,
    keys: Spelled | None = None,
    at: int = 0,
    holes: Mapping[Hole, str] = {},
) -> _Matched:
    """The parts at this place, as far as the text goes.

    Without keys, white space with a line end may be any white space: it belongs to no value.
    """
    if not parts:
        return _Match(at, holes)
    part, rest = parts[0], parts[1:]
    if isinstance(part, str):
        end = _match_text(part, text, at, exact=keys is not None)
        return end if end is None or isinstance(end, str) else match(rest, text, names, keys, end, holes)
    return _match_hole(part, rest, text, names, keys, at, holes)


def _match_text(part: str, text: str, at: int, *, exact: bool) -> int | str | None:
    if exact:
        if text.startswith(part, at):
            return at + len(part)
        return _MORE if part.startswith(text[at:]) else None
    for piece in re.findall(r"\s*\n\s*|[^\S\n]*\S+(?:[^\S\n]+(?=\S))?|[^\S\n]+", part):
        if "\n" in piece:
            space = _SPACE.match(text, at)
            at = at if space is None else space.end()
        elif text.startswith(piece, at):
            at += len(piece)
        else:
            return _MORE if piece.startswith(text[at:]) else None
    return at


def _match_hole(
    hole: Hole,
    rest: Parts,
    text: str,
    names: Spelled,
    keys: Spelled | None,
    at: int,
    holes: Mapping[Hole, str],
) -> _Matched:
    if hole is Hole.NAME or (hole is Hole.KEY and keys):
        spelled = names if hole is Hole.NAME or keys is None else keys
        found = [match(rest, text, names, keys, end, {**holes, hole: name}) for end, name in spelled.at(text, at)]
        return _longest([*found, *([_MORE] if spelled.may_begin(text, at) else [])])
    pattern = {Hole.ID: _ID, Hole.INDEX: _INDEX, Hole.KEY: _KEY}[hole]
    end = _end_of(pattern, text, at)
    if end == at and at < len(text):
        return None
    if end == len(text):
        return _MORE
    return match(rest, text, names, keys, end, {**holes, hole: text[at:end]})


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _longest(found: Sequence[_Matched]) -> _Matched:
    if _MORE in found:
        return _MORE
    return max((each for each in found if isinstance(each, _Match)), key=lambda each: each.end, default=None)


class CallReader:
    """Reads the calls of one answer. `emit` takes the index of a call, its name or None, its id, and arguments."""

    def __init__(
        self,
        form: CallForm,
        tools: Mapping[str, Parameters],
        pending: Pending,
        emit: Callable[[int, str | None, str | None, str], None],
    ) -> None:
        self._form, self._tools, self._pending, self._emit = form, tools, pending, emit
        self._names, self._keys = Spelled(tools), dict[str, Spelled]()
        self._count = 0
        self.started = False  # is the name of a call known?

    def read(self) -> _Reader[bool]:
        """From the begin of calls to their end. False: there is no call; nothing was taken."""
        self.started = False
        following = [each for each in (self._form.between, self._form.last) if each] or [()]
        exact = None if isinstance(self._form.arguments, JsonArguments) else _NO_KEYS
        head = yield from self._choose([self._form.first], exact)
        if head is None:
            return False
        while head is not None:
            found, _ = head
            name = found.holes[Hole.NAME]
            if isinstance(self._form.arguments, JsonArguments):
                complete = yield from self._json(name, found)
            else:
                complete = yield from self._keyed(self._form.arguments, name, found)
            if not complete:
                return self.started
            head = yield from self._choose(following, exact)
            if head is None or not self._form.between or head[1] is not self._form.between:
                break
        if head is not None:
            self._pending.take(head[0].end)
        elif any(match(each, self._pending.text, self._names, exact) == _MORE for each in following):
            self._pending.text = ""  # the answer ended within the text after the calls
        return True

    def _choose(
        self, alternatives: Sequence[Parts], keys: Spelled | None = None
    ) -> _Reader[tuple[_Match, Parts] | None]:
        """The longest of these that comes next. Nothing of it is taken."""
        while True:
            found = [(match(each, self._pending.text, self._names, keys), each) for each in alternatives]
            if self._pending.closed or not any(each == _MORE for each, _ in found):
                full = [(each, parts) for each, parts in found if isinstance(each, _Match)]
                return max(full, key=lambda each: each[0].end, default=None)
            yield

    def _start(self, name: str, found: _Match) -> None:
        self.started = True
        self._emit(self._count, name, found.holes.get(Hole.ID), "")
        self._count += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._emit(self._count - 1, None, None, text)

    def _json(self, name: str, found: _Match) -> _Reader[bool]:
        """An object as it is written."""
        pending = self._pending
        while not (rest := pending.text[found.end :].lstrip()):
            if pending.closed:
                return False
            yield
        if rest[0] != "{":
            return False
        pending.text = rest
        self._start(name, found)
        return (yield from self._value(literal_end(), self._arguments))

    def _value(self, end_of: Callable[[str], int | None], take: Callable[[str], None]) -> _Reader[bool]:
        """A value up to its end, in pieces."""
        pending = self._pending
        while True:
            end = end_of(pending.text)
            take(pending.take(len(pending.text) if end is None else end))
            if end is not None:
                return True
            if pending.closed:
                return False
            yield

    def _keyed(self, form: KeyedArguments, name: str, found: _Match) -> _Reader[bool]:
        """Keys and values, from the end of the name on."""
        parameters, head = self._tools[name], found.end
        keys = self._keys.setdefault(name, Spelled(parameters.kinds))
        self._pending.text, dropped = self._pending.text[head:], self._pending.text[:head]
        befores = tuple(dict.fromkeys(value.before for value in form.values.values()))
        empty: Parts = (form.empty,) if form.empty else ()
        ends: list[Parts] = [(*empty, *self._form.between)] if self._form.between else []
        ends.append((*empty, *self._form.last))
        starts: list[Parts] = [(form.open, Hole.KEY, before) for before in befores]
        begun = yield from self._choose([*starts, *ends], keys)
        if begun is None:
            self._pending.text = dropped + self._pending.text
            return False
        self._start(name, found)
        if not any(begun[1] is each for each in starts):
            self._arguments("{}")
            self._pending.take(len(form.empty))
            return True
        lead = "{"
        following: list[Parts] = [(form.separator, Hole.KEY, before) for before in befores]
        while True:
            self._pending.take(begun[0].end)
            key = begun[0].holes[Hole.KEY]
            self._arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
            group: dict[Kind, ValueForm] = {
                kind: value for kind, value in form.values.items() if value.before == begun[1][-1]
            }
            if not (yield from self._keyed_value(form, group, parameters.kinds.get(key, frozenset(KINDS)), key)):
                return False
            lead = ", "
            closes: list[Parts] = [(form.close,)] if form.close else []
            begun = yield from self._choose([*following, *closes], keys)
            if begun is None and form.close:
                return False
            if begun is None:
                break
            if closes and begun[1] is closes[0]:
                self._pending.take(begun[0].end)
                break
        self._arguments("}")
        return True

    def _keyed_value(
        self, form: KeyedArguments, group: Mapping[Kind, ValueForm], allowed: frozenset[Kind], key: str
    ) -> _Reader[bool]:
        allowed |= {"wrapped"} if "string" in allowed else set[Kind]()
        kinds = {kind: value for kind, value in group.items() if kind in allowed} or group
        after = _filled(next(iter(kinds.values())).after, key)
        string = kinds.get("wrapped") or kinds.get("string")
        if string is not None and string.codec == "raw":
            after = _filled(string.after, key)
            following = [each for each in (form.separator, form.close or self._last_text()) if each]
            ends = [after + each for each in following] if len(following) == 2 else [after]
            if len(kinds) == 1:
                return (yield from self._raw(after, ends))
            text = yield from self._before(after, ends)
            if text is None:
                return False
            self._arguments(_json_of(text, frozenset(kinds), form.quotes if _quoted(kinds) else None))
            return True
        quotes = form.quotes if _quoted(kinds) else None
        pieces = list[str]()
        if not (yield from self._value(literal_end(quotes), pieces.append)):
            return False
        try:
            value = whole_literal("".join(pieces), quotes)
        except (ValueError, RecursionError):
            return False
        found = yield from self._choose([(after,)] if after else [()], _NO_KEYS)
        if found is None:
            return False
        self._pending.take(found[0].end)
        self._arguments(json.dumps(value, ensure_ascii=False))
        return True

    def _last_text(self) -> str:
        """What follows the arguments of the last call, up to a hole."""
        return next((part for part in self._form.last[:1] if isinstance(part, str)), "")

    def _raw(self, after: str, ends: Sequence[str]) -> _Reader[bool]:
        """A string up to the text after it, as JSON."""
        self._arguments('"')
        take = lambda text: self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])  # noqa: E731
        complete = yield from self._stream_before(after, ends, take)
        if complete:
            self._arguments('"')
        return complete

    def _before(self, after: str, ends: Sequence[str]) -> _Reader[str | None]:
        pieces = list[str]()
        complete = yield from self._stream_before(after, ends, pieces.append)
        return "".join(pieces) if complete else None

    def _stream_before(self, after: str, ends: Sequence[str], take: Callable[[str], None]) -> _Reader[bool]:
        """What comes before the first of these ends, which begin with the text after it."""
        pending = self._pending
        while not (places := [at for at in map(pending.text.find, ends) if at >= 0]):
            take(pending.take(len(pending.text) - max(overlap(pending.text, end) for end in ends)))
            if pending.closed:
                return False
            yield
        take(pending.take(min(places)))
        pending.take(len(after))
        return True


def _quoted(kinds: Mapping[Kind, ValueForm]) -> bool:
    return any(value.codec == "quoted" for value in kinds.values())


def _filled(parts: Parts, key: str) -> str:
    return "".join(part if isinstance(part, str) else key for part in parts)


def _json_of(text: str, kinds: frozenset[Kind], quotes: tuple[str, str] | None) -> str:
    """A value that may be a string or something else: if it can be read as something else, it is that."""
    try:
        value = whole_literal(text, quotes)
    except (ValueError, RecursionError):
        value = text
    return json.dumps(value if kind_of(value) in kinds and kind_of(value) != "string" else text, ensure_ascii=False)


def read_all(form: CallForm, tools: Mapping[str, Parameters], text: str) -> tuple[list[tuple[str, Any]], str] | None:
    """Calls of a text that begins with them, with their arguments, and the text after them. None: there is none."""
    calls: list[list[str]] = []

    def emit(index: int, name: str | None, _: str | None, arguments: str) -> None:
        if name is not None:
            calls.append([name, ""])
        calls[index][1] += arguments

    pending = Pending(text, closed=True)
    for _ in _steps(CallReader(form, tools, pending, emit)):
        break
    if not calls:
        return None
    try:
        return [(name, json.loads(arguments)) for name, arguments in calls], pending.text
    except ValueError:
        return None


def _steps(reader: CallReader) -> Iterator[None]:
    yield from reader.read()
