"""OpenAI's `/v1/responses`: text and function calls, whole or as events. A response can be continued by its id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import msgspec
from msgspec import UNSET

from ..engine import Delta, Handle
from ..text.chat import join_parts
from ..text.chat_output import CallDelta, ChatDelta, ReasoningDelta
from .conversation import Conversation, allowed_tools, check_hosted, content_of, function_tool, named_tool, thinking_of
from .errors import ApiError
from .generation import OPENAI_DEFAULTS, Progress, check_supported, max_tokens, options_of, timings_of, usage_of
from .images import Images
from .logprobs import chat_logprobs
from .output import OutputParser, finish_of, new_id, thinking_tokens
from .response_store import ResponseStore
from .routes import Endpoint, Prepared, Writer, sse
from .served import ServedModel
from .types import responses as types
from .types.anthropic import CountTokensResponse
from .types.openai import ChatLogprob

_LOGPROBS = "message.output_text.logprobs"
_TEXTS = "texts"  # of a message that is put together of several items: joined once, for there may be 100,000


class Responses(Prepared):
    """A response that is asked for, checked and tokenised."""

    route = Endpoint(
        *("/v1/responses", "Answer text or items", types.ResponsesRequest, types.Response),
        events=get_args(types.ResponseEvent),
        api="OpenAI",
        aliases=("/responses",),
    )
    reads_images = True
    body: types.ResponsesRequest

    def __init__(self, served: ServedModel, body: types.ResponsesRequest, images: Images | None = None) -> None:
        super().__init__(served, body, "resp_")
        for name in body.include or ():
            if name not in (_LOGPROBS, "reasoning.encrypted_content"):
                raise ApiError(400, f"include: {name!r} is not supported; there is {_LOGPROBS!r}", param="include")
        self.logprobs = _LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
        options = options_of(body, served, OPENAI_DEFAULTS)
        options["max_tokens"] = max_tokens(served, body.max_output_tokens)
        if self.logprobs:
            options["logprobs"] = body.top_logprobs or 0
        options |= _response_format(body.text)
        self._keep: Callable[[types.Response], None] | None = None
        images = images or Images(served)
        self.requests = [conversation_of(body, images).request(served, options, images)]

    @classmethod
    def recall(cls, body: Any, store: ResponseStore, client: str | None) -> Any:
        """The body with the items of the response that it goes on from."""
        if body.previous_response_id is None:
            return body
        return msgspec.structs.replace(
            body, input=[*store.items(client, body.previous_response_id), *_input_items(body.input)]
        )

    def remember(self, body: Any, store: ResponseStore, client: str | None) -> None:
        """The response is kept once it is whole. `body`: as it came, without the items of others."""
        if body.store is not False:
            items, parent = _input_items(body.input), body.previous_response_id
            self._keep = lambda made: store.add(client, parent, items, made)

    def snapshot(
        self,
        status: Literal["in_progress", "completed", "incomplete", "failed"],
        output: list[types.Item],
        usage: types.ResponsesUsage | None = None,
        error: types.ResponsesError | None = None,
    ) -> types.Response:
        """The response as far as it is."""
        body, sampling = self.body, self.requests[0].sampling
        return types.Response(
            id=self.id,
            created_at=self.created,
            status=status,
            error=error,
            incomplete_details=types.Incomplete("max_output_tokens") if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self.served.name,
            output=output,
            previous_response_id=body.previous_response_id,
            store=self._keep is not None,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning or types.ReasoningOptions(),
            temperature=sampling.temperature,
            text=body.text or types.TextOptions(),
            tool_choice=body.tool_choice or "auto",
            tools=[tool for tool in body.tools or () if tool.type == "function"],
            top_p=sampling.top_p,
            usage=usage,
            user=body.user,
        )

    def whole(self, handle: Handle, output: Output) -> types.Response:
        """The response, after its last item."""
        thinking = thinking_tokens([handle], [output.parser], self.served.model.tokenizer)
        usage = usage_of([handle], reasoning_tokens=thinking)
        input_tokens = usage.prompt_tokens, usage.prompt_tokens_details
        output_tokens = usage.completion_tokens, usage.completion_tokens_details
        counts = types.ResponsesUsage(*input_tokens, *output_tokens, usage.total_tokens)
        made = self.snapshot(finish_of(handle).responses, output.items, counts)
        if self._keep is not None:
            self._keep(made)
        return made

    def response(self, handles: Sequence[Handle]) -> types.Response:
        """The whole response."""
        handle, output = handles[0], Output(handles[0])
        completion = handle.completion
        reported = completion.logprobs if completion is not None else None
        logprobs = chat_logprobs(self.served.model.tokenizer, reported).content if reported else []
        for _ in (*output.add(output.parser.push(str(completion or "")), logprobs), *output.finish()):
            pass  # the events of a stream
        return self.whole(handle, output)

    def writer(self, handles: Sequence[Handle]) -> ResponsesWriter:
        """What writes the events."""
        return ResponsesWriter(self, handles[0])


class Output:
    """The items of a response, as they grow; each change is an event, to be written before the next one is made."""

    def __init__(self, handle: Handle) -> None:
        self.items: list[types.Item] = []
        self.parser = OutputParser(handle.request)
        self._handle = handle
        self._logprobs: list[ChatLogprob] = []  # of tokens whose text comes later, and of thoughts

    def add(self, parts: Sequence[ChatDelta], logprobs: list[ChatLogprob]) -> Iterator[types.ResponseEvent]:
        """What came next."""
        self._logprobs += logprobs
        for part in parts:
            if isinstance(part, CallDelta):
                yield from self._call(part)
            elif isinstance(part, ReasoningDelta):
                yield from self._reasoning(part.text)
            else:
                yield from self._text(part.text)

    def finish(self) -> Iterator[types.ResponseEvent]:
        """What was held back, and the end of the last item."""
        yield from self.add(self.parser.finish(self._handle), [])
        for item in reversed(self.items):  # tokens without text after the last one
            if isinstance(item, types.MessageItem):
                item.content[0].logprobs += self._logprobs
                break
        if not self.items:
            yield from self._text("")
        yield from self._close(finish_of(self._handle).responses)

    @property
    def _last(self) -> types.Item | None:
        return self.items[-1] if self.items and self.items[-1].status == "in_progress" else None

    def _open(self, item: types.Item) -> Iterator[types.ResponseEvent]:
        yield from self._close("completed")
        self.items.append(item)
        yield types.ItemEvent(type="response.output_item.added", output_index=len(self.items) - 1, item=item)
        if not isinstance(item, types.CallItem):
            yield types.PartEvent(type="response.content_part.added", part=item.content[0], **self._place())

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1, "item_id": self.items[-1].id}

    def _text(self, text: str) -> Iterator[types.ResponseEvent]:
        item = self._last
        if not isinstance(item, types.MessageItem):
            item = types.MessageItem(id=new_id("msg_"), status="in_progress", content=[types.OutputText(text="")])
            yield from self._open(item)
        logprobs, self._logprobs = self._logprobs, []
        item.content[0].text += text
        item.content[0].logprobs += logprobs
        yield types.OutputDelta(type="response.output_text.delta", delta=text, logprobs=logprobs, **self._place())

    def _reasoning(self, text: str) -> Iterator[types.ResponseEvent]:
        item = self._last
        if not isinstance(item, types.ReasoningItem):
            item = types.ReasoningItem(id=new_id("rs_"), status="in_progress", content=[types.ReasoningText(text="")])
            yield from self._open(item)
        item.content[0].text += text
        yield types.OutputDelta(type="response.reasoning_text.delta", delta=text, **self._place())

    def _call(self, call: CallDelta) -> Iterator[types.ResponseEvent]:
        if call.name is not None:
            yield from self._open(
                types.CallItem(
                    id=new_id("fc_"),
                    call_id=call.id or new_id("call_"),
                    name=call.name,
                    arguments="",
                    status="in_progress",
                )
            )
        item = self._last
        assert isinstance(item, types.CallItem)
        item.arguments += call.arguments
        if call.arguments:
            yield types.ArgumentsDelta(delta=call.arguments, **self._place())

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[types.ResponseEvent]:
        item = self._last
        if item is None:
            return
        item.status = status
        place = self._place()
        if isinstance(item, types.CallItem):
            yield types.ArgumentsDone(name=item.name, arguments=item.arguments, **place)
        else:
            part = item.content[0]
            if isinstance(part, types.OutputText):
                yield types.TextDone(type="response.output_text.done", text=part.text, logprobs=part.logprobs, **place)
            else:
                yield types.TextDone(type="response.reasoning_text.done", text=part.text, **place)
            yield types.PartEvent(type="response.content_part.done", part=part, **place)
        yield types.ItemEvent(type="response.output_item.done", output_index=len(self.items) - 1, item=item)


class ResponsesWriter(Writer):
    """Writes events with their numbers."""

    def __init__(self, responses: Responses, handle: Handle) -> None:
        self._responses, self._handle = responses, handle
        self._output = Output(handle)
        self._number = 0
        self._tokenizer = responses.served.model.tokenizer
        self._with_timings = bool(responses.body.timings_per_token)

    def _event(self, event: types.ResponseEvent) -> bytes:
        event.sequence_number, self._number = self._number, self._number + 1
        return sse(event, event.type)

    def _begin(self) -> bytes:
        if self._number:
            return b""
        response = self._responses.snapshot("in_progress", [])
        created = self._event(types.StatusEvent(type="response.created", response=response))
        return created + self._event(types.StatusEvent(type="response.in_progress", response=response))

    def delta(self, index: int, delta: Delta) -> bytes:
        """Events for what came."""
        logprobs = chat_logprobs(self._tokenizer, delta.logprobs).content if delta.logprobs else []
        output, events = self._output, self._begin()
        for event in output.add(output.parser.push(delta.text), logprobs):
            if self._with_timings and isinstance(event, types.OutputDelta):
                event.timings = timings_of(self._handle)
            events += self._event(event)
        return events

    def progress(self, index: int, report: Progress) -> bytes:
        """An event that says how much of the prompt is read."""
        event = types.StatusEvent(type="response.in_progress", response=self._responses.snapshot("in_progress", []))
        event.prompt_progress = report.prompt
        event.timings = report.timings if self._with_timings else UNSET
        return self._begin() + self._event(event)

    def finish(self, index: int) -> bytes:
        """The end of the last item and of the response."""
        events = self._begin() + b"".join(map(self._event, self._output.finish()))
        whole = self._responses.whole(self._handle, self._output)
        kind: Any = f"response.{whole.status}"
        timings = timings_of(self._handle)
        return events + self._event(types.StatusEvent(type=kind, response=whole, timings=timings))

    def error(self, problem: ApiError) -> bytes:
        """An error event, and the end of the response."""
        begun = self._begin()
        event = types.ErrorEvent(code=problem.type, message=str(problem), param=problem.param)
        reason = types.ResponsesError(problem.type, str(problem))
        failed = self._responses.snapshot("failed", self._output.items, error=reason)
        return begun + self._event(event) + self._event(types.StatusEvent(type="response.failed", response=failed))


# Requests ------------------------------------------------------------------------------------------------


def _response_format(text: types.TextOptions | None) -> dict[str, Any]:
    """The form of the text as an option of the engine, if it asks for anything."""
    if text is None:
        return {}
    check_supported(text)
    if text.format is None or text.format.type == "text":
        return {}
    if text.format.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    if text.format.schema is None:
        raise ApiError(400, "text.format of the type json_schema must have a schema", param="text.format.schema")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": text.format.schema}}}


def count_tokens(served: ServedModel, body: types.ResponsesRequest) -> CountTokensResponse:
    """Tokens of the prompt that a response would have."""
    served.check_name(body.model)
    if body.previous_response_id is not None:
        message = "tokens are counted of items that are given; send those of the conversation"
        raise ApiError(400, message, param="previous_response_id")
    return CountTokensResponse(len(conversation_of(body, Images(served)).ids(served)))


def conversation_of(body: types.ResponsesRequest, images: Images) -> Conversation:
    """Items as messages for a template."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for i, item in enumerate(body.input):
            _add(messages, f"input[{i}]", item, images)
    for message in messages:
        texts = message.pop(_TEXTS, None)
        if texts is not None:
            message["content"] = "\n".join(texts)
        elif message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # thoughts without an answer
    choice = body.tool_choice
    return Conversation(
        messages,
        tools=_functions(body.tools or ()),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        **thinking_of(body, body.reasoning.effort if body.reasoning is not None else None),
    )


