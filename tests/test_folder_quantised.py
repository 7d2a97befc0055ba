"""Quantised weights of folders: numbers written by hand into the published layouts, and what is refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import shaderlm
from shaderlm.errors import ModelError
from shaderlm.formats.hf.quantised import quantised_matrices
from shaderlm.formats.safetensors import Safetensors

from .folders import folder_of, replace_config
from .safetensors_files import bf16, write_safetensors
from .tiny_models import write_tiny

N, K, GROUP = 16, 64, 32  # outputs, inputs, inputs of a group
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": GROUP, "strategy": "group"}
PACKED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": None}},
    "ignore": ["lm_head"],
}


def _numbers(bits: int = 4) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """q [N, K], z [N, groups] and d [N, groups]; the last is what f16 and bf16 have."""
    rng = np.random.default_rng(8)
    q = rng.integers(0, 1 << bits, (N, K))
    z = rng.integers(1, 15, (N, K // GROUP))
    d = rng.integers(129, 255, (N, K // GROUP)) / 4096
    return q, z, d.astype(np.float32)


def _weights(q: NDArray[Any], z: Any, d: NDArray[Any]) -> NDArray[Any]:
    groups = q.reshape(N, d.shape[1], -1).astype(np.float64)
    found: NDArray[Any] = (groups - np.asarray(z)[..., None]) * d[..., None]
    return found.reshape(N, K)


def _words(numbers: NDArray[Any], axis: int, bits: int = 4, order: tuple[int, ...] = tuple(range(8))) -> NDArray[Any]:
    """int32: 32 / bits numbers along an axis in each; number `order[j]` of them at bit `bits · j`."""
    moved = np.moveaxis(numbers, axis, -1)
    grouped = moved.reshape(*moved.shape[:-1], -1, 32 // bits)
    found = np.zeros(grouped.shape[:-1], np.uint64)
    for place in range(32 // bits):
        found |= grouped[..., order[place]].astype(np.uint64) << np.uint64(bits * place)
    return np.moveaxis(found.astype(np.uint32).view(np.int32), -1, axis)


def _gptq(q: NDArray[Any], z: NDArray[Any], d: NDArray[Any], bits: int = 4, less: int = 1) -> dict[str, NDArray[Any]]:
    return {
        "qweight": _words(q.T, 0, bits),
        "qzeros": _words(z.T - less, 1, bits),
        "scales": d.T.astype(np.float16),
        "g_idx": (np.arange(K) // (K // d.shape[1])).astype(np.int32),
    }


def _awq(q: NDArray[Any], z: NDArray[Any], d: NDArray[Any]) -> dict[str, NDArray[Any]]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": _words(q.T, 1, order=order),
        "qzeros": _words(z.T, 1, order=order),
        "scales": d.T.astype(np.float16),
    }


def _packed(q: NDArray[Any], z: NDArray[Any] | None, d: NDArray[Any], bits: int = 4) -> dict[str, NDArray[Any]]:
    found = {"weight_packed": _words(q, 1, bits), "weight_scale": bf16(d), "weight_shape": np.array([N, K])}
    return found if z is None else {**found, "weight_zero_point": _words(z, 0, bits)}


def _read(folder: Path, tensors: dict[str, NDArray[Any]], config: Any) -> tuple[str, NDArray[Any]]:
    """The kind of x.weight, and its values by gguf's own functions."""
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", {f"x.{name}": array for name, array in tensors.items()})
    files = Safetensors.open(folder)
    try:
        matrix = quantised_matrices(files, config)["x.weight"]
        kind = gguf.GGMLQuantizationType[matrix.kind.upper()]
        values = gguf.quants.dequantize(matrix.rows(slice(0, N)), kind)
        assert matrix.shape == (N, K)
        order = np.array([5, 0, 11, 4])
        for which, rows in ((slice(3, 9), np.arange(3, 9)), (order, order)):
            assert np.array_equal(gguf.quants.dequantize(matrix.rows(which), kind), values[rows])
        assert len(matrix.rows(slice(2, 2))) == 0
        return matrix.kind, values
    finally:
        files.close()


