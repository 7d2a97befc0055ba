"""OpenAI: models, chat completions, completions, embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from .common import (
    MAX_PROMPTS,
    Alternatives,
    Choices,
    ConversationFields,
    Count,
    CountOrZero,
    NonEmpty,
    PromptProgress,
    ResponseFormat,
    SamplingFields,
    StreamOptions,
    Timings,
    TokenId,
    Usage,
    only,
)
from .llama_server import LlamaCompletion

# Models --------------------------------------------------------------------------------------------------


class ModelMeta(Struct):
    """Sizes of a model, as llama-server reports them."""

    n_ctx: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    n_vocab: int
    size: int


class Architecture(Struct):
    """What a model reads and writes."""

    input_modalities: list[Literal["text", "image"]]
    output_modalities: list[Literal["text"]]


class ModelStatus(Struct, omit_defaults=True):
    """Is it loaded? In llama-server's form; `error` says why it is not."""

    value: Literal["unloaded", "loading", "loaded", "sleeping", "failed"]
    failed: bool = False
    error: str = ""
    requests: int = 0  # that have it, and wait for it
    expires_at: str = ""  # when it goes to sleep


class Model(Struct):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    aliases: list[str]
    tags: list[str]
    meta: ModelMeta | UnsetType = UNSET  # once it is loaded
    status: ModelStatus | UnsetType = UNSET
    path: str | UnsetType = UNSET
    architecture: Architecture | UnsetType = UNSET  # once it is loaded


class ListedModel(Struct):
    """What llama-server's page and clients of Ollama read in a list of models."""

    name: str
    model: str
    type: Literal["model"]
    tags: list[str]
    capabilities: list[Literal["completion", "multimodal"]] | UnsetType = UNSET  # once it is loaded


class ModelList(Struct):
    """All models, for clients of OpenAI and, in the same order, in llama-server's form."""

    object: Literal["list"]
    data: list[Model]
    models: list[ListedModel]


# Chat: requests ------------------------------------------------------------------------------------------


class TextPart(Struct, tag_field="type", tag="text"):
    """Text of a message."""

    text: str


class InputTextPart(TextPart, tag_field="type", tag="input_text"):
    """The same, as responses call it."""


class OutputTextPart(TextPart, tag_field="type", tag="output_text"):
    """The same, of an answer."""


class ImageUrl(Struct, kw_only=True):
    """A data URL of a picture; an address, where the server fetches them. `detail` has no effect."""

    url: str
    detail: str | None = None


class ImagePart(Struct, tag_field="type", tag="image_url"):
    """A picture."""

    image_url: ImageUrl | str

    @property
    def url(self) -> str:
        """Where it is."""
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


ContentPart = TextPart | InputTextPart | OutputTextPart | ImagePart


class FunctionCall(Struct):
    """The function that is called; its arguments are JSON."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    """A call that an assistant made; those of an answer have an id."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class Function(Struct, kw_only=True):
    """A function that the model may call."""

    name: NonEmpty
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """A tool: functions only."""

    type: Literal["function"]
    function: Function


class FunctionName(Struct):
    """The name of a function."""

    name: NonEmpty


class NamedTool(Struct, tag_field="type", tag="function"):
    """The one tool that must be called."""

    function: FunctionName


class AllowedTools(Struct):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class AllowedToolChoice(Struct, tag_field="type", tag="allowed_tools"):
    """Some of the tools, which alone may be called."""

    allowed_tools: AllowedTools


class ChatRequest(ConversationFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    n: Choices | None = None
    logprobs: bool | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    verbose: bool | None = None
    # Known, and honoured only with the value that changes nothing.
    modalities: Annotated[Any, only(["text"])] = None
    verbosity: Annotated[Any, only("medium")] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only()] = None


# Chat: responses -----------------------------------------------------------------------------------------


class TopLogprob(Struct):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """The token that was sampled, and those that were likely."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log probabilities of the tokens of a message."""

    content: list[ChatLogprob]
    refusal: None = None


class AssistantMessage(Struct, kw_only=True):
    """What the model answers."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatResponse(Struct, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings
    verbose: LlamaCompletion | UnsetType = field(default=UNSET, name="__verbose")


class DeltaFunction(Struct):
    """Of a function that is called, what is new."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, kw_only=True):
    """The first one of a call has an id, a type and a name; later ones only arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: DeltaFunction


class ChatDelta(Struct, kw_only=True):
    """What is new in a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True):
    """What is new in one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(Struct, kw_only=True):
    """A part of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    verbose: LlamaCompletion | UnsetType = field(default=UNSET, name="__verbose")


# Completions ---------------------------------------------------------------------------------------------


class CompletionRequest(SamplingFields, kw_only=True):
    """`POST /v1/completions`."""

    # A union of lists: msgspec takes one list, so its items are told apart later.
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: CountOrZero | None = None
    n: Choices | None = None
    logprobs: Alternatives | None = None
    echo: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    # Known, and honoured only with the value that changes nothing.
    best_of: int | None = None
    suffix: Annotated[Any, only("")] = None


class CompletionLogprobs(Struct):
    """Log probabilities as lists, one item for each token. The first token of a prompt has none: null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Struct):
    """One text, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionResponse(Struct, kw_only=True):
    """A whole answer, or a part of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


# Embeddings ----------------------------------------------------------------------------------------------


# A union of lists, as above.
Texts = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1, max_length=MAX_PROMPTS)]


class EmbeddingRequest(Struct, kw_only=True):
    """`POST /v1/embeddings`."""

    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
    # Known, and honoured only if it is the model's own.
    dimensions: Count | None = None


class Embedding(Struct):
    """The normalised final state of an input's last token; in base64, its f32 bytes."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class LlamaEmbeddingRequest(Struct, kw_only=True):
    """`POST /embedding`."""

    content: Texts | None = None
    input: Texts | None = None
    model: str | None = None
    embd_normalize: Annotated[Any, only(2)] = None


class LlamaEmbedding(Struct):
    """The same, as a list of one vector."""

    index: int
    embedding: list[list[float]]


class EmbeddingUsage(Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(Struct):
    """One embedding for each input."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
