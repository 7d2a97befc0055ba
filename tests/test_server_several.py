"""Several models over HTTP and on the command line: real ones, tiny, on the CPU."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import pytest

from shaderlm.cli import serve_models
from shaderlm.cli.sampler_options import SAMPLING_NAMES
from shaderlm.cli.serve import serve
from shaderlm.errors import InputError
from shaderlm.server.models import Models, ModelsOptions, ModelSource
from shaderlm.server.served import ServedModel

from .command_line import shaderlm
from .serving import Running, loader, running
from .test_server import ASK, chat_text, events
from .tiny_models import write_tiny

pytestmark = pytest.mark.xdist_group("server")

NAMES = ("ant", "bee", "cow")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(NAMES):
        write_tiny(made / f"{name}.gguf", "llama", seed=seed, context=256)
    (made / "bad.gguf").write_bytes(b"GGUF, but no more")
    return made


def sources(folder: Path, slow: dict[str, threading.Event] | None = None) -> Callable[[], list[ModelSource]]:
    def made(name: str) -> Callable[[], ServedModel]:
        def load() -> ServedModel:
            if slow and name in slow:
                assert slow[name].wait(60)
            return loader(folder / f"{name}.gguf", names=(name, f"{name}-alias"), embedding=True)()

        return load

    def source(name: str) -> ModelSource:
        more: dict[str, Any] = {"aliases": (f"{name}-alias",), "path": folder / f"{name}.gguf", "embedding": True}
        return ModelSource(name=name, load=made(name), **more)

    rows = [source(name) for name in (*NAMES, "bad")]
    return lambda: rows


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(Models(sources(folder), ModelsOptions(most=2))) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def states(http: httpx.Client) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in http.get("/v1/models").json()["data"]}


def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ask(http: httpx.Client, name: str | None, **more: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"model": name, "messages": ASK, "max_tokens": 4, **more})


def test_each_request_gets_its_model(http: httpx.Client) -> None:
    texts = {}
    for name in (*NAMES, "bee-alias", "cow:latest", None):
        found = ask(http, name, temperature=0).json()
        assert found["model"] == (name or "ant").removesuffix("-alias").removesuffix(":latest")
        texts[found["model"]] = found["choices"][0]["message"]["content"]
    assert len(set(texts.values())) == 3
    assert sorted(states(http).values()) == ["loaded", "loaded", "unloaded", "unloaded"]
    other = ask(http, "gpt-4o")
    assert other.status_code == 404
    assert "there are 'ant', 'bee', 'cow', 'bad'" in other.json()["error"]["message"]


def test_routes_about_a_model_go_to_it(http: httpx.Client) -> None:
    for name in NAMES:
        props = http.get("/props", params={"model": name}).json()
        assert props["model_alias"] == name
        tokens = http.post("/tokenize", json={"model": name, "content": "the an"}).json()["tokens"]
        assert http.post("/detokenize", json={"model": name, "tokens": tokens}).json()["content"] == "the an"
        assert http.post("/v1/embeddings", json={"model": name, "input": "the"}).json()["model"] == name
        assert http.get(f"/v1/models/{name}").json()["status"]["value"] == "loaded"
        assert all(not slot["is_processing"] for slot in http.get("/slots", params={"model": name}).json())
    assert http.get("/health").json() == {"status": "ok"}
    text = http.get("/metrics").text
    for name in NAMES:
        assert f'shaderlm:num_requests_running{{model_name="{name}"}} 0.0\n' in text
    assert text.count("# TYPE shaderlm:num_requests_running ") == 1


def test_a_bad_file_is_told_and_others_go_on(http: httpx.Client) -> None:
    found = ask(http, "bad")
    assert found.status_code == 500
    assert "the model 'bad' cannot be loaded: " in found.json()["error"]["message"]
    status = http.get("/models/bad").json()["status"]
    assert (status["value"], status["failed"]) == ("failed", True)
    assert status["error"] in found.json()["error"]["message"]
    assert ask(http, "ant").status_code == 200


def test_loading_and_closing_by_hand(http: httpx.Client) -> None:
    assert http.post("/models/load", json={"model": "cow"}).json() == {"success": True}
    until(lambda: states(http)["cow"] == "loaded")
    assert http.post("/models/unload", json={"model": "cow"}).json() == {"success": True}
    until(lambda: states(http)["cow"] == "unloaded")
    assert http.post("/models/load", json={"model": "dog"}).status_code == 404


def test_ollamas_routes(http: httpx.Client) -> None:
    for name in ("ant", "bee"):
        assert http.post("/api/generate", json={"model": name, "keep_alive": "1h"}).json()["done_reason"] == "load"
    there = {each["name"]: each for each in http.get("/api/tags").json()["models"]}
    assert set(there) == {*NAMES, "bad"}
    ps = {each["name"]: each for each in http.get("/api/ps").json()["models"]}
    assert set(ps) == {"ant", "bee"}
    assert ps["ant"]["expires_at"] < "2100"
    for name in ("ant", "cow"):  # what is said of a model is the same before and after it is loaded
        before = http.post("/api/show", json={"model": name}).json()
        assert there[name]["capabilities"] == before["capabilities"] == ["completion", "tools", "embedding"]
    assert states(http)["cow"] == "unloaded"
    cow = http.post("/api/show", json={"model": "cow"}).json()
    body = {"model": "cow", "prompt": "the", "stream": False, "options": {"num_predict": 2}}
    assert http.post("/api/generate", json={**body, "keep_alive": -1}).json()["done"] is True
    assert http.post("/api/show", json={"model": "cow"}).json() == cow
    assert http.get("/api/ps").json()["models"][-1]["expires_at"].startswith("2200")
    gone = http.post("/api/generate", json={"model": "cow", "keep_alive": 0}).json()
    assert (gone["done_reason"], gone["model"]) == ("unload", "cow")
    assert http.post("/api/generate", json={**body, "keep_alive": "0s"}).json()["done"] is True
    until(lambda: states(http)["cow"] == "sleeping")


def test_a_stream_goes_on_while_another_model_is_loaded_and_a_client_leaves(folder: Path) -> None:
    gate = {"bee": threading.Event()}
    with running(Models(sources(folder, gate))) as server, server.client() as http:
        body = {"model": "ant", "messages": ASK, "max_tokens": 60, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            first = next(lines)
            impatient = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
            text = json.dumps({"model": "bee", "messages": ASK, "max_tokens": 2}).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
            impatient.sendall(head % len(text) + text)
            until(lambda: server.service.models.requests == 2)
            impatient.close()
            rest = [first, *lines]
        assert chat_text([json.loads(line[6:]) for line in rest if line.startswith("data: {")])
        assert rest[-2:] == ["data: [DONE]", ""]
        until(lambda: server.service.models.requests == 0)
        assert states_of(server)["bee"] == "loading"
        patient = threading.Thread(target=lambda: answers.append(ask(http, "bee").status_code))
        answers: list[int] = []
        patient.start()
        until(lambda: server.service.models.requests == 1)
        gate["bee"].set()
        patient.join(30)
        assert answers == [200]


def states_of(server: Running) -> dict[str, str]:
    return {each.name: each.state for each in server.service.models.all()}


def test_the_end_while_requests_wait_for_a_model(folder: Path) -> None:
    gate = {"bee": threading.Event()}
    with running(Models(sources(folder, gate))) as server, server.client() as http:
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(ask(http, "bee")))
        waiting.start()
        until(lambda: server.service.models.requests == 1)
        server.server.should_exit = True
        server.thread.join(20)
        assert not server.thread.is_alive()
        waiting.join(20)
        gate["bee"].set()
    assert [each.status_code for each in answers] == [503]
    assert "about to end" in answers[0].text


def test_one_model_that_sleeps(folder: Path) -> None:
    one = Models(lambda: [sources(folder)()[0]], ModelsOptions(sleep_seconds=0.05), one=True)
    with running(one) as server, server.client() as http:
        until(lambda: states_of(server) == {"ant": "sleeping"})
        assert http.get("/health").status_code == 200
        assert states(http) == {"ant": "sleeping"}
        assert [each["name"] for each in http.get("/api/tags").json()["models"]] == ["ant"]
        assert ask(http, "gpt-4o").json()["model"] == "ant"
        streamed = events(ask(http, "ant", stream=True))
        assert chat_text(streamed[:-1])
        until(lambda: states_of(server) == {"ant": "sleeping"})


# The command line ----------------------------------------------------------------------------------------


def options_of(*arguments: object) -> tuple[click.Context, dict[str, Any]]:
    """What `serve` would be called with."""
    context = serve.make_context("serve", [str(each) for each in arguments])
    values = dict(context.params)
    names = SAMPLING_NAMES
    said = [name for name in names if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT]
    values["sampling"] = {name: values[name] for name in said}
    return context, {name: value for name, value in values.items() if name not in names}


def models_of(*arguments: object) -> tuple[Models, dict[str, dict[str, Any]]]:
    """The models that a command line means, and what each would be loaded with, by what is loaded."""
    context, options = options_of(*arguments)
    loaded = dict[str, dict[str, Any]]()

    def load(model: str, own: dict[str, Any]) -> Callable[[], ServedModel]:
        loaded[own["aliases"][0]] = {**own, "model": model}
        return lambda: pytest.fail("nothing is loaded")

    names = options.pop("models")
    with context:
        assert serve_models.are_several(names, options)
        return serve_models.several_models(names, options, load), loaded


def test_options_of_each_model(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        f'[small]\nmodel = "{folder}/ant.gguf"\nalias = "little"\ntags = ["fast"]\nctx-size = 128\ntop_k = 3\n'
        "[cow]\nparallel = 2\nno-tune = true\nwarmup = false\nmmproj = 'eyes.gguf'\nimage-tokens = [4, 64]\n"
        "[bee]\nno-vision = true\n"
    )
    common = ("--models-dir", folder, "--models-file", file, "--temp", "0.5", "--ctx-size", "64", "--models-max", 0)
    models, loaded = models_of(*common, "-m", folder / "ant.gguf", "--sleep-idle-seconds", 3)
    assert [each.name for each in models.all()] == ["ant", "small", "cow", "bee", "bad"]
    assert loaded["small"]["aliases"] == ("small", "little")
    assert (loaded["small"]["ctx_size"], loaded["small"]["sampling"]) == (128, {"temperature": 0.5, "top_k": 3})
    assert (loaded["cow"]["ctx_size"], loaded["cow"]["parallel"], loaded["cow"]["no_tune"]) == (64, 2, True)
    assert (loaded["cow"]["warmup"], loaded["bee"]["warmup"]) == (False, True)
    assert [loaded[name]["image_tokens"] for name in ("cow", "ant")] == [(4, 64), None]
    assert [loaded[name]["mmproj"] for name in ("cow", "ant")] == ["eyes.gguf", None]
    assert [loaded[name]["no_vision"] for name in ("cow", "bee")] == [False, True]
    sources = {each.name: each.source for each in models.all()}
    assert [sources[name].vision for name in ("cow", "bee")] == [True, False]
    assert [sources[name].mmproj for name in ("cow", "bee")] == ["eyes.gguf", None]
    assert loaded["cow"]["model"] == str(folder / "cow.gguf")
    assert models.get("fast") is models.get("little") is models.get("small")
    assert (models.options.sleep_seconds, models.options.most) == (3.0, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "x must be a table"),
        ("[a]\nmodel = ['x', 'y']", "a must have one model, got 2"),
        ("[a]\nport = 80", "port in a is an option of the server"),
        ("[a]\nctx-sice = 80", "a.ctx-sice is not known; did you mean a.ctx-size"),
        ("[a]\nctx-size = 0", "a: Invalid value"),
        ("[a]\nimage-tokens = [0, 4]", "a: Invalid value"),
        ("[a]\nimage-tokens = 4", "image-tokens must be a list of 2, got 4"),
        ("[a]\nno-vision = 'yes'", "no-vision must be true or false"),
        ("[a]\nallow-image-urls = true", "allow-image-urls in a is an option of the server"),
        ("[a]\nalias = 'b'\n[b]", "'b' is a name of two models, a and b"),
    ],
)
def test_a_file_of_models_that_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(InputError) as problem:
        models_of("--models-file", file)
    assert words in str(problem.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-m", "a", "-m", "b", "--alias", "c"), "--alias is of one model"),
        (("--models-memory", "1G"), "--models-memory is for several models"),
        (("-m", "a.gguf", "-m", "b"), "a.gguf does not exist"),
        (("--models-dir", ".", "--replicas", "2"), "--replicas is for one model"),
        (("--models-dir", "nowhere"), "does not exist"),
    ],
)
def test_arguments_that_do_not_fit(arguments: tuple[str, ...], words: str) -> None:
    done = shaderlm("serve", *arguments)
    assert done.code == 2 or "does not exist" in words
    assert words in " ".join(done.err.split())


def test_ps_and_stop(server: Running, http: httpx.Client) -> None:
    ask(http, "ant")
    lines = shaderlm("ps", "--url", server.url).out.splitlines()
    assert lines[0].split() == ["name", "state", "context", "requests", "until"]
    assert ["ant", "loaded", "256", "0"] in [line.split() for line in lines]
    assert {each["id"] for each in json.loads(shaderlm("ps", "--url", f"{server.url}/v1", "--json").out)} == {
        *NAMES,
        "bad",
    }
    assert "ant is closed" in shaderlm("stop", "ant", "--url", server.url).out
    until(lambda: states(http)["ant"] == "unloaded")
    unknown = shaderlm("stop", "dog", "--url", server.url)
    assert (unknown.code, "'dog' is not served here" in unknown.err) == (1, True)
    nobody = shaderlm("ps", "--url", "http://127.0.0.1:9")
    assert (nobody.code, "no server answers at http://127.0.0.1:9" in nobody.err) == (1, True)
