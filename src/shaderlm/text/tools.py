"""Functions that a chat model may call: their descriptions, how its template shows them, and how it writes calls."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from ..errors import InputError
from .json_size import check_json_size

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Tool:
    """A function that can be called."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema of an object
    strict: bool  # whether arguments must validate, or as far as the schema is understood


@dataclass(frozen=True)
class ToolChoice:
    """Which functions an answer may call, and whether it must."""

    tools: tuple[Tool, ...]
    required: bool
    parallel: bool  # may it call several?


def read_tools(descriptions: Any, choice: Any, parallel: bool = True) -> ToolChoice | None:
    """`tools` and `tool_choice` in OpenAI's form, checked. None: nothing can be called."""
    if not isinstance(descriptions, (list, tuple, NoneType)):
        raise InputError(f"tools must be a list, got {type(descriptions).__name__}")
    check_json_size("tools", descriptions)
    tools, names = tuple(_read_tool(i, each) for i, each in enumerate(descriptions or ())), set[str]()
    for tool in tools:
        if tool.name in names:
            raise InputError(f"tools: the function {tool.name!r} is there twice; give each a name of its own")
        names.add(tool.name)
    if choice in (None, "auto", "none"):
        return ToolChoice(tools, False, parallel) if tools and choice != "none" else None
    if not tools:
        raise InputError(f"tool_choice is {choice!r}, but there are no tools; give tools, or leave it out")
    if choice == "required":
        return ToolChoice(tools, True, parallel)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _allowed_tools(choice, tools, parallel)
    return ToolChoice((_named_tool(choice, tools),), True, False)


def _allowed_tools(choice: Any, tools: Sequence[Tool], parallel: bool) -> ToolChoice:
    """Some of the tools. The model is told all: what is cached of a prompt stays good."""
    allowed = choice.get("allowed_tools")
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(listed, (list, tuple)) or not listed or allowed.get("mode") not in ("auto", "required"):
        expected = "{'allowed_tools': {'mode': 'auto' or 'required', 'tools': [{'type': 'function', …}]}}"
        raise InputError(f"tool_choice of the type allowed_tools must have {expected}, got {reprlib.repr(choice)}")
    names = {_named_tool(each, tools).name for each in listed}
    return ToolChoice(tuple(tool for tool in tools if tool.name in names), allowed["mode"] == "required", parallel)


def _named_tool(choice: Any, tools: Sequence[Tool]) -> Tool:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        expected = "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': NAME}}"
        raise InputError(f"tool_choice must be {expected}, got {reprlib.repr(choice)}")
    tool_named = next((tool for tool in tools if tool.name == name), None)
    if tool_named is None:
        names = ", ".join(tool.name for tool in tools)
        raise InputError(f"tool_choice names the function {name!r}; the tools are {names}")
    return tool_named


def _read_tool(i: int, tool: Any) -> Tool:
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if kind != "function" or not isinstance(function, Mapping):
        expected = "{'type': 'function', 'function': {'name': …, 'parameters': …}}"
        raise InputError(f"tools[{i}] must be {expected}, got {reprlib.repr(tool)}")
    try:
        json.dumps(tool, allow_nan=False, default=dict)
    except (TypeError, ValueError, RecursionError) as problem:
        raise InputError(f"tools[{i}] must be JSON; {' '.join(str(problem).split())}") from None
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name or len(name) > 256:
        raise InputError(f"tools[{i}].function.name must be a text of 1 to 256 characters, got {reprlib.repr(name)}")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        expected = "a JSON schema of an object"
        raise InputError(f"tools[{i}].function.parameters must be {expected}, got {reprlib.repr(parameters)}")
    return Tool(name, {"type": "object", **parameters}, function.get("strict") is True)


# Templates that know no tools ------------------------------------------------------------------------------------

_INTRODUCTION = """You can call functions. Each line between <tools> and </tools> describes one:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments, between these tags:
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>
The result comes back between <tool_response> and </tool_response>."""


def messages_with_tools(messages: Messages, tools: Messages | None) -> list[dict[str, Any]]:
    """A conversation for a template that knows no tools: they are in the system message, calls and results in text."""
    plain, results = list[dict[str, Any]](), dict[int, list[str]]()  # of neighbours, by the place of their message
    for message in messages:
        if message.get("tool_calls"):
            calls = [_written(call) for call in message["tool_calls"]]
            plain.append({"role": message["role"], "content": "\n".join([*_some(message.get("content")), *calls])})
        elif message.get("role") == "tool":
            if len(plain) - 1 not in results:
                results[len(plain)] = []
                plain.append({"role": "user"})
            results[len(plain) - 1].append(f"<tool_response>\n{message.get('content')}\n</tool_response>")
        else:
            plain.append(dict(message))
    for place, texts in results.items():
        plain[place]["content"] = "\n".join(texts)
    if tools:
        words = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        first = plain.pop(0)["content"] if plain and plain[0].get("role") == "system" else ""
        plain.insert(0, {"role": "system", "content": "\n\n".join([*_some(first), words])})
    return plain


def _some(text: str | None) -> list[str]:
    return [text] if text else []


def _written(call: Mapping[str, Any]) -> str:
    """A call as the model writes it."""
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {text or "{}"}}}\n</tool_call>'
