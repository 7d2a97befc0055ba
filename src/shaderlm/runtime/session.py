"""A model on a device, and conversations with it: the same three verbs on a GPU and in the interpreter.

A session is one conversation: its cache and how much of it is filled. `feed` runs tokens; then either the logits are
read, or the next token is chosen where the logits are and comes back in a letter while the next step may already run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..graph.fuse import RejectedFusion, fuse
from ..graph.graph import Graph, Node
from ..graph.reference import rope_table
from ..models.architecture import Architecture, Config, Step

F32 = NDArray[np.float32]
FIRST_CAPACITY = 256


# The words of the op `sample`, or None to take the largest logit.
Choice = NDArray[np.uint32] | None


class Token(Protocol):
    """A token that is on its way."""

    def wait(self) -> int:
        """The token's id."""
        ...


class Model:
    """What both kinds of runner share: config, graphs by step, the rope table."""

    def __init__(
        self,
        architecture: Architecture,
        config: Config,
        factors: Any,
        fusions: Sequence[str] | None,
        unsupported_reason: Callable[[Node], str | None] | None = None,
    ) -> None:
        self.config = config
        self._architecture, self._factors, self._fusions, self._unsupported_reason = (
            architecture,
            factors,
            fusions,
            unsupported_reason,
        )

    def graph(self, step: Step) -> tuple[Graph, tuple[RejectedFusion, ...]]:
        """The fused graph of a step."""
        return fuse(self._architecture.build(self.config, step), self._fusions, self._unsupported_reason)

    def rope_table(self, positions: int) -> F32:
        """(cos, sin) [positions, rotary / 2, 2]."""
        rope = self.config.rope
        where = np.arange(positions, dtype=np.float64) / rope.linear_scale
        return rope_table(where, rope.rotary, rope.theta, self._factors).astype(np.float32)

    def capacity(self, positions: int) -> int:
        """Room to make for this many positions: doubled from 256, no more than the context."""
        room = FIRST_CAPACITY
        while room < positions:
            room *= 2
        return min(room, self.config.context)


class Session(ABC):
    """One conversation. `length` positions of the cache are filled."""

    chunk: int  # most tokens at once
    most_logits: int = 64  # most rows of logits at once
    ahead: int  # how many tokens are worth having under way before the first of them is here

    def __init__(self, model: Model) -> None:
        self._config = model.config
        self.length = 0

    def rewind(self, length: int) -> None:
        """Forget what comes after the first `length` positions."""
        assert 0 <= length <= self.length
        self.length = length

    def feed(self, ids: Sequence[int]) -> None:
        """Run tokens, in chunks; afterwards the logits of the last one are there."""
        self._check(ids)
        for first in range(0, len(ids), self.chunk):
            chunk = ids[first : first + self.chunk]
            self._run(np.asarray(chunk, np.uint32), last=first + len(chunk) == len(ids))
            self.length += len(chunk)

    def feed_all(self, ids: Sequence[int]) -> F32:
        """Run tokens and return the logits of every one, [T, vocabulary]."""
        self._check(ids)
        found = []
        step = min(self.chunk, self.most_logits, Session.most_logits)
        for first in range(0, len(ids), step):
            chunk = np.asarray(ids[first : first + step], np.uint32)
            found.append(self._run_all(chunk))
            self.length += len(chunk)
        return np.concatenate(found)

    def _check(self, ids: Sequence[int]) -> None:
        if not len(ids):
            raise InputError("expected at least one token, got none")
        wrong = next((i for i in ids if not 0 <= i < self._config.vocabulary), None)
        if wrong is not None:
            raise InputError(f"a token id must lie in 0 … {self._config.vocabulary - 1}, got {wrong}")
        if self.length + len(ids) > self._config.context:
            raise InputError(
                f"the context holds {self._config.context:,} tokens; {self.length:,} are there and {len(ids):,} more "
                "were given. Shorten the prompt, or load a model with a longer context"
            )

    @abstractmethod
    def _run(self, ids: NDArray[np.uint32], *, last: bool) -> None:
        """One chunk at position `length`; logits are wanted of the last chunk only."""

    @abstractmethod
    def _run_all(self, ids: NDArray[np.uint32]) -> F32:
        """One chunk, the logits of all its rows."""

    @abstractmethod
    def logits(self) -> F32:
        """Logits of the last token that was fed, [vocabulary]."""

    @abstractmethod
    def choose(self, choice: Choice) -> Token:
        """Choose the next token from the logits; it stays on the device for `advance`."""

    @abstractmethod
    def advance(self, choice: Choice) -> Token:
        """Run the token that was chosen last and choose the next, without waiting for either."""

    @abstractmethod
    def close(self) -> None:
        """Give the cache back."""


class Runner(Protocol):
    """A model that can hold conversations."""

    config: Config

    def session(self) -> Session:
        """A new, empty conversation."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...

    def report(self) -> Mapping[str, Any]:
        """Where it runs, and how much memory its weights take."""
        ...
