"""What an answer must look like: the options that ask for it, and grammars for `llguidance` made of them.

A grammar is JSON text: {"grammars": [{"name", "lark_grammar" or "json_schema"}, …]}, the first of which is the whole.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import InputError
from ..text import CallForm, ChatFormat, ToolChoice
from ..text.json_size import check_json_size
from .call_grammar import CallGrammar, escaped_regex, literal, tag_text

OPTIONS = ("json_schema", "grammar", "regex", "choice", "response_format")
# Between values of JSON: enough for any usual way to indent, and no endless rows of spaces.
_WHITE_SPACE = r"(\n? {0,24}|\t{1,8}|\n\t{0,8})"
_JSON: Mapping[str, Any] = {"whitespace_pattern": _WHITE_SPACE}


@dataclass(frozen=True)
class Structure:
    """What was asked for, checked as far as that goes without compiling it. `text` is JSON except for a grammar."""

    option: str  # its name, for errors
    kind: Literal["json_schema", "grammar", "regex", "choice"]
    text: str


def structure_of(options: Mapping[str, Any]) -> Structure | None:
    """Of the options above, the one that is not None."""
    named = [name for name in OPTIONS if options.get(name) is not None]
    if not named:
        return None
    if len(named) > 1:
        raise InputError(f"give one of {', '.join(OPTIONS)}; got {' and '.join(named)}")
    name, value = named[0], options[named[0]]
    if name == "response_format":
        return _response_format(value)
    if name == "json_schema":
        return _schema(name, value)
    if name == "choice":
        texts = value if isinstance(value, (list, tuple)) else []
        if not texts or any(not isinstance(text, str) or not text for text in texts):
            raise InputError(f"choice must be a list of texts, got {reprlib.repr(value)}")
        return Structure(name, "choice", json_text(name, list(texts)))
    if not isinstance(value, str) or not value:
        raise InputError(f"{name} must be a str that is not empty, got {reprlib.repr(value)}")
    check_json_size(name, value)
    return Structure(name, "grammar" if name == "grammar" else "regex", value)


def _response_format(response_format: Any) -> Structure | None:
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema")
        return _schema("response_format.schema", {"type": "object"} if schema is None else schema)
    if kind == "json_schema":
        inner = response_format.get("json_schema", response_format)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if schema is None:
            raise InputError(f"response_format.json_schema must have a schema, got {reprlib.repr(inner)}")
        return _schema("response_format.json_schema.schema", schema)
    expected = "{'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', 'json_schema': {'schema': …}}"
    raise InputError(f"response_format must be {expected}, got {reprlib.repr(response_format)}")


def _schema(option: str, schema: Any) -> Structure:
    if not isinstance(schema, (Mapping, bool)):
        raise InputError(f"{option} must be a JSON schema (a mapping), got {reprlib.repr(schema)}")
    return Structure(option, "json_schema", json_text(option, schema))


def json_text(option: str, value: Any) -> str:
    """A value as JSON, if it can be written so."""
    check_json_size(option, value)
    try:
        return json.dumps(value, ensure_ascii=True, allow_nan=False, default=dict)
    except (TypeError, ValueError, RecursionError) as problem:
        raise InputError(f"{option} must be JSON; {' '.join(str(problem).split())}") from None


# JSON schemas ----------------------------------------------------------------------------------------------------

_OF_SCHEMAS = ("properties", "patternProperties")  # values are schemas
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_WITH_NUMBERS = ("enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_DEFINITIONS = ("$defs", "definitions")
_BRACE_FIRST = r"/\s*\{(.|\n)*/"
_MAX_PLACES = 500  # schemas that are compiled to find the one that is refused


def guided(schema: Any, *, lenient: bool = False) -> dict[str, Any]:
    """A schema with what llguidance is to do with it. `lenient`: keywords that it does not know are left out."""
    return {
        **(schema if isinstance(schema, Mapping) else {}),
        "x-guidance": {**_JSON, "lenient": lenient, "coerce_one_of": lenient},
    }


def check_schema(schema: Any, option: str) -> None:
    """Refuse what llguidance takes, but does not keep."""
    for place, each in _within(schema, "#", _DEFINITIONS):
        least = each.get("minProperties", 0)
        # A key may come twice, unless all of them are known.
        known = each.get("additionalProperties") is False and not each.get("patternProperties")
        required = each.get("required")
        named = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
        if isinstance(least, (int, float)) and least > max(1, named) and not known:
            reason = "minProperties is kept where additionalProperties is false, or where it is 1"
            raise InputError(f"{option} cannot be honoured at {place}: {reason}")
        if any(abs(number) > 2**53 for key in _WITH_NUMBERS for number in _numbers(each.get(key))):
            raise InputError(f"{option} cannot be honoured at {place}: numbers beyond 2^53 are not exact")


def _numbers(value: Any) -> Iterator[float]:
    """All numbers within lists and mappings."""
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(each)


def _within(schema: Any, place: str, extra: Sequence[str] = ()) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All schemas in a schema, itself first, with their places as JSON pointers."""
    if isinstance(schema, Mapping):
        yield place, schema
        for step, each in _children(schema, extra):
            yield from _within(each, f"{place}/{step}", extra)


