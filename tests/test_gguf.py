"""GGUF files: what the gguf package reads is read the same; what is broken is refused in one line, whatever broke."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import time
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shaderlm.errors import InputError, ModelError
from shaderlm.formats.find import find
from shaderlm.formats.gguf import GgufFile
from shaderlm.formats.opening import checkpoint_bytes
from shaderlm.formats.weight_formats import WEIGHT_FORMATS
from shaderlm.text import Vocabulary

from .gguf_files import KINDS, entry, one_of_each, pair, text, whole, write_gguf
from .tiers import examples

VOCABULARIES = Path(__file__).parent / "data" / "vocab"
ALL_VALUES = {
    "a.string": "Grüße, 世界",
    "a.bool": True,
    "an.int": 7,
    "a.float": 0.5,
    "an.array": [1, -2, 3],
    "floats": [0.5, 1.5],
    "bools": [True, False],
    "words": ["", "a", "ß"],
    "nested": [[1, 2], [3]],
}


@pytest.fixture(scope="module")
def each(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_of_each(tmp_path_factory.mktemp("gguf") / "each.gguf")


# What is right -------------------------------------------------------------------------------------------


def test_types_are_those_of_the_gguf_package() -> None:
    assert set(WEIGHT_FORMATS) == set(KINDS)
    for name, form in WEIGHT_FORMATS.items():
        kind = gguf.GGMLQuantizationType(form.gguf_type)
        assert (kind.name.lower(), *gguf.GGML_QUANT_SIZES[kind]) == (name, form.block_weights, form.block_bytes)
        assert form.dtype is None or np.dtype(form.dtype).itemsize == form.block_bytes


def test_tensors_begin_at_the_next_multiple_of_the_alignment(tmp_path: Path) -> None:
    """Headers of 32 lengths: one of them ends right there."""
    path, numbers = tmp_path / "file.gguf", np.arange(16, dtype=np.float32)
    for length in range(32):
        path.write_bytes(whole([pair("a", 8, text("x" * length))], [entry("t", (16,))], data=0) + numbers.tobytes())
        with GgufFile.open(path) as file:
            assert file.dense("t").tolist() == numbers.tolist(), length


@pytest.mark.parametrize("name", [*KINDS, "norm"])
def test_tensors_equal_the_gguf_package(each: Path, name: str) -> None:
    theirs = next(tensor for tensor in gguf.GGUFReader(each).tensors if tensor.name == name)
    bytes_there = np.ascontiguousarray(theirs.data).view(np.uint8)
    values = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
    with GgufFile.open(each) as file:
        info = file.tensors[name]
        assert info.shape == tuple(int(n) for n in theirs.shape[::-1])
        assert (info.kind, info.offset, info.nbytes) == (
            "f32" if name == "norm" else name,
            theirs.data_offset,
            theirs.n_bytes,
        )
        dense = file.dense(name)
        assert dense.dtype == np.float32
        assert dense.shape == info.shape
        np.testing.assert_array_equal(dense, values)
        assert np.isfinite(dense).all()
        np.testing.assert_array_equal(file.raw(name).reshape(bytes_there.shape), bytes_there)


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_of_rows(each: Path, kind: str) -> None:
    with GgufFile.open(each) as file:
        np.testing.assert_array_equal(file.raw(kind, 1, 4), file.raw(kind)[1:4])
        np.testing.assert_array_equal(file.dense(kind, 1, 4), file.dense(kind)[1:4])
        assert file.dense(kind, 3).shape == (2, 512)
        assert file.raw(kind, 5).shape == (0, file.tensors[kind].nbytes // 5)
        assert file.dense(kind, 5).shape == (0, 512)


def test_raw_is_a_read_only_view_that_outlives_the_file(each: Path) -> None:
    with GgufFile.open(each) as file:
        view, before = file.raw("q4_1"), file.raw("q4_1").copy()
        assert file.raw("norm").shape == (1, 33 * 4)
        with pytest.raises(ValueError, match="read-only"):
            view[0, 0] = 1
        tracemalloc.start()
        file.raw("f32")
        assert tracemalloc.get_traced_memory()[1] < 5_000  # the tensor has 10,240 bytes
        tracemalloc.stop()
    np.testing.assert_array_equal(view, before)
    file.close()  # again: no harm
    with pytest.raises(InputError, match="is closed"):
        file.raw("q4_1")


def test_dense_is_an_array_of_its_own(each: Path) -> None:
    with GgufFile.open(each) as file:
        for kind in KINDS:
            file.dense(kind)[:] = 0
            assert file.dense(kind).any()


def test_metadata_of_every_type(tmp_path: Path) -> None:
    with GgufFile.open(write_gguf(tmp_path / "m.gguf", metadata=ALL_VALUES)) as file:
        assert file.metadata == {"general.architecture": "llama", **ALL_VALUES}
        assert [type(v) for v in file.metadata["bools"]] == [bool, bool]
        assert file.tensors == {}
        assert file.size == (tmp_path / "m.gguf").stat().st_size


@pytest.mark.parametrize("name", [pytest.param("gpt-2", marks=pytest.mark.long), "llama-spm"])
def test_real_vocabularies_read_as_the_gguf_package_reads_them(name: str) -> None:
    path = VOCABULARIES / f"{name}.gguf"
    fields = gguf.GGUFReader(path).fields
    theirs = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    with GgufFile.open(path) as file:
        assert file.metadata == theirs
        assert len(Vocabulary.from_metadata(file.metadata).tokens) > 30_000


def test_a_vocabulary_of_50_000_tokens_opens_quickly(tmp_path: Path) -> None:
    # 0.08 s where it was written; gguf.GGUFReader took 4.3 s.
    words = [f"token{i}" for i in range(50_000)]
    path = write_gguf(tmp_path / "v.gguf", metadata={"tokens": words, "merges": words})
    times = []
    for _ in range(3):
        start = time.thread_time()
        with GgufFile.open(path) as file:
            assert file.metadata["merges"] == words
        times.append(time.thread_time() - start)
    assert min(times) < 1


def test_opening_does_not_import_the_gguf_package(each: Path) -> None:
    code = "import sys; from shaderlm.formats.gguf import GgufFile; f = GgufFile.open(sys.argv[1]); f.dense('f32')"
    subprocess.run(
        [sys.executable, "-c", f"{code}; assert 'gguf' not in sys.modules", str(each)], check=True, timeout=60
    )


def test_alignment_and_three_dimensions(tmp_path: Path) -> None:
    experts = np.arange(2 * 3 * 32, dtype=np.float32).reshape(2, 3, 32)
    path = write_gguf(tmp_path / "a.gguf", {"v": ("f32", experts[0, 0, :5]), "e": ("f32", experts)}, alignment=256)
    with GgufFile.open(path) as file:
        assert file.tensors["e"].offset % 256 == 0
        assert file.tensors["e"].shape == (2, 3, 32)
        np.testing.assert_array_equal(file.dense("e", 2, 5), experts.reshape(6, 32)[2:5])


@pytest.mark.parametrize("shape", [(1, 32), (32, 1), (1, 1, 32), (4, 1, 8), (1, 4, 8), (4, 8, 1), (1,), (1, 1)])
def test_a_dimension_of_one_is_no_difference(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    plain = values.squeeze() if values.size > 1 else values.reshape(1)
    with GgufFile.open(write_gguf(tmp_path / "a.gguf", {"v": ("f32", values)})) as file:
        assert file.tensors["v"].shape == plain.shape
        np.testing.assert_array_equal(file.dense("v"), plain)
        if plain.ndim == 2:
            np.testing.assert_array_equal(file.dense("v", 1, 3), plain[1:3])


def test_known_but_unsupported_types_are_listed_and_refused_when_used(tmp_path: Path) -> None:
    path = one_of_each(tmp_path / "iq.gguf", ("iq3_s", "f16"))
    with GgufFile.open(path) as file:
        assert file.tensors["iq3_s"].kind == "iq3_s"
        assert file.dense("f16").shape == (5, 512)
        for use in (file.raw, file.dense):
            with pytest.raises(ModelError, match=r"iq3_s has the type iq3_s, which is not supported; .*q4_0, q4_1.*"):
                use("iq3_s")


def test_wrong_arguments(each: Path) -> None:
    with GgufFile.open(each) as file:
        with pytest.raises(ModelError, match="no tensor 'q4_L'; did you mean q4_"):
            file.raw("q4_L")
        for first, end in ((-1, 2), (3, 2), (0, 6), (6, None)):
            with pytest.raises(InputError, match="0 ≤ first ≤ end ≤ 5"):
                file.raw("q4_0", first, end)
        with pytest.raises(InputError, match="whole numbers"):
            file.raw("q4_0", 0.5)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="≤ 1"):
            file.dense("norm", 0, 33)
    with pytest.raises(InputError, match="got int"):
        GgufFile.open(3)  # type: ignore[arg-type]


# What is not a GGUF file ---------------------------------------------------------------------------------


def rejection(path: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        GgufFile.open(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    assert "does not exist" in rejection(tmp_path / "none.gguf")
    assert "is a directory" in rejection(tmp_path)
    assert "cannot be a path" in rejection("a\0b")
    assert "cannot be read" in rejection("a" * 5000)
    (tmp_path / "empty.gguf").touch()
    assert "is empty" in rejection(tmp_path / "empty.gguf")


def test_a_pipe_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in rejection(tmp_path / "pipe.gguf")


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.gguf").write_bytes(b"GGUF")

    def denied(*_: Any, **__: Any) -> Any:  # for the superuser no mode forbids reading
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    assert "permission denied" in rejection(tmp_path / "secret.gguf")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            struct.pack("<Q", 20) + b'{"__metadata__":{}} ' + bytes(9),
            "a safetensors file: give the folder that it lies in",
        ),
        (b"PK\x03\x04" + bytes(30), "ZIP.*PyTorch"),
        (b"\x80\x02\x8a\x0a", "pickle"),
        (b"\n<!DOCTYPE html><html>", "HTML page"),
        (b"<HTML>", "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer.*git lfs pull"),
        (b"tjgg\x03\0\0\0", "before 2023"),
        (b'{"error": "not found"}', "JSON"),
        (bytes(100), "zeros"),
        (b"\x07something", "begins with the bytes 07 73"),
        (b"G", "text, it begins with 'G'"),
        (b"The capital of France", "text, it begins with 'The capital of F'"),
    ],
)
def test_strangers_are_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=f"is not a GGUF file; it looks like .*{said}"):
        GgufFile.open(path)


# What is broken ------------------------------------------------------------------------------------------


U8S = struct.pack("<IQ", 0, 40)  # an array of 40 bytes
BROKEN = {
    "version 1": (whole([], [], version=1), "version 1 is not supported, 2 and 3 are"),
    "version 4": (whole([], [], version=4), "version 4 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "ends in the version": (b"GGUF\x03", "the version at byte 4 needs 4 bytes, 1 are left"),
    "tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "number of tensors is 1152921504606846976, but only 8"),
    "pairs": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63) + bytes(99), "number of metadata entries is 92233720"),
    "long key": (whole([struct.pack("<Q", 1 << 62) + bytes(20)], []), "metadata key .* has 4611686018427387904 bytes"),
    "long string": (whole([pair("a", 8, struct.pack("<Q", 5000))], []), "'a' .*has 5000 bytes, 83 follow"),
    "long array": (
        whole([pair("a", 9, struct.pack("<IQ", 4, 1 << 40))], []),
        "length of metadata 'a' is 1099511627776",
    ),
    "numbers": (whole([pair("a", 9, struct.pack("<IQ", 4, 60))], []), "'a' .*needs 240 bytes"),
    "nested": (whole([pair("a", 9, struct.pack("<IQ", 9, 1) * 9)], []), "nested 5 deep"),
    "value type": (whole([pair("a", 13, bytes(8))], []), "'a' has the unknown value type 13"),
    "element type": (whole([pair("a", 9, struct.pack("<IQ", 77, 1))], []), "unknown value type 77"),
    "bool": (whole([pair("a", 7, b"\x02")], []), "'a' must hold booleans"),
    "same key": (whole([pair("a", 0, b"1"), pair("a", 0, b"1")], []), "key 'a' is there twice"),
    "no key": (whole([pair("", 0, b"1")], []), "key '' is empty"),
    "key not text": (whole([pair(b"\xff\xfe", 0, b"1")], []), "metadata key at byte 32 is not UTF-8"),
    "value not text": (whole([pair("a", 8, text(b"ab\xc3"))], []), "metadata 'a' at byte .* is not UTF-8"),
    "alignment 0": (whole([pair("general.alignment", 4, struct.pack("<I", 0))], []), "power of two .*it is 0"),
    "alignment 24": (whole([pair("general.alignment", 4, struct.pack("<I", 24))], []), "power of two .*it is 24"),
    "alignment 2³¹": (whole([pair("general.alignment", 4, struct.pack("<I", 1 << 31))], []), "power of two"),
    "alignment text": (whole([pair("general.alignment", 8, text("32"))], []), "power of two .*it is '32'"),
    "alignment bool": (whole([pair("general.alignment", 7, b"\x01")], []), "power of two .*it is True"),
    "split": (
        whole([pair("split.count", 2, struct.pack("<H", 3))], []),
        "one of 3 parts of a checkpoint; the parts must lie beside each other",
    ),
    "rank 0": (whole([], [entry("w", (), rank=0)] * 1), "'w' must have 1 to 4 dimensions, it has 0"),
    "rank 5": (whole([], [entry("w", (1,) * 5)]), "'w' must have 1 to 4 dimensions, it has 5"),
    "dimension 0": (whole([], [entry("w", (4, 0))]), r"'w' has the impossible dimensions \[4, 0\]"),
    "overflow": (whole([], [entry("w", (1 << 33, 1 << 33))]), "'w' has the impossible dimensions"),
    "columns": (whole([], [entry("w", (48,), 2)]), "'w': rows of q4_0 must be a multiple of 32 long, got 48"),
    "offset": (whole([], [entry("w", (4,), 0, 8)]), "'w' begins at 8, not a multiple of 32"),
    "truncated": (whole([], [entry("w", (32,))]), "'w' needs 128 bytes, 64 are there: the file is truncated; download"),
    "far": (whole([], [entry("w", (4,), 0, 1 << 62)]), "'w' needs 16 bytes, 0 are there: the file is truncated"),
    "overlap": (whole([], [entry("v", (4,), 0, 32), entry("w", (9,))]), "the tensors 'w' and 'v' overlap"),
    "type": (whole([], [entry("w", (4,), 4_000_000_000)]), "'w' has the unknown type number 4000000000"),
    "removed type": (whole([], [entry("w", (32,), 4)]), "'w' has the unknown type number 4;"),
    "same tensor": (whole([], [entry("w", (4,)), entry("w", (4,))]), "tensor name 'w' is there twice"),
    "no name": (whole([], [entry("", (4,))]), "tensor name '' is empty"),
    "name not text": (whole([], [entry(b"\xff", (4,))]), "tensor's name at byte 32 is not UTF-8"),
    "a name of lines": (whole([], [entry("a\nb", (0,))]), r"'a\\nb' has the impossible"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_headers(tmp_path: Path, name: str) -> None:
    content, said = BROKEN[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=said) as caught:
        GgufFile.open(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_version_2_is_read(tmp_path: Path) -> None:
    (tmp_path / "two.gguf").write_bytes(whole([pair("a", 9, U8S + bytes(40))], [entry("w", (4, 2))], version=2))
    with GgufFile.open(tmp_path / "two.gguf") as file:
        assert file.metadata["a"] == [0] * 40
        assert file.dense("w").shape == (2, 4)


def test_a_damaged_length_does_not_fill_the_memory(tmp_path: Path) -> None:
    # 64 MiB of zeros that claim to be an array of bytes, and to be a string: as lists and text 512 and 64 MiB.
    path, size = tmp_path / "large.gguf", 64 << 20
    for value in (struct.pack("<IQ", 0, size - 200), struct.pack("<Q", size - 200)):
        path.write_bytes(whole([pair("a", 9 if len(value) == 12 else 8, value)], [])[:-64])
        os.truncate(path, size)
        tracemalloc.start()
        rejection(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20


@cache
def sound() -> bytes:
    """A small sound file: an array, a nested one, strings, and two tensors."""
    strings = pair("s", 9, struct.pack("<IQ", 8, 2) + text("ab") + text("ü"))
    nested = pair("n", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ2h", 3, 2, -1, 5))
    pairs = [strings, nested, pair("general.alignment", 4, struct.pack("<I", 32)), pair("f", 6, struct.pack("<f", 1.5))]
    return whole(pairs, [entry("w", (32, 2), 8), entry("v", (4,), 0, 96)], data=112)


def opens_or_is_refused(path: Path, content: bytes) -> bool:
    """True if it opens, and then everything in it can be read; nothing but a ModelError may be raised."""
    path.write_bytes(content)
    try:
        with GgufFile.open(path) as file:
            assert file.size == len(content)
            for name, info in file.tensors.items():
                if info.kind in WEIGHT_FORMATS:
                    assert file.raw(name).size == info.nbytes
                    assert file.dense(name).size == math.prod(info.shape)
    except ModelError as refused:
        message = str(refused)
    else:
        return True
    assert "\n" not in message
    return False


def test_truncated_at_every_length(tmp_path: Path) -> None:
    content = sound()
    assert opens_or_is_refused(tmp_path / "t.gguf", content)
    opened = [n for n in range(len(content)) if opens_or_is_refused(tmp_path / "t.gguf", content[:n])]
    assert opened == []


def test_every_bit_of_the_header_flipped(tmp_path: Path) -> None:
    content = sound()
    opened = 0
    for bit in range(8 * (len(content) - 112)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        opened += opens_or_is_refused(tmp_path / "f.gguf", bytes(damaged))
    assert opened > 0  # a letter of a name, a metadata value


EXTREMES = st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])


@given(
    at=st.lists(st.tuples(st.integers(0, 400), st.one_of(EXTREMES, st.integers(0, 2**64 - 1))), min_size=1, max_size=3),
    size=st.sampled_from([1, 4, 8]),
    end=st.integers(1, 1000),
)
@example(at=[(8, 2**64 - 1)], size=8, end=1000)
@example(at=[(16, 2**63)], size=8, end=1000)
@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_anywhere(tmp_path: Path, at: list[tuple[int, int]], size: int, end: int) -> None:
    damaged = bytearray(sound())
    for start, value in at:
        damaged[start : start + size] = (value % 256**size).to_bytes(size, "little")
    opens_or_is_refused(tmp_path / "d.gguf", bytes(damaged[:end]))


# Parts ---------------------------------------------------------------------------------------------------


def write_parts(folder: Path, per_part: int = 2) -> list[Path]:
    """Five matrices in parts, written by the gguf package."""
    writer = gguf.GGUFWriter(folder / "x.gguf", "llama", split_max_tensors=per_part)
    for i in range(5):
        writer.add_tensor(f"t{i}", np.full((2, 32), i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("x-*.gguf"))


def test_parts_are_one_checkpoint(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    assert [path.name for path in paths] == [f"x-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert find(tmp_path) == paths[0]
    for path in paths:  # whichever is named
        with GgufFile.open(path) as file:
            assert file.metadata["general.architecture"] == "llama"
            assert file.size == checkpoint_bytes(path) == sum(each.stat().st_size for each in paths)
            for i in range(5):
                assert np.array_equal(file.dense(f"t{i}", 1, 2), np.full((1, 32), i))


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    kept = paths[1].read_bytes()
    paths[1].unlink()
    with pytest.raises(ModelError, match=r"x-00002-of-00003\.gguf does not exist"):
        GgufFile.open(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(ModelError, match="must be part 1 of 3, it says that it is 2 of 3"):
        GgufFile.open(paths[0])
    paths[1].write_bytes(kept.replace(b"t2", b"t1"))
    with pytest.raises(ModelError, match=r"tensor 't1' is in x-00001-of-00003\.gguf too"):
        GgufFile.open(paths[0])
    lone = paths[0].rename(tmp_path / "lone.gguf")
    with pytest.raises(ModelError, match="one of 3 parts of a checkpoint"):
        GgufFile.open(lone)
