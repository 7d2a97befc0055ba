"""Packages that people call from Python drive the server unchanged: litellm, LangChain, instructor, llm, lm-eval."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from .lazily import lazily
from .serving import Running, loader, running
from .test_server import ASK
from .test_server_apis import SCHEMA, TOOL, TOOLS, is_weather
from .tiny_models import write_tiny_llama

litellm: Any = lazily("litellm")
langchain: Any = lazily("langchain_openai")
instructor: Any = lazily("instructor")
openai: Any = lazily("openai")
llm: Any = lazily("llm")
lm_eval: Any = lazily("lm_eval")
pydantic: Any = lazily("pydantic")

# Warnings of these packages are not ours.
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """These packages call home, look at price lists, or ask a hub: here they speak to the server alone."""
    patch = pytest.MonkeyPatch()
    for name in ("LITELLM_LOCAL_MODEL_COST_MAP", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        patch.setenv(name, "True" if name.startswith("LITELLM") else "1")
    patch.setenv("LANGCHAIN_TRACING_V2", "false")
    patch.setenv("NO_PROXY", "*")
    patch.setenv("OPENAI_API_KEY", "none")
    yield
    patch.undo()
    gc.collect()  # sockets that these packages leave open: other tests are not warned of them


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    metadata = {"tokenizer.chat_template": TOOLS}
    path = write_tiny_llama(tmp_path_factory.mktemp("clients") / "tiny.gguf", context=1024, metadata=metadata)
    with running(loader(path, embedding=True)) as made:
        yield made


@pytest.fixture(scope="module")
def expected(server: Running) -> str:
    """What the model answers."""
    return str(server.model.chat(ASK, max_tokens=8))


# litellm ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lite(server: Running) -> dict[str, Any]:
    return {"api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0, "timeout": 60}


def test_litellm_chats(lite: dict[str, Any], expected: str) -> None:
    options = {"model": "openai/tiny", "messages": ASK, "max_tokens": 8, "temperature": 0, **lite}
    whole = litellm.completion(**options)
    assert whole.choices[0].message.content == expected
    assert whole.usage.completion_tokens == 8
    parts = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == expected
    assert parts[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_litellm_calls_tools(lite: dict[str, Any]) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    options = {"model": "openai/tiny", "messages": ASK, "temperature": 0, "tools": [TOOL], "tool_choice": choice}
    (call,) = litellm.completion(**options, **lite).choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert is_weather(json.loads(call.function.arguments))


def test_litellm_embeds(lite: dict[str, Any]) -> None:
    found = litellm.embedding("openai/tiny", ["the", "an"], encoding_format="float", **lite)
    assert [len(each["embedding"]) for each in found.data] == [64, 64]


def test_litellm_speaks_anthropic(server: Running, expected: str) -> None:
    answer = litellm.completion(
        "anthropic/tiny", ASK, max_tokens=8, temperature=0, api_base=server.url, api_key="none", num_retries=0
    )
    assert answer.choices[0].message.content == expected


def test_litellm_speaks_ollama(server: Running, expected: str) -> None:
    answer = litellm.completion("ollama_chat/tiny", ASK, max_tokens=8, temperature=0, api_base=server.url)
    assert answer.choices[0].message.content == expected


def test_litellm_hears_errors(lite: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion("openai/tiny", ASK, temperature=-1, **lite)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion("openai/tiny", [{"role": "user", "content": "the " * 2000}], **lite)


# LangChain ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain(server: Running) -> Any:
    return langchain.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=400, max_retries=0
    )


def test_langchain_chats(chain: Any, expected: str) -> None:
    short = chain.bind(max_tokens=8)
    assert short.invoke("the an in").content == expected
    assert "".join(part.content for part in short.stream("the an in")) == expected
    assert [each.content for each in short.batch(["the an in", "the an in"])] == [expected, expected]


def test_langchain_calls_tools(chain: Any) -> None:
    (call,) = chain.bind_tools([TOOL], tool_choice="weather").invoke("the an in").tool_calls
    assert call["name"] == "weather"
    assert is_weather(call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gives_objects(chain: Any, method: str) -> None:
    found = chain.with_structured_output({"title": "weather", **SCHEMA}, method=method).invoke("the an in")
    assert is_weather(found)


def test_langchain_speaks_responses(chain: Any, server: Running, expected: str) -> None:
    model = langchain.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", use_responses_api=True, temperature=0, max_tokens=8
    )
    assert model.invoke("the an in").text == expected


def test_langchain_embeds(server: Running) -> None:
    model = langchain.OpenAIEmbeddings(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert np.shape(model.embed_documents(["the", "an"])) == (2, 64)


# instructor and llm --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_gives_objects(server: Running, mode: str) -> None:
    fields = {"city": (Literal["Ulm", "Bern"], ...), "days": (Literal[1, 2, 3], ...)}
    # Where other fields are allowed, a model with random weights goes on with them.
    weather = pydantic.create_model("Weather", __config__={"extra": "forbid"}, **fields)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        made = instructor.from_openai(client, mode=instructor.Mode[mode])
        found = made.chat.completions.create(
            model="tiny", messages=ASK, response_model=weather, max_retries=0, temperature=0
        )
    assert is_weather(found.model_dump())


def test_llm_prompts(server: Running, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = f"- {{model_id: tiny, model_name: tiny, api_base: '{server.url}/v1', can_stream: true}}\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    model = llm.get_model("tiny")
    for stream in (True, False):
        answer = model.prompt("the an in", key="none", stream=stream, max_tokens=8, temperature=0)
        assert answer.text() == expected


# lm-eval -------------------------------------------------------------------------------------------------

QUESTIONS = [
    ("the an", [" in", " ou er"], 0),
    ("in the", [" an an", " er", " the ou in"], 1),
    ("ou", [" the", " in"], 0),
]


def evaluate(kind: str, task: dict[str, Any], tmp_path: Path, **arguments: Any) -> list[dict[str, Any]]:
    """The samples of one task of lm-eval, whose questions lie in a file."""
    rows = [{"question": question, "answers": answers, "label": label} for question, answers, label in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"test": str(tmp_path / "questions.jsonl")}
    config = {"dataset_path": "json", "dataset_kwargs": {"data_files": data}, "test_split": "test", **task}
    config |= {"task": "local", "doc_to_text": "{{question}}"}
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args={"model": "tiny", "num_concurrent": 2, "max_retries": 1, **arguments},
        tasks=[config],
        bootstrap_iters=0,
        apply_chat_template=kind.endswith("chat-completions"),
        cache_requests=False,
    )
    samples: list[dict[str, Any]] = found["samples"]["local"]
    return samples


def test_lm_eval_scores_answers(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log likelihoods are our own sums of log probabilities."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    task: dict[str, Any] = {"output_type": "multiple_choice", "doc_to_choice": "answers", "doc_to_target": "label"}
    task |= {"target_delimiter": "", "metric_list": [{"metric": "acc"}]}
    samples = evaluate("local-completions", task, tmp_path, base_url=f"{server.url}/v1/completions", batch_size=4)
    assert len(samples) == len(QUESTIONS)
    tokenizer = server.model.tokenizer
    for sample, (question, answers, _) in zip(samples, QUESTIONS, strict=True):
        for ((theirs, _),), answer in zip(sample["resps"], answers, strict=True):
            context = len(tokenizer.encode(question))
            scored = server.model.score(list(tokenizer.encode(question + answer)))
            assert float(theirs) == pytest.approx(float(np.sum(scored.values[context - 1 :])), abs=1e-4)


def test_lm_eval_chats(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    task: dict[str, Any] = {"output_type": "generate_until", "doc_to_target": "{{answers[label]}}"}
    task |= {"generation_kwargs": {"max_gen_toks": 8, "until": [], "temperature": 0}}
    task |= {"metric_list": [{"metric": "exact_match"}]}
    samples = evaluate("local-chat-completions", task, tmp_path, base_url=f"{server.url}/v1/chat/completions")
    for sample, (question, *_) in zip(samples, QUESTIONS, strict=True):
        asked = server.model.chat([{"role": "user", "content": question}], max_tokens=8)
        assert sample["resps"] == [[asked]]