def _children(schema: Mapping[str, Any], extra: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    for key in (*_OF_SCHEMAS, *extra):
        if isinstance(schema.get(key), Mapping):
            yield from ((f"{key}/{_escaped(name)}", each) for name, each in schema[key].items())
    for key in _LISTS:
        if isinstance(schema.get(key), (list, tuple)):
            yield from ((f"{key}/{i}", each) for i, each in enumerate(schema[key]))
    for key in _SINGLE:
        if isinstance(schema.get(key), Mapping):
            yield key, schema[key]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def unsupported_place(schema: Any, unsupported_reason: Callable[[Any], str | None], reason: str) -> tuple[str, str]:
    """The innermost schema that is refused by itself, as a JSON pointer, and the reason.

    `unsupported_reason` says why a schema is refused; `reason` is why the whole is.
    """
    definitions = {key: schema[key] for key in _DEFINITIONS if isinstance(schema, Mapping) and key in schema}
    place, attempts, inner, seen = "#", _MAX_PLACES, schema, set[str]()
    while isinstance(inner, Mapping):
        for step, each in _inner(inner, place, schema):
            attempts -= 1
            if attempts < 0:
                return place, reason
            refusal = None
            if isinstance(each, Mapping) and step not in seen:
                refusal = unsupported_reason({**definitions, **each})
            if refusal is not None:
                place, reason, inner = step, refusal, each
                seen.add(step)
                break
        else:
            break
    return place, reason


def _inner(schema: Mapping[str, Any], place: str, root: Any) -> Iterator[tuple[str, Any]]:
    """The children of a schema with their places, and what it refers to."""
    yield from ((f"{place}/{step}", each) for step, each in _children(schema))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        for step in reference[2:].split("/"):
            key = step.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) else None
        yield reference, target


# Grammars --------------------------------------------------------------------------------------------------------


def structure_grammar(structure: Structure, lark: Callable[[str], str]) -> dict[str, Any]:
    """What was asked for as one grammar. `lark` makes Lark of GBNF."""
    if structure.kind == "json_schema":
        return {"json_schema": guided(json.loads(structure.text))}
    if structure.kind == "choice":
        return {"lark_grammar": "start: " + " | ".join(map(literal, json.loads(structure.text)))}
    if structure.kind == "regex":
        return {"lark_grammar": f"start: /{_slashes(structure.text)}/"}
    return {"lark_grammar": lark(structure.text)}


def _slashes(regex: str) -> str:
    """A regular expression as it is written between slashes: a line end is not allowed there, nor is a slash."""
    written = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
    return re.sub(r"\\?[\s\S]", lambda match: written.get(match[0], match[0]), regex)


def whole_grammar(structure: Mapping[str, Any]) -> str:
    """A grammar that is the whole."""
    return json.dumps({"grammars": [structure]})


def chat_grammar(
    output: ChatFormat,
    choice: ToolChoice | None,
    structure: Mapping[str, Any] | None,
    special: Mapping[str, int],
    *,
    may_think: bool,
) -> str:
    """A grammar of an answer: thinking, then content as asked for, or calls.

    special: tags that are tokens without text.
    """
    rules = _Rules(special)
    thought = rules.thought(output) if output.reasoning and may_think else ""
    answers, others = list[str](), list[Mapping[str, Any]]()
    if structure is not None and not (choice is not None and choice.required):
        answers.append(f"{rules.gap} {rules.content_begin(output.calls)} @answer")
        others.append({"name": "answer", **structure})
    if choice is not None:
        assert output.calls is not None
        answers += rules.calls(output.calls, choice, text=not choice.required and structure is None)
        lenient = {tool.name: not tool.strict for tool in choice.tools}
        others += [
            {"name": name, "json_schema": guided(schema, lenient=lenient.get(tool, True))}
            for name, schema, tool in rules.schemas
        ]
    main = f"start: {thought} ({' | '.join(answers)})\n{rules}"
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *others]})


