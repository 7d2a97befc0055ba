"""Ollama's routes on the wire: lines of JSON, options, thoughts, tools, embeddings, models and errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from shaderlm.cli.serve import may_pull
from shaderlm.engine import Handle, LanguageModel, load
from shaderlm.errors import ModelError
from shaderlm.server import ollama, pulls
from shaderlm.server.errors import ApiError
from shaderlm.server.limits import Limits
from shaderlm.server.model_facts import facts_of
from shaderlm.server.ollama_models import shown
from shaderlm.server.prepare import read
from shaderlm.server.routes import Prepared
from shaderlm.server.served import ServedModel

from .serving import Running, loader, running
from .test_server import ASK
from .test_server_apis import SCHEMA, THINKING, TOOLS, generated, is_weather
from .tiny_models import CHATML, write_tiny_llama

FUNCTION = {"name": "weather", "description": "The weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
SWITCH = "assistant\n' + ('<think>\n' if enable_thinking else '<think></think>') }}{% endif %}"
SWITCHED = CHATML.replace("assistant\n' }}{% endif %}", SWITCH)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    metadata = {"tokenizer.chat_template": TOOLS}
    return write_tiny_llama(tmp_path_factory.mktemp("ollama") / "tiny.gguf", context=512, metadata=metadata)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Running]:
    with running(loader(path, embedding=True), pull=True) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    metadata = {"tokenizer.chat_template": THINKING}
    file = write_tiny_llama(tmp_path_factory.mktemp("ollama") / "thinks.gguf", metadata=metadata)
    with load(file, device="cpu") as model:
        yield ServedModel(model)


def prepare(served: ServedModel, kind: type[Prepared], **body: Any) -> Prepared:
    return kind(served, read(served.limits, json.dumps(body).encode(), kind.route.body))


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def written(prepared: Prepared, texts: Sequence[str], finish: str = "stop") -> list[dict[str, Any]]:
    """The lines of a stream whose tokens are those of these texts."""
    served = prepared.served
    handle, deltas = generated(served, prepared.requests[0], texts)
    handle.finish_reason = finish
    writer = prepared.writer([handle])
    raw = b"".join([*(writer.delta(0, delta) for delta in deltas), writer.finish(0), writer.end()])
    return [json.loads(line) for line in raw.splitlines()]


# Chat and generate ---------------------------------------------------------------------------------------


def test_a_chat_whole_and_streamed(http: httpx.Client, server: Running) -> None:
    expected = server.model.chat(ASK, max_tokens=9, ignore_eos=True)
    body = {"model": "tiny", "messages": ASK, "options": {"temperature": 0, "num_predict": 9, "seed": -1}}
    parts = lines(http.post("/api/chat", json=body))  # a stream unless it is refused
    assert "".join(part["message"]["content"] for part in parts) == expected
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {part["model"] for part in parts} == {"tiny"}
    assert {part["message"]["role"] for part in parts} == {"assistant"}
    last = parts[-1]
    assert (last["done_reason"], last["eval_count"]) == ("length", 9)
    assert last["prompt_eval_count"] == len(expected.prompt_ids)
    assert all(isinstance(last[f"{name}_duration"], int) for name in ("total", "load", "prompt_eval", "eval"))
    whole = http.post("/api/chat", json={**body, "model": "tiny:latest", "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": expected}
    assert set(whole) == set(last)


def test_a_prompt(http: httpx.Client, server: Running) -> None:
    options = {"temperature": 0, "num_predict": 6}
    messages = [{"role": "system", "content": "an in"}, *ASK]
    expected = server.model.chat(messages, max_tokens=6)
    body = {"prompt": ASK[0]["content"], "system": "an in", "options": options}
    parts = lines(http.post("/api/generate", json=body))
    assert "".join(part["response"] for part in parts) == expected
    context = parts[-1]["context"]
    assert context[: len(expected.prompt_ids)] == expected.prompt_ids
    follow = http.post("/api/generate", json={"prompt": "in", "context": context, "options": options, "stream": False})
    more = server.model.chat_ids([{"role": "user", "content": "in"}])
    assert follow.json()["prompt_eval_count"] == len(context) + len(more)
    raw = http.post("/api/generate", json={"prompt": "the an", "raw": True, "options": options, "stream": False}).json()
    assert raw["response"] == server.model.generate("the an", max_tokens=6)
    assert "context" not in raw
    read_only = http.post(
        "/api/generate", json={"prompt": "the", "options": {"num_predict": 0}, "stream": False}
    ).json()
    assert (read_only["response"], read_only["eval_count"], read_only["done_reason"]) == ("", 0, "length")


def test_a_base_model_continues_a_prompt(tmp_path: Path) -> None:
    with load(write_tiny_llama(tmp_path / "base.gguf", template=False), device="cpu") as model:
        served = ServedModel(model)
        assert prepare(served, ollama.Generate, prompt="the an").requests[0].prompt_ids == model.tokenize("the an")
        on = prepare(served, ollama.Generate, prompt="an", context=[1, 2]).requests[0].prompt_ids
        assert on == [1, 2, *model.tokenize("an")]
        with pytest.raises(ApiError, match="system is for a chat template"):
            prepare(served, ollama.Generate, prompt="the", system="an")
        with pytest.raises(ApiError, match="no chat template"):
            prepare(served, ollama.Chat, messages=ASK)


def test_a_gap(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    served = server.service.served
    with pytest.raises(ApiError, match="cannot fill gaps") as problem:
        prepare(served, ollama.Generate, prompt="a", suffix="b")
    assert problem.value.status == 501
    monkeypatch.setattr(ollama, "infill_ids", lambda served, gap: [1, *map(ord, gap.input_prefix + gap.input_suffix)])
    gap = prepare(served, ollama.Generate, prompt="a", suffix="b", options={"num_predict": 3}).requests[0]
    assert (list(gap.prompt_ids), gap.max_tokens) == ([1, 97, 98], 3)


def test_log_probabilities(http: httpx.Client) -> None:
    body = {"prompt": "the", "options": {"num_predict": 3, "temperature": 0}, "logprobs": True, "top_logprobs": 2}
    whole = http.post("/api/generate", json={**body, "stream": False}).json()["logprobs"]
    assert [len(each["top_logprobs"]) for each in whole] == [2, 2, 2]
    assert set(whole[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    streamed = [each for part in lines(http.post("/api/generate", json=body)) for each in part.get("logprobs", ())]
    assert [each["token"] for each in streamed] == [each["token"] for each in whole]


def test_what_only_loads_a_model(http: httpx.Client) -> None:
    for route, field in (("/api/chat", "message"), ("/api/generate", "response")):
        loaded = http.post(route, json={"model": "tiny", "keep_alive": "10m"})
        assert loaded.json()["done_reason"] == "load"
        assert field in loaded.json()
        for time in (0, "0", "0s", "0h0m0s"):
            found = http.post(route, json={"model": "tiny", "keep_alive": time})
            assert (found.status_code, list(found.json())) == (400, ["error"])
            assert "keeps it loaded" in found.json()["error"]
    answered = {"prompt": "the", "options": {"num_predict": 1}, "stream": False, "keep_alive": 0}
    assert http.post("/api/generate", json=answered).json()["done"] is True


def test_options_of_sampling(server: Running) -> None:
    served = server.service.served

    def sampling(**options: Any) -> Any:
        return prepare(served, ollama.Chat, messages=ASK, options=options).requests[0]

    plain = sampling().sampling
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p, plain.seed) == (0.8, 40, 0.9, 0.0, None)
    assert sampling().max_tokens == served.context
    given = {"temperature": 0.5, "top_k": 3, "top_p": 0.4, "min_p": 0.1, "seed": 7, "repeat_penalty": 1.2}
    given |= {"presence_penalty": 0.3, "frequency_penalty": 0.2}
    found = sampling(**given, stop=["x", "y"], num_predict=5, num_ctx=served.context, repeat_last_n=-1, num_gpu=99)
    assert {name: getattr(found.sampling, name, None) for name in given} == given | {"repeat_penalty": None}
    assert found.sampling.repetition_penalty == 1.2
    assert (list(found.stop), found.max_tokens) == (["x", "y"], 5)
    assert sampling(repeat_penalty=1.2, repeat_last_n=0).sampling.repetition_penalty == 1
    assert sampling(seed=-1).sampling.seed is None
    other = sampling(mirostat=2, mirostat_tau=4, typical_p=0.5).sampling
    assert (other.mirostat, other.mirostat_tau, other.typical_p) == (2, 4, 0.5)
    assert sampling(unknown=1).max_tokens == served.context


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"options": {"num_ctx": 513}}, "num_ctx is 513"),
        ({"options": {"mirostat": 1}}, "mirostat"),
        ({"options": {"typical_p": 1.5}}, "typical_p"),
        ({"options": {"tfs_z": 0.5}}, "tfs_z is not supported"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "repeat_last_n is not supported"),
        ({"options": {"temperature": "warm"}}, "options.temperature"),
        ({"options": {"stop": ["x"] * 17}}, "stop has 17 items"),
        ({"truncate": True}, "truncate is not supported"),
        ({"suffix": "x", "system": "x"}, "system is not for a prompt with a suffix"),
        ({"template": "x"}, "template is not supported"),
        ({"images": ["aGk="]}, "does not take images"),
        ({"raw": True, "system": "x"}, "system is for a chat template"),
        ({"raw": True, "context": [1]}, "context is for prompts"),
        ({"raw": True, "think": True}, "think is for a chat template"),
        ({"context": [100_000]}, "token id"),
        ({"think": True}, "does not think"),
        ({"think": "much"}, "think"),
        ({"format": "xml"}, "format"),
        ({"format": {"type": "nothing"}}, "format cannot be honoured"),
        ({"keep_alive": "soon"}, "keep_alive must be"),
        ({"prompt": "the " * 600}, "the prompt has"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_what_cannot_be_honoured(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    found = http.post("/api/generate", json={"prompt": "the", **body})
    assert found.status_code == 400
    assert list(found.json()) == ["error"]
    assert words in found.json()["error"]
    assert "\n" not in found.json()["error"]


def test_errors_have_ollamas_shape(http: httpx.Client, path: Path) -> None:
    other = http.post("/api/chat", json={"model": "llama3.2", "stream": False, "options": {"num_predict": 1}})
    assert (other.status_code, other.json()["model"]) == (200, "tiny")
    assert http.post("/api/chat", content=b"{").json()["error"].startswith("the body must be JSON")
    assert http.post("/api/nothing").json()["error"].startswith("there is no /api/nothing; /openapi.json")
    assert http.post("/api/chats").json()["error"].startswith("there is no /api/chats; did you mean /api/chat?")
    with running(loader(path, strict=True)) as strict, strict.client() as client:
        found = client.post("/api/chat", json={"model": "llama3.2"})
        assert (found.status_code, list(found.json())) == (404, ["error"])
        assert client.post("/api/chat", json={"model": "tiny:latest"}).status_code == 200
    with running(loader(path), keys=["k"]) as guarded, guarded.client() as client:
        found = client.get("/api/tags")
        assert (found.status_code, list(found.json())) == (401, ["error"])


def test_a_form(http: httpx.Client) -> None:
    body = {"messages": ASK, "options": {"temperature": 0}, "stream": False}
    whole = http.post("/api/chat", json={**body, "format": SCHEMA}).json()
    assert is_weather(json.loads(whole["message"]["content"]))
    assert whole["done_reason"] == "stop"
    text = http.post("/api/generate", json={"prompt": "x", "format": "json", "stream": False, "options": {"seed": 1}})
    if text.json()["done_reason"] == "stop":
        assert isinstance(json.loads(text.json()["response"]), dict)
    assert text.json()["response"].lstrip().startswith("{")


def test_thoughts(thinking: ServedModel) -> None:
    chat = prepare(thinking, ollama.Chat, messages=ASK)
    parts = written(chat, ["I", " think", "</think>", "\n\nYes", "!"])
    assert "".join(part["message"].get("thinking", "") for part in parts) == "I think"
    assert "".join(part["message"]["content"] for part in parts) == "Yes!"
    off = prepare(thinking, ollama.Chat, messages=ASK, think=False).requests[0]
    assert thinking.model.detokenize(off.prompt_ids).rstrip().endswith("</think>")
    assert prepare(thinking, ollama.Chat, messages=ASK, think="max").requests


def test_thoughts_are_switched(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": SWITCHED}
    with load(write_tiny_llama(tmp_path / "switch.gguf", metadata=metadata), device="cpu") as model:
        served = ServedModel(model)
        ends = {
            think: model.detokenize(
                prepare(served, ollama.Chat, messages=ASK, think=think).requests[0].prompt_ids[-16:]
            )
            for think in (True, False)
        }
        assert ends[True].endswith("<think>\n")
        assert ends[False].endswith("<think></think>")


# Tools ---------------------------------------------------------------------------------------------------


def call(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': arguments})}\n</tool_call>"


def test_calls_of_tools_are_whole(server: Running) -> None:
    chat = prepare(server.service.served, ollama.Chat, messages=ASK, tools=[TOOL])
    texts = ["So", call(city="Ulm", days=12345678901234567890), "\n", call(city="Bern", days=2.0)]
    parts = written(chat, texts)
    assert "".join(part["message"]["content"] for part in parts) == "So"
    calls = [each for part in parts for each in part["message"].get("tool_calls", ())]
    assert [each["function"]["index"] for each in calls] == [0, 1]
    assert [each["function"]["name"] for each in calls] == ["weather"] * 2
    assert calls[0]["function"]["arguments"] == {"city": "Ulm", "days": 12345678901234567890}
    assert len({each["id"] for each in calls}) == 2
    assert parts[-1]["done_reason"] == "stop"
    cut = written(chat, [call(city="Ulm", days=1), '\n<tool_call>\n{"name": "weather", "arguments": {"ci'], "length")
    calls = [each for part in cut for each in part["message"].get("tool_calls", ())]
    assert [each["function"]["arguments"] for each in calls] == [{"city": "Ulm", "days": 1}]
    assert cut[-1]["done_reason"] == "length"


def test_calls_and_results_come_back(server: Running) -> None:
    served = server.service.served
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"a": "ö"}}}],
        },
        {"role": "tool", "tool_name": "weather", "content": "rain"},
    ]
    chat = prepare(served, ollama.Chat, messages=messages, tools=[TOOL])
    text = served.model.detokenize(chat.requests[0].prompt_ids)
    assert '"name": "weather"' in text
    assert "tool\nrain" in text
    begun = prepare(served, ollama.Chat, messages=[*ASK, {"role": "assistant", "content": "So"}])
    assert served.model.detokenize(begun.requests[0].prompt_ids).endswith("assistant\nSo")


# Embeddings ----------------------------------------------------------------------------------------------


def test_embeddings(http: httpx.Client, server: Running, path: Path) -> None:
    expected = server.model.embed(["the", "an"])
    found = http.post("/api/embed", json={"model": "tiny", "input": ["the", "an"]}).json()
    np.testing.assert_allclose(found["embeddings"], expected, rtol=1e-5, atol=1e-6)
    assert found["prompt_eval_count"] == 2
    short = http.post("/api/embed", json={"input": "the", "dimensions": 8}).json()["embeddings"][0]
    assert len(short) == 8
    assert sum(value * value for value in short) == pytest.approx(1)
    older = http.post("/api/embeddings", json={"prompt": "the"}).json()
    np.testing.assert_allclose(older["embedding"], expected[0], rtol=1e-5, atol=1e-6)
    assert http.post("/api/embed", json={"input": []}).json()["embeddings"] == []
    assert http.post("/api/embeddings", json={"prompt": ""}).json() == {"embedding": []}
    long = {"input": "the an " * 600}
    assert "the prompt has" in http.post("/api/embed", json=long).json()["error"]
    assert len(http.post("/api/embed", json={**long, "truncate": True}).json()["embeddings"]) == 1
    assert "at most the model's" in http.post("/api/embed", json={"input": "x", "dimensions": 65}).json()["error"]
    with load(path, device="cpu") as model, pytest.raises(ApiError, match="--embedding"):
        prepare(ServedModel(model), ollama.Embed, input="x")


def test_the_rest_of_a_long_input_is_not_read(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 16 MB takes seconds to tokenise, and the context holds 512 tokens of them."""
    served, tokenize, sizes = ServedModel(server.model, embedding=True), LanguageModel.tokenize, list[int]()

    def counted(model: LanguageModel, text: str, **options: Any) -> list[int]:
        sizes.append(len(text))
        return tokenize(model, text, **options)

    monkeypatch.setattr(LanguageModel, "tokenize", counted)
    for text in ("the an " * 600, "the an " * 30_000, "ø" * 90_000, " " * 90_000 + "the"):
        (request,) = prepare(served, ollama.Embed, input=text, truncate=True).requests
        assert list(request.prompt_ids) == tokenize(server.model, text)[: served.context]
        assert sizes[-1] <= 64 * served.context
    (request,) = prepare(served, ollama.Embed, input="the an", truncate=True).requests
    assert list(request.prompt_ids) == tokenize(server.model, "the an")


