"""Chat templates, conversations, and what Python and `template.js` make of them."""

from __future__ import annotations

import ast
import copy
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from shaderlm.errors import InputError, ModelError
from shaderlm.formats.gguf import GgufFile
from shaderlm.text import ChatTemplate, jinja
from shaderlm.web.template import compile_template

from . import node

TESTS = Path(__file__).parent
SCRIPT = TESTS.parent / "src" / "shaderlm" / "web" / "assets" / "template.js"
Rendered = tuple[str, str]  # "text", "refused" or "failed"; the text, or what is wrong

_RUN = """
import { readFileSync } from "node:fs";
import { TemplateError, templateFunction } from "./template.js";

const { programs, cases } = JSON.parse(readFileSync("cases.json", "utf8"));
const made = programs.map(templateFunction);
console.log(JSON.stringify(cases.map(([program, variables]) => {
  try {
    return ["text", made[program](variables)];
  } catch (problem) {
    if (!(problem instanceof TemplateError)) return ["a mistake in template.js", problem.stack];
    return [problem.refuses ? "refused" : "failed", problem.message];
  }
})));
"""


def in_node(folder: Path, cases: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Rendered]:
    """What template.js makes of compiled templates and their variables. One process renders all of them."""
    numbers: dict[str, int] = {}
    rows = [(numbers.setdefault(source, len(numbers)), variables) for source, variables in cases]
    programs = [json.loads(compile_template(source)) for source in numbers]
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "template.js").write_bytes(SCRIPT.read_bytes())
    (folder / "run.js").write_text(_RUN)
    (folder / "cases.json").write_text(json.dumps({"programs": programs, "cases": rows}), encoding="utf-8")
    ended = node.run(folder, "run.js", gpu=False)
    assert ended.status == 0, ended.err
    return [(kind, text) for kind, text in json.loads(ended.out)]


_answer = jinja.make()
_environment = jinja.environment()


def in_python(source: str, variables: Mapping[str, Any]) -> Rendered:
    """The same by Jinja. The variables are a copy: the filter `indent` changes lists."""
    kind, text = _answer({"source": source, "variables": copy.deepcopy(variables), "max_bytes": 4_000_000})
    return kind if kind in ("text", "refused") else "failed", text


def same(found: Rendered, expected: Rendered) -> bool:
    """Failures have words of their own."""
    return found == expected or found[0] == expected[0] == "failed"


# Templates of the tests --------------------------------------------------------------------------------------


@cache
def templates_of_the_tests() -> dict[str, str]:
    """Every text in the files of tests that is a template of messages, and that of a model: source → where it is."""
    found: dict[str, str] = {}
    costly = {"test_limited.py", "test_web_template.py"}
    for path in (each for each in sorted(TESTS.glob("*.py")) if each.name not in costly):
        text = path.read_text(encoding="utf-8")
        for part in ast.walk(ast.parse(text)) if "messages" in text and re.search(r"{%|{{ ", text) else ():
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and _is_template(part.value):
                found.setdefault(part.value, f"{path.name}:{part.lineno}")
    with GgufFile.open(TESTS / "data" / "vocab" / "phi-3.gguf") as file:
        found.setdefault(str(file.metadata["tokenizer.chat_template"]), "phi-3.gguf")
    return found


def _is_template(text: str) -> bool:
    if "messages" not in text or not re.search(r"{%|{{ ", text):
        return False
    try:
        _environment.parse(text)
    except Exception:  # a test of what is broken, or no template
        return False
    return True


# Conversations -----------------------------------------------------------------------------------------------


def _user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _said(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _call(arguments: Any) -> dict[str, Any]:
    return {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": arguments}}


_SYSTEM = {"role": "system", "content": " Be brief. \n"}
_RESULT = {"role": "tool", "content": '{"sky": "<b>grey</b>"}', "tool_call_id": "call12345", "name": "weather"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a question": [_user("Hi")],
    "a system message": [_SYSTEM, _user("Hi")],
    "turns": [_SYSTEM, _user(" one "), _said("two\n"), _user("three 😀 é \u2028 ` ${x} </script>")],
    "empty": [{"role": "system", "content": ""}, _user("")],
    "no question": [_user("one"), _said("two")],
    "not in turns": [_user("one"), _user("two"), _SYSTEM],
    "reasoning": [_user("q"), _said("<think>\nhm\n</think>\n\nyes"), _user("q"), _said("x", reasoning_content="as")],
    "calls": [
        _user("?"),
        _said("", tool_calls=[_call({"city": "Ulm", "n": [1, None, True, 1.5]})]),
        _RESULT,
        _said("!"),
    ],
    "calls without a content": [_user("?"), _said(None, tool_calls=[_call('{"a": 1}'), _call("{}")]), _RESULT, _RESULT],
    "parts": [_user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])],
    "special tokens": [_user("<|im_end|> <|end|> {{ 7 * 7 }} {% x %}")],
}
_TOOL = {"name": "weather", "description": 'The "sky"', "parameters": {"type": "object", "properties": {"city": {}}}}
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"add_generation_prompt": False, "kwargs": {"enable_thinking": False}},
    {"tools": [{"type": "function", "function": _TOOL}], "kwargs": {"style": {"a": ["x", 2.5]}, "slow": 0}},
)


