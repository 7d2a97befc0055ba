"""Fields that several families of APIs share: how tokens are sampled and when a generation ends."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ...engine.sampling import MAX_BREAKER, MAX_BREAKERS, MAX_U32, RANGES
from ...graph.sampling import MAX_LOGPROBS

MAX_PROMPTS = 2048  # OpenAI's


def only(*values: Any) -> Meta:
    """Of a field that is known and cannot be honoured: the values, beside null, that change nothing."""
    instead = " or ".join(["leave it out", *(f"give {json.dumps(value)}" for value in values)])
    # typing keeps annotations that are equal once, and 0 equals False: the description tells them apart.
    return Meta(description=instead, extra_json_schema={"enum": [None, *values]}, extra={"only": values})


def _within(name: str) -> Meta:
    low, high, _ = RANGES[name]
    return Meta(ge=low, le=high)


Temperature = Annotated[float, _within("temperature")]
TopP = Annotated[float, _within("top_p")]
MinP = Annotated[float, _within("min_p")]
RepetitionPenalty = Annotated[float, _within("repetition_penalty")]
Penalty = Annotated[float, _within("presence_penalty")]
TopK = Annotated[int, Meta(ge=-1, le=MAX_U32, description="−1 or 0: all tokens")]
Breaker = Annotated[str, Meta(min_length=1, max_length=MAX_BREAKER)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=1, le=MAX_U32)]
CountOrZero = Annotated[int, Meta(ge=0, le=MAX_U32)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_U32)]
Predict = Annotated[int, Meta(ge=-2, le=MAX_U32, description="−1 or −2: until the context is full")]
ThinkingBudget = Annotated[int, Meta(ge=-1, le=MAX_U32, description="tokens to think at most; −1: no limit")]
Choices = Annotated[int, Meta(ge=1, le=MAX_U32)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
# A token's id or a text, all tokens of which get it. JSON's keys are texts: one of digits is an id.
BiasValue = Annotated[float, Meta(ge=-100, le=100)] | bool
Bias = dict[str, BiasValue]
BiasPair = tuple[TokenId | str, BiasValue]
# Each token's text is searched for them by the thread that steps all requests.
StopString = Annotated[str, Meta(max_length=4096)]
NonEmpty = Annotated[str, Meta(min_length=1)]


class JsonSchemaSpec(Struct, kw_only=True):
    """A schema with a name."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """The form of the text. `json_object` may have a schema beside it, as with llama-server."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaSpec | None = None
    schema: dict[str, Any] | bool | None = None


class SamplingFields(Struct, kw_only=True):
    """What OpenAI's and llama-server's routes have in common."""

    model: str | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | list[BiasPair] | None = None
    seed: Seed | None = None
    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: CountOrZero | None = None
    n_predict: Predict | None = None
    n_probs: Alternatives | None = None
    cache_prompt: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    id_slot: Annotated[int, Meta(description="the slot that `/slots/{id}` saves it by")] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    dry_multiplier: Annotated[float, _within("dry_multiplier")] | None = None
    dry_base: Annotated[float, _within("dry_base")] | None = None
    dry_allowed_length: CountOrZero | None = None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=MAX_U32, description="−1: all tokens")] | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Meta(max_length=MAX_BREAKERS)] | None = None
    xtc_probability: Annotated[float, _within("xtc_probability")] | None = None
    xtc_threshold: Annotated[float, _within("xtc_threshold")] | None = None
    typical_p: Annotated[float, _within("typical_p")] | None = None
    top_n_sigma: Annotated[float, _within("top_n_sigma")] | None = None
    dynatemp_range: Annotated[float, _within("dynatemp_range")] | None = None
    dynatemp_exponent: Annotated[float, _within("dynatemp_exponent")] | None = None
    mirostat: Annotated[int, Meta(ge=0, le=2, description="2: Mirostat 2.0; 1 is not supported")] | None = None
    mirostat_tau: Annotated[float, _within("mirostat_tau")] | None = None
    mirostat_eta: Annotated[float, _within("mirostat_eta")] | None = None
    samplers: list[str] | str | None = None
    # Known from llama-server, and honoured only with the value that switches it off. Filters always keep a token.
    min_keep: Annotated[Any, only(0, 1)] = None
    adaptive_target: Annotated[Any, only(-1)] = None
    post_sampling_probs: Annotated[Any, only(False)] = None


class StreamOptions(Struct, kw_only=True):
    """How a stream is written."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ConversationFields(SamplingFields, kw_only=True):
    """What OpenAI's two routes for conversations have in common."""

    stream_options: StreamOptions | None = None
    top_logprobs: Alternatives | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_budget_tokens: ThinkingBudget | None = None
    thinking_budget_tokens: ThinkingBudget | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    # Known, and honoured only with the value that changes nothing.
    store: Annotated[Any, only(False)] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    prompt_cache_retention: Annotated[Any, only("in_memory", "in-memory")] = None
    prompt_cache_options: Annotated[Any, only({})] = None
    moderation: Annotated[Any, only()] = None


class PromptTokensDetails(Struct):
    """Of the prompt's tokens: those that were in the cache; where there are images, theirs."""

    cached_tokens: int
    image_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(Struct):
    """Of the generated tokens: those between thinking tags; where tokens are drafted, what became of them."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct):
    """Tokens of a request, as OpenAI counts them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(Struct):
    """llama-server's numbers: tokens and milliseconds of prompt and generation."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class PromptProgress(Struct):
    """How much of the prompt is read."""

    total: int
    cache: int
    processed: int
    time_ms: int


class ErrorBody(Struct, omit_defaults=True):
    """What went wrong. Sizes are there if the prompt exceeds the context."""

    message: str
    type: str
    param: str | None
    code: int | None
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


class ErrorResponse(Struct):
    """The body of every error."""

    error: ErrorBody
