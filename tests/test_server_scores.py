"""Log probabilities of prompts over HTTP, as lm-eval asks for them, and the other requests that it sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shaderlm.engine import LanguageModel, TokenLogprob, load
from shaderlm.server.batch import BatchEngine
from shaderlm.server.limits import Limits
from shaderlm.server.logprobs import CompletionLogprobsWriter
from shaderlm.server.served import ServedModel

from .serving import Running, loader, running
from .test_server import ASK, events
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("server clients")

# What `lm_eval --model local-completions` sends for a choice of an answer.
LOGLIKELIHOOD: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
LOGLIKELIHOOD |= {"echo": True}
CONTEXT, ANSWERS = [5, 77, 130, 9], ([41, 200], [42], [17, 17, 3, 99])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("scores") / "tiny.gguf", context=512)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Running]:
    with running(loader(path, limits=Limits(prompt_logprobs=1000))) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


@pytest.fixture(scope="module")
def model(server: Running) -> LanguageModel:
    return server.model


def choices(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return sorted(found, key=lambda choice: int(choice["index"]))


def loglikelihood(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """As lm-eval reads a choice: the last token is the one that was generated."""
    logprobs = choice["logprobs"]
    values = logprobs["token_logprobs"][context:-1]
    tops = [max(top.values()) for top in logprobs["top_logprobs"][context:-1]]
    return sum(values), values == tops


# lm-eval -------------------------------------------------------------------------------------------------


def test_choices_of_an_answer(http: httpx.Client, model: LanguageModel) -> None:
    """A batch of token ids: each score is the sum of our own log probabilities of the answer."""
    prompts = [[*CONTEXT, *answer] for answer in ANSWERS]
    found = choices(http, {**LOGLIKELIHOOD, "prompt": prompts})
    for prompt, choice, score in zip(prompts, found, model.score(prompts), strict=True):
        lists = choice["logprobs"]
        sizes = {len(lists[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        assert sizes == {len(prompt) + 1}
        assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
        total, _ = loglikelihood(choice, len(CONTEXT))
        assert total == pytest.approx(float(score.values[len(CONTEXT) - 1 :].sum()), abs=1e-4)
        assert choice["text"].startswith(model.detokenize(prompt))


def test_an_answer_that_is_the_most_likely_one(http: httpx.Client, model: LanguageModel) -> None:
    greedy = model.generate(CONTEXT, max_tokens=3, ignore_eos=True).ids
    other = [*greedy[:2], (greedy[2] + 1) % 256]
    found = choices(http, {**LOGLIKELIHOOD, "prompt": [[*CONTEXT, *greedy], [*CONTEXT, *other]]})
    assert [loglikelihood(choice, len(CONTEXT))[1] for choice in found] == [True, False]


def test_a_token_that_ends_the_text_has_its_place(http: httpx.Client, model: LanguageModel) -> None:
    """lm-eval takes the last entry for the generated token, whichever it is."""
    (eos,) = {266} & model.tokenizer.stop_ids
    body = {**LOGLIKELIHOOD, "prompt": [CONTEXT], "logit_bias": {str(eos): 100}}
    (choice,) = choices(http, body)
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"][-1] == "<|im_end|>"
    assert len(choice["logprobs"]["token_logprobs"]) == len(CONTEXT) + 1
    assert loglikelihood(choice, 1)[0] == pytest.approx(model.score(CONTEXT).total, abs=1e-4)
    parts = [event["choices"][0] for event in events(http.post("/v1/completions", json={**body, "stream": True}))[:-1]]
    lists = [part["logprobs"] for part in parts if part["logprobs"]]
    assert [token for each in lists for token in each["tokens"]] == choice["logprobs"]["tokens"]
    without = choices(http, {**body, "echo": False})
    assert without[0]["logprobs"]["tokens"] == []


def test_texts(http: httpx.Client, model: LanguageModel) -> None:
    """`tokenized_requests=False`: one text at a time, or several."""
    texts = ["the an in", "in"]
    for prompt in (texts[0], texts):
        found = choices(http, {**LOGLIKELIHOOD, "prompt": prompt})
        for text, choice in zip(texts, found, strict=False):
            lists = choice["logprobs"]
            assert choice["text"].startswith(text)
            assert "".join(lists["tokens"][:-1]) == text
            assert lists["text_offset"] == [len("".join(lists["tokens"][:i])) for i in range(len(lists["tokens"]))]
            assert loglikelihood(choice, 1)[0] == pytest.approx(model.score(text).total, abs=1e-4)


def test_generations_of_lm_eval(http: httpx.Client, model: LanguageModel) -> None:
    """Those of `local-completions` and `local-chat-completions`, with no stop strings and with some."""
    shape: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0, "seed": 1234}
    (choice,) = choices(http, {**shape, "prompt": ["the an in"], "stop": ["\n\n", "<|endoftext|>"]})
    assert choice["text"] == model.generate("the an in", max_tokens=6)
    chat = http.post("/v1/chat/completions", json={**shape, "messages": [{**ASK[0], "type": "text"}], "stop": []})
    assert chat.json()["choices"][0]["message"]["content"] == model.chat(ASK, max_tokens=6)


def test_the_tokenizer_over_http(http: httpx.Client, model: LanguageModel) -> None:
    """`tokenizer_backend=remote`, which it takes where the server has these routes: models without a repository."""
    info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<|im_start|>", "<|im_end|>", None)
    assert model.chat_template is not None
    assert info["chat_template"] == model.chat_template.source
    for text in ("the an in", info["eos_token"], ""):
        ids = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        assert ids == model.tokenizer.encode(text)
        assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text
    missing = http.post("/tokenize", json={"add_special": True})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "content")


# The rest of OpenAI's API --------------------------------------------------------------------------------


def test_no_tokens_at_all(http: httpx.Client, model: LanguageModel) -> None:
    expected = model.score(CONTEXT, logprobs=5)
    body: dict[str, Any] = {"prompt": CONTEXT, "max_tokens": 0, "logprobs": 5, "echo": True}
    response = http.post("/v1/completions", json=body).json()
    (choice,) = response["choices"]
    assert (choice["text"], choice["finish_reason"]) == (model.detokenize(CONTEXT), "length")
    values = [value and pytest.approx(value, abs=1e-6) for value in (None, *expected.values.tolist())]
    assert choice["logprobs"]["token_logprobs"] == values
    assert all(5 <= len(top) <= 6 for top in choice["logprobs"]["top_logprobs"][1:])
    assert response["usage"]["completion_tokens"] == 0
    parts = events(http.post("/v1/completions", json={**body, "stream": True}))
    assert [part["choices"][0] for part in parts[:-1]] == [choice]
    assert choices(http, {"prompt": "the", "max_tokens": 0})[0]["text"] == ""
    plain = choices(http, {"prompt": "the", "max_tokens": 0, "echo": True})[0]
    assert (plain["text"], plain["logprobs"]) == ("the", None)
    alone = choices(http, {**body, "logprobs": 0})[0]["logprobs"]
    assert (alone["token_logprobs"], alone["top_logprobs"]) == (values, None)


def test_streams_are_the_same(http: httpx.Client) -> None:
    """Prompts and answers, of two prompts at once and of two choices."""
    for more in ({"prompt": ["the an", "in"]}, {"prompt": "the an", "n": 2}):
        body = {"max_tokens": 4, "temperature": 0, "logprobs": 2, "echo": True, "ignore_eos": True, **more}
        whole = choices(http, body)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        lists: list[dict[str, list[Any]]] = [{name: [] for name in names} for _ in whole]
        texts = ["" for _ in whole]
        for event in events(http.post("/v1/completions", json={**body, "stream": True}))[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
                for name in names if choice["logprobs"] else ():
                    lists[choice["index"]][name] += choice["logprobs"][name]
        assert texts == [choice["text"] for choice in whole]
        assert_alike(lists, [choice["logprobs"] for choice in whole])


def assert_alike(found: Any, expected: Any) -> None:
    """Which rows share a step is chance, and the CPU adds up in another order then."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_alike(list(found.values()), list(expected.values()))
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for each, other in zip(found, expected, strict=True):
            assert_alike(each, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4)
    else:
        assert found == expected


