"""Anthropic's `/v1/messages`: from its blocks to a conversation, and from handles to its message or events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..engine import Delta, Handle
from ..text.chat_output import CallDelta, ChatDelta, ContentDelta, ReasoningDelta
from .conversation import Conversation, check_hosted, content_of, function_tool, joined, named_tool
from .errors import ApiError
from .generation import OPENAI_DEFAULTS, options_of
from .images import Images
from .output import OutputParser, finish_of, new_id, output_of
from .routes import Endpoint, Prepared, Writer, sse
from .served import ServedModel
from .types import anthropic as types

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # Anthropic's words → OpenAI's


class Messages(Prepared):
    """A message that is asked for, checked and tokenised."""

    route = Endpoint(
        *("/v1/messages", "Answer a conversation", types.MessagesRequest, types.MessageResponse, (types.Event,)),
        api="Anthropic",
    )
    reads_images = True
    body: types.MessagesRequest

    def __init__(self, served: ServedModel, body: types.MessagesRequest, images: Images | None = None) -> None:
        super().__init__(served, body, "msg_")
        options = options_of(body, served, OPENAI_DEFAULTS)
        options["max_tokens"] = body.max_tokens
        if body.stop_sequences:
            options["stop"] = body.stop_sequences
        if body.output_config is not None and body.output_config.format is not None:
            options["response_format"] = {"type": "json_schema", "schema": body.output_config.format.schema}
        images = images or Images(served)
        self.requests = [conversation_of(body, images).request(served, options, images)]

    def message(
        self, handle: Handle, content: list[types.ResponseBlock], called: bool | None = None
    ) -> types.MessageResponse:
        """The message with this content. `called` is None before its end."""
        reason, sequence = (None, None) if called is None else stop_of(handle, called)
        return types.MessageResponse(
            id=self.id,
            model=self.served.name,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage_of(handle),
        )

    def response(self, handles: Sequence[Handle]) -> types.MessageResponse:
        """The whole message."""
        handle = handles[0]
        parser = OutputParser(handle.request)
        answer = output_of(handle, parser)
        content: list[types.ResponseBlock] = []
        if answer.reasoning:
            content.append(types.ThinkingBlock(answer.reasoning, ""))
        if answer.content or not answer.calls:
            content.append(types.TextBlock(answer.content))
        content += [
            types.ToolUseBlock(call.id or new_id("toolu_"), call.name, _object(call.arguments)) for call in answer.calls
        ]
        return self.message(handle, content, parser.called)

    def writer(self, handles: Sequence[Handle]) -> MessagesWriter:
        """What writes the events."""
        return MessagesWriter(self, handles[0])


class MessagesWriter(Writer):
    """Writes events: a block begins where the kind of what is generated changes."""

    def __init__(self, messages: Messages, handle: Handle) -> None:
        self._messages, self._handle = messages, handle
        self._parser = OutputParser(handle.request)
        self._begun = False
        self._index, self._kind = -1, ""  # of the block that is open

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return _event(types.MessageStart(self._messages.message(self._handle, [])))

    def delta(self, index: int, delta: Delta) -> bytes:
        """Events for what came."""
        return self._begin() + b"".join(map(_event, self._events(self._parser.push(delta.text))))

    def _events(self, parts: Sequence[ChatDelta]) -> Iterator[types.Event]:
        for part in parts:
            if isinstance(part, ContentDelta):
                yield from self._open("text", types.TextBlock(""))
                yield types.BlockDelta(self._index, types.TextDelta(part.text))
            elif isinstance(part, ReasoningDelta):
                yield from self._open("thinking", types.ThinkingBlock("", ""))
                yield types.BlockDelta(self._index, types.ThinkingDelta(part.text))
            else:
                yield from self._call(part)

    def _call(self, call: CallDelta) -> Iterator[types.Event]:
        if call.name is not None:
            yield from self._open(f"call {call.index}", types.ToolUseBlock(call.id or new_id("toolu_"), call.name, {}))
        if call.arguments:
            yield types.BlockDelta(self._index, types.InputJsonDelta(call.arguments))

    def _open(self, kind: str, block: types.ResponseBlock) -> Iterator[types.Event]:
        """Begin a block, unless it is there already; the one before it ends."""
        if kind == self._kind:
            return
        yield from self._close()
        self._index, self._kind = self._index + 1, kind
        yield types.BlockStart(self._index, block)

    def _close(self) -> Iterator[types.Event]:
        if self._kind == "thinking":
            yield types.BlockDelta(self._index, types.SignatureDelta(""))
        if self._kind:
            yield types.BlockStop(self._index)
        self._kind = ""

    def finish(self, index: int) -> bytes:
        """The end of the last block and of the message."""
        events = [*self._events(self._parser.finish(self._handle))]
        if self._index < 0:
            events += self._open("text", types.TextBlock(""))  # nothing came: the text is empty
        events += self._close()
        reason, sequence = stop_of(self._handle, self._parser.called)
        events += [types.MessageDelta(types.MessageEnd(reason, sequence), usage_of(self._handle)), types.MessageStop()]
        return self._begin() + b"".join(map(_event, events))

    def error(self, problem: ApiError) -> bytes:
        """An error event."""
        return sse(problem.anthropic_body(), "error")


def _event(event: types.Event) -> bytes:
    return sse(event, str(type(event).__struct_config__.tag))


def stop_of(handle: Handle, called: bool) -> tuple[types.StopReason, str | None]:
    """Why a message ended, and the stop sequence that ended it."""
    reason = finish_of(handle, called).anthropic
    return reason, str(handle.stop_match) if reason == "stop_sequence" else None


def usage_of(handle: Handle) -> types.AnthropicUsage:
    """Tokens. Those that were in the cache are counted apart."""
    usage = handle.usage
    return types.AnthropicUsage(usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens, usage.cached_tokens)


def _object(arguments: str) -> dict[str, Any]:
    """Arguments as an object. Where an answer was cut they may be a part of one: then there are none."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# Requests ------------------------------------------------------------------------------------------------


