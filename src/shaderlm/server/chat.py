"""`/v1/chat/completions`: from the request to the engine, and from handles to the response or its stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from ..engine import Delta, Handle
from ..text.chat_output import CallDelta, ContentDelta, ReasoningDelta
from .conversation import Conversation, function_tool, join_text, named_tool, template_kwargs
from .errors import ApiError, unsupported
from .generation import openai_options, repeated, timings_of, usage_of
from .logprobs import chat_logprobs
from .output import OutputParser, finish_of, new_id, output_of, thinking_tokens
from .routes import ChunkWriter, Endpoint, Prepared, encode
from .served import ServedModel
from .types.common import Usage
from .types.openai import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatRequest,
    ChatResponse,
    ChunkChoice,
    DeltaFunction,
    FunctionCall,
    Message,
    NamedTool,
    ToolCall,
    ToolCallDelta,
)


class Chat(Prepared):
    """A chat completion that is checked and tokenised."""

    route = Endpoint(
        "/v1/chat/completions",
        "Answer a conversation",
        ChatRequest,
        ChatResponse,
        (ChatChunk,),
        api="OpenAI",
        done=True,
        errors=(404, 429),
    )
    body: ChatRequest

    def __init__(self, served: ServedModel, body: ChatRequest) -> None:
        super().__init__(served, body, "chatcmpl-")
        options = openai_options(served, body, body.max_completion_tokens, body.max_tokens)
        options["logprobs"] = _alternatives(body)
        if self.return_progress and (body.n or 1) > 1:
            raise ApiError(400, "return_progress is for one answer; leave out n", param="return_progress")
        request = conversation_of(body).request(served, options, reasoning=body.reasoning_format != "none")
        self.requests = repeated(request, body.n or 1)

    def response(self, handles: Sequence[Handle]) -> ChatResponse:
        """The whole answer."""
        parsers = [OutputParser(handle.request) for handle in handles]
        choices = [self._choice(i, *each) for i, each in enumerate(zip(handles, parsers, strict=True))]
        usage = self.usage(handles, parsers)
        return ChatResponse(**self.identity(), choices=choices, usage=usage, timings=timings_of(handles[0]))

    def usage(self, handles: Sequence[Handle], parsers: Sequence[OutputParser]) -> Usage:
        """Tokens of all choices."""
        return usage_of(handles, len(handles), thinking_tokens(handles, parsers, self.served.model.tokenizer))

    def _choice(self, index: int, handle: Handle, parser: OutputParser) -> ChatChoice:
        answer = output_of(handle, parser)
        calls = [
            ToolCall(id=new_id("call_"), function=FunctionCall(call.name, call.arguments)) for call in answer.calls
        ]
        message = AssistantMessage(
            content=answer.content if answer.content or not calls else None,
            reasoning_content=answer.reasoning if parser.reasoned else UNSET,
            tool_calls=calls or UNSET,
        )
        reported = handle.completion.logprobs if handle.completion is not None else None
        logprobs = None if reported is None else chat_logprobs(self.served.model.tokenizer, reported)
        return ChatChoice(index, message, logprobs, finish_of(handle, parser.called).openai)

    def writer(self, handles: Sequence[Handle]) -> ChatWriter:
        """What writes the stream."""
        return ChatWriter(self, handles)


class ChatWriter(ChunkWriter):
    """Writes chunks."""

    def __init__(self, chat: Chat, handles: Sequence[Handle]) -> None:
        super().__init__(chat, handles, ChatChunk)
        self._chat = chat
        self._parsers = [OutputParser(handle.request) for handle in handles]
        self._begun = [False] * len(handles)
        self._around = [self._content_chunk(i) for i in range(len(handles))]

    def _begin(self, index: int) -> bytes:
        if self._begun[index]:
            return b""
        self._begun[index] = True
        return self._chunk([ChunkChoice(index=index, delta=ChatDelta(role="assistant", content=None))])

    def delta(self, index: int, delta: Delta) -> bytes:
        """A chunk with what is new."""
        parts = self._parsers[index].push(delta.text)
        if len(parts) == 1 and type(parts[0]) is ContentDelta and not delta.logprobs and not self._with_timings:
            before, after = self._around[index]
            return self._begin(index) + before + encode(parts[0].text) + after
        return self._begin(index) + self._chunks(index, parts, delta)

    def _content_chunk(self, index: int) -> tuple[bytes, bytes]:
        """What is before and after the text in a chunk that has text alone: the same each time."""
        mark = f"{self._chat.id} text"  # is nowhere else
        before, _, after = self._chunks(index, [ContentDelta(mark)]).partition(encode(mark))
        return before, after

    def _chunks(self, index: int, parts: Sequence[Any], delta: Delta | None = None) -> bytes:
        logprobs = None
        if delta is not None and delta.logprobs:
            logprobs = chat_logprobs(self._chat.served.model.tokenizer, delta.logprobs)
        if not parts and logprobs is None:
            return b""
        deltas = [ChatDelta()]
        for part in parts:
            if isinstance(part, ContentDelta):
                deltas[-1].content = (deltas[-1].content or "") + part.text
            elif isinstance(part, ReasoningDelta):
                deltas[-1].reasoning_content = (deltas[-1].reasoning_content or "") + part.text
            else:
                calls = deltas[-1].tool_calls or []
                if any(call.index == part.index for call in calls):  # a chunk has a call once
                    deltas.append(ChatDelta())
                    calls = []
                deltas[-1].tool_calls = [*calls, _call_delta(part)]
        if not parts:
            deltas[0].content = ""  # tokens whose text is held back
        timings = {"timings": timings_of(self._handles[index])} if self._with_timings else {}
        choices = [ChunkChoice(index=index, delta=each) for each in deltas]
        choices[0].logprobs = logprobs
        return b"".join(self._chunk([choice], **timings) for choice in choices)

    def finish(self, index: int) -> bytes:
        """The last chunk of a choice."""
        parser, handle = self._parsers[index], self._handles[index]
        rest = self._begin(index) + self._chunks(index, parser.finish(handle))
        reason = finish_of(handle, parser.called).openai
        choice = ChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason)
        return rest + self._chunk([choice], timings=timings_of(handle))

    def usage(self) -> Usage:
        """Tokens of all choices."""
        return self._chat.usage(self._handles, self._parsers)


def _call_delta(call: CallDelta) -> ToolCallDelta:
    """The first one of a call has an id, a type and a name; later ones only arguments."""
    if call.name is None:
        return ToolCallDelta(index=call.index, function=DeltaFunction(call.arguments))
    function = DeltaFunction(call.arguments, call.name)
    return ToolCallDelta(index=call.index, id=new_id("call_"), type="function", function=function)


def _alternatives(body: ChatRequest) -> int | None:
    """How many alternatives are reported for each token; None: no report."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    return body.n_probs or None


