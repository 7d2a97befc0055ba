"""The GEMV of several rows that rounds its inputs itself: configurations and launch.

As `int16` for one row, whose prologues, epilogues and preconditions it shares.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...formats.blocks import BLOCK
from ...gpu.caps import DeviceCaps
from ..route import Dims, as_measured, ceil_div
from ..wgsl import Constant, Kernel, compose
from .measured import ROWS_STAGED
from .packed import padded_k

KERNEL = "linear/linear_gemv_rows_staged"
IN_PAIRS = ("silu_mul", "gelu_mul", "rope_kv_write")  # epilogues that take rows of the weight in pairs


@dataclass(frozen=True)
class RowsConfig:
    """Threads per workgroup, lanes that share a row's K, rows of the weight they share, rows of x of a workgroup.

    `stage` blocks of each row of x are staged at a time.
    """

    threads: int
    lanes_per_row: int
    rows: int
    x_rows: int
    stage: int

    @property
    def per_group(self) -> int:
        """Rows of the weight of a workgroup."""
        return self.rows * (self.threads // self.lanes_per_row)

    def workgroups(self, tokens: int, n: int) -> int:
        """Of a product."""
        return ceil_div(tokens, self.x_rows) * ceil_div(n, self.per_group)

    def constants(self, caps: DeviceCaps) -> dict[str, Constant]:
        """Those of the kernel."""
        # Smaller subgroups than the least would have more sums than there are slots.
        least = min(caps.least_lanes, self.lanes_per_row)
        slots = 1 if self.lanes_per_row <= caps.subgroup_size else self.threads // least
        sizes = {"WG": self.threads, "LANES_PER_ROW": self.lanes_per_row, "ROWS": self.rows, "STAGE": self.stage}
        return {**sizes, "X_ROWS": self.x_rows, "SLOTS": slots, "SUBGROUP": caps.subgroup_size}

    def __str__(self) -> str:
        return f"{self.threads}x{self.lanes_per_row}x{self.rows}x{self.x_rows}"


def config_for(dims: Dims, caps: DeviceCaps) -> RowsConfig | None:
    """What was measured for a shape; None where each row is multiplied for itself, or where another route is faster."""
    tokens, n = dims["tokens"], as_measured(dims["N"], caps)
    in_pairs = dims["epilogue"] in IN_PAIRS
    for line in ROWS_STAGED:
        if line.has(tokens, caps.subgroup_matrix) and line.shape.has(dims["K"], n, in_pairs):
            return fitted(RowsConfig(*line.config, stage=0), dims, caps)
    return None


def fitted(config: RowsConfig, dims: Dims, caps: DeviceCaps) -> RowsConfig | None:
    """The configuration within a device's limits, with as many blocks staged as there is memory for; else None."""
    blocks = padded_k(dims) // BLOCK
    threads = min(config.threads, caps.max_invocations)
    lanes = min(config.lanes_per_row, threads, max(4, 1 << (blocks - 1).bit_length()))
    config = replace(config, threads=threads, lanes_per_row=max(lanes, config.x_rows))
    none, one, two = (_memory(replace(config, stage=stage), caps) for stage in (1, 2, 3))
    each = two - one
    fitting = (caps.max_workgroup_memory - (none - each)) // each
    stage = blocks if blocks <= fitting else fitting // config.lanes_per_row * config.lanes_per_row
    return replace(config, stage=stage) if stage > 0 and threads % (4 * config.x_rows) == 0 else None


def _memory(config: RowsConfig, caps: DeviceCaps) -> int:
    """Bytes of workgroup memory."""
    constants = {key: value for key, value in config.constants(caps).items() if key != "SUBGROUP"}
    return compose(Kernel(KERNEL, unroll=True), constants).workgroup_memory


def candidate_configs(dims: Dims, caps: DeviceCaps, least: Callable[[int], bool]) -> list[RowsConfig]:
    """Cuts that may be the fastest. `least` says whether so many workgroups keep the device busy."""
    configs: dict[RowsConfig, None] = {}
    x_rows = 2 if dims["tokens"] == 2 else 4
    for threads, lanes, rows in itertools.product((128, 256, 512), (8, 16, 32, 64), (1, 2, 4)):
        config = fitted(RowsConfig(threads, lanes, rows, x_rows, 0), dims, caps)
        if config is not None and least(config.workgroups(1, dims["N"])):
            configs[config] = None
    return list(configs)
