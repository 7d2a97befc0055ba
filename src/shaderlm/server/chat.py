"""`/v1/chat/completions`: from the request to the engine, and from handles to the response or its stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from ..engine import Delta, Handle
from ..text.chat_output import CallDelta, ChatOutput, ContentDelta, ReasoningDelta
from .conversation import Conversation
from .errors import ApiError, unsupported
from .generation import OPENAI_DEFAULTS, max_tokens, options_of, repeated, response_format_option, timings_of, usage_of
from .logprobs import chat_logprobs
from .output import OutputParser, finish_of, new_id, output_of, thinking_tokens
from .served import FINGERPRINT, ServedModel
from .types.common import PromptProgress
from .types.openai import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatRequest,
    ChatResponse,
    ChunkChoice,
    DeltaFunction,
    Function,
    FunctionCall,
    Message,
    NamedTool,
    ResponseToolCall,
    TextPart,
    ToolCallDelta,
)

_encode = msgspec.json.Encoder().encode


class Chat:
    """A chat completion that is checked and tokenised."""

    def __init__(self, served: ServedModel, body: ChatRequest) -> None:
        served.check_name(body.model)
        self.served, self.body = served, body
        self.stream, self.return_progress = bool(body.stream), bool(body.return_progress)
        options = options_of(body, served, OPENAI_DEFAULTS)
        options["max_tokens"] = max_tokens(served, body.max_completion_tokens, body.max_tokens, body.n_predict)
        options["logprobs"] = _alternatives(body)
        if options["max_tokens"] == 0:
            raise ApiError(400, "n_predict must be −1 or at least 1 in a chat, got 0", param="n_predict")
        if body.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for streams; give stream: true, too", param="stream_options")
        if self.return_progress and (body.n or 1) > 1:
            raise ApiError(400, "return_progress is for one answer; leave out n", param="return_progress")
        options |= response_format_option(body.response_format)
        request = conversation_of(body).request(served, options, reasoning=body.reasoning_format != "none")
        self.requests = repeated(request, body.n or 1)
        self.id, self.created = new_id("chatcmpl-"), int(time.time())

    def response(self, handles: Sequence[Handle]) -> ChatResponse:
        """The whole answer."""
        parsers = [OutputParser(handle.request) for handle in handles]
        answers = [output_of(handle, parser) for handle, parser in zip(handles, parsers, strict=True)]
        choices = [self._choice(i, *each) for i, each in enumerate(zip(handles, answers, parsers, strict=True))]
        thinking = thinking_tokens(handles, parsers, self.served.model.tokenizer)
        usage = usage_of(handles, len(handles), thinking)
        return ChatResponse(
            self.id,
            "chat.completion",
            self.created,
            self.served.name,
            FINGERPRINT,
            choices,
            usage,
            timings_of(handles[0]),
        )

    def _choice(self, index: int, handle: Handle, answer: ChatOutput, parser: OutputParser) -> ChatChoice:
        calls = [
            ResponseToolCall(new_id("call_"), "function", FunctionCall(call.name, call.arguments))
            for call in answer.calls
        ]
        message = AssistantMessage(
            content=answer.content if answer.content or not calls else None,
            reasoning_content=answer.reasoning if parser.reasoned else UNSET,
            tool_calls=calls or UNSET,
        )
        found = handle.completion.logprobs if handle.completion is not None else None
        logprobs = None if found is None else chat_logprobs(self.served.model.tokenizer, found)
        return ChatChoice(index, message, logprobs, finish_of(handle, parser.called).openai)

    def writer(self, handles: Sequence[Handle]) -> ChatWriter:
        """What writes the stream."""
        return ChatWriter(self, handles)


class ChatWriter:
    """Writes chunks."""

    def __init__(self, chat: Chat, handles: Sequence[Handle]) -> None:
        self._chat, self._handles = chat, handles
        self._parsers = [OutputParser(handle.request) for handle in handles]
        self._begun = [False] * len(handles)
        options = chat.body.stream_options
        self._usage = options is not None and bool(options.include_usage)
        self._timings = bool(chat.body.timings_per_token)
        self._tokenizer = chat.served.model.tokenizer
        self._around = [self._content_chunk(i) for i in range(len(handles))]

    def _chunk(self, choices: list[ChunkChoice], **more: Any) -> bytes:
        chat = self._chat
        more.setdefault("usage", None if self._usage else UNSET)
        chunk = ChatChunk(
            id=chat.id,
            created=chat.created,
            model=chat.served.name,
            system_fingerprint=FINGERPRINT,
            choices=choices,
            **more,
        )
        return b"data: %b\n\n" % _encode(chunk)

    def _begin(self, index: int) -> bytes:
        if self._begun[index]:
            return b""
        self._begun[index] = True
        return self._chunk([ChunkChoice(index=index, delta=ChatDelta(role="assistant", content=None))])

    def delta(self, index: int, delta: Delta) -> bytes:
        """A chunk with what is new."""
        found = self._parsers[index].push(delta.text)
        if len(found) == 1 and type(found[0]) is ContentDelta and not delta.logprobs and not self._timings:
            before, after = self._around[index]
            return self._begin(index) + before + _encode(found[0].text) + after
        return self._begin(index) + self._written(index, found, delta)

    def _content_chunk(self, index: int) -> tuple[bytes, bytes]:
        """What is before and after the text in a chunk that has text alone: the same each time."""
        mark = f"{self._chat.id} text"  # is nowhere else
        before, _, after = self._written(index, [ContentDelta(mark)]).partition(_encode(mark))
        return before, after

    def _written(self, index: int, found: Sequence[Any], delta: Delta | None = None) -> bytes:
        logprobs = None
        if delta is not None and delta.logprobs:
            logprobs = chat_logprobs(self._tokenizer, delta.logprobs)
        if not found and logprobs is None:
            return b""
        made = [ChatDelta()]
        for each in found:
            if isinstance(each, ContentDelta):
                made[-1].content = (made[-1].content or "") + each.text
            elif isinstance(each, ReasoningDelta):
                made[-1].reasoning_content = (made[-1].reasoning_content or "") + each.text
            else:
                calls = made[-1].tool_calls or []
                if any(call.index == each.index for call in calls):  # a chunk has a call once
                    made.append(ChatDelta())
                    calls = []
                made[-1].tool_calls = [*calls, _call_delta(each)]
        if not found:
            made[0].content = ""  # tokens whose text is held back
        more = {"timings": timings_of(self._handles[index])} if self._timings else {}
        choices = [ChunkChoice(index=index, delta=delta) for delta in made]
        choices[0].logprobs = logprobs
        return b"".join(self._chunk([choice], **more) for choice in choices)

    def progress(self, index: int) -> bytes:
        """A chunk that says how much of the prompt is read."""
        return self._chunk([], prompt_progress=progress_of(self._handles[index]))

    def finish(self, index: int) -> bytes:
        """The last chunk of a choice."""
        parser, handle = self._parsers[index], self._handles[index]
        rest = self._begin(index) + self._written(index, parser.finish(handle))
        reason = finish_of(handle, parser.called).openai
        choice = ChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason)
        return rest + self._chunk([choice], timings=timings_of(handle))

    def end(self) -> bytes:
        """Usage, if it is wanted, and the end."""
        done = b"data: [DONE]\n\n"
        if not self._usage:
            return done
        thinking = thinking_tokens(self._handles, self._parsers, self._tokenizer)
        return self._chunk([], usage=usage_of(self._handles, len(self._handles), thinking)) + done

    def error(self, problem: ApiError) -> bytes:
        """An error event."""
        return error_event(problem)


def _call_delta(call: CallDelta) -> ToolCallDelta:
    """The first one of a call has an id, a type and a name; later ones only arguments."""
    if call.name is None:
        return ToolCallDelta(index=call.index, function=DeltaFunction(call.arguments))
    function = DeltaFunction(call.arguments, call.name)
    return ToolCallDelta(index=call.index, id=new_id("call_"), type="function", function=function)


def error_event(problem: ApiError) -> bytes:
    """An error within a stream of OpenAI's or llama-server's routes."""
    return b"event: error\ndata: %b\n\n" % _encode(problem.body())


def progress_of(handle: Handle) -> PromptProgress:
    """How much of a prompt is read."""
    done, total = handle.prompt_progress
    cached = handle.usage.cached_tokens
    return PromptProgress(total, cached, done, int(handle.timing.prompt_seconds * 1e3))


def _alternatives(body: ChatRequest) -> int | None:
    """How many alternatives are reported for each token; None: no report."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    return body.n_probs or None