def test_words_by_hand() -> None:
    """The helper of this file, against numbers written out."""
    eight = np.array([[1, 2, 3, 4, 5, 6, 7, 15]])
    assert _words(eight, 1).view(np.uint32).tolist() == [[0xF7654321]]
    assert _words(eight, 1, order=(0, 2, 4, 6, 1, 3, 5, 7)).view(np.uint32).tolist() == [[0xF6427531]]
    assert _words(np.array([[1, 2, 3, 255]]), 1, 8).view(np.uint32).tolist() == [[0xFF030201]]


def test_gptq_by_hand(tmp_path: Path) -> None:
    """One word in full: column 2, inputs 8 … 15; its group's zero is stored as 4, so it is 5."""
    tensors = _gptq(np.zeros((N, K), int), np.full((N, 2), 1), np.ones((N, 2)))
    tensors["qweight"][1, 2] = 0x76543210
    tensors["qzeros"] = np.zeros((2, 2), np.int32)
    tensors["qzeros"][0, 0] = 0x00000400
    tensors["scales"][0, 2] = 0.5
    kind, values = _read(tmp_path, tensors, GPTQ)
    assert kind == "q5_0"
    assert values[2, 8:16].tolist() == [-2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0]
    assert values[2, :8].tolist() == [-2.5] * 8
    assert values[2, 32:].tolist() == [-1.0] * 32
    assert values[1].tolist() == [-1.0] * 64


def test_awq_by_hand(tmp_path: Path) -> None:
    """One word in full: input 3 of outputs 8 … 15."""
    tensors = _awq(np.zeros((N, K), int), np.zeros((N, 2), int), np.ones((N, 2)))
    tensors["qweight"][3, 1] = 0x76543210
    tensors["qzeros"][0, 1] = 0x00010000  # at bit 16 is the second column
    kind, values = _read(tmp_path, tensors, AWQ)
    assert kind == "q5_0"
    assert values[8:, 3].tolist() == [0.0, 3.0, 1.0, 5.0, 2.0, 6.0, 3.0, 7.0]
    assert values[9, :5].tolist() == [-1.0, -1.0, -1.0, 3.0, -1.0]
    assert values[9, 32:].tolist() == [0.0] * 32


@pytest.mark.parametrize("method", ["gptq", "gptq_v2", "awq", "packed", "packed int8"])
def test_zero_points(tmp_path: Path, method: str) -> None:
    """All numbers, zero points and factors are found, and every weight is exact."""
    q, z, d = _numbers()
    made: dict[str, tuple[dict[str, NDArray[Any]], Any]] = {
        "gptq": (_gptq(q, z, d), GPTQ),
        "gptq_v2": (_gptq(q, z, d, less=0), {**GPTQ, "checkpoint_format": "gptq_v2"}),
        "awq": (_awq(q, z, d), AWQ),
        "packed": (_packed(q, z, d), PACKED),
        "packed int8": (_packed(q, None, d) | {"weight_zero_point": (z - 8).astype(np.int8)}, PACKED),
    }
    kind, values = _read(tmp_path, *made[method])
    assert kind == "q5_0"
    assert np.array_equal(values, _weights(q, z, d))


