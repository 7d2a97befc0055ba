"""Shapes of the ops that read a token batch: dims, and for attention the rows of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .attention_operands import Stretch

Row = tuple[str, tuple[tuple[str, Any], ...], tuple[Stretch, ...]]

# Query heads, kv heads, values of a head, rows, keys of the last row; f32 and f16, a scale for some.
_ONE_SEQUENCE: tuple[tuple[Any, ...], ...] = (
    (6, 2, 8, 4, 4), (4, 4, 16, 3, 3), (8, 4, 4, 5, 5), (6, 2, 8, 2, 4), (24, 8, 128, 128, 128), (32, 8, 64, 1, 4096),
    (32, 8, 64, 1, 8192), (32, 8, 64, 128, 128), (32, 8, 64, 512, 512), (32, 8, 64, 2048, 2048), (9, 3, 64, 1, 300),
    (9, 3, 64, 37, 48), (9, 3, 64, 1, 1), (1, 1, 1, 1, 1), (7, 1, 5, 1, 65), (20, 2, 12, 1, 129),
    (10, 5, 80, 9, 39, 0.25), (3, 3, 130, 2, 33), (2, 1, 512, 1, 33), (16, 1, 256, 1, 64), (32, 8, 128, 1, 512),
    (32, 8, 128, 1, 2100), (32, 8, 128, 1, 64), (32, 8, 64, 1, 64), (32, 8, 64, 1, 700),
)  # fmt: skip
# The shapes matter to the kernels, not to what a cache is made of: these have one of f16 without --all.
F16_SHAPES = {(9, 3, 64, 1, 300), (9, 3, 64, 37, 48), (7, 1, 5, 1, 65), (10, 5, 80, 9, 39), (32, 8, 128, 1, 2100)}
_MORE: tuple[tuple[Any, ...], ...] = (
    (2, 1, 516, 2, 3), (9, 3, 64, 1, 1024), (9, 3, 64, 1, 4096), (32, 8, 64, 1, 128), (32, 8, 128, 1, 128),
    (32, 8, 128, 1, 1), (9, 3, 64, 1, 171), (2, 1, 512, 9, 33), (1, 1, 256, 17, 20), (2, 2, 4, 1, 8200),
    (35, 1, 4, 3, 70), (4, 1, 128, 4, 300),
)  # fmt: skip
# With --all only: smaller shapes here, or batches over pages, have these heads and classes of contexts too.
REPEATED = {
    (4, 4, 16, 3, 3), (8, 4, 4, 5, 5), (24, 8, 128, 128, 128), (32, 8, 64, 128, 128), (32, 8, 64, 1, 4096),
    (32, 8, 64, 1, 8192), (9, 3, 64, 1, 4096), (2, 1, 512, 9, 33), (1, 1, 256, 17, 20),
}  # fmt: skip

# Edges of pages, rows alone.
_EDGES = ((0, 0, 1), (1, 126, 1), (2, 127, 1), (3, 128, 1))
# A run that crosses a page and tiles of keys, rows that belong to none, and others of the same sequences.
RUNS = ((0, 120, 9), (1, 3, 1), (2, 129, 2), (1, 9, 1), (3, 0, 8))
# Tiles of rows with several runs, which begin and end anywhere in them.
MANY = ((0, 0, 8), (1, 5, 1), (2, 60, 40), (3, 250, 10), (4, 63, 7), (5, 31, 1), (3, 300, 2), (6, 1, 19))
_SPLIT = ((0, 600, 1), (1, 20, 1), (2, 319, 1), (3, 320, 1), (4, 2047, 1))
_SPLIT_RUNS = ((0, 700, 1), (1, 11, 1), (2, 313, 9))
_LONG = ((0, 8300, 1), (1, 2500, 1), (2, 1000, 1), (3, 40, 1))
_LONG_RUNS = ((0, 2500, 1), (1, 40, 1), (2, 2043, 9))
_OF_MODELS = ((3, 1, 64), (4, 1, 64), (4, 1, 128))

# Heads, rows that there is room for, context class, rows of the batch.
_BATCHES: tuple[tuple[tuple[int, int, int], int, str, tuple[Stretch, ...], str], ...] = (
    *(((9, 3, 64), 1, "single_pass", ((0, position, 1),), "f32") for position in (0, 127, 128, 319)),
    ((9, 3, 64), 1, "single_pass", ((0, 129, 1),), "f16"),
    ((6, 2, 8), 4, "single_pass", _EDGES, "f32"),
    ((6, 2, 8), 7, "single_pass", _EDGES, "f16"),
    ((4, 1, 80), 6, "single_pass", _EDGES, "f32"),
    ((6, 2, 8), 25, "single_pass", RUNS, "f32"),
    ((7, 1, 64), 21, "single_pass", RUNS, "f16"),
    ((1, 1, 256), 22, "single_pass", RUNS, "f32"),
    ((2, 1, 512), 21, "single_pass", RUNS, "f32"),
    ((4, 4, 4), 90, "single_pass", MANY, "f32"),
    ((3, 1, 128), 24, "split", RUNS, "f32"),
    ((16, 1, 20), 88, "single_pass", MANY, "f16"),
    ((4, 2, 16), 8, "split", _SPLIT, "f32"),
    ((4, 2, 16), 1, "split", ((0, 700, 1),), "f32"),
    ((6, 2, 8), 20, "split", _SPLIT_RUNS, "f32"),
    ((2, 1, 4), 5, "long_split", _LONG, "f32"),
    ((2, 2, 4), 1, "long_split", ((0, 8255, 1),), "f16"),
    ((2, 1, 4), 1, "long_split", ((0, 2048, 1),), "f32"),
    # The heads of models, a prompt beside rows of every length.
    *((heads, 16, "split", _SPLIT_RUNS, "f32") for heads in _OF_MODELS),
    *((heads, 12, "long_split", _LONG_RUNS, "f32") for heads in _OF_MODELS),
    # The same with a cache as models have it.
    ((4, 1, 64), 1, "split", ((0, 600, 1),), "f16"),
    ((4, 1, 64), 1, "long_split", ((0, 2100, 1),), "f16"),
    ((4, 1, 128), 1, "single_pass", ((0, 255, 1),), "f16"),
    ((4, 1, 128), 1, "split", ((0, 300, 1),), "f16"),
    ((4, 1, 128), 1, "long_split", ((0, 2100, 1),), "f16"),
)


# Window, cap of scores, sinks; heads, rows, class, rows of the batch, cache. Rows are shorter and longer than windows.
_WINDOWS = ((0, 5, 1), (1, 127, 1), (2, 128, 1), (3, 700, 1), (4, 300, 12), (5, 0, 9))
_SCORES: tuple[tuple[int, float, bool, tuple[int, int, int], int, str, tuple[Stretch, ...], str], ...] = (
    (130, 0.0, False, (4, 2, 8), 1, "split", ((0, 400, 1),), "f32"),
    (600, 0.0, True, (4, 2, 8), 1, "split", ((0, 1400, 1),), "f32"),
    (512, 0.0, False, (4, 2, 8), 1, "long_split", ((0, 2400, 1),), "f32"),  # a tile of keys, from the middle of a page
    (40, 3.0, True, (6, 2, 8), 27, "split", _WINDOWS, "f32"),
    (0, 2.0, False, (3, 1, 64), 25, "split", _WINDOWS, "f32"),
    (0, 0.0, True, (4, 1, 64), 25, "split", _WINDOWS, "f16"),
)


def _scored() -> Iterator[Row]:
    names = ("window", "softcap", "sinks", "Hq", "Hkv", "D", "tokens", "context", "cache", "paged")
    for window, softcap, sinks, heads, tokens, context, stretches, cache in _SCORES:
        values = (window, softcap, sinks, *heads, tokens, context, cache, True)
        yield "attention", tuple(zip(names, values, strict=True)), stretches


def _one_sequence() -> Iterator[Row]:
    names = ("Hq", "Hkv", "D", "tokens", "keys", "cache", "scale")
    shapes = [(shape, "f32") for shape in (*_ONE_SEQUENCE, *_MORE)] + [(shape, "f16") for shape in _ONE_SEQUENCE]
    for (hq, hkv, d, tokens, keys, *scale), cache in shapes:
        yield "attention", tuple(zip(names, (hq, hkv, d, tokens, keys, cache, *scale), strict=False)), ()


def _batches() -> Iterator[Row]:
    names = ("Hq", "Hkv", "D", "tokens", "context", "cache", "paged")
    for heads, tokens, context, stretches, cache in _BATCHES:
        yield "attention", tuple(zip(names, (*heads, tokens, context, cache, True), strict=True)), stretches


def _rows(op: str, names: str, rows: Iterable[tuple[Any, ...]]) -> Iterator[Row]:
    for row in rows:
        yield op, tuple(zip(names.split(), row, strict=False)), ()


ROWS: list[Row] = [
    *_one_sequence(),
    *_batches(),
    *_scored(),
    *_rows(
        "kv_write",
        "tokens Hkv D cache",
        [(1, 1, 1, "f32"), (5, 3, 64, "f32"), (4, 2, 10, "f16"), (1, 2, 8, "f16"), (40, 3, 12, "f32")],
    ),
    *_rows(
        "rms_norm_rope_kv_write",
        "tokens Hq Hkv D rotary interleaved cache q_first q_stride k_first k_stride v_first v_stride eps",
        [
            (1, 4, 1, 256, 256, False, "f16", 0, 1536, 1024, 1536, 1280, 1536, 1e-6), (5, 6, 2, 8, 8, False, "f32"),
            (3, 4, 4, 12, 4, True, "f16"), (2, 3, 1, 260, 8, False, "f32"),
            (4, 9, 3, 64, 48, False, "f32", 0, 960, 576, 960, 0, 192, 0.5), (1, 4, 2, 128, 128, False, "f32"),
        ],
    ),
    *_rows(
        "rms_norm_rope",
        "tokens H D rotary interleaved first stride eps",
        [
            (1, 8, 256, 256, False), (5, 3, 8, 8, False, 4, 40, 0.5), (3, 4, 12, 4, True),
            (4, 2, 512, 48, False, 0, 1200),
        ],
    ),
    *_rows(
        "rms_norm_rope_attention",
        "tokens Hq Hkv D rotary interleaved cache keys context window softcap scale "
        "q_first q_stride k_first k_stride v_first v_stride",
        [
            (1, 4, 1, 256, 256, False, "f16", 77, "single_pass", 0, 0.0, 0.0625, 0, 1536, 1024, 1536, 1280, 1536),
            (1, 4, 1, 256, 256, False, "f32", 1, "single_pass"), (1, 6, 2, 8, 8, False, "f32", 130, "single_pass", 40),
            (1, 8, 2, 128, 128, False, "f16", 256, "single_pass"),
            (1, 4, 4, 16, 4, True, "f16", 320, "single_pass", 0, 5.0),
            (1, 3, 1, 64, 48, False, "f32", 310, "single_pass", 305),
            # A window of one tile, at any depth.
            (1, 2, 1, 128, 128, False, "f16", 1300, "split", 512),
            (1, 6, 2, 8, 8, False, "f32", 2300, "long_split", 40),
        ],
    ),
    *_rows(
        "rms_norm_rope_attention_linear",
        "tokens Hq Hkv D N format bias epilogue interleaved cache keys context window softcap scale "
        "q_first q_stride k_first k_stride v_first v_stride",
        [
            (1, 4, 1, 256, 70, "q4_0", False, "none", False, "f16", 77, "single_pass", 0, 0.0, 0.0625,
             0, 1536, 1024, 1536, 1280, 1536),
            (1, 4, 1, 256, 9, "q8_0", False, "add", False, "f16", 1, "single_pass"),
            (1, 8, 2, 128, 33, "q4_1", True, "add", False, "f16", 256, "single_pass", 200),
            (1, 3, 3, 64, 40, "q4_0", True, "none", True, "f16", 320, "single_pass", 0, 5.0),
            (1, 2, 1, 128, 21, "q4_0", False, "none", False, "f16", 64, "single_pass"),
            (1, 2, 1, 64, 21, "q8_0", False, "none", False, "f16", 65, "single_pass", 3),
            (1, 2, 1, 64, 21, "q8_0", False, "none", False, "f16", 256, "single_pass", 3),  # past the first keys
            (1, 4, 2, 128, 10, "q4_0", False, "none", False, "f16", 193, "single_pass", 64),
            (1, 1, 1, 64, 10, "q4_0", False, "none", False, "f16", 129, "single_pass", 1),
            (1, 4, 1, 256, 10, "q4_0", False, "none", False, "f16", 200, "single_pass", 70),
            (1, 2, 1, 64, 10, "q4_0", False, "none", False, "f16", 400, "split", 512),  # before the window is full
            (1, 2, 1, 64, 10, "q4_0", False, "none", False, "f16", 2300, "long_split", 512),
        ],
    ),
    *_rows(
        "rope_kv_write",
        "tokens Hq Hkv D rotary interleaved cache q_first q_stride k_first k_stride v_first v_stride",
        [
            (1, 9, 3, 64, 64, True, "f32"), (5, 6, 2, 8, 8, False, "f32"), (3, 4, 4, 12, 4, True, "f16"),
            (7, 2, 1, 20, 8, False, "f16"), (4, 9, 3, 64, 64, True, "f32", 0, 960, 576, 960, 768, 960),
            (2, 4, 2, 16, 16, False, "f16", 0, 96, 64, 96, 0, 32),
        ],
    ),
    *_rows(
        "rope",
        "tokens H D rotary interleaved",
        [
            (*shape, order)
            for order in (False, True)
            for shape in ((1, 1, 2, 2), (5, 3, 16, 12), (1, 9, 64, 64), (70, 2, 130, 64), (3, 32, 128, 128))
        ],
    ),
]  # fmt: skip
