"""Models of ONNX as bytes: the few messages of its protobuf format that a list of nodes needs, written by hand.

The package `onnx` would do the same, and is as large as the runtime itself. Field numbers are those of `onnx.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int64": 7}
_FLOAT, _INT, _STRING, _INTS = 1, 2, 3, 7  # of attributes
_IR_VERSION, _OPSET, _MICROSOFT_OPSET = 10, 21, 1
MICROSOFT = "com.microsoft"  # the domain of ops that are not of the standard

_SHORT = [bytes([number]) for number in range(128)]

Shape = Sequence[int | str]  # a name is a dimension that differs from run to run


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> bytes:
    """NodeProto. An input or output that is left out is ""."""
    named = [_bytes(1, name) for name in inputs] + [_bytes(2, name) for name in outputs]
    values = [_bytes(5, _attribute(name, value)) for name, value in attributes.items()]
    return b"".join([*named, _bytes(4, op), *values, _bytes(7, domain)])


def constant(name: str, array: NDArray[Any]) -> bytes:
    """TensorProto with the numbers in it: for small ones."""
    return _tensor(name, array) + _bytes(9, array.tobytes())


def external(name: str, array: NDArray[Any]) -> bytes:
    """TensorProto whose numbers the session is given beside the model, without a copy."""
    return _tensor(name, array) + _bytes(13, _bytes(1, "location") + _bytes(2, "memory")) + _number(14, 1)


def value(name: str, shape: Shape, dtype: str = "float32") -> bytes:
    """ValueInfoProto: an input or output of the model."""
    dims = b"".join(_bytes(1, _number(1, d) if isinstance(d, int) else _bytes(2, d)) for d in shape)
    return _bytes(1, name) + _bytes(2, _bytes(1, _number(1, _TYPES[dtype]) + _bytes(2, dims)))


def model(nodes: Sequence[bytes], tensors: Sequence[bytes], inputs: Sequence[bytes], outputs: Sequence[bytes]) -> bytes:
    """ModelProto."""
    fields = ((1, nodes), (5, tensors), (11, inputs), (12, outputs))
    graph = b"".join(_bytes(field, each) for field, messages in fields for each in messages) + _bytes(2, "graph")
    opsets = (("", _OPSET), (MICROSOFT, _MICROSOFT_OPSET))
    versions = b"".join(_bytes(8, _bytes(1, domain) + _number(2, version)) for domain, version in opsets)
    return _number(1, _IR_VERSION) + _bytes(7, graph) + versions


def _tensor(name: str, array: NDArray[Any]) -> bytes:
    dims = b"".join(_number(1, size) for size in array.shape)
    return dims + _number(2, _TYPES[array.dtype.name]) + _bytes(8, name)


def _attribute(name: str, value: Any) -> bytes:
    if isinstance(value, int):
        return _bytes(1, name) + _number(3, value) + _number(20, _INT)
    if isinstance(value, float):
        return _bytes(1, name) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _number(20, _FLOAT)
    if isinstance(value, str):
        return _bytes(1, name) + _bytes(4, value) + _number(20, _STRING)
    return _bytes(1, name) + b"".join(_number(8, each) for each in value) + _number(20, _INTS)


def _varint(number: int) -> bytes:
    if 0 <= number < 128:
        return _SHORT[number]
    number &= (1 << 64) - 1  # negative ones are written as 64 bits
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _bytes(field: int, data: str | bytes) -> bytes:
    raw = data.encode() if isinstance(data, str) else data
    return _varint(field << 3 | 2) + _varint(len(raw)) + raw
