"""Ollama's streams through the front: an error between here and a replica is a line of JSON."""

from __future__ import annotations

import json

import pytest

from shaderlm.ray.relay import ResponseHead
from shaderlm.server.errors import ApiError

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


def test_an_error_ends_a_stream_in_the_shape_of_its_api() -> None:
    from shaderlm.ray.ingress import _event, _is_stream

    problem = ApiError(503, "the replica is gone")
    assert _is_stream(ResponseHead(200, [(b"content-type", b"application/x-ndjson")]))
    assert not _is_stream(ResponseHead(200, [(b"content-type", b"application/json")]))
    line = _event(problem, "/api/chat")
    assert line.endswith(b"}\n")
    assert json.loads(line) == {"error": "the replica is gone"}
    assert _event(problem, "/v1/chat/completions").startswith(b"event: error\ndata: ")
