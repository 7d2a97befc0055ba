"""--quantize: blocks as the gguf package makes them, and copies that are whole, kept, found again and removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

import shaderlm
from shaderlm.errors import InputError, ModelError
from shaderlm.formats import gguf_write, quantize
from shaderlm.formats.find import find
from shaderlm.formats.gguf import GgufFile
from shaderlm.formats.hf.folder import Folder
from shaderlm.formats.local_models import complete, remove
from shaderlm.formats.opening import open_checkpoint
from shaderlm.formats.weight_formats import QUANTIZED
from shaderlm.text import Tokenizer, Vocabulary

from .command_line import shaderlm as command
from .folders import folder_of, replace_config
from .test_sentencepiece import DATA, RECORDED
from .tiny_models import write_tiny


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(write_tiny(tmp_path / "tiny.gguf", "qwen3"), tmp_path / "little", dtype="bf16")


def test_blocks_by_hand() -> None:
    """The largest number is −8 times the factor in q4_0, ±127 times in q8_0. Weights i and 16 + i share a byte."""
    row = np.zeros((1, 32), np.float32)
    row[0, :4], row[0, 16:18] = [-4.0, 2.0, 0.25, -0.2], [3.9, 1.0]
    found = quantize.quantize(row, "q4_0")[0]
    assert found[:2].view(np.float16)[0] == 0.5
    assert found[2:].tolist() == [0xF0, 0xAC, 0x89, 0x88, *[0x88] * 12]
    row[0, :4], row[0, 16:18] = [-127.0, 0.5, 1.4, -2.5], [126.6, 0.0]
    found = quantize.quantize(row, "q8_0")[0]
    assert found[:2].view(np.float16)[0] == 1.0
    assert found[2:].view(np.int8)[[0, 1, 2, 3, 16, 17]].tolist() == [-127, 1, 1, -3, 127, 0]


@pytest.mark.parametrize("kind", QUANTIZED)
def test_blocks_of_almost_nothing(kind: str) -> None:
    rows = np.zeros((3, 32), np.float32)
    rows[1, 5], rows[2] = 1e-44, 1e-7
    values = gguf.quants.dequantize(quantize.quantize(rows, kind), gguf.GGMLQuantizationType[kind.upper()])
    assert np.abs(values - rows).max() < 2e-7


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e30])
def test_weights_without_blocks_are_refused(value: float) -> None:
    rows = np.ones((1, 64), np.float32)
    rows[0, 40] = value
    for kind in QUANTIZED:
        with pytest.raises(ModelError, match="x has weights that are no numbers, or too large"):
            quantize.quantize(rows, kind, "x")


def test_a_copy_has_all_of_its_source(folder: Path) -> None:
    """Read by the gguf package: metadata, formats, and the blocks of a matrix."""
    with Folder.open(folder) as source:
        seen: list[tuple[str, int, int]] = []
        path = quantize.quantized_copy(source, "q4_0", lambda *given: seen.append(given))
        assert seen[-1][0] == "quantizing"
        assert seen[-1][1] == seen[-1][2] == sum(info.nbytes for info in source.tensors.values())
        reader = gguf.GGUFReader(path)
        types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        assert types["token_embd.weight"] == "Q8_0"
        assert types["blk.1.ffn_down.weight"] == "Q4_0"
        assert types["blk.0.attn_norm.weight"] == "BF16"
        assert len(types) == len(source.tensors)
        found = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.attn_q.weight")
        wanted = gguf.quants.quantize(source.dense("blk.1.attn_q.weight"), gguf.GGMLQuantizationType.Q4_0)
        assert np.array_equal(found.data, wanted)
        with GgufFile.open(path) as copy:
            own = {key: value for key, value in copy.metadata.items() if key != "shaderlm.quantized.from"}
            assert own == dict(source.metadata)
            assert np.array_equal(copy.dense("blk.0.attn_norm.weight"), source.dense("blk.0.attn_norm.weight"))


@pytest.mark.parametrize("name", RECORDED)
def test_a_copy_of_a_folder_with_a_sentencepiece_model(name: str, tmp_path: Path) -> None:
    count = 1000
    table = np.random.default_rng(0).normal(size=(count, 64)).astype(np.float32)
    tiny = write_tiny(tmp_path / "tiny.gguf", "llama", tensors={"token_embd.weight": table})
    folder = folder_of(tiny, tmp_path / "little")
    replace_config(folder, vocab_size=count)
    (folder / "tokenizer.json").unlink()
    shutil.copy(DATA / f"sentencepiece-{name}.model", folder / "tokenizer.model")
    with Folder.open(folder) as source:
        path = quantize.quantized_copy(source, "q8_0")
    with GgufFile.open(path) as copy:
        tokenizer = Tokenizer(Vocabulary.from_metadata(copy.metadata))
    for text, ids in RECORDED[name]:
        assert tokenizer.encode(text, parse_special=False) == ids, repr(text)


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_a_copy_says_nothing_of_the_files_of_its_source(alignment: int | None, tmp_path: Path) -> None:
    """Parts, or other places of tensors, as the gguf package writes them."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama", split_max_tensors=0 if alignment else 2)
    writer.add_file_type(1)
    if alignment:
        writer.add_custom_alignment(alignment)
    given = {f"t{i}.weight": np.random.default_rng(i).normal(size=(3, 32)).astype(np.float16) for i in range(5)}
    given["n.weight"] = np.ones(3, np.float16)  # its bytes are no multiple of an alignment
    for name, values in given.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_checkpoint(find(tmp_path)) as source:
        path = quantize.quantized_copy(source, "q8_0")
    reader = gguf.GGUFReader(path)
    assert {tensor.name for tensor in reader.tensors} == set(given)
    with GgufFile.open(path) as copy:
        assert set(copy.metadata) == {"general.architecture", "shaderlm.quantized.from"}
        for name, values in given.items():
            assert np.abs(copy.dense(name) - values).max() < 0.02


