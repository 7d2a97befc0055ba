"""Turns a WGSL file into the source of one specialised shader. Knows WGSL text, no GPU and no ops.

A kernel file is plain WGSL. Specialising rebinds its top-level `const` and `alias` lines; including a shared
file is concatenation, which works because WGSL allows use before declaration. An included file may declare bindings of
its own: they are numbered anew, inputs first, outputs next, `params` last. Bindings, the `Params` layout and the
workgroup memory are read from the text, so nothing is written down twice.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import KernelError
from ..gpu.caps import Implementation

Constant = int | float | bool | str
Access = Literal["read-only-storage", "storage", "uniform"]

_ROOT = Path(__file__).parent
_BINDING = re.compile(r"@group\(0\)\s*@binding\((\d+)\)\s*var<\s*([a-z_, ]+)>\s*(\w+)\s*:")
_DECLARATION = re.compile(r"^(?:const|alias) (\w+)(?:\s*:\s*\w+)?\s*=\s*(.+?);", re.M)
_PARAMS = re.compile(r"struct Params\s*\{([^}]*)\}")
_FIELD = re.compile(r"(\w+)\s*:\s*(u32|i32|f32)\s*,?")
_WORKGROUP = re.compile(r"var<workgroup>\s*\w+\s*:\s*(.+?);")
_ARRAY = re.compile(r"array<(.+),\s*([^,]+)>")
_SIZES = {"f16": 2, "f32": 4, "u32": 4, "i32": 4, "bool": 4, "atomic<u32>": 4}
_ACCESS: dict[str, Access] = {
    "storage,read": "read-only-storage",
    "storage,read_write": "storage",
    "uniform": "uniform",
}


@dataclass(frozen=True)
class Kernel:
    """A WGSL file, the shared files it is concatenated with, and the device features it needs.

    With `unroll`, the loops that it marks are written out.
    """

    path: str
    include: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    unroll: bool = False

    @property
    def name(self) -> str:
        """Label in errors, profiles and tests: the file's stem."""
        return self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Shader:
    """A composed kernel: its source and what its text declares."""

    text: str  # the source, with marked loops as they are in the file
    unroll: bool
    bindings: tuple[tuple[str, Access], ...]
    params: tuple[tuple[str, str], ...]
    workgroup_size: int
    workgroup_memory: int

    @cached_property
    def source(self) -> str:
        """What is compiled. Loops are written out here: routes are chosen by what shaders declare, most are not run."""
        return unrolled(self.text, _values(self.text)) if self.unroll else self.text

    def pack_params(self, values: Mapping[str, int | float]) -> NDArray[np.uint8]:
        """Bytes of the `Params` struct. Every field must be given, and no other."""
        names = [name for name, _ in self.params]
        if sorted(names) != sorted(values):
            raise KernelError(f"Params has the fields {names}; given: {sorted(values)}")
        dtypes = {"u32": np.uint32, "i32": np.int32, "f32": np.float32}
        words = [np.asarray(values[name], dtypes[kind]).reshape(1).view(np.uint8) for name, kind in self.params]
        return np.concatenate(words)


@cache
def read(path: str) -> str:
    """Text of a WGSL file by its path below this package, without the ending."""
    file = _ROOT / f"{path}.wgsl"
    if not file.is_file():
        raise KernelError(f"no WGSL file {path}.wgsl in {_ROOT.name}/")
    return file.read_text(encoding="utf-8")


def _literal(value: Constant, old: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value}u" if old.rstrip().endswith("u") else str(value)
    return str(value)


@lru_cache(maxsize=512)
def _places(source: str) -> dict[str, tuple[int, int]]:
    """Where the values of top-level `const` and `alias` lines begin and end, by name: one search for all of them."""
    return {match[1]: match.span(2) for match in _DECLARATION.finditer(source)}


def _values(source: str) -> dict[str, str]:
    """The values of top-level `const` and `alias` lines, by name."""
    return dict(_DECLARATION.findall(source))