# Models --------------------------------------------------------------------------------------------------


def test_models(http: httpx.Client, server: Running, path: Path) -> None:
    (model,) = http.get("/api/tags").json()["models"]
    assert (model["name"], model["size"]) == ("tiny", path.stat().st_size)
    assert model["details"]["family"] == "llama"
    assert model["capabilities"] == ["completion", "tools", "embedding"]
    (loaded,) = http.get("/api/ps").json()["models"]
    assert (loaded["digest"], loaded["context_length"], loaded["size_vram"]) == (model["digest"], 512, 0)
    shown = http.post("/api/show", json={"model": "tiny"}).json()
    assert shown["template"] == TOOLS
    assert shown["model_info"]["llama.context_length"] == 512
    assert shown["capabilities"] == model["capabilities"]
    assert http.post("/api/show", json={"name": "tiny:latest"}).json() == shown
    assert http.post("/api/show", json={"model": "other"}).status_code == 404
    assert "model is missing" in http.post("/api/show", json={}).json()["error"]
    assert http.head("/api/version").status_code == 200
    assert int(http.get("/api/version").json()["version"].split(".")[1]) > 0
    copied = http.post("/api/copy", json={"source": "tiny", "destination": "other"})
    assert (copied.status_code, "--alias other" in copied.json()["error"]) == (400, True)


