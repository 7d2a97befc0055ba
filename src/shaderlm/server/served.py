"""The model as requests see it: its names, and what a request that says nothing gets. Knows no HTTP library."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..engine import LanguageModel
from ..version import __version__
from .errors import ApiError
from .limits import Limits

FINGERPRINT = f"shaderlm-{__version__}"


@dataclass(frozen=True)
class ServedModel:
    """A loaded model and the server's defaults."""

    model: LanguageModel
    names: tuple[str, ...] = ()  # of --alias; the first is what responses say. None: those of the file
    n_predict: int | None = None  # tokens to generate at most where a request does not say; None: until the end
    seed: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict, hash=False)  # instead of the model's own values
    reasoning: Literal["auto", "none"] = "auto"  # none: thoughts stay in the text
    embedding: bool = False
    limits: Limits = Limits()  # noqa: RUF009 (nothing changes it)
    source: str = ""  # what it was loaded by, such as smollm2-135m: one of its names, if there is no alias
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """What responses and the list of models say."""
        return self.names[0] if self.names else self.model.report.name

    def check_name(self, name: str | None) -> None:
        """A request for another model is a 404. A request that names none is for this one."""
        report = self.model.report
        path = report.path
        known = self.names or (report.name, report.own_name, self.source, path.stem, path.name, str(path))
        if name is not None and name not in known:
            raise ApiError(404, f"the model {name!r} is not served here; there is {self.name!r}", param="model")

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Options of sampling where a request does not say: the server's, or the model's own."""
        return {**self.model.sampling_defaults, **self.sampling}

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self.model.engine.context
