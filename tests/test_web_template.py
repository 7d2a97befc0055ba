"""Chat templates of exports: template.js in Node renders what Jinja does in Python; what it cannot is refused."""

from __future__ import annotations

import gzip
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from shaderlm.errors import ModelError
from shaderlm.web.template import ALIASES, DATES, FILTERS, METHODS, TEST_ALIASES, TESTS, compile_template

from . import node
from .template_cases import (
    CONVERSATIONS,
    SCRIPT,
    SETTINGS,
    VARIABLES,
    Rendered,
    in_node,
    in_python,
    random_templates,
    rendered,
    same,
    templates_of_the_tests,
)

# What differs on purpose: template.js fails where Python writes an address, or the name of a type.
LOUD = re.compile(
    "a value with a text is expected|a mapping is|safe|attributes|items|text or a list|number is|looked for|has no attr"
)


# The templates of the tests ----------------------------------------------------------------------------------


def test_every_template_of_the_tests(tmp_path: Path) -> None:
    """For every conversation: the text that the engine computes with, or an error."""
    cases, expected, names = list[tuple[str, Any]](), list[Rendered](), list[str]()
    for source, place in templates_of_the_tests().items():
        for name, messages in CONVERSATIONS.items():
            for number, options in enumerate(SETTINGS):
                variables, result = rendered(source, messages, options)
                if variables:
                    cases.append((source, variables))
                    expected.append(result)
                    names.append(f"{place}, {name}, {number}")
    assert len({source for source, _ in cases}) > 20
    found = in_node(tmp_path, cases)
    different = [name for name, *both in zip(names, found, expected, strict=True) if not same(*both)]
    assert different == []
    kinds = [kind for kind, _ in found]
    assert kinds.count("text") > 400
    assert "refused" in kinds


# Each feature ------------------------------------------------------------------------------------------------

SAME = (Path(__file__).parent / "data" / "templates.txt").read_text(encoding="utf-8").splitlines()


def test_values_and_statements(tmp_path: Path) -> None:
    found = in_node(tmp_path, [(source, VARIABLES) for source in SAME])
    different = []
    for source, result in zip(SAME, found, strict=True):
        expected = in_python(source, VARIABLES)
        if not same(result, expected):
            different.append((source, result, expected))
    assert different == []
    assert sum(kind == "text" for kind, _ in found) > 40


