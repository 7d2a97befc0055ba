"""The shapes every route is checked on: operands, expected results, and which tolerance applies.

One table serves wgpu (test_kernels) and Dawn (test_dawn): a new op needs a row in `operands.MAKERS` and some
cases, a new route nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.graph import resolve
from shaderlm.graph.ops import FORMATS
from shaderlm.kernels import Route

from .operands import MAKERS, Arrays
from .weights import whole_k

LONG_FLOPS = 500_000_000
# The shapes matter to the kernels of attention, not to what a cache is made of: f32 has them all.
_HEADS = ("Hq", "Hkv", "D", "S", "C", "pos")
_F16_SHAPES = {
    (6, 2, 8, 4, 16, 0), (9, 3, 64, 1, 300, 299), (9, 3, 64, 37, 64, 11), (1, 1, 1, 1, 1, 0), (7, 1, 5, 1, 70, 64),
    (10, 5, 80, 9, 40, 30), (3, 3, 130, 2, 33, 31), (2, 1, 512, 1, 34, 32), (32, 8, 128, 1, 2100, 2099),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A shape of an op."""

    op: str
    given: tuple[tuple[str, Any], ...]

    @property
    def dims(self) -> dict[str, Any]:
        return resolve(self.op, dict(self.given))

    @property
    def flops(self) -> int:
        d = self.dims
        if "M" in d:
            return int(2 * d["M"] * d["K"] * d["N"])
        if "S" in d:
            return int(4 * d["S"] * d["Hq"] * d["D"] * (d["pos"] + (d["S"] + 1) / 2))
        return 0

    @property
    def long(self) -> bool:
        """Whether it runs with --all only: it takes a software adapter too long, or says what others say too."""
        repeated = dict(self.given).get("cache") == "f16" and self.op == "sdpa_kv"
        return self.flops > LONG_FLOPS or (repeated and tuple(self.dims[name] for name in _HEADS) not in _F16_SHAPES)

    @property
    def name(self) -> str:
        return f"{self.op}-" + "-".join(f"{key}{value}" for key, value in self.given)


def _cases(op: str, names: str, rows: Iterable[tuple[Any, ...]]) -> list[Case]:
    keys = names.split()
    return [Case(op, tuple(zip(keys, row, strict=False))) for row in rows]


_WIDTHS = (1, 2, 32, 63, 64, 65, 100, 128, 130, 252, 256, 576, 896, 1028, 2048, 4096, 8192, 12004)
_NORM_SHAPES = [(3, width) for width in _WIDTHS] + [(1, 576), (1, 4096), (1024, 64), (257, 130), (70_001, 4)]

_LINEAR_SHAPES = ((1, 576, 97), (5, 96, 67), (1, 32, 1), (1, 2048, 130), (1, 64, 4100), (1, 4160, 41), (66, 64, 65))
# The kernels are concatenated with a format's functions: the shapes matter to them, not to the format.
_ALL_SHAPES = ("f32", "q8_0", "q4_0", "q4_1")
INT16 = ("q8_0", "q4_0", "q4_1", "q4_k", "q6_k")  # the formats that are multiplied with inputs of 16 bits

