"""Ollama's `/api/chat`, `/api/generate` and its embeddings: from the request to the engine, and back to JSON lines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from ..engine import Delta, Handle, Request, TokenLogprob
from ..errors import InputError
from ..text import ChatTemplate
from ..text.chat_output import Call, CallDelta, ChatDelta, ChatOutput, ContentDelta, ReasoningDelta, thinking_tags
from .conversation import Conversation, function_tool, joined
from .durations import seconds_of
from .errors import ApiError, undecodable, unsupported
from .generation import check_supported, max_tokens, options_of
from .images import Images, is_address
from .infill import infill_ids
from .limits import check_limits
from .logprobs import chat_logprobs
from .output import OutputParser, finish_of, new_id, output_of
from .routes import Endpoint, Prepared, Writer, encode
from .served import ServedModel
from .types import ollama as types
from .types.common import SamplingFields
from .types.llama_server import InfillRequest

LINES = "application/x-ndjson"
OLLAMA_DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
# Options that have the same names everywhere.
_SHARED = tuple(name for name in types.OllamaOptions.__struct_fields__ if name in SamplingFields.__struct_fields__)
_BORDER = 64  # tokens before the place where a text is cut that may be others in the whole text
Calls = Sequence[types.OllamaAnswerCall]


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def plain_name(served: ServedModel, name: str) -> str:
    """Without the tag that stands for none, which Ollama's clients may add."""
    return name if served.knows(name) else name.removesuffix(":latest")


def check_model(served: ServedModel, name: str | None) -> None:
    """May this model answer a request for this one?"""
    served.check_name(None if name is None else plain_name(served, name))


class _Answer(Prepared):
    """What chat and generate have in common."""

    reads_images = True
    body: types.OllamaFields

    def __init__(self, served: ServedModel, body: types.OllamaFields, images: Images | None = None) -> None:
        check_model(served, body.model)
        check_supported(body)
        self.served, self.body, self.started = served, body, time.perf_counter()
        self.stream, self.return_progress = body.stream is not False, False
        self.requests: Sequence[Request] = []
        seconds_of(body.keep_alive)  # what is no time is an error
        if self.asks_for_nothing(body):
            self.stream = False
            return
        try:
            request = self._request(_options(served, body), images or Images(served))
        except InputError as problem:
            if isinstance(body.format, dict) and str(problem).startswith("json_schema"):
                raise ApiError(400, str(problem).replace("json_schema", "format", 1), param="format") from None
            raise
        nothing = body.options is not None and body.options.num_predict == 0  # the prompt is read, and that is all
        self.requests = [replace(request, output="hidden") if nothing else request]

    @classmethod
    def asks_for_nothing(cls, body: Any) -> bool:
        """Is it there to load the model, or to unload it?"""
        raise NotImplementedError

    @classmethod
    def unloads(cls, body: Any) -> bool:
        """Does it ask for nothing, and to keep the model for no time?"""
        return cls.asks_for_nothing(body) and seconds_of(body.keep_alive) == 0

    @classmethod
    def unloaded(cls, name: str) -> types.OllamaResponse:
        """What a request that closes a model is told."""
        return cls.empty(name, done=True, done_reason="unload")

    @classmethod
    def empty(cls, name: str, **fields: Any) -> types.OllamaResponse:
        """An answer without text."""
        raise NotImplementedError

    def _request(self, options: dict[str, Any], images: Images) -> Request:
        raise NotImplementedError

    def line(self, content: str = "", thinking: str = "", calls: Calls = (), **fields: Any) -> types.OllamaResponse:
        """A whole answer, or a line of a stream with what is new of it."""
        raise NotImplementedError

    def response(self, handles: Sequence[Handle]) -> types.OllamaResponse:
        """The whole answer."""
        if not handles:
            return self.line(done=True, done_reason="load")
        handle = handles[0]
        answer = output_of(handle, OutputParser(handle.request))
        logprobs = handle.completion.logprobs if handle.completion is not None else None
        fields = {**self.numbers(handle), "logprobs": self.logprobs(logprobs)}
        return self.line(answer.content, answer.reasoning, answer_calls(answer.calls), **fields)

    def logprobs(self, logprobs: Iterable[TokenLogprob] | None) -> Any:
        """Those of tokens, if they are asked for."""
        return chat_logprobs(self.served.model.tokenizer, logprobs).content if logprobs else UNSET

    def numbers(self, handle: Handle) -> dict[str, Any]:
        """What an answer says at its end."""
        usage, timing = handle.usage, handle.timing
        return {
            "done": True,
            "done_reason": "length" if finish_of(handle).openai == "length" else "stop",
            "total_duration": _nanoseconds(time.perf_counter() - self.started),
            "load_duration": 0,  # the model is loaded before a request is read
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(timing.prompt_seconds),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(timing.decode_seconds),
        }

    def writer(self, handles: Sequence[Handle]) -> LineWriter:
        """What writes the stream."""
        return LineWriter(self, handles[0])


