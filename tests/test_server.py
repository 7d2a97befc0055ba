"""OpenAI's routes over a real socket, driven by the `openai` package and by plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from .lazily import lazily
from .serving import Running, loader, running
from .tiny_models import write_tiny_llama

if TYPE_CHECKING:
    import openai
else:
    openai = lazily("openai")

pytestmark = [pytest.mark.xdist_group("server"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ASK: list[Any] = [{"role": "user", "content": "the an in"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = write_tiny_llama(tmp_path_factory.mktemp("server") / "tiny.gguf", context=256)
    with running(loader(path, embedding=True, source="hf:some/tiny.gguf")) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def events(response: httpx.Response) -> list[Any]:
    """The data of each event; [DONE] as it is."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def chat_text(chunks: list[Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


# Models --------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    found = client.models.list().data
    assert [model.id for model in found] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    assert client.models.retrieve("hf:some/tiny.gguf").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")


# Chat ----------------------------------------------------------------------------------------------------


def test_a_chat_is_the_same_whole_streamed_and_in_python(client: openai.OpenAI, server: Running) -> None:
    expected = server.model.chat(ASK, max_tokens=12)
    options: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(expected.prompt_ids), 12)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert len({chunk.id for chunk in chunks}) == 1
    last = chunks[-1].usage
    assert last is not None
    assert (last.prompt_tokens, last.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert last.prompt_tokens_details is not None
    assert last.prompt_tokens_details.cached_tokens == len(expected.prompt_ids) - 1


def test_the_order_of_a_stream(http: httpx.Client) -> None:
    body = {"messages": ASK, "max_tokens": 4, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    found = events(http.post("/v1/chat/completions", json=body))
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert found[-1] == "[DONE]"
    assert found[-2]["choices"] == []
    assert found[-2]["usage"]["completion_tokens"] == 4
    assert found[-3]["choices"][0]["delta"] == {}
    assert found[-3]["choices"][0]["finish_reason"] == "length"
    middle = [chunk["choices"][0] for chunk in found[1:-3]]
    assert middle
    assert all(list(choice["delta"]) == ["content"] and choice["finish_reason"] is None for choice in middle)
    assert all(chunk["usage"] is None for chunk in found[:-2])
    without = events(http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 4, "stream": True}))
    assert all("usage" not in chunk for chunk in without[:-1])


def test_a_stop_string_is_never_sent_in_part(http: httpx.Client, server: Running) -> None:
    text = str(server.model.chat(ASK, max_tokens=20))
    stop = text[6:9]
    body = {"messages": ASK, "max_tokens": 20, "temperature": 0, "stop": [stop]}
    whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert whole["message"]["content"] == text[: text.index(stop)]
    assert whole["finish_reason"] == "stop"
    assert chat_text(events(http.post("/v1/chat/completions", json={**body, "stream": True}))[:-1]) == text[:6]


def test_log_probabilities_of_a_chat(client: openai.OpenAI, server: Running) -> None:
    expected = server.model.chat(ASK, max_tokens=5, logprobs=2)
    options: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 5, "temperature": 0}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    assert expected.logprobs is not None
    np.testing.assert_allclose(
        [each.logprob for each in whole.logprobs.content], [each.logprob for each in expected.logprobs], atol=1e-4
    )
    assert [len(each.top_logprobs) for each in whole.logprobs.content] == [2] * 5
    assert b"".join(bytes(each.bytes or []) for each in whole.logprobs.content).decode() == whole.message.content
    chunks = client.chat.completions.create(**options, logprobs=True, top_logprobs=2, stream=True)
    streamed = [
        each
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for each in choice.logprobs.content or []
    ]
    assert [each.token for each in streamed] == [each.token for each in whole.logprobs.content]