def rebind(source: str, constants: Mapping[str, Constant], kernel: str = "kernel") -> str:
    """Replace the values of top-level `const` and `alias` lines. An unknown name raises."""
    places = _places(source)
    for name in constants:
        if name not in places:
            raise KernelError(f"{kernel} has no const or alias {name!r}; it has {sorted(places)}")
    pieces, at = list[str](), 0
    for (first, end), value in sorted((places[name], value) for name, value in constants.items()):
        pieces += (source[at:first], _literal(value, source[first:end]))
        at = end
    return "".join((*pieces, source[at:]))


def _evaluate(expression: str, names: Mapping[str, str]) -> int:
    """A WGSL constant expression of u32 literals, names, max and + - * / ( )."""
    text = expression
    for _ in range(8):  # names may stand for names
        text = re.sub(r"\b(\d+)u\b", r"\1", text)
        text = re.sub(r"(?!max\b)\b[A-Za-z_]\w*", lambda match: f"({names.get(match.group(), '?')})", text)
        text = re.sub(r"\b(\d+)u\b", r"\1", text)
        if re.fullmatch(r"(?:max\(|[\d\s,+*/()-])+", text):
            return int(eval(text.replace("/", "//")))  # digits, max and + - * / ( ) only, by the line above
    raise KernelError(f"cannot evaluate the constant expression {expression!r}")


def _size_of(wgsl_type: str, values: Mapping[str, str]) -> int:
    wgsl_type = values.get(wgsl_type.strip(), wgsl_type.strip())
    vector = re.fullmatch(r"vec([234])<(\w+)>", wgsl_type)
    if vector:
        count = {2: 2, 3: 4, 4: 4}[int(vector.group(1))]
        return count * _SIZES[values.get(vector.group(2), vector.group(2))]
    return _SIZES[wgsl_type]


