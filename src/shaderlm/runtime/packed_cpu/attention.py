"""Keys and values in pages, and attention over them.

Of each layer a pool of keys [pages, Hkv, D, PAGE] and one of values [pages, Hkv, PAGE, D]: scores of 16 keys are
sums of vectors as they lie, and so are the sums of values.
"""

from __future__ import annotations

from ...graph.batch import NONE, PAGE, RUN
from .elementwise import exponential, tanh
from .ir import F16, F32, I32, I64, PTR, Function, Module, Value, vector
from .threads import BATCH, PAGE_TABLE, argument, define

_HIDDEN = -1e30  # a score whose exponential is nothing
_LANES = 16


def pool_shape(name: str, pages: int, heads: int, width: int) -> tuple[int, int, int, int]:
    """Of the state `name` of a layer, which ends in k_cache or v_cache."""
    return (pages, heads, width, PAGE) if name.endswith("k_cache") else (pages, heads, PAGE, width)


def _record(f: Function, step: Value, row: Value, word: int) -> Value:
    """A word of a row of the batch."""
    batch = step.at(I64, BATCH).load(PTR)
    return batch.load(I32, (row + 1) * 4 + word).convert("zext", I64)


WRITE = ("k", "v", "keys", "values", "heads", "width")


def write_kernel(half: bool) -> str:
    """The op kv_write. A chunk is a row."""
    module = Module()
    f, op, row, step = define(module, "kv_write")
    element = F16 if half else F32
    heads, width = (argument(f, op, WRITE.index(name)) for name in ("heads", "width"))
    k, v, keys, values = (argument(f, op, WRITE.index(name), PTR) for name in WRITE[:4])
    slot = _record(f, step, row, 2)
    with f.when(slot.compare("ne", NONE)), f.loop(0, heads) as head:
        read = (row * heads + head) * width
        block = (slot // PAGE * heads + head) * (width * PAGE)
        at = slot % PAGE
        with f.loop(0, width) as d:
            key, value = (each.load(F32, read + d).convert("fptrunc", element) for each in (k, v))
            keys.store(key, block + d * PAGE + at)
            values.store(value, block + at * width + d)
    return module.text()


ATTENTION = ("q", "keys", "values", "sinks", "out", "Hq", "group", "window", "scale", "cap")


def attention_kernel(width: int, half: bool) -> str:
    """The op attention. A chunk is a row and a head; pages are read one after the other."""
    module = Module()
    f, op, chunk, step = define(module, "attention")
    element = F16 if half else F32
    heads, group, window = (argument(f, op, ATTENTION.index(name)) for name in ("Hq", "group", "window"))
    scale, cap = (argument(f, op, ATTENTION.index(name), F32) for name in ("scale", "cap"))
    q, keys, values, sinks, out = (argument(f, op, ATTENTION.index(name), PTR) for name in ATTENTION[:5])
    row, head = chunk // heads, chunk % heads
    kv_heads = heads // group
    position = _record(f, step, row, 1)
    table = step.at(I64, PAGE_TABLE).load(PTR).at(I32, _record(f, step, row, 3) & (RUN - 1))
    q = q.at(F32, chunk * width)
    windowed = window.compare("ne", 0)
    begins = f.select(position.compare("uge", window), position - window + 1, 0, I64)
    first_key = f.select(windowed, begins, 0, I64)
    pieces = _pieces(width)
    sums = [f.variable(vector(lanes, F32), 0.0) for _, lanes in pieces]
    most, total = f.variable(F32, _HIDDEN), f.variable(F32, 0.0)
    with f.when(sinks.convert("ptrtoint", I64).compare("ne", 0)):
        most.set(sinks.load(F32, head))
        total.set(1.0)
    shares = f.allocate(F32, PAGE)
    numbers = f.emit(
        vector(_LANES, I32), f"add <16 x i32> zeroinitializer, <{', '.join(f'i32 {i}' for i in range(16))}>"
    )
    scores = [f.variable(vector(_LANES, F32)) for _ in range(PAGE // _LANES)]
    with f.loop(first_key // PAGE, position // PAGE + 1) as number:
        page = table.load(I32, number).convert("zext", I64)
        block = (page * kv_heads + head // group) * (width * PAGE)
        for each in scores:
            each.set(0.0)
        with f.loop(0, width) as d:
            x = f.splat(q.load(F32, d) * scale, _LANES)
            for i, each in enumerate(scores):
                key = keys.load(vector(_LANES, element), block + d * PAGE + i * _LANES).convert("fpext", F32)
                each.set(f.fma(x, key, each.value))
        with f.when(cap.compare("une", 0.0)):
            wide = f.splat(cap, _LANES)
            for each in scores:
                each.set(tanh(f, each.value / wide) * wide)
        # Keys of this page from `low` to `high` are seen.
        here = number * PAGE
        high = f.intrinsic("smin", position - here, f.value(PAGE - 1, I64))
        low = f.intrinsic("smax", first_key - here, f.value(0, I64))
        highs, lows = (f.splat(each.convert("trunc", I32), _LANES) for each in (high, low))
        largest: Value = f.splat(most.value, _LANES)
        for i, each in enumerate(scores):
            key = numbers + i * _LANES
            above = f.select(key.compare("sge", lows), each.value, _HIDDEN, each.kind)
            each.set(f.select(key.compare("sle", highs), above, _HIDDEN, each.kind))
            largest = f.most(largest, each.value)
        now = f.largest(largest)
        keep = exponential(f, most.value - now)
        most.set(now)
        added = f.variable(vector(_LANES, F32), 0.0)
        for i, each in enumerate(scores):
            share = exponential(f, each.value - f.splat(now, _LANES))
            added.set(added.value + share)
            shares.store(share, i * _LANES)
        total.set(f.fma(total.value, keep, f.total(added.value)))
        for each in sums:
            each.set(each.value * f.splat(keep, each.value.lanes))
        with f.loop(low, high + 1) as c:
            share = shares.load(F32, c)
            for (first, lanes), each in zip(pieces, sums, strict=True):
                value = values.load(vector(lanes, element), block + c * width + first).convert("fpext", F32)
                each.set(f.fma(value, share, each.value))
    inverse = f.value(1.0, F32) / total.value
    for (first, lanes), each in zip(pieces, sums, strict=True):
        out.store(each.value * f.splat(inverse, lanes), chunk * width + first)
    return module.text()


def _pieces(width: int) -> list[tuple[int, int]]:
    """A head in vectors: (first, lanes)."""
    pieces, first = [], 0
    while first < width:
        lanes = _LANES
        while lanes > width - first:
            lanes //= 2
        pieces.append((first, lanes))
        first += lanes
    return pieces
