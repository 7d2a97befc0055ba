"""From the fields of a request to the engine's options, and from handles to usage and timings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol, get_type_hints

import msgspec
from msgspec import Struct

from ..engine import Handle, Request
from .errors import ApiError, unsupported
from .served import ServedModel
from .types.common import CompletionTokensDetails, PromptTokensDetails, ResponseFormat, SamplingFields, Timings, Usage


class Writer(Protocol):
    """Writes the events of a stream, of one family of APIs. Each method gives whole events."""

    def delta(self, index: int, delta: Any) -> bytes:
        """What came for one of the handles."""
        ...

    def progress(self, index: int) -> bytes:
        """Its prompt is being read."""
        ...

    def finish(self, index: int) -> bytes:
        """One of the handles is finished."""
        ...

    def end(self) -> bytes:
        """All of them are."""
        ...

    def error(self, problem: ApiError) -> bytes:
        """The stream ends with an error."""
        ...


class Prepared(Protocol):
    """A request that is decoded, checked and tokenised. The engine runs `requests`; then there is a response."""

    @property
    def stream(self) -> bool:
        """Is the answer a stream?"""
        ...

    @property
    def return_progress(self) -> bool:
        """Does it say how much of the prompt is read?"""
        ...

    @property
    def requests(self) -> Sequence[Request]:
        """What the engine runs."""
        ...

    def response(self, handles: Sequence[Handle]) -> Struct:
        """The whole answer, after every handle is finished."""
        ...

    def writer(self, handles: Sequence[Handle]) -> Writer:
        """What writes the answer as a stream."""
        ...


@cache
def _restricted(kind: type[Struct]) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Fields that cannot be honoured: the values that change nothing, and what to do (`types.common.only`)."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and "only" in (meta.extra or {}):
                found[name] = (meta.extra or {})["only"], meta.description or ""
    return found


def check_supported(body: Struct) -> None:
    """A field that cannot be honoured is an error, unless it has a value that changes nothing."""
    for name, (values, instead) in _restricted(type(body)).items():
        given = getattr(body, name)
        if given is not None and not any(_same(given, value) for value in values):
            raise unsupported(name, instead)


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)  # 0 is not false


# What a request that says nothing gets, by family: each one's own defaults.
OPENAI_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0}
LLAMA_DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def options_of(body: SamplingFields, served: ServedModel, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `LanguageModel.request`, without the length and the report of log probabilities."""
    check_supported(body)
    plain = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
    names = (*plain, "stop_token_ids", "ignore_eos", "min_tokens", "cache_prompt", "repetition_penalty")
    given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    if body.repeat_penalty is not None:
        if given.get("repetition_penalty", body.repeat_penalty) != body.repeat_penalty:
            raise ApiError(
                400, "repeat_penalty and repetition_penalty differ; give one of them", param="repeat_penalty"
            )
        given["repetition_penalty"] = body.repeat_penalty
    options = {**defaults, **given}
    if options.get("top_k", 0) < 0:
        options["top_k"] = 0
    if body.logit_bias is not None:
        options["logit_bias"] = dict(_biases(body.logit_bias))
    if served.seed is not None:
        options.setdefault("seed", served.seed)
    for name in ("grammar", "json_schema"):
        if getattr(body, name) is not None:
            options[name] = getattr(body, name)
    return options


def response_format_option(given: ResponseFormat | None) -> dict[str, Any]:
    """`response_format` as an option of the engine, if it asks for anything."""
    if given is None or given.type == "text":
        return {}
    found = msgspec.to_builtins(given)
    return {"response_format": {key: value for key, value in found.items() if value is not None}}


def _biases(given: Any) -> Iterable[tuple[int, float]]:
    for token, bias in given.items() if isinstance(given, dict) else given:
        if bias is True:
            raise ApiError(400, "logit_bias takes a number, or false to exclude a token; got true", param="logit_bias")
        yield token, -math.inf if bias is False else bias


def max_tokens(served: ServedModel, *given: int | None, default: int | None = None) -> int:
    """The first of the fields that is there, the server's own limit, or as many as the context holds."""
    found = next((each for each in given if each is not None), None)
    if found is None:
        found = served.n_predict if served.n_predict is not None else default
    return served.context if found is None or found < 0 else found


def repeated(request: Request, count: int) -> list[Request]:
    """The same request several times, each with a seed of its own."""
    seed = request.sampling.seed
    if count == 1 or seed is None:
        return [request] * count
    return [replace(request, sampling=request.sampling.with_seed(seed + i)) for i in range(count)]


def usage_of(handles: Sequence[Handle], choices: int = 1, reasoning_tokens: int = 0) -> Usage:
    """Tokens of all handles. The prompt of `choices` handles in a row is the same, and counted once."""
    firsts = handles[::choices]
    prompt = sum(handle.usage.prompt_tokens for handle in firsts)
    made = sum(handle.usage.completion_tokens for handle in handles)
    cached = sum(handle.usage.cached_tokens for handle in firsts)
    details = CompletionTokensDetails(reasoning_tokens)
    return Usage(prompt, made, prompt + made, PromptTokensDetails(cached), details)


def timings_of(handle: Handle) -> Timings:
    """llama-server's numbers of one handle."""
    usage, timing = handle.usage, handle.timing
    read = usage.prompt_tokens - usage.cached_tokens
    prompt_ms, decode_ms = timing.prompt_seconds * 1e3, timing.decode_seconds * 1e3
    return Timings(
        cache_n=usage.cached_tokens,
        prompt_n=read,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, read),
        prompt_per_second=_ratio(read, timing.prompt_seconds),
        predicted_n=usage.completion_tokens,
        predicted_ms=decode_ms,
        predicted_per_token_ms=_ratio(decode_ms, timing.decoded),
        predicted_per_second=timing.tokens_per_second,
    )


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0
