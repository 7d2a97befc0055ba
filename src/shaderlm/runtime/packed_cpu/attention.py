"""Keys and values in pages, and attention over them.

Of each layer a pool of keys [pages, Hkv, D, PAGE] and one of values [pages, Hkv, PAGE, D]: scores of 16 keys are
sums of vectors as they lie, and so are the sums of values.
"""

from __future__ import annotations

from ...graph.batch import IMAGE_WORDS, NONE, PAGE, REACH, RUN
from .elementwise import exponential, tanh
from .ir import F16, F32, I32, I64, PTR, Function, Module, Value, vector
from .threads import BATCH, PAGE_TABLE, ROWS, argument, define

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


ATTENTION = ("q", "keys", "values", "sinks", "out", "Hq", "group", "window", "scale", "cap", "image_rows")


def tile_rows(width: int) -> int:
    """Rows of a chunk: those of one sequence read keys and values once. As many as registers hold sums of."""
    return 4 if width <= 64 else 2


def attention_kernel(width: int, half: bool, reach: bool = False) -> str:
    """The op attention. A chunk is some rows and a head; pages are read one after the other.

    reach: attention_reach. Rows of an image see keys after their own.
    """
    module = Module()
    f, op, chunk, step = define(module, "attention")
    heads = argument(f, op, ATTENTION.index("Hq"))
    count = tile_rows(width)
    first, head = chunk // heads * count, chunk % heads
    rows = step.load(I64, ROWS)
    position, pages = _record(f, step, first, 1), _record(f, step, first, 3)
    last = f.intrinsic("smin", first + (count - 1), rows - 1)
    ahead = _record(f, step, last, 1) - position
    # Positions of one sequence grow by one: if the last row is as far ahead as it lies behind, so are those between.
    same = (_record(f, step, last, 3) - pages).compare("eq", 0).convert("zext", I64)
    far = ahead.compare("eq", count - 1).convert("zext", I64)
    alone = (same & far).compare("eq", 0)
    with f.when((same & far).compare("ne", 0)):
        f.run("attend_tile", op, first, head, step)
    with f.when(alone), f.loop(first, last + 1) as row:
        f.run("attend_one", op, row, head, step)
    _attend(module, "attend_tile", width, half, count, PAGE // 2, reach)
    _attend(module, "attend_one", width, half, 1, PAGE, reach)
    return module.text()


def _attend(module: Module, name: str, width: int, half: bool, count: int, together: int, reach: bool) -> None:
    """`count` rows at consecutive positions of a sequence; `together` keys at a time."""
    f = module.function(name, PTR, I64, I64, PTR)
    op, row, head, step = f.parameters
    element = F16 if half else F32
    heads, group, window = (argument(f, op, ATTENTION.index(name)) for name in ("Hq", "group", "window"))
    scale, cap = (argument(f, op, ATTENTION.index(name), F32) for name in ("scale", "cap"))
    q, keys, values, sinks, out = (argument(f, op, ATTENTION.index(name), PTR) for name in ATTENTION[:5])
    position = _record(f, step, row, 1)
    table = step.at(I64, PAGE_TABLE).load(PTR).at(I32, _record(f, step, row, 3) & (RUN - 1))
    places = [((row + c) * heads + head) * width for c in range(count)]
    windowed = window.compare("ne", 0)

    def first_key(c: int) -> Value:
        """That row c sees."""
        own = position + c
        return f.select(windowed, f.select(own.compare("uge", window), own - window + 1, 0, I64), 0, I64)

    firsts = [first_key(c) for c in range(count)]
    lasts = [position + c for c in range(count)]
    if reach:
        image_rows = argument(f, op, ATTENTION.index("image_rows"), PTR)
        reaches = [image_rows.load(I32, (row + c) * IMAGE_WORDS + REACH).convert("zext", I64) for c in range(count)]
        lasts = [last + more for last, more in zip(lasts, reaches, strict=True)]
    end_key = lasts[0]
    for last in lasts[1:]:
        end_key = f.intrinsic("smax", end_key, last) if reach else last
    pieces = _pieces(width)
    sums = [[f.variable(vector(lanes, F32), 0.0) for _, lanes in pieces] for _ in range(count)]
    most = [f.variable(F32, _HIDDEN) for _ in range(count)]
    total = [f.variable(F32, 0.0) for _ in range(count)]
    with f.when(sinks.convert("ptrtoint", I64).compare("ne", 0)):
        for c in range(count):
            most[c].set(sinks.load(F32, head))
            total[c].set(1.0)
    shares = [f.allocate(F32, together) for _ in range(count)]
    wide = vector(_LANES, F32)
    scores = [[f.variable(wide) for _ in range(together // _LANES)] for _ in range(count)]
    numbers = f.emit(
        vector(_LANES, I32), f"add <16 x i32> zeroinitializer, <{', '.join(f'i32 {i}' for i in range(16))}>"
    )
    with f.loop(firsts[0] // together, end_key // together + 1) as number:
        here = number * together  # the first of these keys
        page = table.load(I32, here // PAGE).convert("zext", I64)
        block = (page * (heads // group) + head // group) * (width * PAGE)
        at = here % PAGE
        for each in (each for row_scores in scores for each in row_scores):
            each.set(0.0)
        with f.loop(0, width) as d:
            x = [f.splat(q.load(F32, place + d) * scale, _LANES) for place in places]
            for i in range(together // _LANES):
                key = keys.load(vector(_LANES, element), block + d * PAGE + at + i * _LANES).convert("fpext", F32)
                for c in range(count):
                    scores[c][i].set(f.fma(x[c], key, scores[c][i].value))
        for c in range(count):
            with f.when(cap.compare("une", 0.0)):
                caps = f.splat(cap, _LANES)
                for each in scores[c]:
                    each.set(tanh(f, each.value / caps) * caps)
            high = f.splat((lasts[c] - here).convert("trunc", I32), _LANES)
            low = f.splat((firsts[c] - here).convert("trunc", I32), _LANES)
            largest: Value = f.splat(most[c].value, _LANES)
            seen = []
            for i, each in enumerate(scores[c]):
                key = numbers + i * _LANES
                both = key.compare("sge", low), key.compare("sle", high)
                seen.append(f.emit(both[0].kind, f"and {both[0].kind} {both[0].name}, {both[1].name}"))
                each.set(f.select(seen[i], each.value, _HIDDEN, wide))
                largest = f.most(largest, each.value)
            now = f.largest(largest)
            keep = exponential(f, most[c].value - now)
            most[c].set(now)
            added = f.value(0.0, wide)
            for i, each in enumerate(scores[c]):
                share = f.select(seen[i], exponential(f, each.value - f.splat(now, _LANES)), 0.0, wide)
                added = added + share
                shares[c].store(share, i * _LANES)
            total[c].set(f.fma(total[c].value, keep, f.total(added)))
            for each in sums[c]:
                each.set(each.value * f.splat(keep, each.value.lanes))
        # Values of keys that a row sees: others may be no numbers.
        low_key = f.intrinsic("smax", firsts[0] - here, f.value(0, I64))
        end = f.intrinsic("smin", end_key + 1 - here, f.value(together, I64))
        with f.loop(low_key, end) as k:
            weights = [each.load(F32, k) for each in shares]
            for i, (first, lanes) in enumerate(pieces):
                where = block + (at + k) * width + first
                value = values.load(vector(lanes, element), where).convert("fpext", F32)
                for c in range(count):
                    sums[c][i].set(f.fma(value, weights[c], sums[c][i].value))
    for c in range(count):
        inverse = f.value(1.0, F32) / total[c].value
        for (first, lanes), each in zip(pieces, sums[c], strict=True):
            out.store(each.value * f.splat(inverse, lanes), places[c] + first)


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
