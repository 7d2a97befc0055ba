"""Errors of other processes, as Ray gives them: with tracebacks, where one line is meant for people."""

from __future__ import annotations

import re

from .. import errors
from ..errors import DeviceError, InputError, ShaderlmError

_OURS = re.compile(r"^\s*shaderlm\.errors\.(\w+): (.+)$", re.MULTILINE)


def error_of(problem: Exception) -> ShaderlmError:
    """The error of ours that a process raised. Otherwise the engines are lost, and Ray says why."""
    text = str(problem)
    ours = _OURS.findall(text)
    if not ours:
        reason = next((line.strip() for line in text.splitlines() if line.strip()), type(problem).__name__)
        return DeviceError(f"Ray has ended the engines: {reason}")
    name, message = ours[-1]
    kind = getattr(errors, name, ShaderlmError)
    return next((each for each in (InputError, DeviceError) if issubclass(kind, each)), ShaderlmError)(message)
