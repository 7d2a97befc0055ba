"""The settings of a chat that /set shows and changes: how it samples, where it stops, and what it prints."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from .conversation import ChatSession

_WORDS = {"on": True, "off": False, "none": None}
_LEFT_OUT = {"logit_bias"}  # of the command line's: it would need a token id


def shown_settings(conversation: ChatSession, name: str = "") -> list[str]:
    """A line for the setting of this name, or for each one."""
    values = _values(conversation)
    names = [_named(values, name)] if name else list(values)
    width = max(map(len, names))
    return [f"{each:<{width}} {_shown(values[each])}" for each in names]


def change_setting(conversation: ChatSession, name: str, value: str) -> None:
    """Give a setting another value. No value leaves it as it is; a wrong one is an InputError."""
    from ..engine.options import generation_params

    key = _named(_values(conversation), name)
    if not value:
        return
    if key == "verbose":
        if not isinstance(_WORDS.get(value), bool):
            raise InputError(f"verbose must be on or off, got {value!r}")
        conversation.verbose = value == "on"
        return
    options: Any = {**conversation.options, key: _stop(value) if key == "stop" else _parsed(value)}
    generation_params(options)
    conversation.options = options


def _values(conversation: ChatSession) -> dict[str, Any]:
    from ..engine.options import OPTION_NAMES

    options: Any = conversation.options
    names = (name for name in OPTION_NAMES if name in options and name not in _LEFT_OUT)
    return {name: options[name] for name in names} | {"verbose": conversation.verbose}


def _named(values: dict[str, Any], name: str) -> str:
    """The setting that is meant; - and _ are the same."""
    key = name.lstrip("-").replace("-", "_").lower()
    if key not in values:
        close = difflib.get_close_matches(key, values, 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else f"the settings are {', '.join(values)}"
        raise InputError(f"{name} is not a setting; {hint}")
    return key


def _parsed(value: str) -> Any:
    """A number, on, off or none; what is none of them is left to the check of the setting."""
    if value in _WORDS:
        return _WORDS[value]
    try:
        return json.loads(value)
    except ValueError:
        return value


def _stop(value: str) -> Any:
    """Text as it is, none, or JSON: a text in quotes, for newlines, or a list of texts."""
    return _parsed(value) if value == "none" or value[0] in '["' else value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value in (None, [], ()) else json.dumps(value, ensure_ascii=False)
