"""What a chat model writes, taken apart as it comes: reasoning, content and tool calls.

`ChatParser` does not depend on where the text is cut into deltas. It sends nothing that may still become a tag.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

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
        parser, found = self.parser(), ChatOutput()
        found.add(parser.push(text))
        found.add(parser.finish(finish_reason))
        message: dict[str, Any] = {"role": "assistant", "content": found.content or (None if found.calls else "")}
        if found.reasoning:
            message["reasoning_content"] = found.reasoning
        if found.calls:
            message["tool_calls"] = [{"type": "function", "function": asdict(call)} for call in found.calls]
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

    def add(self, found: Iterable[ChatDelta]) -> None:
        """What came next."""
        for each in found:
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
        self._calls = _Calls(output.names)
        # Takes from the beginning of what is pending. False: it needs more.
        self._take: Callable[[], bool] = self._take_start if output.reasoning else self._take_first
        if output.reasoning and output.thinking:
            self._take = self._take_first_of_reasoning

    def push(self, text: str) -> list[ChatDelta]:
        """What is certain now."""
        self._pending += text
        while self._pending and self._take():
            pass
        found, self._deltas = self._deltas, []
        return _joined(found)

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
        found, self._deltas = self._deltas, []
        return _joined(found)

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
                self._deltas += self._calls.taken()
                if self._calls.started:
                    self._pending, self._take = text[at:], self._take_broken
                else:
                    self._emit_content(self._call_text + text[: at + 1])
                    self._pending, self._take = text[at + 1 :], self._take_content
                self._call_text = ""
                self._calls.restart()
                return True
            if over:
                self._deltas += self._calls.taken()
                self._call_text, self._pending = "", text[at + 1 :]
                self._calls.restart()
                assert self._format.calls is not None
                self._take = self._take_end_tag if self._format.calls.end else self._take_next
                return True
        self._deltas += self._calls.taken()
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


def _joined(found: list[ChatDelta]) -> list[ChatDelta]:
    """Neighbours of one kind as one. A delta with a name stays alone."""
    made: list[ChatDelta] = []
    for (kind, index, _), group in itertools.groupby(enumerate(found), _kind):
        each = [delta for _, delta in group]
        if kind is CallDelta:
            name = each[0].name if isinstance(each[0], CallDelta) else None
            made.append(CallDelta(index, name, "".join(call.arguments for call in each if isinstance(call, CallDelta))))
        else:
            made.append(kind("".join(delta.text for delta in each if not isinstance(delta, CallDelta))))
    return made


def _kind(numbered: tuple[int, ChatDelta]) -> tuple[Any, int, int]:
    """Equal for neighbours that can be joined."""
    number, delta = numbered
    if isinstance(delta, CallDelta):
        return CallDelta, delta.index, -1 if delta.name is None else number
    return type(delta), -1, -1


# JSON of calls ---------------------------------------------------------------------------------------------------


class _NotACallError(Exception):
    """The text is something else."""


class _Value:
    """Where one JSON value ends. Takes it character by character; checks brackets and strings, nothing else."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._depth = 0
        self._string = self._escaped = False

    def push(self, character: str) -> bool:
        """True: this was its last character. A number or a word has no last one: see `closed_by`."""
        self._parts.append(character)
        if self._string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._string = False
                return self._depth == 0
        elif character == '"':
            self._string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._parts)

    def closed_by(self, character: str) -> bool:
        """Is it a number or a word, and this the first character after it?"""
        return bool(self._parts) and self._depth == 0 and not self._string and character in ",}" + _SPACE


class _Calls:
    """Objects with a name and arguments, one alone or several in a list, character by character."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names, self._deltas = names, list[CallDelta]()
        self.count = 0  # calls that were started
        self.restart()

    def restart(self) -> None:
        """Before the next object or list."""
        self.started = False  # is the name of the first one known, and have its arguments begun?
        self._listed = False
        self._expect = self._begin

    def taken(self) -> list[CallDelta]:
        """What came since the last time."""
        found, self._deltas = self._deltas, []
        return found

    def push(self, character: str) -> bool:
        """True: that was the last character."""
        return self._expect(character)

    def _begin(self, character: str) -> bool:
        if character == "[" and not self._listed:
            self._listed, self._expect = True, self._item
        elif character == "{":
            self._open()
        elif character not in _SPACE:
            raise _NotACallError
        return False

    def _open(self) -> None:
        self._name: str | None = None
        self._arguments: str | None = None  # that wait for a name
        self._complete = False
        self._expect = self._key_or_end

    def _item(self, character: str) -> bool:
        if character == "{":
            self._open()
        elif character not in _SPACE:
            raise _NotACallError
        return False

    def _key_or_end(self, character: str) -> bool:
        return self._end_of_object() if character == "}" else self._before_key(character)

    def _before_key(self, character: str) -> bool:
        if character == '"':
            self._value = _Value()
            self._value.push(character)
            self._expect = self._key
        elif character not in _SPACE:
            raise _NotACallError
        return False

    def _key(self, character: str) -> bool:
        if self._value.push(character):
            self._member, self._expect = _string(self._value.text), self._colon
        return False

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._expect = self._before_value
        elif character not in _SPACE:
            raise _NotACallError
        return False

    def _before_value(self, character: str) -> bool:
        if character in _SPACE:
            return False
        expected = '"' if self._member == "name" else "{" if self._member in _ARGUMENTS else character
        twice = (self._member == "name" and self._name is not None) or (
            self._member in _ARGUMENTS and (self._complete or self._arguments is not None)
        )
        if character != expected or character in ",:}]" or twice:
            raise _NotACallError
        self._value, self._expect = _Value(), self._inside
        if self._member in _ARGUMENTS:
            if self._name is not None:
                self._start()
            else:
                self._arguments = ""
        return self._inside(character)

    def _inside(self, character: str) -> bool:
        if self._value.closed_by(character):
            self._expect = self._after_value
            return self._after_value(character)
        over = self._value.push(character)
        if self._member in _ARGUMENTS:
            if self._name is None:
                if over:
                    self._arguments = self._value.text
            else:
                self._deltas.append(CallDelta(self.count - 1, None, character))
                self._complete = over
        if over:
            self._expect = self._after_value
            if self._member == "name":
                self._named(_string(self._value.text))
        return False

    def _named(self, name: str) -> None:
        if name not in self._names:
            raise _NotACallError
        self._name = name
        if self._arguments is not None:
            self._start()
            self._deltas.append(CallDelta(self.count - 1, None, self._arguments))
            self._complete = True

    def _start(self) -> None:
        self.count += 1
        self.started = True
        self._deltas.append(CallDelta(self.count - 1, self._name, ""))

    def _after_value(self, character: str) -> bool:
        if character == ",":
            self._expect = self._before_key
        elif character == "}":
            return self._end_of_object()
        elif character not in _SPACE:
            raise _NotACallError
        return False

    def _end_of_object(self) -> bool:
        if not self._complete:
            raise _NotACallError
        self._expect = self._between
        return not self._listed

    def _between(self, character: str) -> bool:
        if character == ",":
            self._expect = self._item
        elif character not in _SPACE + "]":
            raise _NotACallError
        return character == "]"


def _string(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        raise _NotACallError from None
