"""llama-server: completion, tokenize, detokenize, apply-template, props, slots, health."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from .common import CountOrZero, Predict, PromptProgress, SamplingFields, Timings, TokenId, only


class PromptObject(Struct, kw_only=True):
    """A prompt as an object. What it has beside its text is no text, which models here do not take."""

    prompt_string: str
    multimodal_data: list[Any] | str | None = None


class LlamaFields(SamplingFields, kw_only=True):
    """What `/completion` and `/infill` have in common."""

    return_tokens: bool | None = None
    max_tokens: Predict | None = None
    t_max_predict_ms: Annotated[int, Meta(ge=-1, le=1 << 40)] | None = None
    n_indent: CountOrZero | None = None
    post_sampling_probs: bool | None = None
    response_fields: list[str] | None = None
    # Known, and honoured only with the value that changes nothing.
    n_keep: Annotated[Any, only(0, -1)] = None
    lora: Annotated[Any, only([])] = None


# Texts and token ids in turn are one prompt.
MixedPrompt = Annotated[list[str | TokenId], Meta(min_length=1)]


class LlamaCompletionRequest(LlamaFields, kw_only=True):
    """`POST /completion`. A list without token ids is several prompts, whose answers are a list."""

    prompt: str | PromptObject | Annotated[list[str | TokenId | PromptObject | MixedPrompt], Meta(min_length=1)]


class InfillFile(Struct, kw_only=True):
    """A file beside the one that is filled in."""

    text: str
    filename: str


class InfillRequest(LlamaFields, kw_only=True):
    """`POST /infill`."""

    input_prefix: str
    input_suffix: str
    prompt: str | None = None
    input_extra: list[InfillFile] | None = None


class TokenProbability(Struct):
    """A token that was likely. With `post_sampling_probs` its probability among those that samplers left."""

    id: int
    token: str
    bytes: list[int]
    logprob: float | UnsetType = UNSET
    prob: float | UnsetType = UNSET


class CompletionProbability(TokenProbability):
    """The token that was sampled, and those that were likely."""

    top_logprobs: list[TokenProbability] | UnsetType = UNSET
    top_probs: list[TokenProbability] | UnsetType = UNSET


class TokenBias(Struct):
    """What is added to a token's logit; null: −∞, it is never sampled."""

    token: int
    bias: float | None


class GenerationSettings(Struct):
    """What a request was run with."""

    n_predict: int
    seed: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: list[str]
    min_tokens: int
    n_probs: int
    cache_prompt: bool
    logit_bias: list[TokenBias]
    max_tokens: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: list[str]
    xtc_probability: float
    xtc_threshold: float
    typical_p: float
    top_n_sigma: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    samplers: list[str]


class LlamaCompletion(Struct, kw_only=True):
    """A whole answer, or the last part of a stream."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: Literal[True] = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    generation_settings: GenerationSettings
    prompt: str
    has_new_line: bool
    truncated: Literal[False] = False
    stop_type: Literal["none", "eos", "limit", "word"]
    stopping_word: str
    timings: Timings
    completion_probabilities: list[CompletionProbability] | UnsetType = UNSET


# Of several prompts a list. With `response_fields` an object of those.
LlamaAnswer = LlamaCompletion | list[LlamaCompletion]


class LlamaDelta(Struct, kw_only=True):
    """A part of a stream."""

    index: int
    content: str
    tokens: list[int]
    stop: Literal[False] = False
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[CompletionProbability] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


class ModelRequest(Struct):
    """`POST /models/load` and `POST /models/unload`."""

    model: str


class Success(Struct):
    """It is done, or has begun."""

    success: Literal[True] = True


class TokenizeRequest(Struct, kw_only=True):
    """`POST /tokenize`, in the words of llama-server or of vLLM (`prompt`, `add_special_tokens`)."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    model: str | None = None


class TokenPiece(Struct):
    """A token and its text; one that is no text has its bytes."""

    id: int
    piece: str | list[int]


class TokenizeResponse(Struct):
    """Token ids of a text."""

    tokens: list[int | TokenPiece]


class DetokenizeRequest(Struct):
    """`POST /detokenize`."""

    tokens: Annotated[list[TokenId], Meta(max_length=1 << 20)]
    model: str | None = None


class DetokenizeResponse(Struct):
    """The text of token ids, by llama-server's name and by vLLM's."""

    content: str
    prompt: str


class TokenizerInfo(Struct):
    """What a client must know to make prompts by itself, as vLLM says it."""

    bos_token: str | None
    eos_token: str | None
    pad_token: None
    add_bos_token: bool
    chat_template: str | None


class ApplyTemplateResponse(Struct):
    """The prompt that a chat template makes of messages."""

    prompt: str


class Health(Struct):
    """The server is ready."""

    status: Literal["ok"]


class DefaultSettings(Struct):
    """What a request that says nothing gets."""

    n_ctx: int
    params: GenerationSettings


class Modalities(Struct):
    """What a model takes beside text."""

    vision: bool = False
    audio: Literal[False] = False


class Props(Struct, kw_only=True):
    """What is served, and how."""

    default_generation_settings: DefaultSettings
    total_slots: int
    modalities: Modalities
    endpoint_slots: bool
    endpoint_metrics: bool
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    device: str
    backend: str
    endpoint_props: Literal[False] = False  # they cannot be changed
    is_sleeping: Literal[False] = False


class SlotFileRequest(Struct, kw_only=True):
    """`POST /slots/{id}`: the name of a file in the folder of --slot-save-path. To erase, none is needed."""

    filename: str | None = None


class SlotTimings(Struct, omit_defaults=True):
    """How long it took, in milliseconds."""

    save_ms: float | UnsetType = UNSET
    restore_ms: float | UnsetType = UNSET


class SlotFileResponse(Struct, kw_only=True):
    """What was saved, restored or erased: tokens, and bytes of the file."""

    id_slot: int
    filename: str | UnsetType = UNSET
    n_saved: int | UnsetType = UNSET
    n_written: int | UnsetType = UNSET
    n_restored: int | UnsetType = UNSET
    n_read: int | UnsetType = UNSET
    n_erased: int | UnsetType = UNSET
    timings: SlotTimings | UnsetType = UNSET


class SlotToken(Struct):
    """How far a sequence is; −1: there is none."""

    n_decoded: int
    n_remain: int
    has_next_token: bool


class Slot(Struct):
    """A place for one sequence. `id_task` is the request in it, −1: none."""

    id: int
    id_task: int
    n_ctx: int
    is_processing: bool
    state: Literal["idle", "waiting", "prefill", "decode", "finished"]
    n_prompt_tokens: int
    n_prompt_tokens_processed: int
    n_prompt_tokens_cache: int
    next_token: list[SlotToken]
    params: GenerationSettings | UnsetType = UNSET
    speculative: Literal[False] = False
