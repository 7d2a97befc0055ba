"""Requests in the rows of tables: what Parquet, Arrow and NumPy hold, as the JSON that it stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np


def request_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as a request: its body is JSON, or a struct. A ValueError or RecursionError says what it is not."""
    request: dict[str, Any] = _as_json(row)
    body = request.get("body")
    try:
        if isinstance(body, (str, bytes)):
            request["body"] = json.loads(body)
        json.dumps(request)
    except (TypeError, ValueError) as problem:  # a TypeError: a time, a decimal number
        raise ValueError(f"body: {problem}") from None
    return request


def _as_json(value: Any) -> Any:
    """A struct has the fields of all rows, and null where a row has none, at every depth."""
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, np.ndarray)):
        if len(value) and all(isinstance(each, tuple) for each in value):  # Arrow's map
            return {key: _as_json(item) for key, item in value}
        return [_as_json(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value
