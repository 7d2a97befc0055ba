"""Products with weights as they are stored: y[m, n] = Σ_groups scale · Σ number · x + offset · Σ x.

`round_x` makes whole numbers of 16 bits of x, a scale for each group, and their sums, in the order that weights want.
Weights of a group are read as lanes of 16 bits: four numbers of 4 bits, two of 8. Masks and shifts take them apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

from ...formats.block_numbers import NumberShape
from .ir import F16, F32, I8, I16, I32, I64, PTR, Function, Module, Value, Variable, vector
from .threads import ROWS as ROWS_OF_STEP
from .threads import argument, define

ROWS = 4  # of x, for which a weight is taken apart once
VECTOR = 64  # bytes of weights that are taken apart at once, where a row has so many


class ProductKind(NumberShape):
    """How weights are stored, and how a kernel takes them apart."""

    @property
    def lanes(self) -> int:
        """Of 16 bits, in a group."""
        return self.group * self.bits // 16

    @property
    def parts(self) -> int:
        """Numbers in a lane."""
        return 16 // self.bits

    @property
    def groups(self) -> int:
        """In a vector."""
        return VECTOR // (2 * self.lanes)

    def order(self) -> list[list[int]]:
        """[parts][lanes]: which number of a group is where."""
        half = self.group // 2
        if self.bits == 4:
            return [[2 * i + (j >> 1) + half * (j & 1) for i in range(self.lanes)] for j in range(4)]
        return [[2 * i + j for i in range(self.lanes)] for j in range(2)]


ROUND = ("x", "rounded", "scales", "sums", "K")
_MAGIC = 12582912.0  # 1.5 · 2²³: a float of which it is the nearest power has no room for fractions


def round_kernel(bits: int, group: int) -> str:
    """x [rows, K] f32 → rounded [rows, K] i16, scales and sums [rows, K / group]. A chunk is a row."""
    kind = ProductKind(bits, group)
    module = Module()
    f, op, row, _ = define(module, "round_x")
    K = argument(f, op, ROUND.index("K"))
    groups = K // group
    x = argument(f, op, ROUND.index("x"), PTR).at(F32, row * K)
    out = argument(f, op, ROUND.index("rounded"), PTR).at(I16, row * K)
    scales = argument(f, op, ROUND.index("scales"), PTR).at(F32, row * groups)
    sums = argument(f, op, ROUND.index("sums"), PTR).at(F32, row * groups)
    order = kind.order()

    def one(first: Value, g: Value, together: int) -> None:
        """Group first + g, of so many that a vector of weights holds."""
        at = first + g
        values = x.load(vector(group, F32), at * group)
        largest = f.largest(f.intrinsic("fabs", values))
        inverse = f.select(largest.compare("ogt", 1e-30), f.value(32767.0, F32) / largest, 0.0, F32)
        magic = f.fma(values, inverse, _MAGIC)
        whole = magic.bitcast(vector(group, I32)).convert("trunc", I16)
        for j, mask in enumerate(order):
            where = first * group + j * together * kind.lanes + g * kind.lanes
            out.store(whole.shuffle(mask), where)
        total = f.total(magic - _MAGIC)
        unit = f.fma(largest, 1 / 32767, total * 0.0)  # NaN where x has one
        scales.store(unit, at)
        sums.store(total * unit, at)

    done: Value | int = 0
    together = kind.groups
    while together:
        end = groups - groups % together
        with f.loop(done, end, together) as first, f.loop(0, together) as g:
            one(first, g, together)
        done, together = end, together // 2
    return module.text()


SUMS = ("x", "sums", "K")


def sums_kernel(group: int) -> str:
    """x [rows, K] f32 → the sums of its groups. A chunk is a row."""
    module = Module()
    f, op, row, _ = define(module, "group_sums")
    K = argument(f, op, SUMS.index("K"))
    x = argument(f, op, SUMS.index("x"), PTR).at(F32, row * K)
    sums = argument(f, op, SUMS.index("sums"), PTR).at(F32, row * (K // group))
    with f.loop(0, K // group) as g:
        sums.store(f.total(x.load(vector(group, F32), g * group)), g)
    return module.text()


PRODUCT = ("numbers", "scales", "offsets", "bias", "add", "rounded", "x_scales", "x_sums", "out", "N", "K", "tile")


def multiply_add_pairs(f: Function, a: Value, b: Value, to: Value | None, features: Collection[str]) -> Value:
    """Of lanes of 16 bits: products, and sums of neighbours in 32 bits, added to others."""
    lanes = a.lanes
    widest = 32 if "avx512bw" in features else 16 if "avx2" in features else 0
    if widest and lanes > widest:
        low, high = range(lanes // 2), range(lanes // 2, lanes)
        parts = [to.shuffle(range(i, i + lanes // 4)) if to else None for i in (0, lanes // 4)]
        halves = [
            multiply_add_pairs(f, a.shuffle(half), b.shuffle(half), part, features)
            for half, part in zip((low, high), parts, strict=True)
        ]
        return halves[0].shuffle(range(lanes // 2), halves[1])
    result = vector(lanes // 2, I32)
    if "avx512vnni" in features and lanes >= 8:
        words = [each.bitcast(result) for each in (a, b)]
        return f.call(f"llvm.x86.avx512.vpdpwssd.{16 * lanes}", result, to or f.value(0, result), *words)
    name = {32: "avx512.pmaddw.d.512", 16: "avx2.pmadd.wd", 8: "sse2.pmadd.wd"}.get(lanes)
    if widest and name:
        pairs = f.call(f"llvm.x86.{name}", result, a, b)
    else:
        both = a.convert("sext", I32) * b.convert("sext", I32)
        pairs = both.shuffle(range(0, lanes, 2)) + both.shuffle(range(1, lanes, 2))
    return pairs if to is None else pairs + to


def _apart(kind: ProductKind, words: Value) -> list[Value]:
    """The numbers in lanes of 16 bits, by their place in a lane."""
    if kind.bits == 8:
        return [(words << 8).signed_shift(8), words.signed_shift(8)]
    return [words & 15, (words >> 4) & 15, (words >> 8) & 15, words >> 12]


def product_kernel(kind: ProductKind, K: int, features: Collection[str]) -> str:
    """With numbers of 16 bits of x, in rows of K: loops of unknown length cost as much as 270 more values."""
    return _kernel(functools.partial(_integer_tile, kind, K, features))


def exact_kernel(kind: ProductKind) -> str:
    """With x in f32."""
    return _kernel(functools.partial(_exact_tile, kind))


def dense_kernel() -> str:
    """With weights and x in f32."""
    return _kernel(_dense_tile)


_Tile = Callable[[Function, Value, Value, Value, int, int], None]


def _kernel(tile: _Tile) -> str:
    """A chunk is some rows of weights, times all rows of x. `tile` writes the code for a few of both."""
    module = Module()
    f, op, chunk, step = define(module, "product")
    size, N = argument(f, op, PRODUCT.index("tile")), argument(f, op, PRODUCT.index("N"))
    n0 = chunk * size
    n1 = f.least(n0 + size, N)
    rows = step.load(I64, ROWS_OF_STEP)
    done: Value | int = 0
    for count in (ROWS, 2, 1):
        end = rows - rows % count
        with f.loop(done, end, count) as m:
            f.run(f"rows_{count}", op, n0, n1, m)
        done = end
    for count in (ROWS, 2, 1):
        _rows(module, tile, count)
    return module.text()


def _rows(module: Module, tile: _Tile, count: int) -> None:
    """So many rows of x from m on, times the weights n0 … n1."""
    f = module.function(f"rows_{count}", PTR, I64, I64, I64)
    op, n0, n1, m = f.parameters
    done: Value = n0
    for together in (4 if count == 1 else 2, 1):
        end = n1 - (n1 - n0) % together if together > 1 else n1
        with f.loop(done, end, together) as n:
            tile(f, op, n, m, together, count)
        done = end


def _pointer(f: Function, op: Value, name: str) -> Value:
    return argument(f, op, PRODUCT.index(name), PTR)


def _dense_tile(f: Function, op: Value, n: Value, m: Value, weights: int, count: int) -> None:
    K = argument(f, op, PRODUCT.index("K"))
    rows = [_pointer(f, op, "numbers").at(F32, (n + r) * K) for r in range(weights)]
    xs = [_pointer(f, op, "rounded").at(F32, (m + c) * K) for c in range(count)]
    sums = [[f.variable(vector(16, F32), 0.0) for _ in range(count)] for _ in range(weights)]

    def some(first: Value, lanes: int) -> None:
        x = [each.load(vector(lanes, F32), first) for each in xs]
        for r in range(weights):
            w = rows[r].load(vector(lanes, F32), first)
            for c in range(count):
                _add(f, sums[r][c], w, x[c])

    f.in_vectors(K, some)
    _finish(f, op, n, m, [[each.value for each in row] for row in sums])


def _exact_tile(kind: ProductKind, f: Function, op: Value, n: Value, m: Value, weights: int, count: int) -> None:
    K = argument(f, op, PRODUCT.index("K"))
    groups, half = K // kind.group, kind.group // 2
    factor = F16 if kind.half else F32
    size = kind.group * kind.bits // 8
    numbers = [_pointer(f, op, "numbers").at(I8, (n + r) * groups * size) for r in range(weights)]
    scales = [_pointer(f, op, "scales").at(factor, (n + r) * groups) for r in range(weights)]
    offsets = [_pointer(f, op, "offsets").at(factor, (n + r) * groups) for r in range(weights)] if kind.offsets else []
    xs = [_pointer(f, op, "rounded").at(F32, (m + c) * K) for c in range(count)]
    totals = [_pointer(f, op, "x_sums").at(F32, (m + c) * groups) for c in range(count)]
    sums = [[f.variable(vector(half, F32), 0.0) for _ in range(count)] for _ in range(weights)]
    with f.loop(0, groups) as g:
        x = [[each.load(vector(half, F32), g * kind.group + part * half) for part in (0, 1)] for each in xs]
        for r in range(weights):
            scale = scales[r].load(factor, g).convert("fpext", F32)
            if kind.bits == 4:
                bytes_ = numbers[r].load(vector(half, I8), g * size).convert("zext", I32)
                parts = [(each - kind.zero).convert("sitofp", F32) for each in (bytes_ & 15, bytes_ >> 4)]
            else:
                both = [numbers[r].load(vector(half, I8), g * size + part * half) for part in (0, 1)]
                parts = [each.convert("sext", I32).convert("sitofp", F32) for each in both]
            for c in range(count):
                product = f.fma(parts[0], x[c][0], parts[1] * x[c][1])
                sums[r][c].set(f.fma(product, scale, sums[r][c].value))
                if kind.offsets:
                    offset = offsets[r].load(factor, g).convert("fpext", F32)
                    share = offset * totals[c].load(F32, g) * (1 / half)  # of a lane: all are summed
                    sums[r][c].set(sums[r][c].value + f.splat(share, half))
    _finish(f, op, n, m, [[each.value for each in row] for row in sums])


def _finish(f: Function, op: Value, n: Value, m: Value, sums: list[list[Value]]) -> None:
    """The sums of lanes, bias, what is added, and the results: of a row of x, weights beside each other."""
    N = argument(f, op, PRODUCT.index("N"))
    out, bias, add = (_pointer(f, op, name) for name in ("out", "bias", "add"))
    has_bias, has_add = (each.convert("ptrtoint", I64).compare("ne", 0) for each in (bias, add))
    places = [(m + c) * N + n for c in range(len(sums[0]))]
    # All are written before anything is asked: LLVM would move sums behind the question, where registers are few.
    totals = [_totals(f, [row[c] for row in sums]) for c in range(len(places))]
    for where, total in zip(places, totals, strict=True):
        out.store(total, where)
    kind = totals[0].kind
    with f.when(has_bias):
        for where in places:
            out.store(out.load(kind, where) + bias.load(kind, n), where)
    with f.when(has_add):
        for where in places:
            out.store(out.load(kind, where) + add.load(kind, where), where)


def _totals(f: Function, sums: list[Value]) -> Value:
    """The sum of each vector, in a lane each: neighbours are folded into one vector until there is one."""
    count = len(sums)
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [_folded(a, b) for a, b in zip(sums[:half], sums[half:], strict=True)]
    (total,) = sums
    if count == 1:
        return f.total(total)
    # Each vector has total.lanes / count lanes of every sum, in blocks of `count`.
    while total.lanes > count:
        half = total.lanes // 2
        total = total.shuffle(range(half)) + total.shuffle(range(half, total.lanes))
    return total


def _folded(a: Value, b: Value) -> Value:
    """Lanes of a and b in turns, each the sum of two. Within blocks of four lanes, as processors shuffle quickly."""
    lanes = a.lanes
    low = [i + at for i in range(0, lanes, 4) for at in (0, lanes, 1, lanes + 1)]
    high = [i + at for i in range(0, lanes, 4) for at in (2, lanes + 2, 3, lanes + 3)]
    return a.shuffle(low, b) + a.shuffle(high, b)


def _integer_tile(
    kind: ProductKind,
    K: int,
    features: Collection[str],
    f: Function,
    op: Value,
    n: Value,
    m: Value,
    weights: int,
    count: int,
) -> None:
    """Products of `weights` rows from n on with `count` rows of x from m on."""

    def pointer(name: str) -> Value:
        return argument(f, op, PRODUCT.index(name), PTR)

    groups = K // kind.group
    factor = F16 if kind.half else F32
    numbers = [pointer("numbers").at("i8", (n + r) * (K * kind.bits // 8)) for r in range(weights)]
    scales = [pointer("scales").at(factor, (n + r) * groups) for r in range(weights)]
    offsets = [pointer("offsets").at(factor, (n + r) * groups) for r in range(weights)] if kind.offsets else []
    rounded = [pointer("rounded").at(I16, (m + c) * K) for c in range(count)]
    x_scales = [pointer("x_scales").at(F32, (m + c) * groups) for c in range(count)]
    x_sums = [pointer("x_sums").at(F32, (m + c) * groups) for c in range(count)]
    sums = [[f.variable(vector(16, F32), 0.0) for _ in range(count)] for _ in range(weights)]

    def span(first: Value, width: int) -> None:
        """`width` groups from `first` on."""
        together = min(width, kind.groups)
        unit = together * kind.lanes  # lanes of 16 bits
        spread = [[i // (kind.lanes // 2) + at for i in range(unit // 2)] for at in range(0, width, together)]
        x_factors = [each.load(vector(width, F32), first) for each in x_scales]
        x_totals = [each.load(vector(width, F32), first) for each in x_sums] if kind.offsets or kind.zero else []
        if kind.zero:
            x_totals = [each * float(-kind.zero) for each in x_totals]
        factors = [each.load(vector(width, factor), first).convert("fpext", F32) for each in scales]
        for r in range(weights):
            added = offsets[r].load(vector(width, factor), first).convert("fpext", F32) if kind.offsets else factors[r]
            for c in range(count if kind.offsets or kind.zero else 0):
                _add(f, sums[r][c], added, x_totals[c])
        both = [[factors[r] * x_factors[c] for c in range(count)] for r in range(weights)]
        for v in range(width // together):
            at = first + v * together
            for r in range(weights):
                words = numbers[r].load(vector(unit, I16), at * kind.lanes, 2)
                apart = _apart(kind, words)
                for c in range(count):
                    whole: Value | None = None
                    for j, part in enumerate(apart):
                        x = rounded[c].load(vector(unit, I16), at * kind.group + j * unit)
                        whole = multiply_add_pairs(f, part, x, whole, features)
                    assert whole is not None
                    _add(f, sums[r][c], whole.convert("sitofp", F32), both[r][c].shuffle(spread[v]))

    first, width = 0, 16
    while width:
        end = groups - groups % width
        if end == first + width:
            span(f.value(first, I64), width)
        elif end > first:
            with f.loop(first, end, width) as at:
                span(at, width)
        first, width = end, (kind.groups if width == 16 and kind.groups < 16 else width // 2)
    _finish(f, op, n, m, [[each.value for each in row] for row in sums])


def _add(f: Function, to: Variable, a: Value, b: Value) -> None:
    """a · b, in the first lanes."""
    lanes = a.lanes
    if lanes == 16:
        to.set(f.fma(a, b, to.value))
        return
    if lanes == 1:
        a, b = (f.emit("<1 x float>", f"insertelement <1 x float> poison, float {v.name}, i32 0") for v in (a, b))
    product = a * b
    zeros = f.value(0.0, product.kind)
    mask = [i if i < lanes else lanes for i in range(16)]
    kind = product.kind
    which = ", ".join(f"i32 {i}" for i in mask)
    text = f"shufflevector {kind} {product.name}, {kind} {zeros.name}, <16 x i32> <{which}>"
    to.set(to.value + f.emit(vector(16, F32), text))
