"""What is asked of the engine, and what comes back: requests, deltas, and numbers about both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..text import ChatFormat
from ..text.stream import LineLimits
from .completion import TokenLogprob
from .histogram import Histogram
from .sampling import SamplingParams
from .vision import RequestImage

if TYPE_CHECKING:
    from ..runtime.disk_cache import DiskStats

# What comes of a request: text; the ids of its tokens alone; or, with nothing generated, the final hidden state of the
# last token of its prompt, the logits after its tokens, or nothing but what is said of its prompt.
Output = Literal["text", "tokens", "hidden", "logits", "nothing"]
# Rows of logits, as they come: the place of the first one's token in the prompt, and the rows [n, vocabulary].
LogitRows = Callable[[int, NDArray[np.float32]], None]


class Constraint(Protocol):
    """Says which tokens may come next. Called by one thread at a time.

    `accept` and `is_complete` are called by the thread that steps the engine, where all requests wait for them. So is
    `mask` if it is quick, as far as is known. Otherwise one of a few threads calls it, and its request waits; so do
    others whose masks are not known to be quick, if all of these threads are busy.
    """

    def mask(self) -> bytes | None:
        """The tokens that may come next: a bit per token in u32 words, the lowest first; 1: allowed.

        None, after `accept` said None: no token may come, the text is complete.
        """
        ...

    def accept(self, token: int) -> bool | None:
        """This token came. False: the text is complete. None: the next mask says whether it is."""
        ...

    def is_complete(self, dropped: int, prefix: bytes) -> bool:
        """Is the text complete without its last `dropped` tokens, but with these bytes of them? Asked last of all."""
        ...


@runtime_checkable
class ForkableConstraint(Constraint, Protocol):
    """One that can be asked what would follow drafted tokens. Generations with others are not drafted for."""

    def fork(self) -> Constraint:
        """Another one in the same state, which goes on by itself."""
        ...


class ConstraintFactory(Protocol):
    """Makes constraints, one for each generation: a request may be submitted several times."""

    def start(self) -> Constraint:
        """A constraint before the first token."""
        ...


@dataclass(frozen=True)
class Request:
    """What one generation is to do."""

    prompt_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 256
    stop: Sequence[str] = ()
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0  # before which no stop id is sampled
    priority: int = 0  # the smaller goes first
    timeout: float | None = None  # seconds until it ends, wherever it is
    cache_prompt: bool = True  # begin after what is cached of the prompt
    keep_cache: bool = True  # leave its tokens in the cache, for others that begin with them
    client: str | None = None  # who asks: requests of one client share what is cached
    output: Output = "text"
    prompt_logprobs: int | None = None  # alternatives to report per token of the prompt; None: no report
    first_row: int = 0  # of the prompt: before it no logits are wanted, nor the log probability of the next token
    take_logits: LogitRows | None = None  # takes them; otherwise the handle keeps all of them
    constraint: ConstraintFactory | None = None
    shown_ids: frozenset[int] = frozenset()  # special tokens whose names are part of the text
    chat: ChatFormat | None = None  # how to take the text apart; the engine does not
    reports_remaining: bool = False  # log probabilities are those among the tokens that samplers left
    images: tuple[RequestImage, ...] = ()  # of its prompt, in order
    lines: LineLimits = LineLimits()  # noqa: RUF009 (nothing changes it)

    @property
    def generates(self) -> bool:
        """Are tokens sampled for it?"""
        return self.output in ("text", "tokens")


class Delta(NamedTuple):
    """What came since the last one. Text is whole characters, without any part of a stop string."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    time: float  # time.perf_counter() of the last token


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; `cached_tokens` of the prompt were not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted_tokens: int = 0  # that were verified
    accepted_tokens: int = 0  # of those
    image_tokens: int = 0  # of the prompt


@dataclass(frozen=True)
class EngineOptions:
    """How much an engine does at once."""

    parallel: int | None = None  # sequences that run at the same time; None: as many as a step has outputs
    queue: int | None = None  # requests that may wait beside them; None: any number
    cache_tokens: int | None = None  # positions of the cache, allocated at once; None: it grows when it must
    chunk_tokens: int | None = None  # rows of prompts in a step with decode rows; None: what is left of the step
    share_prefixes: bool = False  # among all clients, in whole pages; otherwise each finds its own, to the token

    def __post_init__(self) -> None:
        for name, least in (("parallel", 1), ("cache_tokens", 1), ("chunk_tokens", 1), ("queue", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} must be None or a whole number of at least {least}, got {value!r}")


@dataclass(frozen=True)
class EngineStats:
    """What an engine does and did. Counters begin with 0."""

    running: int
    waiting: int
    pages: int  # of the pool, as it is now
    max_pages: int
    pages_used: int  # by sequences that run
    pages_cached: int  # by the prefix cache alone
    prefix_queries: int  # tokens
    prefix_hits: int
    evicted_pages: int
    prompt_tokens: int
    generation_tokens: int
    prompt_seconds: float
    decode_seconds: float
    finished: Mapping[str, int]  # requests by finish reason
    preemptions: int
    steps: int
    rows: int  # of all steps
    sequences: int  # of all steps
    token_gaps: Histogram  # seconds from a token of a request to the next
    drafts: int  # that were verified: several tokens of a sequence, in one step
    drafted_tokens: int
    accepted_tokens: int
    options: EngineOptions
    disk: DiskStats | None = None  # of the cache on disk, if there is one


@dataclass(frozen=True)
class SequenceInfo:
    """One request that is not over."""

    id: int
    state: str
    prompt_tokens: int
    prompt_done: int
    cached_tokens: int
    completion_tokens: int
    max_tokens: int
    priority: int
    seconds: float  # since it was submitted
    request: Request