def test_several_answers(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 8, "n": 3, "seed": 5}
    whole = client.chat.completions.create(**options)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3, "each has a seed of its own"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_fields_beyond_openai(http: httpx.Client, server: Running) -> None:
    tokens = server.model.chat(ASK, max_tokens=8).ids

    def answer(**more: Any) -> Any:
        body = {"messages": ASK, "max_tokens": 8, "temperature": 0, **more}
        return http.post("/v1/chat/completions", json=body).json()["choices"][0]

    assert answer(stop_token_ids=[tokens[3]])["finish_reason"] == "stop"
    body = {"messages": ASK, "max_tokens": 8, "temperature": 0, "stop_token_ids": [tokens[3]], "ignore_eos": True}
    counts = [
        http.post("/v1/chat/completions", json={**body, **more}).json()["usage"]["completion_tokens"]
        for more in ({}, {"min_tokens": 6})
    ]
    assert counts[0] < 6
    assert counts[1] >= 6
    assert answer(logit_bias={str(tokens[0]): -100})["message"] != answer()["message"]
    assert answer(logit_bias=[[tokens[0], False]])["message"] != answer()["message"]
    assert answer(repeat_penalty=5.0)["message"] == answer(repetition_penalty=5.0)["message"] != answer()["message"]
    assert answer(top_k=1, temperature=3.0)["message"] == answer()["message"]
    assert answer(top_k=-1, min_p=0.0, id_slot=3, cache_prompt=False)["message"] == answer()["message"]
    begun = [*ASK, {"role": "assistant", "content": "the"}]
    continued = answer(messages=begun, continue_final_message=True)["message"]["content"]
    prompt = "<|im_start|>user\nthe an in<|im_end|>\n<|im_start|>assistant\nthe"
    assert continued == server.model.generate(prompt, max_tokens=8)


def test_timings_and_progress(http: httpx.Client) -> None:
    body = {"messages": ASK, "max_tokens": 4, "ignore_eos": True, "stream": True}
    body |= {"timings_per_token": True, "return_progress": True}
    found = events(http.post("/v1/chat/completions", json=body))[:-1]
    progress = [chunk["prompt_progress"] for chunk in found if "prompt_progress" in chunk]
    assert progress[-1]["processed"] == progress[-1]["total"]
    assert all(
        "timings" in chunk for chunk in found if chunk["choices"] and chunk["choices"][0]["delta"].get("content")
    )
    assert found[-1]["timings"]["predicted_n"] == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}),
        ("prediction", {"type": "content"}),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("store", True),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("service_tier", "flex"),
        ("verbosity", "high"),
        ("mirostat", 1),
        ("xtc_probability", 1.5),
        ("min_keep", 2),
        ("post_sampling_probs", True),
        ("stream_options", {"include_usage": True}),
        ("top_logprobs", 3),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(http: httpx.Client, field: str, value: Any) -> None:
    found = http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 1, field: value})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == field
    assert found.json()["error"]["type"] == "invalid_request_error"
    assert field in found.json()["error"]["message"]


def test_unknown_fields_are_ignored(http: httpx.Client) -> None:
    body = {"messages": ASK, "max_tokens": 1, "unheard_of": [1, {"a": None}], "store": False, "modalities": ["text"]}
    body |= {"mirostat": 0, "dynatemp_range": 0.0, "typical_p": 1, "min_keep": 1, "adaptive_target": -1.0}
    found = http.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text


# Completions ---------------------------------------------------------------------------------------------


