"""Agents drive the server: a body in the shape of each, and what it does with the answer. docs/agents.md names them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shaderlm.server.errors import ApiError
from shaderlm.server.response_store import MAX_RESPONSES, ResponseStore
from shaderlm.server.types import responses as types

from .serving import Running, loader, running
from .test_server_apis import TOOLS
from .tiny_models import write_tiny_llama

SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"path": {"type": "string", "enum": ["a.py", "b.py"]}, "line": {"type": "integer", "enum": [1, 2]}},
    "required": ["path"],
    "additionalProperties": False,
}
SHORT = {"temperature": 0, "max_tokens": 120}
HOSTED = {"type": "web_search", "external_web_access": False}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    metadata = {"tokenizer.chat_template": TOOLS}
    return write_tiny_llama(tmp_path_factory.mktemp("agents") / "tiny.gguf", context=1024, metadata=metadata)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Running]:
    with running(loader(path)) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def events(http: httpx.Client, path: str, body: Any) -> list[dict[str, Any]]:
    """The data of a stream's events."""
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        text = answer.read().decode()
    assert answer.status_code == 200, text
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def is_read(arguments: Any) -> bool:
    return set(arguments) <= {"path", "line"} and arguments["path"] in ("a.py", "b.py")


# Claude Code: Anthropic's messages, streamed -----------------------------------------------------------------

CLAUDE: dict[str, Any] = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 200,
    "system": [
        {"type": "text", "text": "You work on code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>x</system-reminder>"},
                {"type": "text", "text": "Read a.py.", "cache_control": {"type": "ephemeral"}},
            ],
        }
    ],
    "tools": [
        {"name": "Read", "description": "Reads a file.", "input_schema": SCHEMA},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_x_session_y"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "temperature": 1,
}
CLAUDE_HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "none"}


def test_claude_code(http: httpx.Client) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    found = events(http, "/v1/messages?beta=true", {**CLAUDE, "tool_choice": choice, "seed": 1})
    block = next(each["content_block"] for each in found if each["type"] == "content_block_start")
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "Read", {})
    deltas = [each["delta"] for each in found if each["type"] == "content_block_delta"]
    arguments = json.loads("".join(each["partial_json"] for each in deltas if each["type"] == "input_json_delta"))
    assert is_read(arguments)
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    # The next turn: what the model thought and called, and what came of it, which failed.
    thoughts = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "redacted_thinking", "data": "x"}]
    call = {"type": "tool_use", "id": block["id"], "name": "Read", "input": arguments}
    result = {
        "type": "tool_result",
        "tool_use_id": block["id"],
        "is_error": True,
        "content": [{"type": "text", "text": "File not found."}],
        "cache_control": {"type": "ephemeral"},
    }
    more = [{"role": "assistant", "content": [*thoughts, call]}, {"role": "user", "content": [result]}]
    body = {**CLAUDE, "messages": [*CLAUDE["messages"], *more], "max_tokens": 8}
    last = http.post("/v1/messages?beta=true", json=body, headers=CLAUDE_HEADERS)
    assert last.status_code == 200, last.text
    count = http.post("/v1/messages/count_tokens?beta=true", json={k: v for k, v in body.items() if k != "max_tokens"})
    assert count.json()["input_tokens"] > 10
    assert http.get("/v1/models").status_code == 200


def test_what_claude_code_cannot_have_is_said(http: httpx.Client) -> None:
    search = {"tools": [CLAUDE["tools"][1]]}
    refused = http.post("/v1/messages", json={**CLAUDE, **search})
    assert refused.status_code == 400
    assert "does not run 'web_search_20250305'" in refused.json()["error"]["message"]
    edits = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    assert "clear_tool_uses_20250919" in http.post("/v1/messages", json={**CLAUDE, **edits}).text


# Codex: OpenAI's responses, streamed -----------------------------------------------------------------------

CODEX: dict[str, Any] = {
    "model": "gpt-5.1-codex",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read only."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Read a.py."}]},
    ],
    "tools": [
        {"type": "function", "name": "read", "description": "Reads.", "strict": False, "parameters": SCHEMA},
        HOSTED,
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-x",
    "client_metadata": {"x-codex-installation-id": "y"},
}