@pytest.mark.parametrize("method", ["gptq", "awq", "packed", "packed int8"])
def test_zero_points_are_read_when_weights_are(tmp_path: Path, method: str) -> None:
    """Opening a folder takes no memory for them: 2 MB of zero points here."""
    n, k, groups = 4096, 32 * 512, 512
    words, zeros = np.zeros((k // 8, n), np.int32), np.full((groups, n // 8), 0x12345678, np.int32)
    tensors: dict[str, Any] = {"qweight": words, "qzeros": zeros, "scales": np.ones((groups, n), np.float16)}
    if method == "awq":
        tensors["qweight"] = words.reshape(k, n // 8)
    elif method != "gptq":
        tensors = {"weight_packed": words.reshape(n, k // 8), "weight_shape": np.array([n, k])}
        tensors |= {"weight_scale": np.ones((n, groups), np.float16), "weight_zero_point": zeros.reshape(-1, groups)}
    if method == "packed int8":
        tensors["weight_zero_point"] = np.ones((n, groups), np.int8)
    write_safetensors(tmp_path / "model.safetensors", {f"x.{name}": array for name, array in tensors.items()})
    files = Safetensors.open(tmp_path)
    tracemalloc.start()
    try:
        matrix = quantised_matrices(files, {"gptq": GPTQ, "awq": AWQ}.get(method, PACKED))["x.weight"]
        held, most = tracemalloc.get_traced_memory()
        assert matrix.kind == "q5_0"
        assert held < 100_000
        assert most < 500_000
    finally:
        tracemalloc.stop()
        files.close()


@pytest.mark.parametrize("method", ["gptq", "awq", "packed"])
@pytest.mark.parametrize("group", [GROUP, K])
def test_weights_around_the_middle(tmp_path: Path, method: str, group: int) -> None:
    q, _, d = _numbers()
    d = d[:, : K // group]
    z = np.full(d.shape, 8)
    made: dict[str, tuple[dict[str, NDArray[Any]], Any]] = {
        "gptq": (_gptq(q, z, d), {**GPTQ, "group_size": -1}),
        "awq": (_awq(q, z, d), AWQ),
        "packed": (_packed(q, None, d), PACKED),
    }
    kind, values = _read(tmp_path, *made[method])
    assert kind == "q4_0"
    assert np.array_equal(values, _weights(q, 8, d))


@pytest.mark.parametrize("method", ["gptq", "packed"])
def test_eight_bits(tmp_path: Path, method: str) -> None:
    q, _, d = _numbers(8)
    z = np.full(d.shape, 128)
    made: dict[str, tuple[dict[str, NDArray[Any]], Any]] = {
        "gptq": (_gptq(q, z, d, bits=8), {**GPTQ, "bits": 8}),
        "packed": (_packed(q, None, d, bits=8), PACKED),
    }
    kind, values = _read(tmp_path, *made[method])
    assert kind == "q8_0"
    assert np.array_equal(values, _weights(q, 128, d))


def test_mxfp4_by_hand(tmp_path: Path) -> None:
    """Byte j of a block has numbers 2j and 2j + 1; the scale is 2^(e − 127), codes are 0, ½, 1, 1½, 2, 3, 4, 6."""
    codes = np.zeros((2, N // 2, K // 32, 16), np.uint8)
    codes[1, 1, 1, :8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    exponents = np.full((2, N // 2, K // 32), 127, np.uint8)
    exponents[1, 1, 1] = 129
    (tmp_path / "a").mkdir()
    write_safetensors(tmp_path / "a" / "model.safetensors", {"x_blocks": codes, "x_scales": exponents})
    files = Safetensors.open(tmp_path / "a")
    matrix = quantised_matrices(files, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})["x.weight"]
    assert (matrix.shape, matrix.kind) == ((2, N // 2, K), "mxfp4")
    values = gguf.quants.dequantize(matrix.rows(slice(0, N)), gguf.GGMLQuantizationType.MXFP4)
    wanted = [0.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0]
    assert values[N // 2 + 1, 32:48].tolist() == [*wanted, *(-each for each in wanted)]
    assert np.count_nonzero(values) == 14
    files.close()


_UNUSUAL: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no method": ({"bits": 4}, {}, "quant_method is None; gptq, awq, compressed-tensors"),
    "other method": ({"quant_method": "bitsandbytes"}, {}, "quant_method is 'bitsandbytes'"),
    "no object": ("gptq", {}, "quant_method is None"),
    "no weights": (PACKED, {}, "no tensor whose name ends with .weight_packed"),
    "order": (GPTQ, {"g_idx": np.arange(K, dtype=np.int32)[::-1] // GROUP}, "desc_act, actorder"),
    "order of another type": (GPTQ, {"g_idx": np.zeros(K, np.float32)}, "desc_act, actorder"),
    "no order": ({**GPTQ, "desc_act": True}, {"g_idx": None}, "there is no tensor x.g_idx"),
    "no zeros": (GPTQ, {"qzeros": None}, "there is no tensor 'x.qzeros'"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, {}, "checkpoint_format is 'marlin'"),
    "rotation": ({**GPTQ, "rotation": "hadamard"}, {}, "rotation is 'hadamard'"),
    "three bits": ({**GPTQ, "bits": 3}, {"g_idx": None}, "bits is 3; 4 and 8"),
    "other bits": (GPTQ, {"g_idx": np.zeros(128, np.int32)}, "neither 4 nor 8 bits"),
    "zero of 16": (GPTQ, {"qzeros": np.full((2, 2), -1, np.int32)}, "does not fit 4 bits"),
    "factors": (GPTQ, {"scales": np.full((2, N), np.inf, np.float16)}, "no f16 number"),
    "factors of f32": (GPTQ, {"scales": np.full((2, N), 0.1, np.float32)}, "no f16 number"),
    "fewer factors": (GPTQ, {"scales": np.ones((2, 8), np.float16)}, "do not fit each other"),
    "small groups": (GPTQ, {"scales": np.ones((4, N), np.float16), "g_idx": None, "qzeros": 4}, "a multiple of 32"),
    "flat": (GPTQ, {"qweight": np.zeros(8, np.int32)}, "must be a matrix of i32"),
}


@pytest.mark.parametrize("name", _UNUSUAL)
def test_what_is_not_computed_with_is_refused(tmp_path: Path, name: str) -> None:
    config, changes, said = _UNUSUAL[name]
    tensors: dict[str, Any] = _gptq(*_numbers()) | changes
    if isinstance(tensors["qzeros"], int):
        tensors["qzeros"] = np.full((tensors["qzeros"], 2), 0x66666666, np.int32)
    with pytest.raises(ModelError, match=said):
        _read(tmp_path, {key: array for key, array in tensors.items() if array is not None}, config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "int-quantized"}, "format is 'int-quantized'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
        ({"config_groups": {"a": {"weights": {**_WEIGHTS, "type": "float"}}}}, "config_groups must say"),
        ({"config_groups": {"a": {"weights": _WEIGHTS, "input_activations": {"num_bits": 8}}}}, "input_activations is"),
        ({"config_groups": {"a": {"weights": {**_WEIGHTS, "num_bits": 3}}}}, "num_bits is 3"),
        ({"config_groups": {"a": {"weights": {**_WEIGHTS, "strategy": "tensor"}}}}, "strategy is 'tensor'"),
        ({"config_groups": None}, "config_groups must say"),
    ],
)
def test_other_kinds_of_compressed_tensors_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    q, _, d = _numbers()
    with pytest.raises(ModelError, match=said):
        _read(tmp_path, _packed(q, None, d), {**PACKED, **changes})


@pytest.mark.parametrize("changes", [{"version": "gemv"}, {"zero_point": False}, {"bits": 8}])
def test_other_kinds_of_awq_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="quantization_config of"):
        _read(tmp_path, _awq(*_numbers()), {**AWQ, **changes})


@pytest.mark.parametrize("method", ["gptq", "awq", "packed"])
def test_a_model_of_quantised_weights(tmp_path: Path, method: str) -> None:
    """Logits are those of a folder with the same weights in f32; the rows of q and k are in another order there."""
    folder = folder_of(write_tiny(tmp_path / "tiny.gguf", "llama"), tmp_path / "plain")
    files = Safetensors.open(folder)
    plain = {name: files.numbers(name).copy() for name in files.tensors}
    files.close()
    rng = np.random.default_rng(3)
    quantised: dict[str, NDArray[Any]] = {}
    for name in [name for name in plain if name.endswith("proj.weight")]:
        n, k = plain[name].shape
        q, z, d = rng.integers(0, 16, (n, k)), rng.integers(1, 15, (n, k // 32)), rng.integers(1, 9, (n, k // 32)) / 256
        plain[name] = ((q.reshape(n, -1, 32) - z[..., None]) * d[..., None]).reshape(n, k).astype(np.float32)
        stem = name.removesuffix("weight")
        if method == "packed":
            parts = {"weight_packed": _words(q, 1), "weight_scale": bf16(d.astype(np.float32))}
            parts |= {"weight_shape": np.array([n, k]), "weight_zero_point": _words(z, 0)}
        else:
            order = (0, 2, 4, 6, 1, 3, 5, 7) if method == "awq" else tuple(range(8))
            words, less = (_words(q.T, 1, order=order), 0) if method == "awq" else (_words(q.T, 0), 1)
            parts = {"qweight": words, "qzeros": _words(z.T - less, 1, order=order), "scales": d.T.astype(np.float16)}
        quantised |= {f"{stem}{part}": array for part, array in parts.items()}
    others = {name: array for name, array in plain.items() if not name.endswith("proj.weight")}
    config = {"gptq": GPTQ, "awq": AWQ, "packed": PACKED}[method]
    found = []
    for tensors, about in ((plain, None), (others | quantised, config)):
        write_safetensors(folder / "model.safetensors", tensors)
        replace_config(folder, quantization_config=json.loads(json.dumps(about)))
        with shaderlm.load(folder, device="numpy") as model:
            found.append(model.logits([5, 9, 200, 17, 40]))
    assert np.array_equal(found[0], found[1])
