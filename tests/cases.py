"""The shapes every route is checked on: operands, expected results, and which tolerance applies.

One table serves running kernels (test_kernels) and compiling them by Tint (test_dawn): a new op needs a row in `operands.MAKERS` and some
cases, a new route nothing if a case reaches it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.formats.weight_formats import WEIGHT_FORMATS
from shaderlm.gpu import WEBGPU_DEFAULT
from shaderlm.graph import resolve
from shaderlm.kernels import Route

from .attention_cases import F16_SHAPES, REPEATED
from .attention_cases import ROWS as ATTENTION
from .attention_operands import Stretch
from .operands import MAKERS, Arrays
from .sampling_operands import numbers
from .weights import whole_k

LONG_FLOPS = 400_000_000
# Ops that share kernels; the matrix products share them by format, and the rest are small.
_FAMILIES = {
    "rms_norm": "norm", "rms_norm_mul": "norm", "add_rms_norm": "norm", "layer_norm": "norm", "rms_norm_add_rms_norm": "norm",
    "linear_q4gsw": "q4gsw",
    "attention": "attention", "kv_write": "attention", "rope_kv_write": "attention",
    "rms_norm_rope_kv_write": "attention", "rms_norm_rope_attention": "attention", "rms_norm_rope_attention_linear": "attention",
    "rms_norm_rope": "attention",
    "sample": "sampling", "argmax": "sampling",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A shape of an op, and for attention over pages the rows of its batch."""

    op: str
    given: tuple[tuple[str, Any], ...]
    stretches: tuple[Stretch, ...] = ()

    @property
    def dims(self) -> dict[str, Any]:
        return resolve(self.op, dict(self.given))

    @property
    def flops(self) -> int:
        d = self.dims
        if "K" in d and "N" in d and self.op not in ("embedding", "add_positions"):
            return int(2 * d["tokens"] * d["K"] * d["N"])
        if self.op == "attention":
            one = ((0, max(d["keys"] - d["tokens"], 0), d["tokens"]),)
            pairs = sum(rows * (first + (rows + 1) / 2) for _, first, rows in self.stretches or one)
            return int(4 * d["Hq"] * d["D"] * pairs)
        return 0

    @property
    def long(self) -> bool:
        """Whether it runs with --all only: it takes a software adapter too long, or says what others say too."""
        d = self.dims
        if self.op == "attention" and not self.stretches:
            shape = tuple(d[name] for name in ("Hq", "Hkv", "D", "tokens", "keys"))
            repeated = shape in REPEATED or (d["cache"] == "f16" and shape not in F16_SHAPES)
        else:  # test_grids_fold has every kernel in more workgroups than a side holds
            repeated = d.get("tokens", 0) > WEBGPU_DEFAULT.max_workgroups
        return repeated or self.flops > LONG_FLOPS

    @property
    def group(self) -> str:
        """The kernels that it shares with others: a worker compiles them once. A format makes another kernel."""
        if self.op == "linear":
            return f"kernels linear {self.dims['format']}"
        if self.dims.get("paged") and self.op == "attention":
            return "kernels paged attention"
        return f"kernels {_FAMILIES.get(self.op, 'pointwise')}"

    @property
    def name(self) -> str:
        rows = [f"{sequence}.{first}+{rows}" for sequence, first, rows in self.stretches]
        return "-".join([self.op, *(f"{key}{value}" for key, value in self.given), *rows])


def _cases(op: str, names: str, rows: Iterable[tuple[Any, ...]]) -> list[Case]:
    keys = names.split()
    return [Case(op, tuple(zip(keys, row, strict=False))) for row in rows]


_WIDTHS = (1, 2, 32, 63, 64, 65, 100, 128, 130, 252, 256, 576, 896, 1028, 2048, 4096, 8192, 12004)
_NORM_SHAPES = [(3, width, 1e-6) for width in _WIDTHS] + [
    (1, 576, 1e-6),
    (1, 4096, 1e-6),
    (1024, 64, 0.5),
    (257, 130, 0.5),
]