class Chat(_Answer):
    """An answer to a conversation that is asked for, checked and tokenised."""

    route = Endpoint(
        *("/api/chat", "Answer a conversation", types.OllamaChatRequest, types.OllamaChatResponse),
        events=(types.OllamaChatResponse,),
        api="Ollama",
    )
    body: types.OllamaChatRequest

    @classmethod
    def asks_for_nothing(cls, body: types.OllamaChatRequest) -> bool:
        """Are there no messages?"""
        return not body.messages

    @classmethod
    def empty(cls, name: str, **fields: Any) -> types.OllamaChatResponse:
        """An empty message."""
        message = types.OllamaAnswerMessage(content="")
        return types.OllamaChatResponse(model=name, created_at=now(), message=message, **fields)

    def _request(self, options: dict[str, Any], images: Images) -> Request:
        body, messages = self.body, self.body.messages or []
        last = messages[-1]
        conversation = Conversation(
            [_message(i, message, images) for i, message in enumerate(messages)],
            tools=[function_tool(**msgspec.structs.asdict(tool.function)) for tool in body.tools or ()],
            **_thinking(self.served, body.think),
            continue_final_message=last.role.lower() == "assistant" and not last.tool_calls,
        )
        return conversation.request(self.served, options, images)

    def line(self, content: str = "", thinking: str = "", calls: Calls = (), **fields: Any) -> types.OllamaResponse:
        """A message, or what is new of it."""
        tool_calls = list(calls) or UNSET
        message = types.OllamaAnswerMessage(content=content, thinking=thinking or UNSET, tool_calls=tool_calls)
        fields.setdefault("done", False)
        return types.OllamaChatResponse(model=self.served.name, created_at=now(), message=message, **fields)


