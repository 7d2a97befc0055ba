"""A checkpoint's chat template, rendered in a sandbox: templates come from files that anyone may have made."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import InputError, ModelError
from .tools import messages_with_tools

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

    @property
    def source(self) -> object:
        """The template as it was given."""
        return self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation: messages with "role" (system, user, assistant, tool) and "content".

        tools: descriptions of functions in OpenAI's form; those that the template cannot show go to the system message.
        continue_final_message: the prompt ends within the last message, which the model goes on with. kwargs: further
        variables of the template, such as enable_thinking.
        """
        _check(messages)
        if (tools or any(map(_has_calls, messages))) and not self.knows_tools:
            messages, tools = messages_with_tools(messages, tools), None
        given = [_for_template(i, message) for i, message in enumerate(messages)]
        end = ""
        if continue_final_message:
            end = _unused_character(given)
            given[-1]["content"] = (given[-1]["content"] or "") + end
        own = {
            "messages": given,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "tools": tools,  # None: defined, as it is where templates are written: they test it with `is not none`
            "documents": None,
            **self._special,
        }
        taken = sorted(set(own) & set(kwargs or ()))
        if taken:
            raise InputError(f"chat: the template's variable {taken[0]!r} is set by other means; leave it out")
        template = self._template
        try:
            text = template.render(**own, **(kwargs or {}))
        except InputError:  # _refuse
            raise
        except Exception as problem:  # it is a program, and may fail like one
            raise ModelError(f"the chat template of this model failed: {_one_line(problem)}") from problem
        if end and end not in text:
            raise InputError("the chat template leaves out the last message, which therefore cannot be continued")
        return text.partition(end)[0] if end else text

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        special: Collection[str],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> tuple[str, str]:
        """The same, with a mark inside every special token that the messages hold; and the mark, a character.

        So the template's own special tokens can be told from text of the messages (`Tokenizer.encode_marked`).
        """
        _check(messages)
        contents = "".join(_texts([messages, tools]))
        mark = _unused_character([messages, tools])
        present = [text for text in special if len(text) > 1 and text in contents]
        if not present:
            return self.render(messages, tools=tools, **options), mark
        pattern = re.compile("|".join(map(re.escape, present)))

        def marked(content: str) -> str:
            while pattern.search(content):  # again: special tokens may overlap
                content = pattern.sub(lambda found: found[0][0] + mark + found[0][1:], content)
            return content

        return self.render(_mapped(messages, marked), tools=_mapped(tools, marked), **options), mark

    @cached_property
    def knows_tools(self) -> bool:
        """Does the template show tools?"""
        from jinja2.meta import find_undeclared_variables  # late, as below

        return "tools" in find_undeclared_variables(self._template.environment.parse(str(self._source)))

    def compile(self) -> None:
        """Compile it now: a broken template is a ModelError here, and not when it is first rendered."""
        self._template  # noqa: B018 (makes it)

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
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise InputError(f"chat: message {i} must have a content that is a str, got {content!r}")
        _check_calls(i, message.get("tool_calls"))


def _check_calls(i: int, calls: Any) -> None:
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise InputError(f"chat: the tool_calls of message {i} must be a list, got {type(calls).__name__}")
    for call in calls or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        given = function if isinstance(function, Mapping) else {}
        if not isinstance(given.get("name"), str) or not isinstance(given.get("arguments"), (str, Mapping)):
            expected = "{'function': {'name': …, 'arguments': …}}"
            raise InputError(f"chat: a tool call of message {i} must be {expected}, got {reprlib.repr(call)}")


def _has_calls(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _for_template(i: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: arguments of tool calls are JSON text in OpenAI's form, and a mapping here."""
    given = dict(message)
    if not given.get("tool_calls"):
        given.pop("tool_calls", None)  # templates ask whether it is there
        return given
    calls = []
    for call in given["tool_calls"]:
        function = dict(call["function"])
        if isinstance(function["arguments"], str):
            function["arguments"] = _arguments(i, function["arguments"])
        calls.append({**call, "function": function})
    return {**given, "content": given.get("content"), "tool_calls": calls}


def _arguments(i: int, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        expected = "must have arguments that are a JSON object"
        raise InputError(f"chat: a tool call of message {i} {expected}, got {reprlib.repr(text)}")
    return found


def _texts(value: Any) -> Iterator[str]:
    """All strings within lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The same lists and mappings with other strings in them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(each, change) for key, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, (list, tuple)) else value


def _unused_character(value: Any) -> str:
    """One, for private use, that these strings do not have."""
    contents = set[str]().union(*_texts(value))
    return next(chr(code) for code in range(0xF0000, 0xFFFFD) if chr(code) not in contents)


def _refuse(message: object) -> None:
    """What templates call to say that they cannot render a conversation."""
    raise InputError(f"the chat template refuses this conversation: {_one_line(message)}")


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())[:_LONGEST_PROBLEM] or type(problem).__name__
