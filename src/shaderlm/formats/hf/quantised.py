"""Quantised weights of Hugging Face folders as blocks of GGUF: GPTQ, AWQ, compressed-tensors' packed integers, MXFP4.

The first three store weights d · (q − z): whole numbers q of 4 or 8 bits, and for each group of inputs of a row a
factor d and a zero point z. Every such weight has a block format that gives exactly the same number:

    4 bits, z = 8            q4_0   d · (q − 8)
    4 bits, z from 0 to 16   q5_0   d · (p − 16) with p = q − z + 16, which is from 0 to 31
    8 bits, z = 128          q8_0   d · p with p = q − 128

Factors are f16 there. GPTQ and AWQ have them so. A bf16 factor of at least 2^−14 is exact too; a smaller one is rounded
by at most 2^−25, which moves a weight by at most 2^−21. Other factors that f16 does not have are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from ..blocks import BLOCK
from ..safetensors import Safetensors
from ..unpack import unpack
from .matrices import U8, Matrix, Rows, numbers_of, stored

# Where AWQ has column c of eight in a word: at bits 4 · _AWQ_PLACES[c].
_ROWS = 16
_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])


class _Weights(NamedTuple):
    """What a quantised matrix [N, K] consists of. `quants`: uint8 [rows, K] for some rows.

    `factors` and `zeros` are [N, groups], the latter None where all are in the middle.
    """

    shape: tuple[int, int]
    bits: int
    quants: Callable[[Rows], U8]
    factors: Callable[[Rows], NDArray[Any]]
    zeros: Callable[[Rows], NDArray[Any]] | None


def quantised_matrices(files: Safetensors, config: Any) -> dict[str, Matrix]:
    """All tensors of the files, those of quantised matrices under the name that the matrix would have."""
    names = dict.fromkeys(files.tensors)
    method = config.get("quant_method") if isinstance(config, dict) else None
    if not isinstance(method, str) or method not in _METHODS:
        raise _refused(f"quant_method is {method!r:.60}; {', '.join(_METHODS)} are supported")
    about = _METHODS[method]
    about.check(config)
    matrices: dict[str, Matrix] = {}
    for name in list(names):
        if not name.endswith(about.ending):
            continue
        stem = name.removesuffix(about.ending)
        parts = {part: stem + part for part in about.parts if stem + part in names}
        for part in parts.values():
            names.pop(part)
        matrices[f"{stem}.weight"] = about.make(files, stem, parts, config)
    if not matrices:
        raise _refused(f"quant_method is {method!r}, but there is no tensor whose name ends with {about.ending}")
    for name in names:
        if name in matrices:
            raise ModelError(f"the tensor {name!r} is there twice: as it is, and quantised")
        matrices[name] = stored(files, name)
    return matrices


def _refused(reason: str) -> ModelError:
    return ModelError(f"quantization_config of config.json: {reason}. A GGUF file of this model may run")


def _check_keys(config: Mapping[str, Any], known: Mapping[str, tuple[Any, ...] | None]) -> None:
    """Every key must be known and have one of the values that are computed with; None stands for any value."""
    for key, value in config.items():
        allowed = known.get(key, ())
        if allowed is not None and value not in (None, False, [], {}) and value not in allowed:
            expected = f"; {', '.join(map(repr, allowed))} can be" if allowed else ""
            raise _refused(f"{key} is {value!r:.60}, which is not computed with{expected}")


def _any(names: str) -> dict[str, None]:
    return dict.fromkeys(names.split())


# Weights → blocks ----------------------------------------------------------------------------------------


def _matrix(stem: str, weights: _Weights) -> Matrix:
    n, k = weights.shape
    groups = weights.factors(slice(0, 0)).shape[1]
    size = k // groups if groups else 0
    if not groups or k % groups or size % BLOCK:
        raise _refused(f"{stem} has {k} inputs in {groups} groups; a group must be of a multiple of {BLOCK}")
    if weights.bits == 8 and weights.zeros is not None:
        raise _refused(f"{stem} has 8 bits and zero points of its own; only 4 bits can")
    kind = "q8_0" if weights.bits == 8 else "q4_0" if weights.zeros is None else "q5_0"

    def rows(which: Rows) -> U8:
        q, factors = weights.quants(which), _halves(weights.factors(which), stem)
        zeros = weights.zeros(which) if weights.zeros else None
        per_block = size // BLOCK
        offsets = None if zeros is None else np.repeat(zeros, per_block, axis=1)
        blocks = q.reshape(len(q), groups * per_block, BLOCK)
        return _PACK[kind](blocks, np.repeat(factors, per_block, axis=1), offsets)

    return Matrix((n, k), kind, rows)


def _halves(factors: NDArray[Any], stem: str) -> NDArray[np.float16]:
    with np.errstate(over="ignore", invalid="ignore"):
        halves = factors.astype(np.float16)
        moved = np.abs(halves.astype(np.float32) - factors.astype(np.float32))
    if not (moved <= 2.0**-25).all():
        raise _refused(f"a factor of the weights of {stem} is no f16 number")
    return halves


def _nibbles(q: U8) -> U8:
    """The low four bits of 32 numbers in 16 bytes."""
    low, high = q[..., :16] & np.uint8(15), q[..., 16:] & np.uint8(15)
    return low | high << np.uint8(4)


def _q4_0(q: U8, factors: NDArray[np.float16], zeros: Any) -> U8:
    return _with_factors(factors, _nibbles(q))


def _q5_0(q: U8, factors: NDArray[np.float16], zeros: NDArray[np.uint8]) -> U8:
    p = q + np.uint8(16) - zeros[:, :, None]
    high = np.packbits(p >> 4, axis=2, bitorder="little")
    return _with_factors(factors, high, _nibbles(p))


def _q8_0(q: U8, factors: NDArray[np.float16], zeros: Any) -> U8:
    return _with_factors(factors, q ^ np.uint8(128))  # q − 128 as an int8


def _with_factors(factors: NDArray[np.float16], *parts: U8) -> U8:
    head = np.ascontiguousarray(factors)[:, :, None].view(np.uint8)
    return _rows(np.concatenate([head, *parts], axis=2))


def _rows(blocks: U8) -> U8:
    """[rows, blocks, bytes] as [rows, bytes], also if there are none."""
    return blocks.reshape(len(blocks), blocks.shape[1] * blocks.shape[2])


_PACK: Mapping[str, Callable[[U8, NDArray[np.float16], Any], U8]] = {"q4_0": _q4_0, "q5_0": _q5_0, "q8_0": _q8_0}


def _unpacked(words: NDArray[Any], bits: int) -> U8:
    """uint8 [rows, numbers] of int32 [rows, words], the lowest bits first."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    return _rows(np.stack([raw & 15, raw >> 4], axis=2))


