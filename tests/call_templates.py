"""Chat templates with calls of functions, in the ways that models write them: small ones, of our own.

`python -m tests.call_templates FOLDER` prints a table of the templates in a folder: which of them can express calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shaderlm.errors import InputError, ModelError
from shaderlm.text import CallDelta, ChatFormat, ChatTemplate, Parameters, RenderLimits
from shaderlm.text.call_form import KINDS, kind_of

_BEFORE = """{{ '<tools>' ~ (tools | tojson) ~ '</tools>' if tools }}
{%- for m in messages %}
{{- '<|' ~ m.role ~ '|>' }}
{%- if m.tool_calls %}{{ m.content or '' }}"""
_AFTER = """{%- else %}{{ m.content }}{% endif %}{{- '<|end|>\n' }}{% endfor %}
{{- '<|assistant|>' if add_generation_prompt }}"""


def template(calls: str) -> str:
    """A template whose messages of the assistant end with these calls."""
    return f"{_BEFORE}{calls}{_AFTER}"


def each_call(text: str, *, before: str = "", between: str = "", after: str = "") -> str:
    """Calls with texts around them; `c` is the function."""
    joined = f"{{{{ '' if loop.last else {between!r} }}}}" if between else ""
    loop = f"{{%- for call in m.tool_calls %}}{{%- set c = call.function %}}{text}{joined}{{%- endfor %}}"
    return template(f"{{{{- {before!r} }}}}{loop}{{{{- {after!r} }}}}")


_JSON = "{{- '{\"name\": \"' ~ c.name ~ '\", \"arguments\": ' ~ (c.arguments | tojson) ~ '}' }}"
_NAMED = "{{- '[CALL]' ~ c.name ~ '[ID]' ~ call.id ~ '[ARGS]' ~ (c.arguments | tojson) }}"
_STRING = "(v if v is string else (v | tojson))"
_TAGS = (
    "{{- '<function=' ~ c.name ~ '>\\n' }}{%- for k, v in c.arguments.items() %}"
    "{{- '<parameter=' ~ k ~ '>\\n' ~ " + _STRING + " ~ '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>' }}"
)
_PAIRS = (
    "{{- '<call>' ~ c.name }}{%- for k, v in c.arguments.items() %}"
    "{{- '<key>' ~ k ~ '</key><value>' ~ " + _STRING + " ~ '</value>' }}{%- endfor %}{{- '</call>' }}"
)
_TYPED = (
    "{{- '<invoke name=\"' ~ c.name ~ '\">\\n' }}{%- for k, v in c.arguments.items() %}"
    "{{- '<p name=\"' ~ k ~ '\" text=\"' ~ ('yes' if v is string else 'no') ~ '\">' ~ "
    + _STRING
    + " ~ '</p>\\n' }}{%- endfor %}{{- '</invoke>\\n' }}"
)
_PYTHON = (
    "{{- c.name ~ '(' }}{%- for k, v in c.arguments.items() %}"
    "{{- k ~ '=' ~ (\"'\" ~ v ~ \"'\" if v is string else v) ~ ('' if loop.last else ', ') }}{%- endfor %}{{- ')' }}"
)
_MARKED = """{%- macro shown(v) %}{% if v is string %}{{ '<|q|>' ~ v ~ '<|q|>' }}{% elif v is mapping %}{{ '{' }}
{%- for k, w in v.items() %}{{ k ~ ':' ~ shown(w) ~ ('' if loop.last else ',') }}{% endfor %}{{ '}' }}
{%- elif v is iterable %}{{ '[' }}{% for w in v %}{{ shown(w) ~ ('' if loop.last else ',') }}{% endfor %}{{ ']' }}
{%- else %}{{ v | tojson }}{% endif %}{% endmacro %}{{- '<|call|>' ~ c.name ~ shown(c.arguments) ~ '<|called|>' }}"""
_WRAPPED = (
    "{{- '<f name=\"' ~ c.name ~ '\">' }}{%- for k, v in c.arguments.items() %}"
    "{%- set s = v if v is string else (v | tojson) %}"
    "{{- '<p name=\"' ~ k ~ '\">' ~ ('<![CDATA[' ~ s ~ ']]>' if '<' in s or '\\n' in s else s) ~ '</p>' }}{%- endfor %}"
    "{{- '</f>' }}"
)
_INDEXED = "{{- '<c>' ~ loop.index0 ~ ':' ~ c.name ~ '<a>' ~ (c.arguments | tojson) ~ '</c>' }}"
_LATE_ID = (
    '{{- \'{"name": "\' ~ c.name ~ \'", "arguments": \' ~ (c.arguments | tojson) ~ \', "id": "\' ~ call.id ~ \'"}\' }}'
)

# Thoughts, content and calls have headers.
_CHANNELS = """{{ '<tools>' ~ (tools | tojson) if tools }}{% for m in messages %}{{ '<|start|>' ~ m.role }}
{%- if m.tool_calls %}{% set c = m.tool_calls[0].function %}
{{- ' to=' ~ c.name ~ '<|json|>' ~ (c.arguments | tojson) ~ '<|call|>' }}{% elif m.role == 'assistant' %}
{{- '<|thought|>' ~ m.thinking ~ '<|end|><|start|>assistant' if m.thinking }}
{{- '<|final|>' ~ m.content ~ '<|return|>' }}
{%- else %}{{ '<|message|>' ~ m.content ~ '<|end|>' }}{% endif %}{% endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}"""
# Those that have a form, by what is special about them.
TEMPLATES: dict[str, str] = {
    "JSON in tags": each_call("{{- '<call>\\n' }}" + _JSON + "{{- '\\n</call>' }}", between="\n"),
    "a JSON list": each_call(_JSON, before="[CALLS][", between=", ", after="]"),
    "JSON alone": template(
        "{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
        "{%- set c = m.tool_calls[0].function %}" + _JSON.replace("m.content", "''")
    ).replace("{{ m.content or '' }}", ""),
    "names and ids between tokens": each_call(_NAMED),
    "short ids alone": each_call(
        "{%- if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}" + _LATE_ID,
        before="[CALLS][",
        between=", ",
        after="]",
    ),
    "text arguments": each_call("{{- '<f=' + c.name + '>' + c.arguments + '</f>' }}"),
    "tags": each_call("{{- '<tool>\\n' }}" + _TAGS + "{{- '\\n</tool>' }}", between="\n"),
    "keys and values": each_call(_PAIRS),
    "typed tags": each_call(_TYPED, before="\n\n<calls>\n", after="</calls>"),
    "like Python": each_call(_PYTHON, before="<|call|>[", between=", ", after="]<|called|>"),
    "strings between marks": each_call(_MARKED),
    "wrapped strings": each_call(_WRAPPED, between="\n"),
    "channels": _CHANNELS,
    "counted calls": each_call(_INDEXED, before="<cs>", after="</cs>"),
}
# Those that have none, and what is said of them.
REFUSED: dict[str, tuple[str, str]] = {
    "no calls": (template(""), "it leaves out calls of the assistant"),
    "no arguments": (each_call("{{- '<call>' ~ c.name ~ '</call>' }}"), "it leaves out the arguments of calls"),
    "ids, no names": (each_call("{{- '<call>' ~ call.id ~ (c.arguments | tojson) }}"), "it shows the id of a call"),
    "values without names": (
        each_call("{{- '<call>' ~ c.name ~ (c.arguments.values() | list | tojson) ~ '</call>' }}"),
        "it leaves out the arguments of calls",
    ),
    "lost letters": (each_call("{{- '<call>' ~ c.name ~ (c.arguments | tojson | lower) }}"), "cannot be read back"),
}  # fmt: skip

ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"city": "Köln 東京 🙂"},
    {"city": "", "days": 3},
    {"days": -2.5, "flag": True, "note": 'a < b & "c"\n\n</x> {y} [z]'},
    {"list": [1, "two", {"three": [None, False]}, []], "nested": {"a": {"b": {}}, "c": "d"}},
    {"city": "12", "note": "true"},
    {"nested": {}, "list": [], "flag": False},
)
_TYPES: dict[str, Mapping[str, Any]] = {kind: {"type": kind, "description": "A value."} for kind in KINDS}
_TYPES["object"] = {**_TYPES["object"], "properties": {}, "additionalProperties": True}


def tools_for(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Functions that take these arguments."""
    types = {key: _TYPES[kind_of(value)] for call in calls for key, value in call.items()}
    parameters = {"type": "object", "properties": types, "required": [], "additionalProperties": False}
    return [
        {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}
        for name in ("get_weather", "get")
    ]


