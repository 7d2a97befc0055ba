"""Which constraint on the tokens a request asks for. Knows no HTTP library."""

from __future__ import annotations

from ..engine import Constraint
from .errors import unsupported
from .served import Served
from .types.common import ResponseFormat, SamplingFields


def constraint_of(served: Served, body: SamplingFields, form: ResponseFormat | None) -> Constraint | None:
    """The constraint of `response_format`, `grammar` or `json_schema`; None without any of them."""
    if form is not None and form.type != "text":
        raise unsupported("response_format", "only plain text can be asked for")
    for name in ("grammar", "json_schema"):
        if getattr(body, name) is not None:
            raise unsupported(name, "only plain text can be asked for")
    return None
