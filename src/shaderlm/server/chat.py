"""`/v1/chat/completions`: from the request to the engine, and from handles to the response or its stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from ..engine import Delta, Handle
from ..text.chat_output import ChatDelta as Part
from ..text.chat_output import ContentDelta, ReasoningDelta
from .conversation import Conversation, allowed_tools, content_of, function_tool, named_tool, thinking_of
from .errors import ApiError
from .generation import openai_options, repeated, timings_of, usage_of
from .images import Images
from .llama_server import completion_of
from .logprobs import chat_logprobs
from .output import OutputParser, finish_of, new_id, output_of, thinking_tokens
from .routes import ChunkWriter, Endpoint, Prepared
from .served import ServedModel
from .types import openai as types
from .types.common import Usage
from .types.llama_server import LlamaCompletion


class Chat(Prepared):
    """A chat completion that is checked and tokenised."""

    route = Endpoint(
        *("/v1/chat/completions", "Answer a conversation", types.ChatRequest, types.ChatResponse, (types.ChatChunk,)),
        api="OpenAI",
        done=True,
        aliases=("/chat/completions",),
    )
    reads_images = True
    body: types.ChatRequest

    def __init__(self, served: ServedModel, body: types.ChatRequest, images: Images | None = None) -> None:
        super().__init__(served, body, "chatcmpl-")
        options = openai_options(served, body, body.max_completion_tokens, body.max_tokens)
        options["logprobs"] = _alternatives(body)
        if self.return_progress and (body.n or 1) > 1:
            raise ApiError(400, "return_progress is for one answer; leave out n", param="return_progress")
        reasoning = None if body.reasoning_format is None else body.reasoning_format != "none"
        images = images or Images(served)
        request = conversation_of(body, images).request(served, options, images, reasoning=reasoning)
        self.requests = repeated(request, body.n or 1)
        self.verbose = served.verbose if body.verbose is None else body.verbose

    def details(self, handle: Handle) -> LlamaCompletion | UnsetType:
        """The same answer as `/completion` gives it, with its prompt and settings, if it is asked for."""
        if not self.verbose:
            return UNSET
        prompt = self.served.model.detokenize(handle.request.prompt_ids)
        return completion_of(self.served, handle, prompt, content=str(handle.completion or ""))

    def response(self, handles: Sequence[Handle]) -> types.ChatResponse:
        """The whole answer."""
        parsers = [OutputParser(handle.request) for handle in handles]
        choices = [self._choice(i, *each) for i, each in enumerate(zip(handles, parsers, strict=True))]
        usage = self.usage(handles, parsers)
        timings, details = timings_of(handles[0]), self.details(handles[0])
        return types.ChatResponse(**self.identity(), choices=choices, usage=usage, timings=timings, verbose=details)

    def usage(self, handles: Sequence[Handle], parsers: Sequence[OutputParser]) -> Usage:
        """Tokens of all choices."""
        return usage_of(handles, len(handles), thinking_tokens(handles, parsers, self.served.model.tokenizer))

    def _choice(self, index: int, handle: Handle, parser: OutputParser) -> types.ChatChoice:
        answer = output_of(handle, parser)
        calls = [
            types.ToolCall(id=call.id or new_id("call_"), function=types.FunctionCall(call.name, call.arguments))
            for call in answer.calls
        ]
        message = types.AssistantMessage(
            content=answer.content if answer.content or not calls else None,
            reasoning_content=answer.reasoning if parser.reasoned else UNSET,
            tool_calls=calls or UNSET,
        )
        reported = handle.completion.logprobs if handle.completion is not None else None
        logprobs = None if reported is None else chat_logprobs(self.served.model.tokenizer, reported)
        return types.ChatChoice(index, message, logprobs, finish_of(handle, parser.called).openai)

    def writer(self, handles: Sequence[Handle]) -> ChatWriter:
        """What writes the stream."""
        return ChatWriter(self, handles)


class ChatWriter(ChunkWriter):
    """Writes chunks."""

    def __init__(self, chat: Chat, handles: Sequence[Handle]) -> None:
        super().__init__(chat, handles, types.ChatChunk)
        self._chat = chat
        self._parsers = [OutputParser(handle.request) for handle in handles]
        self._begun = [False] * len(handles)

    def _begin(self, index: int) -> bytes:
        if self._begun[index]:
            return b""
        self._begun[index] = True
        return self._chunk([types.ChunkChoice(index=index, delta=types.ChatDelta(role="assistant", content=None))])

    def delta(self, index: int, delta: Delta) -> bytes:
        """A chunk with what is new."""
        parts = self._parsers[index].push(delta.text)
        if len(parts) == 1 and type(parts[0]) is ContentDelta and not delta.logprobs and not self._with_timings:
            return self._begin(index) + self._text_chunk(index, parts[0].text)
        return self._begin(index) + self._chunks(index, parts, delta)

    def _encode_text(self, index: int, text: str) -> bytes:
        return self._chunks(index, [ContentDelta(text)])

    def _chunks(self, index: int, parts: Sequence[Part], delta: Delta | None = None) -> bytes:
        logprobs = None
        if delta is not None and delta.logprobs:
            logprobs = chat_logprobs(self._chat.served.model.tokenizer, delta.logprobs)
            parts = parts or [ContentDelta("")]  # tokens whose text is held back
        timings = {"timings": timings_of(self._handles[index])} if self._with_timings else {}
        chunks = b""
        for part in parts:
            choice = types.ChunkChoice(index=index, delta=_chat_delta(part), logprobs=logprobs)
            chunks += self._chunk([choice], **timings)
            logprobs = None  # the first chunk has them
        return chunks

    def finish(self, index: int) -> bytes:
        """The last chunk of a choice."""
        parser, handle = self._parsers[index], self._handles[index]
        rest = self._begin(index) + self._chunks(index, parser.finish(handle))
        reason = finish_of(handle, parser.called).openai
        choice = types.ChunkChoice(index=index, delta=types.ChatDelta(), finish_reason=reason)
        return rest + self._chunk([choice], timings=timings_of(handle), verbose=self._chat.details(handle))

    def usage(self) -> Usage:
        """Tokens of all choices."""
        return self._chat.usage(self._handles, self._parsers)


def _chat_delta(part: Part) -> types.ChatDelta:
    """A part of an answer. The first one of a call has an id, a type and a name; later ones only arguments."""
    if isinstance(part, ContentDelta):
        return types.ChatDelta(content=part.text)
    if isinstance(part, ReasoningDelta):
        return types.ChatDelta(reasoning_content=part.text)
    call = types.ToolCallDelta(index=part.index, function=types.DeltaFunction(part.arguments))
    if part.name is not None:
        call.id, call.type, call.function.name = part.id or new_id("call_"), "function", part.name
    return types.ChatDelta(tool_calls=[call])


def _alternatives(body: types.ChatRequest) -> int | None:
    """How many alternatives are reported for each token; None: no report."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    return body.n_probs or None