def count_tokens(served: ServedModel, body: types.CountTokensRequest) -> types.CountTokensResponse:
    """Tokens of the prompt that a message would have."""
    served.check_name(body.model)
    return types.CountTokensResponse(len(conversation_of(body, Images(served)).ids(served)))


def conversation_of(body: types.CountTokensRequest, images: Images) -> Conversation:
    """Blocks as messages for a template. A last message of the assistant is continued."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": content_of(body.system, "system", images)})
    for i, message in enumerate(body.messages):
        messages += _messages(i, message, images)
    kwargs = dict(body.chat_template_kwargs or {})
    thinking = body.thinking
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs["reasoning_effort"] = body.output_config.effort
    choice = body.tool_choice
    return Conversation(
        _with_thoughts_of(body, messages),
        tools=_functions(body.tools or ()),
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        thinking=None if thinking is None else thinking.type != "disabled",
        thinking_budget=None if thinking is None else thinking.budget_tokens,
        template_kwargs=kwargs,
        continue_final_message=body.messages[-1].role == "assistant",
    )


def _functions(tools: Sequence[types.AnthropicTool]) -> list[dict[str, Any]]:
    """Tools that the client runs, without those of Anthropic."""
    hosted = [(i, tool.type) for i, tool in enumerate(tools) if tool.type not in (None, "custom")]
    functions = []
    for i, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            continue
        if tool.input_schema is None:
            place = f"tools[{i}].input_schema"
            raise ApiError(400, f"{place} is missing: give the JSON schema of what {tool.name} takes", param=place)
        functions.append(
            function_tool(
                name=tool.name, parameters=tool.input_schema, description=tool.description, strict=tool.strict
            )
        )
    check_hosted([(i, str(kind)) for i, kind in hosted], len(functions))
    return functions


def _with_thoughts_of(body: types.CountTokensRequest, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with thoughts of as many of the last turns as `context_management` keeps."""
    edits = (body.context_management.edits or []) if body.context_management is not None else []
    kept = [edit.keep.value for edit in edits if isinstance(edit.keep, types.ThinkingTurns)]
    if not kept:
        return messages
    places = [i for i, message in enumerate(messages) if "reasoning_content" in message]
    dropped = set(places[: max(0, len(places) - min(kept))])
    return [
        {key: value for key, value in message.items() if i not in dropped or key != "reasoning_content"}
        for i, message in enumerate(messages)
    ]


def _messages(i: int, message: types.AnthropicMessage, images: Images) -> list[dict[str, Any]]:
    """One message of blocks as one or several: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    parts, thoughts = list[str | dict[str, Any]](), list[str]()
    calls, results = list[dict[str, Any]](), list[dict[str, Any]]()
    for j, block in enumerate(message.content):
        where = f"messages[{i}].content[{j}]"
        if isinstance(block, types.TextBlock):
            parts.append(block.text)
        elif isinstance(block, types.ImageBlock) and message.role == "user":
            parts.append(images.part(where, block.url))
        elif isinstance(block, types.ToolResultBlock) and message.role == "user":
            content = content_of(block.content or "", f"{where}.content", images)
            if block.is_error:  # templates have no field for it
                is_text = isinstance(content, str)
                content = f"Error: {content}" if is_text else [{"type": "text", "text": "Error:"}, *content]
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif isinstance(block, types.ToolUseBlock) and message.role == "assistant":
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, types.ThinkingBlock) and message.role == "assistant":
            thoughts.append(block.thinking)
        elif isinstance(block, types.RedactedThinkingBlock) and message.role == "assistant":
            continue
        else:
            kind = type(block).__struct_config__.tag
            where = f"messages[{i}].content"
            raise ApiError(400, f"{where}: a message of the {message.role} has no {kind} block", param=where)
    if results and not parts:
        return results
    rest: dict[str, Any] = {"role": message.role, "content": joined(parts) if parts or not calls else None}
    if thoughts:
        rest["reasoning_content"] = "\n".join(thoughts)
    if calls:
        rest["tool_calls"] = calls
    return [*results, rest]


def _tool_choice(choice: types.AnthropicToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if not choice.name:
        raise ApiError(400, "tool_choice of the type tool must have a name", param="tool_choice.name")
    return named_tool(choice.name)
