"""The GEMV over inputs rounded to 16 bits, with and without a norm before it: configurations and preconditions.

Each workgroup has one row of x, and rounds it for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

from ...formats.blocks import BLOCK
from ...gpu.caps import DeviceCaps
from ..route import Dims, LaunchList, as_measured, ceil_div, f32, filling, row_count
from ..wgsl import Constant, Kernel, compose
from . import rows_staged
from .formats import FORMATS
from .measured import FEW_ROWS, GEMV_INT16, HALF, LARGE_ENOUGH, NEARLY_ALL, ROW_BY_ROW, WHOLE, is_measured
from .packed import (
    LEAST_GROUPS,
    epilogue_files,
    head_buffers,
    head_params,
    layout,
    over_ranges,
    padded_k,
    pairs_are_whole,
    ranges,
)
from .rows_staged import IN_PAIRS, RowsConfig

_AFTER_SKIP = ("rms_norm_add_rms_norm", "rms_norm_add")  # prologues that add a norm to `skip`
_NORMS = ("rms_norm", *_AFTER_SKIP)
_HEAD = 32768  # rows: products with as many, or more, are heads of models
MAX_ROWS = 16  # of x
_LARGEST_SUBGROUP = 128  # that WebGPU knows


@dataclass(frozen=True)
class Int16Config:
    """Threads per workgroup, lanes that share a row's K, rows that they share, blocks of inputs staged at a time."""

    threads: int
    lanes_per_row: int
    rows: int
    stage: int

    @property
    def per_group(self) -> int:
        """Rows of a workgroup. Lanes that are too few to share one are idle."""
        return self.rows * (self.threads // self.lanes_per_row)

    def workgroups(self, tokens: int, n: int) -> int:
        """Of a product, one for each row of x."""
        return tokens * ceil_div(n, self.per_group)

    def constants(self, caps: DeviceCaps) -> dict[str, Constant]:
        """Those of the kernel."""
        sizes = {"WG": self.threads, "LANES_PER_ROW": self.lanes_per_row, "ROWS": self.rows, "STAGE": self.stage}
        return {**sizes, "SLOTS": slots(self.threads, self.lanes_per_row), "SUBGROUP": caps.subgroup_size}

    def __str__(self) -> str:
        return f"{self.threads}x{self.lanes_per_row}x{self.rows}"


def config_for(dims: Dims, caps: DeviceCaps) -> Int16Config:
    """What was measured for a shape: where a device has fewer processors than the card, for as many rows of each."""
    in_pairs = dims["epilogue"] in IN_PAIRS
    if not in_pairs and is_measured(FEW_ROWS, dims, caps):
        config = _few_rows(dims, caps)
        if config is not None:
            return config
    n = as_measured(dims["N"], caps)
    threads, lanes, rows = next(gemv for shape, gemv in GEMV_INT16 if shape.has(dims["K"], n, in_pairs))
    if not _divide(threads, caps):
        threads = 256
    if lanes == HALF:
        lanes = ceil_div(_blocks(dims), 2)
    elif lanes == WHOLE:
        lanes = max(8, min(64, _round_up(_blocks(dims))))
    threads = min(threads, caps.max_invocations)
    lanes_per_row = lanes_per_row_for(min(lanes, threads), _blocks(dims))
    if dims.get("rounded"):
        threads = _of_whole_blocks(threads, lanes_per_row, rows)
    return _config(threads, lanes_per_row, rows, dims, caps)


def _divide(threads: int, caps: DeviceCaps) -> bool:
    """Do subgroups divide a workgroup? A norm adds up the sums of whole ones."""
    return threads % (caps.subgroup_size or _LARGEST_SUBGROUP) == 0


def _of_whole_blocks(threads: int, lanes_per_row: int, rows: int) -> int:
    """As many threads or more, so that the results of a workgroup, half as many as its rows, are whole blocks."""
    lanes = lanes_per_row * (2 * BLOCK // rows)
    return ceil_div(threads, lanes) * lanes


def _few_rows(dims: Dims, caps: DeviceCaps) -> Int16Config | None:
    """A workgroup for each processor, with as many lanes as its rows have blocks, or half as many.

    A norm wants subgroups that divide the workgroup.
    """
    plain = dims.get("prologue") in ("none", "splits")
    if not plain or not caps.policy.large_workgroups or caps.subgroup_size != 32:
        return None
    blocks, rows = _blocks(dims), ceil_div(dims["N"], filling(NEARLY_ALL, caps))
    lanes_per_row = ceil_div(blocks, ceil_div(rows * blocks, 1024))
    config = _config(ceil_div(rows * lanes_per_row, 32) * 32, lanes_per_row, 1, dims, caps)
    return config if config.threads <= caps.max_invocations and config.stage == blocks else None


def lanes_per_row_for(most: int, blocks: int) -> int:
    """Lanes that share the blocks of a row: a power of two, or fewer where an eighth of them or more would be idle."""
    rounds = ceil_div(blocks, most)
    return most if 8 * blocks > 7 * rounds * most else max(4, ceil_div(blocks, rounds))


def _blocks(dims: Dims) -> int:
    return padded_k(dims) // BLOCK


def _config(threads: int, lanes_per_row: int, rows: int, dims: Dims, caps: DeviceCaps) -> Int16Config:
    """With as many blocks staged at a time as there is memory for."""
    blocks = _blocks(dims)
    each = _memory(threads, lanes_per_row, 2) - _memory(threads, lanes_per_row, 1)
    fitting = (caps.max_workgroup_memory - _memory(threads, lanes_per_row, 0)) // each
    return Int16Config(
        threads, lanes_per_row, rows, blocks if blocks <= fitting else fitting // lanes_per_row * lanes_per_row
    )


@cache
def _memory(threads: int, lanes_per_row: int, stage: int) -> int:
    """Bytes of workgroup memory with so many blocks staged."""
    constants = {"WG": threads, "STAGE": stage, "SLOTS": slots(threads, lanes_per_row)}
    return compose(Kernel("linear/linear_gemv_int16"), constants).workgroup_memory


def slots(threads: int, lanes_per_row: int) -> int:
    """What the sums of lane groups go through: see shared/row_sums."""
    return threads // 4 if lanes_per_row % 4 == 0 else threads


def _rounds(config: Int16Config, dims: Dims) -> int:
    """Blocks that a lane has of a row where it loads all of them at once, 1 or 2; else 0.

    That is worth its registers behind two norms. H200, gemma-3-1b: gate and up 7.5 → 7.25 µs, qkv 4.45 → 4.3; and for
    its head, 90 → 82. Without a norm it costs up to 0.15 µs, and behind one it changes nothing (llama-3.2-1b).
    """
    rounds, rest = divmod(_blocks(dims), config.lanes_per_row)
    whole = rest == 0 and config.stage == _blocks(dims)
    head = dims["N"] >= _HEAD and rounds == 2
    return rounds if whole and rounds <= 2 and (head or dims["prologue"] == "rms_norm_add_rms_norm") else 0


def _round_up(count: int) -> int:
    """To a power of two."""
    return 1 << (count - 1).bit_length()


def candidate_configs(dims: Dims, caps: DeviceCaps) -> list[Int16Config]:
    """Cuts that may be the fastest: no lane is without blocks of its row, and the card is not left half empty."""
    configs: dict[Int16Config, None] = {}
    blocks = _blocks(dims)
    for threads, most, rows in itertools.product((128, 256, 512), (8, 16, 32, 64, 128), (1, 2, 4)):
        if most > 64 and (rows == 1 or blocks < 3 * most // 2):
            continue  # of long rows alone: lanes without a second block, or with one row, wait more than they load
        if threads > caps.max_invocations or most > max(8, _round_up(blocks)):
            continue
        lanes_per_row = lanes_per_row_for(most, blocks)
        config = _config(threads, lanes_per_row, rows, dims, caps)
        if dims.get("rounded"):
            config = _config(_of_whole_blocks(threads, lanes_per_row, rows), lanes_per_row, rows, dims, caps)
            if _rounding_unsupported_reason(config.threads, dims, caps):
                continue
        if dims["N"] // config.per_group >= filling(LEAST_GROUPS, caps) and not (
            dims["epilogue"] in IN_PAIRS and rows == 1
        ):
            configs[config] = None
    return list(configs)


def large_enough(dims: Dims, caps: DeviceCaps) -> bool:
    """Below this size rounding the inputs, by every workgroup, takes longer than it saves."""
    k = dims["K"]
    return bool(k * as_measured(dims["N"], caps) >= next(least for most_k, least in LARGE_ENOUGH if k <= most_k))


def is_preferred(dims: Dims, caps: DeviceCaps) -> bool:
    """Where it goes before others. Of several rows, every workgroup reads weights for one."""
    if dims["tokens"] == 1:
        return large_enough(dims, caps)
    together = rows_staged.config_for(dims, caps) is not None
    return caps.policy.round_inputs and (together or _is_row_by_row(dims, caps, 1))


def _is_row_by_row(dims: Dims, caps: DeviceCaps, times: int) -> bool:
    """Is the weight at most so many times as large as those of which each row of x is multiplied for itself?"""
    most = next((most for rows, most in ROW_BY_ROW if dims["tokens"] <= rows), 0)
    return bool(dims["K"] * as_measured(dims["N"], caps) <= times * most)


def integers_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why inputs of 16 bits are not multiplied with weights of this format here."""
    if not FORMATS[dims["format"]].int16:
        return f"weights of format {dims['format']} are not multiplied as integers"
    if not caps.dot4:
        return "this device has no instruction for dot products of bytes"
    needed = _memory(512, 63, 64)  # the most that any configuration may take; _few_rows looks for itself
    if caps.max_workgroup_memory < needed:
        return f"it needs {needed:,} bytes of workgroup memory, the limit is {caps.max_workgroup_memory:,}"
    return None


def unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why the GEMV over 16 bits does not run a shape."""
    if dims["prologue"] == "int16_activations":
        return "it rounds its inputs itself"
    threads = config_for(dims, caps).threads
    reason = _rounding_unsupported_reason(threads, dims, caps) if dims["rounded"] else None
    if reason:
        return reason
    if dims["prologue"] in _AFTER_SKIP and dims["epilogue"] == "rope_kv_write":
        return f"the prologue {dims['prologue']} and the epilogue rope_kv_write together bind too many buffers"
    pairs = pairs_are_whole(dims, caps) if dims["epilogue"] in IN_PAIRS else None
    return integers_unsupported_reason(dims, caps) or _rows_unsupported_reason(dims, caps) or pairs


_ROPE_SAVES = 3  # times as large a weight is still multiplied row by row, where that saves the dispatch of rope


def _rows_unsupported_reason(dims: Dims, caps: DeviceCaps) -> str | None:
    """Why it does not take so many rows."""
    if dims["tokens"] > MAX_ROWS:
        return f"it takes up to {MAX_ROWS} tokens, tokens is {dims['tokens']}"
    if dims["tokens"] > 1 and (dims["rounded"] or dims["prologue"] not in ("none", "rms_norm")):
        prologue = "rounded results" if dims["rounded"] else f"the prologue {dims['prologue']}"
        return f"with {prologue} it takes one token, tokens is {dims['tokens']}"
    rope = dims["tokens"] > 1 and dims["epilogue"] == "rope_kv_write"
    if rope and not _is_row_by_row(dims, caps, _ROPE_SAVES) and rows_staged.config_for(dims, caps) is None:
        return f"so large a weight is read once for all of {dims['tokens']} tokens, and rope comes after it"
    return None


def _rounding_unsupported_reason(threads: int, dims: Dims, caps: DeviceCaps) -> str | None:
    """Why workgroups of so many threads do not round their results."""
    if threads > caps.max_invocations:
        return f"whole blocks of results take {threads} threads, the limit is {caps.max_invocations}"
    if dims["prologue"] in _NORMS and not _divide(threads, caps):
        return f"a norm wants subgroups that divide {threads} threads"
    if len(ranges(dims, caps)) > 1:
        return f"the weight must fit one binding, which holds {caps.max_operand:,} bytes"
    return None


def launch_list(dims: Dims, caps: DeviceCaps) -> LaunchList:
    """A few rows of x: groups of lanes share the K of their rows."""
    together = rows_staged.config_for(dims, caps) if dims["tokens"] > 1 else None
    return launch_list_with(together or config_for(dims, caps), dims, caps)


def candidates(dims: Dims, caps: DeviceCaps) -> Mapping[str, Callable[[], LaunchList]]:
    """The same with every configuration that may be the fastest, by name."""
    configs: list[Int16Config | RowsConfig] = [*candidate_configs(dims, caps)]
    if dims["tokens"] > 1:
        configs += rows_staged.candidate_configs(dims, caps, lambda count: count >= filling(LEAST_GROUPS, caps))
        in_pairs = dims["epilogue"] in IN_PAIRS
        configs = [config for config in configs if not (in_pairs and config.rows == 1)]
    return {str(config): partial(launch_list_with, config, dims, caps) for config in configs}


def launch_list_with(config: Int16Config | RowsConfig, dims: Dims, caps: DeviceCaps) -> LaunchList:
    """The same with a given configuration: several rows of x are multiplied together, or each for itself."""
    rope = dims["epilogue"] == "rope_kv_write"
    if rope:
        epilogue: tuple[str, ...] = ("linear/epilogue_rope_kv_write", f"shared/cache_{dims['cache']}")
    elif dims.get("rounded"):
        epilogue = ("linear/store_rounded", *epilogue_files(dims)[1:], "shared/row_count_fixed")
    else:
        epilogue = ("linear/store_rows", *epilogue_files(dims), row_count(dims))
    sums = ("shared/subgroup_lanes", "shared/int16_round", "shared/int16", "shared/row_sums")
    before = {
        "none": ("linear/skip_none", "linear/prologue_none"),
        "rms_norm": ("linear/skip_none", "linear/prologue_rms_norm"),
        "rms_norm_add_rms_norm": ("linear/skip_rms_norm", "linear/prologue_rms_norm_early"),
        "rms_norm_add": ("linear/skip_rms_norm", "linear/prologue_none_early"),
        "splits": ("linear/inputs_splits", "linear/prologue_none"),  # of attention, which leaves them
    }
    rows = ("linear/loaded_rows", layout(dims).file)
    include = (*before[dims["prologue"]], *sums, *rows, FORMATS[dims["format"]].int16, *epilogue)
    together = isinstance(config, RowsConfig)
    path = rows_staged.KERNEL if together else "linear/linear_gemv_int16"
    kernel = Kernel(path, include, frozenset({"subgroups"}), unroll=together)
    params = {"eps": float(dims["eps"]) if dims["prologue"] in _NORMS else 0.0, **head_params(dims)}
    tokens = dims["tokens"]
    constants = config.constants(caps)
    if isinstance(config, Int16Config):
        constants |= {"ROUNDS": _rounds(config, dims), "SEVERAL": tokens > 1}
    products = over_ranges(kernel, constants, lambda n: config.workgroups(tokens, n), dims, caps, params, True)
    buffers = dict(products.buffers)
    if dims["prologue"] in ("rms_norm", "rms_norm_add_rms_norm"):
        buffers["norm_weight"] = f32(padded_k(dims))
    if dims["prologue"] in _AFTER_SKIP:
        buffers |= dict.fromkeys(("skip", "post_weight", "sum"), f32(padded_k(dims)))
    if rope:
        buffers |= head_buffers(dims)
    return LaunchList(products.dispatches, buffers)