def test_completions(client: openai.OpenAI, server: Running) -> None:
    prompts = ["the", "an in"]
    expected = [server.model.generate(prompt, max_tokens=6) for prompt in prompts]
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(prompt=prompts, **options)
    assert [choice.text for choice in whole.choices] == expected
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(len(each.prompt_ids) for each in expected)
    streamed = ["", ""]
    for chunk in client.completions.create(prompt=prompts, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == expected
    ids = client.completions.create(prompt=expected[0].prompt_ids, **options)
    assert ids.choices[0].text == expected[0]
    echoed = client.completions.create(prompt="the", echo=True, **options)
    assert echoed.choices[0].text == "the" + expected[0]
    assert (
        len(client.completions.create(model="tiny", prompt="the", extra_body={"ignore_eos": True}).choices[0].text) > 0
    )


def test_log_probabilities_of_completions(http: httpx.Client) -> None:
    body = {"prompt": "the", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    found = choice["logprobs"]
    assert [len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [6] * 4
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(6)]
    parts = [event["choices"][0] for event in events(http.post("/v1/completions", json={**body, "stream": True}))[:-1]]
    joined = [each for part in parts if part["logprobs"] for each in part["logprobs"]["text_offset"]]
    assert joined == found["text_offset"]


@pytest.mark.parametrize("prompt", [[], ["a", 1], [["a"]], [[1], "a"], "", [10**6], None, 3])
def test_prompts_that_are_none(http: httpx.Client, prompt: Any) -> None:
    found = http.post("/v1/completions", json={"prompt": prompt})
    assert found.status_code == 400, found.text
    assert found.json()["error"]["type"] == "invalid_request_error"


# Embeddings ----------------------------------------------------------------------------------------------


def test_embeddings(client: openai.OpenAI, server: Running) -> None:
    found = client.embeddings.create(model="tiny", input=["the", "an in"])  # base64 by default
    plain = client.embeddings.create(model="tiny", input=["the", "an in"], encoding_format="float")
    for a, b in zip(found.data, plain.data, strict=True):
        np.testing.assert_allclose(a.embedding, b.embedding, atol=1e-6)
        assert abs(np.linalg.norm(a.embedding) - 1) < 1e-5
    assert found.usage.prompt_tokens == len(server.model.tokenize("the")) + len(server.model.tokenize("an in"))
    with pytest.raises(openai.BadRequestError, match="dimensions must be the model's 64"):
        client.embeddings.create(model="tiny", input="the", dimensions=32)


# Errors --------------------------------------------------------------------------------------------------


def test_a_request_for_another_model_is_answered(client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model="gpt-x", messages=ASK, max_tokens=1).model == "tiny"
    with pytest.raises(openai.NotFoundError, match="'gpt-x' is not served here; there is 'tiny'"):
        client.models.retrieve("gpt-x")


def test_a_prompt_over_the_context(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 400}], "stream": True}
    found = http.post("/v1/chat/completions", json=body)
    error = found.json()["error"]
    assert (found.status_code, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", 256)
    assert error["param"] == "messages"
    for route, field in (("/v1/completions", "prompt"), ("/v1/responses", "input"), ("/v1/embeddings", "input")):
        assert http.post(route, json={field: "x" * 400}).json()["error"]["param"] == field
    # A text that cannot fit is not tokenized: its number of tokens is what it has at least.
    huge = http.post("/v1/completions", json={"prompt": "x" * 1_000_000}).json()["error"]
    assert 256 < huge["n_prompt_tokens"] < 1_000_000
    assert f"the prompt has at least {huge['n_prompt_tokens']:,} tokens" in huge["message"]
    assert error["n_prompt_tokens"] > 400
    assert "use a model with a longer one" in error["message"], "the context is the model's already"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"messages": [}', "JSON"),
        (b"\xff\xfe", "JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "JSON"),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', "UTF-8"),
        (b"[]", "object"),
        (b"{}", "messages is missing"),
        (b'{"messages": [{"content": "x"}]}', "messages[0].role is missing"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": "hi"}', "messages"),
        (b'{"messages": [{"role": "king", "content": "x"}]}', "role"),
        (b'{"messages": [{"role": "user"}]}', "content"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "image_url is missing"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]}',
            "does not take images; send text alone",
        ),
        (b'{"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}', "this model does not take audio"),
        (b'{"messages": [{"role": "user", "content": [{"type": "dance"}]}]}', "invalid value 'dance'"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "JSON"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e30}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "seed": 99999999999999999999999}', "seed"),
        (b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"99999": 1}}', "logit_bias"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop_token_ids": [99999]}', "99999"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 1000000}', "n"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}', "tools"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
        (b'{"chat_template_kwargs": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_malformed_bodies(http: httpx.Client, body: bytes, word: str) -> None:
    found = http.post("/v1/chat/completions", content=body)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert word in error["message"]


def test_a_body_that_is_too_large(http: httpx.Client) -> None:
    large = b'{"messages": [{"role": "user", "content": "' + b"x" * 20_000_000 + b'"}]}'
    assert http.post("/v1/chat/completions", content=large).status_code == 413
    chunks = (large[at : at + 1_000_000] for at in range(0, len(large), 1_000_000))  # without a content-length
    assert http.post("/v1/chat/completions", content=chunks).status_code == 413
    for path in ("/models/load", "/api/show", "/slots/0?action=erase"):  # names alone
        assert http.post(path, content=large[:100_000]).status_code == 413, path
    assert http.get("/health").status_code == 200


def test_routes_that_are_not_there(http: httpx.Client) -> None:
    assert http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    wrong = http.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
