"""Structured output and tools through the engine: tiny models with random weights, which must be held to a form."""

from __future__ import annotations

import json
import math
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import shaderlm
from shaderlm.engine import Completion, Constraint, EngineOptions, LanguageModel, constraints, load, mask_queue
from shaderlm.engine.constraints import Grammar, GrammarCompiler
from shaderlm.engine.structured import Structure, chat_grammar, structure_of
from shaderlm.errors import InputError
from shaderlm.gpu import Device
from shaderlm.install import install_command
from shaderlm.limited import Answer
from shaderlm.runtime.adjusted import mask_words
from shaderlm.text import ChatFormat, ChatTemplate, Parameters, Tokenizer, read_tools

from .call_templates import ARGUMENTS as CALL_ARGUMENTS
from .call_templates import TEMPLATES as CALL_TEMPLATES
from .call_templates import rendered as rendered_calls
from .call_templates import tools_for
from .command_line import Done
from .command_line import shaderlm as shaderlm_command
from .tiers import examples
from .tiny_models import CHATML, SPECIAL, tiny_tokens, write_tiny_llama

CHAT = [{"role": "user", "content": "hello"}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    path = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", context=2048, layers=1)
    with load(path, device="cpu") as loaded:
        yield loaded


def validated(completion: Completion, schema: Any) -> Any:
    """The JSON of a text that is complete."""
    assert completion.finish_reason == "stop", completion
    value = json.loads(completion)
    jsonschema.validate(value, schema)
    return value


# Forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_json_validates(model: LanguageModel, temperature: float) -> None:
    for seed in range(2):
        options: Any = {"temperature": temperature, "seed": seed, "max_tokens": 600}
        validated(model.generate("the", json_schema=PERSON, **options), PERSON)
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
        validated(model.chat(CHAT, response_format=form, **options), PERSON)


def test_forms(model: LanguageModel) -> None:
    options: Any = {"temperature": 1.0, "seed": 1, "max_tokens": 500}
    assert re.fullmatch(r"[a-c]{3}/\d+\.", model.generate("x", regex=r"[a-c]{3}/[0-9]{1,9}\.", **options))
    assert model.generate("x", choice=["yes", 'n"o\n', "Köln"], **options) in ("yes", 'n"o\n', "Köln")
    gbnf = 'root ::= item ("," item)* "."  # items\nitem ::= [a-f]{1,4} | "\\u00e9" | "(" item ")"'
    made = model.generate("x", grammar=gbnf, **options)
    assert made.finish_reason == "length" or re.fullmatch(r"[a-fé(),]+\.", made)
    lark = 'start: WORD (" " WORD){1,3}\nWORD: /[a-z]{1,5}/'
    assert re.fullmatch(r"[a-z]{1,5}( [a-z]{1,5}){1,3}", model.generate("x", grammar=lark, **options))
    value = model.generate("x", response_format={"type": "json_object"}, logit_bias=closing(model), **options)
    assert isinstance(json.loads(value), dict)
    free = model.generate("x", response_format={"type": "text"}, **options)
    assert free == model.generate("x", **options)


def closing(model: LanguageModel) -> dict[int, float]:
    """What brings JSON to an end: random weights go on for long."""
    return dict.fromkeys(model.tokenize('"}]'), 8.0) | dict.fromkeys(model.tokenize("{["), -8.0)


JSON_GBNF = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}"
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt]) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,2}
"""


def test_gbnf_of_json(model: LanguageModel) -> None:
    """Written as it is for llama.cpp."""
    complete = 0
    for seed in range(6):
        options: Any = {"temperature": 1.0, "seed": seed, "max_tokens": 400, "logit_bias": closing(model)}
        made = model.generate("x", grammar=JSON_GBNF, **options)
        if made.finish_reason == "stop":
            assert isinstance(json.loads(made), dict)
            complete += 1
    assert complete


def goes_on(constraint: Constraint, token: int) -> bool:
    """May anything follow this token?"""
    found = constraint.accept(token)
    return constraint.mask() is not None if found is None else found


def mask_of(constraint: Constraint) -> bytes:
    mask = constraint.mask()
    assert mask is not None
    return mask


def accepts(model: LanguageModel, grammar: Grammar, text: str) -> bool:
    """Is this a complete text of the grammar?"""
    constraint, rest, tokens = grammar.start(), text.encode(), model.tokenizer.bytes_by_token
    while rest:
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask_of(constraint), np.uint8), bitorder="little"))
        fitting = [i for i in allowed.tolist() if tokens[i] and rest.startswith(tokens[i])]
        if not fitting:
            return False
        token = max(fitting, key=lambda i: len(tokens[i]))
        rest = rest[len(tokens[token]) :]
        if not goes_on(constraint, token):
            return not rest
    mask, eos = mask_of(constraint), min(model.tokenizer.stop_ids)
    return bool(mask[eos >> 3] >> (eos & 7) & 1)


any_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(any_text, min_size=1, max_size=3))
@example(texts=["\x7f", "\n", '/\\"'])
def test_any_text_can_be_a_choice_a_regex_or_a_name(model: LanguageModel, texts: list[str]) -> None:
    compiler = model._grammars
    for options in ({"choice": texts}, {"regex": "|".join(map(re.escape, texts))}):
        structure = structure_of(options)
        assert structure is not None
        grammar = compiler.of_structure(structure)
        assert all(accepts(model, grammar, text) for text in texts)
        assert not accepts(model, grammar, "".join(texts) + "zz")
    choice = read_tools([{"type": "function", "function": {"name": texts[0]}}], "required")
    output = ChatFormat(ChatTemplate("").call_form, {texts[0]: Parameters({})})
    made = compiler.of_chat(output, choice, None, may_think=False)
    assert made is not None
    name = json.dumps(texts[0], ensure_ascii=False)
    call = f'<tool_call>\n{{"name": {name}, "arguments": {{}}}}\n</tool_call>'
    assert accepts(model, made, call)
    assert output.message(call)["tool_calls"][0]["function"]["name"] == texts[0]


def test_what_is_cut_says_so(model: LanguageModel) -> None:
    made = model.generate("x", json_schema={"type": "string", "minLength": 50}, max_tokens=20)
    assert (made.finish_reason, len(made.ids)) == ("length", 20)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"json_schema": PERSON, "stop": ['"age"']}, "length"),
        ({"json_schema": PERSON, "stop": ["}"]}, "length"),
        ({"choice": ["one two"], "stop": ["e t"]}, "length"),
        ({"regex": "(ab)*c", "stop": ["c"]}, "length"),
        ({"regex": "a+,b", "stop": [",b"]}, "length"),
        ({"regex": "a+(,b)?", "stop": ["b"], "logit_bias": {"a": -99}}, "length"),
        ({"regex": "aa(,b)", "stop": ["b"]}, "length"),
        ({"regex": "aa(,b)?", "stop": [",b"], "logit_bias": {",": 99, "b": 99}}, "stop"),
        ({"regex": "[a-z]* x", "stop": ["z"], "logit_bias": {"z": 99}}, "length"),
        ({"regex": "[a-z]*", "stop": ["z"], "logit_bias": {"z": 99}}, "stop"),
    ],
)
def test_a_stop_string_within_a_form_cuts_it(model: LanguageModel, options: dict[str, Any], reason: str) -> None:
    """Unless what comes before it is complete."""
    bias = {model.tokenize(text, add_special=False)[0]: bias for text, bias in options.pop("logit_bias", {}).items()}
    made = model.generate("x", temperature=1.0, seed=1, max_tokens=600, logit_bias=bias, **options)
    assert made.finish_reason == reason, made
    assert options["stop"][0] not in made
    assert len(made.ids) < 600


def test_a_stop_string_within_a_token_of_a_form(walker: Walker) -> None:
    """What is before it of this token is part of the text."""
    model = walker.tokenizer
    grammar = walker.compiler.of_structure(structure_of({"regex": "[a-z ]*;?"}))  # type: ignore[arg-type]
    the = model.encode("the", parse_special=False)
    assert len(the) == 1
    for dropped, kept, complete in ((1, b"th", True), (1, b"t;", True), (2, b"t;t", False), (0, b"", True)):
        constraint = grammar.start()
        for token in the * 2:
            constraint.accept(token)
        assert constraint.is_complete(dropped, kept) is complete


def test_a_stop_id_within_a_form_cuts_it(model: LanguageModel) -> None:
    quote = model.tokenize('"', add_special=False)
    made = model.generate("x", json_schema=PERSON, stop_token_ids=quote, temperature=1.0, seed=1)
    assert made.finish_reason == "length", made
    b = model.tokenize("b", add_special=False)
    complete = model.generate("x", regex="a*bc?", stop_token_ids=b, logit_bias=dict.fromkeys(b, 99.0))
    assert complete.finish_reason == "length", "it has no b"
    complete = model.generate("x", regex="a*b?", stop_token_ids=b, logit_bias=dict.fromkeys(b, 99.0))
    assert complete.finish_reason == "stop"


def test_what_is_complete_ends(model: LanguageModel) -> None:
    """Whatever else was asked for: neither a token that is banned nor one that is missing keeps it from that."""
    eos: Any = model.tokenizer.vocabulary.eos
    cases: list[Any] = [{"min_tokens": 50}, {"ignore_eos": True}, {"logit_bias": {eos: -100}}]
    for options in cases:
        made = model.generate("x", choice=["abc", "abcd"], max_tokens=60, **options)
        assert made in ("abc", "abcd")
        assert made.finish_reason == "stop"


# Hypothesis over schemas -----------------------------------------------------------------------------------

names = st.text("abz é", min_size=1, max_size=3)
limits = st.integers(0, 4)


def _array(item: Any) -> Any:
    return st.fixed_dictionaries(
        {"type": st.just("array"), "items": item, "maxItems": st.integers(1, 3)},
        optional={"minItems": st.integers(0, 1)},
    )


@st.composite
def _object(draw: Any, inner: Any) -> Any:
    properties = draw(st.dictionaries(names, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    made = {"type": "object", "properties": properties, "required": required}
    others = draw(st.sampled_from([False, False, {"type": "null"}, None]))
    return made if others is None else {**made, "additionalProperties": others}


@st.composite
def _number(draw: Any) -> Any:
    low = draw(st.integers(-500, 500))
    made: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "number"]))}
    made |= draw(st.sampled_from([{}, {"minimum": low}, {"exclusiveMinimum": low}]))
    if draw(st.booleans()):
        made["maximum"] = low + draw(st.integers(2, 1000))
    return made | draw(st.sampled_from([{}, {}, {"multipleOf": 2}]))


leaves = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["integer", "null"]}]),
    st.builds(lambda values: {"enum": values}, st.lists(st.none() | st.integers() | names, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, st.none() | st.integers() | names | st.lists(names, max_size=2)),
    _number(),
    st.builds(lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, limits, limits),
    st.builds(
        lambda text: {"type": "string", "pattern": text}, st.sampled_from(["^[ab]{1,3}$", r"^\d\d?x", "^(é|z)$"])
    ),
    st.builds(lambda text: {"type": "string", "format": text}, st.sampled_from(["date", "uuid", "ipv4"])),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        _array(inner), _object(inner), st.builds(lambda of: {"anyOf": of}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=5,
)


class Walker:
    """Draws texts from masks without a model, and ends them rather than not."""

    def __init__(self, tokenizer: Tokenizer, added: int = 3) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer.vocabulary.tokens) + added  # a model may have more tokens than its vocabulary
        self.compiler = GrammarCompiler(tokenizer, self.size)
        self.closing = tokenizer.encode('"}],:')

    def text(self, schema: Any, seed: int, max_tokens: int = 400) -> bytes | None:
        structure = structure_of({"json_schema": schema})
        assert structure is not None
        constraint, rng, made = self.compiler.of_structure(structure).start(), np.random.default_rng(seed), b""
        for _ in range(max_tokens):
            bits = np.unpackbits(np.frombuffer(mask_of(constraint), np.uint8), bitorder="little")
            assert len(bits) == 32 * mask_words(self.size)
            allowed = np.flatnonzero(bits)
            assert len(allowed), "a text that is not complete can go on"
            assert allowed.max() < len(self.tokenizer.vocabulary.tokens)
            ends = [token for token in self.closing if bits[token]]
            token = int(rng.choice(ends if ends and rng.random() < 0.4 else allowed))
            if not goes_on(constraint, token):
                return made + self.tokenizer.token_bytes(token)
            made += self.tokenizer.token_bytes(token)
        return None


def _holds(walker: Walker, schema: Any, seed: int) -> bool:
    """Does a text come to an end? Then it validates. A schema that is refused has a reason."""
    try:
        made = walker.text(schema, seed)
    except InputError as problem:
        if not re.search("nothing satisfies it|Unsatisfiable|numbers beyond", str(problem)):
            raise
        return False
    if made is not None:
        jsonschema.validate(json.loads(made.decode()), schema)
    return made is not None


@pytest.fixture(scope="module")
def walker(model: LanguageModel) -> Walker:
    return Walker(model.tokenizer)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=schemas, seed=st.integers(0, 1000))
def test_every_text_validates(walker: Walker, schema: Any, seed: int) -> None:
    _holds(walker, schema, seed)


@pytest.mark.parametrize("size", [267, 287, 288, 289, 320])
def test_a_mask_has_a_bit_for_each_token_of_the_model(model: LanguageModel, size: int) -> None:
    assert _holds(Walker(model.tokenizer, size - model.config.vocabulary), PERSON, 1)


def test_texts_come_to_an_end(walker: Walker) -> None:
    """So that the test before this one has something to compare."""
    assert all(_holds(walker, PERSON, seed) for seed in range(20))


numbers = st.integers(-50, 50) | st.sampled_from([0.5, -0.25, 1.75, 3.125])
keys = st.sampled_from(["a", "b", "ab", "é", "x y", 'a"b', "0", ""])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text('ab"\\\n/é😀\u2028', max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=2),
    max_leaves=4,
)


def _wide(inner: Any) -> Any:
    """Any keywords together, also those that make no sense or have no solution."""
    several = st.lists(inner, min_size=1, max_size=2)
    types = ["object", "array", "string", "number", "integer", "boolean", "null", ["string", "null"], ["array", "null"]]
    keywords = {
        "type": st.sampled_from(types),
        "properties": st.dictionaries(keys, inner, max_size=3),
        "required": st.lists(keys, max_size=2, unique=True),
        "additionalProperties": st.booleans() | inner,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$", "^x.y$"]), inner, max_size=1),
        "items": inner | st.booleans(),
        "prefixItems": several,
        "pattern": st.sampled_from(["^a", "b$", "[ab]", r"^\w+$", "^.{2,3}$", r"\d"]),
        "multipleOf": st.sampled_from([1, 2, 3, 5]),
    }
    limits = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
    keywords |= dict.fromkeys(limits, st.integers(0, 4))
    keywords |= dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), numbers)
    plain = st.fixed_dictionaries({}, optional=keywords)
    return st.one_of(
        plain,
        *(st.builds(lambda of, key=key: {key: of}, several) for key in ("anyOf", "allOf", "oneOf")),
        *(st.builds(lambda one, of, key=key: {**one, key: of}, plain, several) for key in ("anyOf", "allOf")),
        st.builds(lambda of: {"enum": of}, st.lists(values, min_size=1, max_size=3)),
        st.builds(lambda of: {"const": of}, values),
        st.builds(lambda one: {"$defs": {"d": one}, "$ref": "#/$defs/d"}, plain),
    )


@pytest.mark.long
@settings(max_examples=examples(3000))
@given(schema=st.recursive(schemas | st.booleans(), _wide, max_leaves=6), seed=st.integers(0, 1000))
def test_every_text_of_many_validates(schema: Any, seed: int) -> None:
    """Or the schema is refused, for whatever reason."""
    try:
        _holds(_large(), schema, seed)
    except InputError as problem:
        if "cannot be honoured" not in str(problem):
            raise


def _large() -> Walker:
    if not _LARGE:
        _LARGE.append(Walker(shaderlm.Tokenizer.from_file(Path(__file__).parent / "data" / "vocab" / "gpt-2.gguf")))
    return _LARGE[0]


_LARGE: list[Walker] = []


# Refused ---------------------------------------------------------------------------------------------------

IN_ITEMS = {"type": "object", "properties": {"a/b": {"type": "array", "items": {"not": {"type": "null"}}}}}
IN_DEFINITION = {"$defs": {"x": {"uniqueItems": True}}, "anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": IN_ITEMS}, r'json_schema cannot be honoured at #/properties/a~1b/items: .*"not"'),
        ({"json_schema": IN_DEFINITION}, r'json_schema cannot be honoured at #/\$defs/x: .*"uniqueItems"'),
        ({"json_schema": {"items": {"type": "intt"}}}, "json_schema cannot be honoured at #/items: Invalid type: intt"),
        ({"json_schema": {"pattern": "(?=a)"}}, "json_schema cannot be honoured at #: .*look-ahead"),
        ({"json_schema": {"type": "object", "minProperties": 2}}, "at #: minProperties is kept where"),
        ({"json_schema": {"minProperties": 2, "required": 5}}, "at #: minProperties is kept where"),
        ({"json_schema": {"minProperties": 2, "required": None}}, "at #: minProperties is kept where"),
        ({"json_schema": {"minProperties": 2, "required": ["a", "a"]}}, "at #: minProperties is kept where"),
        ({"json_schema": {"minProperties": 2, "required": [{}, []]}}, "at #: minProperties is kept where"),
        ({"json_schema": {"const": "x" * 2_000_000}}, "json_schema must have at most 1,048,576 characters"),
        ({"json_schema": {"enum": [0] * 2_000_000}}, "json_schema must have at most 1,048,576 characters"),
        ({"grammar": "#" * 2_000_000}, "grammar must have at most 1,048,576 characters"),
        ({"choice": ["x" * 2_000_000]}, "choice must have at most 1,048,576 characters"),
        ({"response_format": {"type": "json_object", "schema": False}}, "nothing satisfies it"),
        ({"json_schema": {"items": {"enum": [{"a": [-(2**53) - 1]}]}}}, "at #/items: numbers beyond 2"),
        ({"json_schema": {"type": "integer", "maximum": 2**60}}, "at #: numbers beyond 2"),
        ({"json_schema": {"oneOf": [{"minimum": 1}, {"maximum": 2}]}}, "at #: oneOf is kept where its cases are of"),
        ({"json_schema": False}, "json_schema cannot be honoured: nothing satisfies it"),
        ({"json_schema": {"$ref": "#"}}, "nothing satisfies it"),
        ({"json_schema": {"minimum": 3, "maximum": 2, "type": "integer"}}, "minimum .* is greater than maximum"),
        ({"json_schema": "x"}, r"json_schema must be a JSON schema \(a mapping\), got 'x'"),
        ({"json_schema": {"const": float("nan")}}, "json_schema must be JSON"),
        ({"json_schema": {"const": {1, 2}}}, "json_schema must be JSON"),
        ({"grammar": "root ::= ("}, "grammar cannot be honoured: .*it is read as GBNF"),
        ({"grammar": "root ::= foo"}, "grammar cannot be honoured: Rule 'foo' not found"),
        ({"grammar": "start: foo"}, "grammar cannot be honoured: "),
        ({"grammar": " "}, "grammar cannot be honoured: No 'root' rule"),
        ({"grammar": 3}, "grammar must be a str that is not empty, got 3"),
        ({"regex": "(?=a)"}, "regex cannot be honoured: .*look-ahead"),
        ({"regex": ""}, "regex must be a str that is not empty, got ''"),
        ({"choice": []}, r"choice must be a list of texts, got \[\]"),
        ({"choice": "abc"}, "choice must be a list of texts, got 'abc'"),
        ({"regex": "a", "choice": ["a"]}, "give one of .*; got regex and choice"),
        ({"response_format": {"type": "xml"}}, "response_format must be .*, got {'type': 'xml'}"),
        ({"response_format": "json"}, "response_format must be .*, got 'json'"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "must have a schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
            r"response_format\.json_schema",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(
    model: LanguageModel, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        model.request("x", **options)
    assert "\n" not in str(caught.value)


def tool(**function: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **function}}]


def deep(levels: int) -> Any:
    made: Any = {"type": "null"}
    for _ in range(levels):
        made = {"type": "array", "items": made}
    return made


@pytest.mark.parametrize("levels", [100, 127, 300, 900, 100_000])
def test_schemas_that_are_too_deep_are_refused(model: LanguageModel, levels: int) -> None:
    assert model.request("x", json_schema=deep(99)).constraint is not None
    words = "recursion|must be nested at most 100 levels deep; it has more"
    with pytest.raises(InputError, match=words):
        model.request("x", json_schema=deep(levels))
    with pytest.raises(InputError, match=words):
        model.chat_request(CHAT, tools=tool(parameters={"properties": {"x": deep(levels)}}))


def test_a_schema_does_not_change_what_is_allowed(model: LanguageModel) -> None:
    """`x-guidance` is for llguidance, not for whoever sends a schema."""
    with pytest.raises(InputError, match="not"):
        model.request("x", json_schema={"not": {"type": "null"}, "x-guidance": {"lenient": True}})


def test_an_old_llguidance_is_named(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_one(tokens: Any, eos_token: int) -> None:
        raise TypeError("argument 'eos_token': 'list' object cannot be interpreted as an integer")

    monkeypatch.setattr("llguidance.LLTokenizer", takes_one)
    command = re.escape(install_command("structured", upgrade=True))
    with pytest.raises(InputError, match=rf"a newer llguidance than [\d.]+; install it with: {command}"):
        GrammarCompiler(model.tokenizer, model.config.vocabulary).prepare()


def test_llguidance_is_named_where_it_is_missing(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(model.tokenizer, model.config.vocabulary)
    message = rf"the package llguidance; install it with: {re.escape(install_command('structured'))}"
    with pytest.raises(InputError, match=message):
        compiler.prepare()
    cases: list[dict[str, Any]] = [{"regex": "a"}, {"grammar": "root ::= [a]"}, {"json_schema": {}}]
    for options in cases:
        structure = structure_of(options)
        assert structure is not None
        with pytest.raises(InputError, match=message):
            compiler.of_structure(structure)


def test_tokens_that_are_excluded_can_leave_none(model: LanguageModel) -> None:
    banned = dict.fromkeys(model.tokenize("ab"), float("-inf"))
    with pytest.raises(InputError, match="does logit_bias exclude all of them"):
        model.generate("x", choice=["aa", "bb"], logit_bias=banned)
    assert model.generate("x", choice=["aa", "cc"], logit_bias=banned) == "cc", "the next one is not affected"


# In company ------------------------------------------------------------------------------------------------


def test_the_tables_of_a_vocabulary_can_be_made_before_they_are_needed(model: LanguageModel) -> None:
    model.prepare_grammars()
    first = model._grammars._guidance
    model.prepare_grammars()
    assert model._grammars._guidance is first


def test_a_model_that_is_loaded_again_has_the_tables_of_its_vocabulary(model: LanguageModel) -> None:
    tokenizer = Tokenizer(model.tokenizer.vocabulary)
    first = GrammarCompiler(tokenizer, model.config.vocabulary)._guidance
    again = GrammarCompiler(Tokenizer(model.tokenizer.vocabulary), model.config.vocabulary)
    assert again._guidance is first
    vocabulary = replace(tokenizer.vocabulary, tokens=[*tokenizer.vocabulary.tokens[:-1], "another"])
    other = GrammarCompiler(Tokenizer(vocabulary), model.config.vocabulary)
    assert other._guidance is not first
    larger = GrammarCompiler(tokenizer, model.config.vocabulary + 64)
    assert len(larger._guidance.only_ends) > len(first.only_ends)


def test_grammars_are_kept(model: LanguageModel) -> None:
    made = [model.request("x", json_schema=PERSON).constraint for _ in range(2)]
    assert made[0] is made[1]
    assert made[0] is not None


@pytest.mark.parametrize("seconds", [-1.0, math.inf], ids=["masks of other threads", "masks in place"])
def test_a_request_can_be_submitted_twice_and_others_do_not_notice(
    model: LanguageModel, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_queue, "IN_PLACE_SECONDS", seconds)
    model.engine.configure(EngineOptions(parallel=4))
    free = model.generate("the owl", max_tokens=40)
    request = model.request("x", json_schema=PERSON, temperature=1.0, max_tokens=600)
    handles = [model.engine.submit(request) for _ in range(2)]
    others = [model.engine.submit(model.request("the owl", max_tokens=40)) for _ in range(2)]
    for handle in handles:
        completion = handle.result()
        assert completion is not None
        validated(completion, PERSON)
        assert handle.stop_match is None or handle.stop_match in model.tokenizer.stop_ids
    for other in others:
        completion = other.result()
        assert completion is not None
        assert completion == free


def test_threads_compile_and_generate_together(model: LanguageModel) -> None:
    found: dict[int, Completion] = {}

    def work(i: int) -> None:
        schema = {**PERSON, "title": str(i % 2)}
        found[i] = model.generate("x", json_schema=schema, temperature=1.0, seed=i, max_tokens=600)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(6):
        validated(found[i], PERSON)


@pytest.mark.long
def test_masks_are_applied_on_the_gpu(device: Device, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", kind="q8_0", context=384, layers=1)
    properties = {"a": {"type": "integer", "maximum": 99}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    with load(path, device=device) as on_gpu, load(path, device="cpu") as on_cpu:
        asked: Any = {"json_schema": schema, "max_tokens": 60, "temperature": 1.0, "seed": 3}
        made = on_gpu.generate("the", **asked)
        validated(made, schema)
        assert made.ids == on_cpu.generate("the", **asked).ids


# Tools -----------------------------------------------------------------------------------------------------

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {**CITY, "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
PARAMETERS = {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in TOOLS}
# Templates in the style of those that models have.
SHOW = (
    "{{ tools if tools }}{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}\n"
    '{{ BEFORE ~ \'{"name": "\' ~ call.function.name ~ \'", "KEY": \' }}'
    "{{ (call.function.arguments | tojson) ~ '}' ~ AFTER }}"
    "{% endfor %}{% endfor %}"
)
WITH_TAGS = SHOW.replace("BEFORE", r"'<tool_call>\n'").replace("KEY", "arguments")
WITH_TAGS = WITH_TAGS.replace("AFTER", r"'\n</tool_call>'")
WITH_THINKING = WITH_TAGS + "{# <think> </think> #}[assistant]"
WITHIN_THINKING = WITH_THINKING + "<think>\n"
ALONE = (
    SHOW.replace("m.content or ''", "m.content if not m.tool_calls")
    .replace("BEFORE", "''")
    .replace("KEY", "parameters")
)
ALONE = ALONE.replace("AFTER", "''").replace("%}\n", "%}{{ raise_exception('one') if not loop.first }}")
WITH_TOKEN = SHOW.replace("BEFORE", "'<|python_tag|>'").replace("KEY", "arguments").replace("AFTER", "''")
NAMED = {"type": "function", "function": {"name": "now"}}


def checked_calls(completion: Completion) -> list[str]:
    """The names of the calls of an answer whose arguments validate."""
    message = completion.message
    for call in message.get("tool_calls", ()):
        function = call["function"]
        jsonschema.validate(json.loads(function["arguments"]), PARAMETERS[function["name"]])
    assert "tool_call>" not in (message["content"] or "")
    return [call["function"]["name"] for call in message.get("tool_calls", ())]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    """One that has <|python_tag|> as a special token."""
    tokens = [*tiny_tokens()[: -len(SPECIAL)], "<|python_tag|>", *SPECIAL[1:]]
    metadata, path = {"tokenizer.ggml.tokens": tokens}, tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    with load(write_tiny_llama(path, context=2048, layers=1, metadata=metadata), device="cpu") as loaded:
        yield loaded


TEMPLATES = {
    "no tools": (CHATML, False),
    "tags": (WITH_TAGS, False),
    "thinking": (WITHIN_THINKING, False),
    "alone": (ALONE, False),
    "with a special token": (WITH_TOKEN, True),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_calls_validate(model: LanguageModel, llama: LanguageModel, kind: str) -> None:
    template, special = TEMPLATES[kind]
    used = llama if special else model
    used.use_chat_template(template)
    options: Any = {"temperature": 1000.0, "max_tokens": 900, "tools": TOOLS, "reasoning": False}
    options["logit_bias"] = dict.fromkeys(used.tokenize(" \n\t"), -100.0)
    seen = set[str]()
    try:
        for seed in range(20):
            required = used.chat(CHAT, tool_choice="required", seed=seed, **options)
            assert required.finish_reason == "stop"
            found = checked_calls(required)
            assert found
            assert required.message["content"] is None
            assert len(found) == 1 or template != ALONE
            seen.update(found)
            if len(seen) == len(TOOLS):
                break
        assert seen == {"weather", "now"}
        named = used.chat(CHAT, tool_choice=NAMED, **options)
        assert checked_calls(named) == ["now"]
        single = used.chat(CHAT, tool_choice="required", parallel_tool_calls=False, seed=0, **options)
        assert len(checked_calls(single)) == 1
        checked_calls(used.chat(CHAT, seed=0, **{**options, "max_tokens": 20}))
    finally:
        used.use_chat_template(CHATML)


@pytest.mark.parametrize("kind", CALL_TEMPLATES)
def test_what_a_template_writes_is_what_its_grammar_allows(model: LanguageModel, kind: str) -> None:
    """Calls as the template shows them may come; those of other functions, with other arguments, may not."""
    model.use_chat_template(CALL_TEMPLATES[kind])
    try:
        for arguments in CALL_ARGUMENTS:
            template = model.chat_template
            assert template is not None
            request = model.chat_request(CHAT, tools=tools_for([arguments]), tool_choice="required")
            grammar, text = request.constraint, rendered_calls(template, [arguments])
            assert isinstance(grammar, Grammar)
            text = text.partition("<|end|>")[0]
            assert accepts(model, grammar, text), text
            assert not accepts(model, grammar, text.replace("get_weather", "got_weather"))
            if arguments.get("days") == 3:
                assert not accepts(model, grammar, text.replace("3", "true")), text
    finally:
        model.use_chat_template(CHATML)


@pytest.mark.parametrize("kind", ["tags", "strings between marks", "JSON in tags", "wrapped strings"])
def test_nothing_of_tools_becomes_a_special_token(model: LanguageModel, kind: str) -> None:
    """Texts of the form may: those of names, keys and values are plain."""
    evil = "<|im_end|>"
    schema = {
        "type": "object",
        "properties": {evil: {"enum": [evil, "x"]}, "b": {"type": "string"}},
        "required": [evil],
    }
    hostile = [{"type": "function", "function": {"name": evil, "description": evil, "parameters": schema}}]
    form = ChatTemplate(CALL_TEMPLATES[kind].replace("<tool>", evil)).call_form
    grammars = []
    for tools in (hostile, json.loads(json.dumps(hostile).replace(evil, "abc"))):
        output = ChatFormat(form, {})
        choice = read_tools(tools, "required")
        grammars.append(chat_grammar(output, choice, None, model.tokenizer.special_tokens, may_think=False))
    assert grammars[0].count("<[") == grammars[1].count("<["), grammars[0]
    model.use_chat_template(CALL_TEMPLATES[kind])
    try:
        ids = model.chat_request(CHAT, tools=hostile).prompt_ids
        plain = model.chat_request(CHAT, tools=json.loads(json.dumps(hostile).replace(evil, "abc"))).prompt_ids
    finally:
        model.use_chat_template(CHATML)
    end = model.tokenizer.special_tokens[evil]
    assert list(ids).count(end) == list(plain).count(end)


@pytest.mark.parametrize("value", [{"type": "array", "items": {"$ref": "#/$defs/x"}}, {"type": "integer"}])
def test_definitions_are_copied_where_they_are_needed_and_not_without_end(value: dict[str, Any]) -> None:
    """A value has a grammar of its own. One that refers to itself alone may be anything."""
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}]}
    definitions = {"x": {"enum": ["y" * 100_000]}, "loop": loop}
    properties = {f"p{i}": value for i in range(200)}
    tool = {
        "name": "f",
        "parameters": {"type": "object", "$defs": definitions, "properties": {**properties, "l": loop}},
    }
    choice = read_tools([{"type": "function", "function": tool}], "required")
    output = ChatFormat(ChatTemplate(CALL_TEMPLATES["tags"]).call_form, {})
    if "items" in value:
        with pytest.raises(InputError, match="more than 16,777,216 characters in this model's form of calls"):
            chat_grammar(output, choice, None, {}, may_think=False)
    else:
        assert len(chat_grammar(output, choice, None, {}, may_think=False)) < 1_000_000


def test_headers_of_thoughts_and_content_may_come(model: LanguageModel) -> None:
    model.use_chat_template(CALL_TEMPLATES["channels"])
    try:
        grammar = model.chat_request(CHAT, tools=TOOLS).constraint
    finally:
        model.use_chat_template(CHATML)
    assert isinstance(grammar, Grammar)
    thought = "<|thought|>Hm.<|end|><|start|>assistant"
    call = " to=now<|json|>{}<|call|>"
    for text in ("<|final|>Yes.<|return|>", f"{thought}<|final|>Yes.", call, thought + call, "Yes."):
        assert accepts(model, grammar, text), text
    assert not accepts(model, grammar, " to=nobody<|json|>{}<|call|>")


def test_auto_holds_calls_to_their_schema(walker: Walker, model: LanguageModel) -> None:
    """Text is free up to the tag; from there on, only a call that validates can come."""
    model.use_chat_template(WITH_THINKING)
    try:
        request = model.chat_request(CHAT, tools=TOOLS)
    finally:
        model.use_chat_template(CHATML)
    assert request.constraint is not None
    assert request.chat is not None

    def ends(text: str) -> str:
        """How far a text may go on: "", "complete", or what is refused of it."""
        assert request.constraint is not None
        constraint = request.constraint.start()
        for at, character in enumerate(text):
            token, mask = model.tokenizer.encode(character)[0], constraint.mask()
            if mask is None or not mask[token >> 3] >> (token & 7) & 1:
                return text[at:]
            constraint.accept(token)
        mask, eos = constraint.mask(), min(model.tokenizer.stop_ids)
        return "complete" if mask is None or mask[eos >> 3] >> (eos & 7) & 1 else ""

    assert ends("") == "complete"
    assert ends("a < b") == "complete"
    assert ends("<think>x") == ""
    assert ends("<think>x <tool_call> y</think> z") == "complete"
    assert ends("<tool_call>") == ends('x<tool_call>\n{"name": "no') == ""
    assert ends("<tool_call>x") == "x"
    assert ends('<tool_call>{"name": "nope') == "pe"
    good = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert ends(good) == ends(f"q {good}{good}") == ends(f"<think>m</think>\n\n{good}") == "complete"
    assert ends(good + "x") == "x"


def test_thinking_comes_before_the_form(model: LanguageModel) -> None:
    """Content validates; what is thought before it is free, if it is told apart."""
    end = dict.fromkeys(model.tokenize("</think>"), 12.0)
    for template in (WITH_THINKING, WITHIN_THINKING):
        model.use_chat_template(template)
        try:
            within = template == WITHIN_THINKING
            request = model.chat_request(CHAT, json_schema=PERSON)
            assert request.constraint is not None
            assert request.chat is not None
            constraint = request.constraint.start()
            thought = "x { <tool_call>\n</think>" if within else "<think>x { </think>"
            for token in model.tokenize(thought + '\n\n{"name": "a", "age": 3'):
                assert mask_of(constraint)[token >> 3] >> (token & 7) & 1
                assert goes_on(constraint, token)
            assert not goes_on(constraint, model.tokenize("}")[0])
            made = model.chat(CHAT, json_schema=PERSON, temperature=1.0, seed=1, reasoning=False, max_tokens=600)
            validated(made, PERSON)
            if not within:
                closed = model.chat(
                    [*CHAT, {"role": "assistant", "content": "<think></think>"}],
                    continue_final_message=True,
                    json_schema=PERSON,
                    temperature=1.0,
                    seed=2,
                    max_tokens=600,
                    logit_bias=end,
                )
                validated(closed, PERSON)
        finally:
            model.use_chat_template(CHATML)


def test_tools_that_cannot_be_honoured(model: LanguageModel) -> None:
    strange = {"type": "object", "properties": {"x": {"not": {"type": "null"}}}}
    with pytest.raises(InputError, match=r"the schema of the parameters of f cannot be honoured at #/properties/x"):
        model.chat_request(CHAT, tools=tool(parameters=strange, strict=True))
    assert model.chat_request(CHAT, tools=tool(parameters=strange)).constraint is not None, "as far as it goes"
    with pytest.raises(InputError, match=r"the schema of the parameters of f cannot be honoured"):
        model.chat_request(CHAT, tools=tool(parameters={"properties": {"x": {"type": "y"}}}))
    with pytest.raises(InputError, match="the function 'f0' is there twice"):
        model.chat_request(CHAT, tools=[{"type": "function", "function": {"name": f"f{i % 9}"}} for i in range(10)])
    with pytest.raises(InputError, match="unknown option 'tool'"):
        model.chat(CHAT, tool=[])  # type: ignore[call-overload]
    with pytest.raises(InputError, match="unknown option 'tools'"):
        model.generate("x", tools=[])  # type: ignore[call-overload]
    with pytest.raises(InputError, match="reasoning must be True or False, got 2"):
        model.chat(CHAT, reasoning=2)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "options",
    [
        {"json_schema": {"type": "integer", "multipleOf": 9_999_991}},
        {"regex": "a?" * 20_000 + "a" * 20_000},
        {"choice": [f"x{i * 7919 % 10**7:07}" for i in range(60_000)]},
        {
            "grammar": "root ::= "
            + " | ".join(f"r{i}" for i in range(9000))
            + "".join(f'\nr{i} ::= "{i}"' for i in range(9000))
        },
    ],
)
def test_grammars_cost_what_they_may(
    model: LanguageModel, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit the first takes minutes and gigabytes."""
    monkeypatch.setattr(model._grammars, "seconds", 0.5)
    with pytest.raises(InputError, match=r"takes (more than 0\.5 s|too much memory) to compile.*; make it simpler"):
        model.request("a", **options)
    assert model.request("a", regex="a+").constraint is not None