def _input_items(given: str | list[types.InputItem]) -> list[types.InputItem]:
    return [types.InputItem(type="message", role="user", content=given)] if isinstance(given, str) else given


def _functions(tools: Sequence[types.ResponsesTool]) -> list[dict[str, Any]]:
    """Tools that the client runs, without those of OpenAI."""
    functions = []
    for i, tool in enumerate(tools):
        if tool.type != "function":
            continue
        if tool.name is None:
            raise ApiError(400, f"tools[{i}].name is missing: a function has one", param=f"tools[{i}].name")
        functions.append(
            function_tool(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
        )
    check_hosted([(i, tool.type) for i, tool in enumerate(tools) if tool.type != "function"], len(functions))
    return functions


def _tool_choice(choice: types.ResponsesToolChoice | None) -> str | dict[str, Any] | None:
    """As the engine takes it."""
    if isinstance(choice, types.ResponsesNamedTool):
        return named_tool(choice.name)
    if isinstance(choice, types.ResponsesAllowedTools):
        _functions(choice.tools)
        return allowed_tools(choice.mode, [str(tool.name) for tool in choice.tools if tool.type == "function"])
    return choice


def _add(messages: list[dict[str, Any]], where: str, item: types.InputItem, images: Images) -> None:
    """One item. Calls and thoughts belong to the message of the assistant that they come with."""
    kind = item.type or "message"
    if kind == "function_call_output":
        _check(where, kind, {"call_id": item.call_id, "output": item.output})
        output = content_of(item.output or "", f"{where}.output", images)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    elif kind == "function_call":
        _check(where, kind, {"name": item.name, "arguments": item.arguments})
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id or item.id, "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        parts = item.content if isinstance(item.content, list) else []
        thoughts = [*parts, *(item.summary or [])]
        text = join_parts(part.text for part in thoughts if not isinstance(part, types.InputImage))
        if text:
            messages.append({"role": "assistant", "content": None, "reasoning_content": text})
    else:
        _check(where, kind, {"role": item.role, "content": item.content})
        content = content_of(item.content or "", f"{where}.content", images)
        if item.role == "assistant":
            if not isinstance(content, str):
                raise ApiError(400, f"{where}: a message of the assistant has no images", param=f"{where}.content")
            _assistant(messages).setdefault(_TEXTS, []).append(content)
        else:
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": content})


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the assistant that is being put together, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _check(where: str, kind: str, needed: dict[str, Any]) -> None:
    for name, value in needed.items():
        if value is None:
            place = f"{where}.{name}"
            raise ApiError(400, f"{place} is missing: an item of the type {kind} has it", param=place)
