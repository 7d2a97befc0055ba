"""What is generated, told apart into thoughts, answer and tool calls. The same for whole and for streamed answers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..engine import Handle, Request
from ..text import Tokenizer
from ..text.chat_output import CallDelta, ChatDelta, ChatOutput, ContentDelta, ReasoningDelta


def new_id(prefix: str) -> str:
    """An id that nothing else has."""
    return prefix + secrets.token_hex(12)


class OutputParser:
    """Reads the text of one handle, in deltas or as a whole."""

    def __init__(self, request: Request) -> None:
        form = request.chat
        splits = form is not None and (form.reasoning or form.calls is not None)
        self._parser = form.parser() if form is not None and splits else None
        self.reasoned = self.called = False

    def push(self, text: str) -> Sequence[ChatDelta]:
        """More text: what is certain of it."""
        if self._parser is None:
            return (ContentDelta(text),) if text else ()
        return self._note_kinds(self._parser.push(text))

    def finish(self, handle: Handle) -> Sequence[ChatDelta]:
        """What was held back until the end."""
        return () if self._parser is None else self._note_kinds(self._parser.finish(handle.finish_reason or "error"))

    def _note_kinds(self, parts: Sequence[ChatDelta]) -> Sequence[ChatDelta]:
        for part in parts:
            self.reasoned = self.reasoned or isinstance(part, ReasoningDelta)
            self.called = self.called or isinstance(part, CallDelta)
        return parts


def output_of(handle: Handle, parser: OutputParser) -> ChatOutput:
    """The whole answer of a handle that is finished."""
    answer = ChatOutput()
    answer.add(parser.push(str(handle.completion or "")))
    answer.add(parser.finish(handle))
    return answer


@dataclass(frozen=True)
class Finish:
    """Why a generation ended, in the words of each API."""

    openai: Literal["stop", "length", "tool_calls"]
    anthropic: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    responses: Literal["completed", "incomplete"]
    llama: Literal["none", "eos", "limit", "word"]
    metrics: Literal["stop", "length", "abort", "error"]


_CUT = Finish("length", "max_tokens", "incomplete", "limit", "length")
# By the engine's reason; "stop" is told apart further.
FINISHES = {
    "stop": Finish("stop", "end_turn", "completed", "eos", "stop"),  # the model ended it
    "form": Finish("stop", "end_turn", "completed", "none", "stop"),  # its form was complete
    "word": Finish("stop", "stop_sequence", "completed", "word", "stop"),
    "calls": Finish("tool_calls", "tool_use", "completed", "none", "stop"),
    "length": _CUT,
    "deadline": _CUT,
    "closed": replace(_CUT, metrics="abort"),
    "error": replace(_CUT, metrics="error"),
}


def finish_of(handle: Handle, called: bool = False) -> Finish:
    """Why a handle is finished. `called`: the text has calls of tools."""
    reason = handle.finish_reason or "error"
    if reason != "stop":
        return FINISHES[reason]
    if handle.request.output == "hidden":
        return FINISHES["length"]  # nothing was to be generated
    if called:
        return FINISHES["calls"]
    if isinstance(handle.stop_match, str):
        return FINISHES["word"]
    return FINISHES["form" if handle.stop_match is None else "stop"]


def thinking_tokens(handles: Sequence[Handle], parsers: Sequence[OutputParser], tokenizer: Tokenizer) -> int:
    """Tokens of thoughts in all finished handles."""
    return sum(
        _tokens_to(handle.request.chat.tags[1], tokenizer, handle.completion.ids)
        for handle, parser in zip(handles, parsers, strict=True)
        if parser.reasoned and handle.completion is not None and handle.request.chat is not None
    )


def _tokens_to(tag: str, tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """How many tokens there are up to the closing tag, or in all if it never came."""
    end, tail = tag.encode(), b""
    for i, token in enumerate(ids):
        tail += tokenizer.piece(token)
        if end in tail:
            return i + 1
        tail = tail[-len(end) :]
    return len(ids)