def test_codex(http: httpx.Client) -> None:
    codex = {**CODEX, "temperature": 0, "max_output_tokens": 150}
    found = events(http, "/v1/responses", {**codex, "tool_choice": "required"})
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert found[0]["type"] == "response.created"
    item = next(each["item"] for each in found if each["type"] == "response.output_item.done")
    assert (item["type"], item["name"]) == ("function_call", "read")
    assert is_read(json.loads(item["arguments"]))
    done = found[-1]
    assert done["type"] == "response.completed"
    assert done["response"]["usage"]["total_tokens"] > 0
    assert [tool["type"] for tool in done["response"]["tools"]] == ["function"], "what is not there is not named"
    assert done["response"]["store"] is False
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": None}
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "exit code 1"}
    call = {key: item[key] for key in ("type", "name", "arguments", "call_id")}
    again = events(
        http, "/responses", {**codex, "input": [*CODEX["input"], thought, call, result], "max_output_tokens": 4}
    )
    assert again[-1]["type"] in ("response.completed", "response.incomplete")
    refused = http.post("/v1/responses", json={**codex, "tools": [HOSTED]})
    assert refused.status_code == 400
    assert "does not run 'web_search'" in refused.json()["error"]["message"]


# OpenCode, aider, Continue, Open WebUI: chat completions ------------------------------------------------------

FUNCTION = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}}
USER = {"role": "user", "content": [{"type": "text", "text": "Read a.py."}]}


