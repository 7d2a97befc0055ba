"""Ollama: chat, generate, embed, and its routes about models. Durations are nanoseconds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from .common import (
    MAX_PROMPTS,
    Alternatives,
    Count,
    MinP,
    NonEmpty,
    Penalty,
    Predict,
    RepetitionPenalty,
    Seed,
    StopString,
    Temperature,
    TokenId,
    TopK,
    TopP,
    only,
)
from .openai import ChatLogprob

# Requests ------------------------------------------------------------------------------------------------


class OllamaOptions(Struct, kw_only=True):
    """How tokens are sampled, by the names of Modelfiles."""

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, description="−1: penalties count the whole context. 0: none")] | None = (
        None
    )
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[Seed, Meta(description="−1: another one each time")] | None = None
    stop: StopString | list[StopString] | None = None
    num_predict: Predict | None = None
    num_ctx: Annotated[Count, Meta(description="no more than the context of this server")] | None = None
    # As llama-server's fields of these names are honoured.
    typical_p: Any = None
    mirostat: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    # Without an effect: the server reads and keeps all of a prompt, and decided at its start how the model is loaded.
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    numa: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    draft_num_predict: Any = None
    # Known, and honoured only with the value that changes nothing.
    tfs_z: Annotated[Any, only(1)] = None
    penalize_newline: Annotated[Any, only(True)] = None
    logits_all: Annotated[Any, only(False)] = None
    vocab_only: Annotated[Any, only(False)] = None
    embedding_only: Annotated[Any, only(False)] = None


KeepAlive = Annotated[float | str, Meta(description="seconds, or a text such as 5m")] | None


class OllamaFields(Struct, kw_only=True):
    """What chat and generate have in common. Without `stream`, the answer is a stream."""

    model: str | None = None
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    # Known, and honoured only with the value that changes nothing: nothing is cut from a prompt.
    truncate: Annotated[Any, only(False)] = None
    shift: Annotated[Any, only(False)] = None


class OllamaCalledFunction(Struct, kw_only=True):
    """The function that was called; its arguments are an object."""

    name: str
    arguments: dict[str, Any]
    index: int | None = None


class OllamaToolCall(Struct, kw_only=True):
    """A call that an assistant made."""

    function: OllamaCalledFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(Struct, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[str] | None = None


class OllamaFunction(Struct, kw_only=True):
    """A function that the model may call."""

    name: NonEmpty
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Struct, kw_only=True):
    """A tool: functions only."""

    function: OllamaFunction
    type: Literal["function"] | None = None


class OllamaChatRequest(OllamaFields, kw_only=True):
    """`POST /api/chat`. Without messages nothing is generated."""

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """`POST /api/generate`. Without a prompt nothing is generated."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: Annotated[list[TokenId], Meta(max_length=1 << 20)] | None = None
    images: list[str] | None = None
    # Known, and honoured only with the value that changes nothing.
    template: Annotated[Any, only("")] = None
    width: Annotated[Any, only(0)] = None
    height: Annotated[Any, only(0)] = None
    steps: Annotated[Any, only(0)] = None


class OllamaEmbedRequest(Struct, kw_only=True):
    """`POST /api/embed`. An input that is too long is cut only where `truncate` is true."""

    input: str | Annotated[list[str], Meta(max_length=MAX_PROMPTS)]
    model: str | None = None
    truncate: bool | None = None
    dimensions: Count | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None


class OllamaEmbeddingsRequest(Struct, kw_only=True):
    """`POST /api/embeddings`, the older form."""

    prompt: str | None = None
    model: str | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None


class OllamaModelRequest(Struct, kw_only=True):
    """A model, by its name. `name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None


class OllamaShowRequest(OllamaModelRequest, kw_only=True):
    """`POST /api/show`."""

    verbose: bool | None = None
    system: str | None = None
    options: dict[str, Any] | None = None


class OllamaPullRequest(OllamaModelRequest, kw_only=True):
    """`POST /api/pull`. Without `stream`, the answer is a stream."""

    stream: bool | None = None
    insecure: Annotated[Any, only(False)] = None


class OllamaCopyRequest(Struct, kw_only=True):
    """`POST /api/copy`."""

    source: str
    destination: str


# Responses -----------------------------------------------------------------------------------------------


class OllamaCall(Struct, kw_only=True):
    """The function to call. Its arguments are an object."""

    index: int
    name: str
    arguments: Annotated[Any, Meta(extra_json_schema={"type": "object"})]


class OllamaAnswerCall(Struct, kw_only=True):
    """A whole call of an answer."""

    id: str
    function: OllamaCall


class OllamaAnswerMessage(Struct, kw_only=True):
    """What the model answers, or what is new of it."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaAnswerCall] | UnsetType = UNSET


class OllamaResponse(Struct, kw_only=True):
    """What chat and generate have in common: a whole answer, or a line of a stream. The last one has the numbers."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class OllamaChatResponse(OllamaResponse, kw_only=True):
    """An answer to a conversation, or a line of a stream."""

    message: OllamaAnswerMessage


class OllamaGenerateResponse(OllamaResponse, kw_only=True):
    """An answer to a prompt, or a line of a stream. `context` is what the next request may go on from."""

    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class OllamaEmbedResponse(Struct, kw_only=True):
    """One embedding for each input."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsResponse(Struct):
    """The embedding of a prompt; of an empty one, nothing."""

    embedding: list[float]


class OllamaDetails(Struct, kw_only=True):
    """What kind of model it is."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct, kw_only=True):
    """A model that is served. `digest` is made of the file's name, size and time, not of its content."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    capabilities: list[str]


class OllamaTags(Struct):
    """All models."""

    models: list[OllamaModel]


class OllamaRunningModel(Struct, kw_only=True):
    """A model that is loaded. Its bytes are those of its weights on the device."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(Struct):
    """All models that are loaded."""

    models: list[OllamaRunningModel]


class OllamaShowResponse(Struct, kw_only=True):
    """What a model is. `context_length` in `model_info` is what this server's context holds."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Struct):
    """The version of Ollama whose API this is."""

    version: str


class OllamaProgress(Struct, kw_only=True):
    """What a pull does, or did. `digest` tells what is fetched from what else is."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class OllamaStatus(Struct):
    """It is done."""

    status: Literal["success"] = "success"


class OllamaErrorResponse(Struct):
    """The body of every error of Ollama's routes, and the last line of a stream that fails."""

    error: str