def test_capabilities(thinking: ServedModel) -> None:
    assert shown(facts_of(thinking)).capabilities == ["completion", "tools", "thinking"]


class Downloads:
    """Stands for the downloads of models: what is fetched is here, and may be removed."""

    def __init__(self) -> None:
        self.here, self.asked, self.removed = {"hf:a/mine"}, list[str](), list[str]()
        self.may_end, self.cancelled = threading.Event(), threading.Event()
        self.problem: Exception | None = None
        self.may_end.set()

    def find(self, name: str, progress: Any) -> None:
        self.asked.append(name)
        try:
            progress(f"fetching {name}", 5, 10)
            while not self.may_end.wait(0.01):
                progress(f"fetching {name}", 5, 10)
        except BaseException:
            self.cancelled.set()
            raise
        if self.problem is not None:
            raise self.problem
        progress(f"fetching {name}", 10, 10)
        self.here.add(name)

    def complete(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.here]

    def remove(self, name: str) -> int:
        self.removed.append(name)
        return 1


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> Downloads:
    made = Downloads()
    monkeypatch.setattr(pulls, "find", made.find)
    monkeypatch.setattr(pulls, "complete", made.complete)
    monkeypatch.setattr("shaderlm.server.ollama_models.remove", made.remove)
    return made


