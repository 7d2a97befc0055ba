"""Generated text, told apart: thoughts, answer and tool calls. The same for whole and for streamed answers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from ..engine import Handle
from ..text import Tokenizer
from ..text.reasoning import CLOSE, ReasoningParser


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of a tool call. The first one of a call has its name and id, later ones have arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class Parts(NamedTuple):
    """What some text brought."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class ToolParser(Protocol):
    """Finds tool calls in streamed text."""

    def push(self, text: str) -> tuple[str, tuple[CallDelta, ...]]:
        """More text: content, and calls in it."""
        ...

    def finish(self) -> tuple[str, tuple[CallDelta, ...]]:
        """What was held back."""
        ...


def new_id(prefix: str) -> str:
    """An id that nothing else has."""
    return prefix + secrets.token_hex(12)


class AnswerParser:
    """Reads the text of one handle."""

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        self._reasoning, self._tools = reasoning, tools
        self.reasoned = self.called = False

    def push(self, text: str) -> Parts:
        """More text."""
        if self._reasoning is None and self._tools is None:
            return Parts(content=text)
        thoughts, content = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._made(thoughts, content)

    def finish(self) -> Parts:
        """What was held back until the end."""
        thoughts, content = ("", "") if self._reasoning is None else self._reasoning.finish()
        found = self._made(thoughts, content)
        if self._tools is None:
            return found
        content, calls = self._tools.finish()
        self.called = self.called or bool(calls)
        return Parts(found.reasoning, found.content + content, found.calls + calls)

    def _made(self, thoughts: str, content: str) -> Parts:
        self.reasoned = self.reasoned or bool(thoughts)
        calls: tuple[CallDelta, ...] = ()
        if self._tools is not None and content:
            content, calls = self._tools.push(content)
            self.called = self.called or bool(calls)
        return Parts(thoughts, content, calls)


@dataclass
class Call:
    """A whole tool call."""

    id: str
    name: str
    arguments: str


@dataclass
class Answer:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, parts: Parts) -> None:
        """What came next."""
        self.reasoning += parts.reasoning
        self.content += parts.content
        for call in parts.calls:
            if call.name is not None:
                self.calls.append(Call(call.id or new_id("call_"), call.name, call.arguments))
            else:
                self.calls[call.index].arguments += call.arguments


def answer_of(handle: Handle, parser: AnswerParser) -> Answer:
    """The whole answer of a handle that is finished."""
    made = Answer()
    made.add(parser.push(str(handle.completion or "")))
    made.add(parser.finish())
    return made


def finish_reason(handle: Handle, called: bool = False) -> Literal["stop", "length", "tool_calls"]:
    """OpenAI's word for why a generation ended. A deadline is a limit of its length, too."""
    if handle.finish_reason != "stop":
        return "length"
    return "tool_calls" if called else "stop"


def reasoning_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """How many tokens there are up to the closing tag, or in all if it never came."""
    end, tail = CLOSE.encode(), b""
    for i, token in enumerate(ids):
        tail += tokenizer.bytes_by_token[token]
        if end in tail:
            return i + 1
        tail = tail[-len(end) :]
    return len(ids)


def thinking_tokens(handles: Sequence[Handle], parsers: Sequence[AnswerParser], tokenizer: Tokenizer) -> int:
    """Tokens of thoughts in all finished handles."""
    return sum(
        reasoning_tokens(tokenizer, handle.completion.ids)
        for handle, parser in zip(handles, parsers, strict=True)
        if parser.reasoned and handle.completion is not None
    )