def _all_equal(table: NDArray[Any], number: int, bits: int) -> bool:
    """Are all numbers this one, in words of 32 bits or one by one? Reads some rows, up to the first that has others."""
    each = table.dtype.itemsize * 8
    word = np.array([sum(number << at for at in range(0, each, bits))], f"u{each // 8}").view(table.dtype)
    return all(bool((table[first : first + _ROWS] == word).all()) for first in range(0, len(table), _ROWS))


def _picked(words: NDArray[Any], which: Rows, bits: int) -> U8:
    """uint8 [numbers, columns] of int32 [words, columns]: some numbers along the first axis, the lowest bits first."""
    at, each = numbers_of(which), 32 // bits
    picked: U8 = (words[at // each] >> (at % each * bits)[:, None] & (1 << bits) - 1).astype(np.uint8)
    return picked


def _bits(stem: str, words: int, numbers: int) -> int:
    """How many bits a number has, if so many are in so many words of 32 bits."""
    bits = 32 * words // numbers if numbers and 32 * words % numbers == 0 else 0
    if bits not in (4, 8):
        raise _refused(f"{stem} has {numbers} inputs in {words} words, which are neither 4 nor 8 bits each")
    return bits


def _tensor(files: Safetensors, stem: str, parts: Mapping[str, str], part: str, *kinds: str) -> NDArray[Any]:
    """A tensor that must be there, with two axes."""
    if part not in parts:
        raise ModelError(f"there is no tensor {stem + part!r} beside the quantised weights; download the folder again")
    info = files.tensors[parts[part]]
    if info.kind not in kinds or len(info.shape) != 2:
        expected = f"a matrix of {' or '.join(kinds)}"
        raise ModelError(f"tensor {info.name!r} must be {expected}, it is {info.kind} {list(info.shape)}")
    return files.numbers(parts[part])


def _in_order(files: Safetensors, name: str | None, stem: str, k: int, groups: int) -> None:
    """The group of every input must be the next one or the same, in equal groups."""
    if name is None:
        return
    info = files.tensors[name]
    order = files.numbers(name).reshape(-1) if info.kind in ("i32", "i64") else np.empty(0)
    if not groups or k % groups or not np.array_equal(order, np.arange(k) // (k // groups)):
        raise _refused(
            f"the inputs of {stem} are in groups by their importance (desc_act, actorder), not one after the other; "
            "this is not computed with"
        )


# GPTQ ----------------------------------------------------------------------------------------------------


def _gptq(files: Safetensors, stem: str, parts: Mapping[str, str], config: Mapping[str, Any]) -> Matrix:
    """Word [i, n] of qweight has inputs of output n from its lowest bits on; zeros are one less than they are (v1)."""
    words = _tensor(files, stem, parts, ".qweight", "i32")
    factors = _tensor(files, stem, parts, ".scales", "f16", "f32")
    stored_zeros = _tensor(files, stem, parts, ".qzeros", "i32")
    order = parts.get(".g_idx")
    if order is None and config.get("desc_act"):
        raise _refused(f"desc_act is set, but there is no tensor {stem}.g_idx")
    k = files.tensors[order].shape[0] if order else 32 * words.shape[0] // _bits_of_config(config)
    bits, n, groups = _bits(stem, words.shape[0], k), words.shape[1], factors.shape[0]
    if factors.shape != (groups, n) or stored_zeros.shape[0] != groups or stored_zeros.shape[1] * 32 // bits != n:
        raise _shapes(stem, words, factors, stored_zeros)
    _in_order(files, order, stem, k, groups)
    below = int("gptq_v2" not in (config.get("checkpoint_format"), config.get("format")))
    middle = _all_equal(stored_zeros, (1 << bits - 1) - below, bits)

    def zeros(which: Rows) -> U8:
        picked = _picked(stored_zeros.T, which, bits)
        if below and (picked == (1 << bits) - 1).any():
            raise _refused(f"{stem} has a zero point that does not fit {bits} bits; programs read it in different ways")
        return picked + np.uint8(below)

    return _matrix(
        stem,
        _Weights(
            (n, k),
            bits,
            lambda which: _unpacked(words[:, which].T, bits),
            lambda which: factors[:, which].T,
            None if middle else zeros,
        ),
    )


def _bits_of_config(config: Mapping[str, Any]) -> int:
    bits = config.get("bits", config.get("w_bit", 4))
    if bits not in (4, 8) or isinstance(bits, bool):
        raise _refused(f"bits is {bits!r:.60}; 4 and 8 are computed with")
    return int(bits)


def _shapes(stem: str, *arrays: NDArray[Any]) -> ModelError:
    listed = ", ".join(str(list(each.shape)) for each in arrays)
    return ModelError(f"the tensors of {stem} do not fit each other: weights, factors and zero points are {listed}")


_GPTQ_KEYS: Mapping[str, tuple[Any, ...] | None] = {
    **_any(
        "quant_method bits group_size desc_act sym lm_head dynamic damp_percent damp_auto_increment true_sequential "
        "static_groups mse model_name_or_path model_file_base_name meta dataset tokenizer block_name_to_quantize "
        "module_name_preceding_first_block modules_in_block_to_quantize use_cuda_fp16 exllama_config max_input_length "
        "cache_block_outputs use_exllama disable_exllama model_seqlen pad_token_id batch_size backend quantizer"
    ),
    **dict.fromkeys(("checkpoint_format", "format"), ("gptq", "gptq_v2")),
    "pack_dtype": ("int32",),
}


# AWQ -----------------------------------------------------------------------------------------------------


def _awq(files: Safetensors, stem: str, parts: Mapping[str, str], config: Mapping[str, Any]) -> Matrix:
    """Word [k, i] of qweight has outputs 8i … 8i + 7 of input k, in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    words = _tensor(files, stem, parts, ".qweight", "i32")
    factors = _tensor(files, stem, parts, ".scales", "f16", "f32")
    stored_zeros = _tensor(files, stem, parts, ".qzeros", "i32")
    (k, eighth), groups = words.shape, factors.shape[0]
    n = 8 * eighth
    if factors.shape != (groups, n) or stored_zeros.shape != (groups, eighth):
        raise _shapes(stem, words, factors, stored_zeros)

    def outputs(table: NDArray[Any], which: Rows) -> U8:
        """Numbers of some outputs, [outputs, rows of the table]."""
        at = numbers_of(which)
        needed, where = np.unique(at // 8, return_inverse=True)
        bytes_ = np.ascontiguousarray(table[:, needed].T).view(np.uint8).reshape(len(needed), table.shape[0], 4)
        place = _AWQ_PLACES[at % 8]
        picked = bytes_[where.reshape(-1), :, place // 2]
        return np.where((place % 2 == 1)[:, None], picked >> 4, picked & 15).astype(np.uint8)

    middle = _all_equal(stored_zeros, 8, 4)
    return _matrix(
        stem,
        _Weights(
            (n, k),
            4,
            lambda which: outputs(words, which),
            lambda which: factors[:, which].T,
            None if middle else lambda which: outputs(stored_zeros, which),
        ),
    )


_AWQ_KEYS: Mapping[str, tuple[Any, ...] | None] = {
    **_any("quant_method group_size q_group_size modules_to_not_convert do_fuse fuse_max_seq_len modules_to_fuse"),
    **_any("exllama_config backend"),
    **dict.fromkeys(("bits", "w_bit"), (4,)),
    "zero_point": (True,),
    "version": ("gemm", "GEMM"),
}


def _check_awq(config: Mapping[str, Any]) -> None:
    _check_keys(config, _AWQ_KEYS)
    if config.get("zero_point") is not True or config.get("version", "gemm") is None:
        raise _refused("AWQ must have zero_point true and the version gemm")


# compressed-tensors --------------------------------------------------------------------------------------


def _packed(files: Safetensors, stem: str, parts: Mapping[str, str], config: Mapping[str, Any]) -> Matrix:
    """Word [n, i] has inputs of output n, from its lowest bits on. Zero points are packed by outputs, or int8."""
    words = _tensor(files, stem, parts, ".weight_packed", "i32")
    about = files.tensors[parts[".weight_scale"]] if ".weight_scale" in parts else None
    factors = _tensor(files, stem, parts, ".weight_scale", "f16", "bf16", "f32")
    shape = files.numbers(parts[".weight_shape"]).reshape(-1).tolist() if ".weight_shape" in parts else []
    if len(shape) != 2 or shape[0] != words.shape[0] or factors.shape[0] != words.shape[0]:
        raise _shapes(
            stem, words, factors, np.empty(shape if len(shape) < 9 and all(0 <= n < 99 for n in shape) else 0)
        )
    n, k = shape
    bits, groups = _bits(stem, words.shape[1], k), factors.shape[1]
    _in_order(files, parts.get(".weight_g_idx"), stem, k, groups)
    zeros: Callable[[Rows], U8] | None = None
    if ".weight_zero_point" in parts:
        table, each = _tensor(files, stem, parts, ".weight_zero_point", "i32", "i8"), 32 // bits
        packed = table.dtype != np.int8
        if table.shape != (-(-n // each) if packed else n, groups):
            raise _shapes(stem, words, factors, table)

        def stored_zeros(which: Rows) -> U8:
            if packed:
                return _picked(table, which, bits)
            zeros = table[which].astype(np.int16) + (1 << bits - 1)
            if zeros.min(initial=0) < 0 or zeros.max(initial=0) >= 1 << bits:
                raise _refused(f"{stem} has a zero point that does not fit {bits} bits")
            return zeros.astype(np.uint8)

        whole, number = (n // each, 1 << bits - 1) if packed else (n, 0)  # rows of the table without padding
        rest = stored_zeros(slice(whole * each if packed else n, n))
        if not _all_equal(table[:whole], number, bits if packed else 8) or (rest != number).any():
            zeros = stored_zeros
    kind = about.kind if about else ""
    return _matrix(
        stem,
        _Weights(
            (n, k),
            bits,
            lambda which: _unpacked(words[which], bits),
            lambda which: _numbers(factors[which], kind),
            zeros,
        ),
    )


def _numbers(values: NDArray[Any], kind: str) -> NDArray[Any]:
    """Numbers of a safetensors file as NumPy's."""
    if kind != "bf16":
        return values
    return unpack(np.ascontiguousarray(values).view(np.uint8), kind).reshape(values.shape)


_PACKED_KEYS: Mapping[str, tuple[Any, ...] | None] = {
    **_any("quant_method ignore config_groups global_compression_ratio quantization_status version"),
    "format": ("pack-quantized",),
}
_GROUP_KEYS: Mapping[str, tuple[Any, ...] | None] = {**_any("targets weights"), "format": ("pack-quantized",)}
_WEIGHTS_KEYS: Mapping[str, tuple[Any, ...] | None] = {
    **_any("group_size symmetric actorder observer observer_kwargs block_structure scale_dtype zp_dtype"),
    "num_bits": (4, 8),
    "type": ("int",),
    "strategy": ("group", "channel"),
}


def _check_packed(config: Mapping[str, Any]) -> None:
    _check_keys(config, _PACKED_KEYS)
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else [None]:
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(group, dict) or not isinstance(weights, dict) or weights.get("type", "int") != "int":
            raise _refused(f"config_groups must say how weights are quantised, one is {group!r:.60}")
        _check_keys(group, _GROUP_KEYS)
        _check_keys(weights, _WEIGHTS_KEYS)


# MXFP4 ---------------------------------------------------------------------------------------------------


def _mxfp4(files: Safetensors, stem: str, parts: Mapping[str, str], config: Mapping[str, Any]) -> Matrix:
    """Blocks [..., K / 32, 16] have numbers 2j and 2j + 1 in byte j, GGUF's have j and j + 16."""
    if "_scales" not in parts:
        raise ModelError(f"there is no tensor {stem}_scales beside {stem}_blocks; download the folder again")
    codes, exponents = (files.tensors[parts[part]] for part in ("_blocks", "_scales"))
    fits = codes.shape == (*exponents.shape, 16) and len(codes.shape) > 2
    if not fits or {codes.kind, exponents.kind} != {"u8"}:
        raise ModelError(f"{stem}_blocks and {stem}_scales do not fit: {list(codes.shape)}, {list(exponents.shape)}")

    def rows(which: Rows) -> U8:
        blocks = files.numbers(codes.name).reshape(-1, *codes.shape[-2:])[which]
        heads = files.numbers(exponents.name).reshape(-1, exponents.shape[-1])[which]
        numbers = np.stack([blocks & 15, blocks >> 4], axis=3).reshape(*blocks.shape[:2], 32)
        return _rows(np.concatenate([heads[:, :, None], _nibbles(numbers)], axis=2))

    return Matrix((*codes.shape[:-2], codes.shape[-2] * 32), "mxfp4", rows)


# Methods -------------------------------------------------------------------------------------------------


class _Method(NamedTuple):
    """How the tensor that has the weights ends, what else belongs to a matrix, and who makes it of them."""

    ending: str
    parts: tuple[str, ...]
    check: Callable[[Mapping[str, Any]], None]
    make: Callable[[Safetensors, str, Mapping[str, str], Mapping[str, Any]], Matrix]


_METHODS: Mapping[str, _Method] = {
    "gptq": _Method(
        ".qweight",
        (".qweight", ".qzeros", ".scales", ".g_idx"),
        lambda config: _check_keys(config, _GPTQ_KEYS),
        _gptq,
    ),
    "awq": _Method(".qweight", (".qweight", ".qzeros", ".scales"), _check_awq, _awq),
    "compressed-tensors": _Method(
        ".weight_packed",
        (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
        _check_packed,
        _packed,
    ),
    "mxfp4": _Method(
        "_blocks",
        ("_blocks", "_scales"),
        lambda config: _check_keys(config, _any("quant_method modules_to_not_convert dequantize")),
        _mxfp4,
    ),
}
