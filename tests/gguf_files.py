"""Small GGUF files for tests, made with the gguf package."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from numpy.typing import NDArray

KINDS = (
    "f32",
    "f16",
    "bf16",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q4_k",
    "q5_k",
    "q6_k",
    "mxfp4",
    "iq4_nl",
    "iq4_xs",
    "q3_k",
    "q2_k",
)
# Where the f16 scales of the types lie that the gguf package reads but does not write.
_SCALE_BYTES = {
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
    "q3_k": (108,),
    "q2_k": (80, 82),
    "iq3_s": (0,),
}


def blocks(kind: str, weights: NDArray[np.float32]) -> NDArray[Any]:
    """Weights [N, K] as a GGUF tensor of this kind; of types that cannot be quantised here, random blocks."""
    ggml = GGMLQuantizationType[kind.upper()]
    if kind in ("f32", "f16"):
        return weights.astype(kind.replace("f", "float"))
    if kind not in _SCALE_BYTES:
        return np.asarray(quants.quantize(weights, ggml))
    rng = np.random.default_rng(weights.size)
    block, size = GGML_QUANT_SIZES[ggml]
    made = rng.integers(0, 256, (weights.shape[0], weights.shape[1] // block, size), np.uint8)
    for at in _SCALE_BYTES[kind]:
        scales = rng.uniform(0.001, 0.01, (*made.shape[:2], 1)).astype(np.float16)
        made[:, :, at : at + 2] = scales.view(np.uint8)
    return made.reshape(len(weights), -1)


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[str, NDArray[Any]]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    *,
    architecture: str = "llama",
    alignment: int | None = None,
) -> Path:
    """Write {name: (kind, float32 weights)} and metadata by Python type: int is uint32, float is float32."""
    writer = GGUFWriter(path, architecture)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in (metadata or {}).items():
        adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        (writer.add_array if isinstance(value, list) else adders[type(value)])(key, value)
    for name, (kind, weights) in (tensors or {}).items():
        data = weights.astype(np.float32) if kind == "f32" else blocks(kind, weights)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def one_of_each(path: Path, kinds: tuple[str, ...] = KINDS, rows: int = 5, columns: int = 512) -> Path:
    """A file with one matrix [rows, columns] of each kind, named like it, and a vector "norm" of 33 f32."""
    rng = np.random.default_rng(0)
    tensors = {kind: (kind, rng.standard_normal((rows, columns), np.float32)) for kind in kinds}
    return write_gguf(path, {**tensors, "norm": ("f32", rng.standard_normal(33, np.float32))})


# By hand, so that it can be wrong ---------------------------------------------------------------------------


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name: str | bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0, rank: int | None = None) -> bytes:
    packed = struct.pack(f"<I{len(dims)}Q", len(dims) if rank is None else rank, *dims)
    return text(name) + packed + struct.pack("<IQ", kind, offset)


def add_text(source: Path, path: Path, key: str, value: str) -> Path:
    """A copy of a file with one more entry, a text."""
    data = source.read_bytes()
    magic, version, tensors, pairs = struct.unpack_from("<4sIQQ", data)
    more = pair(key, 8, text(value))
    # Tensors begin at a multiple of 32 bytes, also after what is added.
    filling = pair("general.description", 8, text(""))
    filling = pair("general.description", 8, text(" " * (-len(more + filling) % 32)))
    path.write_bytes(struct.pack("<4sIQQ", magic, version, tensors, pairs + 2) + more + filling + data[24:])
    return path


def quantised(source: Path, path: Path, kind: str = "q8_0") -> Path:
    """A copy of a file with matrices of another kind, all but routers: what GGUF's converter leaves in f32 stays so."""
    data, found = source.read_bytes(), GGUFReader(source).tensors
    entries, packed = b"", b""
    for each in found:
        is_matrix = len(each.shape) > 1 and each.name.endswith(".weight")
        is_matrix = is_matrix and not any(
            part in each.name for part in ("_inp", "conv.weight", "conv1d.weight", "_norm")
        )
        ggml = GGMLQuantizationType[kind.upper()] if is_matrix else each.tensor_type
        if is_matrix and int(each.shape[0]) % 32:  # rows of less than a block
            ggml = GGMLQuantizationType.F16
        values = quants.quantize(np.array(each.data), ggml) if is_matrix else each.data
        entries += entry(each.name, tuple(int(size) for size in each.shape), ggml.value, len(packed))
        packed += values.tobytes() + bytes(-values.nbytes % 32)
    head = data[: min(int(each.field.offset) for each in found)] + entries
    path.write_bytes(head + bytes(-len(head) % 32) + packed)
    return path


def whole(pairs: list[bytes], entries: list[bytes], data: int = 64, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(entries), len(pairs)) + b"".join(pairs + entries)
    return head + bytes(-len(head) % 32) + bytes(data)