def test_a_pull(http: httpx.Client, downloads: Downloads) -> None:
    parts = lines(http.post("/api/pull", json={"model": "hf.co/a/b"}))
    assert downloads.asked == ["hf:a/b"]
    assert parts[0] == {"status": "pulling hf:a/b"}
    assert [each for each in parts if "total" in each][-1] == {
        "status": "fetching hf:a/b",
        "digest": parts[1]["digest"],
        "total": 10,
        "completed": 10,
    }
    assert "this server serves tiny alone" in parts[-2]["status"]
    assert parts[-1] == {"status": "success"}
    assert http.post("/api/pull", json={"name": "qwen3:0.6B", "stream": False}).json() == {"status": "success"}
    assert downloads.asked[-1] == "qwen3-0.6b"
    served = lines(http.post("/api/pull", json={"model": "tiny:latest"}))
    assert (served[-1], len(downloads.asked)) == ({"status": "success"}, 2)


def test_a_pull_that_fails(http: httpx.Client, downloads: Downloads, path: Path) -> None:
    downloads.problem = ModelError("the hub cannot be reached")
    assert lines(http.post("/api/pull", json={"model": "hf:a/b"}))[-1] == {"error": "the hub cannot be reached"}
    whole = http.post("/api/pull", json={"model": "hf:a/b", "stream": False})
    assert (whole.status_code, whole.json()) == (400, {"error": "the hub cannot be reached"})
    for name in ("/etc/hosts", "nothing", ""):  # no path: which files there are is nobody's business
        found = http.post("/api/pull", json={"model": name})
        assert found.status_code == (404 if name else 400)
    assert len(downloads.asked) == 2
    with running(loader(path)) as other, other.client() as client:
        off = client.post("/api/pull", json={"model": "hf:a/b"})
        assert (off.status_code, "--pull" in off.json()["error"]) == (501, True)


