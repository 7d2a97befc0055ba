"""Clients that go away, wait or have no key; a server that loads, drains, or loses its device."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.responses import Response

from shaderlm.engine import EngineOptions, Handle
from shaderlm.errors import DeviceError, InputError, KernelError, ModelError
from shaderlm.graph.batch import PAGE
from shaderlm.install import install_command
from shaderlm.server import connection, llama_server, streaming
from shaderlm.server.access import Access, Origins
from shaderlm.server.app import is_quick
from shaderlm.server.chat import Chat
from shaderlm.server.limits import Limits, limits_of
from shaderlm.server.prepare import decode
from shaderlm.server.running import listen
from shaderlm.server.served import ServedModel
from shaderlm.server.service import MAX_LARGE_BODIES, Service, WriteCoalescing
from shaderlm.server.types.ollama import OllamaGenerateRequest
from shaderlm.server.types.openai import ChatRequest, CompletionRequest
from shaderlm.server.types.responses import ResponsesRequest

from .command_line import shaderlm, start
from .serving import Running, loader, running
from .test_server import ASK, chat_text
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("server")

CERTIFICATES = Path(__file__).parent / "data" / "tls"
TLS = ("--ssl-cert-file", CERTIFICATES / "server.pem", "--ssl-key-file")
NOT_TEXT = Path(__file__).parent / "data" / "vocab" / "gpt-2.gguf"
LONG: dict[str, Any] = {"messages": ASK, "temperature": 0, "ignore_eos": True, "max_tokens": 1500, "stream": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("server") / "tiny.gguf", context=2048)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Running]:
    with running(loader(path, EngineOptions(parallel=2, queue=1))) as made:
        yield made


def until(reached: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)


def idle(server: Running) -> bool:
    return not server.model.engine.sequences()


# Clients that go away ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_away_is_cancelled_and_nobody_else(
    server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: idle(server))
    expected = server.model.chat(ASK, max_tokens=300, ignore_eos=True)
    before = server.model.engine.stats().finished.get("closed", 0)
    steps = dict[str, int]()
    cancel, finish = Handle.cancel, Handle.finish

    def cancelled(handle: Handle) -> None:
        if handle.finish_reason is None:
            steps.setdefault("cancelled", server.model.engine.stats().steps)
        cancel(handle)

    def finished(handle: Handle, reason: str, error: BaseException | None) -> None:
        if reason == "closed":
            steps.setdefault("finished", server.model.engine.stats().steps)
        finish(handle, reason, error)

    monkeypatch.setattr(Handle, "cancel", cancelled)
    monkeypatch.setattr(Handle, "finish", finished)
    with server.client() as http, ThreadPoolExecutor(1) as pool:
        body = {**LONG, "max_tokens": 300, "stream": False}
        stays = pool.submit(lambda: http.post("/v1/chat/completions", json=body).json())
        leaver = _connected(server, {**LONG, "stream": stream})
        until(lambda: sum(each.completion_tokens > 0 for each in server.model.engine.sequences()) == 2)
        leaver.close()
        until(lambda: server.model.engine.stats().finished.get("closed", 0) == before + 1)
        assert steps["finished"] - steps["cancelled"] <= 1
        assert stays.result(30)["choices"][0]["message"]["content"] == expected
    until(lambda: idle(server))


def _connected(server: Running, body: Any) -> socket.socket:
    """A request that is sent, and whose answer nobody has read yet."""
    where = urlsplit(server.url)
    made = socket.create_connection((where.hostname, where.port))
    raw = json.dumps(body).encode()
    made.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw
    )
    return made


def test_who_leaves_while_it_waits_is_cancelled_too(server: Running) -> None:
    until(lambda: idle(server))
    busy = [_connected(server, LONG) for _ in range(3)]  # two run, one waits
    until(lambda: len(server.model.engine.sequences()) == 3)
    busy[2].close()
    until(lambda: len(server.model.engine.sequences()) == 2)
    for each in busy:
        each.close()
    until(lambda: idle(server))


def test_a_full_queue_is_a_429(server: Running) -> None:
    until(lambda: idle(server))
    busy = [_connected(server, LONG) for _ in range(3)]
    until(lambda: len(server.model.engine.sequences()) == 3)
    with server.client() as http:
        found = http.post("/v1/chat/completions", json={**LONG, "n": 2})
        assert (found.status_code, found.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(found.headers["retry-after"]) >= 1
        assert len(server.model.engine.sequences()) == 3
        slots = http.get("/slots", params={"fail_on_no_slot": 1})
        assert (slots.status_code, slots.json()["error"]["type"]) == (503, "unavailable_error")
    for each in busy:
        each.close()
    until(lambda: idle(server))


def test_more_generations_than_there_can_be_are_a_400(server: Running) -> None:
    until(lambda: idle(server))
    with server.client() as http:
        found = http.post("/v1/chat/completions", json={**LONG, "n": 4, "max_tokens": 1})
        assert found.status_code == 400, "it would be a 429 for ever"
        assert "4 generations, this server runs and queues 3 at most" in found.json()["error"]["message"]
        assert http.post("/v1/chat/completions", json={**LONG, "n": 3, "max_tokens": 1}).status_code == 200
    until(lambda: idle(server))


def test_a_full_queue_reads_no_bodies(server: Running) -> None:
    until(lambda: idle(server))
    busy = [_connected(server, LONG) for _ in range(3)]
    until(lambda: len(server.model.engine.sequences()) == 3)
    more = _begun(server, 1000)
    assert more.recv(1 << 16).startswith(b"HTTP/1.1 429")
    for each in [*busy, more]:
        each.close()
    until(lambda: idle(server))


def _begun(server: Running, length: int) -> socket.socket:
    """A request whose body does not come."""
    where = urlsplit(server.url)
    made = socket.create_connection((where.hostname, where.port))
    made.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % length)
    return made


def _observed(http: httpx.Client, key: str, prompt: list[int]) -> dict[str, Any]:
    """All that an answer, /slots and /metrics say, but for times."""
    headers = {"authorization": f"Bearer {key}"}
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True, "return_progress": True}
    body |= {"stream_options": {"include_usage": True}, "timings_per_token": True}
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    slots = http.get("/slots", headers=headers).json()
    metrics = http.get("/metrics", headers=headers).text
    counted = re.findall(r"^(shaderlm:(?:prefix_cache_hits|kv_cache_usage)\S*) (\S+)", metrics, re.M)
    details = [event["usage"]["prompt_tokens_details"] for event in events if event.get("usage")]
    timings = [event["timings"] for event in events if event.get("timings")]
    progress = {(each["cache"], each["total"]) for event in events if (each := event.get("prompt_progress"))}
    cached = [(each.get("cache_n"), each.get("prompt_n")) for each in timings]
    return {"details": details, "cached": cached, "progress": progress, "slots": slots, "metrics": counted}


@pytest.mark.parametrize("share", [False, True])
def test_a_key_finds_only_its_own_prompts(path: Path, share: bool) -> None:
    """A right guess and a wrong one look alike; unless prefixes are shared, and the guess has a whole page."""
    secret = [3 + i * i % 250 for i in range(3 * PAGE)]
    options = EngineOptions(parallel=2, queue=8, share_prefixes=share)
    with running(loader(path, options), keys=["owner", "attacker"], slots=True) as made, made.client() as http:
        _observed(http, "owner", secret)
        again = _observed(http, "owner", secret)
        assert again["details"][-1]["cached_tokens"] > 0
        right, wrong = (_observed(http, "attacker", ids) for ids in (secret[:40], [1, *secret[1:40]]))
        assert right["details"] == wrong["details"]
        assert right["details"][-1]["cached_tokens"] == 0
        assert right["cached"] == wrong["cached"]
        assert right["progress"] == wrong["progress"]
        assert right["slots"] == wrong["slots"]
        hits = [dict(each["metrics"]) for each in (right, wrong)]
        assert hits[0] == hits[1]
        whole = _observed(http, "attacker", secret)["details"][-1]["cached_tokens"]
        assert whole == (2 * PAGE if share else 40), "whole pages of others, or its own guess"


def test_slots_say_little_about_requests_of_others(path: Path) -> None:
    with running(loader(path), keys=["owner", "other"]) as made, made.client() as http:
        body = {"prompt": [5] * 300, "max_tokens": 1700, "n": 8, "ignore_eos": True, "stream": True}
        body["stop"] = "secret"
        for _ in range(20):  # on a busy machine an answer may end before it is looked at
            with http.stream("POST", "/v1/completions", json=body, headers={"x-api-key": "owner"}) as answer:
                next(answer.iter_lines())
                found = {key: http.get("/slots", headers={"x-api-key": key}).json()[0] for key in ("owner", "other")}
            if found["other"]["is_processing"]:
                break
        assert found["owner"]["params"]["stop"] == ["secret"]
        assert "params" not in found["other"]
        assert found["other"]["is_processing"]


def test_few_large_bodies_are_read_at_the_same_time(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    until(lambda: idle(server))
    service = server.service
    slow = [_begun(server, 2 << 20) for _ in range(MAX_LARGE_BODIES)]
    until(service.large_bodies.locked)
    monkeypatch.setattr(service, "limits", Limits(body_seconds=0.01))
    with server.client() as http, ThreadPoolExecutor(1) as pool:
        body = json.dumps({"prompt": "x" * (2 << 20)}).encode()
        waits = pool.submit(lambda: http.post("/v1/completions", content=body, timeout=60).status_code)
        small = {**LONG, "stream": False, "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=small).status_code == 200
        assert not waits.done()
        monkeypatch.undo()
        for each in slow:
            each.close()
        assert waits.result(60) == 400, "too long for the context"
    until(lambda: not service.large_bodies.locked())


@pytest.mark.parametrize("size", [1000, 2 << 20])
def test_a_body_that_does_not_come(server: Running, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "limits", Limits(body_seconds=0.01))
    slow = _begun(server, size)
    assert slow.recv(1 << 16).startswith(b"HTTP/1.1 408")
    slow.close()


def _head(server: Running, *parts: bytes) -> bytes:
    """What comes back for a head that is sent in parts."""
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), 60) as client:
        with suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
        found = b""
        with suppress(ConnectionError):
            while b"}" not in found and (part := client.recv(1 << 16)):
                found += part
    return found


_GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


def test_large_heads(server: Running) -> None:
    inside = b"x-large: " + b"a" * 65_000 + b"\r\nconnection: close\r\n\r\n"
    assert _head(server, _GET, inside).startswith(b"HTTP/1.1 200")
    for outside in (
        b"x-large: " + b"a" * 66_000 + b"\r\n\r\n",
        b"".join(b"x-%d: %b\r\n" % (i, b"a" * 60) for i in range(1000)) + b"\r\n",
    ):
        found = _head(server, _GET + outside)
        assert found.startswith(b"HTTP/1.1 431")
        assert b"more than 65,536 bytes, which is the most" in found
    assert _head(server, b"GET /" + b"a" * 70_000).startswith(b"HTTP/1.1 431")
    with server.client() as http:
        assert http.get("/health").status_code == 200


def test_a_header_of_96_mebibytes_takes_no_memory(server: Running) -> None:
    before = _peak()
    found = _head(server, _GET, b"x-large: ", *([b"a" * (1 << 20)] * 96))
    assert not found or found.startswith(b"HTTP/1.1 431"), "a client that goes on may not see it"
    assert _peak() - before < 50 << 20


def _peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_a_trailer_that_never_ends(server: Running) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-large: "
    before = _peak()
    _head(server, head, *([b"a" * (1 << 20)] * 96))
    assert _peak() - before < 50 << 20


@pytest.mark.parametrize("parser", ["httptools", "h11"])
def test_a_head_that_does_not_come(path: Path, parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "find_spec", lambda name: name == parser)
    with running(loader(path), limits=Limits(head_seconds=0.05)) as made:
        found = _head(made, b"GET /health HTT")
        assert found.startswith(b"HTTP/1.1 408")
        assert b"more than 0.05 s to arrive" in found
        with made.client() as http:
            assert [http.get("/health").status_code for _ in range(3)] == [200] * 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("heads=3", "one of head_bytes, head_seconds, body_bytes"),
        ("heads=3", "; got 'heads=3'"),
        ("logprobs=21", "must be at most 20, got '21'"),
        ("grammar_bytes=1048577", "must be at most 1,048,576, got '1048577'"),
        ("body_bytes=1.5", "must be a whole number above 0, got '1.5'"),
        ("head_seconds=-1", "must be a number above 0, got '-1'"),
        ("head_seconds=nan", "must be a number above 0, got 'nan'"),
        ("head_seconds", "must be a number above 0, got ''"),
    ],
)
def test_limits_that_are_none(given: str, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        limits_of([given])


def test_limits_by_name() -> None:
    assert limits_of(["body-bytes=10", "head_seconds=2.5"]) == Limits(body_bytes=10, head_seconds=2.5)


def test_long_work_is_not_done_by_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    until(lambda: idle(server))
    threads = set[int | None]()
    response, submit = Chat.response, server.model.engine.submit

    def answered(chat: Chat, handles: Any) -> Any:
        threads.add(threading.get_ident())
        return response(chat, handles)

    def submitted(request: Any) -> Any:
        threads.add(threading.get_ident())
        return submit(request)

    monkeypatch.setattr(Chat, "response", answered)
    monkeypatch.setattr(server.model.engine, "submit", submitted)
    monkeypatch.setattr("shaderlm.server.service._FEW_TOKENS", 1)
    with server.client() as http:
        small = {**LONG, "stream": False, "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=small).status_code == 200
    assert threads
    assert server.thread.ident not in threads


@pytest.mark.long  # fewer tokens fit the buffers of a connection
def test_a_slow_reader_holds_up_nobody_and_loses_nothing(server: Running) -> None:
    until(lambda: idle(server))
    expected = server.model.chat(ASK, max_tokens=1500, ignore_eos=True)
    slow = _connected(server, {**LONG, "logprobs": True, "top_logprobs": 20})
    until(lambda: bool(server.model.engine.sequences()))
    with server.client() as http:
        body = {"messages": ASK, "temperature": 0, "max_tokens": 5}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    until(lambda: idle(server), 30)
    raw = b""
    while b"[DONE]" not in raw:
        raw += slow.recv(1 << 20)
    slow.close()
    lines = [line for line in raw.decode().splitlines() if line.startswith("data: {")]
    assert chat_text([json.loads(line.removeprefix("data: ")) for line in lines]) == expected


def test_silence_is_filled_with_comments(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SILENT_SECONDS", 0.1)
    until(lambda: idle(server))
    busy = [_connected(server, LONG) for _ in range(2)]
    until(lambda: len(server.model.engine.sequences()) == 2)
    with server.client() as http, http.stream("POST", "/v1/chat/completions", json=LONG) as response:
        lines = response.iter_lines()
        assert next(lines) == ": waiting"
        for each in busy:
            each.close()
        assert any(line.startswith("data: ") for line in lines)
    until(lambda: idle(server))


def test_many_streams_write_together(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    until(lambda: idle(server))
    expected = server.model.chat(ASK, max_tokens=100, ignore_eos=True)

    def chunks() -> list[Any]:
        with server.client() as http:
            text = http.post("/v1/chat/completions", json={**LONG, "max_tokens": 100}).text
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]

    monkeypatch.setattr(WriteCoalescing, "BUSY_STREAMS", 1)
    for seconds in (0.05, 3600):  # the end of a stream does not wait
        monkeypatch.setattr(WriteCoalescing, "INTERVAL_SECONDS", seconds)
        together = chunks()
        assert chat_text(together) == expected
        assert len(together) < 50, "several tokens in each"


@pytest.mark.parametrize(("busy", "interval"), [(0.0, 0.008), (0.002, 0.008), (0.006, 0.024), (0.1, 0.05)])
def test_writing_takes_a_quarter_of_the_time(busy: float, interval: float) -> None:
    """As long as a writing took, three times as long is left to others: within limits, for text that does not halt."""

    async def second_interval() -> float:
        coalescing, handle = WriteCoalescing(), SimpleNamespace(finish_reason=None, end_waiter=None)

        async def write() -> None:
            await coalescing.next_write(cast("Handle", handle))
            end = time.thread_time() + busy
            while time.thread_time() < end:
                pass

        await write()
        await asyncio.sleep(0)
        return coalescing.seconds

    assert asyncio.run(second_interval()) == pytest.approx(interval, rel=0.2)


def test_streams_that_wait_do_not_slow_down_those_that_write(server: Running) -> None:
    until(lambda: idle(server))
    busy = [_connected(server, LONG) for _ in range(3)]
    until(lambda: len(server.model.engine.sequences()) == 3 and server.service.coalescing.streams == 2)
    for each in busy:
        each.close()
    until(lambda: idle(server) and server.service.coalescing.streams == 0)


def test_a_stream_that_cannot_be_written_leaves_nothing_behind(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: idle(server))
    before = server.model.engine.stats().finished.get("closed", 0)

    def broken(chat: Chat, handles: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(Chat, "writer", broken)
    with server.client() as http:
        assert http.post("/v1/chat/completions", json=LONG).status_code == 500
    until(lambda: idle(server))
    assert server.model.engine.stats().finished.get("closed", 0) == before + 1


@pytest.mark.parametrize(
    ("kind", "body", "quick"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}, False),
        (ResponsesRequest, {"input": "x"}, False),
        (CompletionRequest, {"prompt": "x", "n": 2}, False),
        (CompletionRequest, {"prompt": "x", "grammar": 'root ::= "a"'}, False),
        (CompletionRequest, {"prompt": "x", "temperature": 0}, True),
        (CompletionRequest, {"prompt": ["x"] * 100}, False),
        (CompletionRequest, {"prompt": [5, 6, 7]}, True),
        (CompletionRequest, {"prompt": [[5], [6]]}, False),
        (CompletionRequest, {"prompt": "x", "logit_bias": {"1": 1}}, False),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": [1]}, False),
        (OllamaGenerateRequest, {"prompt": "x"}, False),
        (OllamaGenerateRequest, {"prompt": "x", "raw": True}, True),
        (OllamaGenerateRequest, {"prompt": "x", "raw": True, "format": "json"}, False),
    ],
)
def test_only_what_is_quick_is_prepared_in_the_event_loop(kind: Any, body: dict[str, Any], quick: bool) -> None:
    assert is_quick(decode(json.dumps(body).encode(), kind)) is quick


def test_an_address_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` may be ::1 as well, on a machine without IPv6. 192.0.2.1 is nobody's."""
    known = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    absent = socket.getaddrinfo("192.0.2.1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [*absent, *known])
    (found,) = listen("localhost", 0)
    with found:
        assert found.getsockname()[0] == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: absent)
    with pytest.raises(OSError, match="cannot listen on localhost, port 0: "):
        listen("localhost", 0)


