"""What the dims of an op must satisfy together. Each condition says what is wrong with dims, or None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..formats.weight_formats import WEIGHT_FORMATS

Dims = dict[str, Any]
Condition = Callable[[Dims], str | None]
# How an op for experts combines gate and up: pointwise ops.
EXPERT_GATES = ("silu_mul", "gelu_mul", "swiglu_clamped")


def heads_are_grouped(d: Dims) -> str | None:
    """Every kv head serves equally many query heads."""
    if d["Hkv"] and d["Hq"] % d["Hkv"] == 0:
        return None
    return f"the query heads must be a multiple of the kv heads, got Hq={d['Hq']}, Hkv={d['Hkv']}"


def rows_see_their_own_keys(d: Dims) -> str | None:
    """Where it is known how many keys the last row sees."""
    if 0 < d["keys"] < d["tokens"]:
        return f"keys must be 0 (unknown) or at least tokens={d['tokens']}, got {d['keys']}"
    return None


def rotary_fits(d: Dims) -> str | None:
    """Pairs of a head are rotated."""
    D, rotary = d["D"], d["rotary"]
    if D % 2 or rotary % 2 or rotary > D:
        return f"D and rotary must be even and rotary at most D, got D={D}, rotary={rotary}"
    return None


def heads_are_columns(d: Dims) -> str | None:
    """What attention gives is what a matrix is multiplied with."""
    columns = d["Hq"] * d["D"]
    return None if d["K"] == columns else f"K must be Hq · D = {columns}, got {d['K']}"


def nothing_or_added(d: Dims) -> str | None:
    """What becomes of sums."""
    return None if d["epilogue"] in ("none", "add") else f"the epilogue must be none or add, got {d['epilogue']!r}"


def blocks_are_whole(d: Dims) -> str | None:
    """Rows of a weight consist of whole blocks."""
    multiple = WEIGHT_FORMATS[d["format"]].block_weights
    return f"K must be a multiple of {multiple} for {d['format']}, got {d['K']}" if d["K"] % multiple else None


def rows_are_pairs(d: Dims) -> str | None:
    """Gate and up take turns, in the matrix of every expert too."""
    gated = d.get("epilogue", d.get("combine")) in EXPERT_GATES
    return f"N must be even, gate and up in turns; got {d['N']}" if gated and d["N"] % 2 else None


def rows_are_heads(d: Dims) -> str | None:
    """The rows of the weight are queries, keys and values."""
    rows = (d["Hq"] + 2 * d["Hkv"]) * d["D"]
    if d["epilogue"] != "rope_kv_write":
        return None
    return rotary_fits(d) or (None if d["N"] == rows else f"N must be (Hq + 2 Hkv) · D = {rows}, got {d['N']}")


def rounded_in_blocks(d: Dims) -> str | None:
    """What is rounded between two products is one row of whole blocks, which gate and up make."""
    one_row = d["tokens"] == 1 and not d["batched"]
    rows = f"tokens={d['tokens']}, batched={d['batched']}"
    if d["prologue"] == "int16_activations" and not (one_row and d["K"] % 32 == 0):
        return f"rounded inputs are one token, not batched, with K in 32s, got {rows}, K={d['K']}"
    gated = d["epilogue"] in ("silu_mul", "gelu_mul")
    if d["rounded"] and not (one_row and gated and d["N"] % 64 == 0):
        shape = f"{rows}, N={d['N']}, epilogue={d['epilogue']!r}"
        return f"rounded results are one token's silu_mul or gelu_mul, with N in 64s, got {shape}"
    return None


def columns_are_there(d: Dims) -> str | None:
    """A slice is inside its tensor."""
    last = d["first"] + d["step"] * (d["count"] - 1)
    return f"rows have {d['width']} columns, asked for {d['first']} … {last}" if last >= d["width"] else None


def period_divides(d: Dims) -> str | None:
    """Operands that repeat, repeat as a whole."""
    if d["count"] % d["period"]:
        return f"count must be a multiple of period, got {d['count']} and {d['period']}"
    return rows_are_whole(d)


def rows_are_whole(d: Dims) -> str | None:
    """Every token has as many values."""
    return (
        f"count must be a multiple of tokens, got {d['count']} and {d['tokens']}" if d["count"] % d["tokens"] else None
    )


def one_group_is_enough(d: Dims) -> str | None:
    """A group longer than K is one group: keep its length in bounds, and its divisors."""
    d["group_size"] = min(d["group_size"], -(-d["K"] // 128) * 128)
    return None


def kernel_has_state(d: Dims) -> str | None:
    """A convolution over one token has nothing to remember."""
    return None if d["kernel"] >= 2 else f"kernel must be at least 2, got {d['kernel']}"


def key_heads_are_shared(d: Dims) -> str | None:
    """Every key head serves equally many value heads."""
    if d["Hv"] % d["Hk"] == 0:
        return None
    return f"the value heads must be a multiple of the key heads, got Hv={d['Hv']}, Hk={d['Hk']}"


def heads_are_in_groups(d: Dims) -> str | None:
    """Every group has equally many heads."""
    return None if d["H"] % d["G"] == 0 else f"the heads must be a multiple of the groups, got H={d['H']}, G={d['G']}"


def experts_are_there(d: Dims) -> str | None:
    """A row chooses different experts."""
    return f"used must be at most experts={d['experts']}, got {d['used']}" if d["used"] > d["experts"] else None


def sums_have_residuals(d: Dims) -> str | None:
    """What is added to results is added to the sum over the experts."""
    wrong = d["residual"] and d["combine"] != "sum"
    return f"a residual needs combine='sum', got {d['combine']!r}" if wrong else None


def sums_are_scaled(d: Dims) -> str | None:
    """One factor for all values is for what a norm is added to."""
    return "scaled needs a residual, to which the norm is added" if d["scaled"] and not d["residual"] else None


def experts_prologue(d: Dims) -> str | None:
    """A norm is for inputs that the experts of a row share."""
    known = ("none",) if d["combine"] == "sum" else ("none", "rms_norm")
    if d["prologue"] in known:
        return None
    return f"the prologue must be {' or '.join(known)}, got combine={d['combine']!r} and prologue={d['prologue']!r}"
