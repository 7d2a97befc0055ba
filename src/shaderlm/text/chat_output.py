"""What a chat model writes, taken apart as it comes: reasoning, content and tool calls.

`ChatParser` does not depend on where the text is cut into deltas. It sends nothing that may still become a tag.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .call_form import CallForm, Parameters
from .call_reader import CallReader, Pending
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
    id: str | None = None  # beside a name, if the model writes ids


ChatDelta = ReasoningDelta | ContentDelta | CallDelta


@dataclass(frozen=True)
class ChatFormat:
    """What to look for in an answer."""

    calls: CallForm | None = None  # None: no calls
    tools: Mapping[str, Parameters] = field(default_factory=dict)  # the functions that can be called
    reasoning: bool = False  # text between thinking tags is not content
    thinking: bool = False  # the prompt has the first of these tags already
    tags: tuple[str, str] = (THINK, END_OF_THINK)

    def parser(self) -> ChatParser:
        """For one answer."""
        return ChatParser(self)

    def message(self, text: str, finish_reason: str = "stop") -> dict[str, Any]:
        """A whole answer as a message in OpenAI's form; `content` is None where there are only calls.

        Calls have ids if the model writes them.
        """
        parser, output = self.parser(), ChatOutput()
        output.add([*parser.push(text), *parser.finish(finish_reason)])
        message: dict[str, Any] = {"role": "assistant", "content": output.content or (None if output.calls else "")}
        if output.reasoning:
            message["reasoning_content"] = output.reasoning
        if output.calls:
            message["tool_calls"] = [_written(call) for call in output.calls]
        return message


@dataclass
class Call:
    """A whole tool call. Its arguments are JSON."""

    name: str
    arguments: str = ""
    id: str | None = None  # if the model writes ids


def _written(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


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
                    self.calls.append(Call(each.name, id=each.id))
                self.calls[each.index].arguments += each.arguments


T = TypeVar("T")
# A reader yields when it needs more text, and returns what it has read.
_Reader = Generator[None, None, T]


class ChatParser:
    """`push` takes text as it comes and returns what is certain of it; `finish` returns the rest."""

    def __init__(self, output: ChatFormat) -> None:
        self._format = output
        self._pending = Pending()
        self._deltas: list[ChatDelta] = []
        self._calls = None
        if output.calls is not None:
            self._calls = CallReader(output.calls, output.tools, self._pending, self._emit_call)
        self._around = output.calls.content if output.calls is not None else ("", "")
        self._held = ""  # content that may become the text after it
        self._in_call = False  # has the text of a call begun?
        self._emit_rest = self._emit_content  # what becomes of pending text at the end
        self._reader = self._answer()

    def push(self, text: str) -> list[ChatDelta]:
        """What is certain now."""
        self._pending.text += text
        next(self._reader)
        return self._flush()

    def finish(self, finish_reason: str = "stop") -> list[ChatDelta]:
        """The end. Where the answer was cut, half a tag is left out, and so is a call without a name."""
        if finish_reason == "stop":
            self._pending.closed = True
            next(self._reader)
        rest, self._pending.text = self._pending.text, ""
        if finish_reason != "stop":
            tags = [self._format.calls.begin] if self._format.calls and self._format.calls.begin else []
            tags += self._format.tags if self._format.reasoning else []
            rest = "" if self._in_call else rest[: len(rest) - max((overlap(rest, tag) for tag in tags), default=0)]
        self._emit_rest(rest)
        held, self._held = self._held, ""
        if held and finish_reason == "stop":
            self._deltas.append(ContentDelta(held))
        self._reader = self._content()
        return self._flush()

    def _flush(self) -> list[ChatDelta]:
        deltas, self._deltas = self._deltas, []
        return _merged(deltas)

    def _emit_call(self, index: int, name: str | None, made_id: str | None, arguments: str) -> None:
        self._deltas.append(CallDelta(index, name, arguments, made_id))

    def _emit_content(self, text: str) -> None:
        end = self._around[1]
        if end:  # is left out
            text = (self._held + text).replace(end, "")
            held = overlap(text, end)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        if text:
            self._deltas.append(ContentDelta(text))

    def _emit_reasoning(self, text: str) -> None:
        if text := text.rstrip(_SPACE):
            self._deltas.append(ReasoningDelta(text))

    def _emit_nothing(self, text: str) -> None:
        """For what is left of a call."""

    # Readers take from the beginning of what is pending. They yield when they need more of it.

    def _answer(self) -> Iterator[None]:
        if self._format.reasoning and (self._format.thinking or (yield from self._take_tag(self._format.tags[0]))):
            yield from self._reasoning()
        form = self._format.calls
        if form is None:
            yield from self._content()
            return
        if form.alone:
            space = yield from self._space()
            if not (yield from self._call()) and not (yield from self._take_head()):
                self._emit_content(space)
            yield from self._content()
            return
        if self._around[0]:
            space = yield from self._space()
            if (yield from self._call()):
                yield from self._skip(_SPACE)
            elif not (yield from self._take_head()):
                self._emit_content(space)
        while True:
            space = yield from self._take_before(form.begin, self._emit_content, take=False)
            if (yield from self._call()):
                yield from self._skip(_SPACE)
            else:
                self._emit_content(space + self._pending.take(1))

    def _take_head(self) -> _Reader[bool]:
        """The text before the content, if there is one."""
        head = self._around[0].strip(_SPACE)
        if not head or not (yield from self._take_tag(head)):
            return False
        if head != self._around[0]:
            yield from self._skip(_SPACE)
        return True

    def _call(self) -> _Reader[bool]:
        """Calls, if they come next. False: it is content."""
        assert self._calls is not None
        self._in_call = True
        reader = self._calls.read()
        while True:
            try:
                next(reader)
            except StopIteration as end:
                self._in_call = False
                return bool(end.value)
            if self._calls.started:
                self._emit_rest = self._emit_nothing
            yield

    def _space(self) -> _Reader[str]:
        """White space that comes next."""
        pending, space = self._pending, ""
        while not (rest := pending.text.lstrip(_SPACE)) and not pending.closed:
            yield
        space = pending.take(len(pending.text) - len(rest))
        return space

    def _reasoning(self) -> Iterator[None]:
        yield from self._skip(_SPACE)
        self._emit_rest = self._emit_reasoning
        yield from self._take_before(self._format.tags[1], self._emit_reasoning)
        yield from self._skip(_SPACE)

    def _content(self) -> Iterator[None]:
        self._emit_rest = self._emit_content
        while True:
            self._emit_content(self._pending.take(len(self._pending.text)))
            yield

    def _take_before(self, tag: str, emit: Callable[[str], None], *, take: bool = True) -> _Reader[str]:
        """Emit what comes before a tag, and take the tag; the white space before it."""
        pending = self._pending
        while (at := pending.text.find(tag)) < 0:
            certain = pending.text[: len(pending.text) - overlap(pending.text, tag)].rstrip(_SPACE)
            emit(pending.take(len(certain)))
            yield
        text = pending.take(at)
        if take:
            pending.take(len(tag))
        emit(text.rstrip(_SPACE))
        return text[len(text.rstrip(_SPACE)) :]

    def _skip(self, characters: str) -> Iterator[None]:
        """Leave these out, up to something else, which is content unless more is known of it."""
        while not (text := self._pending.text.lstrip(characters)):
            self._pending.text = ""
            yield
        self._pending.text, self._emit_rest = text, self._emit_content

    def _take_tag(self, tag: str) -> _Reader[bool]:
        """Take a tag, and spaces before it, if it comes next."""
        pending = self._pending
        while len(text := pending.text.lstrip(_SPACE)) < len(tag) and tag.startswith(text) and not pending.closed:
            yield
        if text.startswith(tag):
            pending.text = text.removeprefix(tag)
        return text.startswith(tag)


def _merged(deltas: list[ChatDelta]) -> list[ChatDelta]:
    """Neighbours of one kind as one. A delta with a name stays alone."""
    merged: list[ChatDelta] = []
    for (kind, index, name), group in itertools.groupby(deltas, _kind):
        neighbours: list[Any] = list(group)
        if kind is CallDelta:
            arguments = "".join(delta.arguments for delta in neighbours)
            merged.append(CallDelta(index, name, arguments, neighbours[0].id))
        else:
            merged.append(kind("".join(delta.text for delta in neighbours)))
    return merged


def _kind(delta: ChatDelta) -> tuple[Any, int, str | None]:
    """Equal for neighbours that become one. Every name has another index."""
    return (CallDelta, delta.index, delta.name) if isinstance(delta, CallDelta) else (type(delta), -1, None)