class _Rules:
    """Rules of a Lark grammar. Names of rules that stand for one piece of text are in capitals, unless it is lazy."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special, self._lines = special, list[str]()
        self._not_first: list[str] = []  # what the content does not begin with
        self.gap = ""  # before the content
        self.schemas: list[tuple[str, Any, str]] = []  # of arguments: the grammar's name, the schema, the function

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def _tag(self, tag: str) -> str:
        return tag_text(tag, self._special)

    def _until(self, name: str, text: str, tag: str) -> str:
        """Text up to a tag, which is the first of its kind."""
        plain = re.split("|".join(map(re.escape, self._special)) or "(?!)", tag)[0]
        if not plain:
            self._lines.append(f"{name}: {text}")
            return f"{name}? {self._tag(tag)}"
        self._lines.append(f"{name.lower()}[lazy]: {text} {literal(plain)}")
        return f"{name.lower()} {self._tag(tag[len(plain) :])}" if tag != plain else name.lower()

    def thought(self, output: ChatFormat) -> str:
        begin, end = output.tags
        rest = self._until("THOUGHT", r"/(.|\n)*/", end)
        self.gap = "GAP?"
        self._lines.append(r"GAP: /[ \n]{1,4}/")
        if output.thinking:
            return rest
        self._lines.append(f"thinking: GAP? {self._tag(begin)} {rest}")
        if not any(begin.startswith(token) for token in self._special):
            self._not_first.append(rf"/\s*{escaped_regex(begin)}(.|\n)*/")
        return "thinking?"

    def content_begin(self, form: CallForm | None) -> str:
        """What may stand before the content."""
        if form is None or not form.content[0]:
            return ""
        if not any(line.startswith("HEAD:") for line in self._lines):
            self._lines.append(r"HEAD: /[ \n]{1,2}/")
        return f"(HEAD? {self._tag(form.content[0])})?"

    def calls(self, form: CallForm, choice: ToolChoice, *, text: bool) -> list[str]:
        """Calls, or text without calls before them."""
        grammar = CallGrammar(form, choice.tools, self._special)
        calls = grammar.calls(parallel=choice.parallel)
        self._lines += grammar.lines
        self.schemas += grammar.schemas
        begin, head = grammar.text(form.begin), self.content_begin(form)
        tail = f"({self._tag(form.content[1])})?" if form.content[1] else ""
        content = f"{head} TEXT? {tail}"
        token = next((token for token in self._special if form.begin.startswith(token)), None)
        if form.alone:
            # Text is no call: it does not begin as one does.
            if form.begin and not token:  # one piece with the space before it, which text may begin with, too
                self._lines.append(rf"CALL_BEGIN: /[ \n]{{0,4}}{escaped_regex(form.begin)}/")
                first = f"CALL_BEGIN {calls}"
            else:
                first = f"{self.gap} {begin} {calls}"
            never = [] if token else [self._call_first(form, choice)]
            self._lines.append(f"TEXT: {self._without([*self._not_first, *never])}")
            return [first, content] if text else [first]
        if not text:
            return [f"{self.gap} {begin} {calls}"]
        never = [] if token else [rf"/(.|\n)*{escaped_regex(form.begin)}(.|\n)*/"]
        self._lines.append(f"TEXT: {self._without([*self._not_first, *never])}")
        if token:
            self._lines.append(f"BEFORE: {self._without(self._not_first)}")
            before = f"BEFORE? {tail} {begin}"
        else:
            before = self._until("BEFORE", self._without(self._not_first), form.begin)
        return [f"{head} {before} {calls}", content]

    def _call_first(self, form: CallForm, choice: ToolChoice) -> str:
        """What a call begins with, where nothing but its text tells it from content."""
        if form.begin[:1] in ("{", "["):
            return rf"/\s*{escaped_regex(form.begin[0])}(.|\n)*/"
        if form.begin:
            return rf"/\s*{escaped_regex(form.begin)}(.|\n)*/"
        after = next((part for part in form.first[1:] if isinstance(part, str)), "")
        names = "|".join(escaped_regex(tool.name + after) for tool in choice.tools)
        return rf"/\s*({names})(.|\n)*/"

    def _without(self, patterns: Sequence[str]) -> str:
        return "(" + " & ".join([r"/(.|\n)*/", *(f"~{pattern}" for pattern in patterns)]) + ")"
