"""Structured output and tools over OpenAI's chat, OpenAI's responses and Anthropic's messages, by their packages."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from shaderlm.engine import Delta, Handle, Request, TokenLogprob
from shaderlm.server.anthropic import conversation_of
from shaderlm.server.chat import Chat
from shaderlm.server.images import Images
from shaderlm.server.responses import Responses
from shaderlm.server.responses import conversation_of as items_as_messages
from shaderlm.server.routes import Prepared
from shaderlm.server.served import ServedModel
from shaderlm.server.types.anthropic import CountTokensRequest, MessagesRequest
from shaderlm.server.types.openai import ChatRequest, CompletionRequest, EmbeddingRequest, Message
from shaderlm.server.types.responses import MessageItem, ResponsesRequest
from shaderlm.text.tools import messages_with_tools

from .lazily import lazily
from .serving import Running, loader, running
from .test_server import ASK
from .tiny_models import CHATML, write_tiny_llama

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic, openai = lazily("anthropic"), lazily("openai")

pytestmark = [pytest.mark.xdist_group("server"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Bern"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "weather", "description": "The weather", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
# A template that names its tools: a prompt of every description would take most of the tests' time.
TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' ~ (call.function | tojson) ~ '\n</tool_call>' }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A template that thinks first: the model is given its tag.
THINKING = CHATML.replace("<|im_start|>assistant\n' }}{% endif %}", "<|im_start|>assistant\n<think>\n' }}{% endif %}")
THINKING += "{# </think> #}"


def is_weather(arguments: Any) -> bool:
    return set(arguments) == {"city", "days"} and arguments["city"] in ("Ulm", "Bern") and 1 <= arguments["days"] <= 9


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    metadata = {"tokenizer.chat_template": TOOLS}
    path = write_tiny_llama(tmp_path_factory.mktemp("server") / "tiny.gguf", context=1024, metadata=metadata)
    with running(loader(path)) as made:
        yield made


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    metadata = {"tokenizer.chat_template": THINKING}
    path = write_tiny_llama(tmp_path_factory.mktemp("server") / "thinks.gguf", context=512, metadata=metadata)
    with running(loader(path)) as made:
        yield made


def openai_client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai_client(server) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("openai.types.chat.completion_create_params.CompletionCreateParamsBase", ChatRequest),
        ("openai.types.completion_create_params.CompletionCreateParamsBase", CompletionRequest),
        ("openai.types.EmbeddingCreateParams", EmbeddingRequest),
        ("openai.types.responses.response_create_params.ResponseCreateParamsBase", ResponsesRequest),
        ("anthropic.types.message_create_params.MessageCreateParamsBase", MessagesRequest),
        ("anthropic.types.MessageCountTokensParams", CountTokensRequest),
    ],
)
def test_every_field_of_the_packages_is_known(theirs: str, ours: Any) -> None:
    """Unknown fields are ignored: a field that these packages send must not be one of them."""
    assert set(pkgutil.resolve_name(theirs).__annotations__) <= set(ours.__struct_fields__)


# Chat ----------------------------------------------------------------------------------------------------


def test_a_chat_in_a_schema(client: openai.OpenAI, server: Running) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}}
    options: dict[str, Any] = {"model": "tiny", "messages": ASK, "temperature": 0, "response_format": form}
    whole = client.chat.completions.create(**options)
    assert is_weather(json.loads(whole.choices[0].message.content or ""))
    assert whole.choices[0].finish_reason == "stop"
    with server.client() as http:
        for field, value in (("json_schema", SCHEMA), ("grammar", 'root ::= "yes" | "no"')):
            body = {"messages": ASK, field: value}
            text = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            assert text in ("yes", "no") if field == "grammar" else is_weather(json.loads(text))
        plain = http.post("/completion", json={"prompt": "x", "grammar": 'root ::= "yes"'}).json()
        assert plain["content"] == "yes"


def test_a_schema_that_cannot_be_honoured(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError, match="cannot be honoured") as found:
        client.chat.completions.create(model="tiny", messages=ASK, response_format=form)
    assert found.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="grammar cannot be honoured"):
        client.chat.completions.create(model="tiny", messages=ASK, extra_body={"grammar": "root ::= ("})


def test_an_error_before_the_first_event_has_its_status(server: Running) -> None:
    """No token that the grammar allows can be sampled: the first step says so."""
    token = server.model.tokenize("y")[0]
    body = {"messages": ASK, "grammar": 'root ::= "y"', "logit_bias": [[token, False]], "stream": True}
    with server.client() as http:
        found = http.post("/v1/chat/completions", json=body)
        assert (found.status_code, found.json()["error"]["type"]) == (400, "invalid_request_error")
        assert "logit_bias" in found.json()["error"]["message"]
        message = http.post("/v1/messages", json={"max_tokens": 5, **body})
        assert message.status_code == 400
        assert "logit_bias" in message.json()["error"]["message"]
        assert http.post("/v1/chat/completions", json={**body, "stream": False}).status_code == 400


def test_a_message_that_names_no_model(server: Running) -> None:
    with server.client() as http:
        found = http.post("/v1/messages", json={"messages": ASK, "max_tokens": 2}).json()
        assert found["model"] == server.service.served.name
        assert http.post("/v1/messages/count_tokens", json={"messages": ASK}).json()["input_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "files"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "files"),
    ],
)
def test_what_is_no_text(server: Running, path: str, body: dict[str, Any], words: str) -> None:
    with server.client() as http:
        found = http.post(path, json={"max_tokens": 2, **body})
    assert found.status_code == 400
    assert found.json()["error"]["message"] == f"this model does not take {words}; send text alone"


def test_tool_calls_of_a_chat(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": ASK, "temperature": 0, "seed": 1}
    options |= {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    made_whole = client.chat.completions.create(**options)
    whole, whole_usage = made_whole.choices[0], made_whole.usage
    assert whole_usage is not None
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert whole.message.tool_calls is not None
    call: Any = whole.message.tool_calls[0]
    assert call.function.name == "weather"
    assert is_weather(json.loads(call.function.arguments))
    deltas: list[Any] = []
    reasons = []
    for chunk in client.chat.completions.create(**options, stream=True):
        reasons.append(chunk.choices[0].finish_reason)
        deltas += chunk.choices[0].delta.tool_calls or []
    assert reasons[-1] == "tool_calls"
    first, rest = deltas[0], deltas[1:]
    assert (first.index, first.type, first.function.name, first.function.arguments) == (0, "function", "weather", "")
    assert first.id.startswith("call_")
    assert all(each.id is None and each.function.name is None for each in rest)
    assert "".join(each.function.arguments for each in rest) == call.function.arguments
    # What comes back is read again, with the result.
    made = {"id": call.id, "type": "function", "function": {"name": "weather", "arguments": call.function.arguments}}
    more: list[Any] = [{"role": "assistant", "content": None, "tool_calls": [made]}]
    more.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    follow = client.chat.completions.create(model="tiny", messages=ASK + more, tools=[TOOL], max_tokens=2)
    assert follow.usage is not None
    assert follow.usage.prompt_tokens > whole_usage.prompt_tokens


def test_named_and_forbidden_tools(client: openai.OpenAI) -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    options: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": [other, TOOL], "max_tokens": 200}
    named: Any = {"type": "function", "function": {"name": "weather"}}
    found: Any = client.chat.completions.create(**options, tool_choice=named).choices[0].message.tool_calls
    assert [call.function.name for call in found] == ["weather"]
    none = client.chat.completions.create(**{**options, "max_tokens": 4}, tool_choice="none").choices[0].message
    assert none.tool_calls is None
    wrong: Any = {"type": "function", "function": {"name": "nobody"}}
    with pytest.raises(openai.BadRequestError, match="nobody") as problem:
        client.chat.completions.create(**options, tool_choice=wrong)
    assert problem.value.param == "tool_choice"


def generated(served: ServedModel, request: Request, texts: Sequence[str]) -> tuple[Handle, list[Delta]]:
    """A handle that generated these texts and ended, and a delta for each of them."""
    handle, deltas = Handle(served.model.engine, request, 0), []
    handle.submitted_at = handle.started = handle.first = handle.last = 1.0
    for text in texts:
        for token in served.model.tokenize(text, add_special=False):
            handle.take_token(token, TokenLogprob(token, -1.0, []) if request.sampling.logprobs is not None else None)
        deltas.append(next(handle))
    handle.finish("stop")
    return handle, deltas


def written(prepared: Prepared, handle: Handle, deltas: Sequence[Delta]) -> list[Any]:
    """The data of the events of a stream."""
    writer = prepared.writer([handle])
    raw = b"".join([*(writer.delta(0, delta) for delta in deltas), writer.finish(0), writer.end()])
    return [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]


THOUGHT = ["Hm", ", so", "</th", "ink>\n", "The an", "swer"]


def test_thoughts_are_told_from_the_answer(thinking: Running) -> None:
    served = thinking.service.served
    chat = Chat(served, ChatRequest(messages=[Message(role="user", content="x")]))
    handle, deltas = generated(served, chat.requests[0], THOUGHT)
    whole = chat.response([handle])
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm, so", "The answer")
    thought = len(served.model.tokenize("Hm, so</think>\n", add_special=False)) - 1
    assert 0 < whole.usage.completion_tokens_details.reasoning_tokens <= thought + 1 < whole.usage.completion_tokens
    found = [choice["delta"] for chunk in written(chat, handle, deltas) for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in found) == "Hm, so"
    assert "".join(delta.get("content") or "" for delta in found) == "The answer"


def test_thoughts_that_are_cut(thinking: Running) -> None:
    with thinking.client() as http:

        def answer(**more: Any) -> Any:
            return http.post("/v1/chat/completions", json={"messages": ASK, "temperature": 0, "max_tokens": 6, **more})

        cut = answer().json()
        message = cut["choices"][0]["message"]
        assert message["content"] == ""
        assert message["reasoning_content"]
        assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
        plain = answer(reasoning_format="none").json()["choices"][0]["message"]
        assert "reasoning_content" not in plain
        assert plain["content"].strip() == message["reasoning_content"].strip()


def test_a_chunk_has_a_call_once(server: Running) -> None:
    """Also where all tokens come at once: to a slow reader, or among many streams."""
    served = server.service.served
    body = {"messages": ASK, "tools": [TOOL], "stream": True}
    chat = Chat(served, msgspec.convert(body, ChatRequest))
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm", "days": 1}}</tool_call>'
    handle, deltas = generated(served, chat.requests[0], ["Well", call + call])
    lists = [
        [each["index"] for each in choice["delta"]["tool_calls"]]
        for chunk in written(chat, handle, deltas)
        for choice in chunk["choices"]
        if "tool_calls" in choice["delta"]
    ]
    assert all(len(set(indices)) == len(indices) for indices in lists), lists
    assert {index for indices in lists for index in indices} == {0, 1}


@pytest.mark.parametrize("options", [{"stop": ["city"]}, {"stop": ["}"]}])
def test_a_call_that_is_cut_says_so(server: Running, options: Any) -> None:
    body: Any = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 300}
    with server.client() as http:
        chat = {**body, **options, "tools": [TOOL], "tool_choice": "required"}
        assert http.post("/v1/chat/completions", json=chat).json()["choices"][0]["finish_reason"] == "length"
        streamed = http.post("/v1/chat/completions", json={**chat, "stream": True}).text
        assert '"finish_reason":"length"' in streamed
        tool = {"name": "weather", "input_schema": SCHEMA}
        message = {**body, "stop_sequences": options["stop"], "tools": [tool], "tool_choice": {"type": "any"}}
        assert http.post("/v1/messages", json=message).json()["stop_reason"] == "max_tokens"
        response = {"input": "x", **options, "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}
        assert http.post("/v1/responses", json=response).json()["status"] == "incomplete"


def test_fields_of_sampling_are_on_all_routes(server: Running) -> None:
    with server.client() as http:

        def response(**more: Any) -> Any:
            found = http.post("/v1/responses", json={"input": "x", "max_output_tokens": 9, **more}).json()
            return found["output"][0]["content"][0]["text"] if "output" in found else found["error"]["param"]

        def message(**more: Any) -> Any:
            body = {"model": "tiny", "messages": ASK, "max_tokens": 9, **more}
            found = http.post("/v1/messages", json=body).json()
            return found["content"][0]["text"] if "content" in found else found["error"]["message"]

        for ask in (response, message):
            assert ask(grammar='root ::= "yes"') == "yes"
            assert ask(json_schema={"const": 7}) == "7"
            assert ask(seed=3) == ask(seed=3) != ask(seed=4)
            assert ask(min_p=1.0) == ask(top_k=1) == ask(temperature=0)
            biased = server.model.tokenize("q", add_special=False)[0]
            assert ask(logit_bias={str(biased): 100}, ignore_eos=True) == "q" * 9
            assert "mirostat" in ask(mirostat=1)
            hot = {"seed": 3, "temperature": 1.0}
            assert ask(**hot, xtc_probability=1.0, xtc_threshold=0.001) != ask(**hot) != ask(**hot, typical_p=0.1)
            assert "n_predict" in ask(n_predict=3)
        assert response(stop="q", logit_bias={str(biased): 100}) == ""
        assert "stop" in message(stop="q")


def test_log_probabilities_of_a_response(thinking: Running) -> None:
    """All of them, whole and streamed: also those of half a character and of thoughts."""
    served = thinking.service.served
    body = {"input": "x", "include": ["message.output_text.logprobs"], "stream": True}
    responses = Responses(served, msgspec.convert(body, ResponsesRequest))
    handle, deltas = generated(served, responses.requests[0], [*THOUGHT, " ist schö"])
    half = served.model.tokenize("ö", add_special=False)
    assert len(half) == 2
    whole = responses.response([handle])
    message = whole.output[1]
    assert isinstance(message, MessageItem)
    tokens = [each.token for each in message.content[0].logprobs]
    assert len(tokens) == handle.usage.completion_tokens
    # One delta for each token.
    handle = Handle(served.model.engine, responses.requests[0], 0)
    deltas = []
    for token in served.model.tokenize("".join(THOUGHT) + " ist schö", add_special=False):
        handle.take_token(token, TokenLogprob(token, -1.0, []))
        deltas.append(next(handle))
    handle.finish("stop")
    events = written(responses, handle, deltas)
    texts = [event for event in events if event["type"] == "response.output_text.delta"]
    streamed = [each["token"] for event in texts for each in event["logprobs"]]
    assert streamed == tokens
    assert len(events[-1]["response"]["output"][1]["content"][0]["logprobs"]) == len(tokens)


# Responses -----------------------------------------------------------------------------------------------


def test_a_response_is_the_same_whole_and_streamed(client: openai.OpenAI, server: Running) -> None:
    expected = server.model.chat([{"role": "system", "content": "Be short"}, *ASK], max_tokens=10)
    options: dict[str, Any] = {"model": "tiny", "input": ASK[0]["content"], "instructions": "Be short"}
    options |= {"max_output_tokens": 10, "temperature": 0}
    whole = client.responses.create(**options)
    assert whole.output_text == expected
    assert (whole.status, whole.usage and whole.usage.output_tokens) == ("incomplete", 10)
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(**options, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == expected
    assert last.response.usage is not None
    assert whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_calls_and_items_of_a_response(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": True, **FUNCTION}
    options: dict[str, Any] = {"model": "tiny", "input": "x", "tools": [tool], "tool_choice": "required"}
    options |= {"temperature": 0, "parallel_tool_calls": False}
    whole = client.responses.create(**options)
    call: Any = whole.output[0]
    assert (call.type, call.name, whole.status) == ("function_call", "weather", "completed")
    assert is_weather(json.loads(call.arguments))
    with client.responses.stream(**options) as stream:
        for _ in stream:
            pass
        final: Any = stream.get_final_response().output[0]
    assert (final.type, final.arguments) == ("function_call", call.arguments)
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": call.arguments},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
        {"role": "assistant", "content": "It rains", "type": "message"},
        {"role": "developer", "content": "Go on"},
    ]
    assert client.responses.create(model="tiny", input=items, max_output_tokens=2).usage is not None
    schema: Any = {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}}
    assert is_weather(json.loads(client.responses.create(model="tiny", input="x", text=schema).output_text))
    logged = client.responses.create(
        model="tiny",
        input="x",
        temperature=0,
        max_output_tokens=3,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    )
    message: Any = logged.output[0]
    assert [len(each.top_logprobs) for each in message.content[0].logprobs] == [2, 2, 2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", True),
        ("conversation", "c"),
        ("truncation", "auto"),
        ("include", ["file_search_call.results"]),
        ("prompt", {"id": "p"}),
    ],
)
def test_what_responses_cannot_honour(server: Running, field: str, value: Any) -> None:
    with server.client() as http:
        found = http.post("/v1/responses", json={"input": "x", field: value})
    assert (found.status_code, found.json()["error"]["param"]) == (400, field)


def test_thoughts_of_a_response(thinking: Running) -> None:
    with openai_client(thinking) as client:
        whole: Any = client.responses.create(model="thinks", input="x", max_output_tokens=5, temperature=0)
        events = list(
            client.responses.create(model="thinks", input="x", max_output_tokens=5, temperature=0, stream=True)
        )
    assert whole.output[0].type == "reasoning"
    assert whole.usage.output_tokens_details.reasoning_tokens == 5
    streamed = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert streamed == whole.output[0].content[0].text


# Anthropic -----------------------------------------------------------------------------------------------


def test_a_message_is_the_same_whole_and_streamed(claude: anthropic.Anthropic, server: Running) -> None:
    expected = server.model.chat([{"role": "system", "content": "Be short"}, *ASK], max_tokens=10)
    options: dict[str, Any] = {"model": "tiny", "messages": ASK, "system": "Be short", "max_tokens": 10}
    options["extra_body"] = {"temperature": 0}
    whole = claude.messages.create(**options)
    block: Any = whole.content[0]
    assert (block.type, block.text, whole.stop_reason) == ("text", expected, "max_tokens")
    total = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert (total, whole.usage.output_tokens) == (len(expected.prompt_ids), 10)
    with claude.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == expected
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 10)
    raw = [event.type for event in claude.messages.create(**options, stream=True)]
    assert [kind for i, kind in enumerate(raw) if i == 0 or raw[i - 1] != kind] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    counted = claude.messages.count_tokens(model="tiny", messages=ASK, system="Be short")
    assert counted.input_tokens == len(expected.prompt_ids)
    stopped = claude.messages.create(**{**options, "stop_sequences": [expected[4:6]]})
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", expected[4:6])


def test_tools_of_messages(claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "weather", "description": "The weather", "input_schema": SCHEMA}
    options: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 200}
    options |= {
        "extra_body": {"temperature": 0},
        "tools": [tool],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    whole = claude.messages.create(**options)
    block: Any = whole.content[-1]
    assert (whole.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "weather")
    assert is_weather(block.input)
    with claude.messages.stream(**options) as stream:
        for _ in stream:
            pass
        final: Any = stream.get_final_message().content[-1]
    assert (final.name, final.input) == ("weather", block.input)
    turn: list[Any] = [
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": block.id, "name": "weather", "input": block.input}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "rain"}]},
    ]
    follow = claude.messages.create(model="tiny", messages=ASK + turn, max_tokens=2, tools=[tool])
    assert follow.usage.input_tokens > 0
    turn[1]["content"][0]["is_error"] = True
    failed = conversation_of(
        msgspec.convert({"model": "tiny", "messages": ASK + turn}, CountTokensRequest),
        Images(None),  # type: ignore[arg-type]
    ).messages
    assert failed[-1] == {"role": "tool", "tool_call_id": block.id, "content": "Error: rain"}
    named: Any = {"type": "tool", "name": "weather"}
    again: Any = claude.messages.create(**{**options, "tool_choice": named}).content[-1]
    assert again.name == "weather"
    begun: Any = [*ASK, {"role": "assistant", "content": "the"}]
    assert claude.messages.create(model="tiny", messages=begun, max_tokens=2).content


def test_many_items_that_become_one_message_cost_as_much_as_they_are_long() -> None:
    said = {"role": "assistant", "content": "x" * 100}
    body = msgspec.convert({"model": "tiny", "input": [said] * 100_000}, ResponsesRequest)
    (message,) = items_as_messages(body, Images(None)).messages  # type: ignore[arg-type]
    assert message["content"] == "\n".join(["x" * 100] * 100_000)
    result = {"role": "tool", "content": "x" * 100}
    (message,) = messages_with_tools([result] * 100_000, None)
    assert message["content"].count("<tool_response>") == 100_000


def test_errors_of_messages(claude: anthropic.Anthropic, server: Running) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.batches.retrieve("none")
    body: Any = missing.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    image: Any = [
        {
            "role": "user",
            "content": [{"type": "image", "source": {"type": "url", "url": ""}}],
        }
    ]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        claude.messages.create(model="tiny", messages=image, max_tokens=1)
    with server.client() as http:
        found: httpx.Response = http.post("/v1/messages", content=b"{")
        assert (found.status_code, found.json()["error"]["type"]) == (400, "invalid_request_error")
        large = http.post("/v1/messages", content=b"x" * 20_000_000)
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")


def test_thoughts_of_messages(thinking: Running) -> None:
    with anthropic.Anthropic(base_url=thinking.url, api_key="none", max_retries=0) as claude:
        options: dict[str, Any] = {"model": "thinks", "messages": ASK, "max_tokens": 5}
        options["extra_body"] = {"temperature": 0}
        whole: Any = claude.messages.create(**options)
        assert whole.content[0].type == "thinking"
        with claude.messages.stream(**options) as stream:
            for _ in stream:
                pass
            final: Any = stream.get_final_message()
    assert final.content[0].thinking == whole.content[0].thinking
