"""The route of attention that models take: rows of any sequences, each of its own length, in pages or from row 0 on.

Rows of runs (prompts) go to attention_tile. Of short rows, one workgroup takes all keys: for a query head, if there is
one row (attention_single_pass), or for four query heads of a kv head (attention_grouped). The keys of longer ones are
split among workgroups and joined (attention_split, attention_merge). Which of them serves a row of a plan, and in which
chunks, depends on the row alone: each kernel passes over the rows of the others. Heads are padded to a multiple of four
values with zeros, which change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...gpu.caps import DeviceCaps
from ...graph.batch import (
    CONTEXTS,
    LONG_SPLIT_KEYS,
    PAGE,
    RUN,
    RUN_ROWS,
    SINGLE_PASS_TILE,
    SPLIT_KEYS,
    context_class,
    last_key,
    least_pool_rows,
    single_pass_keys,
)
from ..route import (
    Array,
    Dims,
    Dispatch,
    LaunchList,
    Packer,
    Route,
    batch_bytes,
    ceil_div,
    f32,
    filling,
    is_specialised,
    over_limits,
    processors,
)
from ..wgsl import Constant, Kernel
from .measured import (
    FULL_WORKGROUPS,
    GROUPED,
    LEAST_SPLITS,
    ONE_ROW,
    ROW_WORKGROUPS,
    SPLIT_ROWS,
    SPLIT_WORKGROUPS,
    Heads,
)

_SUBGROUPS = frozenset({"subgroups"})
_SHORT_CHUNK, _LONG_CHUNK = 64, 128  # keys; of rows that see up to SPLIT_KEYS, and of longer ones
_SPLITS = {"split": SPLIT_KEYS // _SHORT_CHUNK, "long_split": LONG_SPLIT_KEYS // _LONG_CHUNK}
_PARTIAL_BYTES = 64 << 20  # of one pass over the rows: enough to fill a GPU, small enough for every binding
_ALL = 0xFFFF_FFFF


def quads(dims: Dims) -> int:
    """Groups of four values per head."""
    return ceil_div(dims["D"], 4)


def cache_bytes(dims: Dims, rows: int) -> int:
    """Bytes of so many rows of one cache, keys or values."""
    return (4 if dims["cache"] == "f32" else 2) * rows * int(dims["Hkv"]) * 4 * quads(dims)


def pack_heads(array: Array, dims: Dims, rows: int = 0) -> Array:
    """[rows, heads, D] with D padded to a multiple of four, and no fewer than `rows` rows."""
    missing = 4 * quads(dims) - array.shape[-1], max(0, rows - len(array))
    return np.pad(array, ((0, missing[1]), (0, 0), (0, missing[0]))) if any(missing) else array


def operand_bytes(dims: Dims, rows: int) -> dict[str, int]:
    """Buffers of every route; of the caches, so many rows at least."""
    queries = f32(dims["tokens"] * dims["Hq"] * 4 * quads(dims))
    caches = dict.fromkeys(("k_cache", "v_cache"), cache_bytes(dims, rows))
    sinks = {"sinks": f32(dims["Hq"])} if dims["sinks"] else {}
    return {"q": queries, **caches, "batch": batch_bytes(dims["tokens"]), **sinks, "out": queries}


def scale_of(dims: Dims) -> float:
    """What scores are multiplied with."""
    return float(dims["scale"]) if dims["scale"] is not None else 1.0 / float(np.sqrt(dims["D"]))


def score_files(dims: Dims) -> tuple[str, str]:
    """Which keys a row sees, what becomes of scores, and what softmax divides by besides their powers."""
    return "attention/visible", f"attention/sinks_{'heads' if dims['sinks'] else 'none'}"


def score_constants(dims: Dims, unit: float = 1.0) -> dict[str, Constant]:
    """The constants of these files; `unit` is what scores of 1 are in the kernel."""
    window = {"WINDOW": dims["window"]} if dims["window"] else {}
    return window | ({"SOFTCAP": float(dims["softcap"]) * unit} if dims["softcap"] else {})


def _of_the_window(dims: Dims) -> Dims:
    """With the context class of a row that fills the window, and a chunk that begins before it."""
    if not dims["window"]:
        return dims
    context = context_class(dims["window"] + _SHORT_CHUNK, dims["D"])
    return {**dims, "context": min(dims["context"], context, key=CONTEXTS.index)}


def one_workgroup(dims: Dims) -> bool:
    """Does one workgroup take all keys of the one row and a head? A window of one tile is enough, at any depth."""
    return bool(dims["context"] == "single_pass" or 0 < dims["window"] <= SINGLE_PASS_TILE)


def window_of_one_row(dims: Dims) -> int:
    """The window, or 0 where no row of this context class is longer."""
    return 0 if dims["window"] >= last_key(dims["context"], dims["D"]) else int(dims["window"])


def _pool_rows(dims: Dims) -> int:
    return least_pool_rows(dims["paged"], dims["keys"])


def _few_barriers(caps: DeviceCaps) -> bool:
    """Barriers cost a CPU more than the arithmetic between them. attention_single_pass has few, and takes all rows."""
    return caps.policy.prefer_few_barriers and caps.subgroups


def batch_files(dims: Dims) -> tuple[str, ...]:
    """Which rows a dispatch serves, their records, and where their keys lie."""
    return "attention/served_rows", "shared/batch", f"shared/batch_{'pages' if dims['paged'] else 'contiguous'}"


def _kernel(name: str, dims: Dims, *include: str, subgroups: bool = False) -> Kernel:
    served, *batch = batch_files(dims)
    shared = (served, "attention/cache_rows", f"shared/cache_{dims['cache']}", *batch)
    needs = _SUBGROUPS if subgroups else frozenset[str]()
    return Kernel(f"attention/{name}", (*include, *shared, score_files(dims)[0]), needs)


def _grid(rows: int, workgroups: int, enough: int, caps: DeviceCaps) -> int:
    """So many workgroups for each row, for as many rows at once as fill a device; `enough` fill the measured one."""
    return min(rows, ceil_div(filling(enough, caps), workgroups)) * workgroups


# One workgroup per row and query head ------------------------------------------------------------------------


def _single_pass_lanes(dims: Dims, caps: DeviceCaps) -> int:
    """A GPU hides waiting by many threads; a CPU is faster with few."""
    few = max(16, 1 << (quads(dims) - 1).bit_length())
    return few if caps.policy.prefer_few_barriers else min(512, caps.max_invocations)


def _single_pass_lanes_per_key(dims: Dims, caps: DeviceCaps) -> int:
    """Lanes that share a key: of longer heads more, so that more of a key is asked for at once."""
    return min(_one_row(dims).lanes_per_key, max(4, caps.same_subgroup_size))


def single_pass_parts(dims: Dims, caps: DeviceCaps) -> int:
    """Workgroups of a query head, which share its values: with one row of few heads, most processors are idle."""
    if dims["tokens"] > 1 or caps.policy.prefer_few_barriers or quads(dims) % 4:
        return 1
    parts, full = _one_row(dims).parts, filling(FULL_WORKGROUPS, caps)
    return next((each for each in (parts, parts // 2) if each and each * dims["Hq"] <= full), 1)


def _one_row(dims: Dims) -> Heads:
    """What was measured for heads of this width."""
    return next(heads for heads in ONE_ROW if quads(dims) >= heads.quads)


_GIVEN = {"rotary": 0, "q_first": 0, "k_first": 0, "v_first": 0, "eps": 0.0}


def single_pass(dims: Dims, caps: DeviceCaps, skipped: int = 0) -> Dispatch:
    """All keys of a row and a query head by one workgroup."""
    constants = {**single_pass_constants(dims, caps), "ONE_ROW": dims["tokens"] == 1}
    params = {"heads": dims["Hq"], "kv_heads": dims["Hkv"], "max_keys": _ALL, "skipped": skipped}
    return Dispatch(
        _kernel(
            "attention_single_pass",
            dims,
            "attention/queries_given",
            "shared/subgroup_lanes",
            score_files(dims)[1],
            subgroups=True,
        ),
        _grid(dims["tokens"], dims["Hq"] * single_pass_parts(dims, caps), ROW_WORKGROUPS, caps),
        {**params, "scale": scale_of(dims), **_GIVEN},
        constants,
        specialised=is_specialised(dims["tokens"], caps),
        idle=skipped != 0,
    )


def single_pass_constants(dims: Dims, caps: DeviceCaps) -> dict[str, Constant]:
    """The launch configuration of attention_single_pass, and what it computes with scores."""
    lanes, parts = _single_pass_lanes(dims, caps), single_pass_parts(dims, caps)
    columns = quads(dims) // parts
    join = caps.subgroup_size // columns if columns & (columns - 1) == 0 else 1
    keys_at_once = lanes // columns
    one_row = dims["tokens"] == 1
    return {
        "WG": lanes,
        "QUADS": quads(dims),
        "LANES_PER_KEY": _single_pass_lanes_per_key(dims, caps),
        "PARTS": parts,
        "SUBGROUP": caps.subgroup_size,
        "MOST": _most_keys(dims) if one_row else _ALL,
        "JOIN": min(join, keys_at_once) if join and keys_at_once & (keys_at_once - 1) == 0 else 1,
        **score_constants({**dims, "window": window_of_one_row(dims)} if one_row else dims),
    }


def _most_keys(dims: Dims) -> int:
    """The most keys of one row that a workgroup takes, and of pages those before a window that share one with it."""
    if dims["context"] != "single_pass" and one_workgroup(dims):
        return int(dims["window"]) + (PAGE if dims["paged"] else 0)
    return last_key(dims["context"], dims["D"])


# One workgroup per row and kv head ----------------------------------------------------------------------------

GROUPED_KEYS = SPLIT_KEYS  # a row of more would keep the others waiting


def _grouped_workgroups(dims: Dims) -> int:
    """Workgroups of a row: one for four query heads of a kv head."""
    return int(dims["Hkv"] * ceil_div(dims["Hq"] // dims["Hkv"], 4))


def grouped(dims: Dims, caps: DeviceCaps, lanes: int, skipped: int = 0) -> Dispatch | None:
    """All keys of a row by one workgroup for four query heads of a kv head.

    By subgroups of a known size; None where it is not known, or where a head takes too many registers.
    """
    size = caps.same_subgroup_size
    octets = dims["cache"] == "f16" and quads(dims) % 2 == 0
    unit = 2 if octets else 1  # quads that a lane reads at once: 16 bytes, if it can
    lanes_per_key = min(size, max(4, 1 << (ceil_div(quads(dims), 2) - 1).bit_length()))
    units = ceil_div(quads(dims) // unit, max(1, lanes_per_key))
    if lanes_per_key < 4 or units * unit > 4 or lanes % size:
        return None
    constants: dict[str, Constant] = {"WG": lanes, "SUBGROUP": size, "LANES_PER_KEY": lanes_per_key, "OWN": units}
    constants |= {"QUADS": quads(dims), "GROUP": dims["Hq"] // dims["Hkv"], "EACH_ROW": not dims["runs"]}
    constants |= score_constants(dims)
    cache = ("attention/units_octets",) if octets else ("attention/units_quads", f"shared/cache_{dims['cache']}")
    include = ("attention/four_heads", *cache, *batch_files(dims), *score_files(dims))
    return Dispatch(
        Kernel("attention/attention_grouped", include, _SUBGROUPS, unroll=True),
        _grid(dims["tokens"], _grouped_workgroups(dims), ROW_WORKGROUPS if dims["runs"] else _ALL, caps),
        {"kv_heads": dims["Hkv"], "max_keys": _ALL, "skipped": skipped, "scale": scale_of(dims)},
        constants,
        specialised=is_specialised(dims["tokens"], caps),
        idle=skipped != 0,
    )


def _grouped(dims: Dims, caps: DeviceCaps, skipped: int) -> Dispatch | None:
    """With as many lanes as are fastest, or as this device has room for; None where it has not."""
    most = _grouped_lanes(dims, caps)
    for lanes in (lanes for lanes in (512, 256, 128, 64) if lanes <= most):
        dispatch = grouped(dims, caps, lanes, skipped)
        if dispatch and over_limits(LaunchList((dispatch,), {}), caps) is None:
            return dispatch
    return None


def _grouped_lanes(dims: Dims, caps: DeviceCaps) -> int:
    """Those that were measured for so many workgroups for each processor."""
    workgroups, short = dims["tokens"] * _grouped_workgroups(dims), dims["context"] == "single_pass"
    return next(
        each.lanes
        for each in GROUPED
        if workgroups <= filling(each.workgroups, caps) and each.single_pass in (None, short) and dims["D"] >= each.head
    )


# Splits of the keys of a row, and what joins them -------------------------------------------------------------


def _splits(dims: Dims) -> int:
    """Into how many splits the keys of a row are shared out at most."""
    return _SPLITS.get(dims["context"], ceil_div(single_pass_keys(dims["D"]), _SHORT_CHUNK))


def _rows_of_a_pass(dims: Dims, caps: DeviceCaps, splits: int) -> int:
    """Rows whose partial sums fit the scratch buffer; passes of equal size."""
    row = 16 * dims["Hq"] * splits * quads(dims)
    fitting = max(1, min(_PARTIAL_BYTES, caps.max_operand) // row)
    return ceil_div(dims["tokens"], ceil_div(dims["tokens"], fitting))


def split_dispatches(
    dims: Dims, caps: DeviceCaps, split: SplitKernel, splits: int = 0, *, min_keys: int = 0, skipped: int = 0
) -> tuple[tuple[Dispatch, ...], dict[str, int]]:
    """Splits and joins for rows that see `min_keys` or more, in passes over the rows; and the scratch buffers.

    `splits` may be fewer than the context class has, where splits take several chunks: in "long_split".
    """
    splits = splits or _splits(dims)
    rows = _rows_of_a_pass(dims, caps, splits)
    long_rows = dims["context"] == "long_split"
    common: dict[str, Constant] = {"QUADS": quads(dims), "ONE_ROW": dims["tokens"] == 1, "LONG_ROWS": long_rows}
    common |= score_constants(dims)
    keys = _LONG_CHUNK if long_rows else _SHORT_CHUNK
    split_constants = {"GROUP": dims["Hq"] // dims["Hkv"], "KEYS": keys, **split.constants}
    include = ("attention/chunks", "attention/served_rows", "shared/batch", *score_files(dims))
    merge = Kernel("attention/attention_merge", include, unroll=True)
    specialised, idle = is_specialised(dims["tokens"], caps), skipped != 0
    dispatches: list[Dispatch] = []
    for first in range(0, dims["tokens"], rows):
        params: dict[str, int | float] = {"first": first, "rows": rows, "splits": splits}
        params |= {"min_keys": min_keys, "skipped": skipped}
        split_params = {**params, "kv_heads": dims["Hkv"], "scale": scale_of(dims)}
        grid = _grid(rows, dims["Hkv"] * splits, SPLIT_WORKGROUPS, caps)
        merge_grid = _grid(rows, dims["Hq"], ROW_WORKGROUPS, caps)
        dispatches += [
            Dispatch(
                split.kernel, grid, split_params, {**common, **split_constants}, specialised=specialised, idle=idle
            ),
            Dispatch(
                merge,
                merge_grid,
                {**params, "heads": dims["Hq"]},
                {**common, "WG": 256},
                specialised=specialised,
                idle=idle,
            ),
        ]
    sums = rows * dims["Hq"] * splits
    return tuple(dispatches), {"partial": 16 * sums * quads(dims), "stats": 8 * sums}


@dataclass(frozen=True)
class SplitKernel:
    """A kernel that attends to the splits of a row, and its launch configuration."""

    kernel: Kernel
    constants: Mapping[str, Constant]


_SPLIT_INCLUDES = ("attention/split_grid", "attention/chunks")


def split_tree(dims: Dims) -> SplitKernel:
    """Without subgroups."""
    kernel = _kernel("attention_split_tree", dims, *_SPLIT_INCLUDES)
    return SplitKernel(kernel, {"WG": 128 if quads(dims) <= 128 else 256})


def split_quads(dims: Dims, lanes: int) -> SplitKernel:
    """Scores and weights go through workgroup memory: for every format and width."""
    return SplitKernel(_kernel("attention_split", dims, *_SPLIT_INCLUDES, subgroups=True), {"WG": lanes})


def split_octets(dims: Dims, subgroup: int, lanes: int) -> SplitKernel | None:
    """All in registers, by subgroups of a known size; None where keys do not divide among their lanes."""
    octets = dims["D"] // 8
    lanes_per_key = next((size for size in (32, 16, 8, 4) if size <= subgroup and octets % size == 0), 0)
    if dims["cache"] != "f16" or dims["D"] % 8 or not lanes_per_key or octets // lanes_per_key > 2 or lanes % subgroup:
        return None
    include = ("attention/four_heads", *_SPLIT_INCLUDES, *batch_files(dims), score_files(dims)[0])
    kernel = Kernel("attention/attention_split_octets", include, _SUBGROUPS)
    return SplitKernel(kernel, {"WG": lanes, "SUBGROUP": subgroup, "LANES_PER_KEY": lanes_per_key})


def _split(dims: Dims, caps: DeviceCaps) -> SplitKernel:
    """The fastest that this device has room for; the last where none have room, for the reason why."""
    size = caps.same_subgroup_size
    # A subgroup has the same keys in both classes: chunks of twice the keys have twice the subgroups.
    octets = split_octets(dims, size, 256) if size else None
    if octets and _has_room({**dims, "context": "long_split"}, caps, octets):
        return octets if dims["context"] == "long_split" else split_octets(dims, size, 128) or octets
    splits = [split_quads(dims, lanes) for lanes in (256, 128) if quads(dims) <= lanes]
    return next((split for split in splits if _has_room(dims, caps, split)), split_quads(dims, 128))


def _has_room(dims: Dims, caps: DeviceCaps, split: SplitKernel) -> bool:
    dispatches, _ = split_dispatches(dims, caps, split)
    return over_limits(LaunchList(dispatches[:1], {}), caps) is None


# Tiles of rows ------------------------------------------------------------------------------------------------

# Rows and keys of a tile, the fastest first: a GPU that has the memory takes each key for more rows.
_TILES = ((32, 64), (32, 32), (16, 64), (16, 32))


SEES_BEFORE, SEES_IMAGE = "attention/sees_before", "attention/sees_image"  # which keys the rows of a run see


def tile(dims: Dims, caps: DeviceCaps, rows: int, keys: int, sees: str = SEES_BEFORE) -> Dispatch:
    """The rows of runs, so many at a time by one workgroup."""
    return Dispatch(
        _kernel("attention_tile", dims, "attention/segments", sees, score_files(dims)[1]),
        ceil_div(dims["tokens"], rows) * dims["Hq"],
        {"heads": dims["Hq"], "kv_heads": dims["Hkv"], "scale": scale_of(dims)},
        {"ROWS": rows, "KEYS": keys, "QUADS": quads(dims), **score_constants(dims)},
    )


def first_tile(dims: Dims, caps: DeviceCaps, sees: str = SEES_BEFORE) -> Dispatch | None:
    """With the first tile that this device has room for; None where there is none, or no run can be."""
    if not dims["runs"] or dims["tokens"] < RUN_ROWS or _few_barriers(caps):
        return None
    for rows, keys in _TILES:
        dispatch = tile(dims, caps, rows, keys, sees)
        if quads(dims) <= keys and over_limits(LaunchList((dispatch,), {}), caps) is None:
            return dispatch
    return None


# The route ----------------------------------------------------------------------------------------------------


def _splits_of_a_batch(dims: Dims, caps: DeviceCaps) -> int:
    """As many as fill a GPU: more write more sums."""
    enough = max(LEAST_SPLITS, ceil_div(filling(FULL_WORKGROUPS, caps), dims["tokens"] * dims["Hkv"]))
    return min(_splits(dims), enough) if dims["context"] == "long_split" else _splits(dims)


def _all_in_splits(dims: Dims, caps: DeviceCaps) -> bool:
    """Are rows so few that a workgroup for all keys of each would leave too much of the device idle?"""
    tokens = dims["tokens"]
    half_idle = 2 * tokens * _grouped_workgroups(dims) <= processors(caps)
    few = tokens <= filling(SPLIT_ROWS, caps) or (tokens <= SPLIT_ROWS and half_idle)
    return few and bool(dims["context"] != "single_pass")


def _rows_of_a_batch(dims: Dims, caps: DeviceCaps, skipped: int) -> tuple[tuple[Dispatch, ...], dict[str, int]]:
    """What serves several rows: short ones by a workgroup each, longer ones by splits; and the scratch buffers."""
    short, splits = _grouped(dims, caps, skipped), _splits_of_a_batch(dims, caps)
    if short is None:
        short, splits, most = single_pass(dims, caps, skipped), _splits(dims), single_pass_keys(dims["D"])
    else:
        most = 0 if _all_in_splits(dims, caps) else GROUPED_KEYS
    if last_key(dims["context"], dims["D"]) <= most:
        return (short,), {}
    before = (replace(short, params={**short.params, "max_keys": most}),) if most else ()
    after, scratch = split_dispatches(dims, caps, _split(dims, caps), splits, min_keys=most + 1, skipped=skipped)
    return (*before, *after), scratch


def launch_list_with(runs: Dispatch | None, dims: Dims, caps: DeviceCaps) -> LaunchList:
    """The rows of runs by one dispatch, if there is one; the others by what their lengths ask for."""
    dims = _of_the_window(dims)
    buffers = operand_bytes(dims, _pool_rows(dims)) | ({"page_table": f32(1)} if dims["paged"] else {})
    before, skipped = ((), 0) if runs is None else ((runs,), RUN)
    if not caps.subgroups:
        after, scratch = split_dispatches(dims, caps, split_tree(dims), skipped=skipped)
        return LaunchList((*before, *after), {**buffers, **scratch})
    one_row = dims["tokens"] == 1
    if _few_barriers(caps) or (one_row and one_workgroup(dims)):
        return LaunchList((*before, single_pass(dims, caps, skipped)), buffers)
    if one_row:
        after, scratch = split_dispatches(dims, caps, _split(dims, caps))
        return LaunchList(after, {**buffers, **scratch})
    after, scratch = _rows_of_a_batch(dims, caps, skipped)
    return LaunchList((*before, *after), {**buffers, **scratch})


def _launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    return launch_list_with(first_tile(dims, caps), dims, caps)


def _unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    lanes = min(256, caps.max_invocations)
    return f"D must be at most {4 * lanes}, D is {dims['D']}" if quads(dims) > lanes else None


def packers(names: tuple[str, ...], rows: Callable[[Dims], int] = lambda dims: 0) -> dict[str, Packer]:
    """Operands with padded heads, and with no fewer rows than so many."""

    def packer(name: str) -> Packer:
        return lambda array, dims, caps: {name: pack_heads(array, dims, rows(dims))}

    return {name: packer(name) for name in names}


PACK_CACHES = packers(("k_cache", "v_cache"), _pool_rows)
PACK = packers(("q",)) | PACK_CACHES
ROUTES: tuple[Route, ...] = (Route("attention", "flash", _launch_list, _unsupported_reason, PACK),)
