"""Finds the form in which a chat template writes calls: conversations with calls are rendered and compared.

Names, ids, keys and values of these calls are words that are nowhere else. What stands between them is the form. Then
calls of every kind are rendered and read back: a form that changes one of them is refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .call_form import CallForm, Hole, JsonArguments, KeyedArguments, Kind, Parameters, Parts, ValueForm, kind_of
from .call_reader import read_all
from .literals import read_literal

# Renders messages with tools, with or without a generation prompt. None: the template cannot.
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str | None]

_USER, _CONTENT, _THOUGHT = "qzuser", "qzcontent", "qzthought"
_THOUGHT_END = re.compile(r"</[\w:]*think[\w:]*>|<\|END_THINKING\|>|\[/THINK\]")
_HOLES = {"qzname": Hole.NAME, "qzcall": Hole.ID}
_HOLE = re.compile(r"(qzname\d|qzcall00\d(?:qzlongid)?)")
_KEY_MARK = "\ue000"
# Of what is rendered for a call, and of a value: they are searched in ways that take the square of it.
_MAX_CHARACTERS, _MAX_VALUE = 20_000, 2000
_PLAIN = re.compile(r"qz(?:name|call|key|val)")
_SPECIAL = "q\"z'\\<&>Äß\tb"
_SAMPLES: tuple[tuple[Kind, Any], ...] = (
    ("number", 1234567),
    ("boolean", True),
    ("array", ["qzval1", 31, {"qzkey4": True}]),
    ("object", {"qzkey2": "qzval2", "qzkey3": [41, False]}),
    ("null", None),
)
_NESTED: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": True}
_TYPES: Mapping[Kind, Mapping[str, Any]] = {
    "string": {"type": "string"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "array": {"type": "array", "items": {}},
    "object": _NESTED,
}
# What is read back before a form is used.
_CHECKS: tuple[Mapping[str, Any], ...] = (
    {},
    {"text": "a\n<b> \"c\" 'd' \\ {e} [f], g: h", "more": "Köln 東京 🙂"},
    {"empty": "", "next": "x"},
    {"list": ["Köln", 3, {"inner": ["x", {}]}, []], "flag": True},
    {"nested": {"a": {"b": [1, {"c": "d"}], "e": "f \" ' g"}, "h": 2.5}, "number": -17, "large": 12345678901},
    {"float": 0.25, "no": False, "words": "true"},
    {"digits": "42", "list": ["1", "null"], "nested": {"x": "7"}},
    {"list": [], "nested": {}},
)


class FormError(Exception):
    """A template writes calls in no form that can be read."""


def probe(render: Render) -> CallForm:
    """The form of a template. FormError: it has none."""
    problem: FormError | None = None
    for as_text in (False, True):
        for empty_content in (False, True):
            for short_ids in (False, True):
                way = CallForm((), (), (), JsonArguments(), False, as_text, empty_content, short_ids)
                try:
                    return _Probe(render, way).form()
                except _OtherWayError:
                    continue
                except FormError as refusal:
                    problem = problem or refusal
                    break
    raise problem or FormError("it leaves out calls of the assistant")


class _OtherWayError(Exception):
    """Calls cannot be rendered in this way."""


class _Probe:
    """One way to hand calls to a template."""

    def __init__(self, render: Render, way: CallForm) -> None:
        self._render, self._way = render, way
        self._tools = [_tool(i, {}) for i in (1, 2, 3)]
        base = self._render([_user()], self._tools, False)
        prompt = self._render([_user()], self._tools, True)
        if prompt is None and base is None:
            raise _OtherWayError
        self._prompt, self._base = prompt or base or "", base or prompt or ""
        self._plain = self._render([_user(), {"role": "assistant", "content": _CONTENT}], self._tools, False) or ""
        self._lead = ""

    def form(self) -> CallForm:
        one = self._calls([_arguments(1)])
        if one is None or not _HOLE.search(one, self._start(one)):
            raise _OtherWayError
        if not self._way.empty_content and re.search(r"\b(None|null)\b", self._region(one)):
            raise _OtherWayError  # a content that is not there is shown as a word
        if "qzname" not in self._region(one):
            raise FormError("it shows the id of a call, and not its name")
        self._lead, alone = self._find_lead(one)
        form = self._json_form(one) or self._keyed_form(one)
        form = replace(
            form,
            alone=alone,
            as_text=self._way.as_text,
            empty_content=self._way.empty_content,
            short_ids=self._way.short_ids,
        )
        content = self._around_content(one)
        form = replace(form, content=content, thought=self._around_thought(content[0]))
        if Hole.NAME not in form.first or (form.between and Hole.NAME not in form.between):
            raise FormError("it writes the names of functions in a way that is not known")
        if not form.begin and not alone:
            raise FormError("nothing tells a call from text")
        self._check(form)
        return form

    # Renderings ----------------------------------------------------------------------------------------------

    def _calls(
        self, arguments: Sequence[Mapping[str, Any]], content: str | None = None, types: Mapping[str, Any] = {}
    ) -> str | None:
        """A conversation that ends with these calls."""
        calls = [
            {
                "id": f"qzcall00{i}" + ("" if self._way.short_ids else "qzlongid"),
                "type": "function",
                "function": {"name": f"qzname{i}", "arguments": json.dumps(each) if self._way.as_text else each},
            }
            for i, each in enumerate(arguments, 1)
        ]
        empty = "" if self._way.empty_content else None
        message = {"role": "assistant", "content": empty if content is None else content, "tool_calls": calls}
        tools = [_tool(i, types) for i in (1, 2, 3)] if types else self._tools
        return self._render([_user(), message], tools, False)

    def _start(self, text: str) -> int:
        """Where what belongs to the answer begins, at the earliest."""
        if text.startswith(self._base):
            return len(self._base)
        return max(snapped(_shared(self._base, text)), text.rfind(_USER) + len(_USER))

    def _end(self, text: str) -> int:
        """Where the end of the turn begins."""
        suffix = len(_shared_end(self._plain, text))
        end = len(text) - suffix
        if text.rfind("<", 0, end) > text.rfind(">", 0, end):  # within a tag
            end = text.find(">", end) + 1 or len(text)
        return end

    def _region(self, text: str) -> str:
        return _bounded(text[self._start(text) : self._end(text)])

    def _answer(self, text: str | None) -> str:
        """A rendering from the begin of its calls to their end."""
        if text is None:
            raise FormError("it fails with some calls")
        region = self._region(text)
        hole = _HOLE.search(region)
        if hole is None or not region[: hole.start()].endswith(self._lead):
            raise FormError("calls begin in different ways")
        return region[hole.start() - len(self._lead) :]

    def _find_lead(self, one: str) -> tuple[str, bool]:
        """The text before the first hole that begins calls; is it only at the begin of an answer?"""
        hole = _HOLE.search(one, self._start(one))
        assert hole is not None
        begin = len(self._prompt) if one.startswith(self._prompt) else snapped(_shared(self._plain, one))
        lead = _THOUGHT_END.split(_bounded(one[begin : hole.start()]))[-1]
        both = self._calls([_arguments(1)], _CONTENT)
        content = both.rfind(_CONTENT) if both is not None else -1
        hole = None if both is None or content < 0 else _HOLE.search(both, content)
        if both is None or hole is None:
            lead = lead.lstrip()
            return lead, not re.match(r"\S*[<\[|]\S", lead)
        after = both[content + len(_CONTENT) : hole.start()]
        common = _shared_end(lead, after)
        begin = len(after) - len(common)
        if after.rfind("<", 0, begin) > after.rfind(">", 0, begin):
            begin = after.find(">", begin) + 1 or len(after)
        text = after[begin:].lstrip()
        return text, bool(after[:begin].strip()) or not text

    def _around_content(self, one: str) -> tuple[str, str]:
        """What an answer has before its content and after it, beside white space."""
        at = self._plain.rfind(_CONTENT)
        if at < 0:
            return "", ""
        begin = self._begin(self._plain)
        before = _THOUGHT_END.split(_bounded(self._plain[begin:at]))[-1]
        ends = [n for n in range(len(before), 0, -1) if self._prompt.endswith(before[:n])]
        before = before[ends[0] :] if ends else before  # what the prompt has is no part of the answer
        end = len(self._plain) - len(_shared_end(one, self._plain))
        if self._plain.rfind("<", 0, end) > self._plain.rfind(">", 0, end):
            end = self._plain.find(">", end) + 1 or len(self._plain)
        after = self._plain[at + len(_CONTENT) : end]
        return before.lstrip() if before.strip() else "", after.rstrip() if after.strip() else ""

    def _around_thought(self, content: str) -> tuple[str, str]:
        """What an answer has before its thoughts and after them."""
        message = {"role": "assistant", "content": _CONTENT, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        text = self._render([_user(), message], self._tools, False) or ""
        begin = self._begin(text)
        thought, at = text.find(_THOUGHT, begin), text.rfind(_CONTENT)
        if not begin <= thought < at:
            return "", ""
        end = text[thought + len(_THOUGHT) : at].strip()
        return text[begin:thought].strip(), end.removesuffix(content.strip()).rstrip() if content else end

    def _begin(self, text: str) -> int:
        """Where an answer begins: after the prompt, or after what it has in common with it."""
        return len(self._prompt) if text.startswith(self._prompt) else snapped(_shared(self._prompt, text))

    # Forms ---------------------------------------------------------------------------------------------------

    def _json_form(self, one: str) -> CallForm | None:
        """Arguments as a JSON object."""
        texts = self._json_texts(self._answer(one), 1)
        if texts is None:
            return None
        first, last = _parts(texts[0]), _parts(texts[1])
        between: Parts = ()
        two, three = (self._calls([_arguments(i) for i in range(1, n + 1)]) for n in (2, 3))
        split_two = (
            None if two is None or "qzname2" not in self._region(two) else self._json_texts(self._answer(two), 2)
        )
        split_three = None if three is None else self._json_texts(self._answer(three), 3)
        if split_two is not None and split_three is not None:
            same = split_two[0] == texts[0] and _hole_kinds(split_two[2]) == _hole_kinds(texts[1])
            between = _between(split_two[1], split_three[1], split_three[2]) if same else ()
        return CallForm(first, between, last, JsonArguments())

    def _json_texts(self, answer: str, count: int) -> list[str] | None:
        """What stands before, between and after the arguments of so many calls."""
        texts, at = list[str](), 0
        for i in range(1, count + 1):
            key = answer.find(f"qzkey{i}", at)
            for start in [match.start() for match in re.finditer(r"\{", answer[at:key])] if key >= 0 else []:
                try:
                    value, end = json.JSONDecoder().raw_decode(answer, at + start)
                except (ValueError, RecursionError):
                    continue
                if value == _arguments(i):
                    texts.append(answer[at : at + start])
                    at = end
                    break
            else:
                return None
        return [*texts, answer[at:]]

    def _keyed_form(self, one: str) -> CallForm:
        """Arguments one by one."""
        answer = self._answer(one)
        if "qzkey1" not in answer or "qzval1" not in answer:
            raise FormError("it leaves out the arguments of calls")
        two_arguments = self._answer(self._calls([{"qzkey1": "qzval1", "qzkey2": "qzval2"}]))
        none = self._answer(self._calls([{}]))
        rest = _after(two_arguments, "qzval2").replace("qzkey2", _KEY_MARK)
        to_next = _between_words(two_arguments, "qzval1", "qzkey2").replace("qzkey1", _KEY_MARK)
        after = _common([rest, to_next])
        ending, separator = rest[len(after) :], to_next[len(after) :]
        opened, unopened = _before(_after_holes(answer), "qzkey1"), _after_holes(none)
        head = _common([opened, unopened])
        first = _parts(answer[: len(answer) - len(_after_holes(answer))] + head)
        close, last = ending, ""
        between: Parts = ()
        two, three = (self._calls([_arguments(i) for i in range(1, n + 1)]) for n in (2, 3))
        if (
            two is not None
            and three is not None
            and "qzname2" in self._region(two)
            and "qzname3" in self._region(three)
        ):
            answers = self._answer(two), self._answer(three)
            ways = [
                _between_words(answers[0], "qzval1", "qzkey2"),
                _between_words(answers[1], "qzval1", "qzkey2"),
                _between_words(answers[1], "qzval2", "qzkey3"),
            ]
            plain_after = len(after.replace(_KEY_MARK, "qzkey1"))
            texts = [way[plain_after : len(way) - len(opened) + len(head)] for way in ways]
            holes = _HOLE.search(texts[0])
            assert holes is not None
            between = _between(*texts)
            if between:
                close = _common([ending, texts[0][: holes.start()]])
                last = ending[len(close) :]
                between = _between(*(text[len(close) :] for text in texts))
        empty = unopened[len(head) :]
        if not empty.endswith(last):
            raise FormError("calls without arguments end in another way")
        empty = empty[: len(empty) - len(last)]
        values, quotes = self._values(after, ending)
        python = "True" in self._value_text(True, ending)
        arguments = KeyedArguments(empty, opened[len(head) :], separator, close, values, quotes, python)
        return CallForm(first, between, _parts(last), arguments)

    def _values(self, after: str, ending: str) -> tuple[dict[Kind, ValueForm], tuple[str, str]]:
        """How values of each kind are written."""
        string = self._value_text("qzval1", ending)
        before, _, rest = string.partition("qzval1")
        special = self._value_text(_SPECIAL, ending)
        values: dict[Kind, ValueForm] = {}
        around = special.partition(_SPECIAL)
        if around[1] and around[0].startswith(before) and around[2].endswith(rest):
            values["string"] = ValueForm(before, "raw", _key_parts(rest))
            if around[0] != before:
                values["wrapped"] = ValueForm(around[0], "raw", _key_parts(around[2]))
        elif before[-1:] in ('"', "'") and _reads(special, len(before) - 1, _SPECIAL, None) is not None:
            values["string"] = ValueForm(before[:-1], "literal", _key_parts(rest[1:]))
        else:
            raise FormError("it writes strings in a way that is not known")
        number = self._value_text(1234567, ending)
        number_before, found, number_after = number.partition("1234567")
        if not found:
            raise FormError("it writes numbers in a way that is not known")
        quotes = "", ""
        if before.startswith(number_before) and rest.endswith(number_after):
            quotes = before[len(number_before) :], rest[: len(rest) - len(number_after)]
        for kind, sample in _SAMPLES:
            text = self._value_text(sample, ending)
            form = _value_form(text, sample, (number_before, number_after), rest, quotes)
            if form is None and kind != "null":
                raise FormError(f"it writes values of the type {kind} in a way that is not known")
            if form is not None:
                values[kind] = form
        return values, quotes if any(each.codec == "quoted" for each in values.values()) else ("", "")

    def _value_text(self, value: Any, ending: str) -> str:
        """What stands between a key and the end of its call."""
        answer = self._answer(self._calls([{"qzkey1": value}], types={"qzkey1": _TYPES[kind_of(value)]}))
        text = _after(answer, "qzkey1").replace("qzkey1", _KEY_MARK)
        if not text.endswith(ending):
            raise FormError("values end in different ways")
        return _bounded(text[: len(text) - len(ending)], _MAX_VALUE)

    def _check(self, form: CallForm) -> None:
        """Are calls read back as they were?"""
        checks: list[list[Any]] = [[each] for each in _CHECKS]
        string = form.arguments.values["string"] if isinstance(form.arguments, KeyedArguments) else None
        if string is not None and string.codec == "raw" and string.after[:1] in (("'",), ('"',)):
            # A string ends where its quote and what follows an argument come: it may not have both.
            checks[1:2] = [[{"text": "a\n<b> \"c\" 'd' \\ {e} [f], g: h"}], [{"more": "Köln 東京 🙂"}]]
        if form.between:
            checks.append([_CHECKS[1], {}, _CHECKS[3]])
        for arguments in checks:
            types = {key: _TYPES[kind_of(value)] for each in arguments for key, value in each.items()}
            rendered = self._calls(arguments, types=types)
            if rendered is None:
                raise FormError(f"it fails with arguments such as {json.dumps(arguments)}")
            tools = {f"qzname{i}": Parameters({"type": "object", "properties": types}) for i in (1, 2, 3)}
            try:
                found = read_all(form, tools, self._answer(rendered))
            except RecursionError:
                found = None
            expected = [(f"qzname{i}", each) for i, each in enumerate(arguments, 1)]
            if found is None or not _same(found[0], expected):
                shown = json.dumps(arguments, ensure_ascii=False)
                raise FormError(f"calls with arguments such as {shown} cannot be read back")


def _bounded(text: str, most: int = _MAX_CHARACTERS) -> str:
    """What is rendered for a call, unless it is too long."""
    if len(text) > most:
        raise FormError(f"it writes a call, or a value, with more than {most:,} characters")
    return text


def _shared(*texts: str) -> str:
    """What all of these begin with."""
    return os.path.commonprefix(texts)  # noqa: RUF071 (they are no paths)


def _shared_end(*texts: str) -> str:
    """What all of these end with."""
    return _shared(*(text[::-1] for text in texts))[::-1]


def _same(a: Any, b: Any) -> bool:
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _user() -> dict[str, Any]:
    return {"role": "user", "content": _USER}


def _arguments(i: int) -> dict[str, Any]:
    return {f"qzkey{i}": f"qzval{i}"}


def _tool(i: int, types: Mapping[str, Any]) -> dict[str, Any]:
    properties = {
        key: {"description": "A value.", **each}
        for key, each in ({f"qzkey{n}": _TYPES["string"] for n in (1, 2, 3)} | dict(types)).items()
    }
    parameters = {"type": "object", "properties": properties, "required": [], "additionalProperties": False}
    function = {"name": f"qzname{i}", "description": "A function.", "parameters": parameters}
    return {"type": "function", "function": function}


def _parts(text: str) -> Parts:
    """A text with its names and ids as holes."""
    pieces = _HOLE.split(text)
    return tuple(_HOLES[each[:6]] if i % 2 else each for i, each in enumerate(pieces) if i % 2 or each)


def _key_parts(text: str) -> Parts:
    pieces = re.split(f"({_KEY_MARK})", text)
    return tuple(Hole.KEY if i % 2 else each for i, each in enumerate(pieces) if i % 2 or each)


def _between(*texts: str) -> Parts:
    """What stands between two calls: the same each time, but for names, ids and an index. (): it is not the same."""
    split = [_parts(text) for text in texts]
    if any(_hole_kinds(text) != _hole_kinds(texts[0]) for text in texts):
        return ()
    parts = list[str | Hole]()
    for pieces in zip(*split, strict=True):
        if len(set(pieces)) == 1:
            parts.append(pieces[0])
        elif indexed := _indexed([str(piece) for piece in pieces]):
            parts += indexed
        else:
            return ()
    return tuple(part for part in parts if part != "")


def _hole_kinds(text: str) -> list[Hole | None]:
    return [part if isinstance(part, Hole) else None for part in _parts(text)]


def _indexed(texts: Sequence[str]) -> list[str | Hole]:
    """Texts that differ in one number, which counts the calls. []: they differ in something else."""
    before = _shared(*texts).rstrip("0123456789")
    after = _shared_end(*texts).lstrip("0123456789")
    numbers = {text[len(before) : len(text) - len(after)] for text in texts}
    return [before, Hole.INDEX, after] if all(number.isdecimal() for number in numbers) else []


def _after_holes(answer: str) -> str:
    """What follows the last name or id before the first key."""
    end = answer.find("qzkey1") if "qzkey1" in answer else len(answer)
    holes = [match.end() for match in _HOLE.finditer(answer, 0, end)]
    return answer[holes[-1] :] if "qzkey1" in answer else answer[holes[0 if len(holes) == 1 else -1] :]


def _before(text: str, word: str) -> str:
    return text.partition(word)[0]


def _after(text: str, word: str) -> str:
    return text.partition(word)[2]


def _between_words(text: str, first: str, second: str) -> str:
    return _after(text, first).partition(second)[0]


def _common(texts: Sequence[str]) -> str:
    """What texts begin with, up to the begin of a tag."""
    common = _shared(*texts)
    return common if common in texts else common[: snapped(common)]


def snapped(text: str) -> int:
    """The length of a text without a tag that has only begun."""
    at = max(text.rfind("<"), text.rfind("["))
    return len(text) if at < 0 or max(text.rfind(">"), text.rfind("]")) > at else at


def _reads(text: str, at: int, value: Any, quotes: tuple[str, str] | None) -> int | None:
    """Where this value ends, if it begins here."""
    try:
        found, end = read_literal(text, at, quotes)
    except (ValueError, RecursionError):
        return None
    return end if _same(found, value) else None


def _value_form(
    text: str, value: Any, number: tuple[str, str], string_after: str, quotes: tuple[str, str]
) -> ValueForm | None:
    places = [len(number[0]), *range(len(text))] if text.startswith(number[0]) else range(len(text))
    for marks in (None, quotes if all(quotes) else None):
        for place in places:
            end = _reads(text, place, value, marks)
            if end is not None and text[end:] in (number[1], string_after):
                codec = "literal" if marks is None else "quoted"
                return ValueForm(text[:place], codec, _key_parts(text[end:]))  # type: ignore[arg-type]
    return None
