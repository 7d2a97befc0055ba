"""What a generation returns: `Completion`, text with its tokens and timing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..text import ChatFormat


class TokenLogprob(NamedTuple):
    """Log probability of the sampled token, and the most likely tokens, best first."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Timing:
    """Seconds until the first token (the prompt is read), and for all the others."""

    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    decoded: int = 0  # tokens after the first
    queue_seconds: float = 0.0  # before any of it

    @property
    def tokens_per_second(self) -> float:
        """Decode speed; 0 where nothing was decoded."""
        return self.decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0


class Completion(str):
    """Generated text: a str with its tokens, the reason why it ended, and its timing.

    finish_reason is "stop" (the model ended its turn, or a stop string came), "length" (max_tokens, a full context, or
    a stop string within JSON or another form that was asked for), "closed" (the stream was closed before either) or
    "deadline" (its time was over).
    """

    ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    timing: Timing
    chat: ChatFormat | None = None  # of an answer in a chat

    @property
    def message(self) -> dict[str, Any]:
        """As a message in OpenAI's form, to be appended to the conversation: role, content, and where there is any,
        reasoning_content and tool_calls. `content` is None where there are only calls; a call's id is its number.
        """
        message = (self.chat or ChatFormat()).message(self, self.finish_reason)
        if "tool_calls" in message:
            message["tool_calls"] = [{"id": f"call_{i}", **call} for i, call in enumerate(message["tool_calls"])]
        return message