class Generate(_Answer):
    """An answer to a prompt, or a text that goes on, checked and tokenised."""

    route = Endpoint(
        *("/api/generate", "Answer a prompt, or continue a text", types.OllamaGenerateRequest),
        *(types.OllamaGenerateResponse, (types.OllamaGenerateResponse,)),
        api="Ollama",
        errors=(501,),
    )
    body: types.OllamaGenerateRequest

    @classmethod
    def asks_for_nothing(cls, body: types.OllamaGenerateRequest) -> bool:
        """Is there no prompt?"""
        return not body.prompt

    @classmethod
    def empty(cls, name: str, **fields: Any) -> types.OllamaGenerateResponse:
        """An empty text."""
        return types.OllamaGenerateResponse(model=name, created_at=now(), response="", **fields)

    def _request(self, options: dict[str, Any], images: Images) -> Request:
        body, model, before = self.body, self.served.model, self.body.context or []
        content = _content(body.prompt or "", body.images, "images", images)
        if body.images:
            for name in ("suffix", "raw", "context"):
                if getattr(body, name):
                    message = f"{name} is not for a prompt with images; leave it out, or use /api/chat"
                    raise ApiError(400, message, param=name)
            if not model.has_chat_template:
                raise ApiError(400, "images are for a chat template, and this model has none", param="images")
        if body.suffix:
            return self._infill(body.prompt or "", body.suffix, options)
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if body.system:
            messages.insert(0, {"role": "system", "content": body.system})
        if model.has_chat_template and not body.raw:
            conversation = Conversation(messages, **_thinking(self.served, body.think))
            request = conversation.request(self.served, options, images)
            ids = request.prompt_ids
        else:  # a base model continues the prompt, as with `raw`
            if body.raw and before:
                raise ApiError(400, "context is for prompts that are not raw; leave out one of them", param="context")
            if body.system:
                why = "raw is true" if body.raw else "this model has no chat template"
                raise ApiError(400, f"system is for a chat template, and {why}; leave it out", param="system")
            if body.think:
                raise ApiError(400, "think is for a chat template, which is not used; leave it out", param="think")
            request = model.request(body.prompt or "", **options)
            ids = model.tokenize(body.prompt or "", add_special=False) if before else request.prompt_ids
        if not before:
            return request
        return replace(request, prompt_ids=model.request([*before, *ids], max_tokens=1).prompt_ids)

    def _infill(self, prefix: str, suffix: str, options: dict[str, Any]) -> Request:
        """What belongs between prompt and suffix, where the model has tokens for it."""
        for name in ("system", "context", "raw", "think"):
            if getattr(self.body, name):
                raise ApiError(400, f"{name} is not for a prompt with a suffix; leave out one of them", param=name)
        gap = InfillRequest(input_prefix=prefix, input_suffix=suffix)
        return self.served.model.request(infill_ids(self.served, gap), **options)

    def line(self, content: str = "", thinking: str = "", calls: Calls = (), **fields: Any) -> types.OllamaResponse:
        """A text, or what is new of it."""
        fields.setdefault("done", False)
        return types.OllamaGenerateResponse(
            model=self.served.name, created_at=now(), response=content, thinking=thinking or UNSET, **fields
        )

    def numbers(self, handle: Handle) -> dict[str, Any]:
        """With the tokens that the next request may go on from."""
        if self.body.raw or self.body.suffix or self.body.images:
            return super().numbers(handle)
        generated = handle.completion.ids if handle.completion is not None else []
        end = [handle.stop_match] if isinstance(handle.stop_match, int) else []  # the turn is over
        return {**super().numbers(handle), "context": [*handle.request.prompt_ids, *generated, *end]}


class LineWriter(Writer):
    """Writes a line of JSON for what is new. A call of a tool is written when it is whole."""

    media_type = LINES

    def __init__(self, answer: _Answer, handle: Handle) -> None:
        self._answer, self._handle = answer, handle
        self._parser = OutputParser(handle.request)
        self._calls, self._written_calls = ChatOutput(), 0

    def delta(self, index: int, delta: Delta) -> bytes:
        """Lines with what came."""
        return self._lines(self._parser.push(delta.text), self._answer.logprobs(delta.logprobs))

    def _lines(self, parts: Sequence[ChatDelta], logprobs: Any = UNSET) -> bytes:
        lines = list[types.OllamaResponse]()
        for part in parts:
            is_call = isinstance(part, CallDelta)
            if is_call:
                self._calls.add([part])
            lines += self._whole_calls(but=1 if is_call else 0)
            if isinstance(part, ContentDelta):
                lines.append(self._answer.line(part.text))
            elif isinstance(part, ReasoningDelta):
                lines.append(self._answer.line(thinking=part.text))
        if logprobs is not UNSET:
            lines = lines or [self._answer.line()]  # tokens whose text is held back
            lines[0].logprobs = logprobs
        return b"".join(map(_line, lines))

    def _whole_calls(self, but: int = 0) -> list[types.OllamaResponse]:
        """Calls that nothing is added to any more: all, or all but the last."""
        calls, first = self._calls.calls, self._written_calls
        self._written_calls = max(first, len(calls) - but)
        made = answer_calls(calls[first : self._written_calls], first)
        return [self._answer.line(calls=[call]) for call in made]

    def finish(self, index: int) -> bytes:
        """What was held back, and the last line."""
        rest = self._lines(self._parser.finish(self._handle))
        calls = b"".join(map(_line, self._whole_calls()))
        return rest + calls + _line(self._answer.line(**self._answer.numbers(self._handle)))

    def keep_alive(self) -> bytes:
        """Lines have no comments: one with no text."""
        return _line(self._answer.line())

    def error(self, problem: ApiError) -> bytes:
        """The stream ends with an error."""
        return _line(problem.ollama_body())


