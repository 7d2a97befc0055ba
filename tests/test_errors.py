"""Bad arguments to every op: the right exception, words that help, and nothing changed on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shaderlm import ops
from shaderlm.errors import InputError, ShaderlmError
from shaderlm.gpu import Device
from shaderlm.ops import pack_q4gsw

from .compare import assert_close


def floats(*shape: int) -> Any:
    """Ordinary float32 values."""
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def q4(n: int, k: int, group: int) -> dict[str, Any]:
    weight, scales = pack_q4gsw(floats(n, k), group)
    return {"weight": weight, "scales": scales, "group_size": group}


def kv(s: int, hq: int, hkv: int, d: int, dtype: Any = np.float32, c: int = 6) -> dict[str, Any]:
    caches = {name: floats(c, hkv, d + i)[..., :d].astype(dtype) for i, name in enumerate(("k_cache", "v_cache"))}
    return {"q": floats(s, hq, d), "k": floats(s, hkv, d), "v": floats(s, hkv, d), **caches, "pos": 1}


GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "add": lambda: {"a": floats(3, 4), "b": floats(4)},
    "mul": lambda: {"a": floats(3, 4), "b": floats(3, 4)},
    "silu_mul": lambda: {"gate": floats(3, 4), "up": floats(3, 4)},
    "rms_norm": lambda: {"x": floats(3, 8), "weight": floats(8)},
    "rms_norm_mul": lambda: {"x": floats(3, 8), "weight": floats(8)},
    "add_rms_norm": lambda: {"a": floats(3, 8), "b": floats(3, 8), "weight": floats(8)},
    "linear_q4gsw": lambda: {"x": floats(2, 16), **q4(5, 16, 8), "bias": floats(5)},
    "linear": lambda: {"x": floats(2, 16), "weight": floats(5, 16), "bias": floats(5)},
    "linear_add": lambda: {"x": floats(2, 16), "weight": floats(5, 16), "residual": floats(2, 5), "bias": floats(5)},
    "linear_silu_mul": lambda: {"x": floats(2, 16), "weight": floats(6, 16), "bias": floats(6)},
    "embedding": lambda: {"ids": np.array([0, 4]), "weight": floats(5, 16)},
    "sdpa_kv": lambda: kv(2, 4, 2, 8),
    "rope": lambda: {"x": floats(3, 2, 8), "positions": np.arange(3)},
    "argmax": lambda: {"x": floats(3, 7)},
}
ARRAYS = [(op, name) for op, make in GOOD.items() for name, value in make().items() if isinstance(value, np.ndarray)]


def refuse(op: str, bad: dict[str, Any], words: tuple[str, ...], kind: type[Exception], device: Any) -> str:
    """Call with bad arguments; check the exception, its words, and that no array was written to."""
    given = {**GOOD[op](), **bad}
    before = {name: value.tobytes() for name, value in given.items() if isinstance(value, np.ndarray)}
    with pytest.raises(kind) as caught:
        getattr(ops, op)(**{"device": device, **given})
    message = str(caught.value)
    assert isinstance(caught.value, ShaderlmError)
    assert not [word for word in words if word not in message], message
    assert {name: given[name].tobytes() for name in before} == before, "a refused call changed an array"
    return message


@pytest.mark.parametrize("op", GOOD)
def test_the_good_arguments_are_good(op: str, device: Device) -> None:
    getattr(ops, op)(**GOOD[op](), device=device)


def test_every_public_function_is_tested_here() -> None:
    assert set(ops.__all__) == {*GOOD, "explain", "routes", "pack_q4gsw", "pack_q8_0", "pack_q4_0"}


# Every array argument of every op ------------------------------------------------------------------------

SPOILED: dict[str, Callable[[Any], Any]] = {
    "a list": lambda good: good.tolist(),
    "None in an array": lambda good: np.full(good.shape, None),
    "complex": lambda good: good.astype(np.complex64),
    "bool": lambda good: good.astype(bool),
    "int16": lambda good: good.astype(np.int16),
    "big-endian": lambda good: good.astype(good.dtype.newbyteorder(">")) if good.itemsize > 1 else good.view("S1"),
    "empty": lambda good: good[:0],
    "no columns": lambda good: good[..., :0],
    "a scalar array": lambda good: good.reshape(-1)[0].reshape(()),
    "longer": lambda good: np.concatenate([good, good[:1]]),
    "text": lambda good: np.full(good.shape, "1"),
}
FREE_LENGTH = {
    ("embedding", "ids"),
    ("embedding", "weight"),
    ("argmax", "x"),
    ("rms_norm", "x"),
    ("rms_norm_mul", "x"),
}
FREE_LENGTH |= {("linear", "x"), ("linear_silu_mul", "x"), ("linear_q4gsw", "x"), ("add", "a")}


SPOILT = [(op, name, how) for op, name in ARRAYS for how in SPOILED if how != "longer" or (op, name) not in FREE_LENGTH]


@pytest.mark.parametrize(("op", "name", "how"), SPOILT)
def test_a_spoiled_array_is_refused(op: str, name: str, how: str, device: Device) -> None:
    refuse(op, {name: SPOILED[how](GOOD[op]()[name])}, (op, "got"), InputError, device)


@pytest.mark.parametrize(("op", "name"), [pair for pair in ARRAYS if GOOD[pair[0]]()[pair[1]].dtype == np.float32])
def test_float64_and_float16_are_refused_with_both_dtypes_named(op: str, name: str, device: Device) -> None:
    good = GOOD[op]()[name]
    refuse(op, {name: good.astype(np.float64)}, (op, "float32", "float64"), InputError, device)
    takes_f16 = {(op, "weight") for op in ("linear", "linear_add", "linear_silu_mul", "embedding")}
    if (op, name) not in takes_f16 | {("linear_q4gsw", "scales")}:
        refuse(op, {name: good.astype(np.float16)}, (op, "float32", "float16"), InputError, device)


@pytest.mark.parametrize("op", GOOD)
def test_messages_name_the_argument_as_the_caller_knows_it(op: str, device: Device) -> None:
    for name in [name for known, name in ARRAYS if known == op]:
        refuse(op, {name: [1.0]}, (op, f"{name} must be", "got list"), InputError, device)


# Values and shapes ---------------------------------------------------------------------------------------

_NAN = np.full((2, 5), np.nan, np.float32)
_ONE_INF = np.where(np.eye(2, 5) > 0, np.inf, 1).astype(np.float32)
_CACHE = floats(6, 2, 8)
_LOCKED = floats(6, 2, 8)
_LOCKED.setflags(write=False)
_POOL = floats(7, 2, 8)

BAD: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("add", {"b": floats(3)}, ("[3, 4]", "got [3]")),
    ("add", {"b": floats(1, 4)}, ("[3, 4]", "got [1, 4]")),
    ("add", {"b": floats(2, 3, 4)}, ("[3, 4]", "got [2, 3, 4]")),
    ("mul", {"a": floats(4), "b": floats(4, 4)}, ("[4]", "got [4, 4]")),
    ("silu_mul", {"up": floats(4, 3)}, ("[3, 4]", "got [4, 3]")),
    ("rms_norm", {"weight": floats(7)}, ("weight", "[8]", "got [7]")),
    ("rms_norm", {"eps": float("nan")}, ("eps", "finite", "nan")),
    ("rms_norm", {"eps": -1e-6}, ("eps", "not negative", "-1e-06")),
    ("rms_norm", {"eps": "small"}, ("eps", "number", "'small'")),
    ("rms_norm", {"eps": True}, ("eps", "number", "True")),
    ("rms_norm", {"eps": None}, ("eps", "number", "None")),
    ("rms_norm", {"eps": 1e39}, ("eps", "1e+39")),
    ("rms_norm_mul", {"weight": floats(1, 8)}, ("weight", "[width]", "[1, 8]")),
    ("rms_norm_mul", {"weight": None}, ("weight", "got None", "rms_norm takes none")),
    ("add_rms_norm", {"b": floats(3, 4)}, ("b", "[3, 8]", "got [3, 4]")),
    ("add_rms_norm", {"b": floats(8)}, ("b", "[3, 8]", "got [8]")),
    ("add_rms_norm", {"weight": floats(3)}, ("weight", "[8]", "got [3]")),
    ("linear_q4gsw", {"x": floats(2, 24)}, ("weight", "[5, 12]", "K = 24", "got [5, 8]")),
    ("linear_q4gsw", {"weight": np.zeros((5, 7), np.uint8)}, ("[5, 8]", "K = 16", "got [5, 7]")),
    ("linear_q4gsw", {"weight": np.zeros((5, 8), np.int8)}, ("weight", "uint8", "int8")),
    ("linear_q4gsw", {"weight": np.zeros(40, np.uint8)}, ("weight", "[N, K/2]", "1 dimensions [40]")),
    ("linear_q4gsw", {"group_size": 4}, ("scales", "[4, 5]", "group_size = 4", "got [2, 5]")),
    ("linear_q4gsw", {"group_size": 5}, ("scales", "[4, 5]", "group_size = 5", "got [2, 5]")),
    ("linear_q4gsw", {"group_size": 0}, ("group_size", "at least 1", "got 0")),
    ("linear_q4gsw", {"group_size": -8}, ("group_size", "at least 1", "got -8")),
    ("linear_q4gsw", {"group_size": 8.0}, ("group_size", "whole number", "8.0")),
    ("linear_q4gsw", {"group_size": True}, ("group_size", "whole number", "True")),
    ("linear_q4gsw", {"group_size": None}, ("group_size", "whole number", "None")),
    ("linear_q4gsw", {"scales": floats(5, 2)}, ("scales", "[2, 5]", "got [5, 2]")),
    ("linear_q4gsw", {"scales": _NAN}, ("scales", "finite", "only NaN")),
    ("linear_q4gsw", {"scales": _NAN.astype(np.float16)}, ("scales", "finite", "only NaN")),
    ("linear_q4gsw", {"scales": _ONE_INF}, ("scales", "finite", "NaN or infinity")),
    ("linear_q4gsw", {"bias": floats(4)}, ("bias", "[5]", "got [4]")),
    ("linear_q4gsw", {"bias": floats(1, 5)}, ("bias", "[N]", "[1, 5]")),
    ("linear", {"x": floats(2, 15)}, ("x", "K = 16", "got [2, 15]")),
    ("linear", {"weight": floats(16)}, ("weight", "[N, K]", "[16]")),
    ("linear", {"weight": floats(5, 16).view(np.uint8)}, ("q8_0", "q4_0", "uint8")),
    ("linear", {"format": "iq3_s"}, ("format", "f32, f16, q8_0, q4_0", "'iq3_s'")),
    ("linear", {"format": "f16"}, ("weight", "float16", "got float32")),
    ("linear", {"format": "q8_0"}, ("weight", "uint8", "34", "got float32")),
    ("linear", {"format": "q8_0", "weight": np.zeros((5, 35), np.uint8)}, ("q8_0", "34", "35")),
    ("linear", {"format": "q4_0", "weight": np.zeros((5, 17), np.uint8)}, ("q4_0", "18", "17")),
    ("linear", {"format": "q4_0", "weight": np.zeros((5, 18), np.uint8)}, ("x", "K = 32", "[2, 16]")),
    ("linear", {"bias": floats(16)}, ("bias", "[5]", "got [16]")),
    ("linear", {"format": "q4_k", "weight": np.zeros((5, 145), np.uint8)}, ("q4_k", "144", "145")),
    ("linear", {"format": "q6_k", "weight": np.zeros((5, 210), np.uint8)}, ("x", "K = 256", "[2, 16]")),
    ("linear_add", {"residual": floats(2, 6)}, ("residual", "[2, 5]", "got [2, 6]")),
    ("linear_add", {"residual": None}, ("residual", "NumPy array", "NoneType")),
    ("linear_silu_mul", {"weight": floats(5, 16), "bias": None}, ("N must be even", "gate and up", "got 5")),
    ("embedding", {"ids": np.array([0, -1])}, ("ids", "0 … 4", "got -1")),
    ("embedding", {"ids": np.array([0, 5])}, ("ids", "0 … 4", "got 5")),
    ("embedding", {"ids": np.array([2**32], np.uint64)}, ("ids", "0 … 4", "got 4294967296")),
    ("embedding", {"ids": np.array([[0, 1]])}, ("ids", "[T]", "[1, 2]")),
    ("embedding", {"ids": np.array([0.0])}, ("ids", "int64", "float64")),
    ("embedding", {"format": "q9"}, ("format", "'q9'")),
    ("sdpa_kv", {"q": floats(2, 3, 8)}, ("multiple", "Hq=3", "Hkv=2")),
    ("sdpa_kv", {"q": floats(2, 1, 8)}, ("multiple", "Hq=1", "Hkv=2")),
    ("sdpa_kv", {"pos": 5}, ("C=6", "pos=5", "S=2", "needs 7")),
    ("sdpa_kv", {"pos": 2**40}, ("C=6", "pos=1099511627776")),
    ("sdpa_kv", {"pos": -1}, ("pos", "at least 0", "got -1")),
    ("sdpa_kv", {"pos": 1.0}, ("pos", "whole number", "1.0")),
    ("sdpa_kv", {"pos": True}, ("pos", "whole number", "True")),
    ("sdpa_kv", {"pos": np.array([1])}, ("pos", "whole number", "array")),
    ("sdpa_kv", {"q": floats(2, 8)}, ("q", "[S, Hq, D]", "2 dimensions [2, 8]")),
    ("sdpa_kv", {"k": floats(1, 2, 8)}, ("k", "[2, 2, 8]", "got [1, 2, 8]")),
    ("sdpa_kv", {"k": floats(2, 2, 4)}, ("k", "[2, 2, 8]", "got [2, 2, 4]")),
    ("sdpa_kv", {"v": floats(2, 1, 8)}, ("v", "[2, 2, 8]", "got [2, 1, 8]")),
    ("sdpa_kv", {"k_cache": floats(6, 4, 8)}, ("k_cache", "[C, 2, 8]", "got [6, 4, 8]")),
    ("sdpa_kv", {"v_cache": floats(6, 2, 4)}, ("v_cache", "[C, 2, 8]", "got [6, 2, 4]")),
    ("sdpa_kv", {"v_cache": floats(7, 2, 8)}, ("alike", "[6, 2, 8]", "[7, 2, 8]")),
    ("sdpa_kv", {"v_cache": floats(6, 2, 8).astype(np.float16)}, ("alike", "float32", "float16")),
    (
        "sdpa_kv",
        {"k_cache": floats(6, 2, 8).astype(np.float64)},
        ("k_cache", "float32 or float16", "float64"),
    ),
    ("sdpa_kv", {"k_cache": _LOCKED}, ("k_cache", "writable", "read-only")),
    ("sdpa_kv", {"v_cache": _LOCKED}, ("v_cache", "writable", "read-only")),
    (
        "sdpa_kv",
        {"v_cache": np.broadcast_to(floats(1, 2, 8), (6, 2, 8))},
        ("v_cache", "writable", "read-only"),
    ),
    ("sdpa_kv", {"k_cache": _CACHE, "v_cache": _CACHE}, ("share memory",)),
    ("sdpa_kv", {"k_cache": _POOL[:6], "v_cache": _POOL[1:]}, ("share memory",)),
    ("sdpa_kv", {"scale": float("inf")}, ("scale", "finite", "inf")),
    ("sdpa_kv", {"scale": "1"}, ("scale", "number", "'1'")),
    ("sdpa_kv", {"scale": 1e39}, ("scale", "1e+39")),
    ("rope", {"x": floats(3, 2, 7)}, ("even", "D=7")),
    ("rope", {"x": floats(3, 8)}, ("x", "[T, H, D]", "[3, 8]")),
    ("rope", {"rotary": 3}, ("rotary", "even", "rotary=3")),
    ("rope", {"rotary": 10}, ("rotary", "at most D", "rotary=10")),
    ("rope", {"rotary": 0}, ("rotary", "at least 2", "got 0")),
    ("rope", {"rotary": 4.0}, ("rotary", "whole number", "4.0")),
    ("rope", {"positions": np.array([0, -1, 2])}, ("positions", "got -1")),
    ("rope", {"positions": np.array([0, 1])}, ("positions", "[3]", "got [2]")),
    ("rope", {"positions": np.array([0, 1, 2**31])}, ("positions", "got 2147483648")),
    ("rope", {"theta": 0}, ("theta", "above 0", "0")),
    ("rope", {"theta": -1.0}, ("theta", "above 0", "-1.0")),
    ("rope", {"theta": float("nan")}, ("theta", "finite", "nan")),
    ("rope", {"factors": floats(3)}, ("factors", "[4]", "got [3]")),
    ("rope", {"factors": np.ones(4, np.int64)}, ("factors", "float32", "int64")),
    ("rope", {"factors": np.zeros(4, np.float32)}, ("factors", "0")),
    ("rope", {"factors": np.full(4, np.nan, np.float32)}, ("factors", "nan")),
    ("rope", {"interleaved": 1}, ("interleaved", "True or False", "1")),
]


@pytest.mark.parametrize(
    ("op", "bad", "words"), BAD, ids=[f"{op}-{'-'.join(bad)}-{i}" for i, (op, bad, _) in enumerate(BAD)]
)
def test_bad_value(op: str, bad: dict[str, Any], words: tuple[str, ...], device: Device) -> None:
    refuse(op, bad, (op, *words), InputError, device)


@pytest.mark.parametrize("k", [16, 32], ids=["as given", "prepacked"])
def test_a_group_size_beyond_32_bits_is_refused_or_right(k: int, device: Device) -> None:
    given = {"x": floats(1, k), **q4(5, k, k)}
    expected = ops.linear_q4gsw(**given, device=device)
    try:
        actual = ops.linear_q4gsw(**{**given, "group_size": 2**40}, device=device)
    except InputError as problem:
        assert "group_size" in str(problem)  # noqa: PT017  (one of two right answers)
    else:
        assert_close(actual, expected, "linear", "group_size 2^40")
