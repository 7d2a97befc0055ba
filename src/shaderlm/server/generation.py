"""From the fields of a request to the engine's options, and from handles to usage and timings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec import UNSET, Struct

from ..engine import Handle, Request
from ..engine.sampling import MAX_U32
from .errors import ApiError, unsupported
from .served import ServedModel
from .types.common import (
    CompletionTokensDetails,
    PromptProgress,
    PromptTokensDetails,
    SamplingFields,
    Timings,
    Usage,
)
from .types.openai import ChatRequest, CompletionRequest


@cache
def _restricted(kind: type[Struct]) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Fields that cannot be honoured: the values that change nothing, and what to do (`types.common.only`)."""
    restricted = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and "only" in (meta.extra or {}):
                restricted[name] = (meta.extra or {})["only"], meta.description or ""
    return restricted


def check_supported(body: Struct) -> None:
    """A field that cannot be honoured is an error, unless it has a value that changes nothing."""
    for name, (values, instead) in _restricted(type(body)).items():
        value = getattr(body, name)
        if value is not None and not any(_same(value, neutral) for neutral in values):
            raise unsupported(name, instead)


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)  # 0 is not false


# What a request that says nothing gets, by family, unless the model has values of its own.
OPENAI_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0}
LLAMA_DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


# Fields that are options of the engine, by the same names: numbers of samplers that not every request has, and others.
SAMPLER_FIELDS = (
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "xtc_probability", "xtc_threshold"),
    *("typical_p", "top_n_sigma", "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta"),
)
_OPTIONS = (
    *(*SAMPLER_FIELDS, "dry_sequence_breakers", "samplers"),
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
    *("stop", "stop_token_ids", "ignore_eos", "min_tokens", "cache_prompt", "grammar", "json_schema"),
)


def options_of(body: SamplingFields, served: ServedModel, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `LanguageModel.request`, without the length and the report of log probabilities."""
    check_supported(body)
    given = {name: getattr(body, name) for name in _OPTIONS if getattr(body, name) is not None}
    options = {**defaults, **served.sampling_defaults, **given}
    if body.repeat_penalty is not None:
        if body.repetition_penalty not in (None, body.repeat_penalty):
            message = "repeat_penalty and repetition_penalty differ; give one of them"
            raise ApiError(400, message, param="repeat_penalty")
        options["repetition_penalty"] = body.repeat_penalty
    if options.get("top_k", 0) < 0:
        options["top_k"] = 0
    if body.logit_bias is not None:
        options["logit_bias"] = dict(_biases(served, body.logit_bias))
    if served.seed is not None:
        options.setdefault("seed", served.seed)
    return options


def openai_options(
    served: ServedModel, body: ChatRequest | CompletionRequest, *limits: int | None, default: int | None = None
) -> dict[str, Any]:
    """The same of a chat or a completion of OpenAI, with its length: see `max_tokens`."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is for streams; give stream: true, too", param="stream_options")
    options = options_of(body, served, OPENAI_DEFAULTS)
    options["max_tokens"] = max_tokens(served, *limits, body.n_predict, default=default)
    if options["max_tokens"] == 0:
        raise ApiError(400, "n_predict must be −1 or at least 1 on this route, got 0", param="n_predict")
    if body.response_format is not None and body.response_format.type != "text":
        fields = msgspec.to_builtins(body.response_format)
        options["response_format"] = {name: value for name, value in fields.items() if value is not None}
    return options


def _biases(served: ServedModel, logit_bias: Any) -> Iterable[tuple[int, float]]:
    """Of tokens, by their ids or by a text, all tokens of which get the same."""
    is_object = isinstance(logit_bias, dict)
    for token, bias in logit_bias.items() if is_object else logit_bias:
        if bias is True:
            raise ApiError(400, "logit_bias takes a number, or false to exclude a token; got true", param="logit_bias")
        value = -math.inf if bias is False else bias
        if is_object and token.isascii() and token.isdigit():
            token = int(token) if len(token) < 20 else MAX_U32
        ids = [token] if isinstance(token, int) else served.model.tokenize(token, add_special=False)
        yield from ((each, value) for each in ids)


def max_tokens(served: ServedModel, *limits: int | None, default: int | None = None) -> int:
    """The first of the limits that is there, the server's own one, or as many as the context holds."""
    limit = next((each for each in (*limits, served.n_predict, default) if each is not None), -1)
    return served.context if limit < 0 else limit


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
    generated = sum(handle.usage.completion_tokens for handle in handles)
    cached = sum(handle.usage.cached_tokens for handle in firsts)
    details = CompletionTokensDetails(reasoning_tokens)
    if drafted := sum(handle.usage.drafted_tokens for handle in handles):
        details.accepted_prediction_tokens = sum(handle.usage.accepted_tokens for handle in handles)
        details.rejected_prediction_tokens = drafted - details.accepted_prediction_tokens
    seen = sum(handle.usage.image_tokens for handle in firsts)
    of_prompt = PromptTokensDetails(cached, seen or UNSET)
    return Usage(prompt, generated, prompt + generated, of_prompt, details)


def timings_of(handle: Handle) -> Timings:
    """llama-server's numbers of one handle."""
    usage, timing = handle.usage, handle.timing
    read = usage.prompt_tokens - usage.cached_tokens
    prompt_ms, decode_ms = timing.prompt_seconds * 1e3, timing.decode_seconds * 1e3
    return Timings(
        cache_n=usage.cached_tokens,
        prompt_n=read,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=ratio(prompt_ms, read),
        prompt_per_second=ratio(read, timing.prompt_seconds),
        predicted_n=usage.completion_tokens,
        predicted_ms=decode_ms,
        predicted_per_token_ms=ratio(decode_ms, timing.decoded),
        predicted_per_second=timing.tokens_per_second,
        draft_n=usage.drafted_tokens or UNSET,
        draft_n_accepted=usage.accepted_tokens if usage.drafted_tokens else UNSET,
    )


class Progress(NamedTuple):
    """How much of a prompt is read, and in what time."""

    prompt: PromptProgress
    timings: Timings


def progress_of(handle: Handle, *, begin: bool = False) -> Progress:
    """The progress now; at its begin, what was in the cache is all there is."""
    done, total = handle.prompt_progress
    cached = handle.usage.cached_tokens
    read = 0 if begin else max(0, done - cached)
    seconds = 0.0 if begin else handle.prompt_seconds
    timings = Timings(
        cache_n=cached,
        prompt_n=read,
        prompt_ms=seconds * 1e3,
        prompt_per_token_ms=ratio(seconds * 1e3, read),
        prompt_per_second=ratio(read, seconds),
        predicted_n=0,
        predicted_ms=0.0,
        predicted_per_token_ms=0.0,
        predicted_per_second=0.0,
    )
    return Progress(PromptProgress(total, cached, cached + read, int(seconds * 1e3)), timings)


def ratio(a: float, b: float) -> float:
    """a / b, or 0 where nothing was counted yet."""
    return a / b if b > 0 else 0.0
