"""What a chat model writes, taken apart as it comes: reasoning, content and tool calls.

`ChatParser` does not depend on where the text is cut into deltas. It sends nothing that may still become a tag.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from .stream import overlap

THINK, END_OF_THINK = "<think>", "</think>"
# Between which models think.
THINKING_TAGS = (
    (THINK, END_OF_THINK),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
)
_SPACE = " \t\n\r"


def thinking_tags(template: str) -> tuple[str, str] | None:
    """Those of a chat template; None: its model does not think."""
    return next((tags for tags in THINKING_TAGS if tags[1] in template), None)


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model wrote between its thinking tags."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of a tool call. The first one of an index has the name and no arguments; later ones have arguments only."""

    index: int
    name: str | None
    arguments: str  # a part of a JSON object


ChatDelta = ReasoningDelta | ContentDelta | CallDelta


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls: JSON objects with a name and arguments, between two tags or to the end."""

    begin: str  # the tag before a call
    end: str  # the tag after it; "": none
    arguments: str  # the key of the arguments
    bare: bool  # an answer that begins with { is a call, too
    parallel: bool  # an answer may have several


TAGGED = CallFormat("<tool_call>", "</tool_call>", "arguments", bare=False, parallel=True)
LLAMA = CallFormat("<|python_tag|>", "", "parameters", bare=True, parallel=False)
_ARGUMENTS = ("arguments", "parameters")  # keys that are taken for the arguments, whatever the format asks for


@dataclass(frozen=True)
class ChatFormat:
    """What to look for in an answer."""

    calls: CallFormat | None = None  # None: no calls
    names: frozenset[str] = frozenset()  # of the functions that can be called
    reasoning: bool = False  # text between thinking tags is not content
    thinking: bool = False  # the prompt has the first of these tags already
    tags: tuple[str, str] = (THINK, END_OF_THINK)

    def parser(self) -> ChatParser:
        """For one answer."""
        return ChatParser(self)

    def message(self, text: str, finish_reason: str = "stop") -> dict[str, Any]:
        """A whole answer as a message in OpenAI's form; `content` is None where there are only calls.

        Calls have no ids.
        """
        parser, output = self.parser(), ChatOutput()
        output.add([*parser.push(text), *parser.finish(finish_reason)])
        message: dict[str, Any] = {"role": "assistant", "content": output.content or (None if output.calls else "")}
        if output.reasoning:
            message["reasoning_content"] = output.reasoning
        if output.calls:
            message["tool_calls"] = [{"type": "function", "function": asdict(call)} for call in output.calls]
        return message


@dataclass
class Call:
    """A whole tool call. Its arguments are JSON."""

    name: str
    arguments: str = ""


@dataclass
class ChatOutput:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, deltas: Iterable[ChatDelta]) -> None:
        """What came next."""
        for each in deltas:
            if isinstance(each, ReasoningDelta):
                self.reasoning += each.text
            elif isinstance(each, ContentDelta):
                self.content += each.text
            else:
                if each.name is not None:
                    self.calls.append(Call(each.name))
                self.calls[each.index].arguments += each.arguments


T = TypeVar("T")
# A reader yields when it needs more text, and returns what it has read. Those of calls are sent single characters.
_Reader = Generator[None, Any, T]


class ChatParser:
    """`push` takes text as it comes and returns what is certain of it; `finish` returns the rest."""

    def __init__(self, output: ChatFormat) -> None:
        self._format = output
        self._pending = ""  # text that nothing is known about yet
        self._deltas: list[ChatDelta] = []
        self._call_text = ""  # of the call that is being read, in case it is none
        self._calls = _Calls(output.names, self._emit)
        self._emit_rest = self._emit_content  # what becomes of pending text at the end
        self._reader = self._answer()

    def push(self, text: str) -> list[ChatDelta]:
        """What is certain now."""
        self._pending += text
        next(self._reader)
        return self._flush()

    def finish(self, finish_reason: str = "stop") -> list[ChatDelta]:
        """The end. Where the answer was cut, half a tag is left out, and so is a call without a name."""
        rest = self._call_text + self._pending
        begun, self._pending, self._call_text = bool(self._call_text), "", ""
        if finish_reason != "stop":
            tags = [self._format.calls.begin] if self._format.calls else []
            tags += self._format.tags if self._format.reasoning else []
            rest = "" if begun else rest[: len(rest) - max((overlap(rest, tag) for tag in tags), default=0)]
        self._emit_rest(rest)
        self._reader = self._content()
        return self._flush()

    def _flush(self) -> list[ChatDelta]:
        deltas, self._deltas = self._deltas, []
        return _merged(deltas)

    def _emit(self, delta: ChatDelta) -> None:
        self._deltas.append(delta)

    def _emit_content(self, text: str) -> None:
        if text:
            self._emit(ContentDelta(text))

    def _emit_reasoning(self, text: str) -> None:
        if text := text.rstrip(_SPACE):
            self._emit(ReasoningDelta(text))

    def _emit_nothing(self, text: str) -> None:
        """For text between tags."""

    # Readers take from the beginning of what is pending. They yield when they need more of it.

    def _answer(self) -> Iterator[None]:
        if self._format.reasoning and (self._format.thinking or (yield from self._take_tag(self._format.tags[0]))):
            yield from self._reasoning()
        calls = self._format.calls
        if calls is None:
            yield from self._content()
            return
        if calls.bare:
            while not self._pending.lstrip(_SPACE):
                yield
        is_call = calls.bare and self._pending.lstrip(_SPACE)[0] == "{"
        while True:
            if not is_call:
                yield from self._content_before(calls.begin)
            is_call = yield from self._call(calls.end)
            if is_call:
                yield from self._skip(_SPACE + (";" if calls.bare else ""))
                is_call = calls.bare and self._pending[0] == "{"

    def _reasoning(self) -> Iterator[None]:
        yield from self._skip(_SPACE)
        self._emit_rest = self._emit_reasoning
        yield from self._take_before(self._format.tags[1], self._emit_reasoning)
        yield from self._skip(_SPACE)

    def _content(self) -> Iterator[None]:
        while True:
            self._emit_content(self._pending)
            self._pending = ""
            yield

    def _content_before(self, tag: str) -> Iterator[None]:
        """White space before the tag is that of a call."""
        space = yield from self._take_before(tag, self._emit_content)
        self._call_text = space + tag

    def _take_before(self, tag: str, emit: Callable[[str], None]) -> _Reader[str]:
        """Emit what comes before a tag, and take the tag; the white space before it."""
        while tag not in self._pending:
            certain = self._pending[: len(self._pending) - overlap(self._pending, tag)].rstrip(_SPACE)
            emit(certain)
            self._pending = self._pending[len(certain) :]
            yield
        text, _, self._pending = self._pending.partition(tag)
        emit(text.rstrip(_SPACE))
        return text[len(text.rstrip(_SPACE)) :]

    def _skip(self, characters: str) -> Iterator[None]:
        """Leave these out, up to something else, which is content unless more is known of it."""
        while not (text := self._pending.lstrip(characters)):
            self._pending = ""
            yield
        self._pending, self._emit_rest = text, self._emit_content

    def _take_tag(self, tag: str) -> _Reader[bool]:
        """Take a tag, and spaces before it, if it comes next."""
        while len(text := self._pending.lstrip(_SPACE)) < len(tag) and tag.startswith(text):
            yield
        if text.startswith(tag):
            self._pending = text.removeprefix(tag)
        return text.startswith(tag)

    def _call(self, end: str) -> _Reader[bool]:
        """One JSON object, or a list of them, and the tag after it. False: it was content."""
        text, at, over, broken = "", 0, False, False
        while not over and not broken:
            if at == len(text):  # all of it is read
                self._call_text = "" if self._calls.started else self._call_text + text
                text, at, self._pending = self._pending, 0, ""
                if not text:
                    yield
                continue
            try:
                over = self._calls.push(text[at])
            except _NotACallError:
                broken = True
            at += 1
        started, call_text, self._call_text = self._calls.started, self._call_text, ""
        self._calls.restart()
        self._pending = text[at:] + self._pending
        if broken and not started:
            self._emit_content(call_text + text[:at])
            return False
        self._emit_rest = self._emit_nothing
        if over:
            yield from self._take_tag(end)
        elif end:  # what is no JSON any more, after a call that was sent, is left out
            self._pending = text[at - 1 :]
            yield from self._take_before(end, self._emit_nothing)
        else:
            while True:
                self._pending = ""
                yield
        return True


def _merged(deltas: list[ChatDelta]) -> list[ChatDelta]:
    """Neighbours of one kind as one. A delta with a name stays alone."""
    merged: list[ChatDelta] = []
    for (kind, index, name), group in itertools.groupby(deltas, _kind):
        neighbours: Iterator[Any] = group
        if kind is CallDelta:
            merged.append(CallDelta(index, name, "".join(delta.arguments for delta in neighbours)))
        else:
            merged.append(kind("".join(delta.text for delta in neighbours)))
    return merged


def _kind(delta: ChatDelta) -> tuple[Any, int, str | None]:
    """Equal for neighbours that become one. Every name has another index."""
    return (CallDelta, delta.index, delta.name) if isinstance(delta, CallDelta) else (type(delta), -1, None)


# JSON of calls ---------------------------------------------------------------------------------------------------


class _NotACallError(Exception):
    """The text is something else."""


class _Calls:
    """Objects with a name and arguments, one alone or several in a list, character by character."""

    def __init__(self, names: frozenset[str], emit: Callable[[CallDelta], None]) -> None:
        self._names, self._emit = names, emit
        self._count = 0  # calls that were started
        self.restart()

    def restart(self) -> None:
        """Before the next object or list."""
        self.started = False  # is the name of the first one known, and have its arguments begun?
        self._reader = self._objects()
        next(self._reader)

    def push(self, character: str) -> bool:
        """True: that was the last character."""
        try:
            self._reader.send(character)
        except StopIteration:
            return True
        return False

    def _objects(self) -> _Reader[None]:
        character = yield from _next_of("[{")
        if character == "{":
            yield from self._object()
            return
        while character != "]":
            yield from _next_of("{")
            yield from self._object()
            character = yield from _next_of(",]")

    def _object(self) -> _Reader[None]:
        """What follows the bracket."""
        name: str | None = None
        early_arguments: str | None = None  # that wait for a name
        complete = False
        character = yield from _next_of('"}')
        while character == '"':
            key = _string((yield from _value(character))[0])
            yield from _next_of(":")
            first = yield from _next_of()
            is_name, is_arguments = key == "name", key in _ARGUMENTS
            expected = '"' if is_name else "{" if is_arguments else first
            repeated = name is not None if is_name else is_arguments and (complete or early_arguments is not None)
            if first != expected or first in ",:}]" or repeated:
                raise _NotACallError
            if is_arguments and name is not None:
                self._start(name)
                _, character = yield from _value(first, self._emit_arguments)
                complete = True
            else:
                text, character = yield from _value(first)
                early_arguments = text if is_arguments else early_arguments
            if is_name:
                name = _string(text)
                if name not in self._names:
                    raise _NotACallError
                if early_arguments is not None:
                    self._start(name)
                    self._emit_arguments(early_arguments)
                    complete = True
            if character not in (",", "}"):
                character = yield from _next_of(",}")
            if character == ",":
                character = yield from _next_of('"')
        if not complete:
            raise _NotACallError

    def _start(self, name: str) -> None:
        self._count += 1
        self.started = True
        self._emit(CallDelta(self._count - 1, name, ""))

    def _emit_arguments(self, text: str) -> None:
        self._emit(CallDelta(self._count - 1, None, text))


def _next_of(allowed: str = "") -> _Reader[str]:
    """The next character that is no space: one of these, or any."""
    character: str = yield
    while character in _SPACE:
        character = yield
    if allowed and character not in allowed:
        raise _NotACallError
    return character


def _value(first: str, emit: Callable[[str], None] = lambda character: None) -> _Reader[tuple[str, str]]:
    """A JSON value from its first character on, and the character after it, which only ends a number or a word.

    Checks brackets and strings, nothing else.
    """
    characters, depth, in_string, escaped = list[str](), 0, False, False
    character = first
    while not characters or depth or in_string or character not in ",}" + _SPACE:
        characters.append(character)
        emit(character)
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
            ends = not in_string and depth == 0
        else:
            in_string = character == '"'
            depth += (character in "{[") - (character in "}]")
            ends = character in "}]" and depth == 0
        if ends:
            return "".join(characters), ""
        character = yield
    return "".join(characters), character


def _string(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        raise _NotACallError from None