def test_a_copy_that_does_not_open_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "header", lambda *_: bytes(64))
    with Folder.open(folder) as source, pytest.raises(ModelError, match="not a GGUF file"):
        quantize.quantized_copy(source, "q8_0")
    assert list(quantize.folder().iterdir()) == []


def test_values_of_all_types_come_back(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "general.architecture": "x",
        "a": [True, False],
        "b": [1, -2],
        "c": [0.5, 1e-6],
        "d": ["", "ä"],
        "e": 1 << 40,
        "f": -(1 << 40),
        "g": 1e-6,
        "h": 0.5,
        "i": True,
        "j": [],
        "k": [1, 0.5],
        "l": [1 << 63],
        "o": [1, 2],
        "p": [1 << 31],
        "q": 2,
    }
    body = gguf_write.header({**given, "m": {"x": None}, "n": None}, [gguf_write.Planned("t", (3, 2), "f32")])
    path = tmp_path / "x.gguf"
    path.write_bytes(body + bytes(32))
    with GgufFile.open(path) as file:
        assert dict(file.metadata) == {**given, "m": '{"x": null}', "n": "null"}
        assert file.tensors["t"].shape == (3, 2)
    reader = gguf.GGUFReader(path)
    assert reader.fields["g"].contents() == 1e-6
    assert reader.fields["d"].contents() == ["", "ä"]
    # As converters write them: lists are signed wherever that holds their numbers.
    types = [reader.fields[name].types[-1].name for name in "opq"]
    assert types == ["INT32", "UINT32", "UINT32"]


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_model_is_loaded_quantised(folder: Path, kind: str) -> None:
    """Its logits are near those of the whole model, and those of the copy under its own name."""
    ids = [5, 9, 200, 17, 40]
    with shaderlm.load(folder, device="cpu") as model:
        whole = model.logits(ids)
    with shaderlm.load(folder, device="cpu", quantize=kind) as model:
        found = model.logits(ids)
        assert kind in model.report.types
    size = np.abs(whole).max()
    assert 0 < np.abs(found - whole).max() < (0.02 if kind == "q8_0" else 0.4) * size
    (copy,) = complete()
    assert copy.name.startswith(f"little-{kind}-")
    with shaderlm.load(copy.name, device="cpu") as model:
        assert np.array_equal(model.logits(ids), found)


