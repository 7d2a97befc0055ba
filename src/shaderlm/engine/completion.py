"""What a generation returns: `Completion`, text with its tokens and timing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ..text import ChatFormat


class TokenLogprob(NamedTuple):
    """Log probability of the sampled token, and the most likely tokens, best first."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


class PromptLogprobs(Sequence[TokenLogprob | None]):
    """Log probabilities of the tokens of a prompt, each after those before it. None: of the first there is none."""

    def __init__(self, ids: Sequence[int], first: int, alternatives: int) -> None:
        """Those of the tokens from number `first` on, at least 1, are to be set."""
        self.ids, self.first = list(ids), max(1, min(first, len(ids)))
        count = len(self.ids) - self.first
        # Arrays: as objects, those of a long prompt with 20 alternatives would take a gigabyte.
        self.values: NDArray[np.float32] = np.zeros(count, np.float32)
        self.top_ids: NDArray[np.uint32] = np.zeros((count, alternatives), np.uint32)
        self.top_values: NDArray[np.float32] = np.zeros((count, alternatives), np.float32)

    def set(self, token: int, reports: NDArray[np.uint32]) -> None:
        """What the op logprobs reports, of this token and those after it: [tokens, 21, 2]."""
        to = slice(token - self.first, token - self.first + len(reports))
        some = slice(1, 1 + self.top_ids.shape[1])
        self.values[to] = reports[:, 0, 1].view(np.float32)
        self.top_ids[to] = reports[:, some, 0]
        self.top_values[to] = np.ascontiguousarray(reports[:, some, 1]).view(np.float32)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        """All of them, several times as fast as one by one."""
        yield from [None] * self.first
        for begin in range(0, len(self.values), 1024):
            part = slice(begin, begin + 1024)
            ids, values = self.ids[self.first + begin :][:1024], self.values[part].tolist()
            tops = zip(self.top_ids[part].tolist(), self.top_values[part].tolist(), strict=True)
            for token, value, (top_ids, top_values) in zip(ids, values, tops, strict=True):
                yield TokenLogprob(token, value, list(zip(top_ids, top_values, strict=True)))

    @overload
    def __getitem__(self, index: int) -> TokenLogprob | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprob | None]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprob | list[TokenLogprob | None] | None:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index] - self.first
        if at < 0:
            return None
        top = list(zip(self.top_ids[at].tolist(), self.top_values[at].tolist(), strict=True))
        return TokenLogprob(self.ids[at + self.first], float(self.values[at]), top)

    def __repr__(self) -> str:
        return f"<PromptLogprobs of {len(self)} tokens, total {self.total:.3f}, perplexity {self.perplexity:.3f}>"

    @property
    def total(self) -> float:
        """Their sum: the log probability of the text after its first token."""
        return float(self.values.sum(dtype=np.float64))

    @property
    def perplexity(self) -> float:
        """exp of minus their mean; NaN of a single token."""
        return float(np.exp(-self.values.mean(dtype=np.float64))) if len(self.values) else float("nan")


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