def conversation_of(body: types.ChatRequest, images: Images) -> Conversation:
    """The messages, tools and variables for the template."""
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt exclude each other; give one of them",
            param="continue_final_message",
        )
    last = [message.role for message in body.messages[-2:]]
    continues = body.continue_final_message
    if continues is None:  # the client has written the beginning of the answer
        continues = last[-1] == "assistant" and not body.add_generation_prompt and not body.messages[-1].tool_calls
    if continues and last == ["assistant", "assistant"]:
        message = "the last two messages are of the assistant, and one can be continued; put them together"
        raise ApiError(400, message, param="messages")
    choice = body.tool_choice
    if choice not in (None, "none", "auto") and not body.tools:
        raise ApiError(400, "tool_choice needs tools; there are none", param="tool_choice")
    messages = [template_message(i, message, images) for i, message in enumerate(body.messages)]
    parts = body.messages[-1].content
    if continues and isinstance(parts, list) and isinstance(messages[-1]["content"], str):
        # Parts of an answer are paragraphs.
        messages[-1]["content"] = "\n\n".join(part.text for part in parts if not isinstance(part, types.ImagePart))
    return Conversation(
        messages,
        tools=[function_tool(**msgspec.structs.asdict(tool.function)) for tool in body.tools or ()],
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        continue_final_message=continues,
        add_generation_prompt=body.add_generation_prompt is not False,
        **thinking_of(body, body.reasoning_effort),
    )


def _tool_choice(choice: Any) -> str | dict[str, Any] | None:
    """As the engine takes it."""
    if isinstance(choice, types.NamedTool):
        return named_tool(choice.function.name)
    if isinstance(choice, types.AllowedToolChoice):
        return allowed_tools(choice.allowed_tools.mode, [tool.function.name for tool in choice.allowed_tools.tools])
    return cast("str | None", choice)


def template_message(i: int, message: types.Message, images: Images) -> dict[str, Any]:
    """A message as templates read it."""
    role = "system" if message.role == "developer" else message.role
    content = None if message.content is None else content_of(message.content, f"messages[{i}].content", images)
    calls = [msgspec.to_builtins(call) for call in message.tool_calls or ()]
    if content is None and not calls:
        raise ApiError(400, f"messages[{i}].content must be text", param=f"messages[{i}].content")
    names = ("name", "tool_call_id", "reasoning_content")
    fields = {name: getattr(message, name) for name in names if getattr(message, name) is not None}
    return {"role": role, "content": content, **fields, **({"tool_calls": calls} if calls else {})}