def test_a_request_that_is_too_large(http: httpx.Client) -> None:
    body = {"prompt": [[1] * 100, [2] * 100], "max_tokens": 1, "echo": True, "logprobs": 4}
    assert http.post("/v1/completions", json=body).status_code == 200
    found = http.post("/v1/completions", json={**body, "logprobs": 5})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "logprobs")
    assert "200 tokens of prompts with 5 alternatives each are 1,200 numbers" in found.json()["error"]["message"]
    assert http.post("/v1/completions", json={**body, "logprobs": 5, "echo": False}).status_code == 200


def test_lines_of_a_batch(path: Path) -> None:
    with load(path, device="cpu") as model:
        body = {**LOGLIKELIHOOD, "model": model.report.name, "prompt": [CONTEXT]}
        call = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        ((_, result),) = BatchEngine(ServedModel(model)).run([("a", call)])
        (choice,) = json.loads(result.line)["response"]["body"]["choices"]
        assert loglikelihood(choice, 1)[0] == pytest.approx(model.score(CONTEXT).total, abs=1e-4)


# Tokens and their places in the text ---------------------------------------------------------------------


def test_bos_that_is_put_before_a_text(tmp_path: Path) -> None:
    """It has a place in the lists, and none in the text; where the text has it, it has both."""
    path = write_tiny_llama(tmp_path / "bos.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    with running(loader(path)) as server, server.client() as http:
        body: dict[str, Any] = {"max_tokens": 0, "logprobs": 0, "echo": True}
        added = choices(http, {**body, "prompt": "the in"})[0]
        assert added["text"] == "the in"
        assert added["logprobs"]["tokens"] == ["<|im_start|>", "the", " ", "in"]
        assert added["logprobs"]["text_offset"] == [0, 0, 3, 4]
        given = choices(http, {**body, "prompt": "<|im_start|>the in"})[0]
        assert given["logprobs"]["text_offset"] == [0, 12, 15, 16]
        assert given["logprobs"]["token_logprobs"] == added["logprobs"]["token_logprobs"]
        ids = choices(http, {**body, "prompt": server.model.tokenize("the in")})[0]
        assert ids == given


def test_tokens_with_the_same_text(model: LanguageModel) -> None:
    """Of those, the dictionary has the most likely one: whether the best is among them is read from it."""
    tokenizer = model.tokenizer
    handle: Any = type("Handle", (), {"prompt_logprobs": None, "stop_logprob": None})()
    writer = CompletionLogprobsWriter(tokenizer, 2, handle, "")
    same = [(65, -0.5), (65, -3.0)]
    lists = writer.write([TokenLogprob(65, -3.0, same)])
    assert lists.top_logprobs == [{tokenizer.piece(65).decode(): -0.5}]
