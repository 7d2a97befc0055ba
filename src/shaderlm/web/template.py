"""A chat template as data that a browser renders: Jinja's tree as JSON, with its variables in numbered places.

Jinja's own parser makes the tree, and Jinja's own analysis of scopes decides which assignment a name means. So nothing
is parsed in a browser, and an export holds no code: `assets/template.js` makes a function of this, without `eval`.
What that file cannot render is refused here, by name.

An expression is a constant, or a list: ["NAME", …] for a row NAME of `EXPRESSIONS` in `template.js`. A statement is a
list as well, for a row of `STATEMENTS`. A variable is two numbers: how many macros are around the one that it belongs
to, and its place there.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Never

from jinja2 import nodes
from jinja2.compiler import find_undeclared
from jinja2.idtracking import VAR_LOAD_ALIAS, VAR_LOAD_PARAMETER, VAR_LOAD_RESOLVE, Symbols

from ..errors import ModelError
from ..text.jinja import environment, one_line

# Filters and tests with their parameters, beside the value.
FILTERS = {
    "capitalize": "",
    "default": "default_value boolean",
    "dictsort": "case_sensitive by reverse",
    "first": "",
    "float": "default",
    "indent": "width first blank",
    "int": "default",
    "items": "",
    "join": "d attribute",
    "last": "",
    "length": "",
    "list": "",
    "lower": "",
    "max": "case_sensitive attribute",
    "min": "case_sensitive attribute",
    "replace": "old new count",
    "reverse": "",
    "safe": "",
    "sort": "reverse case_sensitive attribute",
    "string": "",
    "tojson": "ensure_ascii indent separators sort_keys",
    "trim": "chars",
    "unique": "case_sensitive attribute",
    "upper": "",
}
TESTS = {
    **dict.fromkeys(["boolean", "callable", "defined", "even", "false", "float", "integer", "iterable"], ""),
    **dict.fromkeys(["mapping", "none", "number", "odd", "sequence", "string", "true", "undefined"], ""),
    **dict.fromkeys(["eq", "ne", "lt", "lteq", "gt", "gteq", "in", "sameas"], "other"),
    "divisibleby": "num",
}
ALIASES = {"count": "length", "d": "default"}
TEST_ALIASES = {"equalto": "eq", "==": "eq", "!=": "ne", "greaterthan": "gt", ">": "gt", "ge": "gteq", ">=": "gteq"}
TEST_ALIASES |= {"lessthan": "lt", "<": "lt", "le": "lteq", "<=": "lteq"}
# Methods of texts and mappings with their parameters. `format` is read here.
METHODS = {
    **dict.fromkeys(["capitalize", "items", "keys", "lower", "title", "upper", "values"], ""),
    **dict.fromkeys(["count", "endswith", "find", "startswith"], "sub"),
    **dict.fromkeys(["strip", "lstrip", "rstrip"], "chars"),
    **dict.fromkeys(["split", "rsplit"], "sep maxsplit"),
    "get": "key default",
    "join": "iterable",
    "removeprefix": "prefix",
    "removesuffix": "suffix",
    "replace": "old new count",
    "splitlines": "keepends",
}
# Methods of Python that are not there. Those that change a value fail when they are called, as in Jinja's sandbox.
_CHANGING = {"append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort"} | {
    "update"
}
_OTHER_METHODS = {name for kind in (str, list, dict, int, float) for name in dir(kind) if not name.startswith("_")}
_OTHER_METHODS -= METHODS.keys() | _CHANGING
_OTHER_GLOBALS = {"cycler", "joiner", "lipsum", "self", "super"}
DATES = set("aAbBdHImMpSyY%")  # what strftime_now writes; `template.js` has the rows
_BINARY = {
    nodes.Add: "add",
    nodes.Sub: "sub",
    nodes.Mul: "mul",
    nodes.Div: "div",
    nodes.FloorDiv: "floordiv",
    nodes.Mod: "mod",
    nodes.And: "and",
    nodes.Or: "or",
}
_UNARY = {nodes.Not: "not", nodes.Neg: "neg", nodes.Pos: "pos"}
_TAGS: dict[type[nodes.Node], str] = {
    nodes.Block: "block",
    nodes.Extends: "extends",
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "from",
    nodes.Scope: "autoescape",
}
_MAX_INTEGER = 2**53 - 1  # a number of JavaScript has these without loss
_ABSENT = ["absent"]  # an argument that is not given


def compile_template(source: object, name: str = "the chat template of this model") -> bytes:
    """A template as JSON. One that is broken, or that `template.js` cannot render, is a ModelError."""
    if not isinstance(source, str):
        raise ModelError(f"{name} must be a text, got {type(source).__name__}")
    try:
        tree = environment().parse(source)
    except Exception as problem:  # beside syntax errors, whatever reading its constants may raise
        raise ModelError(f"{name} is broken: {one_line(problem)}") from None
    try:
        program = _Compiler().template(tree)
        return json.dumps(program, ensure_ascii=False, separators=(",", ":")).encode()
    except RecursionError:
        reason = "it nests expressions too deeply"
    except UnicodeEncodeError:
        reason = "it has half a character (a lone surrogate)"
    except _UnsupportedError as problem:
        reason = str(problem)
    raise ModelError(f"{name} cannot run in a browser: {reason}. --chat-template-file FILE exports another one")


class _UnsupportedError(Exception):
    """A template uses what browsers cannot render."""


def _refuse(node: nodes.Node, what: str) -> Never:
    line = next((each.lineno for each in (node, *node.find_all(nodes.Node)) if each.lineno), 1)
    raise _UnsupportedError(f"line {line} has {what}")


class _Function:
    """The root of a template, a macro or the condition of a loop: what has variables of its own in each call."""

    def __init__(self, level: int) -> None:
        self.level = level  # of its outermost scope
        self.places: dict[str, int] = {}  # Jinja's name of a variable → its place


class _Compiler:
    """Walks a tree with scopes (`Symbols`) that are made as Jinja's own compiler makes them."""

    def __init__(self) -> None:
        self._functions: list[_Function] = []
        self._loops = 0  # around a statement, within its function

    def template(self, tree: nodes.Template) -> list[Any]:
        """The whole program."""
        scope = Symbols()
        scope.analyze_node(tree)
        self._functions.append(_Function(scope.level))
        return [*self._enter(scope), *self._body(tree.body, scope)]

    # Variables ------------------------------------------------------------------------------------------------

    def _place(self, variable: str) -> list[int]:
        """Where a variable is. Jinja's name for it, l_LEVEL_NAME, has the level of its scope."""
        level = int(variable.split("_")[1])
        depth = max(i for i, function in enumerate(self._functions) if function.level <= level)
        places = self._functions[depth].places
        return [depth, places.setdefault(variable, len(places))]

    def _slot(self, variable: str) -> int:
        """The place of a variable of the function that is being compiled."""
        depth, slot = self._place(variable)
        assert depth == len(self._functions) - 1
        return slot

    def _enter(self, scope: Symbols) -> list[Any]:
        """What gives variables of a scope the values that they begin with: none, the caller's, another scope's."""
        entries: list[Any] = []
        for variable, (action, value) in scope.loads.items():
            if action == VAR_LOAD_RESOLVE:
                entries.append([self._slot(variable), value])
            elif action == VAR_LOAD_ALIAS:
                entries.append([self._slot(variable), *self._place(value)])
            elif action != VAR_LOAD_PARAMETER:
                entries.append([self._slot(variable)])
        return [["enter", *entries]] if entries else []

    def _leave(self, scope: Symbols) -> list[Any]:
        """What takes the variables of a scope away."""
        slots = [self._slot(variable) for variable in scope.loads]
        return [["leave", *slots]] if slots else []

    def _set(self, node: nodes.Node, value: Any, scope: Symbols) -> list[Any]:
        """An assignment. What is no namespace gets no attribute."""
        names = dict.fromkeys(
            each.name for each in ([node] if isinstance(node, nodes.NSRef) else node.find_all(nodes.NSRef))
        )
        checks = [["namespace", *self._place(scope.ref(name))] for name in names]
        return [*checks, ["set", self._target(node, scope), value]]

    def _target(self, node: nodes.Node, scope: Symbols) -> Any:
        """What an assignment changes: a slot, an attribute of a namespace, or several of them."""
        match node:
            case nodes.Name():
                return self._slot(scope.ref(node.name))
            case nodes.NSRef():
                return ["attribute", *self._place(scope.ref(node.name)), node.attr]
            case nodes.Tuple():
                return ["unpack", *(self._target(each, scope) for each in node.items)]
        _refuse(node, f"an assignment to {type(node).__name__}")

    # Statements -----------------------------------------------------------------------------------------------

    def _body(self, body: Iterable[nodes.Node], scope: Symbols) -> list[Any]:
        return [statement for node in body for statement in self._statements(node, scope)]

    def _statements(self, node: nodes.Node, scope: Symbols) -> list[Any]:
        match node:
            case nodes.Output():
                return [["output", *self._each(node.nodes, scope)]]
            case nodes.If():
                return [self._if(node, scope)]
            case nodes.For():
                return [self._for(node, scope)]
            case nodes.Assign():
                return self._set(node.target, self._expression(node.node, scope), scope)
            case nodes.AssignBlock() | nodes.FilterBlock():
                inner = _inner(scope, node)
                text = ["captured"] if node.filter is None else self._filter(node.filter, inner)
                last = [["output", text]]
                if isinstance(node, nodes.AssignBlock):
                    last = self._set(node.target, text, scope)
                return [*self._enter(inner), ["capture", self._body(node.body, inner)], *last, *self._leave(inner)]
            case nodes.With():
                inner = _inner(scope, node)
                pairs = zip(node.targets, node.values, strict=True)
                sets = [
                    each for name, value in pairs for each in self._set(name, self._expression(value, scope), inner)
                ]
                return [*self._enter(inner), *sets, *self._body(node.body, inner), *self._leave(inner)]
            case nodes.Macro():
                return [["macro", self._slot(scope.ref(node.name)), self._macro(node, node.name, scope)]]
            case nodes.CallBlock():
                return [["call", self._macro(node, "caller", scope), self._call(node.call, scope)]]
            case nodes.Break() | nodes.Continue():
                word = "break" if isinstance(node, nodes.Break) else "continue"
                return [[word]] if self._loops else _refuse(node, f"{word} outside of a loop")
        tag = _TAGS.get(type(node))
        _refuse(node, f"the tag {{% {tag} %}}" if tag else f"a statement of the kind {type(node).__name__}")

    def _if(self, node: nodes.If, scope: Symbols) -> list[Any]:
        branches = [[self._expression(each.test, scope), self._body(each.body, scope)] for each in (node, *node.elif_)]
        return ["if", branches, self._body(node.else_, scope)]

    def _for(self, node: nodes.For, scope: Symbols) -> list[Any]:
        if node.recursive:
            _refuse(node, "a recursive loop")
        if any(name.ctx == "store" and name.name == "loop" for name in node.find_all(nodes.Name)):
            _refuse(node, "an assignment to loop")
        inner, after = Symbols(scope), Symbols(scope)
        is_extended = "loop" in find_undeclared(node.iter_child_nodes(only=("body",)), ("loop",))
        loop = inner.declare_parameter("loop") if is_extended else None
        inner.analyze_node(node, for_branch="body")
        parts: dict[str, Any] = {
            "items": self._expression(node.iter, scope),
            "target": self._target(node.target, inner),
        }
        self._loops += 1
        parts |= {"body": [*self._enter(inner), *self._body(node.body, inner)], "leave": self._leave(inner)}
        self._loops -= 1
        if loop:
            parts["loop"] = self._slot(loop)
        if node.test is not None:
            parts["condition"] = self._condition(node, scope)
        after.analyze_node(node, for_branch="else")
        parts["otherwise"] = [*self._enter(after), *self._body(node.else_, after), *self._leave(after)]
        return ["for", parts]

    def _condition(self, node: nodes.For, scope: Symbols) -> dict[str, Any]:
        """Which items a loop takes. It is asked while the loop runs, with a variable of its own."""
        assert node.test is not None
        inner = Symbols(scope)
        inner.analyze_node(node, for_branch="test")
        self._functions.append(_Function(inner.level))
        parts = {
            "target": self._target(node.target, inner),
            "enter": self._enter(inner),
            "test": self._expression(node.test, inner),
        }
        self._functions.pop()
        return parts

    def _macro(self, node: nodes.Macro | nodes.CallBlock, name: str, scope: Symbols) -> dict[str, Any]:
        inner = _inner(scope, node)
        self._functions.append(_Function(inner.level))
        names = [each.name for each in node.args]
        if "caller" in names:
            _refuse(node, "a parameter with the name caller")
        special = find_undeclared(node.body, ("caller", "kwargs", "varargs")) - set(names)
        places = {each: self._slot(inner.declare_parameter(each)) for each in sorted(special)}
        inner.analyze_node(node)
        slots = [self._slot(inner.ref(each)) for each in names]
        enter = self._enter(inner)
        values = self._each(node.defaults, inner)
        defaults = [
            ["default", slot, each] for slot, each in zip(slots[len(slots) - len(values) :], values, strict=True)
        ]
        loops, self._loops = self._loops, 0
        body = [*enter, *defaults, *self._body(node.body, inner)]
        self._loops = loops
        self._functions.pop()
        return {"name": name, "parameters": list(zip(slots, names, strict=True)), **places, "body": body}

    # Expressions ----------------------------------------------------------------------------------------------

    def _expression(self, node: nodes.Node, scope: Symbols) -> Any:
        match node:
            case nodes.Const():
                return _constant(node, node.value)
            case nodes.TemplateData():
                return node.data
            case nodes.Name():
                load = scope.find_load(scope.ref(node.name))
                if node.name in _OTHER_GLOBALS and load == (VAR_LOAD_RESOLVE, node.name):
                    _refuse(node, f"{node.name}, which is not there")
                return ["variable", *self._place(scope.ref(node.name)), node.name]
            case nodes.Tuple() | nodes.List():
                kind = "tuple" if isinstance(node, nodes.Tuple) else "list"
                return [kind, *self._each(node.items, scope)]
            case nodes.Dict():
                return ["dict", *(["list", *self._each([pair.key, pair.value], scope)] for pair in node.items)]
            case nodes.CondExpr():
                parts = [node.test, node.expr1, *([] if node.expr2 is None else [node.expr2])]
                return ["choose", *self._each(parts, scope)]
            case nodes.Concat():
                return ["concat", *self._each(node.nodes, scope)]
            case nodes.Compare():
                rest = [[each.op, self._expression(each.expr, scope)] for each in node.ops]
                return ["compare", self._expression(node.expr, scope), *rest]
            case nodes.Getattr():
                return ["attribute", self._expression(node.node, scope), node.attr]
            case nodes.Getitem(arg=nodes.Slice() as part):
                ends = [each and self._expression(each, scope) for each in (part.start, part.stop, part.step)]
                return ["slice", self._expression(node.node, scope), *ends]
            case nodes.Getitem():
                return ["item", *self._each([node.node, node.arg], scope)]
            case nodes.Filter():
                return self._filter(node, scope)
            case nodes.Test():
                test, args = self._bound_test(node, node.name, node.args, node.kwargs, scope)
                _no_stars(node)
                return ["test", test, self._expression(node.node, scope), *args]
            case nodes.Call():
                return self._call(node, scope)
            case nodes.BinExpr() if type(node) in _BINARY:
                if isinstance(node, nodes.Mod) and _is_text(node.left):
                    values = node.right.items if isinstance(node.right, nodes.Tuple) else None
                    return self._percent(node, node.left, values, scope)
                return [_BINARY[type(node)], *self._each([node.left, node.right], scope)]
            case nodes.UnaryExpr() if type(node) in _UNARY:
                return [_UNARY[type(node)], self._expression(node.node, scope)]
        _refuse(node, f"an expression of the kind {type(node).__name__}")

    def _each(self, parts: Iterable[nodes.Node], scope: Symbols) -> list[Any]:
        return [self._expression(each, scope) for each in parts]

    def _bound(
        self,
        node: nodes.Node,
        what: str,
        names: str,
        args: Sequence[nodes.Expr],
        kwargs: Sequence[nodes.Pair | nodes.Keyword],
        scope: Symbols,
    ) -> list[Any]:
        """Arguments in the order of the parameters."""
        parameters = names.split()
        unknown = [each.key for each in kwargs if each.key not in parameters[len(args) :]]
        if len(args) > len(parameters) or unknown:
            _refuse(node, f"{what} with an argument {unknown[0] if unknown else len(args)}, which is not known")
        by_name = {each.key: self._expression(each.value, scope) for each in kwargs}
        bound = [*self._each(args, scope), *(by_name.get(each, _ABSENT) for each in parameters[len(args) :])]
        while bound and bound[-1] is _ABSENT:
            bound.pop()
        return bound

    def _filter(self, node: nodes.Filter, scope: Symbols) -> list[Any]:
        _no_stars(node)
        value = ["captured"] if node.node is None else self._expression(node.node, scope)
        name, args, kwargs = node.name, node.args, node.kwargs
        if name == "map" and args and not kwargs:
            inner, bound = self._bound_filter(node, _word(node, args[0], "map"), args[1:], [], scope)
            return ["map", inner, value, *bound]
        if name == "map":
            bound = self._bound(node, "the filter map", "attribute default", args, kwargs, scope)
            return ["map_attribute", value, *bound]
        if name in ("select", "reject", "selectattr", "rejectattr"):
            rest = list(args)
            if name.endswith("attr") and not rest:
                _refuse(node, f"the filter {name} without an argument")
            key = self._expression(rest.pop(0), scope) if name.endswith("attr") else _ABSENT
            test, bound = None, []
            if rest:
                test, bound = self._bound_test(node, _word(node, rest[0], name), rest[1:], kwargs, scope)
            return ["select", name.startswith("select"), test, value, key, *bound]
        if name == "format":
            return self._percent(node, node.node, None if kwargs else args, scope)
        name, bound = self._bound_filter(node, name, args, kwargs, scope)
        return ["filter", name, value, *bound]

    def _bound_filter(
        self,
        node: nodes.Filter,
        name: str,
        args: Sequence[nodes.Expr],
        kwargs: Sequence[nodes.Pair | nodes.Keyword],
        scope: Symbols,
    ) -> tuple[str, list[Any]]:
        name = ALIASES.get(name, name)
        if name not in FILTERS:
            _refuse(node, f"the filter {name}")
        return name, self._bound(node, f"the filter {name}", FILTERS[name], args, kwargs, scope)

    def _percent(
        self, node: nodes.Node, text: nodes.Node | None, args: Sequence[nodes.Expr] | None, scope: Symbols
    ) -> list[Any]:
        """`"%s, %s" % (a, b)` as a concatenation."""
        parts = re.split("%(.)", text.value) if isinstance(text, nodes.Const) and _is_text(text) else []
        values = [] if args is None else self._each(args, scope)
        if args is None or not parts or {*parts[1::2]} - {"s", "%"} or parts[1::2].count("s") != len(values):
            _refuse(node, "a text with % that is no constant with %s and as many values")
        rest = iter(values)
        parts[1::2] = ["%" if each == "%" else next(rest) for each in parts[1::2]]
        return ["concat", *parts]

    def _bound_test(
        self,
        node: nodes.Node,
        name: str,
        args: Sequence[nodes.Expr],
        kwargs: Sequence[nodes.Pair | nodes.Keyword],
        scope: Symbols,
    ) -> tuple[str, list[Any]]:
        name = TEST_ALIASES.get(name, name)
        if name not in TESTS:
            _refuse(node, f"the test {name}")
        bound = self._bound(node, f"the test {name}", TESTS[name], args, kwargs, scope)
        if len(bound) < len(TESTS[name].split()):
            _refuse(node, f"the test {name} without its argument")
        if name == "sameas" and bound not in ([None], [True], [False]):
            _refuse(node, "the test sameas with another argument than none, true or false")
        return name, bound

    def _call(self, node: nodes.Call, scope: Symbols) -> list[Any]:
        callee = node.node
        _no_stars(node)
        if isinstance(callee, nodes.Getattr):
            name = callee.attr
            if name == "format":
                return self._str_format(node, callee, scope)
            if name in METHODS:
                args = self._bound(node, f"the method {name}", METHODS[name], node.args, node.kwargs, scope)
                return ["call", ["attribute", self._expression(callee.node, scope), name], args]
            if name in _OTHER_METHODS:
                _refuse(node, f"the method {name}")
        if isinstance(callee, nodes.Name) and callee.name == "strftime_now":
            _check_date(node)
        args = self._each(node.args, scope)
        named = [[each.key, self._expression(each.value, scope)] for each in node.kwargs]
        return ["call", self._expression(callee, scope), args, *([named] if named else [])]

    def _str_format(self, node: nodes.Call, callee: nodes.Getattr, scope: Symbols) -> list[Any]:
        """`"{} {name}".format(…)` as a concatenation: of a constant with fields that are names or numbers alone."""
        if not (isinstance(callee.node, nodes.Const) and isinstance(callee.node.value, str)):
            _refuse(node, "the method format of what is no constant")
        args = self._each(node.args, scope)
        named: Mapping[str, Any] = {each.key: self._expression(each.value, scope) for each in node.kwargs}
        parts, count = list[Any](), 0
        try:
            fields = list(string.Formatter().parse(callee.node.value))
        except ValueError as problem:
            _refuse(node, f"a broken text for format: {problem}")
        for before, field, form, conversion in fields:
            parts.append(before)
            if field is None:
                continue
            if form or conversion or not (field.isidentifier() or field.isdecimal() or not field):
                _refuse(node, f"a field {{{field}}} with more than a name or a number")
            key = field or str(count)
            count += not field
            if key.isdecimal() and int(key) < len(args):
                parts.append(args[int(key)])
            elif key in named:
                parts.append(named[key])
            else:
                _refuse(node, f"a field {{{field}}} without an argument")
        return ["concat", *parts]


