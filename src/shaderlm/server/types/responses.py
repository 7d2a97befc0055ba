"""OpenAI's responses: items in, items out, and events between them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from .common import (
    CompletionTokensDetails,
    ConversationFields,
    Count,
    JsonSchemaSpec,
    NonEmpty,
    PromptProgress,
    PromptTokensDetails,
    Timings,
    only,
)
from .openai import ChatLogprob, FunctionName

# Requests ------------------------------------------------------------------------------------------------


class InputText(Struct, kw_only=True, tag_field="type", tag="input_text"):
    """Text of a message."""

    text: str
    annotations: list[dict[str, Any]] | None = None
    logprobs: list[dict[str, Any]] | None = None


class PlainText(InputText, kw_only=True, tag_field="type", tag="text"):
    """The same, as chat completions call it."""


class AnswerText(InputText, kw_only=True, tag_field="type", tag="output_text"):
    """The same, of an answer."""


class ThoughtText(InputText, kw_only=True, tag_field="type", tag="reasoning_text"):
    """What a model thought."""


class SummaryText(InputText, kw_only=True, tag_field="type", tag="summary_text"):
    """The same, in short."""


class InputImage(Struct, kw_only=True, tag_field="type", tag="input_image"):
    """A picture: a data URL; an address, where the server fetches them. `detail` has no effect."""

    image_url: str
    detail: str | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return self.image_url


TextKind = InputText | PlainText | AnswerText | ThoughtText | SummaryText
InputPart = TextKind | InputImage


class InputItem(Struct, kw_only=True):
    """A message, a call of a function, what it gave, or a model's thoughts. The type says which fields it has."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[TextKind] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


class ResponsesTool(Struct, kw_only=True):
    """A function that the model may call. Tools of another type are those that OpenAI runs itself: they are not there.

    They are left out where there are functions, too, and an error where there are none.
    """

    type: str
    name: NonEmpty | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesNamedTool(FunctionName, kw_only=True, tag_field="type", tag="function"):
    """The one tool that must be called."""


class ResponsesAllowedTools(Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Some of the tools, which alone may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponsesTool], Meta(min_length=1)]


ResponsesToolChoice = Literal["none", "auto", "required"] | ResponsesNamedTool | ResponsesAllowedTools


class TextFormat(JsonSchemaSpec, kw_only=True):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Struct, kw_only=True):
    """The form of the text."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, only("medium")] = None


class ReasoningOptions(Struct, kw_only=True):
    """How much the model thinks, for templates that know it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(ConversationFields, kw_only=True):
    """`POST /v1/responses`."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: ResponsesToolChoice | None = None
    reasoning: ReasoningOptions | None = None
    # These have other names here, or no place in a response.
    n_predict: Annotated[Any, only()] = None
    n_probs: Annotated[Any, only(0)] = None
    # Known, and honoured only with the value that changes nothing.
    background: Annotated[Any, only(False)] = None
    conversation: Annotated[Any, only()] = None
    previous_response_id: str | None = None
    store: bool | None = None  # None: it is kept
    prompt: Annotated[Any, only()] = None
    include: list[str] | None = None
    max_tool_calls: Annotated[Any, only()] = None
    truncation: Annotated[Any, only("disabled")] = None
    context_management: Annotated[Any, only([])] = None
    image: Annotated[Any, only()] = None
    access_programs: Annotated[Any, only([])] = None


# Responses -----------------------------------------------------------------------------------------------


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, tag="output_text", kw_only=True):
    """Text that the model wrote."""

    text: str
    annotations: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)


class ReasoningText(Struct, tag="reasoning_text", kw_only=True):
    """Thoughts as text."""

    text: str


class MessageItem(Struct, tag="message", kw_only=True):
    """A message."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(Struct, tag="reasoning", kw_only=True):
    """What the model thought."""

    id: str
    summary: list[dict[str, Any]] = field(default_factory=list)
    content: list[ReasoningText]
    status: ItemStatus


class CallItem(Struct, tag="function_call", kw_only=True):
    """A call of a function."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


Item = MessageItem | ReasoningItem | CallItem


class ResponsesUsage(Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class Incomplete(Struct):
    """Why a response is cut."""

    reason: Literal["max_output_tokens"]


class DeletedResponse(Struct, kw_only=True):
    """A response is forgotten."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponsesError(Struct):
    """Why a response failed."""

    code: str
    message: str


class Response(Struct, kw_only=True):
    """A response, whole or as far as it is."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponsesError | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: ReasoningOptions
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: ResponsesToolChoice
    tools: list[ResponsesTool]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None
    user: str | None


# Events: each is numbered when it is written ----------------------------------------------------------------


class StatusEvent(Struct, kw_only=True):
    """The first two events, and the last one."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    sequence_number: int = 0
    response: Response
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


class ItemEvent(Struct, kw_only=True):
    """An item begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int = 0
    output_index: int
    item: Item


class PartEvent(Struct, kw_only=True):
    """The part of an item begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int = 0
    output_index: int
    content_index: int = 0
    item_id: str
    part: OutputText | ReasoningText


class OutputDelta(Struct, kw_only=True):
    """More text, or more thoughts, which have no log probabilities."""

    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    sequence_number: int = 0
    output_index: int
    content_index: int = 0
    item_id: str
    delta: str
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class TextDone(Struct, kw_only=True):
    """The whole text, or all thoughts."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    sequence_number: int = 0
    output_index: int
    content_index: int = 0
    item_id: str
    text: str
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class ArgumentsDelta(Struct, kw_only=True):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    sequence_number: int = 0
    output_index: int
    item_id: str
    delta: str


class ArgumentsDone(Struct, kw_only=True):
    """All arguments of a call."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    sequence_number: int = 0
    output_index: int
    item_id: str
    name: str
    arguments: str


class ErrorEvent(Struct, kw_only=True):
    """The stream ends with an error."""

    type: Literal["error"] = "error"
    sequence_number: int = 0
    code: str
    message: str
    param: str | None


ResponseEvent = (
    StatusEvent | ItemEvent | PartEvent | OutputDelta | TextDone | ArgumentsDelta | ArgumentsDone | ErrorEvent
)