@pytest.mark.parametrize(("seed", "count"), [(1, 400), pytest.param(2, 2000, marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of Python, which reads Jinja's constants
def test_random_expressions(seed: int, count: int, tmp_path: Path) -> None:
    """What both give is the same. Where Python gives a text that template.js does not have, it says so."""
    sources = list(random_templates(count, seed))
    found = in_node(tmp_path, [(source, VARIABLES) for source in sources])
    different, texts = [], 0
    for source, result in zip(sources, found, strict=True):
        expected = in_python(source, VARIABLES)
        texts += result[0] == "text"
        if not same(result, expected) and not (result[0] == "failed" and LOUD.search(result[1])):
            different.append((source, result, expected))
    assert different == []
    assert texts > count / 3


def test_the_date(tmp_path: Path) -> None:
    pattern = "%Y-%m-%d %y %a %A %b %B %-d %-m %I %p %%"
    before = datetime.now().strftime(pattern)
    ((kind, text),) = in_node(tmp_path, [(f"{{{{ strftime_now('{pattern}') }}}}", {})])
    assert kind == "text"
    assert text in (before, datetime.now().strftime(pattern))


# Templates of strangers --------------------------------------------------------------------------------------

STRANGE = [
    "{{ ''.constructor }}|{{ messages.__proto__ }}|{{ d.constructor }}|{{ d['__proto__'] }}|{{ numbers.length }}",
    "{{ numbers.push }}|{{ d.hasOwnProperty }}|{{ d['toString'] }}|{{ n.toFixed }}|{{ globalThis }}|{{ process }}",
    "{{ ''.constructor.constructor('return 1')() }}",
    "{{ d.__proto__.polluted }}",
    "{% set s = namespace() %}{% set s.__proto__ = d %}{{ s.b }}|{% set s.constructor = 1 %}{{ s.constructor }}",
    "{% set __proto__ = 1 %}{{ __proto__ }}",
    "{% macro constructor(toString) %}{{ toString }}{% endmacro %}{{ constructor(2) }}",
    "{{ {'__proto__': {'a': 1}}.a }}|{{ {'__proto__': 1} }}|{{ dict(__proto__=1) }}",
    "{{ messages|map(attribute='__proto__')|list|length }}|{{ messages|map(attribute='constructor.a')|list }}",
    "`${1}` </script> \\ \u2028 {{ '`${1}`' }}{{ '</script>' }}{{ \"\\u2028\" }}",
    "{{ ''.__class__ }}|{{ numbers.extend }}|{{ d.update is defined }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ numbers.extend([1]) }}",
]


def test_nothing_of_javascript_is_reached(tmp_path: Path) -> None:
    found = in_node(tmp_path, [(source, VARIABLES) for source in STRANGE])
    for source, result in zip(STRANGE, found, strict=True):
        assert same(result, in_python(source, VARIABLES)), source


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ range(99999)|list|sort|length }}{% endfor %}",
        "{% for i in range(99999) %}{{ range(99999)|map('string')|join|length }}{% endfor %}",
        "{% for i in range(99999) %}{% if text * 9999 == text * 9999 %}{% endif %}{% endfor %}",
        "{% for i in range(99999) %}{{ (text * 9999).strip('x') is none }}{% endfor %}",
        "{% for i in range(999) %}{{ ('a' * 200000) in ('a' * 2000000 ~ 'b') }}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% set s = namespace(x='ab') %}{% for i in range(99) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
        "{% set s = namespace(x=[1]) %}{% for i in range(99) %}{% set s.x = [s.x, s.x] %}{% endfor %}{{ s.x }}",
        "{% set s = namespace(x=[], y=[]) %}{% for i in range(99) %}{% set s.x = [s.x, s.x] %}"
        "{% set s.y = [s.y, s.y] %}{% endfor %}{{ s.x == s.y }}",
        "{% set s = namespace(x=[1]) %}{% for i in range(99) %}{% set s.x = s.x + s.x %}{% endfor %}",
        "{{ 'a' * 10000 * 100000 }}",
        "{{ [1] * 10000 * 100000 }}",
        "{{ {'a': 1}|tojson(indent=10000 * 100000) }}",
        "{{ 'a\nb'|indent(10000 * 100000) }}",
        "{{ ('a' * 3000000).replace('a', 'b' * 3000000) }}",
        "{{ ('ab' * 1000000).split('b')|join('a' * 1000000) }}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_costs_what_it_may(source: str, tmp_path: Path) -> None:
    ((kind, words),) = in_node(tmp_path, [(source, VARIABLES)])
    assert kind == "failed"
    assert re.search("takes more than 3000000 steps|more than 4000000 characters|recursion depth", words), words


def test_a_long_conversation_is_within_the_limits(tmp_path: Path) -> None:
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"<think>a</think>{'text ' * 200}"} for i in range(2000)
    ]
    sources = [source for source in templates_of_the_tests() if "split('</think>')" in source]
    assert sources
    (found,) = in_node(tmp_path, [(sources[0], {"messages": messages, "add_generation_prompt": True})])
    assert found == in_python(sources[0], {"messages": messages, "add_generation_prompt": True})
    assert len(found[1]) > 1_900_000


