"""Rules of a Lark grammar for calls of functions, in the form of a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import InputError
from ..text import CallForm, Hole, JsonArguments, KeyedArguments, Parameters, Tool
from ..text.call_form import MAX_DEPTH, Kind, Parts, ValueForm, kind_of, kinds_of, resolved

_STRING_LIMITS = ("pattern", "minLength", "maxLength", "format")
_PYTHON_STRING = r"""/'([^'\\\n]|\\[^\n])*'|"([^"\\\n]|\\[^\n])*"/"""
_ANY = r"/(.|\n)*/"
_DEFINITIONS = ("$defs", "definitions")
_MAX_CHARACTERS = 16 << 20  # of the schemas of values: each has a copy of the definitions that it refers to
Schemas = list[tuple[str, Any, str]]  # a grammar's name, the JSON schema, and the function that it is of


def literal(text: str) -> str:
    """A text in quotes. Lark takes JSON's escapes, and no control characters, of which JSON escapes only the first."""
    return re.sub("[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))


def tag_text(tag: str, special: Mapping[str, int]) -> str:
    """A text whose special tokens are tokens."""
    present = [token for token in special if token in tag]
    if not present:
        return literal(tag)
    pieces = re.split(f"({'|'.join(map(re.escape, present))})", tag)
    return " ".join(f"<[{special[piece]}]>" if piece in special else literal(piece) for piece in pieces if piece)


def escaped_regex(text: str) -> str:
    """A text as a part of a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def check_strict(form: CallForm, tool: Tool) -> None:
    """Refuse what a strict schema asks for and the form cannot hold a model to."""
    if not tool.strict or isinstance(form.arguments, JsonArguments):
        return
    parameters, keyed = Parameters(tool.parameters), form.arguments
    for key, schema in parameters.properties.items():
        no_json = keyed.python or keyed.values["object"].codec == "quoted"
        if no_json and parameters.kinds[key] & {"array", "object"} and _has_parts(schema, tool.parameters):
            reason = "this model does not write lists and objects as JSON"
            raise InputError(f"the schema of the parameters of {tool.name} cannot be honoured at {key}: {reason}")
        value = resolved(schema, tool.parameters)
        limits = [limit for limit in _STRING_LIMITS if limit in value]
        raw = "string" in parameters.kinds[key] and "enum" not in value and "const" not in value
        if raw and limits:
            reason = f"this model writes strings as they are, without {limits[0]}"
            raise InputError(f"the schema of the parameters of {tool.name} cannot be honoured at {key}: {reason}")


def _has_parts(schema: Any, root: Mapping[str, Any]) -> bool:
    """Does a schema ask anything of what is in a value?"""
    return not resolved(schema, root).keys() <= {"type", "description", "title", "default"}


class CallGrammar:
    """Rules for the calls of an answer. Their names begin with `call`."""

    def __init__(self, form: CallForm, tools: Sequence[Tool], special: Mapping[str, int]) -> None:
        self._form, self._tools, self._special = form, tools, special
        self.lines: list[str] = []
        self.schemas: Schemas = []  # of arguments, and of their values
        self._raw: dict[str, str] = {}
        self._characters = 0  # of the schemas of values
        self._split = re.compile("|".join(map(re.escape, present)) if (present := self._present()) else r"(?!)")

    def _present(self) -> list[str]:
        texts = list(self._form.texts)
        return [token for token in self._special if any(token in text for text in texts)]

    def text(self, text: str) -> str:
        """A text of the form: its special tokens are tokens."""
        pieces, at = list[str](), 0
        for match in self._split.finditer(text):
            pieces += [*self._plain(text[at : match.start()]), f"<[{self._special[match[0]]}]>"]
            at = match.end()
        return " ".join([*pieces, *self._plain(text[at:])])

    def _plain(self, text: str) -> Iterator[str]:
        """Around JSON, white space with a line end may be other white space; around values it belongs to them."""
        if not isinstance(self._form.arguments, JsonArguments):
            yield from [literal(text)] if text else []
            return
        for i, piece in enumerate(re.split(r"([ \n]*\n[ \n]*)", text)):
            if i % 2:
                yield rf"/[ \n]{{1,{len(piece) + 1}}}/?"
            elif piece:
                yield literal(piece)

    def calls(self, *, parallel: bool) -> str:
        """All calls, after the text that they begin with."""
        form = self._form
        begin = len(form.begin)
        first: Parts = form.first
        if begin and isinstance(first[0], str):
            first = (first[0][begin:], *first[1:])
        bodies = [self._body(i, tool) for i, tool in enumerate(self._tools)]
        self.lines += [f"call_{i}_arguments: {body}" for i, body in enumerate(bodies)]
        self._choice("call_first", first)
        more = ""
        if parallel and form.between:
            self._choice("call_next", form.between)
            more = "call_next*"
        return f"call_first {more} {self._parts(form.last, '')}"

    def _choice(self, rule: str, head: Parts) -> None:
        for i, tool in enumerate(self._tools):
            self.lines.append(f"{rule}_{i}: {self._parts(head, tool.name)} call_{i}_arguments")
        self.lines.append(f"{rule}: {' | '.join(f'{rule}_{i}' for i in range(len(self._tools)))}")

    def _parts(self, parts: Parts, name: str) -> str:
        pieces, before = list[str](), ""
        for part in parts:
            if isinstance(part, str):
                pieces.append(self.text(part))
            elif part is Hole.NAME:
                # In quotes it is a JSON string.
                pieces.append(literal(json.dumps(name, ensure_ascii=False)[1:-1] if before.endswith('"') else name))
            else:
                pieces.append("/[A-Za-z0-9]{9}/" if part is Hole.ID else "/[0-9]{1,3}/")
            before = part if isinstance(part, str) else ""
        return " ".join(piece for piece in pieces if piece)

    # Arguments -----------------------------------------------------------------------------------------------

    def _body(self, i: int, tool: Tool) -> str:
        form = self._form.arguments
        if isinstance(form, JsonArguments):
            self.schemas.append((f"arguments_{i}", tool.parameters, tool.name))
            return f"@arguments_{i}"
        parameters = Parameters(tool.parameters)
        if not parameters.properties and tool.parameters.get("additionalProperties") is not False:
            return self._any_arguments(form)
        names = list(parameters.properties)
        for j, key in enumerate(names):
            self.lines.append(f"call_{i}_{j}: {self._argument(form, parameters, f'{i}_{j}', key, tool.name)}")
        return self._sequence(form, i, [name in parameters.required for name in names])

    def _sequence(self, form: KeyedArguments, i: int, required: Sequence[bool]) -> str:
        """Arguments in their order, of which those that are not required may be left out."""
        first, rest = [self.text(form.empty)], [self.text(form.close)]
        for j in reversed(range(len(required))):
            here = f"call_{i}_{j}"
            begins = f"{self.text(form.open)} {here} call_{i}_{j}_rest"
            follows = f"{self.text(form.separator)} {here} call_{i}_{j}_rest"
            self.lines.append(f"call_{i}_{j}_rest: {_or_nothing(rest)}")
            if required[j]:
                first, rest = [begins], [follows]
            else:
                first.append(begins)
                self.lines.append(f"call_{i}_{j}_left: {_or_nothing(rest)}")
                rest = [follows, f"call_{i}_{j}_left"]
        return _or_nothing(first)

    def _argument(self, form: KeyedArguments, parameters: Parameters, place: str, key: str, name: str) -> str:
        """A key, its value, and the text after it."""
        kinds, schema = parameters.kinds[key], parameters.properties[key]
        ways = (
            list(self._strings(form, key, literal(key), self._choices(schema, parameters))) if "string" in kinds else []
        )
        others = [kind for kind in form.values if kind in kinds and kind != "string"]
        by_form: dict[tuple[str, str, Parts], list[Kind]] = {}
        for kind in others:
            value = form.values[kind]
            by_form.setdefault((value.before, value.codec, value.after), []).append(kind)
        for n, ((before, codec, after), these) in enumerate(by_form.items()):
            python = [kind for kind in these if kind in ("boolean", "null", "array", "object")] if form.python else []
            if codec == "quoted":
                content = self._generic(form, these, python=False)
            else:
                content = f"@value_{place}_{n}"
                self.schemas.append((f"value_{place}_{n}", self._value_schema(schema, parameters, these), name))
                if python:  # JSON as the schema has it, or as the template shows such values
                    content = f"({content} | {self._generic(form, python, python=True)})"
            ways.append(f"{literal(key)} {self.text(before)} {content} {self._after(after, key)}")
        return " | ".join(ways)

    def _value_schema(self, schema: Any, parameters: Parameters, kinds: Sequence[Kind]) -> Mapping[str, Any]:
        """The schema of a value of these kinds, which stands by itself."""
        value = _only(schema, parameters.schema, kinds)
        text = json.dumps(value, default=dict)
        if '"$ref"' in text or '"$dynamicRef"' in text:
            value = {**{each: parameters.schema[each] for each in _DEFINITIONS if each in parameters.schema}, **value}
            text = json.dumps(value, default=dict)
        self._characters += len(text)
        if self._characters > _MAX_CHARACTERS:
            most = f"{_MAX_CHARACTERS:,} characters in this model's form of calls"
            raise InputError(f"tools: the schemas of their arguments have more than {most}; give fewer or simpler ones")
        return value

    def _choices(self, schema: Any, parameters: Parameters) -> list[str] | None:
        """The strings that a schema lists."""
        value = resolved(schema, parameters.schema)
        listed = value["enum"] if isinstance(value.get("enum"), (list, tuple)) else [value.get("const")]
        strings = [each for each in listed if isinstance(each, str)]
        return strings or None

    def _strings(self, form: KeyedArguments, key: str, key_rule: str, choices: list[str] | None) -> Iterator[str]:
        """A key and a string, and the text after it."""
        value, wrapped = form.values["string"], form.values.get("wrapped")
        after = self._after(value.after, key)
        if choices is not None:
            quoted = value.codec != "raw"
            texts = [literal(json.dumps(each, ensure_ascii=False) if quoted else each) for each in choices]
            content = f"({' | '.join(texts)}) {after}"
        elif value.codec != "raw":
            content = f"{_PYTHON_STRING} {after}"
        elif wrapped is None:
            content = self._raw_rule(form, value, key)
        else:
            mark = wrapped.before[len(value.before) :]
            inner = self._before(wrapped.after, key)
            plain = self._before(value.after, key, f"(/(.|\\n)*/ & ~/{escaped_regex(mark)}(.|\\n)*/)")
            content = f"({self.text(mark)} {inner} | {plain})"
        yield f"{key_rule} {self.text(value.before)} {content}"

    def _after(self, after: Parts, key: str) -> str:
        """What follows a value. A key is plain text, whatever it is."""
        return " ".join(self.text(part) if isinstance(part, str) else literal(key) for part in after)

    def _raw_rule(self, form: KeyedArguments, value: ValueForm, key: str) -> str:
        """Any string, and the text that ends it, which it does not have."""
        after = value.after
        following = [each[:1] for each in (form.separator, form.close or self._last_text()) if each]
        if len(after) == 1 and isinstance(after[0], str) and len(after[0]) == 1 and len(following) == 2:
            # A quote that the string may have, too, unless what follows an argument comes after it.
            quote, others = re.escape(after[0]), re.escape(after[0] + "".join(following))
            return self._named(rf"/([^{quote}]|{quote}[^{others}])*{quote}/")
        return self._before(after, key)

    def _before(self, after: Parts, key: str, text: str = _ANY) -> str:
        """Any text up to this one, and this one."""
        begin, rest = (after[0], after[1:]) if after and isinstance(after[0], str) else ("", after)
        plain = self._split.split(begin)[0] if begin else ""
        if begin and not plain:  # a special token, which no text has
            return f"{self._named(text)}? {self._after(after, key)}"
        lazy = self._named(f"{text} {literal(plain or key)}", lazy=True)
        return f"{lazy} {self.text(begin[len(plain) :])} {self._after(rest if plain else rest[1:], key)}"

    def _named(self, pattern: str, *, lazy: bool = False) -> str:
        name = self._raw.get(pattern)
        if name is None:
            number = len(self._raw)
            name = self._raw[pattern] = f"call_text_{number}" if lazy else f"CALL_TEXT_{number}"
            self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {pattern}")
        return name

    def _last_text(self) -> str:
        return next((part for part in self._form.last[:1] if isinstance(part, str)), "")

    def _generic(self, form: KeyedArguments, kinds: Sequence[Kind], *, python: bool) -> str:
        """Any value as Python writes it, or with strings between the marks of the form."""
        name = "call_python" if python else "call_quoted"
        if not any(line.startswith(f"{name}:") for line in self.lines):
            words = "True|False|None" if python else "true|false|null"
            string = _PYTHON_STRING if python else f"{self.text(form.quotes[0])} {self._before((form.quotes[1],), '')}"
            key = f"{name}_string" if python else r"/[A-Za-z_][A-Za-z0-9_\-]{0,63}/"
            space = '" "?' if python else ""
            pairs, values = f'({name}_pair ("," {space} {name}_pair)*)?', f'({name} ("," {space} {name})*)?'
            self.lines += [
                f"{name}: {name}_string | {name.upper()}_WORD | {name}_object | {name}_array",
                f"{name}_string: {string}",
                rf"{name.upper()}_WORD: /-?(0|[1-9][0-9]{{0,15}})(\.[0-9]{{1,15}})?|{words}/",
                f'{name}_object: "{{" {pairs} "}}"',
                f'{name}_pair: {key} ":" {space} {name}',
                f'{name}_array: "[" {values} "]"',
            ]
        rules: dict[Kind, str] = {"boolean": '("True" | "False")', "null": '"None"'}
        return f"({' | '.join(rules.get(kind, f'{name}_{kind}') for kind in kinds)})"

    def _any_arguments(self, form: KeyedArguments) -> str:
        """Arguments that no schema names."""
        if not any(line.startswith("call_any:") for line in self.lines):
            key = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
            ways = list(self._strings(form, "", key, None)) if not _keys_in(form) else []
            for value in {(each.before, each.codec, each.after): each for each in form.values.values()}.values():
                if value.codec == "literal" and not _keys_in(form):
                    ways.append(f"{key} {self.text(value.before)} @any {self._after(value.after, '')}")
            self.schemas.append(("any", {"type": ["number", "boolean", "null", "array", "object"]}, ""))
            self.lines.append(f"call_any: {' | '.join(ways)}")
        many = f"{self.text(form.open)} call_any ({self.text(form.separator)} call_any)* {self.text(form.close)}"
        return _or_nothing([many, self.text(form.empty)])


def _keys_in(form: KeyedArguments) -> bool:
    """Do keys come again after their values?"""
    return any(Hole.KEY in value.after for value in form.values.values())


def _or_nothing(ways: Sequence[str]) -> str:
    """One of these, of which an empty one may be left out."""
    some = [way for way in ways if way.strip()]
    if not some:
        return '""'
    return f"({' | '.join(some)}){'?' if len(some) < len(ways) else ''}"


def _only(schema: Any, root: Mapping[str, Any], kinds: Sequence[Kind], depth: int = 0) -> Mapping[str, Any]:
    """A schema for values of these kinds alone, as far as it does not refer to itself."""
    value = dict(resolved(schema, root))
    for key in ("anyOf", "oneOf") if depth < MAX_DEPTH else ():
        if isinstance(value.get(key), (list, tuple)):
            value[key] = [_only(each, root, kinds, depth + 1) for each in value[key] if _has(each, root, kinds)]
    if isinstance(value.get("enum"), (list, tuple)):
        value["enum"] = [each for each in value["enum"] if kind_of(each) in kinds]
        return value
    named = value.get("type")
    words = [named] if isinstance(named, str) else named if isinstance(named, (list, tuple)) else list(kinds)
    kept = [word for word in words if word in kinds or (word == "integer" and "number" in kinds)]
    if kept and not any(key in value for key in ("anyOf", "oneOf", "allOf", "const")):
        value["type"] = kept if len(kept) > 1 else kept[0]
    return value


def _has(schema: Any, root: Mapping[str, Any], kinds: Sequence[Kind]) -> bool:
    return bool(kinds_of(schema, root) & set(kinds))