def test_a_pull_ends_with_its_last_reader(server: Running, downloads: Downloads) -> None:
    assert server.service.pulls is not None
    downloads.may_end.clear()
    with server.client() as first, server.client() as second:
        with first.stream("POST", "/api/pull", json={"model": "hf:a/b"}) as one:
            a = one.iter_lines()
            assert [json.loads(next(a))["status"] for _ in range(2)] == ["pulling hf:a/b", "fetching hf:a/b"]
            with second.stream("POST", "/api/pull", json={"model": "hf:a/b"}) as two:
                b = two.iter_lines()
                assert [json.loads(next(b))["status"] for _ in range(2)] == ["pulling hf:a/b", "fetching hf:a/b"]
            while server.service.pulls.readers("hf:a/b") == 2:
                downloads.cancelled.wait(0.01)
            assert not downloads.cancelled.is_set()
        assert downloads.cancelled.wait(60)
    assert downloads.asked == ["hf:a/b"]


def test_a_pull_does_not_hold_the_end_up(path: Path, downloads: Downloads) -> None:
    downloads.may_end.clear()
    with running(loader(path), pull=True) as server, server.client() as client:
        with client.stream("POST", "/api/pull", json={"model": "hf:a/b"}) as stream:
            parts = stream.iter_lines()
            assert [json.loads(next(parts))["status"] for _ in range(2)] == ["pulling hf:a/b", "fetching hf:a/b"]
            server.server.should_exit = True
            assert ["error" in json.loads(each) for each in parts] == [True]
        assert downloads.cancelled.wait(60)