_LINEAR_SHAPES = ((1, 576, 97), (5, 96, 67), (1, 32, 1), (1, 2048, 130), (1, 64, 4100), (1, 4160, 41), (66, 64, 65))
# The kernels are concatenated with a format's functions: the shapes matter to them, not to the format.
_ALL_SHAPES = ("f32", "q8_0", "q4_0", "q4_1")
INT16 = (
    "q8_0",
    "q4_0",
    "q4_1",
    "q4_k",
    "q6_k",
    "mxfp4",
    "iq4_nl",
    "iq4_xs",
    "q3_k",
    "q2_k",
)  # the formats that are multiplied with inputs of 16 bits

CASES: list[Case] = [
    *(case for op in ("rms_norm", "rms_norm_mul", "add_rms_norm") for case in _cases(op, "tokens width eps", _NORM_SHAPES)),
    *_cases("rms_norm_mul", "tokens width", [(70_001, 4)]),  # more workgroups than a side of the grid holds
    *_cases("rms_norm_mul", "tokens heads width batched", [(5, 3, 64, True), (4, 1, 130, True)]),
    *_cases(
        "rms_norm_mul",
        "tokens heads width batched residual",
        [(5, 3, 64, True, True), (3, 1, 130, False, True), (1, 1, 1152, False, True), (2, 1, 12004, False, True)],
    ),
    *_cases(
        "rms_norm_mul",
        "tokens heads width batched residual scaled",
        [(5, 1, 64, True, True, True), (3, 1, 130, False, True, True), (1, 1, 2560, False, True, True)],
    ),
    *_cases(
        "layer_norm",
        "tokens heads width bias batched",
        [(3, 1, 1), (3, 1, 63, True), (2, 1, 576, True), (3, 1, 1028), (2, 1, 4100, True), (5, 3, 64, True, True)],
    ),
    *_cases(
        "rms_norm_add_rms_norm",
        "tokens width eps",
        [(3, 4), (2, 252), (1, 576), (1, 1152, 0.5), (2, 1028), (1, 4096), (2, 4100), (3, 260)],
    ),
    *_cases("rms_norm_add_rms_norm", "tokens heads width batched", [(5, 1, 64, True), (6, 2, 36, True)]),
    *_cases("add_rms_norm", "tokens heads width batched", [(5, 1, 64, True), (6, 2, 33, True)]),
    *_cases(
        "linear_q4gsw",
        "tokens K N group_size bias scales",
        [
            # Shapes of language models.
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
        "tokens K N format bias",
        [
            (M, whole_k(K, kind), N, kind, i % 2 == 0)
            for kind in WEIGHT_FORMATS
            for i, (M, K, N) in enumerate(_LINEAR_SHAPES if kind in _ALL_SHAPES else _LINEAR_SHAPES[:2])
        ] + [(1, 37, 11, "f32", False), (3, 101, 7, "f16", False), (1, 16, 9, "f32", True), (5, 20, 6, "bf16", False), (2, 7, 33, "f16", True), (300, 64, 70, "q8_0", False),
           # What large models' shapes are cut into: tall tiles, long stages, few lanes per row and some more.
           (1025, 32, 7240, "q4_0", False), (1, 4128, 4099, "q4_0", True), (1, 64, 16400, "q4_0", True), (1, 32, 49160, "q4_0", True),
           (1, 1056, 19840, "q4_0", True), (1, 2080, 19840, "q4_0", True), (1, 2080, 7001, "q4_0", True),
           (65, 32, 8300, "q4_0", True)],
    ),
    *(
        case
        for odd, epilogue in enumerate(("add", "silu_mul"))
        for case in _cases(
            "linear",
            "tokens K N format bias epilogue batched",
            # Every format, at one token with one of the two and at five with the other.
            [
                (tokens, whole_k(96, kind), 70, kind, tokens == 1, epilogue)
                for i, kind in enumerate(WEIGHT_FORMATS) for tokens in (1 if i % 2 == odd else 5,)
            ] + [(66, 32, 130, "q4_1", True, epilogue), (70, 64, 66, "q8_0", True, epilogue, True),
                 (4, 64, 66, "q4_0", True, epilogue, True)]
            # Each size of tiles where there are four processors: 32 × 64, 16 × 64 and 16 × 32.
            + [(tokens, 64, 100, "q4_0", True, epilogue) for tokens in (45, 20, 5)],
        )
    ),
    *(
        case
        for odd, epilogue in enumerate(("none", "silu_mul"))
        for case in _cases(
            "linear",
            "tokens K N format bias eps epilogue prologue",
            [(1, whole_k(96, kind), 70, kind, i % 2 == odd, 1e-5, epilogue, "rms_norm") for i, kind in enumerate(INT16)]
            # Few and many lanes per row, one stage and several.
            + [(1, 2048, 38, "q4_0", True, 1e-6, epilogue, "rms_norm"), (1, 4160, 34, "q8_0", False, 1e-6, epilogue, "rms_norm"),
               (1, 64, 16390, "q4_0", False, 1e-6, epilogue, "rms_norm")]
            # Several rows: of a GEMV and of tiles.
            + [(3 if odd else 21, whole_k(288, kind), 70, kind, True, 1e-5, epilogue, "rms_norm") for kind in ("q4_0", "q6_k")],
        )
    ),
    *_cases(
        "linear",
        "tokens K N format bias eps Hq Hkv D rotary cache prologue epilogue",
        [(1, whole_k(96, kind), 40, kind, kind == "q4_0", 1e-5, 3, 1, 8, 4, "f32", prologue, "rope_kv_write")
         for kind in ("q4_0", "q6_k") for prologue in ("none", "rms_norm")]
        + [(3, 96, 40, "q4_0", True, 1e-5, 3, 1, 8, 4, "f16", "rms_norm", "rope_kv_write")]
        + [(1, 576, 960, "q4_1", False, 1e-5, 9, 3, 64, 64, cache, "rms_norm", "rope_kv_write") for cache in ("f32", "f16")],
    ),
    # With a norm before what the norm is of; one row alone.
    *_cases(
        "linear",
        "tokens K N format bias eps epilogue prologue",
        [(1, whole_k(96, kind), 70, kind, False, 1e-5, "none", "rms_norm_add_rms_norm") for kind in ("q4_0", "q6_k", "q8_0")]
        + [(1, 1152, 66, "q4_0", True, 0.5, "gelu_mul", "rms_norm_add_rms_norm"),
           (1, 4160, 34, "q4_0", False, 1e-6, "silu_mul", "rms_norm_add_rms_norm"),
           (1, 8224, 9, "q4_0", False, 1e-6, "none", "rms_norm_add_rms_norm"),
           (1, 2048, 38, "q4_0", False, 1e-6, "add", "rms_norm_add_rms_norm"),
           (1, 2560, 66, "q4_0", False, 1e-6, "gelu_residual", "rms_norm_add"), (1, 96, 70, "q8_0", True, 0.5, "none", "rms_norm_add"),
           (1, 8224, 9, "q4_0", False, 1e-6, "add", "rms_norm_add")],
    ),
    # Rounded between two products: results of gate and up, and inputs of few rows in every format that is multiplied as integers.
    *_cases(
        "linear",
        "tokens K N format bias epilogue rounded",
        [(1, 96, 64, "q4_0", True, "gelu_mul", True), (1, 256, 320, "q6_k", False, "silu_mul", True),
         (1, 64, 16448, "q4_0", True, "silu_mul", True)],
    ),
    *_cases(
        "linear",
        "tokens K N format eps prologue epilogue rounded",
        [(1, 256, 192, "q4_0", 0.5, "rms_norm_add_rms_norm", "gelu_mul", True), (1, 64, 128, "q8_0", 1e-5, "rms_norm", "silu_mul", True)],
    ),
    *_cases(
        "linear",
        "tokens K N format bias epilogue prologue",
        [(1, whole_k(96, kind), 1030, kind, i % 2 == 0, "add" if i % 3 else "none", "int16_activations") for i, kind in enumerate(INT16)]
        + [(1, 6912, 1152, "q4_0", False, "none", "int16_activations"), (1, 8224, 1025, "q4_0", True, "gelu", "int16_activations"),
           (1, 32, 1027, "q8_0", True, "add", "int16_activations")],
    ),
    # Every route with the other functions of epilogues.
    *(
        case
        for tokens, epilogue in ((1, "gelu_mul"), (1, "gelu"), (1, "gelu_erf"), (3, "gelu_mul"), (5, "gelu"), (5, "gelu_erf"),
                                 (1, "gelu_residual"), (5, "gelu_residual"))
        for case in _cases("linear", "tokens K N format bias epilogue", [(tokens, 64, 66, "q4_0", True, epilogue)])
    ),
    *_cases("linear", "tokens K N format bias epilogue", [(1, 64, 33, "f32", False, "gelu"), (2, 32, 34, "f32", False, "gelu_mul")]),
    # A norm before the product with a router of experts.
    *_cases(
        "linear",
        "tokens K N format bias prologue eps",
        [(1, 96, 35, "f32", True, "rms_norm", 0.25), (1, 2080, 130, "f32", False, "rms_norm"), (1, 64, 7, "bf16", False, "rms_norm")],
    ),
    # Fixed point, long rows, tall tiles.
    *_cases("linear", "tokens K N format bias epilogue", [(1, 64, 4102, "q8_0", True, "add")]),
    *_cases(
        "linear",
        "tokens K N format bias epilogue",
        [(1, 64, 4102, "q4_0", True, "silu_mul"), (1, 4128, 38, "q4_1", True, "silu_mul")],
    ),
    *_cases(
        "route_experts",
        "tokens experts used gating normalise scale bias batched scaled shared",
        [(1, 4, 2), (1, 128, 8, "softmax", True), (3, 60, 4), (5, 8, 2, "softmax_used"), (4, 33, 5, "softmax", True, 2.5, True, True),
         (2, 256, 8, "sigmoid", True, 2.5, True), (3, 5, 5, "sigmoid"), (9, 300, 64, "softmax_used", False, 1.0, False, True), (2, 1, 1),
         (3, 9, 4, "softmax", True, 1.0, False, False, True), (5, 8, 2, "sigmoid", True, 2.0, True, True, True),
         (1, 256, 8, "softmax", True, 1.0, False, False, False, True), (3, 5, 2, "sigmoid", True, 0.5, True, True, True, True)],
    ),
    *_cases(
        "linear_experts",
        "tokens experts used K N format combine batched bias residual prologue eps",
        [
            (1, 4, 2, 32, 5), (1, 5, 3, 96, 70, "q4_0", "silu_mul"), (1, 6, 4, 64, 67, "q8_0", "sum"),
            *((2, 4, 3, whole_k(96, kind), 34, kind, "silu_mul") for kind in WEIGHT_FORMATS if kind not in ("q4_0", "q8_0")),
            (3, 9, 2, 64, 33, "q4_0", "none", True), (7, 3, 2, 96, 66, "q4_0", "silu_mul", True),
            (6, 8, 3, 64, 35, "q4_0", "sum", True), (70, 5, 2, 64, 66, "q8_0", "silu_mul", True),
            (67, 6, 3, 96, 70, "f32", "sum", True), (1, 8, 8, 2080, 40, "q4_0", "sum"), (130, 64, 4, 32, 10),
            (1, 6, 4, 96, 66, "mxfp4", "swiglu_clamped", False, True), (40, 7, 2, 64, 70, "mxfp4", "swiglu_clamped", True, True),
            (1, 6, 4, 96, 66, "q4_0", "gelu_mul"), (40, 7, 2, 64, 70, "q8_0", "gelu_mul", True),
            (1, 5, 4, 64, 67, "mxfp4", "sum", False, True, True), (5, 6, 2, 96, 35, "q4_0", "sum", True, True, True),
            (35, 6, 2, 32, 67, "q8_0", "sum", True, True, True), (2, 4, 2, 64, 33, "q4_0", "none", False, True),
            (1, 70, 66, 32, 9, "q4_0", "sum", False, True),
            (1, 5, 3, 96, 70, "q8_0", "silu_mul", False, True, False, "rms_norm", 0.25), (4, 5, 2, 1056, 38, "q4_0", "silu_mul", True, False, False, "rms_norm"),
            (1, 4, 2, 2048, 770, "q4_0", "silu_mul"), (2, 5, 4, 768, 1030, "mxfp4", "sum", True, True),
        ],
    ),
    *_cases("add_gated", "tokens width K batched", [(1, 1, 1), (3, 64, 64), (2, 130, 35, True), (1, 2048, 2048)]),
    *_cases(
        "embedding",
        "tokens N K format",
        [(T, N, whole_k(K, kind), kind) for kind in WEIGHT_FORMATS for T, N, K in ((1, 3, 32), (7, 129, 576), (65, 11, 64))]
        + [(5, 9, 35, "f32"), (4, 6, 100, "f16")],
    ),
    *_cases("embedding", "tokens N K format factor", [(7, 129, 64, "q8_0", 8.5), (5, 9, 35, "f32", 0.1)]),
    *_cases(
        "add_positions",
        "tokens N K format",
        [(1, 3, 32, "f32"), (7, 129, 64, "f16"), (5, 9, 35, "f32"), (6, 40, 96, "q8_0")],
    ),
    *(Case(*row) for row in ATTENTION),
    *_cases("slice", "tokens width first count batched", [(1, 1, 0, 1), (3, 70, 13, 57), (65, 96, 64, 32, True), (1, 70_001, 5, 69_996)]),
    *_cases("short_conv", "tokens width kernel silu single", [(1, 7, 3, False, True), (9, 33, 4, True, True), (70, 66, 4), (3, 5, 2, True)]),
    *_cases(
        "gated_delta_rule",
        "tokens Hk Hv Dk Dv grouped single",
        [(1, 2, 4, 16, 16, False, True), (7, 1, 2, 32, 36, True, True), (40, 2, 6, 24, 40, True), (70, 2, 2, 128, 64)],
    ),
    *_cases(
        "mamba2_scan",
        "tokens H P N G single dt_min dt_max",
        [(1, 4, 16, 16, 2, True), (7, 3, 20, 8, 1, True), (40, 6, 36, 24, 3), (70, 2, 64, 128, 1), (3, 2, 8, 256, 2, False, 0.3, 0.8)],
    ),
    *_cases(
        "slice_short_conv", "tokens width kernel silu single first stride", [(1, 7, 3, True, True, 4, 15), (70, 66, 4, True, False, 3, 90)]
    ),
    *_cases(
        "mul_short_conv_mul",
        "tokens width kernel single before_first after_first values_first stride",
        [(1, 8, 3, True), (40, 33, 4, False, 70, 2, 36, 110)],
    ),
    *_cases(
        "slice_gated_delta_rule",
        "tokens Hk Hv Dk Dv grouped single alpha_first beta_first stride",
        [(40, 2, 6, 24, 40, True), (141, 1, 2, 64, 20, False, False, 5, 1, 9), (5, 2, 2, 32, 12, False, True, 2, 0, 4)],
    ),
    *_cases(
        "short_conv_gated_delta_rule",
        "tokens Hk Hv Dk Dv grouped single kernel eps first stride gate_first alpha_first beta_first gates_stride",
        [
            (1, 2, 4, 16, 16, False, True, 4), (5, 1, 2, 24, 12, True, True, 2), (3, 2, 2, 128, 64, False, True, 3),
            (4, 1, 3, 8, 20, True, True, 4, 1e-5, 7, 90, 11, 1, 5, 80),
        ],
    ),
    *_cases(
        "mamba2_scan_silu_mul",
        "tokens H P N G single gate_first deltas_first stride",
        [(1, 4, 16, 16, 2, True), (7, 3, 20, 8, 1, True, 5, 70, 90), (12, 6, 36, 24, 3)],
    ),
    *_cases(
        "resize",
        "outer size inner to taps bytes",
        [(1, 7, 3, 12, 4), (5, 40, 3, 17, 10), (1, 9, 51, 4, 8), (2, 300, 3, 64, 19), (4, 9, 3, 12, 4, True)],
    ),
    *_cases("concat", "a b", [(1, 1), (63, 200), (68, 200)]),
    *_cases(
        "patches",
        "tokens patch count width bytes",
        [(1, 1, 3, 3), (9, 8, 3 * 40 * 40, 192), (5, 14, 3 * 50 * 50, 608), (3, 7, 3 * 30 * 30, 160, True)],
    ),
    *_cases("weighted_rows", "tokens N K taps", [(1, 1, 1, 1), (7, 16, 33, 4), (70, 256, 96, 1)]),
    *_cases("pad_columns", "tokens width to", [(1, 1, 32), (70, 33, 64), (9, 36, 64)]),
    *_cases("mean_rows", "tokens group width", [(1, 1, 1), (7, 4, 33), (40, 16, 96)]),
    *_cases("clamp", "count", [(1,), (70 * 33,)]),
    *_cases("attend_spans", "tokens H D scale", [(1, 1, 4, 0.5), (9, 2, 8, 0.35), (70, 3, 72, 0.118), (150, 2, 128, 0.088)]),
    *_cases("slice_attend_spans", "tokens H D scale", [(1, 1, 8, 0.5), (70, 3, 72, 0.118)]),
    *_cases("slice_rope_by_row_attend_spans", "tokens H D scale rotary", [(9, 2, 16, 0.35), (70, 3, 64, 0.125, 32)]),
    *_cases("rope_by_row", "tokens H D rotary interleaved", [(1, 1, 4), (7, 3, 64, 32, True), (70, 2, 20, 16)]),
    *_cases(
        "rope_rows",
        "tokens rotary temporal vertical horizontal grouped",
        [(1, 16, 4, 2, 2), (9, 16, 4, 2, 2), (70, 128, 24, 20, 20), (9, 128, 16, 24, 24, True)],
    ),
    *_cases("put_features", "tokens K levels level add", [(1, 1), (9, 33, 4, 2, True), (70, 96, 3, 0)]),
    *_cases(
        "attention_reach",
        "tokens Hq Hkv D cache window softcap paged",
        [(1, 1, 1, 4), (9, 4, 2, 16, "f32", 8), (70, 2, 1, 72, "f32", 0, 30.0, True), (40, 4, 2, 64, "f16", 30, 0.0, True)],
    ),
    *_cases("take_rows", "tokens rows width", [(1, 1, 1), (7, 3, 130), (64, 64, 33)]),
    *(
        case
        for op in ("add", "mul", "silu_mul")
        for case in _cases(op, "count period", [(1,), (4,), (255,), (1028, 4), (1530, 90), (576 * 7, 576), (70_000,)])
    ),
    *_cases("add", "tokens count batched", [(5, 5 * 96, True), (3, 21, True)]),
    *_cases("silu_mul", "tokens count batched", [(9, 9 * 64, True)]),
    *_cases("rms_norm_silu_mul", "tokens heads width eps batched first stride", [(1, 3, 36), (5, 4, 128, 1e-5, True, 8, 600), (3, 2, 7, 1e-6, False, 3, 19)]),
    *_cases("slice_sigmoid_mul", "tokens width first stride batched", [(1, 60, 8, 100), (5, 33, 1, 40), (9, 64, 64, 128, True)]),
    *_cases("sigmoid_mul", "tokens count period batched", [(1, 255), (9, 9 * 64, 9 * 64, True)]),
    *_cases("gelu_mul", "tokens count period batched", [(1, 255), (1, 1530, 90), (9, 9 * 64, 9 * 64, True)]),
    *_cases("swiglu_clamped", "tokens count period batched", [(1, 255), (1, 1530, 90), (9, 9 * 64, 9 * 64, True)]),
    *(case for op in ("gelu", "gelu_erf", "relu_squared") for case in _cases(op, "tokens count batched", [(1, 1), (3, 9), (9, 9 * 64, True)])),
    *_cases("scale", "factor tokens count batched", [(0.25, 1, 7), (-12.5, 5, 60, True)]),
    *_cases("softcap", "cap tokens count batched", [(30.0, 1, 1021), (50, 5, 60, True)]),
    *_cases("copy", "count", [(4,), (1020,), (70_000,)]),
    *_cases("fma_chain", "count rounds", [(16, 1), (4112, 2), (65_536, 1)]),
    *_cases("matrix_chain", "count rounds rows columns K", [(3, 64, 32, 64, 16)]),
    *_cases("argmax", "rows width", [(1, 1), (3, 63), (2, 64), (5, 65), (300, 7), (1, 2048), (2, 2049), (1, 49152), (3, 128256)]),
    *_cases(
        "sample",
        "rows width greedy advance paged tokens slots pages",
        [
            (1, 1000), (1, 1), (1, 2), (3, 63), (4, 256), (7, 257), (5, 4099, False, True), (16, 300), (1, 49152, False, True),
            (6, 2500, False, True, True, 9, 11, 40), (2, 128256), (1, 600_001),
            (1, 1, True), (16, 65, True), (1, 49152, True, True), (5, 4099, True, True, True, 9, 11, 40), (3, 128256, True),
        ],
    ),
    *_cases(
        "sample",
        "rows width greedy advance paged counted tokens slots pages",
        [(3, 100, False, True, True, True, 4, 5, 40), (1, 2100, True, True, True, True, 1, 1, 40), (2, 77, True, False, False, True, 2, 9)],
    ),
    *_cases(
        "adjust_logits",
        "rows width tokens slots biases masks",
        [(1, 1), (3, 31), (4, 33, 4, 9, 20, 3), (16, 70), (5, 2500, 6, 7, 300, 2), (2, 49152, 3, 4, 5, 6)],
    ),
    *_cases(
        "logprobs", "rows width tokens slots", [(1, 1), (5, 7), (6, 30, 8, 9), (16, 257), (5, 2060), (6, 4100, 6, 8), (2, 128256)]
    ),
]  # fmt: skip


def make(case: Case) -> tuple[Arrays, Arrays]:
    """Operands and expected results, the same for every run of a case."""
    given = {**case.dims, "stretches": case.stretches} if case.stretches else case.dims
    return MAKERS[case.op](np.random.default_rng(zlib.crc32(case.name.encode())), given)


# Results -------------------------------------------------------------------------------------------------


def tolerance(case: Case, route: Route, output: str) -> str:
    """The row of the table of tolerances for one result of a case."""
    if case.op.endswith("norm") or case.op == "rms_norm_mul":
        return "norm"
    if output == "ids":
        return "exact"
    if case.op.startswith("mamba2_scan"):
        return "scan"
    if case.op.startswith("linear"):
        if case.dims.get("cache") == "f16" and output != "out":
            return "attention f16"
        if route.name == "matrix" and case.op == "linear_experts" and case.dims["prologue"] != "none":
            return "experts f16, after a norm"
        if route.name == "matrix":
            return "linear f16, formats"
        return "linear deep" if case.dims["K"] >= 8192 else "linear"
    if case.op.endswith(("attention", "attention_linear")):
        return "attention f16" if case.dims["cache"] == "f16" else "attention"
    if case.op.endswith("rope_kv_write"):
        return "attention f16" if output == "k_cache" and case.dims["cache"] == "f16" else "pointwise"
    if case.op == "attention_reach":
        return "attention f16" if case.dims["cache"] == "f16" else "attention"
    if case.op.endswith("attend_spans"):
        return "attention"
    moves = (
        "embedding",
        "copy",
        "argmax",
        "sample",
        "slice",
        "take_rows",
        "kv_write",
        "resize",
        "concat",
        "pad_columns",
    )
    return "exact" if case.op in moves and case.dims.get("factor", 1) == 1 else "pointwise"


def result(case: Case, name: str, raw: NDArray[np.uint8], expected: NDArray[Any]) -> NDArray[Any]:
    """Raw bytes of an output as an array of the expected shape, padding of the last axis taken off."""
    if case.op == "logprobs":
        return numbers(raw, case.dims["rows"])
    dtype: Any = np.uint32 if case.op in ("argmax", "sample") or name == "ids" else np.float32
    if name.endswith("_cache"):
        dtype = expected.dtype
    if name.endswith("_cache"):  # the pool may have more rows
        raw = raw[: expected.nbytes * (-(-case.dims["D"] // 4) * 4) // case.dims["D"]]
    if name == "out" and case.dims.get("rounded"):
        return _unrounded(raw, expected)
    wide: NDArray[Any] = raw.view(dtype).reshape(*expected.shape[:-1], -1)
    return wide[..., : expected.shape[-1]]


def _unrounded(raw: NDArray[np.uint8], expected: NDArray[Any]) -> NDArray[Any]:
    """Numbers that linear/store_rounded has stored, after checking what it stores besides them."""
    blocks = expected.size // 32
    planes = raw[: 80 * blocks].reshape(5, blocks, 16)
    high, low = (np.concatenate([planes[i], planes[i + 2]], axis=1).view(np.int8).astype(np.float64) for i in (0, 1))
    values: NDArray[Any] = 256 * high + low
    unit, first, second, _ = planes[4].copy().view(np.float32).astype(np.float64).T
    assert np.abs(values).max(axis=1).min() >= 32511, "the largest of a block is 127 · 256"
    np.testing.assert_allclose([first, second], [unit * values[:, :16].sum(1), unit * values[:, 16:].sum(1)], rtol=1e-6)
    found: NDArray[Any] = unit[:, None] * values
    return found.reshape(expected.shape)
