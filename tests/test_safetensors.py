"""safetensors files: what is right is read, and what is not is refused by our own errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.errors import ModelError
from shaderlm.formats.opening import checkpoint_bytes
from shaderlm.formats.safetensors import INDEX, Safetensors

from .safetensors_files import header, to_bytes, write_safetensors

_A = np.arange(6, dtype=np.float32).reshape(2, 3)
_B = np.arange(4, dtype=np.float16)
_TENSORS: dict[str, Any] = {"a": _A, "b": _B}
_DATA = _A.tobytes() + _B.tobytes()


def _open(folder: Path, content: bytes) -> Safetensors:
    (folder / "model.safetensors").write_bytes(content)
    return Safetensors.open(folder)


def test_one_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", _TENSORS)
    found = Safetensors.open(tmp_path)
    assert {name: (info.shape, info.kind) for name, info in found.tensors.items()} == {
        "a": ((2, 3), "f32"),
        "b": ((4,), "f16"),
    }
    assert np.array_equal(found.raw("a", 1, 2).view(np.float32), _A[1:])
    assert np.array_equal(found.raw("b").view(np.float16), _B[None])
    found.close()


def test_parts(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x-1.safetensors", {"a": _A})
    write_safetensors(tmp_path / "x-2.safetensors", {"b": _B})
    index = {"metadata": {"total_size": 32}, "weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    found = Safetensors.open(tmp_path)
    assert set(found.tensors) == {"a", "b"}
    assert np.array_equal(found.raw("a").view(np.float32), _A)
    for name in ("consolidated.safetensors", "pytorch_model.bin"):  # the same weights once more
        (tmp_path / name).write_bytes(bytes(1000))
    assert checkpoint_bytes(tmp_path) == found.size
    found.close()
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    assert checkpoint_bytes(tmp_path) == 10
    (tmp_path / "x-1.safetensors").unlink()
    (tmp_path / "model.safetensors").unlink()
    assert checkpoint_bytes(tmp_path) == 0, "it is not whole"


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": "../x-1.safetensors"}, "of the same folder"),
        ({"a": "/x-1.safetensors"}, "of the same folder"),
        ({"a": 3}, "of the same folder"),
        ({"a": "x-3.safetensors"}, "does not exist"),
        ({"a": "x-1.safetensors", "c": "x-1.safetensors"}, "there is no tensor 'c'"),
        ({"a": "x-1.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"}, "there is no tensor"),
        ({"a": "x-1.safetensors", "b": "x-4.safetensors"}, "is in x-1.safetensors too"),
        ({}, "weight_map must name"),
        (None, "weight_map must name"),
    ],
)
def test_wrong_index(tmp_path: Path, weight_map: Any, said: str) -> None:
    write_safetensors(tmp_path / "x-1.safetensors", {"a": _A})
    write_safetensors(tmp_path / "x-2.safetensors", {"b": _B})
    write_safetensors(tmp_path / "x-4.safetensors", {"a": _A})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=said):
        Safetensors.open(tmp_path)


def _changed(name: str, **fields: Any) -> bytes:
    entries = header(_TENSORS)
    entries[name] |= fields
    return to_bytes(entries, _DATA)


WRONG = {
    "empty": (b"", "is empty"),
    "short": (b"\x08\0\0", "not a safetensors file"),
    "html": (b"<!doctype html><p>no</p>", "not a safetensors file"),
    "long header": ((1 << 40).to_bytes(8, "little") + b"{}", "bytes, 2 follow"),
    "not JSON": (to_bytes(b'{"a":', b""), "JSON text is broken"),
    "not UTF-8": (to_bytes(b'{"\xff":1}', b""), "JSON text is broken"),
    "constant": (to_bytes(b'{"a":NaN}', b""), "JSON text is broken"),
    "deep": (to_bytes(b'{"a":' + b"[" * 9_000, b""), "deeply|broken"),
    "many lists": (to_bytes(b'{"a":[' + b"[]," * 20_000 + b"[]]}", b""), "more lists and objects"),
    "digits": (to_bytes(b'{"a":' + b"9" * 9_000 + b"}", b""), "JSON text is broken"),
    "twice": (to_bytes(b'{"a":1,"a":1}', b""), "'a' is there twice"),
    "entry": (to_bytes({"a": 1}, b""), "must have dtype"),
    "no name": (to_bytes({"": header(_TENSORS)["a"]}, _DATA[:24]), "must have dtype"),
    "more fields": (_changed("a", other=1), "must have dtype"),
    "dtype": (_changed("a", dtype="F4"), "has the dtype 'F4'"),
    "dtype of another type": (_changed("a", dtype=["F32"]), "has the dtype"),
    "shape": (_changed("a", shape=[2, -3]), "impossible shape"),
    "shape of truths": (_changed("a", shape=[True, 6]), "impossible shape"),
    "shape of fractions": (_changed("a", shape=[2.0, 3.0]), "impossible shape"),
    "rank": (_changed("a", shape=[1] * 9), "impossible shape"),
    "huge": (_changed("a", shape=[1 << 62, 1 << 62]), "bytes, 24 are given"),
    "size": (_changed("a", shape=[2, 4]), "needs 32 bytes, 24 are given"),
    "offsets": (_changed("a", data_offsets=[24, 0]), "impossible data_offsets"),
    "three offsets": (_changed("a", data_offsets=[0, 12, 24]), "impossible data_offsets"),
    "overlap": (_changed("b", data_offsets=[20, 28]), "overlaps another"),
    "gap": (_changed("b", data_offsets=[28, 36]), "leaves a gap of 4 bytes"),
    "truncated": (to_bytes(header(_TENSORS), _DATA[:-1]), "1 bytes are missing"),
    "too long": (to_bytes(header(_TENSORS), _DATA + b"12"), "2 bytes too many"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files(tmp_path: Path, name: str) -> None:
    content, said = WRONG[name]
    with pytest.raises(ModelError, match=said):
        _open(tmp_path, content)
