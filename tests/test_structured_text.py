"""Chat output taken apart, tools read and shown: text alone, no model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shaderlm.errors import InputError
from shaderlm.text import (
    CallDelta,
    CallForm,
    ChatDelta,
    ChatFormat,
    ChatTemplate,
    ContentDelta,
    Hole,
    JsonArguments,
    Parameters,
    ReasoningDelta,
    read_tools,
)
from shaderlm.text.call_form import TAGGED

from .tiers import examples

NAMES = {"f": Parameters({}), "get_weather": Parameters({})}
BARE = CallForm(('{"name": "', Hole.NAME, '", "parameters": '), (), ("}",), JsonArguments(), alone=True)
TAGS = ChatFormat(TAGGED, NAMES, reasoning=True)
FORMATS = {
    "tagged": TAGS,
    "tagged, without reasoning": ChatFormat(TAGGED, NAMES),
    "bare": ChatFormat(BARE, NAMES),
    "within reasoning": ChatFormat(TAGGED, NAMES, reasoning=True, thinking=True),
    "no tools": ChatFormat(reasoning=True),
    "plain": ChatFormat(),
}


def parsed(output: ChatFormat, deltas: Iterable[str], finish_reason: str = "stop") -> list[ChatDelta]:
    """What the parser finds, neighbours joined: that depends on the text alone."""
    parser = output.parser()
    found = [each for text in deltas for each in parser.push(text)] + parser.finish(finish_reason)
    made: list[ChatDelta] = []
    for each in found:
        last = made[-1] if made else None
        if isinstance(each, CallDelta):
            assert (each.name is None) == bool(each.arguments), "the name comes alone"
            if each.name is None:
                assert isinstance(last, CallDelta)
                assert each.index == last.index
                made[-1] = CallDelta(last.index, last.name, last.arguments + each.arguments)
                continue
            assert each.index == sum(isinstance(other, CallDelta) for other in made)
        else:
            assert each.text
            if type(last) is type(each):
                made[-1] = type(each)(last.text + each.text)
                continue
        made.append(each)
    return made


def call(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


# Texts with a result that is known -----------------------------------------------------------------------

WEATHER = {"city": "Köln </tool_call> {", "days": [1, {"x": None}]}
QUOTE = {"a": '"'}
KNOWN: list[tuple[str, str, list[ChatDelta]]] = [
    ("tagged", "", []),
    ("tagged", "Hello <b>you</b>.\n", [ContentDelta("Hello <b>you</b>.\n")]),
    ("tagged", "<think>\nHm.\n</think>\n\nYes.", [ReasoningDelta("Hm."), ContentDelta("Yes.")]),
    ("tagged", " \n<think>a</think>", [ReasoningDelta("a")]),
    ("tagged", "A <think>b</think>", [ContentDelta("A <think>b</think>")]),
    ("tagged", "<think>never ends", [ReasoningDelta("never ends")]),
    ("within reasoning", "\nHm.</think>Yes.", [ReasoningDelta("Hm."), ContentDelta("Yes.")]),
    ("plain", "<think>a</think> <tool_call>", [ContentDelta("<think>a</think> <tool_call>")]),
    ("no tools", "<think>a</think> <tool_call>", [ReasoningDelta("a"), ContentDelta("<tool_call>")]),
    (
        "tagged",
        f"Let me see.\n<tool_call>\n{call('get_weather', WEATHER)}\n</tool_call>",
        [ContentDelta("Let me see."), CallDelta(0, "get_weather", json.dumps(WEATHER))],
    ),
    (
        "tagged",
        f"<think>x <tool_call>\n</think>\n<tool_call>{call('f', {})}</tool_call>\n<tool_call>{call('f', {'a': 1})}",
        [ReasoningDelta("x <tool_call>"), CallDelta(0, "f", "{}"), CallDelta(1, "f", '{"a": 1}')],
    ),
    ("tagged", "<tool_call>{broken", [ContentDelta("<tool_call>{broken")]),
    ("tagged", f"<tool_call>{call('g', {})}</tool_call>", [ContentDelta(f"<tool_call>{call('g', {})}</tool_call>")]),
    (
        "tagged",
        f"<tool_call>{call('f', {})}</tool_call>after",
        [CallDelta(0, "f", "{}"), ContentDelta("after")],
    ),
    ("bare", call("f", {"a": 1}, "parameters"), [CallDelta(0, "f", '{"a": 1}')]),
    ("bare", f"\n {call('f', {}, 'parameters')}", [CallDelta(0, "f", "{}")]),
    ("bare", '{"a": {"b": 1}} is JSON', [ContentDelta('{"a": {"b": 1}} is JSON')]),
    ("bare", f"So: {call('f', {}, 'parameters')}", [ContentDelta(f"So: {call('f', {}, 'parameters')}")]),
]


@pytest.mark.parametrize(("kind", "text", "expected"), KNOWN)
def test_an_answer_is_taken_apart_the_same_way_wherever_it_is_cut(
    kind: str, text: str, expected: list[ChatDelta]
) -> None:
    for cut in range(len(text) + 1):
        assert parsed(FORMATS[kind], [text[:cut], text[cut:]]) == expected, (text[:cut], text[cut:])
    assert parsed(FORMATS[kind], text) == expected


def test_an_answer_that_is_cut_has_no_half_tags() -> None:
    text = f"<think>Hm.</think>Yes.\n<tool_call>\n{call('f', {'a': 'b'})}\n</tool_call>"
    for end in range(len(text)):
        found = parsed(TAGS, text[:end], "length")
        content = "".join(each.text for each in found if isinstance(each, ContentDelta))
        reasoning = "".join(each.text for each in found if isinstance(each, ReasoningDelta))
        arguments = "".join(each.arguments for each in found if isinstance(each, CallDelta))
        assert "Yes.\n".startswith(content)
        assert "Hm.".startswith(reasoning)
        assert json.dumps({"a": "b"}).startswith(arguments)


def test_text_is_sent_as_soon_as_it_is_certain() -> None:
    parser = TAGS.parser()
    assert parser.push("<thi") == []
    assert parser.push("nk>Hm") == [ReasoningDelta("Hm")]
    assert parser.push(" yes <") == [ReasoningDelta(" yes")]
    assert parser.push("/think>\n\nSo") == [ContentDelta("So")]
    assert parser.push(" a < b") == [ContentDelta(" a < b")]
    assert parser.push('\n<tool_call>{"name": "f", "arg') == []
    assert parser.push('uments": ') == []
    assert parser.push('{"x": [1,') == [CallDelta(0, "f", ""), CallDelta(0, None, '{"x": [1,')]
    assert parser.push("2]}") == [CallDelta(0, None, "2]}")]
    assert parser.push("}</tool_call>") + parser.finish() == []


def test_long_calls() -> None:
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': {'a': ['x' * 100] * 2000}})}</tool_call>"
    late = '<tool_call>{"name": "f", "arguments": {"a": "' + "y" * 200_000 + '"}}</tool_call>'
    message = TAGS.message(f"{text}\n{late}")
    found = [json.loads(each["function"]["arguments"]) for each in message["tool_calls"]]
    assert found == [{"a": ["x" * 100] * 2000}, {"a": "y" * 200_000}]


# Any text --------------------------------------------------------------------------------------------------

PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "f", ', '"arguments": {']
PIECES += ['"parameters": ', "}", "{", "]", "[", '"', "\\", ",", ":", ";", " ", "\n", "<", "a", '"name": "f"', "1"]
PIECES += [call("f", {"k": [1, "}"]}), call("f", {}, "parameters")]


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(PIECES), max_size=14), st.randoms(), st.booleans())
@example("tagged", ["<tool_call>", '{"name": "f", ', '"arguments": {', "}", "}", "<", "a"], None, False)
def test_cuts_change_nothing(kind: str, pieces: list[str], random: Any, whole: bool) -> None:
    text, output = "".join(pieces), FORMATS[kind]
    reason = "stop" if whole else "length"
    expected = parsed(output, [text], reason)
    assert parsed(output, text, reason) == expected
    if random is not None and text:
        cuts = sorted(random.randrange(len(text) + 1) for _ in range(4))
        deltas = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(output, deltas, reason) == expected
    if whole and not output.reasoning and not any(isinstance(each, CallDelta) for each in expected):
        assert expected == ([ContentDelta(text)] if text else []), "what is no call is content as it is"


plain_texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<{"), min_size=1, max_size=20)
objects = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow])
@given(
    plain_texts | st.none(), plain_texts | st.none(), st.lists(objects, max_size=3), st.integers(1, 9), st.booleans()
)
def test_what_was_written_is_found(
    reasoning: str | None, content: str | None, arguments: list[Any], size: int, ascii_only: bool
) -> None:
    written = "" if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n"
    written += content or ""
    for each in arguments:
        text = json.dumps(each, ensure_ascii=ascii_only, indent=2)
        written += f'\n<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
    expected: list[ChatDelta] = []
    space = " \t\n\r"
    if reasoning is not None and reasoning.strip(space):
        expected.append(ReasoningDelta(reasoning.strip(space)))
    shown = (content or "").lstrip(space) if reasoning is not None else (content or "")
    shown = shown.rstrip(space) if arguments else shown
    expected += [ContentDelta(shown)] if shown else []
    cuts = [written[at : at + size] for at in range(0, len(written), size)]
    found = parsed(TAGS, cuts)
    calls = [each for each in found if isinstance(each, CallDelta)]
    assert [json.loads(each.arguments) for each in calls] == arguments
    assert [each for each in found if not isinstance(each, CallDelta)] == expected


def test_a_message_is_what_clients_append() -> None:
    text = f"<think>a</think>b<tool_call>{call('f', {'x': 1})}</tool_call>"
    made = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    expected = {"role": "assistant", "content": "b", "reasoning_content": "a", "tool_calls": [made]}
    assert TAGS.message(text) == expected
    assert TAGS.message(f"<tool_call>{call('f', {})}</tool_call>")["content"] is None
    assert ChatFormat().message("") == {"role": "assistant", "content": ""}


# Tools -----------------------------------------------------------------------------------------------------


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


NAMED = {"type": "function", "function": {"name": "f"}}


def test_tools_and_choices_are_read() -> None:
    both = [tool(), tool("g", parameters={"properties": {"x": {}}}, strict=True)]
    assert read_tools(None, None) is None
    assert read_tools([], "auto") is None
    assert read_tools(both, "none") is None
    auto, required, named = (read_tools(both, choice) for choice in (None, "required", NAMED))
    assert auto is not None
    assert required is not None
    assert named is not None
    assert (auto.required, required.required, named.required) == (False, True, True)
    assert [each.name for each in auto.tools] == ["f", "g"]
    assert [each.name for each in named.tools] == ["f"]
    assert auto.tools[1].parameters == {"type": "object", "properties": {"x": {}}}
    assert (auto.tools[0].strict, auto.tools[1].strict, named.parallel) == (False, True, False)


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ("x", None, "tools must be a list, got str"),
        ([3], None, r"tools\[0\] must be"),
        ([tool(), {"type": "retrieval"}], None, r"tools\[1\] must be .*, got \{'type': 'retrieval'\}"),
        ([tool("")], None, r"tools\[0\]\.function\.name must be a text of 1 to 256 characters, got ''"),
        ([tool(parameters={"type": "string"})], None, r"tools\[0\]\.function\.parameters must be a JSON schema"),
        ([tool(parameters={"const": {3}})], None, r"tools\[0\] must be JSON; "),
        ([tool(parameters={"const": "x" * (1 << 20)})], None, "tools must have at most 1,048,576 characters"),
        ([tool(), tool()], None, "the function 'f' is there twice"),
        ([], "required", "tool_choice is 'required', but there are no tools"),
        ([tool()], "some", "tool_choice must be 'auto', 'none', 'required' or"),
        ([tool("g")], NAMED, "tool_choice names the function 'f'; the tools are g"),
    ],
)
def test_wrong_tools_are_named(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_tools(tools, choice)


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", **tool(arguments='{"x": 1}')}]},
    {"role": "tool", "content": "one", "tool_call_id": "1"},
    {"role": "tool", "content": "two", "tool_call_id": "2"},
]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_a_template_without_tools_has_them_in_its_messages() -> None:
    template = ChatTemplate(PLAIN)
    assert not template.knows_tools
    text = template.render(CONVERSATION, tools=[tool(description="Does it.")])
    assert text.startswith("[system]You can call functions.")
    assert '{"type": "function", "function": {"name": "f", "description": "Does it."}}\n</tools>' in text
    assert '[assistant]<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>[user]<tool_response>' in text
    assert text.count("[user]") == 2, "results are one message"
    system = template.render([{"role": "system", "content": "Be brief."}, *CONVERSATION[:1]], tools=[tool()])
    assert system.startswith("[system]Be brief.\n\nYou can call functions.")
    assert template.render(CONVERSATION[:1]) == "[user]Hi"


def test_a_template_with_tools_has_them_as_they_are() -> None:
    source = "{{ tools | length }}" + PLAIN.replace("m.content", "m.content or m.tool_calls[0].function.arguments.x")
    template = ChatTemplate(source)
    assert template.knows_tools
    assert template.render(CONVERSATION, tools=[tool()]) == "1[user]Hi[assistant]1[tool]one[tool]two"
    asks = ChatTemplate("{% for m in messages %}{{ 'tool_calls' in m }}{% endfor %}{{ tools }}")
    assert asks.render([{"role": "assistant", "content": "x", "tool_calls": []}]) == "FalseNone"


@pytest.mark.parametrize("calls", [3, [3], [{"function": {"name": "f"}}], [{"function": {"arguments": "{}"}}]])
def test_wrong_calls_in_messages_are_named(calls: Any) -> None:
    with pytest.raises(InputError, match=r"chat: .*tool.call.* of message 0 must be"):
        ChatTemplate(PLAIN).render([{"role": "assistant", "content": "x", "tool_calls": calls}])