def conversation(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One that ends with calls with these arguments."""
    made = [
        {
            "id": f"call{i:05}",
            "type": "function",
            "function": {"name": ("get_weather", "get")[i % 2], "arguments": each},
        }
        for i, each in enumerate(calls)
    ]
    return [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": None, "tool_calls": made}]


def rendered(template: ChatTemplate, calls: list[dict[str, Any]]) -> str:
    """The calls as the template shows them: what the model goes on with after its prompt."""
    tools = tools_for(calls)
    text = template.render(conversation(calls), tools=tools, add_generation_prompt=False)
    prompt = template.render(conversation(calls)[:1], tools=tools)
    at = text.find(template.call_form.begin, 0 if not text.startswith(prompt) else len(prompt))
    assert at >= 0, text
    return text[at:]


def read(template: ChatTemplate, calls: list[dict[str, Any]], text: str, size: int = 1 << 20) -> list[tuple[str, Any]]:
    """The calls that are found in a text, which comes in pieces."""
    tools = {tool["function"]["name"]: Parameters(tool["function"]["parameters"]) for tool in tools_for(calls)}
    parser, found = ChatFormat(template.call_form, tools).parser(), list[list[str]]()
    pieces = [parser.push(text[i : i + size]) for i in range(0, len(text), size)]
    for delta in [each for piece in [*pieces, parser.finish()] for each in piece]:
        if isinstance(delta, CallDelta):
            if delta.name is not None:
                found.append([delta.name, ""])
            found[-1][1] += delta.arguments
    return [(name, json.loads(arguments)) for name, arguments in found]


def written(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The same calls, as `read` finds them."""
    return [(("get_weather", "get")[i % 2], each) for i, each in enumerate(calls)]


def _row(source: str) -> Iterator[str]:
    """What there is to say about a template."""
    template = ChatTemplate(source, bos="<s>", eos="</s>", limits=RenderLimits(seconds=10))
    user = conversation([])[:1]
    if not template.knows_tools:
        yield from ("no", "", "shows no tools: they are told in the messages")
        return
    try:
        yield "yes" if template.render(user) != template.render(user, tools=tools_for([{}])) else "no"
    except (InputError, ModelError):
        yield "yes"
    try:
        form = template.call_form
    except InputError as problem:
        yield "refused"
        yield str(problem)
        return
    wrong, several = 0, [[ARGUMENTS[1], ARGUMENTS[0], ARGUMENTS[3]]] if form.parallel else []
    for calls in [*([each] for each in ARGUMENTS), *several]:
        try:
            text = rendered(template, calls)
            same = all(read(template, calls, text, size) == written(calls) for size in (1 << 20, 1))
        except (InputError, ModelError, ValueError):
            same = False
        wrong += not same
    yield "yes" if not wrong else f"{wrong} wrong"
    yield "several calls" if form.parallel else "one call"


def main(folder: str) -> None:
    """Print a table."""
    counts = [0, 0]
    for path in sorted(Path(folder).glob("*.jinja")):
        changes, works, reason = _row(path.read_text(encoding="utf-8"))
        counts[0] += changes == "yes"
        counts[1] += changes == works == "yes"
        print(f"{path.name:60} {changes:4} {works:8} {reason}", flush=True)
    print(f"{counts[1]} of {counts[0]} templates that show tools can express calls")


if __name__ == "__main__":
    main(sys.argv[1])
