"""Renders chat templates. A template is a program that anyone may have written: this file runs in a limited process.

Jinja's sandbox keeps a template from the interpreter; the process bounds what it costs. Chat templates expect more than
Jinja has: `raise_exception`, `strftime_now`, `tojson` as JSON is (Jinja's own is for HTML), `{% break %}`,
`{% continue %}`, and `{% generation %}` blocks, which matter to training only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LONGEST_PROBLEM = 300  # characters of a template's own words
_MAX_TEMPLATES = 8  # that stay compiled


def make() -> Callable[[dict[str, Any]], tuple[str, str]]:
    """What the process answers with: the word "text" and a prompt, or another one and what is wrong."""
    return _Renderer().answer


class _Renderer:
    """Compiles templates, keeps the last ones, and renders."""

    def __init__(self) -> None:
        self._environment = environment()
        self._compile = lru_cache(_MAX_TEMPLATES)(self._environment.from_string)

    def answer(self, request: dict[str, Any]) -> tuple[str, str]:
        source, variables = request["source"], request["variables"]
        try:
            template: Template = self._compile(source)
            if variables is None:  # does it show tools?
                names = find_undeclared_variables(self._environment.parse(source))
                return "text", " ".join(sorted(names & {"tools", "functions"}))
        except MemoryError:
            raise
        except Exception as problem:  # beside syntax errors, whatever computing its constants may raise
            return "broken", one_line(problem)
        try:
            return self._rendered(template, variables, request["max_bytes"])
        except _RefusalError as problem:
            return "refused", str(problem)
        except MemoryError:
            raise
        except Exception as problem:  # it is a program, and may fail like one
            return "failed", one_line(problem)

    def _rendered(self, template: Template, variables: dict[str, Any], max_bytes: int) -> tuple[str, str]:
        parts, remaining = list[str](), max_bytes
        for part in template.generate(**variables):
            remaining -= len(part.encode(errors="surrogatepass"))
            if remaining < 0:
                return "large", ""
            parts.append(part)
        return "text", "".join(parts)


class _RefusalError(Exception):
    """A template says that it cannot render a conversation."""


class _Environment(ImmutableSandboxedEnvironment):
    """Templates change nothing, except that some keep lists, such as of ids: those of a request are its own."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """May a template read this?"""
        return super().is_safe_attribute(obj, attr, value) or (isinstance(obj, list) and attr in ("append", "pop"))


def environment() -> ImmutableSandboxedEnvironment:
    """What templates are compiled and rendered in."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _tojson
    return environment


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks what a model says, for training; it is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What is between the two."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: object) -> None:
    raise _RefusalError(one_line(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_items,
    )


def _items(value: Any) -> list[Any]:
    """What filters such as `map` give, as a list."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")


def one_line(problem: object) -> str:
    """What is wrong, as one short line."""
    return " ".join(str(problem).split())[:_LONGEST_PROBLEM] or type(problem).__name__