def test_only_what_was_fetched_is_removed(http: httpx.Client, downloads: Downloads) -> None:
    def delete(name: str) -> httpx.Response:
        return http.request("DELETE", "/api/delete", json={"model": name})

    assert "end the server" in delete("tiny").json()["error"]
    for name in ("hf:a/mine", "hf:c/d"):
        http.post("/api/pull", json={"model": name, "stream": False})
    assert "was not fetched by this server" in delete("hf:a/mine").json()["error"]
    assert delete("hf:c/d").json() == {"status": "success"}
    assert delete("hf:c/d").status_code == 400
    assert downloads.removed == ["hf:c/d"]


def test_who_may_pull() -> None:
    assert may_pull(None, "127.0.0.1", [])
    assert not may_pull(None, "127.0.0.1", ["k"])
    assert not may_pull(None, "0.0.0.0", [])
    assert may_pull(True, "0.0.0.0", ["k"])
    assert not may_pull(False, "127.0.0.1", [])


def test_a_silent_stream_says_that_it_lives(server: Running) -> None:
    chat = prepare(server.service.served, ollama.Chat, messages=ASK)
    handle = Handle(server.model.engine, chat.requests[0], 0)
    line = chat.writer([handle]).keep_alive()
    assert json.loads(line)["message"] == {"role": "assistant", "content": ""}
    assert line.endswith(b"}\n")


def test_a_page_may_delete(http: httpx.Client) -> None:
    headers = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "DELETE"}
    assert "DELETE" in http.options("/api/delete", headers=headers).headers["access-control-allow-methods"]


def test_limits_of_forms(path: Path) -> None:
    with load(path, device="cpu") as model:
        served = ServedModel(model, limits=Limits(grammar_bytes=10))
        with pytest.raises(ApiError, match="format"):
            prepare(served, ollama.Chat, messages=ASK, format=SCHEMA)