def conversation_of(body: ChatRequest) -> Conversation:
    """The messages, tools and variables for the template."""
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt exclude each other; give one of them",
            param="continue_final_message",
        )
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise unsupported("add_generation_prompt", "leave it out, or give continue_final_message: true")
    choice = body.tool_choice
    if choice not in (None, "none", "auto") and not body.tools:
        raise ApiError(400, "tool_choice needs tools; there are none", param="tool_choice")
    return Conversation(
        [template_message(i, message) for i, message in enumerate(body.messages)],
        tools=[function_tool(**msgspec.structs.asdict(tool.function)) for tool in body.tools or ()],
        tool_choice=named_tool(choice.function.name) if isinstance(choice, NamedTool) else choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_kwargs=template_kwargs(body, body.reasoning_effort),
        continue_final_message=bool(body.continue_final_message),
    )


def template_message(i: int, message: Message) -> dict[str, Any]:
    """A message as templates read it."""
    role = "system" if message.role == "developer" else message.role
    content = None if message.content is None else join_text(message.content)
    calls = [msgspec.to_builtins(call) for call in message.tool_calls or ()]
    if content is None and not calls:
        raise ApiError(400, f"messages[{i}].content must be text", param=f"messages[{i}].content")
    names = ("name", "tool_call_id", "reasoning_content")
    fields = {name: getattr(message, name) for name in names if getattr(message, name) is not None}
    return {"role": role, "content": content, **fields, **({"tool_calls": calls} if calls else {})}
