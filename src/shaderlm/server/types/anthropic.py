"""Anthropic: messages, and counting their tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from .common import Count, CountOrZero, NonEmpty, SamplingFields, StopString, only

# Requests ------------------------------------------------------------------------------------------------


class CacheControl(Struct, kw_only=True):
    """Where a cached prefix may end. Has no effect: every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class TextBlock(Struct, tag="text", omit_defaults=True):
    """Text."""

    text: str
    cache_control: CacheControl | None = None
    citations: list[dict[str, Any]] | None = None


class ThinkingBlock(Struct, tag="thinking", omit_defaults=True):
    """What the model thought. The signature of an answer is empty: there is nothing to sign."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Struct, tag="redacted_thinking"):
    """Thoughts that only Anthropic can read. They are left out."""

    data: str


class ToolUseBlock(Struct, tag="tool_use", omit_defaults=True):
    """A call that the model made."""

    id: str
    name: NonEmpty
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class Base64Source(Struct, kw_only=True, tag_field="type", tag="base64"):
    """The bytes of a picture."""

    media_type: str
    data: str


class UrlSource(Struct, kw_only=True, tag_field="type", tag="url"):
    """The address of a picture, where the server fetches them; or a data URL."""

    url: str


class ImageBlock(Struct, kw_only=True, tag="image"):
    """A picture."""

    source: Base64Source | UrlSource
    cache_control: CacheControl | None = None

    @property
    def url(self) -> str:
        """Where it is, or what it is as a data URL."""
        source = self.source
        return source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"


class ToolResultBlock(Struct, kw_only=True, tag="tool_result"):
    """What a call gave."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


InputBlock = TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class AnthropicMessage(Struct):
    """One message, of text, thoughts, calls and their results."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class AnthropicTool(Struct, kw_only=True):
    """A function that the model may call. Tools of another type are Anthropic's own: they are not there.

    They are left out where there are functions, too, and an error where there are none.
    """

    name: NonEmpty
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicToolChoice(Struct, kw_only=True):
    """auto, any (at least one call), tool (this one) or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """May the model think first, and for how many tokens?"""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: CountOrZero | None = None
    display: str | None = None


class OutputFormat(Struct):
    """The schema that the text must have."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    """The form of the answer."""

    format: OutputFormat | None = None
    effort: str | None = None


class ThinkingTurns(Struct, tag_field="type", tag="thinking_turns"):
    """So many of the last turns."""

    value: Count


class ContextEdit(Struct, kw_only=True):
    """Which thoughts of earlier turns the model sees again."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | ThinkingTurns | None = None


class ContextManagement(Struct, kw_only=True):
    """What is left out of the conversation. Thoughts alone can be."""

    edits: list[ContextEdit] | None = None


class Metadata(Struct, kw_only=True):
    """Whom the request is for. Has no effect."""

    user_id: str | None = None


class CountTokensRequest(SamplingFields, kw_only=True):
    """`POST /v1/messages/count_tokens`. How tokens are sampled has no effect on their count."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    # These have other names here, or no place in a message.
    stop: Annotated[Any, only()] = None
    n_predict: Annotated[Any, only()] = None
    n_probs: Annotated[Any, only(0)] = None
    timings_per_token: Annotated[Any, only(False)] = None
    return_progress: Annotated[Any, only(False)] = None
    cache_control: CacheControl | None = None
    speed: Annotated[Any, only("standard")] = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: Count
    stop_sequences: list[StopString] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    metadata: Metadata | None = None
    # Known, and honoured only with the value that changes nothing.
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Annotated[Any, only()] = None
    mcp_servers: Annotated[Any, only([])] = None
    inference_geo: Annotated[Any, only()] = None
    diagnostics: Annotated[Any, only({})] = None


# Responses -----------------------------------------------------------------------------------------------


ResponseBlock = TextBlock | ThinkingBlock | ToolUseBlock


class AnthropicUsage(Struct):
    """Tokens. `input_tokens` are those of the prompt that were not in the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageResponse(Struct, kw_only=True):
    """A whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ResponseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class CountTokensResponse(Struct):
    """Tokens of a prompt."""

    input_tokens: int


class AnthropicError(Struct):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorResponse(Struct, kw_only=True):
    """The body of every error of Anthropic's routes."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str | None = None


# Events --------------------------------------------------------------------------------------------------


class MessageStart(Struct, tag="message_start"):
    """The first event: the message, still empty."""

    message: MessageResponse


class BlockStart(Struct, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: ResponseBlock


class TextDelta(Struct, tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    """More thoughts."""

    thinking: str


class SignatureDelta(Struct, tag="signature_delta"):
    """The signature of thoughts, before their end. It is empty."""

    signature: str


class InputJsonDelta(Struct, tag="input_json_delta"):
    """More of a call's arguments."""

    partial_json: str


class BlockDelta(Struct, tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(Struct, tag="content_block_stop"):
    """A block ends."""

    index: int


class MessageEnd(Struct):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta"):
    """The end of the message, and its tokens."""

    delta: MessageEnd
    usage: AnthropicUsage


class MessageStop(Struct, tag="message_stop"):
    """The last event."""


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
