"""What llama-server's clients use beside its routes: spellings, fields, and what they read of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shaderlm.engine import Handle, load
from shaderlm.engine.thinking import ThinkingBudget
from shaderlm.errors import InputError
from shaderlm.graph.sampling import kept_weights
from shaderlm.server.access import Access, Origins
from shaderlm.server.generation import progress_of
from shaderlm.server.infill import infill_ids
from shaderlm.server.served import ServedModel
from shaderlm.server.types.llama_server import InfillFile, InfillRequest
from shaderlm.text import ChatFormat, ChatTemplate, TextStream, jinja
from shaderlm.text.named_templates import NAMED_TEMPLATES
from shaderlm.text.stream import LineLimits

from .serving import Running, loader, running
from .test_server import ASK, events
from .test_server_apis import THINKING
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("server clients")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("server") / "tiny.gguf", context=256)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Running]:
    with running(loader(path, embedding=True)) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


GREEDY: dict[str, Any] = {"n_predict": 8, "temperature": 0}


@pytest.mark.parametrize(
    ("short", "long", "body"),
    [
        ("/chat/completions", "/v1/chat/completions", {"messages": ASK, "max_tokens": 2, "seed": 1}),
        ("/responses", "/v1/responses", {"input": "the", "max_output_tokens": 2, "seed": 1}),
        ("/completions", "/completion", {"prompt": "the", "n_predict": 2, "seed": 1}),
        ("/embeddings", "/embedding", {"content": "the"}),
        ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens", {"messages": ASK}),
        ("/responses/input_tokens", "/v1/responses/input_tokens", {"input": "the"}),
        ("/models", "/v1/models", None),
        ("/health", "/v1/health", None),
    ],
)
def test_routes_are_there_without_v1(http: httpx.Client, short: str, long: str, body: Any) -> None:
    answers = [http.get(each) if body is None else http.post(each, json=body) for each in (short, long)]
    assert [each.status_code for each in answers] == [200, 200]
    first, second = (each.json() for each in answers)
    assert type(first) is type(second)
    assert not isinstance(first, dict) or first.keys() == second.keys()


def test_routes_that_have_nothing_to_say(http: httpx.Client) -> None:
    assert http.get("/lora-adapters").json() == []
    for route in ("/rerank", "/v1/rerank", "/slots/0?action=save", "/infill"):
        found = http.post(route, json={"input_prefix": "a", "input_suffix": "b"})
        assert (found.status_code, found.json()["error"]["type"]) == (501, "not_supported_error"), route


def test_embeddings_in_both_shapes(http: httpx.Client) -> None:
    (plain,) = http.post("/embedding", json={"content": ["the"]}).json()
    (openai,) = http.post("/v1/embeddings", json={"input": "the"}).json()["data"]
    assert plain["embedding"] == [openai["embedding"]]
    assert http.post("/embedding", json={}).json()["error"]["param"] == "content"


def test_spellings_of_logit_bias(http: httpx.Client, server: Running) -> None:
    text = http.post("/completion", json={**GREEDY, "prompt": "the"}).json()["content"]
    ids = server.model.tokenize(text, add_special=False)
    barred = dict.fromkeys(ids, False)
    spellings: list[Any] = [
        [[each, False] for each in ids],
        {str(each): False for each in ids},
        [[text, False]],
        {text: False},
    ]
    settings = []
    for each in spellings:
        answer = http.post("/completion", json={**GREEDY, "prompt": "the", "logit_bias": each, "return_tokens": True})
        assert answer.status_code == 200, answer.text
        assert not barred.keys() & set(answer.json()["tokens"])
        settings.append(answer.json()["generation_settings"]["logit_bias"])
    assert settings == [[{"token": each, "bias": None} for each in barred]] * 4
    wrong = http.post("/completion", json={**GREEDY, "prompt": "the", "logit_bias": {"9" * 30: 1}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "logit_bias")


def test_names_of_the_length(http: httpx.Client) -> None:
    body = {"prompt": "the", "ignore_eos": True, "max_tokens": 3}
    assert http.post("/completion", json=body).json()["tokens_predicted"] == 3
    assert http.post("/completion", json={**body, "n_predict": 2}).json()["tokens_predicted"] == 2


def test_ignored_ends_are_never_sampled(http: httpx.Client, server: Running) -> None:
    answer = http.post("/completion", json={**GREEDY, "prompt": "the", "ignore_eos": True}).json()
    biases = {each["token"]: each["bias"] for each in answer["generation_settings"]["logit_bias"]}
    assert biases == dict.fromkeys(server.model.tokenizer.stop_ids)


def test_fields_of_a_response_are_chosen(http: httpx.Client) -> None:
    fields = ["content", "generation_settings/n_predict", "prompt", "none/at_all"]
    body = {**GREEDY, "prompt": "the", "response_fields": fields}
    answer = http.post("/completion", json=body).json()
    assert list(answer) == fields[:3]
    assert (answer["generation_settings/n_predict"], answer["prompt"]) == (8, "the")
    assert events(http.post("/completion", json={**body, "stream": True}))[-1].keys() == answer.keys()
    assert "timings" in http.post("/completion", json={**body, "response_fields": []}).json()


def test_streamed_probabilities_come_one_by_one(http: httpx.Client) -> None:
    parts = events(http.post("/completion", json={**GREEDY, "prompt": "the", "n_probs": 2, "stream": True}))[:-1]
    assert [len(each["completion_probabilities"]) for each in parts] == [1] * len(parts)
    assert [[token["id"] for token in each["completion_probabilities"]] for each in parts] == [
        each["tokens"] for each in parts
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities_after_sampling(http: httpx.Client, server: Running, stream: bool) -> None:
    """They are those of the formulas, of the tokens that the filters leave."""
    how = {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
    body = {"prompt": "the in", "n_predict": 3, "n_probs": 20, "post_sampling_probs": True, "seed": 5, **how}
    if stream:
        parts = events(http.post("/completion", json={**body, "stream": True}))[:-1]
        found = [token for part in parts for token in part["completion_probabilities"]]
    else:
        found = http.post("/completion", json=body).json()["completion_probabilities"]
    ids = server.model.tokenize("the in")
    for each in found:
        weights = kept_weights(server.model.logits(ids)[-1], 0.7, 12, 0.9, 0.02)
        expected = weights / weights.sum()
        assert each["prob"] == pytest.approx(expected[each["id"]], rel=1e-3)
        top = {token["id"]: token["prob"] for token in each["top_probs"]}
        assert top == pytest.approx({int(i): expected[i] for i in weights.nonzero()[0]}, rel=1e-3)
        assert "logprob" not in each
        ids.append(each["id"])
    plain = http.post("/completion", json={**body, "post_sampling_probs": False}).json()["completion_probabilities"]
    assert {len(each["top_logprobs"]) for each in plain} == {20}


class _Bytes:
    """A tokenizer whose tokens are bytes."""

    bytes_by_token = [bytes([i]) for i in range(256)]  # noqa: RUF012


@pytest.mark.parametrize(
    ("text", "indent", "expected"),
    [
        ("a\n    b\n    c", 4, "a\n    b\n    c"),
        ("a\n    b\n  c\n", 4, "a\n    b\n  "),
        ("a\n\t\tb\nc", 2, "a\n\t\tb\n"),
        ("a\n\n    b", 4, "a\n"),
        ("a\nb", 0, "a\nb"),
    ],
)
def test_a_text_ends_at_a_smaller_indentation(text: str, indent: int, expected: str) -> None:
    stream = TextStream(_Bytes(), min_indent=indent)  # type: ignore[arg-type]
    assert "".join(map(stream.push, text.encode())) + stream.finish() == expected
    assert stream.stopped == stream.outdented == (text != expected)


def test_an_indentation_ends_a_generation(http: httpx.Client) -> None:
    grammar = 'root ::= "a\\n  b\\nc" [d]*'
    whole = http.post("/completion", json={**GREEDY, "prompt": "the", "grammar": grammar, "n_indent": 2})
    answer = whole.json()
    assert (answer["content"], answer["stop_type"], answer["has_new_line"]) == ("a\n  b\n", "limit", True)


def test_a_time_limit_waits_for_a_line_end(path: Path) -> None:
    from dataclasses import replace

    with load(path, device="cpu") as model:
        request = replace(model.request("the"), lines=LineLimits(seconds=2.0))
        handle = Handle(model.engine, request, 0)
        handle.submitted_at, handle.started, handle.first = 1.0, 2.0, 3.0
        (line_end,) = model.tokenize("\n", add_special=False)
        (word,) = model.tokenize("a", add_special=False)
        for seconds, token, over in ((1.0, word, False), (9.0, word, False), (1.5, line_end, False), (2.5, word, True)):
            handle.last = handle.first + seconds
            assert handle.take_token(token, None) == over
        assert handle.stop_reason() == "length"


# Progress ------------------------------------------------------------------------------------------------


def test_progress_begins_with_what_is_cached(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "the in an " * 6}], "max_tokens": 2, "stream": True}
    for route in ("/v1/chat/completions", "/completion", "/v1/responses"):
        if route == "/completion":
            body = {"prompt": "the in an " * 6, "n_predict": 2, "stream": True}
        if route == "/v1/responses":
            body = {"input": "the in an " * 6, "max_output_tokens": 2, "stream": True}
        options = {"return_progress": True, "timings_per_token": True}
        for cached in (False, True):
            parts = [each for each in events(http.post(route, json={**body, **options})) if "prompt_progress" in each]
            progress = [each["prompt_progress"] for each in parts]
            assert progress[0]["processed"] == progress[0]["cache"]
            assert progress[0]["cache"] > 0 or not cached
            assert progress[-1]["processed"] == progress[-1]["total"]
            done = [each["processed"] for each in progress]
            assert done == sorted(set(done))
            first = parts[0]["timings"]
            assert (first["prompt_n"], first["prompt_ms"], first["predicted_n"]) == (0, 0.0, 0)
            assert parts[-1]["timings"]["prompt_ms"] > 0


def test_progress_of_a_prompt_that_is_being_read(path: Path) -> None:
    with load(path, device="cpu") as model:
        handle = Handle(model.engine, model.request("the an in"), 0)
        assert progress_of(handle).prompt.processed == 0
        assert progress_of(handle).timings.prompt_ms == 0
        handle.submitted_at, handle.started = 1.0, 2.0
        handle.first = handle.last = 4.0
        handle.take_token(5, None)
        whole = progress_of(handle)
        assert (whole.timings.prompt_ms, whole.timings.predicted_n) == (2000.0, 0)
        assert whole.timings.prompt_n == whole.prompt.total == whole.prompt.processed


def test_timings_of_a_stream_come_with_its_usage(http: httpx.Client) -> None:
    body = {"messages": ASK, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    parts = events(http.post("/chat/completions", json={**body, "timings_per_token": True}))[:-1]
    assert "timings" not in parts[0]
    assert parts[-1]["choices"] == []
    assert parts[-1]["timings"]["predicted_n"] == parts[-1]["usage"]["completion_tokens"]


# Conversations -------------------------------------------------------------------------------------------


def _prompt(http: httpx.Client, **body: Any) -> str:
    answer = http.post("/chat/completions", json={"messages": ASK, "max_tokens": 1, "verbose": True, **body})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["__verbose"]["prompt"])


def test_verbose_answers_tell_their_prompt(http: httpx.Client) -> None:
    assert _prompt(http).endswith("the an in<|im_end|>\n<|im_start|>assistant\n")
    plain = http.post("/chat/completions", json={"messages": ASK, "max_tokens": 1}).json()
    assert "__verbose" not in plain
    body = {"messages": ASK, "max_tokens": 3, "stream": True, "verbose": True}
    last = [each for each in events(http.post("/chat/completions", json=body)) if "__verbose" in each]
    assert [each["choices"][0]["finish_reason"] for each in last] == ["length"]
    assert last[0]["__verbose"]["generation_settings"]["n_predict"] == 3


def test_a_last_message_of_the_assistant_is_continued(http: httpx.Client) -> None:
    begun: list[Any] = [*ASK, {"role": "assistant", "content": "Whill"}]
    for more in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        assert _prompt(http, messages=begun, **more).endswith("<|im_start|>assistant\nWhill")
    parts = [*ASK, {"role": "assistant", "content": [{"type": "text", "text": text} for text in ("Wh", "ill")]}]
    assert _prompt(http, messages=parts).endswith("<|im_start|>assistant\nWh\n\nill")
    answered = _prompt(http, messages=begun, continue_final_message=False)
    assert answered.endswith("Whill<|im_end|>\n<|im_start|>assistant\n")
    assert _prompt(http, messages=begun, add_generation_prompt=True) == answered
    for wrong in (
        {"messages": [*begun, begun[-1]]},
        {"messages": begun, "continue_final_message": True, "add_generation_prompt": True},
    ):
        assert http.post("/chat/completions", json={**wrong, "max_tokens": 1}).status_code == 400
    shown = http.post("/apply-template", json={"messages": ASK, "add_generation_prompt": False}).json()["prompt"]
    assert shown.endswith("the an in<|im_end|>\n")


SAYS_WHEN = "{% if enable_thinking is false %}[off]{% endif %}{# </think> #}{{ messages[0]['content'] }}"


@pytest.mark.parametrize(
    ("source", "thinking", "expected"),
    [
        (THINKING, True, "assistant\n<think>\n"),
        (THINKING, None, "assistant\n<think>\n"),
        (THINKING, False, "assistant\n<think>\n</think>"),
        ("{{ messages[0]['content'] }}{# <|END_THINKING|> #}", False, "Hi<|START_THINKING|><|END_THINKING|>"),
        ("{{ messages[0]['content'] }}{# <|END_THINKING|> #}", True, "Hi"),
        ("{{ messages[0]['content'] }}", False, "Hi"),
        (SAYS_WHEN, False, "[off]Hi"),
        (SAYS_WHEN, True, "Hi"),
    ],
)
def test_thoughts_can_be_switched_off(source: str, thinking: bool | None, expected: str) -> None:
    template = ChatTemplate(source)
    messages = [{"role": "user", "content": "Hi"}]
    assert template.render(messages, thinking=thinking).endswith(expected)
    if thinking is False:
        assert template.render(messages, kwargs={"enable_thinking": False}).endswith(expected)
        assert template.render(messages, thinking=True, kwargs={"enable_thinking": False}).endswith(expected)


@pytest.fixture(scope="module")
def thinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = write_tiny_llama(
        tmp_path_factory.mktemp("thinks") / "thinks.gguf", metadata={"tokenizer.chat_template": THINKING}
    )
    with running(loader(path, thinking_budget=9)) as made, made.client() as http:
        yield http


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"enable_thinking": False}, "</think>"),
        ({"reasoning_effort": "none"}, "</think>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "</think>"),
        ({"reasoning_effort": "low"}, "<think>\n"),
        ({}, "<think>\n"),
    ],
)
def test_fields_that_switch_thoughts_off(thinks: httpx.Client, fields: Any, end: str) -> None:
    assert _prompt(thinks, **fields).endswith(end)


@pytest.mark.parametrize("budget", [0, 4, None])
def test_thoughts_have_a_budget(thinks: httpx.Client, budget: int | None) -> None:
    """Its own tokens, those of the end of the thought, and then an answer."""
    body: dict[str, Any] = {"messages": ASK, "max_tokens": 40, "temperature": 0}
    body["logit_bias"] = {"</": -100}
    if budget is not None:
        body["reasoning_budget_tokens"] = budget
    choice = thinks.post("/chat/completions", json=body).json()
    raw = thinks.post("/chat/completions", json={**body, "reasoning_format": "none"}).json()
    text = raw["choices"][0]["message"]["content"]
    thought, end, answer = text.partition("</think>")
    assert end
    assert len(thinks.post("/tokenize", json={"content": thought}).json()["tokens"]) <= (
        9 if budget is None else budget
    )
    assert choice["choices"][0]["message"]["content"] == answer.lstrip()
    assert choice["usage"]["completion_tokens_details"]["reasoning_tokens"] < 40 or not thought


def test_a_thought_that_ends_by_itself_is_left_alone(path: Path) -> None:
    with load(path, device="cpu") as model:
        output = ChatFormat(reasoning=True, thinking=False)
        budget = ThinkingBudget(model.tokenizer, model.config.vocabulary, output, 10, None)
        all_tokens = budget.start().mask()
        cases = (
            *(("<think>a</think>" + "b" * 20, False), ("abc<think>" + "d" * 20, False)),
            *(("\n<think>" + "a" * 12, True), ("<think>abcdef</thi", True)),
        )
        for text, ended in cases:
            constraint = budget.start()
            masks = []
            for token in model.tokenize(text, add_special=False):
                masks.append(constraint.mask() == all_tokens)
                constraint.accept(token)
            assert (not all(masks)) == ended or text.endswith("</thi"), text
            assert constraint.is_complete(0, b"")
        given = list[int]()
        while (mask := constraint.mask()) != all_tokens:
            assert mask is not None
            (token,) = (8 * i + bit for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1)
            constraint.accept(token)
            given.append(token)
        assert model.detokenize(given) == "nk>", "the tag was begun"


def test_a_budget_of_messages(thinks: httpx.Client) -> None:
    body = {"messages": ASK, "max_tokens": 40, "temperature": 0, "model": "claude"}
    answer = thinks.post("/v1/messages", json={**body, "thinking": {"type": "enabled", "budget_tokens": 0}}).json()
    assert [each["type"] for each in answer["content"]] == ["text"]


# Templates by name ---------------------------------------------------------------------------------------


def test_named_templates() -> None:
    messages = [
        {"role": "system", "content": "You are a test."},
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Who?"},
    ]
    environment = jinja.environment()
    texts = {
        name: environment.from_string(source).render(messages=messages, add_generation_prompt=True)
        for name, source in NAMED_TEMPLATES.items()
    }
    assert texts["command-r"] == (
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>You are a test.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi there<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Hello<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Who?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    )
    assert texts["llama2-sys"] == (
        "[INST] <<SYS>>\nYou are a test.\n<</SYS>>\n\nHi there [/INST]Hello</s>[INST] Who? [/INST]"
    )
    assert texts["gemma"] == (
        "<start_of_turn>user\nYou are a test.\n\nHi there<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nWho?<end_of_turn>\n<start_of_turn>model\n"
    )
    for name, text in texts.items():
        for message in messages:
            assert text.count(message["content"]) == 1, name


def test_names_that_come_together_have_no_order() -> None:
    from shaderlm.cli.serve import serve

    for arguments, names in (
        (["-a", "tiny-2,fim,code"], ("code", "fim", "tiny-2")),
        (["-a", "b", "-a", "a"], ("b", "a")),
    ):
        assert serve.make_context("serve", arguments).params["aliases"] == names


def test_a_name_that_is_no_template() -> None:
    from shaderlm.cli.serve import _template

    assert _template("chatml", None) == NAMED_TEMPLATES["chatml"]
    with pytest.raises(InputError, match="one of chatml, llama3"):
        _template("chat-ml", None)


def test_templates_know_the_day() -> None:
    from datetime import date

    before = date.today()
    text = ChatTemplate("{{ date_string }}|{{ datetime }}").render(ASK)
    assert text in {f"{day:%d %b %Y}|{day:%b %d %Y}" for day in (before, date.today())}
    assert ChatTemplate("{{ date_string }}").render(ASK, kwargs={"date_string": "now"}) == "now"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ '[' + m['content'].strip() + ']' }}{% endfor %}{# tools #}", "[the an in][]"),
        ("{% for m in messages %}{{ '-' if m['content'] is none else '+' }}{% endfor %}", "+-"),
    ],
)
def test_calls_without_content(source: str, expected: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[Any] = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate(source + "{% if tools %}{% endif %}").render(messages) == expected


def test_a_template_that_takes_tools_as_text() -> None:
    template = ChatTemplate("{{ functions + messages[0]['content'] }}")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert template.knows_tools
    assert '"name": "f"' in template.render(ASK, tools=[tool])
    assert template.render(ASK) == ASK[0]["content"]


# Gaps ----------------------------------------------------------------------------------------------------


def test_a_gap_is_filled(path: Path) -> None:
    with load(path, device="cpu") as model:
        vocabulary = model.tokenizer.vocabulary
        names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>")
        tokens = list(vocabulary.tokens)
        places = [*range(len(tokens) - 5, len(tokens))]
        for place, name in zip(places, names, strict=True):
            tokens[place] = name
        object.__setattr__(vocabulary, "tokens", tokens)
        vocabulary.__dict__["not_normal"] = [*vocabulary.not_normal, *places]
        prefix, suffix, middle, file, repository = places

        def ids(text: str) -> list[int]:
            return model.tokenize(text, add_special=False)

        body = InfillRequest(input_prefix="ab", input_suffix="cd", prompt="e")
        body.input_extra = [InfillFile(filename="x", text="y")]
        assert infill_ids(ServedModel(model), body) == [
            *([vocabulary.bos] if vocabulary.add_bos else []),
            *(repository, *ids("myproject\n"), file, *ids("x\n"), *ids("y"), file, *ids("filename\n")),
            *(prefix, *ids("ab"), *ids("e"), suffix, *ids("cd"), middle),
        ]


@pytest.mark.parametrize("extra", [{}, {"filename": "ok"}, {"filename": 1, "text": "a"}, {"filename": "a", "text": 4}])
def test_files_beside_a_gap_are_checked(http: httpx.Client, extra: Any) -> None:
    body = {"input_prefix": "a", "input_suffix": "b", "input_extra": [extra]}
    assert http.post("/infill", json=body).status_code == 400


# Browsers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "allowed", "origin", "admitted"),
    [
        ([], [], "http://localhost:3000", True),
        ([], [], "https://chat.example", False),
        (["key"], [], "https://chat.example", True),
        (["key"], [], "localhost", True),
        (["key"], ["localhost"], "https://chat.example", False),
        (["key"], ["localhost"], "http://localhost.evil.com", False),
    ],
)
def test_who_may_ask_from_a_page(keys: list[str], allowed: list[str], origin: str, admitted: bool) -> None:
    async def nobody(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    app = Access(nobody, keys, Origins(allowed, has_keys=bool(keys)), "127.0.0.1")
    transport = httpx.ASGITransport(app=app)
    asks = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}

    async def preflight() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
            return await client.options("/completions", headers=asks)

    import asyncio

    answer = asyncio.run(preflight())
    assert answer.status_code == 200
    assert answer.headers.get("access-control-allow-origin") == (origin if admitted else None)
    assert answer.headers.get("access-control-allow-credentials") == ("true" if admitted else None)


def test_metrics_say_since_when(http: httpx.Client) -> None:
    found = http.get("/metrics")
    assert int(found.headers["process-start-time-unix"]) > 0
    names = {name for name, _ in found.headers.raw}
    assert names >= {b"Process-Start-Time-Unix", b"Content-Type"}, "some clients know them by their capitals"
