"""What the dims of an op must satisfy together. Each raises an InputError that says what was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InputError
from ..formats.weight_formats import WEIGHT_FORMATS

Condition = Callable[[str, dict[str, Any]], None]
# How an op for experts combines gate and up: pointwise ops.
EXPERT_GATES = ("silu_mul", "swiglu_clamped")


def heads_are_grouped(op: str, dims: dict[str, Any]) -> None:
    """Every kv head serves equally many query heads."""
    if not dims["Hkv"] or dims["Hq"] % dims["Hkv"]:
        given = f"Hq={dims['Hq']}, Hkv={dims['Hkv']}"
        raise InputError(f"{op}: the query heads must be a multiple of the kv heads, got {given}")


def rows_see_their_own_keys(op: str, dims: dict[str, Any]) -> None:
    """Where it is known how many keys the last row sees."""
    if 0 < dims["keys"] < dims["tokens"]:
        raise InputError(f"{op}: keys must be 0 (unknown) or at least tokens={dims['tokens']}, got {dims['keys']}")


def rotary_fits(op: str, dims: dict[str, Any]) -> None:
    """Pairs of a head are rotated."""
    D, rotary = dims["D"], dims["rotary"]
    if D % 2 or rotary % 2 or rotary > D:
        raise InputError(f"{op}: D and rotary must be even and rotary at most D, got D={D}, rotary={rotary}")


def heads_are_columns(op: str, dims: dict[str, Any]) -> None:
    """What attention gives is what a matrix is multiplied with."""
    if dims["K"] != dims["Hq"] * dims["D"]:
        raise InputError(f"{op}: K must be Hq · D = {dims['Hq'] * dims['D']}, got {dims['K']}")


def nothing_or_added(op: str, dims: dict[str, Any]) -> None:
    """What becomes of sums."""
    if dims["epilogue"] not in ("none", "add"):
        raise InputError(f"{op}: the epilogue must be none or add, got {dims['epilogue']!r}")


def blocks_are_whole(op: str, dims: dict[str, Any]) -> None:
    """Rows of a weight consist of whole blocks."""
    multiple = WEIGHT_FORMATS[dims["format"]].block_weights
    if dims["K"] % multiple:
        raise InputError(f"{op}: K must be a multiple of {multiple} for {dims['format']}, got {dims['K']}")


def rows_are_pairs(op: str, dims: dict[str, Any]) -> None:
    """Gate and up take turns."""
    if dims["epilogue"] in ("silu_mul", "gelu_mul") and dims["N"] % 2:
        raise InputError(f"{op}: N must be even, gate and up in turns; got {dims['N']}")


def rows_are_heads(op: str, dims: dict[str, Any]) -> None:
    """The rows of the weight are queries, keys and values."""
    if dims["epilogue"] != "rope_kv_write":
        return
    rotary_fits(op, dims)
    rows = (dims["Hq"] + 2 * dims["Hkv"]) * dims["D"]
    if dims["N"] != rows:
        raise InputError(f"{op}: N must be (Hq + 2 Hkv) · D = {rows}, got {dims['N']}")


def rounded_in_blocks(op: str, dims: dict[str, Any]) -> None:
    """What is rounded between two products is one row of whole blocks, which gate and up make."""
    one_row = dims["tokens"] == 1 and not dims["batched"]
    given = f"tokens={dims['tokens']}, batched={dims['batched']}"
    if dims["prologue"] == "int16_activations" and not (one_row and dims["K"] % 32 == 0):
        raise InputError(f"{op}: rounded inputs are one token, not batched, with K in 32s, got {given}, K={dims['K']}")
    gated = dims["epilogue"] in ("silu_mul", "gelu_mul")
    if dims["rounded"] and not (one_row and gated and dims["N"] % 64 == 0):
        given += f", N={dims['N']}, epilogue={dims['epilogue']!r}"
        raise InputError(f"{op}: rounded results are one token's silu_mul or gelu_mul, with N in 64s, got {given}")


def columns_are_there(op: str, dims: dict[str, Any]) -> None:
    """A slice is inside its tensor."""
    last = dims["first"] + dims["step"] * (dims["count"] - 1)
    if last >= dims["width"]:
        wanted = f"{dims['first']} … {last}"
        raise InputError(f"{op}: rows have {dims['width']} columns, asked for {wanted}")


def period_divides(op: str, dims: dict[str, Any]) -> None:
    """Operands that repeat, repeat as a whole."""
    for name in ("period", "tokens"):
        if dims["count"] % dims[name]:
            raise InputError(f"{op}: count must be a multiple of {name}, got {dims['count']} and {dims[name]}")


def rows_are_whole(op: str, dims: dict[str, Any]) -> None:
    """Every token has as many values."""
    if dims["count"] % dims["tokens"]:
        raise InputError(f"{op}: count must be a multiple of tokens, got {dims['count']} and {dims['tokens']}")


def one_group_is_enough(op: str, dims: dict[str, Any]) -> None:
    """A group longer than K is one group: keep its length in bounds, and its divisors."""
    dims["group_size"] = min(dims["group_size"], -(-dims["K"] // 128) * 128)


def experts_are_there(op: str, dims: dict[str, Any]) -> None:
    """A row chooses different experts."""
    if dims["used"] > dims["experts"]:
        raise InputError(f"{op}: used must be at most experts={dims['experts']}, got {dims['used']}")


def experts_rows_are_pairs(op: str, dims: dict[str, Any]) -> None:
    """Gate and up take turns in the matrix of every expert."""
    if dims["combine"] in EXPERT_GATES and dims["N"] % 2:
        raise InputError(f"{op}: N must be even, gate and up in turns; got {dims['N']}")


def sums_have_residuals(op: str, dims: dict[str, Any]) -> None:
    """What is added to results is added to the sum over the experts."""
    if dims["residual"] and dims["combine"] != "sum":
        raise InputError(f"{op}: a residual needs combine='sum', got {dims['combine']!r}")


def experts_prologue(op: str, dims: dict[str, Any]) -> None:
    """A norm is for inputs that the experts of a row share."""
    known = ("none",) if dims["combine"] == "sum" else ("none", "rms_norm")
    if dims["prologue"] not in known:
        given = f"combine={dims['combine']!r} and prologue={dims['prologue']!r}"
        raise InputError(f"{op}: the prologue must be {' or '.join(known)}, got {given}")
