"""What `shaderlm.ray` decides without Ray: configuration, adapters, pages, routing, and the way through ASGI."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.cli.serve_replicas import resources
from shaderlm.errors import DeviceError, InputError
from shaderlm.gpu import WEBGPU_DEFAULT, DeviceCaps
from shaderlm.ray import loopback, versions
from shaderlm.ray.adapters import device_of
from shaderlm.ray.config import ModelConfig, cluster_config, deployment_name
from shaderlm.ray.metrics import merge
from shaderlm.ray.pages import BOUNDARIES, PAGE_BYTES, page_hashes, prompt_bytes, session_hash
from shaderlm.ray.relay import RelayedRequest, ResponseHead, responses
from shaderlm.ray.routing import Keys, PrefixRouting
from shaderlm.server.app import make_routes
from shaderlm.server.service import Service

from .serving import loader
from .tiny_models import write_tiny_llama

# Configuration -------------------------------------------------------------------------------------------


def test_words_of_a_command_line_are_a_configuration() -> None:
    config = cluster_config({"model": "smollm2-135m", "replicas": "2", "device": "cpu", "api_keys": "a,b"})
    assert config.models == {"smollm2-135m": ModelConfig(model="smollm2-135m", replicas=2, device="cpu")}
    assert config.keys == ["a", "b"]
    assert config.models["smollm2-135m"].gpus == 0
    assert list(cluster_config({}).models) == ["smollm2-135m"]


def test_a_file_has_several_models(tmp_path: Path) -> None:
    path, keys = tmp_path / "cluster.toml", tmp_path / "keys"
    path.write_text(
        'metrics = false\n[models.small]\nmodel = "a.gguf"\n[models.large]\nmodel = "b.gguf"\nnum_gpus = 0.5\n'
        "sampling = {temperature = 0.7}\n"
    )
    keys.write_text("one\n\ntwo\n")
    config = cluster_config({"config": str(path), "metrics": "true", "api_key_file": str(keys)})
    assert list(config.models) == ["small", "large"]
    assert (config.models["large"].gpus, config.models["small"].gpus) == (0.5, 1)
    assert (config.models["large"].sampling, config.models["small"].sampling) == ({"temperature": 0.7}, {})
    assert (config.metrics, config.keys) == (True, ["one", "two"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"replica": "2"}, "unknown field `replica`"),
        ({"replicas": "two"}, "Expected `int`"),
        ({"replicas": "0"}, "replicas of smollm2-135m must be at least 1, got 0"),
        ({"replicas": "3", "max_replicas": "2"}, "max_replicas of smollm2-135m must be at least replicas, got 2 and 3"),
        ({"num_gpus": "2"}, "an engine has one device; got 2"),
        ({"num_gpus": "1", "device": "cpu"}, "the device must be auto"),
        ({"sampling": {"top_q": 1}}, "unknown option 'top_q'"),
        ({"sampling": {"xtc_probability": 2}}, "xtc_probability must be a number in 0 … 1"),
        ({"models": {}}, "at least one model"),
        ({"models": {"a b": {}, "a-b": {}}}, "must differ in letters and digits"),
        ({"models": {"ingress": {}}}, "must differ"),
        ({"config": "/nowhere.toml"}, "cannot read /nowhere.toml"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(args: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        cluster_config(args)
    assert message in str(raised.value)


def test_names_of_deployments_have_no_slashes() -> None:
    assert deployment_name("/models/Llama 3.gguf") == "models-Llama-3.gguf"
    assert deployment_name("//") == "model"


def test_another_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: "2.61.0")
    with pytest.raises(InputError, match=r"ray 2\.60, got 2\.61\.0"):
        versions.check_ray()
    monkeypatch.setattr(versions, "version", lambda name: "2.60.3")
    versions.check_ray()


def test_a_ray_of_this_machine_stays_on_it() -> None:
    environment: dict[str, str] = {}
    loopback.prepare(environment)
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert len(environment["RAY_AUTH_TOKEN"]) == 64
    own = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "1"}
    loopback.prepare(own)
    assert (own["RAY_AUTH_MODE"], own["RAY_USAGE_STATS_ENABLED"]) == ("disabled", "1")
    assert "RAY_AUTH_TOKEN" not in own


# Adapters ------------------------------------------------------------------------------------------------


def _caps(name: str, kind: str = "discrete", backend: str = "Vulkan") -> DeviceCaps:
    return replace(WEBGPU_DEFAULT, name=name, kind=kind, backend=backend)


_SOFTWARE, _OWN = _caps("llvmpipe", "software"), _caps("Intel UHD", "integrated")
_MACHINES = [
    [_caps("H200"), _caps("H200"), _caps("H200"), _SOFTWARE],
    [_caps("A"), _caps("B"), _OWN, _SOFTWARE, _caps("A", backend="OpenGL"), _caps("B", backend="OpenGL")],
    [_OWN, _SOFTWARE],
]


@pytest.mark.parametrize(("adapters", "count"), [*zip(_MACHINES, (3, 2, 1), strict=True)])
def test_two_gpus_of_ray_are_two_adapters(adapters: list[DeviceCaps], count: int) -> None:
    """`choose` takes a number in the list of adapters in hardware: so numbers that differ are adapters that differ."""
    hardware = [caps for caps in adapters if not caps.software]
    devices = [int(device_of([str(gpu)], adapters)) for gpu in range(count)]
    assert len(set(devices)) == count
    assert all(hardware[each].backend == "Vulkan" for each in devices)
    with pytest.raises(DeviceError, match=f"WebGPU finds {count} here"):
        device_of([str(count)], adapters)


def test_a_replica_has_one_gpu() -> None:
    with pytest.raises(DeviceError, match="one device, and Ray gave the GPUs 0, 1"):
        device_of(["0", "1"], _MACHINES[0])
    with pytest.raises(DeviceError, match="WebGPU finds 0 here: none"):
        device_of(["0"], [_SOFTWARE])
    with pytest.raises(DeviceError, match="must be a number"):
        device_of(["GPU-8f1c"], _MACHINES[0])


# Pages ---------------------------------------------------------------------------------------------------


def _messages(system: str, *turns: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, *({"role": "user", "content": turn} for turn in turns)]}


def test_prompts_share_the_hashes_of_whole_pages() -> None:
    first = page_hashes(prompt_bytes(_messages("x" * 3000, "one")), None, "m")
    second = page_hashes(prompt_bytes(_messages("x" * 3000, "two", "three" * 500)), None, "m")
    assert len(first) == sum(boundary * PAGE_BYTES <= 3000 for boundary in BOUNDARIES)
    assert second[: len(first)] == first
    assert len(set(second)) == len(second) > len(first)
    assert page_hashes(b"x" * (PAGE_BYTES - 1), None, "m") == []


@pytest.mark.parametrize(
    "body", [{"prompt": "y" * 600}, {"prompt": [7] * 600}, {"input": "z" * 600, "instructions": "a"}]
)
def test_every_route_has_a_prompt(body: dict[str, Any]) -> None:
    assert len(page_hashes(prompt_bytes(body), None, "m")) >= 1


def test_a_hostile_prompt_costs_little() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = {"a": [deep]}
    assert prompt_bytes({"prompt": "z", "input": deep}) == b"z"
    nested: Any = "y" * PAGE_BYTES
    for _ in range(5000):
        nested = [nested]
    assert len(page_hashes(prompt_bytes({"prompt": nested}), None, "m")) == 1
    most = BOUNDARIES[-1] * PAGE_BYTES
    assert most <= len(prompt_bytes({"prompt": [[7] * 1000] * 1000})) <= most + 10, "no more than is hashed"
    assert len(page_hashes(prompt_bytes({"prompt": [7] * 1_000_000}), None, "m")) == len(BOUNDARIES)


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
def test_all_replicas_fit_on_the_gpus(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray puts a share on one GPU, and rounds it up to parts of 10,000."""
    monkeypatch.setattr("shaderlm.ray.adapters.gpus_of", lambda listed: list(range(gpus)))
    for replicas in range(1, 40):
        has, told = resources("auto", replicas)
        share = math.ceil(has["num_gpus"] * 10_000 - 1e-6)
        assert told == gpus
        assert share <= 10_000
        assert gpus * (10_000 // share) >= replicas


def test_tools_come_first() -> None:
    tools = [{"type": "function", "function": {"name": "f" * 600}}]
    with_tools = page_hashes(prompt_bytes({"tools": tools, **_messages("x" * 900)}), None, "m")
    assert with_tools[0] == page_hashes(prompt_bytes({"tools": tools, **_messages("w" * 900)}), None, "m")[0]


def test_keys_and_models_share_nothing() -> None:
    prompt = b"x" * 4096
    hashes = [page_hashes(prompt, key, model) for key in (None, "0", "1") for model in ("a", "b")]
    assert len({each for listed in hashes for each in listed}) == sum(map(len, hashes))
    assert session_hash("s", "0", "a") != session_hash("s", "1", "a")


# Routing -------------------------------------------------------------------------------------------------


def _routed(routing: PrefixRouting, keys: Keys, loads: Counter[str]) -> str:
    names, reason = routing.choose(keys, loads.__getitem__, loads.total() / len(routing.replicas))
    routing.sent(keys, names[0], reason)
    return names[0]


def _system(number: int, tail: int = 0) -> Keys:
    return Keys(pages=(10_000 + number, 20_000 + number, 30_000 + 1000 * number + tail))


def test_a_beginning_stays_on_its_replica_and_beginnings_spread() -> None:
    routing, homes, sent = PrefixRouting(), dict[int, str](), Counter[str]()
    routing.update(["a", "b"])
    for request in range(240):
        home = _routed(routing, _system(request % 4, request), Counter())
        assert homes.setdefault(request % 4, home) == home
        sent[home] += 1
    assert sent == {"a": 120, "b": 120}
    assert routing.counts == {"new": 4, "prefix": 236}


def test_a_replica_with_much_more_to_do_is_passed_over() -> None:
    routing = PrefixRouting()
    routing.update(["a", "b"])
    home = _routed(routing, _system(0), Counter())
    other = "b" if home == "a" else "a"
    assert _routed(routing, _system(0, 1), Counter({home: 4, other: 0})) == home
    assert _routed(routing, _system(0, 2), Counter({home: 20, other: 0})) == other
    assert routing.counts["moved"] == 1
    assert _routed(routing, _system(0, 3), Counter({home: 20, other: 0})) == other, "it is there, too, from now on"


def test_a_session_stays_whatever_its_prompts_are() -> None:
    routing = PrefixRouting()
    routing.update([f"r{number}" for number in range(50)])
    homes = {_routed(routing, replace(_system(number), session=5), Counter()) for number in range(20)}
    assert len(homes) == 1
    assert routing.counts["session"] == 19


def test_a_replica_that_is_gone_gets_nothing() -> None:
    routing = PrefixRouting()
    routing.update(["a", "b", "c"])
    home = _routed(routing, _system(0), Counter())
    left = [each for each in ("a", "b", "c") if each != home]
    routing.update(left)
    assert all(_routed(routing, _system(0, tail), Counter()) in left for tail in range(20))


def test_two_routers_agree_without_a_word() -> None:
    """Of 100 replicas each beginning has the same two in both."""
    names = [f"r{number}" for number in range(100)]
    one, two = PrefixRouting(), PrefixRouting()
    one.update(names)
    two.update(names[::-1])
    for number in range(200):
        keys = _system(int(np.random.default_rng(number).integers(1 << 60)))
        assert {*one.choose(keys, lambda name: 0, 0)[0]} == {*two.choose(keys, lambda name: 0, 0)[0]}


def test_new_beginnings_spread_over_many_replicas() -> None:
    routing, sent = PrefixRouting(), Counter[str]()
    routing.update([f"r{number}" for number in range(100)])
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        sent[_routed(routing, Keys(pages=(int(rng.integers(1 << 62)),)), sent)] += 1
    assert max(sent.values()) <= 1.3 * 100


def test_what_is_remembered_has_a_limit() -> None:
    routing = PrefixRouting(remembered=100)
    routing.update(["a", "b"])
    for number in range(500):
        _routed(routing, _system(number), Counter())
    assert len(routing) == 100
    assert len(PrefixRouting()) == 0


# Through ASGI --------------------------------------------------------------------------------------------


def _request(**fields: Any) -> RelayedRequest:
    return RelayedRequest("POST", "/x", b"", [], b"body", ("127.0.0.1", 1), None, "id", **fields)


def test_an_application_answers_without_a_port() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert (message["body"], scope["path"]) == (b"body", "/x")
        await send({"type": "http.response.start", "status": 201, "headers": [(b"a", b"b")]})
        for part in (b"one", b"two", b"three"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def read() -> list[Any]:
        return [part async for part in responses(app, _request(), "p")]

    head, *parts = asyncio.run(read())
    assert head == ResponseHead(201, [(b"a", b"b")])
    assert b"".join(parts) == b"onetwothree"


def test_who_stops_reading_is_disconnected() -> None:
    heard = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        listening = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not listening.done():
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0)
        heard.append(listening.result()["type"])

    async def read() -> None:
        answer = responses(app, _request(), "p")
        for _ in range(3):
            await anext(answer)
        await answer.aclose()
        async with asyncio.timeout(60):
            while not heard:
                await asyncio.sleep(0.001)

    asyncio.run(read())
    assert heard == ["http.disconnect"]


def test_a_disconnect_ends_the_generation_within_a_step(tmp_path: Path) -> None:
    """The step that runs when the client goes, and at most the one that was submitted behind it."""
    path = write_tiny_llama(tmp_path / "tiny.gguf", context=4096)
    body = {"prompt": "the an in", "max_tokens": 4000, "ignore_eos": True, "stream": True}

    async def read() -> tuple[int, int]:
        service = Service(loader(path))
        service.start()
        engine = (await service.wait_loaded()).model.engine
        headers = [(b"content-type", b"application/json")]
        request = replace(_request(), path="/v1/completions", headers=headers, body=json.dumps(body).encode())
        answer = responses(make_routes(service), request, "p")
        for _ in range(10):
            await anext(answer)
        await answer.aclose()
        generated = engine.stats().generation_tokens
        async with asyncio.timeout(60):
            while engine.sequences():
                await asyncio.sleep(0.001)
        after = engine.stats().generation_tokens
        await service.stop()
        return generated, after

    generated, after = asyncio.run(read())
    assert 5 <= generated <= after <= generated + 3


def test_an_application_that_fails_is_no_end_of_a_stream() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("broken")

    async def read() -> list[Any]:
        return [part async for part in responses(app, _request(), "p")]

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(read())


# Metrics and the manifest --------------------------------------------------------------------------------


def test_metrics_of_replicas_are_one_text() -> None:
    text = (
        "# HELP shaderlm:prompt_tokens_total Tokens of prompts\n# TYPE shaderlm:prompt_tokens_total counter\n"
        'shaderlm:prompt_tokens_total{model_name="m"} 3.0\n'
    )
    lines = merge([("r1", text), ("r2", text)], {"m": {"prefix": 5}}, {"m": 2}).decode().splitlines()
    assert lines.count("# TYPE shaderlm:prompt_tokens_total counter") == 1
    assert 'shaderlm:prompt_tokens_total{model_name="m",replica="r1"} 3.0' in lines
    assert 'shaderlm:prompt_tokens_total{model_name="m",replica="r2"} 3.0' in lines
    assert 'shaderlm:routed_requests_total{model_name="m",reason="prefix"} 5.0' in lines
    assert 'shaderlm:replicas{model_name="m"} 2.0' in lines
