"""A checkpoint's chat template: from messages to a prompt. It is rendered in a limited process, by `jinja.py`."""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import InputError, ModelError
from ..limited import LimitedProgram
from .call_form import TAGGED, CallForm
from .call_probe import FormError, Render, probe
from .chat_output import thinking_tags
from .json_size import check_json_size
from .told_form import messages_with_calls, told_form
from .tools import messages_with_tools

IMAGE: Mapping[str, Any] = {"type": "image"}  # the part of a content that stands for an image
ROLES = ("system", "user", "assistant", "tool")
_THINKING = "enable_thinking"  # what most templates call it
_MAX_PROBLEM_BYTES = 4096  # of an answer that is no prompt
_EXAMPLE = {"name": "f", "description": "Does it.", "parameters": {"type": "object", "properties": {}}}
_PROBES = 5  # the form of calls may take as long as so many prompts
_jinja = LimitedProgram(str(Path(__file__).with_name("jinja.py")), ("jinja2", "markupsafe"))


def start_rendering() -> None:
    """Start the process that renders, while a model is loaded."""
    _jinja.start()


@dataclass(frozen=True)
class RenderLimits:
    """What rendering a chat template may cost."""

    seconds: float = 1.0
    max_bytes: int = 4_000_000  # of its text, in UTF-8


class _FailedError(ModelError):
    """A template failed, as a program does."""


