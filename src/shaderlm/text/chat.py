"""A checkpoint's chat template, rendered in a sandbox: templates come from files that anyone may have made.

What templates expect beyond Jinja is here too: `raise_exception`, `strftime_now`, `tojson` as JSON is (Jinja's own is
for HTML), `{% break %}` and `{% continue %}`, and `{% generation %}` blocks, which matter to training only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InputError, ModelError

ROLES = ("system", "user", "assistant", "tool")
_LONGEST_PROBLEM = 300  # characters of a template's own words in an error


class ChatTemplate:
    """Renders messages to the text that a chat checkpoint was trained on.

    `source` is what the file has, whatever that is. It is compiled when it is first rendered: a model whose template
    is broken can still continue text.
    """

    def __init__(self, source: object, *, bos: str = "", eos: str = "") -> None:
        self._source = source
        self._special = {"bos_token": bos, "eos_token": eos}

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation: messages with "role" (system, user, assistant, tool) and "content"."""
        _check(messages)
        template = self._template
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,  # defined, as they are where templates are written: they test them with `is not none`
                documents=None,
                **self._special,
            )
        except InputError:  # _refuse
            raise
        except Exception as problem:  # it is a program, and may fail like one
            raise ModelError(f"the chat template of this model failed: {_one_line(problem)}") from problem

    @cached_property
    def _template(self) -> jinja2.Template:
        if not isinstance(self._source, str):
            given = type(self._source).__name__
            raise ModelError(f"tokenizer.chat_template must be a string, the file has a value of type {given}")
        try:
            return _environment().from_string(self._source)
        except Exception as problem:  # beside syntax errors, whatever computing its constants may raise
            raise ModelError(f"the chat template of this model is broken: {_one_line(problem)}") from problem


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InputError(f"chat: messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise InputError("chat: messages must hold at least one message, got none")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            given = message.get("role") if isinstance(message, Mapping) else type(message).__name__
            raise InputError(f"chat: message {i} must have a role of {', '.join(ROLES)}; got {given!r}")
        if not isinstance(message.get("content"), str):
            raise InputError(f"chat: message {i} must have a content that is a str, got {message.get('content')!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _tojson
    return environment


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks what a model says, for training; it is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: object) -> None:
    """What templates call to say that they cannot render a conversation."""
    raise InputError(f"the chat template refuses this conversation: {_one_line(message)}")


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


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())[:_LONGEST_PROBLEM] or type(problem).__name__
