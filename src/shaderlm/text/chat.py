"""A checkpoint's chat template, rendered in a sandbox: templates come from files that anyone may have made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InputError

ROLES = ("system", "user", "assistant", "tool")


def _refuse(message: str) -> None:
    """What templates call to say that they cannot render a conversation."""
    raise InputError(f"the chat template refuses this conversation: {message}")


class ChatTemplate:
    """Renders messages to the text that a chat checkpoint was trained on."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self._special = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as problem:
            raise InputError(f"the chat template of this model is broken: {problem}") from problem

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation: messages with "role" (system, user, assistant, tool) and "content"."""
        if not messages:
            raise InputError("chat: messages must hold at least one message, got none")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or message.get("role") not in ROLES:
                given = message.get("role") if isinstance(message, Mapping) else type(message).__name__
                raise InputError(f"chat: message {i} must have a role of {', '.join(ROLES)}; got {given!r}")
            if not isinstance(message.get("content"), str):
                raise InputError(f"chat: message {i} must have a content that is a str, got {message.get('content')!r}")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as problem:
            if isinstance(problem, InputError):
                raise
            raise InputError(f"the chat template of this model failed: {problem}") from problem
