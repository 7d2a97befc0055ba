"""What chat templates expect beyond Jinja: `raise_exception`, `strftime_now`, `tojson` as JSON is (Jinja's own is for
HTML), `{% break %}` and `{% continue %}`, and `{% generation %}` blocks, which matter to training only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def environment(refuse: Callable[[object], None]) -> ImmutableSandboxedEnvironment:
    """A sandbox for templates; `refuse` is what they call to say that they cannot render a conversation."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _tojson
    return environment


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks what a model says, for training; it is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What is between the two."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