def _line(body: Any) -> bytes:
    return encode(body) + b"\n"


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def answer_calls(calls: Iterable[Call], first: int = 0) -> list[types.OllamaAnswerCall]:
    """Calls of an answer. One that was cut has no whole arguments, and is left out."""
    made = []
    for index, call in enumerate(calls, first):
        if _is_object(call.arguments):
            function = types.OllamaCall(index=index, name=call.name, arguments=msgspec.Raw(call.arguments.encode()))
            made.append(types.OllamaAnswerCall(id=new_id("call_"), function=function))
    return made


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False


# Requests ------------------------------------------------------------------------------------------------


def _options(served: ServedModel, body: types.OllamaFields) -> dict[str, Any]:
    """Options of `LanguageModel.request`."""
    given = body.options or types.OllamaOptions()
    check_supported(given)
    _check_context(served, given)
    if given.repeat_last_n not in (None, -1, 0) and _has_penalties(given):
        raise unsupported("repeat_last_n", "penalties count the whole context; leave it out, or give -1 or 0")
    values = {name: getattr(given, name) for name in _SHARED if getattr(given, name) is not None}
    if values.get("seed") == -1:
        del values["seed"]
    if given.repeat_last_n == 0:
        values |= {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    try:
        fields = msgspec.convert(values, SamplingFields)
    except msgspec.ValidationError as problem:
        raise undecodable(problem) from None
    check_limits(fields, served.limits)
    options = options_of(fields, served, OLLAMA_DEFAULTS)
    options["max_tokens"] = max(max_tokens(served, given.num_predict), 1)
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    if body.format == "json":
        options["response_format"] = {"type": "json_object"}
    elif body.format:
        options["json_schema"] = body.format
    return options


def _has_penalties(options: types.OllamaOptions) -> bool:
    return options.repeat_penalty not in (None, 1) or bool(options.presence_penalty or options.frequency_penalty)


def _check_context(served: ServedModel, options: types.OllamaOptions | None) -> None:
    """The context is the server's. One that is larger cannot be had; a smaller one is a part of it."""
    wanted = None if options is None else options.num_ctx
    if wanted is not None and wanted > served.context:
        holds = f"num_ctx is {wanted:,}, and the context of this server holds {served.context:,} tokens"
        larger = f"start the server with --ctx-size {wanted}"
        raise ApiError(400, f"{holds}; give at most that, or {larger}", param="options.num_ctx")


def _content(text: str, pictures: Sequence[str] | None, where: str, images: Images) -> str | list[dict[str, Any]]:
    """A content as templates read it. Pictures go before the text; they are base64 without more, mostly."""
    parts: list[str | dict[str, Any]] = []
    for i, each in enumerate(pictures or ()):
        url = each if each[:5].lower() == "data:" or is_address(each) else f"data:image/unknown;base64,{each}"
        parts.append(images.part(f"{where}[{i}]", url))
    return joined([*parts, text])


def _message(i: int, message: types.OllamaMessage, images: Images) -> dict[str, Any]:
    """A message as templates read it."""
    role = message.role.lower()
    calls = []
    for call in message.tool_calls or ():
        function = {"name": call.function.name, "arguments": call.function.arguments}
        calls.append({"type": "function", "function": function, **({"id": call.id} if call.id else {})})
    fields = {"name": message.tool_name, "tool_call_id": message.tool_call_id, "reasoning_content": message.thinking}
    return {
        "role": "system" if role == "developer" else role,
        "content": _content(message.content or "", message.images, f"messages[{i}].images", images),
        **{name: value for name, value in fields.items() if value},
        **({"tool_calls": calls} if calls else {}),
    }


def knows_thoughts(template: ChatTemplate | None) -> bool:
    """Does the chat template know of thoughts?"""
    source = "" if template is None else str(template.source)
    return thinking_tags(source) is not None or "reasoning_effort" in source


def _thinking(served: ServedModel, think: bool | str | None) -> dict[str, Any]:
    """Whether the model thinks, and how much. One that cannot is not asked to."""
    if think is None:
        return {}
    if think is not False and not knows_thoughts(served.model.chat_template):
        raise unsupported("think", "this model does not think; leave it out, or give false")
    effort = {"reasoning_effort": "high" if think == "max" else think} if isinstance(think, str) else {}
    return {"thinking": think is not False, "template_kwargs": effort}


# Embeddings ----------------------------------------------------------------------------------------------


class Embed(Prepared):
    """Inputs that are checked and tokenised."""

    route = Endpoint(
        *("/api/embed", "Embed texts", types.OllamaEmbedRequest, types.OllamaEmbedResponse), api="Ollama", errors=(501,)
    )
    stream = return_progress = False

    def __init__(self, served: ServedModel, body: types.OllamaEmbedRequest) -> None:
        _check_embedding(served, body)
        width = served.model.config.hidden
        if body.dimensions is not None and body.dimensions > width:
            most = f"dimensions must be at most the model's {width:,}, got {body.dimensions:,}"
            raise ApiError(400, most, param="dimensions")
        self.served, self.dimensions, self.started = served, body.dimensions, time.perf_counter()
        inputs = [body.input] if isinstance(body.input, str) else body.input
        if inputs == [""]:  # asks for nothing but the model
            inputs = []
        self.requests = [served.model.embed_request(self._cut(each) if body.truncate else each) for each in inputs]

    def _cut(self, text: str) -> list[int]:
        """As many tokens as the context holds. Of a text that is much longer the rest is not read."""
        context, characters = self.served.context, 16 * self.served.context
        while True:
            ids = self.served.model.tokenize(text[:characters])
            if characters >= len(text) or len(ids) >= context + _BORDER:
                return ids[:context]
            characters *= 4

    def response(self, handles: Sequence[Handle]) -> types.OllamaEmbedResponse:
        """One embedding for each handle."""
        return types.OllamaEmbedResponse(
            model=self.served.name,
            embeddings=[self._embedding(handle) for handle in handles],
            total_duration=_nanoseconds(time.perf_counter() - self.started),
            load_duration=0,
            prompt_eval_count=sum(handle.usage.prompt_tokens for handle in handles),
        )

    def _embedding(self, handle: Handle) -> list[float]:
        """The first dimensions, if so many are asked for, divided by their length."""
        values = handle.embedding()[: self.dimensions]
        length = max(float(np.linalg.norm(values)), 1e-12) if self.dimensions else 1.0
        return [float(value) / length for value in values]


class Embeddings(Prepared):
    """A prompt that is checked and tokenised."""

    route = Endpoint(
        *("/api/embeddings", "Embed a text", types.OllamaEmbeddingsRequest, types.OllamaEmbeddingsResponse),
        api="Ollama",
        errors=(501,),
    )
    stream = return_progress = False

    def __init__(self, served: ServedModel, body: types.OllamaEmbeddingsRequest) -> None:
        _check_embedding(served, body)
        self.served = served
        self.requests = [served.model.embed_request(body.prompt)] if body.prompt else []

    def response(self, handles: Sequence[Handle]) -> types.OllamaEmbeddingsResponse:
        """The embedding, if there is a prompt."""
        return types.OllamaEmbeddingsResponse([value for handle in handles for value in handle.embedding().tolist()])


def _check_embedding(served: ServedModel, body: types.OllamaEmbedRequest | types.OllamaEmbeddingsRequest) -> None:
    if not served.embedding:
        raise ApiError(501, "embeddings are off; start the server with --embedding")
    check_model(served, body.model)
    _check_context(served, body.options)
    seconds_of(body.keep_alive)
