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
_SPACE = " \t\n\r"


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


class ChatParser:
    """`push` takes text as it comes and returns what is certain of it; `finish` returns the rest."""

    def __init__(self, output: ChatFormat) -> None:
        self._format = output
        self._pending = ""  # text that nothing is known about yet
        self._deltas: list[ChatDelta] = []
        self._call_text = ""  # of the call that is being read, in case it is none
        self._calls = _Calls(output.names, lambda delta: self._deltas.append(delta))
        # Takes from the beginning of what is pending. False: it needs more.
        self._take: Callable[[], bool] = self._take_start if output.reasoning else self._take_first
        if output.reasoning and output.thinking:
            self._take = self._take_first_of_reasoning

    def push(self, text: str) -> list[ChatDelta]:
        """What is certain now."""
        self._pending += text
        while self._pending and self._take():
            pass
        return self._flush()

    def finish(self, finish_reason: str = "stop") -> list[ChatDelta]:
        """The end. Where the answer was cut, half a tag is left out, and so is a call without a name."""
        rest = self._call_text + self._pending
        begun, self._pending, self._call_text = bool(self._call_text), "", ""
        if finish_reason != "stop":
            tags = [self._format.calls.begin] if self._format.calls else []
            tags += [THINK, END_OF_THINK] if self._format.reasoning else []
            rest = "" if begun else rest[: len(rest) - max((overlap(rest, tag) for tag in tags), default=0)]
        if self._take in (self._take_reasoning, self._take_first_of_reasoning):
            self._emit_reasoning(rest.rstrip(_SPACE))
        elif self._take not in (self._take_gap, self._take_end_tag, self._take_broken, self._take_next):
            self._emit_content(rest)
        self._take = self._take_rest
        return self._flush()

    def _flush(self) -> list[ChatDelta]:
        deltas, self._deltas = self._deltas, []
        return _merged(deltas)

    # Reasoning -----------------------------------------------------------------------------------------------

    def _take_start(self) -> bool:
        """Reasoning, if the first thing is its tag."""
        text = self._pending.lstrip(_SPACE)
        if len(text) < len(THINK) and THINK.startswith(text):
            return False
        if text.startswith(THINK):
            self._pending, self._take = text[len(THINK) :], self._take_first_of_reasoning
        else:
            self._take = self._take_first
        return True

    def _take_first_of_reasoning(self) -> bool:
        self._pending = self._pending.lstrip(_SPACE)
        self._take = self._take_reasoning if self._pending else self._take
        return bool(self._pending)

    def _take_reasoning(self) -> bool:
        text, tag, rest = self._pending.partition(END_OF_THINK)
        if tag:
            self._emit_reasoning(text.rstrip(_SPACE))
            self._pending, self._take = rest, self._take_gap
            return True
        certain = text[: len(text) - overlap(text, END_OF_THINK)].rstrip(_SPACE)
        self._emit_reasoning(certain)
        self._pending = text[len(certain) :]
        return False

    def _take_gap(self) -> bool:
        """Between reasoning and content."""
        self._pending = self._pending.lstrip(_SPACE)
        self._take = self._take_first if self._pending else self._take
        return bool(self._pending)

    # Content -------------------------------------------------------------------------------------------------

    def _take_first(self) -> bool:
        """The first of the content: may be a call without a tag."""
        calls = self._format.calls
        if calls is None:
            self._take = self._take_rest
        elif calls.bare:
            text = self._pending.lstrip(_SPACE)
            if not text:
                return False
            self._take = self._take_call if text[0] == "{" else self._take_content
        else:
            self._take = self._take_content
        return True

    def _take_rest(self) -> bool:
        self._emit_content(self._pending)
        self._pending = ""
        return False

    def _take_content(self) -> bool:
        calls = self._format.calls
        assert calls is not None
        text, tag, rest = self._pending.partition(calls.begin)
        if tag:
            self._emit_content(text.rstrip(_SPACE))
            self._call_text, self._pending, self._take = text[len(text.rstrip(_SPACE)) :] + tag, rest, self._take_call
            return True
        # White space may be that before a call.
        certain = text[: len(text) - overlap(text, calls.begin)].rstrip(_SPACE)
        self._emit_content(certain)
        self._pending = text[len(certain) :]
        return False

    # Calls ---------------------------------------------------------------------------------------------------

    def _take_call(self) -> bool:
        """One JSON object, or a list of them."""
        text = self._pending
        for at, character in enumerate(text):
            try:
                over = self._calls.push(character)
            except _NotACallError:
                if self._calls.started:
                    self._pending, self._take = text[at:], self._take_broken
                else:
                    self._emit_content(self._call_text + text[: at + 1])
                    self._pending, self._take = text[at + 1 :], self._take_content
                self._call_text = ""
                self._calls.restart()
                return True
            if over:
                self._call_text, self._pending = "", text[at + 1 :]
                self._calls.restart()
                assert self._format.calls is not None
                self._take = self._take_end_tag if self._format.calls.end else self._take_next
                return True
        self._call_text, self._pending = "" if self._calls.started else self._call_text + text, ""
        return False

    def _take_broken(self) -> bool:
        """What is no JSON any more, after a call that was sent: to the end tag, or to the end."""
        assert self._format.calls is not None
        text, tag, rest = self._pending, "", ""
        if self._format.calls.end:
            text, tag, rest = self._pending.partition(self._format.calls.end)
        self._pending = rest if tag else text[len(text) - overlap(text, self._format.calls.end or "\0") :]
        self._take = self._take_next if tag else self._take
        return bool(tag)

    def _take_end_tag(self) -> bool:
        assert self._format.calls is not None
        text, tag = self._pending.lstrip(_SPACE), self._format.calls.end
        if len(text) < len(tag) and tag.startswith(text):
            return False
        self._pending, self._take = text.removeprefix(tag), self._take_next
        return True

    def _take_next(self) -> bool:
        """After a call: another one, or content."""
        assert self._format.calls is not None
        text = self._pending.lstrip(_SPACE + (";" if self._format.calls.bare else ""))
        if not text:
            return False
        self._pending = text
        self._take = self._take_call if self._format.calls.bare and text[0] == "{" else self._take_content
        return True

    def _emit_content(self, text: str) -> None:
        if text:
            self._deltas.append(ContentDelta(text))

    def _emit_reasoning(self, text: str) -> None:
        if text:
            self._deltas.append(ReasoningDelta(text))


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


T = TypeVar("T")
# A reader takes one character at each `yield`, and returns what it has read.
_Reader = Generator[None, str, T]


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
    while (character := (yield)) in _SPACE:
        pass
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
