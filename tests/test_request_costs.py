"""What one request may cost: each limit just inside and just outside, beside eight streams that go on."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from shaderlm.engine import EngineOptions
from shaderlm.server.errors import ApiError
from shaderlm.server.limits import Limits, check_limits
from shaderlm.server.prepare import decode
from shaderlm.server.served import ServedModel
from shaderlm.server.types.anthropic import CountTokensRequest, MessagesRequest
from shaderlm.server.types.llama_server import LlamaCompletionRequest
from shaderlm.server.types.openai import ChatRequest, CompletionRequest
from shaderlm.server.types.responses import ResponsesRequest
from shaderlm.text import RenderLimits

from .serving import Running, loader, resident_bytes, running
from .test_server import ASK
from .tiny_models import write_tiny_llama

STREAMS = 8
LIMITS = Limits(
    head_seconds=1.0,
    body_bytes=100_000,
    body_seconds=1.0,
    choices=3,
    logprobs=4,
    stop_strings=3,
    tools=3,
    grammar_bytes=2000,
    template_bytes=3000,
)
# Renders for ever if a request says so: what a long conversation does to a slow template, and the reverse.
TEMPLATE = (
    "{% for i in range(99999 if slow else 0) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}"
    "{% if large %}{% for i in range(large) %}x{% endfor %}{% endif %}{{ messages[0].content }}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = write_tiny_llama(tmp_path_factory.mktemp("costs") / "tiny.gguf", context=4096)
    load = loader(path, EngineOptions(parallel=16), limits=LIMITS)

    def limited() -> ServedModel:
        made = load()
        made.model.use_chat_template(TEMPLATE)
        made.model.limit(RenderLimits(LIMITS.template_seconds, LIMITS.template_bytes), 2.0)
        return made

    with running(limited, limits=LIMITS) as made:
        made.model.prepare_grammars()
        yield made


@dataclass
class Streams:
    """Streams that are read all the time, and the longest time between two events of one of them."""

    url: str
    worst: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)
    begun: int = 0
    ended: list[str] = field(default_factory=list)

    def read(self) -> None:
        body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 0}
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as http:
            while not self.done.is_set():
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    last = None
                    for line in answer.iter_lines():
                        now = time.monotonic()
                        if line.startswith("data:"):
                            self.begun += last is None
                            self.worst = max(self.worst, now - (last or now))
                            last = now
                        if line.startswith("error"):
                            self.ended.append(line)
                        if self.done.is_set():
                            break


@pytest.fixture(scope="module")
def streams(server: Running) -> Iterator[Streams]:
    made = Streams(server.url)
    threads = [threading.Thread(target=made.read) for _ in range(STREAMS)]
    for each in threads:
        each.start()
    deadline = time.monotonic() + 60
    while made.begun < STREAMS:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield made
    made.done.set()
    for each in threads:
        each.join(60)
    assert not made.ended


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": ASK, "max_tokens": 1, **more}


def kwargs(**given: Any) -> dict[str, Any]:
    return chat(chat_template_kwargs=given)


def tools(count: int, size: int = 10) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}", "description": "x" * size}} for i in range(count)]


LETTERS = "abcdefghijklmnopqrst"
LONGEST = {"type": "string", "const": "a" * 1500}
CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "n": (CHAT, chat(n=3), chat(n=4), "n is 4; this server takes at most 3"),
    "n of texts": (
        TEXT,
        {"prompt": "a", "n": 3},
        {"prompt": "a", "n": 1 << 30},
        "n is 1,073,741,824; this server takes",
    ),
    "logprobs": (
        TEXT,
        {"prompt": "a", "logprobs": 4},
        {"prompt": "a", "logprobs": 5},
        "logprobs is 5; this server takes at most 4",
    ),
    "top_logprobs": (
        CHAT,
        chat(logprobs=True, top_logprobs=4),
        chat(logprobs=True, top_logprobs=5),
        "top_logprobs is 5; this server takes at most 4",
    ),
    "n_probs": (
        "/completion",
        {"prompt": "a", "n_probs": 4, "n_predict": 1},
        {"prompt": "a", "n_probs": 5},
        "n_probs is 5; this server",
    ),
    "stop": (CHAT, chat(stop=["q"] * 3), chat(stop=["q"] * 4), "stop has 4 items; this server takes at most 3"),
    "stop_sequences": (
        MESSAGES,
        chat(stop_sequences=["q"] * 3),
        chat(stop_sequences=["q"] * 4),
        "stop_sequences has 4 items; this server takes at most 3",
    ),
    "tools": (CHAT, chat(tools=tools(3)), chat(tools=tools(4)), "tools has 4 items; this server takes at most 3"),
    "size of tools": (CHAT, chat(tools=tools(2)), chat(tools=tools(2, 1001)), "tools must have at most 2,000 char"),
    "schema": (
        CHAT,
        chat(json_schema=LONGEST),
        chat(json_schema={"type": "string", "const": "a" * 2001}),
        "json_schema must have at most 2,000 characters",
    ),
    "response_format": (
        CHAT,
        chat(response_format={"type": "json_object", "schema": LONGEST}),
        chat(response_format={"type": "json_object", "schema": {**LONGEST, "title": "b" * 1000}}),
        "response_format must have at most 2,000 characters",
    ),
    "text.format": (
        "/v1/responses",
        {
            "input": "a",
            "max_output_tokens": 1,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": LONGEST}},
        },
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "a" * 3000, "schema": LONGEST}}},
        "text must have at most 2,000 characters",
    ),
    "grammar": (
        TEXT,
        {"prompt": "a", "grammar": 'root ::= "a"\n' + "#" * 1900},
        {"prompt": "a", "grammar": 'root ::= "a"\n' + "#" * 2001},
        "grammar must have at most 2,000 characters",
    ),
    "a schema of gigabytes": (
        CHAT,
        chat(json_schema={"type": "integer", "multipleOf": 997}),
        chat(json_schema={"type": "integer", "multipleOf": 9_999_991}),
        r"json_schema takes (more than 2 s|too much memory) to compile.*; make it simpler",
    ),
    "a slow expression": (
        TEXT,
        {"prompt": "a", "json_schema": {"type": "string", "pattern": "^(a?){20}a{20}$"}},
        {"prompt": "a", "json_schema": {"allOf": [{"pattern": f".*{c}.{{{i}}}"} for i, c in enumerate(LETTERS, 5)]}},
        r"json_schema takes (more than 2 s|too much memory) to compile.*; make it simpler",
    ),
    "seconds of a template": (CHAT, kwargs(slow=False), kwargs(slow=True), "template .* takes more than 1 s, which is"),
    "bytes of a template": (CHAT, kwargs(large=2900), kwargs(large=3001), "makes a text of more than 3,000 bytes"),
    "tokens counted": (MESSAGES + "/count_tokens", chat(), kwargs(slow=True), "template .* takes more than 1 s, which"),
    "a template shown": ("/apply-template", chat(), kwargs(slow=True), "template .* takes more than 1 s, which is"),
}


BODIES: dict[str, Any] = {
    CHAT: ChatRequest,
    TEXT: CompletionRequest,
    MESSAGES: MessagesRequest,
    "/v1/responses": ResponsesRequest,
    "/completion": LlamaCompletionRequest,
    "/apply-template": ChatRequest,
    MESSAGES + "/count_tokens": CountTokensRequest,
}


@pytest.mark.parametrize("name", CASES)
def test_fields_have_limits(name: str) -> None:
    """Those that no template and no grammar is needed for."""
    path, inside, outside, words = CASES[name]
    check_limits(decode(json.dumps(inside).encode(), BODIES[path]), LIMITS)
    decoded = decode(json.dumps(outside).encode(), BODIES[path])
    if re.search("template|compile|makes", words):
        check_limits(decoded, LIMITS)
        return
    with pytest.raises(ApiError, match=words) as caught:
        check_limits(decoded, LIMITS)
    assert caught.value.status == 400
    assert str(caught.value.param) in words


def _told(name: str, took: float, grown: int, streams: Streams) -> None:
    gap = f"worst gap of a stream {streams.worst * 1e3:.0f} ms"
    print(f"{name}: refused after {took:.2f} s, {grown / 1e6:+.1f} MB, {gap}")
    assert grown < 50 << 20
    assert not streams.ended


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_request_costs_what_it_may(name: str, server: Running, streams: Streams) -> None:
    path, inside, outside, words = CASES[name]
    with server.client() as http:
        assert (found := http.post(path, json=inside)).status_code == 200, found.text
        before, streams.worst, started = resident_bytes(), 0.0, time.monotonic()
        answer = http.post(path, json=outside)
        took, grown = time.monotonic() - started, resident_bytes() - before
        time.sleep(0.05)
    assert answer.status_code == 400
    message = json.loads(answer.text)["error"]["message"]
    assert re.search(words, message), message
    _told(name, took, grown, streams)


def _post(size: int) -> bytes:
    return b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % size


def _body(size: int) -> bytes:
    return b'{"content": "%b"}' % (b"a" * (size - 15))


_GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
# What is sent at once and a little later, inside a limit and outside of it, and the status that this has.
SENT: dict[str, tuple[tuple[bytes, bytes], tuple[bytes, bytes], int]] = {
    "bytes of a head": (
        (_GET, b"x-a: %b\r\n\r\n" % (b"a" * 60_000)),
        (_GET, b"x-a: %b\r\n\r\n" % (b"a" * 66_000)),
        431,
    ),
    "seconds of a head": ((_GET, b"\r\n"), (_GET, b""), 408),
    "bytes of a body": ((_post(1000), _body(1000)), (_post(100_001), _body(100_001)), 413),
    "seconds of a body": ((_post(1000), _body(1000)), (_post(1000), _body(1000)[:-1]), 408),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SENT)
def test_what_is_sent_costs_what_it_may(name: str, server: Running, streams: Streams) -> None:
    inside, outside, status = SENT[name]
    assert _answered(server, *inside).startswith(b"HTTP/1.1 200")
    before, streams.worst, started = resident_bytes(), 0.0, time.monotonic()
    found = _answered(server, *outside)
    took, grown = time.monotonic() - started, resident_bytes() - before
    assert found.startswith(b"HTTP/1.1 %d" % status), found
    _told(name, took, grown, streams)


def _answered(server: Running, first: bytes, second: bytes) -> bytes:
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), 60) as client:
        client.sendall(first)
        time.sleep(0.05)
        with suppress(ConnectionError):
            client.sendall(second)
        found = b""
        with suppress(ConnectionError):
            while part := client.recv(1 << 16):
                found += part
    return found