def _inner(scope: Symbols, node: nodes.Node) -> Symbols:
    """The scope of a node, within another one."""
    inner = Symbols(scope)
    inner.analyze_node(node)
    return inner


def _constant(node: nodes.Node, value: object) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            _refuse(node, "a number that is too large")
        return ["float", value]
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        _refuse(node, "a whole number of more than 53 bits")
    return value


def _no_stars(node: nodes.Call | nodes.Filter | nodes.Test) -> None:
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        _refuse(node, "a call with * or **")


def _word(node: nodes.Node, argument: nodes.Node, name: str) -> str:
    """The name of a filter or a test, which must be a constant."""
    if not (isinstance(argument, nodes.Const) and isinstance(argument.value, str)):
        _refuse(node, f"the filter {name} with a name that is no constant")
    return argument.value


def _is_text(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


def _check_date(node: nodes.Call) -> None:
    pattern = node.args[0] if len(node.args) == 1 and not node.kwargs else None
    if not (isinstance(pattern, nodes.Const) and isinstance(pattern.value, str)):
        _refuse(node, "strftime_now with something else than one constant")
    directives = iter(pattern.value)
    for character in directives:
        if character != "%":
            continue
        directive = next(directives, "")
        letter = next(directives, "") if directive == "-" else directive
        if letter not in DATES or not letter:
            _refuse(node, f"strftime_now with %{directive}{letter if directive == '-' else ''}")