# What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ x }}\n{{ x|xmlattr }}", "line 2 has the filter xmlattr"),
        ("{{ x|map('xmlattr') }}", "line 1 has the filter xmlattr"),
        ("{{ x|map(y) }}", "the filter map with a name that is no constant"),
        ("{{ x|nothing }}", "the filter nothing"),
        ("{{ x is filter }}", "the test filter"),
        ("{{ x is eq }}", "the test eq without its argument"),
        ("{{ x is sameas y }}", "the test sameas with another argument"),
        ("{{ x.encode() }}", "the method encode"),
        ("{{ x.split(',', how=2) }}", "the method split with an argument how"),
        ("{{ x|join(1, 2, 3) }}", "the filter join with an argument 3"),
        ("{{ x.format(1) }}", "the method format of what is no constant"),
        ("{{ '{:>3}'.format(1) }}", "a field {} with more than"),
        ("{{ '{}'.format() }}", "a field {} without an argument"),
        ("{{ '%d' % (1,) }}", "a text with % that is no constant with %s"),
        ("{{ '%s' % x }}", "a text with % that is no constant with %s"),
        ("{{ f(*x) }}", "a call with * or **"),
        ("{{ 2 ** x }}", "an expression of the kind Pow"),
        ("{{ cycler(1) }}", "cycler, which is not there"),
        ("{{ self.x() }}", "self, which is not there"),
        ("{{ strftime_now('%Z') }}", "strftime_now with %Z"),
        ("{{ strftime_now(x) }}", "strftime_now with something else"),
        ("{% include 'x' %}", "the tag {% include %}"),
        ("{% import 'x' as x %}", "the tag {% import %}"),
        ("{% extends 'x' %}", "the tag {% extends %}"),
        ("{% block x %}{% endblock %}", "the tag {% block %}"),
        ("{% autoescape true %}{% endautoescape %}", "the tag {% autoescape %}"),
        ("{% for x in y recursive %}{% endfor %}", "a recursive loop"),
        ("{% for loop in y %}{% endfor %}", "an assignment to loop"),
        ("{% break %}", "break outside of a loop"),
        ("{% for x in y %}{% macro f() %}{% continue %}{% endmacro %}{% endfor %}", "continue outside of a loop"),
        ("{% macro f(caller=1) %}{% endmacro %}", "a parameter with the name caller"),
        ("{{ 99999999999999999999 }}", "a whole number of more than 53 bits"),
        ("{{ 1e999 }}", "a number that is too large"),
        ("{{ '\\ud800' }}", "half a character"),
        ("{{ " + "(" * 300 + "1" + ")" * 300 + " }}", "is broken|nests expressions too deeply"),
        ("{{ x" + "|list" * 3000 + " }}", "nests expressions too deeply"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(source: str, words: str) -> None:
    with pytest.raises(ModelError, match=words if "|nests" in words else re.escape(words)) as caught:
        compile_template(source)
    assert "\n" not in str(caught.value)
    if "broken" not in str(caught.value):
        assert "the chat template of this model cannot run in a browser: " in str(caught.value)
        assert str(caught.value).endswith(". --chat-template-file FILE exports another one")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (5, "must be a text, got int"),
        (["a"], "must be a text, got list"),
        ("{% if %}", "is broken: Expected an expression"),
    ],
)
def test_broken_templates(source: object, words: str) -> None:
    with pytest.raises(ModelError, match=re.escape(words)):
        compile_template(source)


def test_an_export_of_another_version_is_named(tmp_path: Path) -> None:
    """What this template.js does not know is no mistake of the conversation."""
    (tmp_path / "template.js").write_bytes(SCRIPT.read_bytes())
    (tmp_path / "package.json").write_text('{"type": "module"}')
    program = json.dumps([["output", ["filter", "constructor", "x"]]])
    (tmp_path / "run.js").write_text(
        'import { templateFunction } from "./template.js";\n'
        f"try {{ templateFunction({program}); }} catch (problem) {{ console.log(problem.message); }}"
    )
    ended = node.run(tmp_path, "run.js", gpu=False)
    assert ended.out == "the export has constructor, which its template.js does not know\n"


def test_what_a_template_may_use(tmp_path: Path) -> None:
    """What is compiled is there, and documented."""
    text = (SCRIPT.parents[4] / "docs" / "web.md").read_text(encoding="utf-8").partition("## Chat templates")[2]
    rows = {kind: set(re.findall(r"`(\w+)`", row)) for kind, row in re.findall(r"^\| (\w+) \| (.*) \|$", text, re.M)}
    filters = {*FILTERS, *ALIASES, "format", "map", "reject", "rejectattr", "select", "selectattr"}
    assert rows["filters"] == filters
    assert rows["methods"] == {*METHODS, "format"}
    tests = {*TESTS, *TEST_ALIASES} - {"lteq", "gteq"}
    assert rows["tests"] == {name for name in tests if name.isidentifier()}
    sources = [f"{{{{ 'a'|{name}{'(1, 2)' * (name == 'replace')} }}}}" for name in FILTERS]
    sources += [f"{{{{ 1 is {name}{'(none)' * bool(names)} }}}}" for name, names in TESTS.items()]
    in_node(tmp_path, [(source, {}) for source in sources])  # makes a function of each
    sources = [f"{{{{ ''.{name} is callable or {{}}.{name} is callable }}}}" for name in METHODS]
    sources += [f"{{{{ strftime_now('%{letter}') is string }}}}" for letter in DATES]
    assert set(in_node(tmp_path, [(source, {}) for source in sources])) == {("text", "True")}


def test_the_size_of_the_script() -> None:
    assert len(gzip.compress(SCRIPT.read_bytes(), 9)) < 13_000