def test_a_copy_is_made_once_and_again_if_the_source_changes(folder: Path, tmp_path: Path) -> None:
    with Folder.open(folder) as source:
        first = quantize.quantized_copy(source, "q8_0")
        about = first.stat()
        assert quantize.quantized_copy(source, "q8_0") == first
        assert (first.stat().st_mtime_ns, first.stat().st_ino) == (about.st_mtime_ns, about.st_ino)
        assert quantize.quantized_copy(source, "q4_0") != first
    # Another place does not matter, another time or other bytes do.
    moved = tmp_path / "moved" / "little"
    shutil.copytree(folder, moved)
    with Folder.open(moved) as source:
        assert quantize.quantized_copy(source, "q8_0") == first
    weights = moved / "model.safetensors"
    times = weights.stat()
    data = np.frombuffer(weights.read_bytes(), np.uint8).copy()
    data[len(data) // 2 :: 2] ^= 1  # other weights
    weights.write_bytes(data.tobytes())
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    with Folder.open(moved) as source:
        second = quantize.quantized_copy(source, "q8_0")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    with Folder.open(moved) as source:
        third = quantize.quantized_copy(source, "q8_0")
    assert len({first, second, third}) == 3
    assert [path.exists() for path in (first, second, third)] == [True, False, True]  # one of each source and format
    assert len(quantize.copies()) == 3


@pytest.mark.parametrize("changed", ["hf/models.py", "hf/tokenizer.py", "quantize.py", "the version"])
def test_a_copy_is_made_again_if_the_rules_change(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GgufFile.open(write_tiny(tmp_path / "tiny.gguf", "llama")) as source:
        first = quantize._identity(source, "q8_0")
        assert quantize._identity(source, "q8_0") == first
        modules = tmp_path / "modules"
        shutil.copytree(quantize._MODULES, modules, ignore=shutil.ignore_patterns("__pycache__"))
        monkeypatch.setattr(quantize, "_MODULES", modules)
        assert quantize._identity(source, "q8_0") == first
        quantize._rules.cache_clear()
        if changed == "the version":
            monkeypatch.setattr(quantize, "__version__", "1000.0")
        else:
            (modules / changed).write_text((modules / changed).read_text() + "# changed\n")
        assert quantize._identity(source, "q8_0") != first
    quantize._rules.cache_clear()


def test_files_of_processes_that_were_killed_are_removed(folder: Path) -> None:
    """Those that nobody writes any more: not this process's, nor one that changed a moment ago."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    there = quantize.folder()
    there.mkdir(parents=True)
    names = {f".a-q4_0.gguf.{process.pid}.7": 900, f".b-q4_0.gguf.{process.pid}.7": 0}
    names |= {f".c-q4_0.gguf.{os.getpid()}.7": 900, f".d-q4_0.gguf.{os.getpid()}.7": 90_000, ".mine": 90_000}
    for name, age in names.items():
        (there / name).write_bytes(bytes(100))
        os.utime(there / name, (time.time() - age,) * 2)
    assert complete() == []
    assert sorted(path.name[:2] for path in there.iterdir()) == [".b", ".c", ".m"]


def test_a_full_disk_is_found_before_anything_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with Folder.open(folder) as source, pytest.raises(ModelError, match=r"needs 0\.0 GB, 0\.0 GB are free; remove a"):
        quantize.quantized_copy(source, "q8_0")
    assert list(quantize.folder().iterdir()) == []


def test_a_copy_is_whole_or_not_there(folder: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with Folder.open(folder) as source, pytest.raises(KeyboardInterrupt):
        quantize.quantized_copy(source, "q8_0", interrupt)
    assert list(quantize.folder().iterdir()) == []
    assert complete() == []


def test_a_gguf_file_and_what_has_nothing_to_quantise(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", "llama")
    with GgufFile.open(path) as source:
        copy = quantize.quantized_copy(source, "q8_0")
    with GgufFile.open(copy) as again, pytest.raises(InputError, match="no matrices of F32, F16 or BF16"):
        quantize.quantized_copy(again, "q4_0")
    with pytest.raises(InputError, match="quantize must be one of 'q4_0', 'q8_0', got 'q5_0'"):
        shaderlm.load(path, device="cpu", quantize="q5_0")


def test_a_tensor_past_the_end_of_the_file_is_not_quantised(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", "llama")
    path.write_bytes(path.read_bytes()[:-100])
    before = complete()
    with pytest.raises(ModelError, match="are there: the file is truncated"):
        shaderlm.load(path, device="cpu", quantize="q8_0")
    assert complete() == before


@pytest.mark.skipif(sys.platform != "linux", reason="file names are Unicode")
def test_names_of_files_that_are_not_utf8_or_long(folder: Path) -> None:
    for name in (os.fsdecode(b"little\xff"), "🦙" * 60):
        moved = folder.rename(folder.with_name(name))
        with shaderlm.load(moved, device="cpu", quantize="q8_0") as model:
            assert model.report.types["q8_0"] > 0
        moved.rename(folder)


def test_the_command_line(folder: Path) -> None:
    made = command("generate", "-m", folder, "--device", "cpu", "--quantize", "q8_0", "-n", "2", "the")
    assert made.code == 0, made.err
    (copy,) = complete()
    listed = command("models").out
    assert copy.name in listed
    assert str(find(copy.name)) in listed
    assert f"removed {copy.name}" in command("rm", copy.name).out
    assert complete() == []
    with pytest.raises(ModelError, match="there is no model"):
        remove(copy.name)
