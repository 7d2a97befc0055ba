"""Norms, rope, activations and sums, as `graph.reference` has them. A chunk is a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ...graph.reference import SWIGLU_FACTOR, SWIGLU_LIMIT
from .ir import F32, I32, I64, PTR, Function, Module, Operand, Value, vector
from .threads import BATCH, argument, define

_MAGIC = 12582912.0  # 1.5 · 2²³: added to a float, it leaves no room for fractions
# exp(r) for |r| <= ln(2) / 2, of Cephes: the powers from the second on, divided by r².
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# erf of Abramowitz and Stegun, 7.1.26: off by 1.5e-7 at most.
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def exponential(f: Function, x: Value) -> Value:
    """exp, with a relative error of 2e-7; below −87 it stays at 1e-38."""
    x = f.least(f.most(x, -87.0), 88.0)
    magic = f.fma(x, math.log2(math.e), _MAGIC)
    whole = magic - _MAGIC
    r = f.fma(whole, 2.12194440e-4, f.fma(whole, -0.693359375, x))
    y = f.value(_EXP[0], x.kind)
    for coefficient in _EXP[1:]:
        y = f.fma(y, r, coefficient)
    y = f.fma(y, r * r, r + 1.0)
    power = (magic.bitcast(vector(x.lanes, I32)) << 23) + 0x3F800000
    return y * power.bitcast(x.kind)


def sigmoid(f: Function, x: Value) -> Value:
    """1 / (1 + exp(−x))."""
    return f.value(1.0, x.kind) / (exponential(f, x * -1.0) + 1.0)


def tanh(f: Function, x: Value) -> Value:
    """2 · sigmoid(2 x) − 1."""
    return f.fma(sigmoid(f, x * 2.0), 2.0, -1.0)


def _gelu(f: Function, x: Value) -> Value:
    inner = f.fma(x * x, 0.044715, 1.0) * x
    return x * sigmoid(f, inner * (2 * math.sqrt(2 / math.pi)))


def _gelu_erf(f: Function, x: Value) -> Value:
    a = f.intrinsic("fabs", x) * math.sqrt(0.5)
    t = f.value(1.0, x.kind) / f.fma(a, 0.3275911, 1.0)
    y = f.value(_ERF[0], x.kind)
    for coefficient in _ERF[1:]:
        y = f.fma(y, t, coefficient)
    rest = y * t * exponential(f, a * a * -1.0)  # 1 − erf(a)
    return x * 0.5 * f.select(x.compare("olt", 0.0), rest, f.value(2.0, x.kind) - rest, x.kind)


def _swiglu(f: Function, a: Value, b: Value) -> Value:
    gate = f.least(a, SWIGLU_LIMIT)
    return gate * sigmoid(f, gate * SWIGLU_FACTOR) * (f.most(f.least(b, SWIGLU_LIMIT), -SWIGLU_LIMIT) + 1.0)


def _relu_squared(f: Function, x: Value, _: Value) -> Value:
    y = f.most(x, 0.0)
    return y * y


_PAIRS: Mapping[str, Callable[[Function, Value, Value], Value]] = {
    "add": lambda f, a, b: a + b,
    "mul": lambda f, a, b: a * b,
    "silu_mul": lambda f, a, b: a * sigmoid(f, a) * b,
    "sigmoid_mul": lambda f, a, b: sigmoid(f, a) * b,
    "gelu_mul": lambda f, a, b: _gelu(f, a) * b,
    "swiglu_clamped": _swiglu,
}
_SINGLES: Mapping[str, Callable[[Function, Value, Value], Value]] = {  # the last operand is a number of the op
    "gelu": lambda f, x, _: _gelu(f, x),
    "gelu_erf": lambda f, x, _: _gelu_erf(f, x),
    "relu_squared": _relu_squared,
    "scale": lambda f, x, factor: x * factor,
    "softcap": lambda f, x, cap: tanh(f, x / cap) * cap,
}
PAIRS, SINGLES = tuple(_PAIRS), tuple(_SINGLES)

Arguments = tuple[str, ...]


class _Op:
    """The function of an op and its arguments, by name."""

    def __init__(self, name: str, names: Arguments) -> None:
        self.module, self._names = Module(), names
        self.f, self._op, self.row, self.step = define(self.module, name)

    def number(self, name: str) -> Value:
        return argument(self.f, self._op, self._names.index(name))

    def float(self, name: str) -> Value:
        return argument(self.f, self._op, self._names.index(name), F32)

    def pointer(self, name: str, first: Operand = 0) -> Value:
        """An address, `first` floats on."""
        return argument(self.f, self._op, self._names.index(name), PTR).at(F32, first)

    def has(self, name: str) -> Value:
        return self.number(name).compare("ne", 0)


PAIR: Arguments = ("a", "b", "out", "count", "period", "b_row")


def pair_kernel(name: str) -> str:
    """a and b [rows, count]; b repeats after `period` values, and its rows are `b_row` values apart."""
    op = _Op(name, PAIR)
    f, count, period = op.f, op.number("count"), op.number("period")
    a, out = op.pointer("a", op.row * count), op.pointer("out", op.row * count)
    b = op.pointer("b", op.row * op.number("b_row"))
    with f.loop(0, count // period) as turn:
        at = turn * period

        def some(i: Value, lanes: int) -> None:
            kind = vector(lanes, F32)
            out.store(_PAIRS[name](f, a.load(kind, at + i), b.load(kind, i)), at + i)

        f.in_vectors(period, some)
    return op.module.text()


SINGLE: Arguments = ("x", "out", "count", "number")


def single_kernel(name: str) -> str:
    """x [rows, count]."""
    op = _Op(name, SINGLE)
    f, count = op.f, op.number("count")
    x, out = op.pointer("x", op.row * count), op.pointer("out", op.row * count)
    number = op.float("number")

    def some(i: Value, lanes: int) -> None:
        value = x.load(vector(lanes, F32), i)
        out.store(_SINGLES[name](f, value, f.splat(number, lanes)), i)

    f.in_vectors(count, some)
    return op.module.text()


SLICE: Arguments = ("x", "out", "width", "first", "count", "step")


def slice_kernel() -> str:
    """Some columns of every row."""
    op = _Op("slice", SLICE)
    x = op.pointer("x", op.row * op.number("width") + op.number("first"))
    out, step = op.pointer("out", op.row * op.number("count")), op.number("step")
    with op.f.loop(0, op.number("count")) as i:
        out.store(x.load(F32, i * step), i)
    return op.module.text()


NORM: Arguments = ("x", "out", "weight", "bias", "heads", "width", "eps")


def norm_kernel(centred: bool) -> str:
    """rms_norm and layer_norm: a weight of 0 is none, and so is a bias."""
    op = _Op("norm", NORM)
    f, heads, width = op.f, op.number("heads"), op.number("width")
    count = f.emit(F32, f"uitofp i64 {width.name} to float")
    weight, bias, has_weight, has_bias = op.pointer("weight"), op.pointer("bias"), op.has("weight"), op.has("bias")
    with f.loop(0, heads) as head:
        first = (op.row * heads + head) * width
        x, out = op.pointer("x", first), op.pointer("out", first)
        mean = _sum(f, width, lambda i, lanes: x.load(vector(lanes, F32), i)) / count if centred else None

        def centre(i: Value, lanes: int) -> Value:
            value = x.load(vector(lanes, F32), i)
            return value - f.splat(mean, lanes) if mean is not None else value

        def square(i: Value, lanes: int) -> Value:
            value = centre(i, lanes)
            return value * value

        spread = _sum(f, width, square) / count + op.float("eps")
        factor = f.value(1.0, F32) / f.intrinsic("sqrt", spread)

        def some(i: Value, lanes: int) -> None:
            y = f.variable(vector(lanes, F32))
            y.set(centre(i, lanes) * f.splat(factor, lanes))
            with f.when(has_weight):
                y.set(y.value * weight.load(y.kind, i))
            with f.when(has_bias):
                y.set(y.value + bias.load(y.kind, i))
            out.store(y.value, i)

        f.in_vectors(width, some)
    return op.module.text()


def _sum(f: Function, count: Value, of: Callable[[Value, int], Value]) -> Value:
    """Of vectors, and of what remains."""
    total, rest = f.variable(vector(16, F32), 0.0), f.variable(F32, 0.0)

    def some(i: Value, lanes: int) -> None:
        to = total if lanes == 16 else rest
        to.set(to.value + of(i, lanes))

    f.in_vectors(count, some)
    return f.total(total.value) + rest.value


ROPE: Arguments = ("x", "out", "table", "heads", "width", "half")


def rope_kernel(interleaved: bool) -> str:
    """x [rows, heads, width] rotated by the rows of a table [positions, half, 2] of the rows' positions."""
    op = _Op("rope", ROPE)
    f, heads, width, half = op.f, op.number("heads"), op.number("width"), op.number("half")
    batch = op.step.at(I64, BATCH).load(PTR)
    position = batch.load(I32, (op.row + 1) * 4 + 1).convert("zext", I64)
    table = op.pointer("table", position * half * 2)
    with f.loop(0, heads) as head:
        first = (op.row * heads + head) * width
        x, out = op.pointer("x", first), op.pointer("out", first)

        def some(i: Value, lanes: int) -> None:
            pairs = vector(2 * lanes, F32)
            even, odd = range(0, 2 * lanes, 2), range(1, 2 * lanes, 2)
            both = table.load(pairs, i * 2)
            cos, sin = both.shuffle(even), both.shuffle(odd)
            if interleaved:
                values = x.load(pairs, i * 2)
                u, v = values.shuffle(even), values.shuffle(odd)
            else:
                u, v = x.load(vector(lanes, F32), i), x.load(vector(lanes, F32), i + half)
            a, b = u * cos - v * sin, u * sin + v * cos
            if not interleaved:
                out.store(a, i)
                out.store(b, i + half)
            elif lanes == 1:
                out.store(a, i * 2)
                out.store(b, i * 2 + 1)
            else:
                turns = [each for lane in range(lanes) for each in (lane, lanes + lane)]
                out.store(a.shuffle(turns, b), i * 2)

        f.in_vectors(half, some)
        with f.loop(half * 2, width) as i:
            out.store(x.load(F32, i), i)
    return op.module.text()


GATED: Arguments = ("a", "b", "x", "gate", "out", "width", "K")


def gated_kernel() -> str:
    """a + sigmoid(x · gate) · b."""
    op = _Op("add_gated", GATED)
    f, width, K = op.f, op.number("width"), op.number("K")
    x, gate = op.pointer("x", op.row * K), op.pointer("gate")
    dot = _sum(f, K, lambda i, lanes: x.load(vector(lanes, F32), i) * gate.load(vector(lanes, F32), i))
    share = sigmoid(f, dot)
    a, b, out = (op.pointer(name, op.row * width) for name in ("a", "b", "out"))

    def some(i: Value, lanes: int) -> None:
        kind = vector(lanes, F32)
        out.store(f.fma(b.load(kind, i), share, a.load(kind, i)), i)

    f.in_vectors(width, some)
    return op.module.text()
