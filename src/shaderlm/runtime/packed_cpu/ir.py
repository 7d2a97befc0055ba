"""Functions in LLVM IR, written as text: values with operators, variables, loops and branches.

A value is a scalar or a vector; a Python number beside it becomes a constant of its type. Nothing of LLVM is imported.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

F32, F16, I8, I16, I32, I64, PTR = "float", "half", "i8", "i16", "i32", "i64", "ptr"
SLOT = 8  # bytes of an argument of an op


def vector(lanes: int, element: str) -> str:
    """The type of so many lanes. One lane is a scalar."""
    return element if lanes == 1 else f"<{lanes} x {element}>"


def lanes_of(kind: str) -> int:
    """How many lanes a type has."""
    return int(kind[1:].split()[0]) if kind[0] == "<" else 1


def element_of(kind: str) -> str:
    """The type of a lane."""
    return kind[1:-1].split()[2] if kind[0] == "<" else kind


def _literal(kind: str, number: float) -> str:
    element = element_of(kind)
    if element in (F32, F16):
        rounded = struct.unpack("<f", struct.pack("<f", number))[0]
        text = f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"
    else:
        text = str(int(number))
    return text if kind[0] != "<" else f"<{', '.join([f'{element} {text}'] * lanes_of(kind))}>"


@dataclass(frozen=True)
class Value:
    """Something that was computed, by its name in the text."""

    f: Function
    kind: str
    name: str

    @property
    def lanes(self) -> int:
        """1 for a scalar."""
        return lanes_of(self.kind)

    def _two(self, op: str, other: Operand, floats: str = "") -> Value:
        if floats and element_of(self.kind) in (F32, F16):
            op = floats
        return self.f.emit(self.kind, f"{op} {self.kind} {self.name}, {self.f.value(other, self.kind).name}")

    def __add__(self, other: Operand) -> Value:
        return self._two("add", other, "fadd")

    def __sub__(self, other: Operand) -> Value:
        return self._two("sub", other, "fsub")

    def __mul__(self, other: Operand) -> Value:
        return self._two("mul", other, "fmul")

    def __truediv__(self, other: Operand) -> Value:
        return self._two("fdiv", other)

    def __floordiv__(self, other: Operand) -> Value:
        return self._two("udiv", other)

    def __mod__(self, other: Operand) -> Value:
        return self._two("urem", other)

    def __and__(self, other: Operand) -> Value:
        return self._two("and", other)

    def __lshift__(self, other: Operand) -> Value:
        return self._two("shl", other)

    def __rshift__(self, other: Operand) -> Value:
        return self._two("lshr", other)

    def signed_shift(self, other: Operand) -> Value:
        """To the right, with copies of the sign."""
        return self._two("ashr", other)

    def compare(self, how: str, other: Operand) -> Value:
        """An i1: how is a condition of icmp or fcmp, such as slt or olt."""
        kind = "fcmp" if element_of(self.kind) == F32 else "icmp"
        text = f"{kind} {how} {self.kind} {self.name}, {self.f.value(other, self.kind).name}"
        return self.f.emit(vector(self.lanes, "i1"), text)

    def convert(self, how: str, element: str) -> Value:
        """By an instruction: sext, zext, trunc, sitofp, fpext, fptrunc, bitcast to lanes of another type."""
        kind = vector(self.lanes, element)
        return self if kind == self.kind else self.f.emit(kind, f"{how} {self.kind} {self.name} to {kind}")

    def bitcast(self, kind: str) -> Value:
        """The same bits as another type."""
        return self.f.emit(kind, f"bitcast {self.kind} {self.name} to {kind}")

    def shuffle(self, mask: Sequence[int], other: Value | None = None) -> Value:
        """Lanes of this value, and then of the other one."""
        kind = vector(len(mask), element_of(self.kind))
        if len(mask) == 1:
            return self.f.emit(kind, f"extractelement {self.kind} {self.name}, i32 {mask[0]}")
        if self.lanes == 1:
            return self.f.splat(self, len(mask))
        second = other.name if other else "poison"
        which = ", ".join(f"i32 {i}" for i in mask)
        text = f"shufflevector {self.kind} {self.name}, {self.kind} {second}, <{len(mask)} x i32> <{which}>"
        return self.f.emit(kind, text)

    def load(self, kind: str, index: Operand = 0, align: int = 0) -> Value:
        """From this address, `index` elements on. Vectors need not be aligned."""
        align = align or _ALIGN[element_of(kind)]
        return self.f.emit(kind, f"load {kind}, ptr {self.at(element_of(kind), index).name}, align {align}")

    def store(self, value: Value, index: Operand = 0) -> None:
        """To this address, `index` elements on."""
        element = element_of(value.kind)
        where = self.at(element, index)
        self.f.line(f"store {value.kind} {value.name}, ptr {where.name}, align {_ALIGN[element]}")

    def at(self, element: str, index: Operand) -> Value:
        """The address of an element."""
        if isinstance(index, (int, float)) and index == 0:
            return self
        offset = self.f.value(index, I64)
        return self.f.emit(PTR, f"getelementptr {element}, ptr {self.name}, i64 {offset.name}")


Operand: TypeAlias = Value | int | float
_ALIGN = {F32: 4, F16: 2, I8: 1, I16: 2, I32: 4, I64: 8, PTR: 8}


class Variable:
    """A place on the stack, which LLVM makes a register where it can."""

    def __init__(self, f: Function, kind: str) -> None:
        self._f, self.kind = f, kind
        self.address = f.allocate(kind)

    @property
    def value(self) -> Value:
        """What it holds now."""
        return self._f.emit(self.kind, f"load {self.kind}, ptr {self.address.name}")

    def set(self, value: Operand) -> None:
        """From here on."""
        value = self._f.value(value, self.kind)
        self._f.line(f"store {self.kind} {value.name}, ptr {self.address.name}")


class Function:
    """A function in the making: what is called on it appends instructions."""

    def __init__(self, module: Module, name: str, parameters: Sequence[str], result: str = "void") -> None:
        self._module, self._count = module, 0
        self._allocated: list[str] = []
        self._lines: list[str] = []
        self.parameters = [Value(self, kind, f"%p{i}") for i, kind in enumerate(parameters)]
        listed = ", ".join(f"{each.kind} {each.name}" for each in self.parameters)
        self._head = f"define {result} @{name}({listed}) {{"
        self.name = name

    def text(self) -> str:
        """All of it."""
        body = ["entry:", *self._allocated, "br label %begin", "begin:", *self._lines, "ret void", "}"]
        return "\n".join([self._head, *body])

    def line(self, text: str) -> None:
        """An instruction without a result."""
        self._lines.append(text)

    def _name(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def emit(self, kind: str, text: str) -> Value:
        """An instruction with a result."""
        name = self._name()
        self._lines.append(f"{name} = {text}")
        return Value(self, kind, name)

    def allocate(self, kind: str, count: int = 1, align: int = 64) -> Value:
        """Memory on the stack, for as long as the function runs."""
        name = self._name()
        self._allocated.append(f"{name} = alloca {kind}, i64 {count}, align {align}")
        return Value(self, PTR, name)

    def value(self, operand: Operand, kind: str) -> Value:
        """A number as a constant, a scalar in all lanes."""
        if isinstance(operand, Value):
            return self.splat(operand, lanes_of(kind)) if lanes_of(kind) != operand.lanes else operand
        return Value(self, kind, _literal(kind, operand))

    def splat(self, scalar: Value, lanes: int) -> Value:
        """A scalar in so many lanes."""
        if lanes == 1:
            return scalar
        kind = vector(lanes, scalar.kind)
        first = self.emit(kind, f"insertelement {kind} poison, {scalar.kind} {scalar.name}, i32 0")
        return self.emit(kind, f"shufflevector {kind} {first.name}, {kind} poison, <{lanes} x i32> zeroinitializer")

    def call(self, name: str, kind: str, *operands: Value) -> Value:
        """An intrinsic or another function with a result."""
        self._module.declare(name, kind, [each.kind for each in operands])
        listed = ", ".join(f"{each.kind} {each.name}" for each in operands)
        return self.emit(kind, f"call {kind} @{name}({listed})")

    def run(self, name: str, *operands: Value) -> None:
        """A function without a result."""
        self._module.declare(name, "void", [each.kind for each in operands])
        self.line(f"call void @{name}({', '.join(f'{each.kind} {each.name}' for each in operands)})")

    def intrinsic(self, name: str, *operands: Value) -> Value:
        """One whose result has the type of its operands, such as sqrt."""
        kind = operands[0].kind
        lanes, element = lanes_of(kind), {F32: "f32", I32: "i32", I64: "i64"}[element_of(kind)]
        return self.call(f"llvm.{name}.{f'v{lanes}' * (lanes > 1)}{element}", kind, *operands)

    def fma(self, a: Value, b: Operand, c: Operand) -> Value:
        """a · b + c, rounded once where the processor does so."""
        return self.intrinsic("fmuladd", a, self.value(b, a.kind), self.value(c, a.kind))

    def select(self, condition: Value, a: Operand, b: Operand, kind: str) -> Value:
        """By lanes."""
        x, y = self.value(a, kind), self.value(b, kind)
        return self.emit(kind, f"select {condition.kind} {condition.name}, {kind} {x.name}, {kind} {y.name}")

    def least(self, a: Value, b: Operand) -> Value:
        """Of whole numbers without a sign, or of floats, where it is NaN if a is."""
        other = self.value(b, a.kind)
        return self.select(other.compare("olt" if element_of(a.kind) == F32 else "ult", a), other, a, a.kind)

    def most(self, a: Value, b: Operand) -> Value:
        """Of floats; NaN if a is."""
        other = self.value(b, a.kind)
        return self.select(other.compare("ogt", a), other, a, a.kind)

    def total(self, x: Value) -> Value:
        """The sum of the lanes, of floats or of whole numbers."""
        if x.lanes == 1:
            return x
        element = element_of(x.kind)
        if element != F32:
            return self.call(f"llvm.vector.reduce.add.v{x.lanes}{element}", element, x)
        self._module.declare(f"llvm.vector.reduce.fadd.v{x.lanes}f32", F32, [F32, x.kind])
        zero = _literal(F32, -0.0)
        text = f"call reassoc float @llvm.vector.reduce.fadd.v{x.lanes}f32(float {zero}, {x.kind} {x.name})"
        return self.emit(F32, text)

    def largest(self, x: Value) -> Value:
        """Of the lanes."""
        return x if x.lanes == 1 else self.call(f"llvm.vector.reduce.fmax.v{x.lanes}f32", F32, x)

    def variable(self, kind: str, first: Operand = 0) -> Variable:
        """A variable with its first value."""
        made = Variable(self, kind)
        made.set(first)
        return made

    def label(self) -> str:
        """A name for a place to jump to."""
        self._count += 1
        return f"l{self._count}"

    def place(self, label: str) -> None:
        """Go on here."""
        self._lines += [f"br label %{label}", f"{label}:"]

    def branch(self, condition: Value, yes: str, no: str) -> None:
        """Where to go, and what comes next is neither."""
        self.line(f"br i1 {condition.name}, label %{yes}, label %{no}")

    @contextmanager
    def loop(self, first: Operand, end: Operand, step: int = 1) -> Iterator[Value]:
        """i from `first` while i + step <= end."""
        i = self.variable(I64, first)
        stop = self.value(end, I64) - (step - 1)
        head, body, done = self.label(), self.label(), self.label()
        self.place(head)
        now = i.value
        self.branch(now.compare("slt", stop), body, done)
        self.line(f"{body}:")
        yield now
        i.set(now + step)
        self._lines += [f"br label %{head}", f"{done}:"]

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Only if it holds."""
        body, done = self.label(), self.label()
        self.branch(condition, body, done)
        self.line(f"{body}:")
        yield
        self.place(done)

    def in_vectors(self, count: Operand, body: Callable[[Value, int], None], widths: Sequence[int] = (16, 1)) -> None:
        """body(i, lanes) over all i below count: as many lanes as there are."""
        first: Operand = 0
        for width in widths:
            end = self.value(count, I64)
            with self.loop(first, end, width) as i:
                body(i, width)
            first = end - end % width if width > 1 else end


class Module:
    """Functions, and what they call."""

    def __init__(self) -> None:
        self._functions: list[Function] = []
        self._declared: dict[str, str] = {}

    def function(self, name: str, *parameters: str) -> Function:
        """A new one, without a result."""
        self._functions.append(Function(self, name, parameters))
        return self._functions[-1]

    def declare(self, name: str, result: str, parameters: Sequence[str]) -> None:
        """Something that is called."""
        self._declared[name] = f"declare {result} @{name}({', '.join(parameters)})"

    def text(self) -> str:
        """LLVM IR."""
        own = {each.name for each in self._functions}
        declared = [text for name, text in sorted(self._declared.items()) if name not in own]
        return "\n".join([*declared, *(each.text() for each in self._functions)]) + "\n"