CASES: list[Case] = [
    *(case for op in ("rms_norm", "rms_norm_mul", "add_rms_norm") for case in _cases(op, "rows width", _NORM_SHAPES)),
    *_cases(
        "linear_q4gsw",
        "M K N group_size bias scales",
        [
            # The shapes of the specification.
            (1, 2048, 2048), (1, 2048, 512), (1, 2048, 8192), (128, 2048, 8192), (130, 4096, 2056), (96, 2048, 256),
            (70, 1024, 136), (4096, 2048, 512), (1, 2048, 128256), (1, 8192, 2048), (128, 8192, 2048),
            # Primes and edges: of K against words, blocks and groups, of M and N against tiles.
            (1, 32, 1), (1, 64, 7, 32, True), (1, 8, 5, 8), (1, 7, 3, 4), (1, 100, 13, 20, True), (1, 33, 17, 11),
            (1, 1056, 129, 32, True, "f16"), (1, 2080, 31, 32), (1, 4224, 67, 64, False, "f16"), (1, 544, 4099, 32, True),
            (1, 96, 4097, 96), (1, 256, 257, 128), (3, 64, 5), (4, 40, 64, 8), (5, 96, 63, 32, True), (17, 100, 65, 4),
            (63, 64, 61, 64, True, "f16"), (64, 128, 64), (65, 160, 67, 32, True), (129, 32, 3), (2, 31, 2, 31, True),
            (257, 32, 129, 16),
        ],
    ),
    *_cases(
        "linear",
        "M K N format bias",
        [
            (M, whole_k(K, kind), N, kind, i % 2 == 0)
            for kind in FORMATS
            for i, (M, K, N) in enumerate(_LINEAR_SHAPES if kind in _ALL_SHAPES else _LINEAR_SHAPES[:2])
        ] + [(1, 37, 11, "f32", False), (3, 101, 7, "f16", False), (300, 64, 70, "q8_0", False),
           # What large models' shapes are cut into: tall tiles, long stages, short and middling teams.
           (1025, 32, 7240, "f32", False), (1025, 32, 7240, "q4_0", False), (1, 4128, 4099, "q4_0", True),
           (1, 4128, 4099, "q8_0", True), (1, 64, 16400, "q4_0", True), (1, 32, 49160, "q4_0", True),
           (1, 1056, 19840, "q4_0", True), (1, 2080, 19840, "q4_0", True), (1, 2080, 7001, "q4_0", True),
           (65, 32, 8300, "q4_0", True)],
    ),
    *(
        case
        for odd, op in enumerate(("linear_add", "linear_silu_mul"))
        for case in _cases(
            op,
            "M K N format bias",
            # Every format, at M = 1 with one of the two and at M = 5 with the other.
            [
                (M, whole_k(96, kind), 70, kind, M == 1)
                for i, kind in enumerate(FORMATS) for M in (1 if i % 2 == odd else 5,)
            ] + [(66, 32, 130, "q4_1", True)],
        )
    ),
    *(
        case
        for odd, op in enumerate(("rms_norm_linear", "rms_norm_linear_silu_mul"))
        for case in _cases(
            op,
            "M K N format bias eps",
            [(1, whole_k(96, kind), 70, kind, i % 2 == odd, 1e-5) for i, kind in enumerate(INT16)]
            # Short and long teams, one stage and several.
            + [(1, 2048, 38, "q4_0", True, 1e-6), (1, 4160, 34, "q8_0", False, 1e-6), (1, 64, 16390, "q4_0", False, 1e-6)],
        )
    ),
    *_cases(
        "rms_norm_linear_rope_kv_write",
        "M K N format bias eps Hq Hkv D C rotary positions cache",
        [(1, whole_k(96, kind), 40, kind, kind == "q4_0", 1e-5, 3, 1, 8, 5, 4, 7, "f32") for kind in ("q4_0", "q6_k")]
        + [(1, 576, 960, "q4_1", False, 1e-5, 9, 3, 64, 17, 64, 17, cache) for cache in ("f32", "f16")],
    ),
    # Fixed point, long rows, tall tiles.
    *_cases("linear_add", "M K N format bias", [(1, 64, 4102, "q8_0", True)]),
    *_cases(
        "linear_silu_mul",
        "M K N format bias",
        [(1, 64, 4102, "q4_0", True), (1, 4128, 38, "q4_1", True), (1025, 32, 7240, "q4_0", False)],
    ),
    *_cases(
        "embedding",
        "T N K format",
        [(T, N, whole_k(K, kind), kind) for kind in FORMATS for T, N, K in ((1, 3, 32), (7, 129, 576), (65, 11, 64))]
        + [(5, 9, 35, "f32"), (4, 6, 100, "f16")],
    ),
    *_cases(
        "sdpa_kv",
        "Hq Hkv D S C pos cache scale",
        [
            shape
            for cache in ("f32", "f16")
            for shape in (
                (6, 2, 8, 4, 16, 0, cache), (4, 4, 16, 3, 8, 0, cache), (8, 4, 4, 5, 16, 0, cache), (6, 2, 8, 2, 16, 2, cache),
                (24, 8, 128, 128, 256, 0, cache), (32, 8, 64, 1, 4096, 4095, cache), (32, 8, 64, 1, 8192, 8191, cache),
                (32, 8, 64, 128, 512, 0, cache), (32, 8, 64, 512, 512, 0, cache), (32, 8, 64, 2048, 2048, 0, cache),
                (9, 3, 64, 1, 300, 299, cache), (9, 3, 64, 37, 64, 11, cache), (9, 3, 64, 1, 1, 0, cache),
                (1, 1, 1, 1, 1, 0, cache), (7, 1, 5, 1, 70, 64, cache), (20, 2, 12, 1, 129, 128, cache),
                (10, 5, 80, 9, 40, 30, cache, 0.25), (3, 3, 130, 2, 33, 31, cache), (2, 1, 512, 1, 34, 32, cache),
                (16, 1, 256, 1, 65, 63, cache), (32, 8, 128, 1, 512, 511, cache), (32, 8, 128, 1, 2100, 2099, cache), (32, 8, 128, 1, 64, 63, cache),
                (32, 8, 64, 1, 64, 63, cache), (32, 8, 64, 1, 700, 699, cache),
            )
        ] + [
            (2, 1, 516, 2, 3, 1, "f32"),
            # Contexts that models' decode steps are cut by.
            (9, 3, 64, 1, 1024, 1023, "f32"), (9, 3, 64, 1, 4096, 4095, "f32"), (32, 8, 64, 1, 128, 127, "f32"),
            (32, 8, 128, 1, 128, 127, "f32"), (32, 8, 128, 1, 1, 0, "f32"),
        ],
    ),
    *_cases(
        "attention",
        "Hq Hkv D S C pos cache",
        [(9, 3, 64, 1, 300, 170, "f32"), (9, 3, 64, 37, 64, 11, "f32"), (6, 2, 8, 4, 16, 0, "f16")],
    ),
    *_cases(
        "kv_write",
        "Hq Hkv D S C pos cache",
        [(1, 1, 1, 1, 1, 0, "f32"), (9, 3, 64, 5, 40, 33, "f32"), (6, 2, 10, 4, 16, 3, "f16")],
    ),
    *_cases(
        "rope_kv_write",
        "T Hq Hkv D C rotary positions interleaved cache q_first q_stride k_first k_stride v_first v_stride",
        [
            (1, 9, 3, 64, 17, 64, 17, True, "f32"), (5, 6, 2, 8, 9, 8, 12, False, "f32"),
            (3, 4, 4, 12, 7, 4, 7, True, "f16"), (7, 2, 1, 20, 30, 8, 30, False, "f16"),
            (4, 9, 3, 64, 70, 64, 70, True, "f32", 0, 960, 576, 960, 768, 960),
            (2, 4, 2, 16, 5, 16, 5, False, "f16", 0, 96, 64, 96, 0, 32),
        ],
    ),
    *_cases("columns", "rows width first count", [(1, 1, 0, 1), (3, 70, 13, 57), (65, 96, 64, 32), (1, 70_001, 5, 69_996)]),
    *_cases(
        "rope",
        "T H D rotary positions interleaved",
        [(T, H, D, rotary, T, order) for order in (False, True) for T, H, D, rotary in (
            (1, 1, 2, 2), (5, 3, 16, 12), (1, 9, 64, 64), (70, 2, 130, 64), (3, 32, 128, 128),
        )],
    ),
    *(
        case
        for op in ("add", "mul", "silu_mul")
        for case in _cases(op, "count period", [(1,), (4,), (255,), (1028, 4), (1530, 90), (576 * 7, 576), (70_000,)])
    ),
    *_cases("copy", "count", [(4,), (1020,), (70_000,)]),
    *_cases("fma_chain", "count rounds", [(16, 1), (4112, 2), (65_536, 1)]),
    *_cases("argmax", "rows width", [(1, 1), (3, 63), (2, 64), (5, 65), (300, 7), (1, 2048), (2, 2049), (1, 49152), (3, 128256)]),
    # Dawn runs the first: one where every filter is on.
    *_cases("sample", "width", [(1000,), (1,), (2,), (63,), (256,), (257,), (4099,), (49152,), (128256,)]),
    *_cases("next_position", "by", [(1,), (3,)]),
]  # fmt: skip