def test_opencode(http: httpx.Client) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "system", "content": "You are a coding agent."}, USER],
        "tools": [FUNCTION],
        "tool_choice": "required",
        "max_tokens": 150,
        "temperature": 0,
        "top_p": 1,
        "stream_options": {"include_usage": True},
    }
    found = events(http, "/v1/chat/completions", body)
    calls = [call for each in found for choice in each["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert (calls[0]["index"], calls[0]["type"], calls[0]["function"]["name"]) == (0, "function", "read")
    arguments = "".join(call["function"]["arguments"] for call in calls if call["index"] == 0)
    assert is_read(json.loads(arguments))
    assert found[-1]["usage"]["total_tokens"] > 0
    call = {"id": calls[0]["id"], "type": "function", "function": {"name": "read", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Hm."}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Error: not found"}
    more = {**body, "messages": [*body["messages"], answer, result], "tool_choice": "auto", "max_tokens": 4}  # type: ignore[misc]
    assert events(http, "/v1/chat/completions", more)[-1]["usage"]["completion_tokens"] == 4


def test_aider(http: httpx.Client) -> None:
    messages = [
        {"role": "system", "content": "Edit with SEARCH/REPLACE blocks."},
        {"role": "user", "content": "I use example code."},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": "Change a.py."},
    ]
    found = events(http, "/v1/chat/completions", {"model": "tiny", "messages": messages, **SHORT, "max_tokens": 5})
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in found)


def test_continue(http: httpx.Client) -> None:
    """Its chat, and what it writes at the cursor."""
    chat = {"model": "tiny", "messages": [USER], "tools": [FUNCTION], "max_tokens": 150, "parallel_tool_calls": False}
    assert events(http, "/v1/chat/completions", {**chat, "temperature": 0})[-1]["choices"][0]["finish_reason"]
    stop = ["<|fim_prefix|>", "<|fim_suffix|>", "<|endoftext|>", "\n\n", "/src/", "```"]
    body = {"model": "tiny", "prompt": "def f(", "max_tokens": 4, "temperature": 0.01, "stop": stop}
    assert events(http, "/v1/completions", body)[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def test_open_webui(http: httpx.Client) -> None:
    assert [each["object"] for each in http.get("/v1/models").json()["data"]] == ["model"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream_options": {"include_usage": True}}
    assert events(http, "/v1/chat/completions", {**body, **SHORT, "max_tokens": 4})[-1]["usage"]
    title = http.post("/v1/chat/completions", json={**body, "stream_options": None, "max_completion_tokens": 4})
    assert title.json()["choices"][0]["message"]["role"] == "assistant"


# Choices of tools ----------------------------------------------------------------------------------------------

OTHER = {"type": "function", "function": {"name": "list", "parameters": {"type": "object", "properties": {}}}}
ONE = {"type": "function", "function": {"name": "list"}}


def allowed(mode: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [ONE]}}


def test_some_of_the_tools_may_be_called(http: httpx.Client) -> None:
    body = {"messages": [USER], "tools": [FUNCTION, OTHER], **SHORT}

    def names(choice: Any, **more: Any) -> list[str]:
        answer = http.post("/v1/chat/completions", json={**body, "tool_choice": choice, **more}).json()
        return [call["function"]["name"] for call in answer["choices"][0]["message"].get("tool_calls", ())]

    assert set(names(allowed("required"))) == {"list"}
    assert names(allowed("required"), parallel_tool_calls=False) == ["list"]
    assert set(names(allowed("auto"))) <= {"list"}
    responses = {"input": "x", "temperature": 0, "max_output_tokens": 120}
    responses["tools"] = [{"type": "function", **each["function"]} for each in (FUNCTION, OTHER)]  # type: ignore[dict-item]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "list"}]}
    made = http.post("/v1/responses", json={**responses, "tool_choice": choice}).json()
    assert {item["name"] for item in made["output"]} == {"list"}
    assert made["tool_choice"]["mode"] == "required"
    unknown = {**choice, "tools": [{"type": "function", "name": "nope"}]}
    assert "names the function 'nope'" in http.post("/v1/responses", json={**responses, "tool_choice": unknown}).text


# Responses that are continued ------------------------------------------------------------------------------------


def test_a_response_is_continued(http: httpx.Client) -> None:
    def ask(**more: Any) -> httpx.Response:
        return http.post("/v1/responses", json={"temperature": 0, "max_output_tokens": 4, **more})

    first = ask(input="Hello", instructions="Be brief.").json()
    assert first["store"]
    second = ask(input="More", previous_response_id=first["id"]).json()
    assert second["previous_response_id"] == first["id"]
    text = first["output"][0]["content"][0]["text"]
    items = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": text}]
    whole = ask(input=[*items, {"role": "user", "content": "More"}], store=False).json()
    assert whole["output"][0]["content"] == second["output"][0]["content"]
    assert whole["usage"]["input_tokens"] == second["usage"]["input_tokens"], "instructions are those of one request"
    streamed = events(
        http, "/v1/responses", {"input": "Third", "previous_response_id": second["id"], "max_output_tokens": 2}
    )
    assert streamed[-1]["response"]["previous_response_id"] == second["id"]
    assert http.get(f"/v1/responses/{streamed[-1]['response']['id']}").json()["id"] == streamed[-1]["response"]["id"]
    assert http.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
    assert http.delete(f"/v1/responses/{first['id']}").json() == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    for gone in (first["id"], whole["id"], second["id"]):
        answer = ask(input="x", previous_response_id=gone)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "previous_response_id")
    assert http.get(f"/v1/responses/{whole['id']}").status_code == 404


def made(number: int) -> types.Response:
    fields: dict[str, Any] = dict.fromkeys(
        ("error", "incomplete_details", "instructions", "max_output_tokens", "usage", "user")
    )
    text = types.TextOptions()
    return types.Response(
        id=f"resp_{number}",
        created_at=0,
        status="completed",
        metadata={},
        model="m",
        output=[],
        parallel_tool_calls=True,
        reasoning=types.ReasoningOptions(),
        store=True,
        temperature=1,
        text=text,
        tool_choice="auto",
        tools=[],
        top_p=1,
        **fields,
    )


def test_responses_are_kept_by_key_and_up_to_a_limit() -> None:
    store, item = ResponseStore(), types.InputItem(role="user", content="x" * 1000)
    for i in range(MAX_RESPONSES + 10):
        store.add("0", None, [item], made(i))
    with pytest.raises(ApiError, match="there is no response 'resp_9'"):
        store.items("0", "resp_9")
    assert len(store.items("0", "resp_10")) == 1
    with pytest.raises(ApiError, match="there is no response"):
        store.items("1", "resp_10")
    large = types.InputItem(role="user", content="x" * (9 << 20))
    store.add("0", "resp_20", [large], made(1000))
    store.add("0", "resp_1000", [large], made(1001))
    with pytest.raises(ApiError, match="there is no response"):
        store.items("0", "resp_1001"), "its beginning is gone"
    store.add("1", None, [item], made(1))
    store.add("1", None, [types.InputItem(role="user", content="x" * (17 << 20))], made(2))
    assert len(store.items("1", "resp_1")) == 1, "others stay"
    with pytest.raises(ApiError, match="of 16 MiB together"):
        store.items("1", "resp_2")