class ChatTemplate:
    """Renders messages to the text that a chat checkpoint was trained on.

    `source` is what the file has, whatever that is. It is compiled when it is first rendered: a model whose template
    is broken can still continue text.
    """

    def __init__(
        self,
        source: object,
        *,
        bos: str = "",
        eos: str = "",
        limits: RenderLimits = RenderLimits(),
        name: str = "the chat template of this model",
    ) -> None:
        self.source, self._limits, self._name = source, limits, name
        self._seconds = 0.0  # that renderings took
        self._special = {"bos_token": bos, "eos_token": eos}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        thinking: bool | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation: messages with "role" (system, user, assistant, tool) and "content".

        A content is a text, or a list of parts {"type": "text", "text": …}, which are lines.
        tools: descriptions of functions in OpenAI's form; those that the template cannot show go to the system message.
        continue_final_message: the prompt ends within the last message, which the model goes on with. thinking: may the
        model think; None: as the template has it. kwargs: further variables of the template.
        """
        prompt, _ = self.render_marked(
            messages,
            (),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            thinking=thinking,
            kwargs=kwargs,
        )
        return prompt

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        special: Collection[str],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        thinking: bool | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, str]:
        """The same, with a mark inside every special token of messages, tools and kwargs; and the mark, a character.

        So the template's own special tokens can be told from text of a request (`Tokenizer.encode_marked`).
        """
        messages = _text_messages(messages)
        kwargs = ({} if thinking is None else {_THINKING: thinking}) | dict(kwargs or {})
        reserved = {"messages", "add_generation_prompt", "tools", "documents", *self._special}
        clashes = sorted(reserved & set(kwargs or ()))
        if clashes:
            raise InputError(f"chat: the template's variable {clashes[0]!r} is set by other means; leave it out")
        has_calls = any(map(_has_calls, messages))
        in_messages = (tools or has_calls) and not self.knows_tools
        conversation, form = messages, None
        if not in_messages:
            form = self._form if has_calls and isinstance(self._form, CallForm) else None
            conversation = [_for_template(i, message, form) for i, message in enumerate(messages)]
        # Before anything that takes as long as the text is long, and deep: nobody else runs meanwhile.
        check_json_size("the conversation", [conversation, tools, kwargs], self._limits.max_bytes)
        (conversation, tools, kwargs), mark = _marked([conversation, tools, kwargs], special)
        if in_messages:
            conversation, tools = messages_with_tools(conversation, tools), None
        elif form is not None and form.told:
            conversation = messages_with_calls(conversation, form)
        end = ""
        if continue_final_message and isinstance(conversation[-1].get("content"), list):
            raise InputError("chat: a last message with images cannot be continued")
        if continue_final_message:
            end = _unused_character([conversation, mark])
            conversation = [
                *conversation[:-1],
                {**conversation[-1], "content": (conversation[-1].get("content") or "") + end},
            ]
        listed = any(isinstance(each.get("content"), list) for each in conversation)
        if self._wants_parts if listed else self._leaves_texts_out:
            conversation = [_in_parts(each) for each in conversation]
        variables = {
            **self._variables(tools),
            **(kwargs or {}),
            "messages": conversation,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = self._ask(variables)
        except _FailedError:  # some templates take every content for a text
            texts = [{**each, "content": each.get("content") or ""} for each in conversation]
            if texts == [*conversation]:
                raise
            text = self._ask({**variables, "messages": texts})
        if end and end not in text:
            raise InputError("the chat template leaves out the last message, which therefore cannot be continued")
        if end:
            return text.partition(end)[0], mark
        if variables["add_generation_prompt"] and variables.get(_THINKING) is False:
            text += self._end_of_thought(text)
        return text, mark

    @cached_property
    def _leaves_texts_out(self) -> bool:
        """Does the template say nothing of a text, without an error, and show it in parts?"""
        if "type" not in str(self.source):
            return False
        message = {"role": "user", "content": "qztext"}
        try:
            shown = [
                "qztext" in self._ask({**self._variables(None), "messages": [each]})
                for each in (message, _in_parts(message))
            ]
        except (_FailedError, InputError):
            return False
        return shown == [False, True]

    @cached_property
    def _wants_parts(self) -> bool:
        """Does the template show a content only if it comes in parts?"""
        message = {"role": "user", "content": "qztext"}
        try:
            return "qztext" not in self._ask({**self._variables(None), "messages": [message]})
        except (_FailedError, InputError):
            return True

    def _end_of_thought(self, prompt: str) -> str:
        """What ends a thought before it begins, where the template does not do so."""
        source, text = str(self.source), prompt.rstrip()
        tags = thinking_tags(source)
        if tags is None or text.endswith(tags[1]):
            return ""
        if text.endswith(tags[0]):
            return tags[1]
        return "" if _THINKING in source else "".join(tags)

    def _functions(self, tools: Any) -> dict[str, str]:
        """Of a template that takes tools as text: their JSON."""
        if "functions" not in str(self.source) or "tools" in self._names:
            return {}
        return {"functions": json.dumps(tools, ensure_ascii=False, indent=4) if tools else ""}

    @property
    def knows_tools(self) -> bool:
        """Does the template show tools?"""
        return bool({"tools", "functions"}.intersection(self._names))

    @property
    def call_form(self) -> CallForm:
        """How a model with this template writes calls. InputError: it shows tools, and has no form for calls."""
        if isinstance(self._form, CallForm):
            return self._form
        needed = "a template that shows calls of the assistant is needed (--chat-template-file)"
        raise InputError(f"tools: {self._name} cannot express calls: {self._form}; {needed}")

    @cached_property
    def _form(self) -> CallForm | str:
        """The form of calls, or why there is none. One whose template has no tools is told in the messages."""
        if not self.knows_tools:
            return TAGGED
        most = self._seconds + _PROBES * self._limits.seconds

        def render(messages: Any, tools: Any, prompt: bool) -> str | None:
            if self._seconds >= most:
                raise ModelError(f"{self._name} takes too long to show calls")
            variables = {**self._variables(tools), "messages": messages, "add_generation_prompt": prompt}
            try:
                return self._ask(variables)
            except (_FailedError, InputError):
                return None

        try:
            return probe(render)
        except FormError as problem:
            return self._told_form(render) or str(problem)

    def _told_form(self, render: Render) -> CallForm | None:
        """What the template tells its model of calls, if it shows their results."""
        user, tools = {"role": "user", "content": "x"}, [{"type": "function", "function": _EXAMPLE}]
        with_tools, without = render([user], tools, True), render([user], [], True)
        form = None if with_tools is None or without is None else told_form(with_tools, without)
        result = {"role": "tool", "tool_call_id": "1", "content": "qzresult"}
        if form is None or "qzresult" not in (render([user, user, result], tools, True) or ""):
            return None
        return form

    def _variables(self, tools: Any) -> dict[str, Any]:
        """What every rendering has."""
        # None: defined, as it is where templates are written: they test it with `is not none`
        return {**_dates(), **self._functions(tools), "tools": tools, "documents": None, **self._special}

    @cached_property
    def _names(self) -> Sequence[str]:
        """Of the variables that tools may be in, those that the template has."""
        return self._ask(None).split()

    def compile(self) -> None:
        """Compile it now: a broken template is a ModelError here, and not when it is first rendered."""
        self.knows_tools  # noqa: B018 (compiles it)

    def _ask(self, variables: Mapping[str, Any] | None) -> str:
        """The prompt with these variables; None: of the variables of tools, the names that it has."""
        if not isinstance(self.source, str):
            raise ModelError(
                f"tokenizer.chat_template must be a string, the file has a value of type {type(self.source).__name__}"
            )
        limits = self._limits
        request = {"source": self.source, "variables": variables, "max_bytes": limits.max_bytes}
        kind, text, seconds = _jinja.ask(request, limits.seconds, limits.max_bytes + _MAX_PROBLEM_BYTES)
        self._seconds += seconds
        if kind == "text":
            return text
        if kind == "refused":
            raise InputError(f"the chat template refuses this conversation: {text}")
        problems = {
            "broken": f"is broken: {text}",
            "failed": f"failed: {text}",
            "large": f"makes a text of more than {limits.max_bytes:,} bytes, which is the most",
            "time": f"takes more than {limits.seconds:g} s, which is the most",
            "memory": "needs too much memory",
            "ended": "ends the process that renders it",
        }
        raise (_FailedError if kind == "failed" else ModelError)(f"{self._name} {problems[kind]}")


def _dates() -> dict[str, str]:
    """Today, as templates take it that have no clock."""
    now = datetime.now()
    return {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y")}


def join_parts(parts: Iterable[str]) -> str:
    """The text of a content that comes in parts."""
    return "\n".join(parts)


def content_text(content: Any, where: str = "a message") -> Any:
    """A content in parts, as OpenAI writes it, as one text; with images, as parts. Everything else is left as it is."""
    if not isinstance(content, (list, tuple)):
        return content
    has_images = any(part == IMAGE for part in content)
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if part == IMAGE:
            continue
        if kind != "text" or not isinstance(part.get("text"), str):
            expected = '{"type": "text", "text": …}; models take text alone'
            raise InputError(f"chat: a part of the content of {where} must be {expected}, got {reprlib.repr(part)}")
    if has_images:
        return [part if part == IMAGE else {"type": "text", "text": part["text"]} for part in content]
    return join_parts(part["text"] for part in content)


def _text_messages(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Messages whose contents are texts. What is no message is an InputError."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        example = '[{"role": "user", "content": "Hello"}]'
        raise InputError(f"chat: messages must be a list such as {example}, got {type(messages).__name__}")
    if not messages:
        raise InputError("chat: messages must hold at least one message, got none")
    checked: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else type(message).__name__
            raise InputError(f"chat: message {i} must have a role of {', '.join(ROLES)}; got {role!r}")
        content = content_text(message.get("content"), f"message {i}")
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise InputError(f"chat: message {i} must have a content that is a str, got {content!r}")
        _check_calls(i, message.get("tool_calls"))
        checked.append(message if content is message.get("content") else {**message, "content": content})
    return checked


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _check_calls(i: int, calls: Any) -> None:
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise InputError(f"chat: the tool_calls of message {i} must be a list, got {type(calls).__name__}")
    for call in calls or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        parts = function if isinstance(function, Mapping) else {}
        if not isinstance(parts.get("name"), str) or not isinstance(parts.get("arguments"), (str, Mapping)):
            expected = "{'function': {'name': …, 'arguments': …}}"
            raise InputError(f"chat: a tool call of message {i} must be {expected}, got {reprlib.repr(call)}")


def _has_calls(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _for_template(i: int, message: Mapping[str, Any], form: CallForm | None) -> dict[str, Any]:
    """A message as templates expect it: arguments of tool calls are JSON text in OpenAI's form, and a mapping here.

    form: what the template wants otherwise.
    """
    converted = dict(message)
    if form is not None and form.short_ids and isinstance(converted.get("tool_call_id"), str):
        converted["tool_call_id"] = _short_id(converted["tool_call_id"])
    if not converted.get("tool_calls"):
        converted.pop("tool_calls", None)  # templates ask whether it is there
        return converted
    calls = []
    for call in converted["tool_calls"]:
        function = dict(call["function"])
        if isinstance(function["arguments"], str):
            function["arguments"] = _arguments(i, function["arguments"])
        if form is not None and form.as_text:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": function})
        if form is not None and form.short_ids:
            calls[-1]["id"] = _short_id(str(call.get("id", len(calls))))
    content = converted.get("content")
    if form is not None and form.empty_content:
        content = content or ""
    return {**converted, "content": content, "tool_calls": calls}


def _short_id(made: str) -> str:
    """Nine letters and digits for an id, the same each time."""
    return made if re.fullmatch("[A-Za-z0-9]{9}", made) else hashlib.sha256(made.encode()).hexdigest()[:9]


def _arguments(i: int, text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        expected = "must have arguments that are a JSON object"
        raise InputError(f"chat: a tool call of message {i} {expected}, got {reprlib.repr(text)}")
    return arguments


def _marked(value: Any, special: Collection[str]) -> tuple[Any, str]:
    """The same lists and mappings with a mark inside every special token of their texts; and the mark."""
    contents = "".join(_texts(value))
    mark = _unused_character(value)
    present = [text for text in special if len(text) > 1 and text in contents]
    if not present:
        return value, mark
    pattern = re.compile("|".join(map(re.escape, present)))

    def change(content: str) -> str:
        while pattern.search(content):  # again: special tokens may overlap
            content = pattern.sub(lambda match: match[0][0] + mark + match[0][1:], content)
        return content

    return _mapped(value, change), mark


def _texts(value: Any) -> Iterator[str]:
    """All strings within lists and mappings, keys too. In no particular order."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            pending += each
            pending += each.values()
        elif isinstance(each, (list, tuple)):
            pending += each


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The same lists and mappings with other strings in them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(each, change) for key, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, (list, tuple)) else value


def _unused_character(value: Any) -> str:
    """One, for private use, that these strings do not have."""
    contents = set[str]().union(*_texts(value))
    character = next((chr(code) for code in range(0xF0000, 0xFFFFD) if chr(code) not in contents), None)
    if character is None:
        raise InputError("chat: the text has all characters from U+F0000 to U+FFFFC; leave one of them out")
    return character
