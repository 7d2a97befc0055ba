"""The front over replicas that are none: what it takes at once, and what all replicas together answer."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from shaderlm.errors import InputError
from shaderlm.ray import cluster
from shaderlm.ray.config import cluster_config
from shaderlm.ray.relay import RelayedRequest, ResponseHead
from shaderlm.server.limits import Limits
from shaderlm.server.service import MAX_LARGE_BODIES

from .command_line import shaderlm
from .tiny_models import write_tiny_llama

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

CHAT = "/v1/chat/completions"
Answer = Callable[[RelayedRequest], tuple[int, bytes]]


class Handle:
    """A deployment's handle: each replica is a function that answers."""

    def __init__(self, *replicas: Answer, late: bool = False) -> None:
        self._replicas, self._late = replicas, late

    def options(self, **options: Any) -> Handle:
        return self

    def remote(self, request: RelayedRequest) -> _Parts:
        return _Parts(*self._replicas[0](request))

    def broadcast(self, method: str, request: RelayedRequest) -> Any:
        async def results(**options: Any) -> list[Any]:
            if self._late:
                raise TimeoutError("Timed out waiting for broadcast results.")
            return [(f"r{number}", *replica(request)) for number, replica in enumerate(self._replicas)]

        return SimpleNamespace(results_async=results)


class _Parts:
    def __init__(self, status: int, body: bytes) -> None:
        self._status, self._body = status, body

    async def __aiter__(self) -> AsyncIterator[ResponseHead | bytes]:
        yield ResponseHead(self._status, [(b"content-type", b"application/json")])
        yield self._body

    def cancel(self) -> None:
        pass


def client(handles: dict[str, Handle]) -> httpx.AsyncClient:
    """Talks to a front with these models."""
    from shaderlm.ray.ingress import Front, RequestIds

    config = cluster_config({"models": {name: {} for name in handles}})
    transport = httpx.ASGITransport(RequestIds(Front(config, handles, Limits(), "front")))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


def get(path: str, **handles: Handle) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with client(handles) as http:
            return await http.get(path)

    return asyncio.run(ask())


def test_few_large_bodies_are_read_at_once() -> None:
    reading, most = 0, 0

    async def ask() -> None:
        nonlocal reading, most
        go_on = asyncio.Event()

        async def large() -> AsyncIterator[bytes]:
            nonlocal reading, most
            reading += 1
            most = max(most, reading)
            await go_on.wait()
            yield b"{}"
            reading -= 1

        async with client({"m": Handle(lambda request: (200, b"{}"))}) as http:
            size = {"content-length": str(2 << 20)}
            requests = [http.post(CHAT, content=large(), headers=size) for _ in range(2 * MAX_LARGE_BODIES)]
            requests += [http.post(CHAT, content=large()) for _ in range(4)]  # of a size that it does not say
            tasks = [asyncio.create_task(each) for each in requests]
            while reading < MAX_LARGE_BODIES:
                await asyncio.sleep(0)
            assert (await http.post(CHAT, json={})).status_code == 200, "a small one does not wait"
            assert (await http.get("/props")).status_code == 200
            go_on.set()
            assert {each.status_code for each in await asyncio.gather(*tasks)} == {200}

    asyncio.run(ask())
    assert (most, reading) == (MAX_LARGE_BODIES, 0)


@pytest.mark.parametrize("path", ["/metrics", "/slots"])
def test_replicas_that_do_not_answer_are_an_error_to_try_again(path: str) -> None:
    answer = get(path, m=Handle(late=True))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (503, "unavailable_error")
    assert error["message"].startswith("not all replicas of m answered within 10 s")
    assert int(answer.headers["retry-after"]) > 0


def test_a_replica_that_cannot_answer_for_its_model_is_an_error_to_try_again() -> None:
    listed = json.dumps({"object": "list", "data": [{"id": "a"}]}).encode()
    fine, ends = Handle(lambda request: (200, listed)), Handle(lambda request: (503, b'{"error": {}}'))
    assert get("/v1/models", a=fine, b=fine).json()["data"] == [{"id": "a"}, {"id": "a"}]
    answer = get("/v1/models", a=fine, b=ends)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "unavailable_error")


def _replica(*busy: bool) -> Answer:
    """Answers /slots as the server does."""

    def answer(request: RelayedRequest) -> tuple[int, bytes]:
        if b"fail_on_no_slot=1" in request.query and all(busy):
            return 503, b'{"error": {}}'
        return 200, json.dumps([{"id": number, "is_processing": each} for number, each in enumerate(busy)]).encode()

    return answer


def test_slots_are_those_of_all_replicas() -> None:
    full, free = _replica(True, True), _replica(False, True)
    slots = get("/slots?fail_on_no_slot=1", a=Handle(full, free), b=Handle(full)).json()
    assert [each["id"] for each in slots] == list(range(6)), "a full replica is in the list"
    assert [each["is_processing"] for each in slots] == [True, True, False, True, True, True]
    answer = get("/slots?fail_on_no_slot=1", a=Handle(full, full), b=Handle(full))
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "all slots are busy")
    assert get("/slots", a=Handle(full, full)).status_code == 200


# What starts Ray and the front ---------------------------------------------------------------------------


def test_a_ray_that_refuses_the_gpus_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ray

    def refuse(**options: Any) -> None:
        number = options["num_gpus"]
        raise ValueError(f"Attempting to start raylet with {number} GPU, but CUDA_VISIBLE_DEVICES contains ['0'].")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(InputError) as raised, cluster.local_ray(1, 3):
        pass
    assert str(raised.value) == (
        "Ray does not start: Attempting to start raylet with 3 GPU, but CUDA_VISIBLE_DEVICES contains ['0']. "
        "WebGPU finds 3 GPUs here, and sees no such variable: unset it"
    )
    assert not os.listdir(tmp_path)


def test_a_front_that_does_not_end_in_time_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    def late(**options: Any) -> None:
        raise TimeoutError("Timed out waiting for broadcast results.")

    cluster._drain(SimpleNamespace(broadcast=lambda *_: SimpleNamespace(results=late)), 1.0)
    (line,) = caplog.messages
    assert line == "requests may not be over, and end now: Timed out waiting for broadcast results."


def test_a_port_of_another_machine_is_not_looked_for_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, asked = write_tiny_llama(tmp_path / "tiny.gguf", context=64), list[str]()

    def serve(config: Any, http: cluster.HttpOptions, *options: Any) -> bool:
        asked.append(http.url)
        return False

    monkeypatch.setattr(logging, "disable", lambda level: None)  # it would be for the tests that follow, too
    monkeypatch.setattr(cluster, "ray_at", lambda address: nullcontext())
    monkeypatch.setattr(cluster, "serve_until_signal", serve)
    monkeypatch.setattr(cluster.HttpOptions, "check_free", lambda http: pytest.fail("it is not this machine"))
    command = ("serve", "-m", tiny, "--device", "cpu", "--ray-address", "10.0.0.1:6379")
    assert shaderlm(*command, "--port", "8090").code == 0
    assert asked == ["http://127.0.0.1:8090"]
    done = shaderlm(*command, "--port", "0")
    assert done.code == 2
    assert "--port 0 is a free port of this machine" in done.err
