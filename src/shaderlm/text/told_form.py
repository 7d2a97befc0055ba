"""The form of calls that a template tells its model in words, where it does not show calls of the assistant.

Two ways to say it are read: an example of a JSON object between tags, and a tag that is "followed by a JSON list".
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .call_form import CallForm, Hole, JsonArguments

_TAG = r"(?P<begin><[^<>\s]{1,60}>|\[[A-Z_]{2,60}\])"
_EXAMPLE = re.compile(
    _TAG + r'\s{0,4}(?P<list>\[?)\s{0,4}\{\s{0,8}"(?P<name>name|tool_name)"\s{0,4}:[^{}\n]{1,80}?,'
    r'\s{0,8}"(?P<arguments>arguments|parameters)"\s{0,4}:[^\n]{1,80}?\}\s{0,4}\]?\s{0,4}(?P<end></[^<>\s]{1,60}>)'
)
_WORDS = re.compile(_TAG + r"\W{0,4}followed by a JSON (?P<kind>list|array|object)\b", re.I)
_MAX_CHARACTERS = 100_000  # of the text that is searched


def told_form(with_tools: str, without: str) -> CallForm | None:
    """The form that the first of these prompts tells, and the second does not; None: it tells none."""
    begin = len(os.path.commonprefix([with_tools, without]))  # noqa: RUF071 (they are no paths)
    text = with_tools[max(0, begin - 1) :][:_MAX_CHARACTERS]
    example, words = _EXAMPLE.search(text), _WORDS.search(text)
    if example is not None:
        is_list, keys, end = bool(example["list"]), (example["name"], example["arguments"]), example["end"]
        tag = example["begin"]
    elif words is not None:
        is_list, keys, end, tag = words["kind"].lower() != "object", ("name", "arguments"), "", words["begin"]
    else:
        return None
    lead, middle = f'{{"{keys[0]}": "', f'", "{keys[1]}": '
    opened, closed = (f"{tag}[", f"]{end}") if is_list else (tag, end)
    between = ", " if is_list else f"{end}{tag}"
    return CallForm(
        first=(opened + lead, Hole.NAME, middle),
        between=("}" + between + lead, Hole.NAME, middle) if is_list or end else (),
        last=("}" + closed,),
        arguments=JsonArguments(),
        told=True,
    )


def messages_with_calls(messages: Sequence[Mapping[str, Any]], form: CallForm) -> list[dict[str, Any]]:
    """A conversation whose calls are written into its contents, for a template that does not show them."""
    return [_with_calls(message, form) for message in messages]


def _with_calls(message: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = message.get("tool_calls")
    if not calls:
        return plain
    text = ""
    for i, call in enumerate(calls):
        head = form.first if i == 0 or not form.between else form.between
        name = json.dumps(call["function"]["name"], ensure_ascii=False)[1:-1]
        text += "".join(part if isinstance(part, str) else name for part in head)
        arguments = call["function"]["arguments"]
        text += arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    text += "".join(part for part in form.last if isinstance(part, str))
    return {**plain, "content": (message.get("content") or "") + text}