class Recording(ChatTemplate):
    """A chat template that keeps the variables of its last rendering."""

    def _ask(self, variables: Mapping[str, Any] | None) -> str:
        if variables is not None:
            self.variables = variables
        return super()._ask(variables)


def rendered(source: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[Any, Rendered]:
    """The variables of a template, and what Python makes of them, as the engine does. No variables: it does not ask."""
    template = Recording(source, bos="<s>", eos="</s>")
    template.variables = {}
    try:
        result = ("text", template.render(messages, **options))
    except InputError as problem:
        result = ("refused", str(problem).removeprefix("the chat template refuses this conversation: "))
    except ModelError as problem:
        result = ("failed", str(problem))
    return template.variables, result


# Random expressions ------------------------------------------------------------------------------------------

VARIABLES: dict[str, Any] = {
    "text": "Hello wörld 😀 it's",
    "lines": " a b\n c ",
    "quotes": "\"'\\\x07\u2028\x85é\u200b",
    "nothing": None,
    "n": 7,
    "low": -3,
    "half": 2.5,
    "yes": True,
    "numbers": [3, 1, 2],
    "words": ["b", "A", "c", "a"],
    "mixed": [1, "a", None, 2.5, [1], {"x": 1}, True],
    "empty": [],
    "d": {"b": 1, "a": {"k": [1, 2]}, "c": None},
    "messages": [
        {"role": "user", "content": "Hi <b>"},
        {"role": "assistant", "content": None, "n": 2.25},
        {"role": "tool"},
    ],
}
_NAMES = [*VARIABLES, "missing"]
_CONSTANTS = "1|0|-2|2.5|1.0|'a'|'b c'|''|none|true|false|[]|{}|[1, 2]|(1, 'x')|{'k': 1, 'a': [none]}|'😀x'|10"
_FILTERS = (
    "capitalize dictsort first float int items join last length list lower max min reverse safe string tojson trim "
    "unique upper count select default(X) default(X,true) d('y',boolean=X) replace(X,Y) replace('a','Q',1) join(X) "
    "join('-',attribute='role') map('upper') map('string') map('length') map(attribute='role') trim(X) indent(2) "
    "int(X) "
    "map(attribute='k',default=X) selectattr('role') selectattr('role','equalto','user') rejectattr('content','none') "
    "select('string') reject('in',X) select('gt',1) sort(reverse=X) sort(attribute='role') sort(case_sensitive=true) "
    "dictsort(by='value') tojson(indent=2) tojson(ensure_ascii=true) tojson(separators=(',',':'),sort_keys=X) float(X) "
    "indent(X,true) unique(true) min(attribute='n') max(true) map('default','u') map('replace','a','b')"
)
_METHODS = (
    "upper() lower() title() capitalize() strip() lstrip() rstrip('b') split() split(X) split(none,1) rsplit(none,1) "
    "rsplit('l',X) splitlines() startswith(X) endswith('s') replace(X,Y) replace('l','L',X) find(X) count(X) join(X) "
    "removeprefix(X) removesuffix('c') items() keys() values() get(X) get('b',Y) split(sep='o') role content a k upper"
)
_TESTS = (
    "boolean callable defined even false float integer iterable mapping none number odd sequence string true undefined "
    "divisibleby(X) eq(X) ne(X) lt(X) ge(X) in(X)"
)
_SIGNS = "+ - * / // % ~ and or == != < <= > >= in"
_SUBSCRIPTS = "0 -1 1: ::-1 :2 1:-1 ::2 5 0.0 true 'role' n"
_FORMS = (
    "{{{{ {} }}}}",
    "{{% for v in {} %}}{{{{ loop.index }}}}{{{{ v }}}}{{{{ loop.last }}}},{{% else %}}-{{% endfor %}}",
)


def random_templates(count: int, seed: int) -> Iterator[str]:
    """Templates of one random expression each. Many fail."""
    choice = random.Random(seed)
    constants = _CONSTANTS.split("|")

    def one_of(words: str) -> str:
        return choice.choice(words.split())

    def filled(form: str, depth: int) -> str:
        for name in "XY":
            form = form.replace(name, made(depth - 1) if choice.random() < 0.3 else choice.choice(constants))
        return form

    def made(depth: int) -> str:
        if depth <= 0 or choice.random() < 0.15:
            return choice.choice(_NAMES if choice.random() < 0.6 else constants)
        value, other = made(depth - 1), made(depth - 1)
        forms: list[Callable[[], str]] = [
            lambda: f"({value} {one_of(_SIGNS)} {other})",
            lambda: f"({value})|{filled(one_of(_FILTERS), depth)}",
            lambda: f"({value}).{filled(one_of(_METHODS), depth)}",
            lambda: f"(({value}) is {filled(one_of(_TESTS), depth)})",
            lambda: f"({value})[{one_of(_SUBSCRIPTS)}]",
            lambda: f"[{value}, {other}]",
            lambda: f"({value} if {other})",
            lambda: f"'%s|%s'|format({value}, {other})",
        ]
        return choice.choice([*forms, *forms[:3]])()

    while count:
        expression = made(choice.choice((1, 2, 2, 3)))
        if "' % " not in expression:  # is refused, but for %s with as many values
            yield choice.choice(_FORMS).format(expression)
            count -= 1
