"""A runner without a model: its tokens are there at once, or when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.engine import LanguageModel
from shaderlm.engine.report import LoadReport
from shaderlm.text import Tokenizer, Vocabulary

from .tiny_models import tiny_metadata


class FakeToken:
    """A token under way; what became of it is kept."""

    def __init__(self, runner: FakeRunner, token: int) -> None:
        self._runner, self._id = runner, token
        self.fate = "pending"

    def wait(self) -> int:
        self._runner.awaited(self)
        self.fate = "read"
        return self._id

    def discard(self) -> None:
        assert self.fate == "pending", "either read or discarded, once"
        self.fate = "discarded"


class FakeSession:
    """A `runtime.runner.Session` that samples the ids of its runner, one after the other."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner, self.steps_ahead, self.closed = runner, runner.steps_ahead, False
        self.length = 0
        self._at = 0

    def sample(self, ids: Sequence[int], settings: Any) -> FakeToken:
        self.length += len(ids)
        token = FakeToken(self._runner, self._next())
        self._runner.tokens.append(token)
        return token

    def advance(self, settings: Any) -> FakeToken:
        return self.sample([0], settings)

    def all_logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        return np.zeros((len(ids), self._runner.config.vocabulary), np.float32)

    def rewind(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.length = length

    def _next(self) -> int:
        self._at += 1
        return self._runner.ids[(self._at - 1) % len(self._runner.ids)]

    def close(self) -> None:
        assert not self.closed, "once"
        self.closed = True


class FakeRunner:
    """Stands for a model on a device."""

    def __init__(self, ids: Sequence[int], ahead: int, vocabulary: int, context: int = 1 << 20) -> None:
        self.ids, self.steps_ahead = ids, ahead
        self.config: Any = SimpleNamespace(context=context, vocabulary=vocabulary)
        self.tokens: list[FakeToken] = []
        self.sessions: list[FakeSession] = []
        self.closed = False

    def awaited(self, token: FakeToken) -> None:
        """Called when somebody waits for a token; a test may replace it."""

    def session(self) -> FakeSession:
        self.sessions.append(FakeSession(self))
        return self.sessions[-1]

    def close(self) -> None:
        self.closed = True

    def report(self) -> dict[str, Any]:
        return {}


def fake_model(text: str, *, ahead: int = 2, tokenizer: Tokenizer | None = None) -> tuple[LanguageModel, FakeRunner]:
    """A model that generates this text again and again."""
    tokenizer = tokenizer or Tokenizer(Vocabulary.from_metadata(tiny_metadata()))
    runner = FakeRunner(tokenizer.encode(text), ahead, len(tokenizer.vocabulary.tokens))
    sizes: Any = dict.fromkeys(("file_bytes", "parameters", "weight_bytes", "seconds"), 0)
    words: Any = dict.fromkeys(("name", "architecture", "device", "cache", "precision"), "fake")
    report = LoadReport(path=Path("fake"), context=runner.config.context, types={}, converted={}, **sizes, **words)
    return LanguageModel(runner, tokenizer, report), runner  # type: ignore[arg-type]