def make(case: Case) -> tuple[Arrays, Arrays]:
    """Operands and expected results, the same for every run of a case."""
    return MAKERS[case.op](np.random.default_rng(zlib.crc32(case.name.encode())), case.dims)


# Results -------------------------------------------------------------------------------------------------


def tolerance(case: Case, route: Route, output: str) -> str:
    """The row of the table of tolerances for one result of a case."""
    if case.op.endswith("norm") or case.op == "rms_norm_mul":
        return "norm"
    if "linear" in case.op:
        if case.dims.get("cache") == "f16" and output != "out":
            return "attention f16"
        if not route.exact and not route.fast:
            return "linear f16" if case.op == "linear_q4gsw" else "linear f16, formats"
        return "linear deep" if case.dims["K"] >= 8192 else "linear"
    if case.op in ("sdpa_kv", "attention"):
        return "exact" if output != "out" else "attention f16" if case.dims["cache"] == "f16" else "attention"
    if case.op == "rope_kv_write":
        return "attention f16" if output == "k_cache" and case.dims["cache"] == "f16" else "pointwise"
    moves = ("embedding", "copy", "argmax", "sample", "columns", "kv_write", "next_position")
    return "exact" if case.op in moves else "pointwise"


def result(case: Case, name: str, raw: NDArray[np.uint8], expected: NDArray[Any]) -> NDArray[Any]:
    """Raw bytes of an output as an array of the expected shape, padding of the last axis taken off."""
    dtype: Any = np.uint32 if case.op in ("argmax", "sample", "next_position") else np.float32
    if name.endswith("_cache"):
        dtype = expected.dtype
    wide: NDArray[Any] = raw.view(dtype).reshape(*expected.shape[:-1], -1)
    return wide[..., : expected.shape[-1]]
