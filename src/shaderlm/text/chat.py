"""A checkpoint's chat template, rendered in a sandbox: templates come from files that anyone may have made."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import InputError, ModelError

if TYPE_CHECKING:
    import jinja2

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

    def render_marked(self, messages: Sequence[Mapping[str, Any]], special: Collection[str]) -> tuple[str, str]:
        """The same, with a mark inside every special token that the contents hold; and the mark, a character.

        So the template's own special tokens can be told from text of the messages (`Tokenizer.encode_marked`).
        """
        _check(messages)
        contents = "".join(message["content"] for message in messages)
        mark = next(chr(code) for code in range(0xF0000, 0xFFFFD) if chr(code) not in contents)  # private use
        present = [text for text in special if len(text) > 1 and text in contents]
        if not present:
            return self.render(messages), mark
        pattern = re.compile("|".join(map(re.escape, present)))

        def marked(content: str) -> str:
            while pattern.search(content):  # again: special tokens may overlap
                content = pattern.sub(lambda found: found[0][0] + mark + found[0][1:], content)
            return content

        return self.render([{**message, "content": marked(message["content"])} for message in messages]), mark

    @cached_property
    def _template(self) -> jinja2.Template:
        if not isinstance(self._source, str):
            given = type(self._source).__name__
            raise ModelError(f"tokenizer.chat_template must be a string, the file has a value of type {given}")
        from .jinja import environment  # late: Jinja takes 30 ms to import

        try:
            return environment(_refuse).from_string(self._source)
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


def _refuse(message: object) -> None:
    """What templates call to say that they cannot render a conversation."""
    raise InputError(f"the chat template refuses this conversation: {_one_line(message)}")


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())[:_LONGEST_PROBLEM] or type(problem).__name__
