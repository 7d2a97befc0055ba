"""Errors of other processes, as Ray gives them: with tracebacks, where one line is meant for people."""

from __future__ import annotations

import logging
import re

from .. import errors
from ..errors import DeviceError, InputError, ShaderlmError

_OURS = re.compile(r"^\s*shaderlm\.errors\.(\w+): (.+)$", re.MULTILINE)
_OTHERS = re.compile(r"^\s*([\w.]+(?:Error|Exception)\b.*)$", re.MULTILINE)


def error_of(problem: Exception) -> ShaderlmError:
    """The error of ours that a process raised. Otherwise Ray says why there are no engines any more."""
    text = str(problem)
    ours = _OURS.findall(text)
    if not ours:
        lines = _OTHERS.findall(text) or [line.strip() for line in text.splitlines() if line.strip()]
        return DeviceError(f"Ray has ended the engines: {lines[0] if lines else type(problem).__name__}")
    name, message = ours[-1]
    kind = getattr(errors, name, ShaderlmError)
    return next((each for each in (InputError, DeviceError) if issubclass(kind, each)), ShaderlmError)(message)


def hush_ray_data() -> None:
    """It prints an error with its traceback before it raises it, and says that it draws no bars."""
    for handler in logging.getLogger("ray.data").handlers:
        if handler.get_name() == "console":  # not its file
            handler.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR and not record.getMessage().startswith("Progress bars")
