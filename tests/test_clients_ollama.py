"""The package `ollama` drives the server: its client, its types and its errors, unchanged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from shaderlm.server.types import ollama as ours

from .lazily import lazily
from .serving import Running, loader, running
from .test_server import ASK
from .test_server_apis import SCHEMA, TOOLS, is_weather
from .tiny_models import write_tiny_llama

ollama: Any = lazily("ollama")

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

OPTIONS = {"temperature": 0, "num_predict": 8, "num_ctx": 256, "seed": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    metadata = {"tokenizer.chat_template": TOOLS}
    path = write_tiny_llama(tmp_path_factory.mktemp("ollama") / "tiny.gguf", context=512, metadata=metadata)
    with running(loader(path, embedding=True), pull=True) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with ollama.Client(host=server.url, trust_env=False) as made:
        yield made


def weather(city: str, days: int) -> str:
    """The weather.

    Args:
      city: Where
      days: How many days from now
    """
    return f"rain in {city} for {days} days"


def test_models(client: Any) -> None:
    (model,) = client.list().models
    assert model.model == "tiny"
    assert model.details.quantization_level == "F32"
    shown = client.show(model.model)
    assert shown.modelinfo["llama.context_length"] == 512
    assert "tools" in shown.capabilities
    (loaded,) = client.ps().models
    assert loaded.expires_at.year == 2200
    assert [each.status for each in client.pull(model.model, stream=True)][-1] == "success"
    assert client.pull(model.model).status == "success"


def test_a_chat(client: Any, server: Running) -> None:
    expected = server.model.chat(ASK, max_tokens=8)
    whole = client.chat("tiny", ASK, options=OPTIONS, keep_alive="5m")
    assert whole.message.content == expected
    assert whole["done_reason"] == "length"
    assert (whole.eval_count, whole.prompt_eval_count) == (8, len(expected.prompt_ids))
    parts = list(client.chat("tiny", ASK, options=ollama.Options(**OPTIONS), stream=True))
    assert "".join(part.message.content for part in parts) == expected
    assert parts[-1].total_duration > 0


def test_a_prompt(client: Any, server: Running) -> None:
    whole = client.generate("tiny", "the an", options=OPTIONS, logprobs=True, top_logprobs=2)
    assert len(whole.logprobs[0].top_logprobs) == 2
    follow = client.generate("tiny", "in", context=whole.context, options=OPTIONS)
    assert follow.prompt_eval_count > len(whole.context)
    raw = list(client.generate("tiny", "the an", raw=True, options=OPTIONS, stream=True))
    assert "".join(part.response for part in raw) == server.model.generate("the an", max_tokens=8)
    assert client.generate("tiny").done_reason == "load"


def test_tools(client: Any) -> None:
    """A function of Python as a tool, its call, and what it gave. The tiny model calls nothing by itself."""
    made = ollama.Message.ToolCall(function={"name": "weather", "arguments": {"city": "Ulm", "days": 3}})
    messages = [
        *ASK,
        ollama.Message(role="assistant", content="", tool_calls=[made]),
        ollama.Message(role="tool", tool_name="weather", content=weather("Ulm", 3)),
    ]
    answer = client.chat("tiny", messages, tools=[weather], options=OPTIONS)
    assert answer.done_reason in ("stop", "length")
    assert answer.message.role == "assistant"


def test_a_form(client: Any) -> None:
    whole = client.chat("tiny", ASK, format=SCHEMA, options={"temperature": 0})
    assert is_weather(json.loads(whole.message.content))


def test_embeddings(client: Any, server: Running) -> None:
    found = client.embed("tiny", ["the", "an"])
    assert [len(each) for each in found.embeddings] == [64, 64]
    assert len(client.embed("tiny", "the", dimensions=8).embeddings[0]) == 8
    assert list(client.embeddings("tiny", "the").embedding) == pytest.approx(
        list(found.embeddings[0]), rel=1e-5, abs=1e-6
    )


def test_errors(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="is not served here") as other:
        client.show("llama3.2")
    assert other.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="num_ctx is 1,024"):
        list(client.chat("tiny", ASK, options={"num_ctx": 1024}, stream=True))
    with pytest.raises(ollama.ResponseError, match="does not think"):
        client.chat("tiny", ASK, think=True)
    with pytest.raises(ollama.ResponseError, match="keeps it loaded"):
        client.generate("tiny", keep_alive=0)
    with pytest.raises(ollama.ResponseError, match="--alias other"):
        client.copy("tiny", "other")
    with pytest.raises(ollama.ResponseError, match="end the server"):
        client.delete("tiny")
    with pytest.raises(ollama.ResponseError, match="there is no model"):
        client.pull("nothing")
    with pytest.raises(ollama.ResponseError, match="there is no /api/create"):
        client.create("mine", from_="tiny")


def test_in_asyncio(server: Running) -> None:
    async def answer() -> str:
        client = ollama.AsyncClient(host=server.url, trust_env=False)
        parts = [part async for part in await client.chat("tiny", ASK, options=OPTIONS, stream=True)]
        await client.close()
        return "".join(part.message.content for part in parts)

    assert asyncio.run(answer()) == server.model.chat(ASK, max_tokens=8)


@pytest.mark.parametrize("route", ["Chat", "Generate", "Embed", "Embeddings", "Show", "Pull", "Copy", "Delete"])
def test_every_field_of_the_package_is_known(route: str) -> None:
    """Unknown fields are ignored: a field that the package sends must not be one of them."""
    theirs = getattr(ollama._types, f"{route}Request").model_fields
    kinds = {"Delete": ours.OllamaModelRequest}
    known = kinds.get(route) or getattr(ours, f"Ollama{route}Request")
    assert set(theirs) <= set(known.__struct_fields__)
    assert set(ollama.Options.model_fields) <= set(ours.OllamaOptions.__struct_fields__)