def _memory_of(declared: str, values: Mapping[str, str]) -> int:
    """Bytes of a variable in workgroup memory, an array, a vector, a number or an atomic: in whole 16 bytes, as counted
    by WebGPU.
    """
    array = _ARRAY.fullmatch(declared)
    count = _evaluate(array.group(2), values) if array else 1
    return -(-_size_of(array.group(1) if array else declared, values) * count // 16) * 16


def workgroup_memory(source: str) -> int:
    """Bytes of workgroup memory that a composed source declares."""
    return _memory(source, _values(source))


def _memory(source: str, values: Mapping[str, str]) -> int:
    return sum(_memory_of(declared, values) for declared in _WORKGROUP.findall(source))


def compose(
    kernel: Kernel,
    constants: Mapping[str, Constant] | None = None,
    target: Implementation = "wgpu",
    params: Mapping[str, int | float] | None = None,
    unbound: Iterable[str] = (),
) -> Shader:
    """The specialised source of a kernel for a WebGPU implementation, with its declared caps.

    Given `params`, their values are written into the source, and there is no buffer of them. Arrays that are `unbound`,
    which with these values nobody reads, have no binding either: each costs the host time in every step.
    """
    values = tuple(sorted(params.items())) if params is not None else None
    return _compose(kernel, tuple(sorted((constants or {}).items())), target, values, tuple(sorted(unbound)))


_PARAMS_BINDING = re.compile(r"^@group\(0\)\s*@binding\(\d+\)\s*var<uniform>\s*params\s*:\s*Params;.*\n", re.M)
_PARAM_READ = re.compile(r"\bparams\.(\w+)")
_WRITTEN = {"u32": "{}u", "i32": "i32({})", "f32": "{!r}f"}


def _declared(name: str) -> re.Pattern[str]:
    """The declaration of an array that is bound."""
    return re.compile(rf"^@group\(0\)\s*@binding\(\d+\)\s*var<[a-z_, ]+>\s*{name}\s*:\s*array<(.+)>;", re.M)


def _without(body: str, unbound: Iterable[str], kernel: str) -> str:
    """The source with the bindings of some arrays taken out."""
    for name in unbound:
        body, count = _declared(name).subn(rf"var<private> {name}: array<\1, 1>;", body)
        if not count:
            raise KernelError(f"{kernel} has no array {name!r} to leave out")
    return body


def bound_once(shader: Shader, operands: Sequence[Hashable]) -> Shader:
    """The shader with one binding for inputs that are the same operand, given the operands of its bindings.

    Queries, keys and values may be columns of one product. A binding costs a GPU time in every dispatch: 0.04 µs on an
    H200.
    """
    firsts = tuple(map(operands.index, operands))
    return shader if firsts == tuple(range(len(operands))) else _bound_once(shader, firsts)


@lru_cache(maxsize=256)
def _bound_once(shader: Shader, firsts: tuple[int, ...]) -> Shader:
    """The same, given which binding is the first one of the same operand, for each. Layers have this in common."""
    text, bindings = shader.text, []
    names: dict[tuple[int, str], str] = {}  # of bindings, by buffer and elements
    for (name, access), buffer in zip(shader.bindings, firsts, strict=True):
        declared = _declared(name).search(text) if access == "read-only-storage" else None
        local = re.search(rf"\b(?:let|var)\s+{name}\b|[(,]\s*{name}\s*:", text)  # the name means something else there
        first = names.setdefault((buffer, declared.group(1) if declared and not local else name), name)
        if first == name:
            bindings.append((name, access))
            continue
        text = _declared(name).sub("", text)
        text = re.sub(rf"(?<![\w.]){name}(?=\[)|(?<=&){name}\b", first, text)
    return replace(shader, text=_numbered(text), bindings=tuple(bindings))


_RANK = {"storage,read": 0, "storage,read_write": 1, "uniform": 2}


def _numbered(body: str) -> str:
    """The source with its bindings numbered 0, 1, …: inputs first, outputs next, `params` last."""
    spaces = [space.replace(" ", "") for _, space, _ in _BINDING.findall(body)]
    order = sorted(range(len(spaces)), key=lambda i: _RANK[spaces[i]])
    numbers = iter([order.index(i) for i in range(len(spaces))])
    return re.sub(r"@binding\(\d+\)", lambda _: f"@binding({next(numbers)})", body)


def _with_values(body: str, fields: tuple[tuple[str, str], ...], values: Mapping[str, int | float], name: str) -> str:
    """The source with numbers where it reads its parameters, which a driver's compiler can reckon with."""
    if sorted(values) != sorted(field for field, _ in fields):
        raise KernelError(f"{name}: Params has the fields {sorted(dict(fields))}; given: {sorted(values)}")
    body = _PARAMS_BINDING.sub("", _PARAMS.sub("", body, count=1), count=1)
    written = {}
    for field, kind in fields:
        value = float(np.float32(values[field])) if kind == "f32" else int(values[field])
        if not math.isfinite(value):
            raise KernelError(f"{name}: {field} is {value}, which WGSL has no word for")
        written[field] = _WRITTEN[kind].format(value)
    # One search for all fields: one for each took most of the time of composing a shader.
    return _PARAM_READ.sub(lambda match: written.get(match[1], match[0]), body)


def _enables(needs: frozenset[str], target: Implementation) -> list[str]:
    """The first lines of a shader. naga refuses `enable subgroups;`, Dawn and browsers require it: no file has it."""
    names = {"f16"} & needs
    if target == "dawn":
        names |= {"subgroups"} & needs
        if "subgroup_matrix" in needs:
            names |= {"f16", "subgroups", "chromium_experimental_subgroup_matrix"}
    lines = [f"enable {name};" for name in sorted(names)]
    if "chromium_experimental_subgroup_matrix" in names:
        # Its matrices must be used by all lanes alike. Tint cannot see that of loops over values from workgroup memory.
        lines.append("diagnostic(off, chromium.subgroup_matrix_uniformity);")
    return lines


_UNROLLED = re.compile(
    r"^(?P<indent> *)for \(var (?P<name>\w+) = 0u; (?P=name) < (?P<count>[^;]+); (?P=name) = (?P=name) \+ 1u\) "
    r"\{  // unrolled\n(?P<body>.*?)^(?P=indent)\}\n",
    re.M | re.S,
)
_REGISTERS = re.compile(r"^( *)var (\w+): (array<.+>);  // registers\n", re.M)
_ELEMENT = re.compile(r"\b[A-Za-z_]\w*(?:\[\d+u\])+")


def unrolled(body: str, consts: Mapping[str, str]) -> str:
    """The source with loops written out that are marked `// unrolled`, and arrays marked `// registers` as variables.

    Drivers keep an array in registers only if they unroll every loop over it, and matrices that are not there cost five
    times the time. Such a loop counts from 0u to a constant, and such an array is indexed by its counters alone.
    """

    def written_out(loop: re.Match[str]) -> str:
        inner = _UNROLLED.sub(written_out, loop["body"])  # once, before it is repeated
        pieces, indent = re.split(rf"\b{loop['name']}\b", inner), loop["indent"]
        counts = range(_evaluate(loop["count"], consts))
        return "".join(f"{indent}{{\n{f'{i}u'.join(pieces)}{indent}}}\n" for i in counts)

    body = _UNROLLED.sub(written_out, body)
    names: dict[str, str] = {}  # of variables, by the elements that they stand for
    for array in _REGISTERS.finditer(body):
        indent, name, kind = array.groups()
        sizes: list[int] = []
        while inner := _ARRAY.fullmatch(kind):
            kind = inner.group(1)
            sizes.append(_evaluate(inner.group(2), consts))
        indices = list(itertools.product(*(range(size) for size in sizes)))
        mine = {name + "".join(f"[{i}u]" for i in index): name + "".join(f"_{i}" for i in index) for index in indices}
        body = body.replace(array.group(), "".join(f"{indent}var {each}: {kind};\n" for each in mine.values()), 1)
        names |= mine
    # One search for all elements: one for each took a third of a second for a large tile.
    return _ELEMENT.sub(lambda match: names.get(match[0], match[0]), body) if names else body


@cache
def declared_buffers(kernel: Kernel) -> tuple[str, ...]:
    """The buffers that a kernel declares, parameters left out: no constant and no implementation changes them."""
    bindings = (_BINDING.findall(read(path)) for path in (kernel.path, *kernel.include))
    return tuple(name for each in bindings for _, _, name in each if name != "params")


@lru_cache(maxsize=512)
def _joined(
    kernel: Kernel, params: tuple[tuple[str, int | float], ...] | None, unbound: tuple[str, ...]
) -> tuple[str, tuple[tuple[str, str], ...], tuple[tuple[str, Access], ...]]:
    """The files of a kernel as one source, its parameters and its bindings, which no constant changes."""
    body = "\n".join(read(path).rstrip("\n") + "\n" for path in (kernel.path, *kernel.include))
    struct = _PARAMS.search(body)
    fields = tuple(_FIELD.findall(re.sub(r"//[^\n]*", "", struct.group(1)))) if struct else ()
    if params is not None:
        body, fields = _with_values(body, fields, dict(params), kernel.name), ()
    body = _numbered(_without(body, unbound, kernel.name))
    bindings = sorted((int(i), space.replace(" ", ""), name) for i, space, name in _BINDING.findall(body))
    if [i for i, _, _ in bindings] != list(range(len(bindings))):
        raise KernelError(f"{kernel.name}: bindings must be numbered 0, 1, …; found {[i for i, _, _ in bindings]}")
    return body, fields, tuple((name, _ACCESS[space]) for _, space, name in bindings)


@lru_cache(maxsize=4096)
def _compose(
    kernel: Kernel,
    constants: tuple[tuple[str, Constant], ...],
    target: Implementation,
    params: tuple[tuple[str, int | float], ...] | None,
    unbound: tuple[str, ...],
) -> Shader:
    body, fields, bindings = _joined(kernel, params, unbound)
    body = rebind(body, dict(constants), kernel.name)
    values = _values(body)
    return Shader(
        text="\n".join([*_enables(kernel.needs, target), body]),
        unroll=kernel.unroll,
        bindings=bindings,
        params=fields,
        workgroup_size=_evaluate("WG", values),
        workgroup_memory=_memory(body, values),
    )
