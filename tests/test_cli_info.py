"""`shaderlm info`: what a file says, also of models that cannot be run, without weights or a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shaderlm as package
from shaderlm.cli.info import _wrapped as wrapped
from shaderlm.cli.models import load_any
from shaderlm.cli.serve import _check_model
from shaderlm.engine.loading import load_with
from shaderlm.engine.planning import LARGE_GPU, memory, read_header
from shaderlm.errors import InputError, ModelError
from shaderlm.formats.gguf import GgufFile
from shaderlm.runtime.numpy_runner import NumpyRunner
from shaderlm.server.served import ServedModel

from .checkpoints import names, recorded, write_folder
from .checkpoints import write_gguf as write_recorded
from .command_line import shaderlm
from .folders import folder_of, replace_config
from .gguf_files import write_gguf
from .session import Session
from .sweeps import every_third_by_default
from .tiny_models import KINDS, tiny_tokens, write_tiny_llama

pytestmark = pytest.mark.xdist_group("tiny models")

VOCABULARIES = Path(__file__).parent / "data" / "vocab"


def caps(model: Path | str, *arguments: object) -> dict[str, Any]:
    done = shaderlm("info", model, "--json", *arguments)
    found: dict[str, Any] = json.loads(done.out)
    assert (done.code, done.err) == (0 if found["runs"] else 1, "")
    return found


def test_a_model_in_words(tmp_path: Path) -> None:
    done = shaderlm("info", write_tiny_llama(tmp_path / "tiny.gguf", kind="bf16", context=4096))
    assert (done.code, done.err) == (0, "")
    lines = {line[:14].strip(): line[15:] for line in done.out.splitlines()}
    expected = {
        "name": 'tiny (its file says "Tiny Llama")',
        "architecture": "llama",
        "parameters": "78.8 K",
        "context": "4,096",
        "layers": "2",
        "hidden": "64",
        "heads": "4, 2 of keys and values",
        "head width": "16",
        "FFN": "96",
        "vocabulary": f"{len(tiny_tokens())}",
        "rope": "16 dimensions, base 10000",
        "tokenizer": "gpt2, pre-tokenizer gpt-2",
        "chat template": "yes",
    }
    assert {name: lines[name] for name in expected} == expected
    assert lines["tensors bf16"].startswith("15, ")
    assert lines["runs"] == "yes"


def test_the_embedded_model_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    monkeypatch.setattr("shaderlm.formats.default_model.locate", lambda progress: path)
    assert caps("smollm2-135m") == caps(path) | {"name": "smollm2-135m"}
    named = shaderlm("info").out.splitlines()
    assert named[0] == 'name           smollm2-135m (its file says "Tiny Llama")'
    assert named[1:] == shaderlm("info", path).out.splitlines()[1:]


def test_a_model_in_json(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", template=False, layers=3)
    found = caps(path)
    assert found["path"] == str(path)
    assert found["file_bytes"] == path.stat().st_size
    assert (found["layers"], found["chat_template"]) == (3, False)
    assert (found["runs"], found["unsupported_reason"]) == (True, None)
    assert found["rope"] == {"dimensions": 16, "base": 10000.0, "scaling": None, "factor": None}
    assert found["tokenizer"] == {"model": "gpt2", "pre": "gpt-2", "problem": None}
    assert found["cache_bytes_per_1000_tokens"] == {"f16": 2 * 2 * 1000 * 3 * 2 * 16, "f32": 2 * 4 * 1000 * 3 * 2 * 16}
    assert not {"metadata", "tensors"} & set(found)


def test_layers_with_sizes_of_their_own(tmp_path: Path) -> None:
    """Two of four layers have keys and values, of 2 heads of 16 and of 32."""
    path = write_recorded(tmp_path / "gemma4.gguf", recorded("gemma4"))
    assert caps(path)["cache_bytes_per_1000_tokens"] == {"f16": 2 * 2 * 1000 * 2 * 48, "f32": 2 * 4 * 1000 * 2 * 48}
    assert "FFN            96 or 192" in shaderlm("info", path).out.splitlines()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["f16", "q5_1", "q6_k"])
def test_the_estimate_is_what_a_device_then_holds(tmp_path: Path, kind: str) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", kind=kind)
    with package.load(path, device=0) as model:
        held = model.report.weight_bytes  # buffers are rounded up to 16 bytes
    assert caps(path)["gpu_weight_bytes"] == pytest.approx(held, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_counted(tmp_path: Path, kind: str) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", kind=kind, tied=False)
    types = caps(path)["types"]
    assert types[kind]["tensors"] == (2 + 2 * 7 if kind != "f32" else 2 + 2 * 7 + 5)
    assert 0 < sum(entry["bytes"] for entry in types.values()) < path.stat().st_size


def test_sampling_values_of_the_model(tmp_path: Path) -> None:
    own = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    path = write_tiny_llama(tmp_path / "tiny.gguf", metadata=own)
    assert "sampling       temperature 0.6, top_k 20\n" in shaderlm("info", path).out
    assert caps(path)["sampling"] == {"temperature": 0.6, "top_k": 20}


def test_metadata_and_tensors_are_listed_long_ones_shortened(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", metadata={"general.note": "\x1b[31mred\n"})
    text = shaderlm("info", path, "--metadata", "--tensors").out
    assert "llama.block_count = 2\n" in text
    assert f"({len(tiny_tokens())} values)" in text
    assert "general.note = '\\x1b[31mred\\n'" in text
    assert "\x1b" not in text
    assert f"blk.0.attn_q.weight {'64×64':>37} f32" in text
    found = caps(path, "--metadata", "--tensors")
    assert found["metadata"]["tokenizer.ggml.tokens"] == {"length": len(tiny_tokens()), "first": tiny_tokens()[:8]}
    assert found["metadata"]["general.note"] == "\x1b[31mred\n"
    assert {"name": "blk.1.ffn_down.weight", "shape": [64, 96], "type": "f32", "bytes": 4 * 64 * 96} in found["tensors"]


@pytest.mark.parametrize("path", sorted(VOCABULARIES.glob("*.gguf")), ids=lambda path: path.stem)
def test_a_file_with_only_a_vocabulary(path: Path) -> None:
    done = shaderlm("info", path, "--metadata", "--tensors")
    assert (done.code, done.err) == (1, "")
    assert "runs           no: the file holds only a vocabulary" in done.out
    assert shaderlm("info", path, "--json").code == 1
    found = caps(path)
    assert found["vocabulary"] > 30_000
    assert (found["parameters"], found["types"], found["gpu_weight_bytes"]) == (0, {}, None)


def test_an_architecture_that_is_not_supported_is_still_shown(tmp_path: Path) -> None:
    numbers = {"mamba.block_count": 24, "mamba.context_length": 2048, "mamba.attention.head_count": [1, 2, 4]}
    tensors = {"a.weight": ("f32", np.zeros((2, 64), np.float32)), "b": ("f16", np.zeros((2, 3, 64), np.float32))}
    path = write_gguf(tmp_path / "mamba.gguf", tensors, numbers, architecture="mamba")
    done = shaderlm("info", path)
    assert (done.code, done.err) == (1, "")
    assert "runs           no: this checkpoint's architecture is 'mamba'; supported: " in done.out
    found = caps(path)
    assert (found["layers"], found["context"], found["heads"], found["hidden"]) == (24, 2048, [1, 2, 4], None)
    assert found["name"] == "mamba"


def test_types_and_tokenizers_that_are_not_supported_are_named(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "iq.gguf", kind="iq3_s", layers=1, hidden=256, ffn=256)
    found = caps(path)
    assert "tensors of the types iq3_s; supported are f32" in found["unsupported_reason"]
    assert found["types"]["iq3_s"] == {"tensors": 8, "bytes": 198330}
    strange = write_tiny_llama(tmp_path / "strange.gguf", metadata={"tokenizer.ggml.pre": "klingon"})
    assert "'klingon' is not known" in caps(strange)["unsupported_reason"]


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", metadata={"general.name": "\x1b[2Jboo\n"})
    assert "\x1b" not in shaderlm("info", path).out
    assert caps(path)["own_name"] == "\x1b[2Jboo\n"
    assert "\x1b" not in shaderlm("generate", "x", "-v", "-n", 1, "-m", path, "--device", "cpu").err


def test_no_gpu_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object) -> None:
        raise AssertionError("info opened a device")

    for name in (
        "shaderlm.gpu.adapters.adapters",
        "shaderlm.gpu.opening.open_device",
        "shaderlm.formats.gguf.GgufFile.raw",
    ):
        home, _, attribute = name.rpartition(".")
        owner = sys.modules.get(home) or sys.modules["shaderlm.formats.gguf"].GgufFile
        monkeypatch.setattr(owner, attribute, touched)
    assert caps(write_tiny_llama(tmp_path / "tiny.gguf"))["layers"] == 2


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("no/file.gguf", "does not exist"),
        pytest.param(__file__, "is not a GGUF file", id="this file"),
        ("qwen", "did you mean qwen"),
    ],
)
def test_mistakes(model: str, words: str) -> None:
    done = shaderlm("info", model)
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert words in done.err


def test_numbers_that_cannot_be_are_not_computed_with(tmp_path: Path) -> None:
    folder = folder_of(write_tiny_llama(tmp_path / "tiny.gguf"), tmp_path / "folder")
    for layers in (-5, 10**400):
        replace_config(folder, num_hidden_layers=layers)
        done = shaderlm("info", folder)
        assert (done.code, done.err) == (1, "")
        assert "no: config.json: num_hidden_layers must be a whole number" in " ".join(done.out.split())
        assert "per 1,000 tokens" not in done.out


@pytest.mark.parametrize("device", ["cpu", "numpy"])
def test_memory_on_the_cpu_is_what_the_runner_holds(device: str, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    memory = caps(path, "--context", 5, "--device", device)["memory"]
    with load_with(path, device=device) as model:
        session = Session(model.runner)
        session.logits([1, 2, 3, 4, 5])
        assert isinstance(model.runner, NumpyRunner)
        assert memory["weights"] == model.report.weight_bytes
        assert memory["cache"] == sum(pool.nbytes for pool in model.runner._pools.values())
    assert memory["device"] == f"the CPU, by {'NumPy' if device == 'numpy' else 'LLVM'}"


def test_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").symlink_to("nowhere.gguf")
    assert "x.gguf is a link to nowhere.gguf, which does not exist" in shaderlm("info", tmp_path / "x.gguf").err


def test_the_model_may_be_named_as_in_the_other_commands(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    assert shaderlm("info", "-m", path).out == shaderlm("info", path).out
    twice = shaderlm("info", path, "-m", path)
    assert twice.code == 2
    assert twice.err.startswith("shaderlm: expected one model, got ")


# Sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", every_third_by_default(names()))
def test_sizes_are_those_of_plans(name: str, tmp_path: Path) -> None:
    """For every architecture; plans say what buffers a GPU then has."""
    path = write_recorded(tmp_path / "tiny.gguf", recorded(name))
    found = caps(path)
    sizes = found["sizes"]
    kind, config = read_header(path)
    if found["unsupported_on_gpu"]:
        with pytest.raises(ModelError, match="multiple of 32"):
            memory(kind, config, LARGE_GPU, config.context)
        return
    assert sizes[-1]["context"] == config.context
    for row in sizes:
        planned = memory(kind, config, LARGE_GPU, row["context"])
        assert row["cache"] == planned.cache
        assert row["weights"] == pytest.approx(planned.weights, rel=0.02)  # buffers are rounded up
        assert row["total"] == row["weights"] + row["cache"]


def test_a_model_for_the_cpu_only(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", ffn=48)
    found = caps(path)
    assert (found["runs"], found["unsupported_reason"], found["sizes"]) == (True, None, [])
    assert "runs           yes, but not on a GPU: blk.0: a matrix has 48 columns" in shaderlm("info", path).out
    assert "--device cpu runs this model" in shaderlm("info", path).out
    with pytest.raises(ModelError, match="a matrix has 48 columns"):
        package.load(path, device=0)


def test_sizes_at_several_lengths_in_80_columns(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", context=40960)
    sizes = caps(path)["sizes"]
    assert [row["context"] for row in sizes] == [1024, 4096, 16384, 40960]
    per_token = 2 * 2 * 2 * 2 * 16  # keys and values of two bytes, layers, heads, width
    assert [row["cache"] for row in sizes] == [per_token * row["context"] for row in sizes]
    lines = shaderlm("info", path).out.splitlines()
    at = lines.index("on a GPU                weights  cache (f16)     together")
    assert lines[at + 1].startswith("1,024 tokens ")
    assert lines[at + 4].startswith("40,960 tokens ")
    assert len(lines) == at + 5
    assert max(map(len, lines[at:])) <= 80


def test_experts_and_windows(tmp_path: Path) -> None:
    entry = recorded("qwen2moe")
    found = caps(write_recorded(tmp_path / "experts.gguf", entry))
    config = entry["config"]
    count, used, width = config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]
    shared = config["shared_expert_intermediate_size"]
    assert found["experts"] == {"count": count, "used": used, "ffn": width, "shared_ffn": shared}
    idle = config["num_hidden_layers"] * (count - used) * 3 * width * config["hidden_size"]
    assert found["parameters"] - found["active_parameters"] == idle
    text = shaderlm("info", tmp_path / "experts.gguf").out
    assert "experts        5 of width 32, 2 for a token, and one of width 64 for all\n" in text
    assert "K of them active for a token\n" in text
    windowed = write_recorded(tmp_path / "window.gguf", recorded("olmo3"))
    assert "window         12 tokens in 3 of 4 layers\n" in shaderlm("info", windowed).out


def test_a_folder_that_is_not_supported_is_still_shown(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", recorded("qwen3"))
    assert caps(folder)["runs"]
    replace_config(folder, model_type="next_year")
    found = caps(folder)
    assert (found["architecture"], found["layers"], found["hidden"], found["runs"]) == ("next_year", 2, 64, False)
    assert found["unsupported_reason"].startswith("config.json: model_type is 'next_year'; supported in folders: ")
    done = shaderlm("info", folder)
    assert (done.code, done.err) == (1, "")
    assert "runs           no: config.json: model_type is 'next_year'" in done.out
    assert "not given" not in done.out
    refused = shaderlm("generate", "hi", "-m", folder)
    assert refused.err.startswith(f"shaderlm: {folder}: config.json: model_type is 'next_year'")
    (folder / "model.safetensors").unlink()
    assert shaderlm("info", folder).code == 1


def test_a_dot_in_the_name_of_a_folder_begins_no_ending(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "Tiny2.5-0.5B", recorded("qwen3"))
    assert caps(folder)["name"] == "Tiny2.5-0.5B"
    with package.load(folder, device="cpu") as model:
        assert ServedModel(model).name == "Tiny2.5-0.5B"
        ServedModel(model).check_name("Tiny2.5-0.5B")
    replace_config(folder, model_type="next_year")
    assert caps(folder)["name"] == "Tiny2.5-0.5B"


def test_long_lines_are_wrapped_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    lines = wrapped("runs", "no: " + "many words " * 20)
    assert len(lines) > 3
    assert max(map(len, lines)) <= 60
    assert all(line.startswith((" " * 15 + "m", " " * 15 + "w")) for line in lines[1:])


def test_memory_counts_a_draft_model(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", layers=1)
    (alone, both) = (
        caps(path, "--context", 100, "--device", "numpy", *more)["memory"] for more in ((), ("--draft-model", path))
    )
    assert both["draft"] == alone["total"]
    assert both["total"] == 2 * alone["total"]
    assert shaderlm("info", path, "--draft-model", path).code != 0, "without --context there is nothing to count"


# What is opened -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["info"],
        ["info", "--context", "64", "--device", "cpu"],
        ["generate", "a", "--max-tokens", "1", "--device", "numpy", "-m"],
        ["generate", "a", "--max-tokens", "1", "--device", "numpy", "--cache-dir", "FOLDER", "-m"],
        ["bench", "-p", "4", "-n", "1", "-r", "1", "--no-warmup", "--device", "numpy", "-m"],
    ],
    ids=["info", "info with memory", "generate", "generate with a cache on disk", "bench"],
)
def test_a_checkpoint_is_opened_once(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a command: its header is parsed and checked once."""
    path = write_tiny_llama(tmp_path / "tiny.gguf", context=256)
    opened = opened_files(monkeypatch)
    done = shaderlm(*(str(tmp_path / "disk") if word == "FOLDER" else word for word in words), path)
    assert done.code == 0, done.err
    assert len(opened) == 1
    assert not opened[0]._open


def test_serve_loads_what_it_has_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is opened once before the server listens."""
    path, opened = str(write_tiny_llama(tmp_path / "tiny.gguf", context=256)), opened_files(monkeypatch)
    checkpoint = _check_model(path, "numpy", "auto", 64, ())
    assert checkpoint is not None
    with checkpoint, load_any(path, "numpy", checkpoint=checkpoint) as model:
        assert model.report.files == (Path(path),)
    assert opened == [checkpoint]
    with pytest.raises(InputError, match="context must be"):
        _check_model(path, "numpy", "auto", 1000, ())
    assert not opened[1]._open


def opened_files(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that are opened from now on."""
    opened, real = list[Any](), GgufFile.open

    def counted(path: Any) -> GgufFile:
        file = real(path)
        opened.append(file)
        return file

    monkeypatch.setattr(GgufFile, "open", counted)
    return opened