def test_many_connections(server: Running) -> None:
    until(lambda: idle(server))
    where = urlsplit(server.url)
    held = [socket.create_connection((where.hostname, where.port)) for _ in range(1000)]
    for each in held:
        each.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for each in held:
        assert each.recv(1 << 16).startswith(b"HTTP/1.1 200")
        each.close()


def test_slots_show_what_runs(server: Running) -> None:
    until(lambda: idle(server))
    with server.client() as http, http.stream("POST", "/v1/chat/completions", json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        running_now = [slot for slot in http.get("/slots").json() if slot["is_processing"]]
    assert len(running_now) == 1
    assert running_now[0]["state"] == "decode"
    assert running_now[0]["next_token"][0]["n_decoded"] > 0
    until(lambda: idle(server))


# Errors after the first byte -----------------------------------------------------------------------------


def test_an_error_within_a_stream_is_one_event_and_the_end(path: Path) -> None:
    with running(loader(path)) as server, server.client() as http:
        model = server.model
        with http.stream("POST", "/v1/chat/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            model.engine.close()
            rest = [line for line in lines if line]
        at = rest.index("event: error")
        error = json.loads(rest[at + 1].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("unavailable_error", 503)
        assert error["message"].startswith("the server is about to end")
        assert len(rest) == at + 2
        assert http.post("/v1/chat/completions", json=LONG).status_code == 503


def test_a_response_that_fails(path: Path) -> None:
    with running(loader(path)) as server, server.client() as http:
        body = {"input": "x", "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/responses", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.model.engine.close()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert events[-1]["response"]["status"] == "failed"
        assert events[-1]["response"]["error"]["code"] == "unavailable_error"


@pytest.mark.parametrize("stream", [True, False])
def test_a_fault_within_a_generation_is_logged(
    server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(request: Any) -> Handle:
        handle = Handle(server.model.engine, request, 0)
        handle.submitted_at = 1.0
        handle.finish("error", ModelError("weights are missing"))
        return handle

    monkeypatch.setattr(server.model.engine, "submit", broken)
    with server.client() as http:
        found = http.post("/v1/chat/completions", json={**LONG, "stream": stream})
    assert (found.status_code, found.json()["error"]["type"]) == (500, "server_error")
    assert "weights are missing" in caplog.text


def test_a_fault_of_a_route_is_logged(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(served: Any, **on: bool) -> Any:
        raise KernelError("it does not compile")

    monkeypatch.setattr(llama_server, "props", broken)
    with server.client() as http:
        assert http.get("/props").status_code == 500
    assert "it does not compile" in caplog.text


# Keys and origins ----------------------------------------------------------------------------------------


def test_keys(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    with running(loader(path), keys=["first", "zweiter-schlüssel"]) as server, server.client() as http:
        assert http.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "firs"}, {"Authorization": "first"}):
            found = http.get("/v1/models", headers=headers)
            assert (found.status_code, found.json()["error"]["type"]) == (401, "authentication_error")
            assert "first" not in found.text
        good: list[Any] = [{"Authorization": "Bearer first"}, {"x-api-key": "first"}]
        good += [{"authorization": "bearer first"}, {"x-api-key": "zweiter-schlüssel".encode()}]
        for admitted in good:
            assert http.get("/v1/models", headers=admitted).status_code == 200
        assert http.post("/v1/messages", json={}).json()["type"] == "error"
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert not [line for line in ours if "first" in line or "schlüssel" in line], "keys are not logged"


def test_origins(server: Running) -> None:
    with server.client() as http:
        good = http.get("/v1/models", headers={"Origin": "http://localhost:3000"})
        assert good.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert "origin" in good.headers["vary"].lower()
        assert good.headers["access-control-expose-headers"] == "Retry-After"
        assert http.get("/v1/models", headers={"Origin": server.url}).status_code == 200
        for origin in ("http://localhost.evil.com", "http://evil.com", "null", "http://evil.com/localhost"):
            bad = http.get("/v1/models", headers={"Origin": origin})
            assert (bad.status_code, bad.json()["error"]["type"]) == (403, "permission_error")
            assert "access-control-allow-origin" not in bad.headers
        asks = {"Origin": "http://127.0.0.1:1", "Access-Control-Request-Method": "POST"}
        asks["Access-Control-Request-Headers"] = "authorization"
        preflight = http.options("/v1/chat/completions", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
        refused = http.options("/v1/chat/completions", headers={**asks, "Origin": "http://evil.com"})
        assert refused.status_code == 200
        assert not [name for name in refused.headers if name.startswith("access-control")]
        assert preflight.headers["access-control-allow-headers"] == "authorization"


@pytest.mark.parametrize(
    ("host", "name", "status"),
    [
        ("127.0.0.1", "127.0.0.1:8080", 200),
        ("127.0.0.1", "localhost", 200),
        ("127.0.0.1", "[::1]:8080", 200),
        ("127.0.0.1", "evil.com:8080", 403),
        ("127.0.0.1", "127.0.0.1.evil.com", 403),
        ("127.0.0.1", "localhost@evil.com", 403),
        ("0.0.0.0", "192.168.1.5:8080", 200),
        ("0.0.0.0", "evil.com", 403),
        ("gpu.lan", "GPU.lan:8080", 200),
        ("0.0.0.0", "chat.example", 200),
    ],
)
def test_names_of_attackers_that_resolve_to_this_machine(host: str, name: str, status: int) -> None:
    """Their pages are of the same origin as the server: there is no Origin with a GET, and their own with a POST."""

    def asked(path: str, keys: Sequence[str] = (), origins: Sequence[str] = ("http://chat.example",)) -> int:
        access = Access(Response("secret"), keys, Origins(origins), host)

        async def ask() -> int:
            transport = httpx.ASGITransport(access)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
                return (await http.get(path, headers={"Host": name})).status_code

        return asyncio.run(ask())

    assert asked("/props") == asked("/v1/models") == status
    assert asked("/health") == 200
    assert asked("/props", keys=["k"]) == 401, "a page has no key"
    assert asked("/props", origins=["*"]) == 200


def test_an_attacker_that_posts(server: Running) -> None:
    with server.client() as http:
        headers = {"Host": "evil.com:80", "Origin": "http://evil.com:80"}
        assert http.post("/v1/chat/completions", json=LONG, headers=headers).status_code == 403


@pytest.mark.parametrize(
    ("allowed", "origin", "admitted"),
    [
        ("localhost", "http://localhost", True),
        ("localhost", "https://localhost:8443", True),
        ("localhost", "http://127.0.0.1:5173", True),
        ("localhost", "http://[::1]:5173", True),
        ("localhost", "http://localhost.evil.com", False),
        ("localhost", "http://evil.com#localhost", False),
        ("localhost", "http://localhost@evil.com", False),
        ("localhost", "file://localhost", False),
        ("localhost", "null", False),
        ("https://a.example", "https://a.example", True),
        ("https://a.example/", "https://a.example:443", True),
        ("https://a.example", "http://a.example", False),
        ("https://a.example", "https://a.example:8443", False),
        ("https://a.example", "https://a.example.evil.com", False),
        ("*", "http://anything", True),
    ],
)
def test_who_is_admitted(allowed: str, origin: str, admitted: bool) -> None:
    assert Origins([allowed]).admits(origin) is admitted


def test_an_origin_that_is_none() -> None:
    with pytest.raises(InputError, match=r"--cors-origins must be .*, got 'a.example'"):
        Origins(["a.example"])


# Loading, draining, losing the device --------------------------------------------------------------------


def test_while_the_model_is_loaded(path: Path) -> None:
    go_on = threading.Event()

    def slow() -> ServedModel:
        assert go_on.wait(60)
        return loader(path)()

    with running(slow, wait=False) as server, server.client() as http:
        for found in (http.get("/health"), http.post("/v1/chat/completions", json=LONG)):
            assert (found.status_code, found.json()["error"]["type"]) == (503, "unavailable_error")
            assert "retry-after" in found.headers
        go_on.set()
        until(lambda: http.get("/health").status_code == 200)


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def broken() -> ServedModel:
        raise ModelError("the file is broken")

    with running(broken, wait=False) as server:
        server.thread.join(60)
        assert not server.thread.is_alive()
        assert isinstance(server.service.models.failure, ModelError)


def test_a_lost_device_is_a_503_and_the_model_comes_back(path: Path) -> None:
    with running(loader(path)) as server, server.client() as http:
        first = server.model
        first.engine._inbox.lost = DeviceError("the device is gone")
        found = http.post("/v1/chat/completions", json=LONG)
        assert (found.status_code, found.json()["error"]["type"]) == (503, "unavailable_error")
        until(lambda: http.get("/health").status_code == 200)
        assert server.model is not first
        body = {**LONG, "stream": False, "max_tokens": 3}
        assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_a_device_that_is_lost_while_the_server_drains() -> None:
    """The model is not loaded again, and is closed at the end."""
    closed, loads = list[str](), list[int]()

    class Lost:
        lost = DeviceError("gone")

        async def adrain(self, seconds: float) -> bool:
            service.finished(cast("ServedModel", None), [])
            return False

        def close(self) -> None:
            closed.append("engine")

    report = SimpleNamespace(path=Path("tiny.gguf"))
    model = SimpleNamespace(engine=Lost(), report=report, nbytes=0, close=lambda: closed.append("model"))

    def load() -> ServedModel:
        loads.append(1)
        return cast("ServedModel", SimpleNamespace(model=model, name="tiny"))

    service = Service(load)

    async def run() -> None:
        loaded = asyncio.Event()
        service.models.on_loaded = lambda served: loaded.set()
        service.start()
        await loaded.wait()
        await service.drain(0.1)
        assert not service.models.is_loading
        await service.stop()

    asyncio.run(run())
    assert (closed, loads) == (["engine", "model"], [1])


def test_draining_lets_requests_finish(path: Path) -> None:
    with running(loader(path), drain=60) as server, server.client() as http:
        expected = server.model.chat(ASK, max_tokens=400, ignore_eos=True)
        with http.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 400}) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.server.should_exit = True
            with server.client() as late:
                until(lambda: late.get("/health").status_code == 503)
                refused = late.post("/v1/chat/completions", json=LONG)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert "about to end" in refused.json()["error"]["message"]
            rest = [first, *lines]
        chunks = [json.loads(line.removeprefix("data: ")) for line in rest if line.startswith("data: {")]
        assert chat_text(chunks) == expected
        assert "data: [DONE]" in rest


def test_draining_ends_after_its_time(path: Path) -> None:
    with running(loader(path), drain=0.2) as server, server.client() as http:
        with http.stream("POST", "/v1/chat/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            server.server.should_exit = True
            rest = list(lines)
        assert "event: error" in rest, "the answer is not waited for"
        server.thread.join(60)
        assert not server.thread.is_alive()


def test_clients_that_do_not_come_to_an_end_are_disconnected(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shaderlm.server.running._SLACK_SECONDS", 0.1)
    with running(loader(path), drain=0.1) as server:
        slow = _begun(server, 1000)
        with server.client() as http:
            assert http.get("/health").status_code == 200, "the server has seen the other one, too"
        server.server.should_exit = True
        server.thread.join(60)
        assert not server.thread.is_alive()
    assert slow.recv(1 << 16) == b""
    slow.close()
    assert not caplog.records


# The command ---------------------------------------------------------------------------------------------


def test_the_command_serves_until_sigterm(path: Path) -> None:
    options = ("--port", 0, "--device", "cpu", "--ctx-size", 512, "--drain", 5, "--alias", "a,b", "--api-key", "k")
    process = start("serve", "-m", path, *options)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        address = next(line.split()[-1] for line in lines if line.startswith("listening on "))
        assert any("is ready on" in line for line in lines)
        with httpx.Client(base_url=address, trust_env=False, headers={"x-api-key": "k"}) as http:
            assert http.get("/v1/models").json()["data"][0]["meta"]["n_ctx"] == 512
            assert http.get(f"/v1/models/{path}").status_code == 404, "there are aliases"
            body = {**LONG, "max_tokens": 200}
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                found = response.iter_lines()
                next(found)
                os.kill(process.pid, signal.SIGTERM)
                assert list(found)[-2:][0] == "data: [DONE]"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--n-predict", 0], 2, "at least 1, got 0"),
        (["--temp", -1], 2, "temperature must be 0 (greedy) or a positive number"),
        (["--mirostat", 1], 2, "mirostat must be 0 (off) or 2 (Mirostat 2.0), got 1"),
        (["--api-key", ""], 2, "a key must not be empty"),
        (["--api-key", "a,,b"], 2, "a key must not be empty"),
        (["--api-key", "\udcff"], 2, "must be UTF-8"),
        (["--kv-memory", "much"], 2, "a size such as 512M or 8G"),
        (["--cors-origins", "a.example"], 2, "--cors-origins must be"),
        (["--ssl-key-file", __file__], 2, "belong together"),
        (["--api-key-file", os.devnull], 2, "--api-key-file"),
        (["--api-key-file", NOT_TEXT], 2, "must be UTF-8"),
        (["--chat-template-file", NOT_TEXT], 2, "must be UTF-8"),
        ([*TLS, __file__], 2, "no line -----BEGIN PRIVATE"),
        (["--ssl-cert-file", __file__, "--ssl-key-file", CERTIFICATES / "server.key"], 2, "no line -----BEGIN CERT"),
        (["--ssl-cert-file", CERTIFICATES / "server.pem"], 2, "belong together"),
        (["--ssl-cert-file", CERTIFICATES / "none", "--ssl-key-file", __file__], 2, "does not exist"),
        ([*TLS, CERTIFICATES / "other.key"], 2, "other.key is not the key of --ssl-cert-file"),
        ([*TLS, CERTIFICATES / "locked.key"], 2, "locked.key needs a password"),
        (["--chat-template", "{% if %}"], 2, "shaderlm: --chat-template is broken: "),
        (["--device", "unobtainium"], 1, "no adapter matches 'unobtainium'"),
        (["--ctx-size", 10**6], 2, "context must be a whole number from 1 to"),
        (["--kv-memory", "1"], 2, "at least one page"),
    ],
)
def test_mistakes_of_the_command(path: Path, options: list[Any], code: int, words: str) -> None:
    found = shaderlm("serve", "-m", path, "--device", "cpu", "--port", 0, *options)
    assert (found.code, words in found.err) == (code, True), found.err
    assert "--kv-memory" in options or "listening on" not in found.err, "nothing listens before the arguments hold"


def test_a_wrong_model_ends_the_command_before_it_listens(tmp_path: Path) -> None:
    broken = tmp_path / "broken.txt"
    broken.write_text("{% if %}")
    plain = write_tiny_llama(tmp_path / "plain.gguf", metadata={"llama.klingon": 7})
    for options, words in (
        (("-m", "smolm2-135m"), "did you mean smollm2-135m"),
        (("-m", tmp_path / "none.gguf"), "does not exist"),
        (("-m", plain), "llama.klingon is 7"),
        (("-m", plain, "--chat-template-file", broken), f"--chat-template-file {broken} is broken: "),
    ):
        found = shaderlm("serve", "--device", "cpu", "--port", 0, *options)
        assert found.code in (1, 2)
        assert words in found.err
        assert "listening on" not in found.err


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "base.gguf", template=False)
    process = start("serve", "-m", path, "--host", "0.0.0.0", "--port", 0, "--device", "cpu", "--no-warmup")
    try:
        assert process.stderr is not None
        ready = next(line for line in iter(process.stderr.readline, "") if "is ready on" in line)
    finally:
        process.kill()
        process.communicate()
    assert "/v1/completions continues texts. It has no chat template, and --chat-template gives it one" in ready
    assert re.search(r": http://localhost:\d+/v1/completions ", ready), "nobody can open 0.0.0.0"
    with running(loader(path)) as made, made.client() as http:
        for route, body in (
            ("/v1/chat/completions", {"messages": ASK}),
            ("/v1/messages", {"messages": ASK, "max_tokens": 5}),
            ("/v1/messages/count_tokens", {"messages": ASK}),
            ("/v1/responses", {"input": "Hello"}),
            ("/apply-template", {"messages": ASK}),
        ):
            answer = http.post(route, json=body)
            assert answer.status_code == 400
            assert "use /v1/completions, or start the server with --chat-template" in answer.json()["error"]["message"]
        assert http.post("/v1/completions", json={"prompt": "the", "max_tokens": 2}).status_code == 200


def test_an_address_that_cannot_be_used(path: Path, server: Running) -> None:
    port = urlsplit(server.url).port
    found = shaderlm("serve", "-m", path, "--device", "cpu", "--port", port)
    reason = f"cannot listen on 127.0.0.1, port {port}: address already in use; give another --host or --port"
    assert found == (1, "", f"shaderlm: {reason}\n")
    found = shaderlm("serve", "-m", path, "--device", "cpu", "--host", "no such host", "--api-key", "k")
    assert (found.code, found.err.count("\n")) == (1, 1)
    assert "cannot listen on no such host, port 8080: " in found.err


def test_ctrl_c_waits_for_requests_once(path: Path) -> None:
    """The second one ends them, with an error event and without a traceback."""
    process = start("serve", "-m", path, "--port", 0, "--device", "cpu")
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        address = next(line.split()[-1] for line in lines if line.startswith("listening on "))
        assert any("is ready on" in line for line in lines)
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=LONG, timeout=60, trust_env=False) as response:
            found = response.iter_lines()
            next(found)
            process.send_signal(signal.SIGINT)
            assert next(lines) == "waiting up to 30 s for a request; Ctrl-C once more does not wait\n"
            process.send_signal(signal.SIGINT)
            assert "event: error" in list(found)
        assert process.wait(60) == 130
        assert re.fullmatch(r"\S+ \S+ POST /v1/chat/completions 200 .* error, \S+ s\n", process.stderr.read())
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_while_the_model_is_loaded() -> None:
    process = start("serve", "-m", "synthetic:llama-3.2-1b:q4_0", "--port", 0, "--device", "cpu")  # takes seconds
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("listening on ")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = shaderlm("serve")
    assert found.code == 2
    assert found.err.count("\n") == 1
    assert install_command("serve") in found.err