def conversation_of(body: ChatRequest) -> Conversation:
    """The messages, tools and variables for the template."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt exclude each other; give one of them",
            param="continue_final_message",
        )
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise unsupported("add_generation_prompt", "leave it out, or give continue_final_message: true")
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise ApiError(400, "tool_choice needs tools; there are none", param="tool_choice")
    choice = body.tool_choice
    return Conversation(
        [template_message(i, message) for i, message in enumerate(body.messages)],
        tools=[template_tool(tool.function) for tool in body.tools] if body.tools else None,
        tool_choice=msgspec.to_builtins(choice) if isinstance(choice, NamedTool) else choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_kwargs=kwargs,
        continue_final_message=bool(body.continue_final_message),
    )


def template_tool(function: Function) -> dict[str, Any]:
    """A tool as templates read it."""
    found = msgspec.to_builtins(function)
    return {"type": "function", "function": {key: value for key, value in found.items() if value is not None}}


def template_message(i: int, message: Message) -> dict[str, Any]:
    """A message as templates read it."""
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        content = join_text(content)
    calls = [msgspec.to_builtins(call) for call in message.tool_calls or ()]
    if content is None and not calls:
        raise ApiError(400, f"messages[{i}].content must be text", param=f"messages[{i}].content")
    made: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            made[name] = getattr(message, name)
    return {**made, "tool_calls": calls} if calls else made


def join_text(parts: Sequence[TextPart]) -> str:
    """The text of a content that comes in parts."""
    return "\n".join(part.text for part in parts)
