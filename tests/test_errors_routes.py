"""Bad routes, shapes to explain, devices, weights to pack and kernels: refused in words that help."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm import ops
from shaderlm.errors import DeviceError, InputError, KernelError, RouteError
from shaderlm.gpu import Device, Program, Slot, Step
from shaderlm.kernels import Kernel, compose, rebind
from shaderlm.ops import pack_q4_0, pack_q4gsw, pack_q8_0

from .test_errors import GOOD, floats, kv, q4, refuse

# Routes --------------------------------------------------------------------------------------------------

NOT_HERE: list[tuple[str, dict[str, Any], str, str]] = [
    ("rms_norm", {"x": floats(3, 7), "weight": floats(7)}, "vec4", "width % 4 must be 0, width is 7"),
    (
        "add_rms_norm",
        {"a": floats(1, 6), "b": floats(1, 6), "weight": floats(6)},
        "vec4",
        "width % 4 must be 0, width is 6",
    ),
    ("add", {"a": floats(3, 3), "b": floats(3)}, "vec4", "count % 4 must be 0, count is 9"),
    ("mul", {"a": floats(4, 3), "b": floats(3)}, "vec4", "period % 4 must be 0, period is 3"),
    ("argmax", {}, "split", "width must be above 2048"),
    ("linear", {}, "gemv", "tokens must be 1, tokens is 2"),
    ("linear_q4gsw", {}, "gemv", "tokens must be 1, tokens is 2"),
    ("linear_q4gsw", {}, "gemv_packed", "tokens must be 1, tokens is 2"),
    ("linear_q4gsw", {}, "gemv_bytes", "tokens must be 1, tokens is 2"),
    ("linear_q4gsw", {}, "tile_shared", "K % 32 must be 0, K is 16"),
    (
        "linear_q4gsw",
        {"x": floats(1, 32), **q4(5, 32, 8)},
        "gemv_packed",
        "group_size % 32 must be 0, group_size is 8",
    ),
    ("linear_q4gsw", {"x": floats(1, 12), **q4(5, 12, 8)}, "gemv", "K % 8 must be 0, K is 12"),
    (
        "linear_q4gsw",
        {"x": floats(1, 16), **q4(5, 16, 4)},
        "gemv",
        "group_size % 8 must be 0, group_size is 4",
    ),
    (
        "linear_q4gsw",
        {"x": floats(2, 16), **q4(5, 16, 5)},
        "tile",
        "group_size % 8 must be 0, group_size is 5",
    ),
    ("linear_q4gsw", {"x": floats(1, 15), **q4(5, 15, 8)}, "gemv_bytes", "K must be even, K is 15"),
    ("sdpa_kv", kv(2, 4, 2, 8, np.float16), "strided", "the cache is f16"),
    ("sdpa_kv", kv(1, 1, 1, 516), "coalesced", "D must be at most 512, D is 516"),
    ("sdpa_kv", kv(1, 1, 1, 1028), "flash", "D must be at most 1024, D is 1028"),
]


@pytest.mark.parametrize(("op", "given", "route", "reason"), NOT_HERE)
def test_a_route_that_does_not_apply(op: str, given: dict[str, Any], route: str, reason: str, device: Device) -> None:
    refuse(op, {**given, "route": route}, (op, route, "does not apply", reason), RouteError, device)


def test_a_feature_that_the_device_lacks(plain_device: Device) -> None:
    given = {"x": floats(1, 32), "weight": np.zeros((5, 34), np.uint8), "format": "q8_0", "route": "gemv_int16"}
    words = ("gemv_int16", "needs subgroups", "this device does not have")
    refuse("linear", given, words, RouteError, plain_device)


@pytest.mark.parametrize("op", GOOD)
@pytest.mark.parametrize("route", ["", "auto", "nope", 3])
def test_an_unknown_route_lists_the_known_ones(op: str, route: Any, device: Device) -> None:
    declared = {"rms_norm": "rms_norm_mul", "sdpa_kv": "attention", "linear_add": "linear", "linear_silu_mul": "linear"}
    known = ops.routes(declared.get(op, op))
    refuse(op, {"route": route}, (op, f"no route {route!r}", ", ".join(known)), RouteError, device)


@pytest.mark.parametrize(
    ("op", "near", "meant"),
    [
        ("linear_q4gsw", "gemv_pack", "gemv_packed"),
        ("sdpa_kv", "coalesed", "coalesced"),
        ("rope", "pair", "pairs"),
    ],
)
def test_a_near_miss_of_a_route_is_answered_with_a_suggestion(op: str, near: str, meant: str, device: Device) -> None:
    refuse(op, {"route": near}, (f"Did you mean {meant!r}?",), RouteError, device)


# explain, routes -----------------------------------------------------------------------------------------

_LINEAR = {"tokens": 1, "K": 32, "N": 4}
_ATTENTION = {"Hq": 4, "Hkv": 2, "D": 8, "tokens": 2}
UNEXPLAINED: list[tuple[Any, dict[str, Any], tuple[str, ...]]] = [
    ("linear_q4gws", {}, ("unknown op 'linear_q4gws'", "Did you mean 'linear_q4gsw'?")),
    ("xyz", {}, ("unknown op 'xyz'", "linear_q4gsw, linear,")),
    (None, {}, ("unknown op None",)),
    ("linear", {"tokens": 1}, ("linear needs K, N", "given: tokens")),
    ("linear", {}, ("linear needs tokens, K, N", "given: nothing")),
    ("linear", {**_LINEAR, "group": 3}, ("no dimension 'group'", "tokens, K, N, format, bias, prologue, epilogue")),
    ("linear", {**_LINEAR, "tokens": 0}, ("tokens", "at least 1", "got 0")),
    ("linear", {**_LINEAR, "tokens": 1.5}, ("tokens", "whole number", "1.5")),
    ("linear", {**_LINEAR, "tokens": True}, ("tokens", "whole number", "True")),
    ("linear", {**_LINEAR, "Tokens": 2}, ("tokens is given twice",)),
    ("linear", {**_LINEAR, "format": "q3"}, ("format", "f32, f16, q8_0, q4_0", "'q3'")),
    ("linear", {**_LINEAR, "bias": 1}, ("bias", "True or False", "1")),
    ("linear", {**_LINEAR, "rounded": True}, ("rounded results", "epilogue='none'")),
    ("linear", {**_LINEAR, "prologue": "int16_activations", "tokens": 3}, ("rounded inputs", "tokens=3")),
    ("linear", {**_LINEAR, "prologue": "softmax"}, ("prologue", "none, int16_activations, rms_norm", "'softmax'")),
    ("linear", {**_LINEAR, "epilogue": "tanh"}, ("epilogue", "none, add, silu_mul", "'tanh'")),
    ("linear", {**_LINEAR, "N": 5, "epilogue": "silu_mul"}, ("N must be even", "got 5")),
    (
        "linear",
        {**_LINEAR, "Hq": 2, "Hkv": 1, "D": 4, "epilogue": "rope_kv_write"},
        ("(Hq + 2 Hkv) · D = 16", "got 4"),
    ),
    ("slice", {"tokens": 1, "width": 8, "first": 6, "count": 3}, ("8 columns", "6 … 8")),
    ("add", {"count": 12, "period": 5}, ("count must be a multiple of period", "12 and 5")),
    ("linear", {**_LINEAR, "format": "q8_0", "K": 33}, ("K", "32", "33")),
    ("linear", {**_LINEAR, "format": "q4_k", "K": 128}, ("K", "multiple of 256 for q4_k", "128")),
    ("rms_norm", {"tokens": 1, "width": 4, "eps": "x"}, ("eps", "number", "'x'")),
    ("attention", {**_ATTENTION, "Hq": 3}, ("Hq=3", "Hkv=2")),
    ("attention", {**_ATTENTION, "keys": 1}, ("keys", "at least tokens=2", "got 1")),
    ("attention", {**_ATTENTION, "keys": -1}, ("keys", "at least 0", "-1")),
    ("attention", {**_ATTENTION, "cache": "f64"}, ("cache", "f32, f16", "'f64'")),
    ("attention", {**_ATTENTION, "context": "alone"}, ("context", "single_pass, split, long_split", "'alone'")),
    ("attention", {**_ATTENTION, "paged": 1}, ("paged", "True or False", "1")),
    ("rope", {"tokens": 1, "H": 1, "D": 7}, ("even", "7")),
    ("rope", {"tokens": 1, "H": 1, "D": 4, "rotary": 6}, ("rotary", "6")),
]


@pytest.mark.parametrize(("op", "shape", "words"), UNEXPLAINED)
def test_explain_refuses_what_has_no_answer(
    op: Any, shape: dict[str, Any], words: tuple[str, ...], device: Device
) -> None:
    with pytest.raises(InputError) as caught:
        ops.explain(op, device=device, **shape)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_explain_takes_numpy_integers_as_the_ops_do(device: Device) -> None:
    shape = {name: np.int64(size) for name, size in _LINEAR.items()}
    assert ops.explain("linear", device=device, **shape) == ops.explain("linear", device=device, **_LINEAR)


def test_routes_of_an_unknown_op() -> None:
    with pytest.raises(InputError, match=r"unknown op 'rms_nrm'. Did you mean 'rms_norm'\?"):
        ops.routes("rms_nrm")


# Devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", GOOD)
def test_a_device_of_the_wrong_type(op: str) -> None:
    refuse(op, {}, ("device must be", "object"), InputError, object())


@pytest.mark.parametrize("spec", ["no such adapter", "99", "-1", "²", " "])
def test_an_unknown_device_lists_the_found_ones(spec: str, device: Device) -> None:
    refuse("sdpa_kv", {}, (repr(spec), "Found: 0:", device.caps.name), DeviceError, spec)
    with pytest.raises(DeviceError, match="Found: 0:"):
        ops.explain("argmax", device=spec, rows=1, width=1)


# Packers -------------------------------------------------------------------------------------------------

PACKERS: list[Callable[[Any], Any]] = [lambda w: pack_q4gsw(w, 8), pack_q8_0, pack_q4_0]


@pytest.mark.parametrize("pack", PACKERS, ids=["q4gsw", "q8_0", "q4_0"])
@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (floats(32), ("[N, K]", "[32]")),
        (floats(2, 1, 32), ("[N, K]", "[2, 1, 32]")),
        (floats(0, 32), ("non-empty", "[0, 32]")),
        (np.ones((2, 32), np.int64), ("float", "int64")),
        (np.full((2, 32), np.nan), ("finite", "NaN")),
        (np.full((2, 32), -np.inf), ("finite", "infinity")),
        (np.full((2, 32), 1e300), ("finite",)),  # too large for float32
        ("weights", ("float", "[N, K]")),
        (None, ("float", "[N, K]")),
    ],
)
def test_weights_that_cannot_be_packed(pack: Callable[[Any], Any], weight: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        pack(weight)
    assert not [word for word in ("pack_q", *words) if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("pack", [pack_q8_0, pack_q4_0])
def test_blocks(pack: Callable[[Any], Any]) -> None:
    with pytest.raises(InputError, match="K must be a multiple of 32, got 33"):
        pack(floats(2, 33))
    with pytest.raises(InputError, match="scale"):  # 1e7 / 127 is above the largest f16
        pack(np.full((2, 32), 1e7, np.float32))


@pytest.mark.parametrize("group_size", [0, -1, 8.0, "8", None, True])
def test_pack_q4gsw_group_size(group_size: Any) -> None:
    with pytest.raises(InputError, match="group_size must be a whole number of at least 1, got"):
        pack_q4gsw(floats(2, 32), group_size)


def test_pack_q4gsw_with_one_huge_group() -> None:
    """A group larger than K is a group of K; it must not cost memory by its size."""
    weight, scales = pack_q4gsw(floats(2, 8), 2**45)
    expected, expected_scales = pack_q4gsw(floats(2, 8), 8)
    np.testing.assert_array_equal(weight, expected)
    np.testing.assert_array_equal(scales, expected_scales)


# Kernels -------------------------------------------------------------------------------------------------

WGSL = """\
@group(0) @binding(0) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(1)
fn main() {
    let value = 1.0;
    out[0] = value;
}
"""


def program(source: str) -> Program:
    return Program({"out": 16}, (Step("the_label", source, (Slot("out", "storage"),), (1, 1, 1)),), ("out",))


def test_the_wgsl_of_the_next_test_is_right(device: Device) -> None:
    assert device.run(program(WGSL))["out"].view(np.float32)[0] == 1.0


@pytest.mark.parametrize(
    ("right", "typo", "line"),
    [
        ("out[0] = value", "out[0] = valeu", ">    6 |     out[0] = valeu;"),
        ("let value = 1.0;", "let value: u32 = 1.0;", ">    5 |     let value: u32 = 1.0;"),
        ("let value = 1.0;", "let value = 1.0", ">    6 |     out[0] = value;"),
        ("array<f32>", "array<f23>", ">    1 | @group(0)"),
        ("fn main", "fn mian", "main"),
    ],
)
def test_a_typo_in_wgsl_shows_its_numbered_line(right: str, typo: str, line: str, device: Device) -> None:
    with pytest.raises(KernelError, match="kernel the_label does not compile") as caught:
        device.run(program(WGSL.replace(right, typo)))
    assert line in str(caught.value)


def test_rebind_of_an_unknown_constant() -> None:
    source = "const WG: u32 = 64u;\nalias value = f32;\n"
    assert rebind(source, {"WG": 32, "value": "f16"}) == "const WG: u32 = 32u;\nalias value = f16;\n"
    with pytest.raises(KernelError, match=r"my_kernel has no const or alias 'W'; it has \['WG', 'value'\]"):
        rebind(source, {"W": 32}, "my_kernel")
    with pytest.raises(KernelError, match="rms_norm_scalar has no const or alias 'LANES_PER_ROW'"):
        compose(Kernel("norm/rms_norm_scalar", ("shared/reduce_tree",)), {"LANES_PER_ROW": 1})


def test_params_must_be_complete() -> None:
    shader = compose(Kernel("norm/rms_norm_scalar", ("shared/reduce_tree",)))
    sizes = {"tokens": 1, "heads": 1, "width": 4}
    for values in (sizes, {**sizes, "eps": 0.0, "more": 1}):
        with pytest.raises(KernelError, match=r"tokens.*heads.*width.*eps.*given"):
            shader.pack_params(values)


def test_a_wgsl_file_that_is_not_there() -> None:
    with pytest.raises(KernelError, match=r"norm/rms_norm_fast\.wgsl"):
        compose(Kernel("norm/rms_norm_fast"))


@pytest.mark.parametrize(
    ("name", "count", "nbytes"),
    [("plain", "WG", 256), ("literal", "2u * WG", 512), ("number", "64u", 256), ("padded", "5u", 32)],
)
def test_workgroup_memory_is_read_from_the_file(
    name: str, count: str, nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[compose.__module__], "_ROOT", tmp_path)
    text = f"const WG: u32 = 64u;\nvar<workgroup> slots: array<f32, {count}>;\n"
    (tmp_path / f"memory_{name}.wgsl").write_text(text, encoding="utf-8")
    assert compose(Kernel(f"memory_{name}")).workgroup_memory == nbytes
