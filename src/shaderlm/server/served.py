"""The model as requests see it: its names, and what a request that says nothing gets. Knows no HTTP library."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..engine import LanguageModel
from ..version import __version__
from .errors import ApiError
from .limits import Limits
from .slots import SlotFiles

FINGERPRINT = f"shaderlm-{__version__}"


@dataclass(frozen=True)
class ModelNames:
    """What requests may call a model."""

    known: tuple[str, ...]  # the first is what responses and the list of models say

    @staticmethod
    def of(aliases: tuple[str, ...], name: str, own_name: str, source: str, path: Path) -> ModelNames:
        """Those of --alias; if there are none, those of the file, and what it was loaded by (`source`)."""
        return ModelNames(aliases or (name, own_name, source, path.stem, path.name, str(path)))

    @property
    def name(self) -> str:
        """What responses say."""
        return self.known[0]

    def know(self, name: str) -> bool:
        """Is it one of them?"""
        return name in self.known


@dataclass(frozen=True)
class ServedModel:
    """A loaded model and the server's defaults."""

    model: LanguageModel
    names: tuple[str, ...] = ()  # of --alias; the first is what responses say. None: those of the file
    n_predict: int | None = None  # tokens to generate at most where a request does not say; None: until the end
    seed: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict, hash=False)  # instead of the model's own values
    reasoning: Literal["auto", "none"] = "auto"  # none: thoughts stay in the text
    thinking: bool = True  # may the model think, where a request does not say?
    thinking_budget: int | None = None  # tokens to think at most
    verbose: bool = False  # answers tell their prompt and settings, too
    embedding: bool = False
    slots: SlotFiles | None = None  # saves prompts into files; None: there is no folder for them
    limits: Limits = Limits()  # noqa: RUF009 (nothing changes it)
    source: str = ""  # what it was loaded by, such as smollm2-135m: one of its names, if there is no alias
    tags: tuple[str, ...] = ()  # what the list of models says of it
    strict: bool = False  # a request for another model is an error; otherwise this one answers it
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def model_names(self) -> ModelNames:
        """What requests may call it. Every event of a stream asks for the first."""
        report = self.model.report
        return ModelNames.of(self.names, report.name, report.own_name, self.source, report.path)

    @property
    def name(self) -> str:
        """What responses and the list of models say."""
        return self.model_names.name

    def knows(self, name: str) -> bool:
        """Is it a name of this model?"""
        return self.model_names.know(name)

    def check_name(self, name: str | None) -> None:
        """May this model answer a request for this one? Clients send names that they know, such as gpt-4o."""
        if self.strict and name is not None:
            self.require_name(name)

    def require_name(self, name: str) -> None:
        """Another model is a 404."""
        if not self.knows(name):
            raise ApiError(404, f"the model {name!r} is not served here; there is {self.name!r}", param="model")

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Options of sampling where a request does not say: the server's, or the model's own."""
        return {**self.model.sampling_defaults, **self.sampling}

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self.model.engine.context
