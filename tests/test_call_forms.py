"""The form of calls is found in the template itself: small templates of many kinds, rendered and read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shaderlm.errors import InputError, ModelError
from shaderlm.text import ChatFormat, ChatTemplate, RenderLimits
from shaderlm.text.call_form import TAGGED, CallForm, Hole, JsonArguments, Parameters, Spelled
from shaderlm.text.call_probe import FormError, probe
from shaderlm.text.call_reader import read_all
from shaderlm.text.literals import literal_end, whole_literal

from .call_templates import ARGUMENTS, REFUSED, TEMPLATES, read, rendered, template, tools_for, written

SEVERAL = [ARGUMENTS[1], ARGUMENTS[0], ARGUMENTS[4]]
ONE_CALL = {"JSON alone", "channels"}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_calls_are_read_as_the_template_writes_them(kind: str) -> None:
    made = ChatTemplate(TEMPLATES[kind], limits=RenderLimits(seconds=60))
    assert made.call_form.parallel == (kind not in ONE_CALL)
    for calls in [*([each] for each in ARGUMENTS), *([SEVERAL] if made.call_form.parallel else [])]:
        text = rendered(made, calls)
        for size in (1, 3, 1 << 20):
            assert read(made, calls, text, size) == written(calls), (size, text)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_template_without_a_form_says_why(kind: str) -> None:
    source, reason = REFUSED[kind]
    made = ChatTemplate(source, limits=RenderLimits(seconds=60))
    with pytest.raises(InputError, match=f"tools: the chat template of this model cannot express calls: .*{reason}"):
        made.call_form  # noqa: B018
    assert made.render([{"role": "user", "content": "x"}], tools=tools_for([{}])).endswith("<|assistant|>")


def test_thoughts_and_content_have_headers() -> None:
    form = ChatTemplate(TEMPLATES["channels"], limits=RenderLimits(seconds=60)).call_form
    assert form.thought == ("<|thought|>", "<|end|><|start|>assistant")
    assert form.content == ("<|final|>", "<|return|>")
    assert form.cut({"<|return|>", "<|call|>"}).content == ("<|final|>", "")
    assert form.cut({"<|end|>"}).thought == ("", ""), "the turn would be over"
    output = ChatFormat(form, {"get": Parameters({})}, reasoning=True, tags=form.thought)
    thought = "<|thought|>Hm.<|end|><|start|>assistant"
    message = output.message(f"{thought}<|final|>Yes.<|return|>")
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    call = output.message(f'{thought} to=get<|json|>{{"a": 1}}<|call|>')
    assert call["content"] is None
    assert call["tool_calls"][0]["function"] == {"name": "get", "arguments": '{"a": 1}'}
    assert output.message("<|final|>a <|ret b")["content"] == "a <|ret b"
    for cut in range(20):
        parser = output.parser()
        text = "<|final|>Yes.<|return|>"
        deltas = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.finish()]
        assert "".join(getattr(each, "text", "") for each in deltas) == "Yes."


def test_a_template_without_tools_is_told_the_form() -> None:
    assert ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}").call_form is TAGGED


TOLD = {
    "Respond with <|call|> followed by a JSON list of tools used.": ("<|call|>[", "}]"),
    'Write <call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</call>': ("<call>", "}</call>"),
}


@pytest.mark.parametrize("words", TOLD)
def test_a_form_that_is_told_in_words(words: str) -> None:
    """The template shows no calls: they are written into the content."""
    source = "{% if tools %}" + words + "{{ tools }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    made = ChatTemplate(source + "{% endfor %}", limits=RenderLimits(seconds=60))
    begin, end = TOLD[words]
    assert made.call_form.told
    assert made.call_form.parallel
    for calls in ([ARGUMENTS[4]], SEVERAL):
        text = rendered(made, calls)
        assert text.startswith(begin)
        assert text.endswith(end)
        assert read(made, calls, text) == written(calls)
    without_results = ChatTemplate(source.replace("m.content", "m.content if m.role != 'tool'") + "{% endfor %}")
    with pytest.raises(InputError, match="cannot express calls"):
        without_results.call_form  # noqa: B018


def test_what_a_form_asks_of_messages_is_done() -> None:
    user: dict[str, Any] = {"role": "user", "content": "x"}
    call = {"id": "call_0123456789abcdef", "function": {"name": "get", "arguments": '{"city": "Köln"}'}}
    messages = [user, {"role": "assistant", "content": None, "tool_calls": [call]}]
    short = ChatTemplate(TEMPLATES["short ids alone"]).render(messages)
    assert '"arguments": {"city": "Köln"}, "id": "' in short
    again = ChatTemplate(TEMPLATES["short ids alone"]).render(messages)
    assert short == again, "an id is the same each time"
    text = ChatTemplate(TEMPLATES["text arguments"]).render(messages)
    assert '<f=get>{"city": "Köln"}</f>' in text


def test_a_hostile_template_costs_bounded_time() -> None:
    slow = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    made = ChatTemplate(slow + template("{{ slow }}"), limits=RenderLimits(seconds=0.02))
    with pytest.raises(ModelError, match=r"takes (more than|too long to show calls)"):
        made.call_form  # noqa: B018


@pytest.mark.parametrize(
    ("before", "content"),
    [('{"":' * 6000, ""), ('"' * 400_000, ""), ("", "ab" * 900_000)],
    ids=["deeper than JSON is read", "many quotes", "a long text before contents"],
)
def test_what_a_hostile_template_shows_costs_bounded_time(before: str, content: str) -> None:
    def render(messages: Any, tools: Any, prompt: bool) -> str:
        text = ""
        for message in messages:
            calls = message.get("tool_calls") or []
            own = content if message["role"] == "assistant" and not calls else ""
            text += f"<|{message['role']}|>{own}{message['content'] or ''}"
            for each in calls:
                function = each["function"]
                text += f"<call>{function['name']}:{before}{json.dumps(function['arguments'])}</call>"
            text += "<|end|>"
        return text + ("<|assistant|>" if prompt else "")

    with pytest.raises(FormError, match=r"more than [\d,]+ characters|id of a call|arguments of calls|not known"):
        probe(render)


def test_a_form_of_one_call_with_nothing_after_it() -> None:
    """The end of the turn comes next, which is no part of the text."""
    form = CallForm(first=("<call>", Hole.NAME, ":"), between=(), last=(), arguments=JsonArguments())
    assert read_all(form, {"f": Parameters({})}, '<call>f:{"a": 1} x') == ([("f", {"a": 1})], " x")


def test_what_is_no_call_is_text() -> None:
    made = ChatTemplate(TEMPLATES["tags"], limits=RenderLimits(seconds=60))
    calls = [{"city": "x"}]
    tools = {tool["function"]["name"]: Parameters(tool["function"]["parameters"]) for tool in tools_for(calls)}
    output = ChatFormat(made.call_form, tools)
    for text in ("<tool>", "<tool>\n<function=other>\n</function>\n</tool>", "a <tool> b", "<tool>\n<function=get"):
        message = output.message(text)
        assert message == {"role": "assistant", "content": text}
        assert "tool_calls" not in output.message(text, "length")
    cut = output.message("So.\n<tool>\n<function=get>\n<parameter=city>\nab\n</par", "length")
    assert cut["content"] == "So."
    assert cut["tool_calls"][0]["function"] == {"name": "get", "arguments": '{"city": "ab'}
    named = output.message(
        "<tool>\n<function=get>\n<parameter=city>\na </parameter> b\n</parameter>\n</function>\n</tool>"
    )
    assert json.loads(named["tool_calls"][0]["function"]["arguments"]) == {"city": "a </parameter> b"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, true, null]}', {"a": [1, True, None]}),
        ("{'a': [1.5, True, None], 'b': 'it\\'s'}", {"a": [1.5, True, None], "b": "it's"}),
        ("'\\u4e2d\\n\\x41\\U0001F642'", "中\nA🙂"),
        ('"\\ud83d\\ude42"', "🙂"),
        (" -1e3 ", -1000.0),
        ("[]", []),
    ],
)
def test_values_of_json_and_python(text: str, value: Any) -> None:
    assert whole_literal(text) == value
    end = literal_end()
    found = [end(character) for character in f"{text.lstrip()},"]
    at = next(i for i, each in enumerate(found) if each is not None)
    assert text.strip() == f"{text.lstrip()},"[: at + (found[at] or 0)]


@pytest.mark.parametrize(
    "text", ["", "nope", "{a: 1}", "[1", "'x", "1 2", "NaN", pytest.param("[" * 100_000, id="deep")]
)
def test_other_texts_are_no_values(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        whole_literal(text)


def test_values_between_marks() -> None:
    marks = ("<q>", "<q>")
    assert whole_literal('{a:<q>x "y"<q>,b:[1,<q><q>]}', marks) == {"a": 'x "y"', "b": [1, ""]}


def test_kinds_of_parameters() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/text"},
            "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "c": {"enum": ["x", 3]},
            "d": {},
        },
        "allOf": [{"required": ["b"], "properties": {"e": {"type": ["boolean", "string"]}}}],
        "$defs": {"text": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    kinds = Parameters(schema).kinds
    assert {key: sorted(each) for key, each in kinds.items() if key != "d"} == {
        "a": ["string"],
        "b": ["null", "number"],
        "c": ["number", "string"],
        "e": ["boolean", "string"],
    }
    assert "object" in kinds["d"]
    assert Parameters(schema).required == {"b"}
    assert Parameters({"properties": {"x": {"$ref": "#/$defs/loop"}}, "$defs": schema["$defs"]}).kinds["x"]


def test_parameters_that_refer_to_each_other_many_times_are_refused() -> None:
    twice = [{"$ref": "#"}] * 2
    for key in ("anyOf", "allOf"):
        with pytest.raises(InputError, match="composed of too many schemas"):
            Parameters({key: twice})
        with pytest.raises(InputError, match="composed of too many schemas"):
            Parameters({"properties": {"x": {key: twice}}, key: twice})
    assert Parameters({"anyOf": twice[:1], "properties": {"x": {}}}).kinds.keys() == {"x"}


def test_names_are_found_among_many() -> None:
    names = Spelled(["get", "get_weather", 'a"b', *(f"f{i}" for i in range(2000))])
    assert [name for _, name in names.at("x get_weather(", 2)] == ["get_weather", "get"]
    assert list(names.at('a\\"b:', 0)) == [(4, 'a"b')]
    assert not list(names.at("ge", 0))
    assert names.may_begin("get", 0)
    assert names.may_begin("f19", 0)
    assert not names.may_begin("get_weather", 0)
    assert not names.may_begin("get(", 0)
    assert names.may_begin("", 0)