def test_a_grammar_may_name_special_tokens(model: LanguageModel) -> None:
    name = next(text for text in model.tokenizer.special_tokens if re.fullmatch(r"<\|?\w+\|?>", text))
    assert model.request("a", grammar=f'start: {name} "a"').constraint is not None
    number = model.tokenizer.special_tokens[name]
    assert model.request("a", grammar=f'start: <[{number}]> "a"').constraint is not None


def test_a_crash_of_the_compiler_is_an_error(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shaderlm.engine.constraints._trials.ask", lambda *given: Answer("ended", "", 0.1))
    with pytest.raises(InputError, match="regex takes too much memory to compile, or breaks the compiler"):
        model.request("a", regex="crash")


def test_few_grammars_are_kept(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory alone: no more than a number, nor than took some seconds to compile."""
    compiler = GrammarCompiler(model.tokenizer, model.config.vocabulary)
    monkeypatch.setattr(constraints, "_MAX_GRAMMARS", 3)
    monkeypatch.setattr(constraints, "_MAX_PASSED", 5)
    for i in range(9):
        compiler.of_structure(Structure("regex", "regex", f"a{{{i + 1}}}"))
        assert len(compiler._grammars) == min(i + 1, 3)
        assert len(compiler._tried) <= 5
    monkeypatch.setattr(constraints, "_MAX_COMPILE_SECONDS", 0.0)
    compiler.of_structure(Structure("regex", "regex", "b"))
    assert len(compiler._grammars) == 1, "the newest stays"


def test_a_call_that_a_stop_string_cuts_says_so(model: LanguageModel) -> None:
    options: Any = {"tools": TOOLS[:1], "temperature": 1.0, "seed": 1, "max_tokens": 500}
    cut = model.chat(CHAT, tool_choice="required", stop=["city"], **options)
    assert cut.finish_reason == "length", cut
    bias = dict.fromkeys(model.tokenize("q", add_special=False), 50.0)
    free = model.chat(CHAT, tool_choice="auto", stop=["q"], logit_bias=bias, **options)
    assert free.finish_reason == "stop", "text without calls is always complete"


def test_the_answer_goes_back_into_the_conversation(model: LanguageModel) -> None:
    made = model.chat(CHAT, tools=TOOLS, tool_choice=NAMED, temperature=1.0, seed=1, max_tokens=500)
    message = made.message
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12:00"}
    ids = model.chat_ids([*CHAT, message, result], tools=TOOLS)
    text = model.detokenize(ids)
    assert '{"name": "now", "arguments": {' in text
    assert "<tool_response>\n12:00\n</tool_response>" in text
    assert model.generate("x", max_tokens=3).message["role"] == "assistant"


# The command line --------------------------------------------------------------------------------------------


def test_the_command_line_takes_schemas_and_grammars(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", context=512, layers=1)

    def generate(*arguments: object) -> Done:
        return shaderlm_command("generate", "x", "-m", path, "--device", "cpu", "-n", "300", *arguments)

    schema, grammar = tmp_path / "person.json", tmp_path / "word.gbnf"
    schema.write_text(json.dumps(PERSON))
    grammar.write_text('root ::= "a" [b-d]{2}\n')
    done = generate("--json-schema", schema)
    assert done.code == 0, done.err
    jsonschema.validate(json.loads(done.out), PERSON)
    assert re.fullmatch("a[b-d]{2}\n", generate("--grammar", grammar, "--raw").out)
    grammar.write_text("root ::= (")
    schema.write_text("{")
    for arguments, words in (
        (("--grammar", grammar), "grammar cannot be honoured: "),
        (("--json-schema", schema), "person.json is not JSON: "),
        (("--json-schema", tmp_path / "none"), "none: No such file"),
    ):
        done = generate(*arguments)
        assert done.code == 2, done.err
        assert words in " ".join(done.err.split())
