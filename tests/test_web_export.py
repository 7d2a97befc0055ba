"""`shaderlm export-web`: a folder that is complete by itself, and that gives the tokens that the engine gives."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.engine.planning import LARGE_GPU
from shaderlm.errors import InputError
from shaderlm.formats.opening import open_checkpoint
from shaderlm.gpu import WEBGPU_DEFAULT, Device
from shaderlm.gpu.caps import MatrixShape
from shaderlm.gpu.lanes import judge
from shaderlm.gpu.program import Program, Slot, Step
from shaderlm.graph.sampling import OUTPUT
from shaderlm.kernels.wgsl import workgroup_memory
from shaderlm.runtime.sampler_settings import SamplerSettings
from shaderlm.runtime.weights import pieces
from shaderlm.text import Tokenizer, Vocabulary
from shaderlm.text.chat_output import THINKING_TAGS
from shaderlm.web import export as exporting
from shaderlm.web import weights as web_weights
from shaderlm.web.document import distinct, without_comments
from shaderlm.web.export import export
from shaderlm.web.folder import check, new_folder
from shaderlm.web.model import opened
from shaderlm.web.plans import variants, web_config
from shaderlm.web.template import compile_template
from shaderlm.web.text import text_entry, tokenizer_json
from shaderlm.web.variants import VARIANTS

from . import node
from .checkpoints import PROMPTS, names, recorded, write_gguf
from .command_line import shaderlm
from .front_ends import read_shader
from .gguf_files import quantised
from .runners import runner_of
from .session import Session
from .sweeps import some_by_default
from .tiny_models import tiny_metadata, write_tiny_llama
from .web_runner import WebRunner, chosen, weight_stream

# A dense one with factors of rope and its own output matrix; experts, windows and sinks; learned positions and tied
# embeddings, with matrices in blocks; two rope tables; layers with states.
MODELS = {"llama-llama3": None, "gpt-oss": None, "gpt2": "q8_0", "gemma3": None, "gemma4": None, "qwen35": None}
# What every browser grants.
PORTABLE = {
    "maxStorageBufferBindingSize": 128 << 20,
    "maxBufferSize": 256 << 20,
    "maxComputeInvocationsPerWorkgroup": 256,
    "maxComputeWorkgroupSizeX": 256,
    "maxStorageBuffersPerShaderStage": 8,
    "maxComputeWorkgroupStorageSize": 16 << 10,
    "maxComputeWorkgroupsPerDimension": 65_535,
}
LIMITS = {
    "portable": PORTABLE,
    "subgroups": {**PORTABLE, "maxStorageBuffersPerShaderStage": 10},
    "software": {**PORTABLE, "maxStorageBuffersPerShaderStage": 10},
}


def exported(model: Path, folder: Path, **options: Any) -> dict[str, Any]:
    with opened(str(model), **options) as found:
        export(found, folder)
    plan: dict[str, Any] = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return plan


def checkpoint(folder: Path, name: str, kind: str | None) -> Path:
    plain = write_gguf(folder / f"{name}.gguf", recorded(name))
    return plain if kind is None else quantised(plain, folder / f"{name}-{kind}.gguf", kind)


class Exported:
    """A checkpoint, and its export."""

    def __init__(self, folder: Path, name: str, model: Path) -> None:
        self.name, self.model, self.folder = name, model, folder / f"{name} web"
        self.plan = exported(model, self.folder)

    def variant(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in self.plan["variants"] if each["name"] == name)
        return found


@pytest.fixture(scope="module")
def known() -> dict[str, Exported]:
    """What was exported: tests do not come in the order of models."""
    return {}


@pytest.fixture(params=some_by_default(MODELS, ("llama-llama3", "gpt-oss", "qwen35")))
def made(
    request: pytest.FixtureRequest, known: dict[str, Exported], tmp_path_factory: pytest.TempPathFactory
) -> Exported:
    name = request.param
    if name not in known:
        folder = tmp_path_factory.mktemp("web")
        known[name] = Exported(folder, name, checkpoint(folder, name, MODELS[name]))
    return known[name]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("tiny")
    return Exported(folder, "tiny", write_tiny_llama(folder / "tiny.gguf", kind="q4_0", context=640))


# The folder --------------------------------------------------------------------------------------------------


def test_the_plan_is_complete(made: Exported) -> None:
    plan, folder = made.plan, made.folder
    assert plan["format"] == 2
    assert {path.name for path in folder.iterdir()} >= {"plan.json", "tokenizer.json", "chat_template.json"}
    for file in plan["files"]:
        data = (folder / file["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"]), file["name"]
    end = 0
    for name, (offset, nbytes) in plan["weights"].items():  # in order, none over another, none missing
        assert offset == -(-end // 256) * 256, name
        end = offset + nbytes
    stream = sum(file["bytes"] for file in plan["files"] if file["name"].startswith("weights-"))
    assert stream == end == plan["model"]["weight_bytes"]
    assert [each["name"] for each in plan["variants"]][-2:] == ["portable", "software"]
    assert [each["software"] for each in plan["variants"]] == [each["name"] == "software" for each in plan["variants"]]
    used = {name for name, _ in plan["probes"]}
    for variant in plan["variants"]:
        check_variant(plan, variant)
        used |= {row[0] for each in (*variant["bodies"], *variant["heads"]) for row in each["dispatches"]}
    assert used == set(plan["shaders"])


def check_variant(plan: dict[str, Any], variant: dict[str, Any]) -> None:
    buffers, used = variant["buffers"], set()
    for entry in (*variant["bodies"], *variant["heads"]):
        for name, *grid, in_use in ((row[0], *row[1:4], row[4:]) for row in entry["dispatches"]):
            shader = plan["shaders"][name]
            used.update(in_use)
            pairs = zip(in_use, shader["bindings"], strict=True)
            assert all((buffers[i][1] == "params") == (letter == "u") for i, letter in pairs)
            check_shader(shader["wgsl"], shader["bindings"], grid, variant)
    assert used == set(range(len(buffers))), "a buffer is listed that nothing binds"
    roles: dict[str, set[str]] = {}
    for name, role, size in buffers:
        roles.setdefault(role, set()).add(name)
        if role == "weight":
            assert plan["weights"][name][1] == size
        elif role != "params":
            assert size <= variant["limits"]["maxStorageBufferBindingSize"]
    assert roles["weight"] == set(plan["weights"])
    assert roles["state"] == set(variant["states"])
    assert roles.get("table", set()) == set(plan["tables"])
    rows = {body["rows"] for body in variant["bodies"]}
    for count in rows:
        reached = max(body["keys"] for body in variant["bodies"] if body["rows"] == count)
        run = variant["run_rows"] is not None and count > variant["run_rows"]
        assert run or reached == plan["model"]["context"], "a sequence outgrows the bodies"
    assert {(head["rows"], head["kind"]) for head in variant["heads"]} == {
        (count, kind) for count in (1, max(rows)) for kind in ("greedy", "sample", "adjusted")
    }


def check_shader(text: str, bindings: list[str], grid: list[int], variant: dict[str, Any]) -> None:
    """What it declares is within what the variant asks of a device, and that within what the variant is for."""
    limits = variant["limits"]
    threads = workgroup_threads(text)
    assert threads <= limits["maxComputeInvocationsPerWorkgroup"]
    assert sum(letter != "u" for letter in bindings) <= limits["maxStorageBuffersPerShaderStage"]
    assert max(grid) <= limits["maxComputeWorkgroupsPerDimension"]
    assert workgroup_memory(text) <= limits["maxComputeWorkgroupStorageSize"]
    for name, most in LIMITS.get(variant["name"], {}).items():
        assert limits[name] <= most, (variant["name"], name)
    enabled = set(re.findall(r"^enable (\w+);", text, re.M))
    known = {"f16": "shader-f16", "subgroups": "subgroups"}
    known["chromium_experimental_subgroup_matrix"] = "chromium-experimental-subgroup-matrix"
    assert {known[name] for name in enabled} <= set(variant["features"])
    assert "//" not in text
    declared = re.findall(r"@group\(0\) @binding\((\d+)\) var<([a-z_, ]+)>", text)
    letters = {"storage, read": "r", "storage, read_write": "w", "uniform": "u"}
    assert {int(i): letters[kind] for i, kind in declared} == dict(enumerate(bindings))


def workgroup_threads(text: str) -> int:
    """Threads of a workgroup: its size may be a product of constants."""
    found = re.search(r"@workgroup_size\(([^)]*)\)", text)
    assert found is not None
    constants = dict(re.findall(r"^const (\w+)(?:\s*:\s*\w+)?\s*=\s*(.+?);", text, re.M))
    size = found[1].strip().rstrip(",")
    while re.search(r"[A-Za-z_]\w+", size):
        size = re.sub(r"[A-Za-z_]\w+", lambda word: f"({constants[word[0]]})", size)
    return int(eval(re.sub(r"(\d)u\b", r"\1", size).replace("/", "//")))  # digits and operators


def test_no_feature_that_is_not_asked_for(made: Exported) -> None:
    portable = made.variant("portable")
    assert portable["features"] == []
    assert portable["run_rows"] is None
    assert made.variant("software")["features"] == ["subgroups"]
    for variant in made.plan["variants"]:
        assert set(variant["language"]) <= {"packed_4x8_integer_dot_product"}
        texts = [made.plan["shaders"][row[0]]["wgsl"] for body in variant["bodies"] for row in body["dispatches"]]
        packed = any(re.search(r"\b(un)?pack4x|\bdot4", text) for text in texts)
        assert variant["language"] or not packed


@pytest.mark.smoke
@pytest.mark.dawn
def test_tint_reads_every_shader(made: Exported, null: Any) -> None:
    """Those for matrix units too, which no software adapter has. Chromium's compiler checks types and uniformity."""
    for name, about in made.plan["shaders"].items():
        read_shader(null, name, about["wgsl"])


def test_weights_are_those_of_an_upload(made: Exported) -> None:
    stream = weight_stream(made.folder, made.plan)
    with opened(str(made.model)) as model:
        config = web_config(model.config)
        _, buffers = variants(model.architecture, config)
        found = {name: np.zeros(spec.nbytes, np.uint8) for name, spec in buffers.items()}
        for piece in pieces(buffers, model.source):
            data = np.ascontiguousarray(piece.data).reshape(-1).view(np.uint8)
            found[piece.buffer][piece.offset : piece.offset + data.size] = data
    assert set(found) == set(made.plan["weights"])
    for name, (offset, nbytes) in made.plan["weights"].items():
        assert np.array_equal(stream[offset : offset + nbytes], found[name]), name


# On the software adapter the kernels of GPUs take seconds to compile: one model has them by default.
QUICK = {("llama-llama3", "subgroups"), ("llama-llama3", "chosen"), ("qwen35", "portable")}


@pytest.mark.parametrize(
    ("made", "name"),
    [
        pytest.param(model, name, marks=[] if (model, name) in QUICK else pytest.mark.long)
        for model in MODELS
        for name in ("portable", "subgroups", "chosen")
    ],
    indirect=["made"],
)
def test_the_same_tokens(made: Exported, name: str, device: Device) -> None:
    """As `transformers` computed them; of a checkpoint in blocks, as the engine does."""
    runner = WebRunner(made.folder, chosen(made.plan, device.caps) if name == "chosen" else name, device)
    found = runner.generate(PROMPTS[1], 8)
    runner.close()
    assert found == expected(made, PROMPTS[1])


def expected(made: Exported, prompt: list[int]) -> list[int]:
    if MODELS[made.name] is None:
        greedy: list[int] = recorded(made.name)["greedy"][PROMPTS.index(prompt)]
        return greedy
    runner = runner_of(made.model, None)
    session = Session(runner)
    return [session.sample(prompt).wait(), *(session.advance().wait() for _ in range(7))]


# A longer one ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def native(tiny: Exported) -> Iterator[Any]:
    runner = runner_of(tiny.model, None)
    yield runner
    runner.close()


LONG = [(7 * i * i + 3 * i) % 256 for i in range(500)]


@pytest.mark.parametrize(
    ("name", "length"),
    [("software", 500), *(pytest.param(name, 312, marks=pytest.mark.long) for name in ("portable", "subgroups"))],
)
def test_a_conversation_that_outgrows_its_pages_and_its_class(
    tiny: Exported, native: Any, name: str, length: int, device: Device
) -> None:
    """Two turns, the second of fewer rows than a run; then decode steps, over the end of a class or of the pool."""
    runner, session = WebRunner(tiny.folder, name, device), Session(native)
    for turn in (LONG[:length], [5, 9, 12]):
        assert runner.prefill(turn) == session.sample(turn).wait()
    count = 14
    assert runner.decode(count) == [session.advance().wait() for _ in range(count)]
    if length == 500:
        assert runner.positions == 1024, "the pool has grown"
    runner.close()
    session.close()


def test_sampled_tokens(tiny: Exported, native: Any, device: Device) -> None:
    """By the seed: the same as on the host."""
    settings = SamplerSettings(temperature=1.5, top_k=40, top_p=0.9, seed=7)
    record = np.zeros(1, OUTPUT)
    for field in ("temperature", "top_k", "top_p"):
        record[field] = getattr(settings, field)
    record["seed_low"] = 7
    runner, session = WebRunner(tiny.folder, "software", device), Session(native)
    found = [runner.prefill(LONG[:9], "sample", record), *runner.decode(7, "sample", record)]
    assert found == [session.sample(LONG[:9], settings).wait(), *(session.advance(settings).wait() for _ in range(7))]
    assert len(set(found)) > 2
    runner.close()
    session.close()


def test_what_a_page_chooses(tiny: Exported) -> None:
    gpu = replace(LARGE_GPU, subgroup_min=32, subgroup_max=32)
    units = replace(gpu, matrix_shapes=(MatrixShape("f16", "f32", 16, 16, 16),))
    found = {
        "matrix": units,
        "subgroups-1024": replace(units, subgroup_min=16),
        "subgroups": replace(gpu, max_invocations=256),
        "portable": replace(gpu, max_storage_buffers=8),
        "software": replace(gpu, kind="software"),
    }
    assert {name: chosen(tiny.plan, caps) for name, caps in found.items()} == {name: name for name in found}
    assert (
        chosen(tiny.plan, WEBGPU_DEFAULT) == chosen(tiny.plan, replace(WEBGPU_DEFAULT, kind="software")) == "portable"
    )


def test_the_probe_of_lanes(tiny: Exported, device: Device) -> None:
    """A page runs it before it takes a variant with subgroups."""
    steps, buffers = [], {}
    for name, threads in tiny.plan["probes"]:
        text = tiny.plan["shaders"][name]["wgsl"]
        text = text.replace("enable subgroups;", "") if device.caps.implementation == "wgpu" else text
        steps.append(Step("lanes", text, (Slot(str(threads), "storage"),), (1, 1, 1)))
        buffers[str(threads)] = 8 * threads
    found = device.run(Program(buffers, tuple(steps), tuple(buffers)))
    assert judge([raw.view(np.uint32).reshape(-1, 2) for raw in found.values()]).consecutive


def test_the_keys_are_documented(tiny: Exported) -> None:
    document = (Path(__file__).parent.parent / "docs" / "web.md").read_text(encoding="utf-8")

    def listed(title: str) -> set[str]:
        part = re.split(r"^#+ ", document.partition(f"# {title}\n")[2], maxsplit=1, flags=re.M)[0]
        cells = [cell for cell in re.findall(r"^\| ([^|]+) \|", part, re.M) if not cell.startswith("role")]
        return {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}

    assert listed("Keys of the file") == set(tiny.plan)
    assert listed("Keys of the text") == set(tiny.plan["text"])
    unigram = replace(Vocabulary.from_metadata(tiny_metadata()), kind="unigram", unknown=0, merges=[])
    unigram = replace(unigram, scores=[0.0] * len(unigram.tokens))
    bpe = (tiny.folder / "tokenizer.json").read_text(encoding="utf-8")
    keys = [set(json.loads(text)) for text in (bpe, tokenizer_json(Tokenizer(unigram)))]
    assert listed("Keys of the tokenizer") == keys[0] | keys[1]
    roles = {role for variant in tiny.plan["variants"] for _, role, _ in variant["buffers"]} | {"recurrent"}
    of_pictures = {"pixels", "towers"}  # test_web_vision has a model that sees
    assert listed("Keys of a variant") == set().union(*tiny.plan["variants"]) | roles | of_pictures
    assert listed("Variants") == {each["name"] for each in tiny.plan["variants"]}


# Text --------------------------------------------------------------------------------------------------------


def test_what_a_page_knows_of_text(tiny: Exported) -> None:
    with open_checkpoint(tiny.model) as file:
        own = Tokenizer(Vocabulary.from_metadata(file.metadata))
    assert (tiny.folder / "tokenizer.json").read_text(encoding="utf-8") == tokenizer_json(own)
    about = tiny.plan["text"]
    assert about["special_tokens"] == dict(own.special_tokens)
    assert about["stop_ids"] == sorted(own.stop_ids)
    assert own.vocabulary.eos is not None
    assert about["eos_token"] == own.vocabulary.tokens[own.vocabulary.eos]
    assert not {"eos_id", "add_eos", "clean_spaces"} & set(about), "nothing reads them"
    assert all(own.token_bytes(i) == b"" for i in about["silent_ids"])
    assert about["silent_ids"]
    assert about["template"] == "chat_template.json"
    assert (tiny.folder / "chat_template.json").read_bytes() == compile_template(own.vocabulary.chat_template)


# The command -------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, tiny: Exported) -> None:
    folder = tmp_path / "out"
    done = shaderlm("export-web", tiny.model, folder, "--context", 200)
    assert done.code == 0, done.err
    assert "out: tiny, " in done.out
    assert "200 tokens of context" in done.out
    assert "portable" in done.out
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    assert plan["model"]["context"] == 200
    again = shaderlm("export-web", tiny.model, folder)
    assert again.code == 2
    assert "holds an export; --force replaces it" in again.err
    assert shaderlm("export-web", tiny.model, folder, "--force").code == 0
    assert json.loads((folder / "plan.json").read_text(encoding="utf-8"))["model"]["context"] == 640
    (folder / "tokenizers.js").touch()  # of an export by an earlier version
    assert shaderlm("export-web", tiny.model, folder, "--force").code == 0
    assert not (folder / "tokenizers.js").exists()
    (folder / "thesis.txt").write_text("mine")
    refused = shaderlm("export-web", tiny.model, folder, "--force")
    assert refused.code == 2
    assert "has other files (thesis.txt)" in refused.err
    assert (folder / "thesis.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_stays_the_same_one(tmp_path: Path, tiny: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a mount point, or where a shell is."""
    monkeypatch.chdir(tmp_path)
    number = tmp_path.stat().st_ino
    assert shaderlm("export-web", tiny.model, ".").code == 0
    assert tmp_path.stat().st_ino == number
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in tiny.folder.iterdir()}


def test_wrong_arguments(tmp_path: Path, tiny: Exported) -> None:
    (tmp_path / "file").touch()
    for folder, words in (("file", "it is a file; give a folder"), ("a/b", "there is no folder")):
        done = shaderlm("export-web", tiny.model, tmp_path / folder)
        assert done.code == 2
        assert words in done.err
    assert "from 1 to the model's 640" in shaderlm("export-web", tiny.model, tmp_path / "x", "--context", 9999).err
    assert "leave out --quantize" in shaderlm("export-web", "synthetic:smollm2-135m", "x", "--quantize", "q4_0").err


def test_a_template_that_cannot_run_in_a_browser_is_replaced(tmp_path: Path) -> None:
    """The error names what it uses, and the option that helps. Nothing is written before."""
    model = write_tiny_llama(tmp_path / "tiny.gguf", metadata={"tokenizer.chat_template": "{{ 'x'|pprint }}"})
    done = shaderlm("export-web", model, tmp_path / "out")
    words = "template of this model cannot run in a browser: line 1 has the filter pprint. --chat-template-file FILE"
    assert (done.code, words in done.err, (tmp_path / "out").exists()) == (1, True, False)
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[0].content }}</think>", encoding="utf-8")
    done = shaderlm("export-web", model, tmp_path / "out", "--chat-template-file", other)
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "chat_template.json").read_bytes() == compile_template(other.read_text(encoding="utf-8"))
    other.write_text("")
    (tmp_path / "out" / "chat_template.jinja").touch()  # of an export by an earlier version
    done = shaderlm("export-web", model, tmp_path / "out", "--force", "--chat-template-file", other)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "out" / "plan.json").read_text(encoding="utf-8"))["text"]["template"] is None
    assert not list((tmp_path / "out").glob("chat_template.*"))


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("place", "problem"),
    [("weights", FULL), ("weights", KeyboardInterrupt()), ("hashes", KeyboardInterrupt()), ("end", FULL)],
)
def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path, tiny: Exported, monkeypatch: pytest.MonkeyPatch, place: str, problem: BaseException
) -> None:
    def fail(*_: Any) -> Any:
        raise problem

    places = {"weights": (web_weights, "_write"), "hashes": (exporting, "_hashed"), "end": (Path, "rename")}
    monkeypatch.setattr(*places[place], fail)
    folder = tmp_path / "out" if place == "weights" else tmp_path  # a new one, or one that is empty
    done = shaderlm("export-web", tiny.model, folder)
    assert done.code == (130 if isinstance(problem, KeyboardInterrupt) else 2), done.err
    if isinstance(problem, OSError):
        assert "cannot write" in done.err
        assert "No space left" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("inside", [True, False])
def test_what_a_killed_export_left_is_removed(tmp_path: Path, inside: bool) -> None:
    """Nothing of a process that still runs, of another folder, or of another kind."""
    folder = tmp_path / "out"
    if inside:
        folder.mkdir()
    place = folder if inside else tmp_path
    code = "import os, sys; os.makedirs(f'{sys.argv[1]}/.out.{os.getpid()}.partial/assets')"
    subprocess.run([sys.executable, "-c", code, place], check=True)
    (left,) = place.glob(".out.*.partial")
    others = {tmp_path / f".out.{os.getppid()}.partial", tmp_path / left.name.replace("out", "other")}
    others.add(tmp_path / f"{left.name}.old")  # may be all that is left of the export that was there
    for other in others:
        other.mkdir()
    check(folder, {"plan.json"}, False)
    with new_folder(folder, {"plan.json"}, "plan.json", 0, False) as made:
        assert not left.exists()
        (made / "plan.json").touch()
    assert [path.name for path in folder.iterdir()] == ["plan.json"]
    assert set(tmp_path.iterdir()) == {folder, *others}


def test_what_others_write_meanwhile_stays(tmp_path: Path) -> None:
    def write() -> None:
        with new_folder(tmp_path, {"plan.json"}, "plan.json", 0, True) as made:
            (made / "plan.json").write_text("new")
            (tmp_path / "plan.json").write_text("theirs")

    with pytest.raises(InputError, match=r"has got other files meanwhile \(plan\.json\)"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_text() == "theirs"


def test_too_little_space(tmp_path: Path, tiny: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5_000_000))
    done = shaderlm("export-web", tiny.model, tmp_path / "out")
    assert done.code == 2
    assert "and 5 MB are free there" in done.err
    assert not list(tmp_path.iterdir())


def test_weights_cross_files(tmp_path: Path, tiny: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_weights, "SHARD_BYTES", 10_000)
    plan = exported(tiny.model, tmp_path / "out")
    sizes = [each["bytes"] for each in plan["files"] if each["name"].startswith("weights-")]
    assert len(sizes) > 3
    assert set(sizes[:-1]) == {10_000}
    assert plan["weights"] == tiny.plan["weights"]
    assert np.array_equal(weight_stream(tmp_path / "out", plan), weight_stream(tiny.folder, tiny.plan))


def test_variants_that_no_device_would_take_are_left_out() -> None:
    entries: list[dict[str, Any]] = [{"name": "a", "x": 1}, {"name": "b", "x": 1}, {"name": "c", "x": 2}]
    assert [each["name"] for each in distinct(entries)] == ["b", "c"]


def test_comments_are_taken_out() -> None:
    text = "// a kernel\nfn f() { // of two\n    return 8 / 2; //\n\n}\n"
    assert without_comments(text) == "fn f() {\nreturn 8 / 2;\n}\n"


# Every architecture ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", [None, "q8_0"])
@pytest.mark.parametrize("name", names())
def test_every_architecture(tmp_path: Path, name: str, kind: str | None, device: Device) -> None:
    made = Exported(tmp_path, name, checkpoint(tmp_path, name, kind))
    for variant in made.plan["variants"]:
        check_variant(made.plan, variant)
    if kind is None:
        runner = WebRunner(made.folder, "software", device)
        assert runner.generate(PROMPTS[1], 8) == recorded(name)["greedy"][1]
        runner.close()


@pytest.mark.long
@pytest.mark.parametrize("model", ["synthetic:qwen3-0.6b:q4_0", "synthetic:gpt-oss-20b:f16"])
def test_synthetic_models(tmp_path: Path, model: str) -> None:
    """Without a tokenizer; one whose experts do not fit a binding is refused with words."""
    done = shaderlm("export-web", model, tmp_path / "out", "--context", 512)
    if "f16" in model:
        assert done.code == 1
        assert "cannot run in a browser, variant" in done.err
        assert not list(tmp_path.iterdir())
        return
    assert done.code == 0, done.err
    plan = json.loads((tmp_path / "out" / "plan.json").read_text(encoding="utf-8"))
    assert plan["text"] is None
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert all(nbytes <= 128 << 20 for _, nbytes in plan["weights"].values())


@pytest.mark.parametrize("tags", THINKING_TAGS, ids=lambda tags: tags[0])
def test_a_chat_shows_the_tags_of_thoughts_where_the_template_has_them(tiny: Exported, tags: tuple[str, str]) -> None:
    with open_checkpoint(tiny.model) as file:
        words = Tokenizer(Vocabulary.from_metadata(file.metadata))
    first, second = list(words.special_tokens)[:2]
    tagged = replace(words.vocabulary, tokens=_renamed(words, dict(zip((first, second), tags, strict=True))))
    thinking = Tokenizer(tagged)
    ids = [thinking.special_tokens[tag] for tag in tags]
    assert text_entry(thinking, None, f"{{{{ '{tags[1]}' }}}}")["shown_ids"] == ids
    assert text_entry(thinking, None, "{{ messages }}")["shown_ids"] == []


def _renamed(words: Tokenizer, names: dict[str, str]) -> list[str]:
    return [names.get(text, text) for text in words.vocabulary.tokens]


def test_a_variant_names_the_size_of_subgroups_that_its_plans_rely_on(tiny: Exported) -> None:
    caps = {each.name: each for each in VARIANTS}
    sizes = {entry["name"]: entry.get("subgroup_size") for entry in tiny.plan["variants"]}
    assert sizes["matrix"] == 32
    for entry in tiny.plan["variants"]:
        own = caps[entry["name"]]
        known = own.subgroup_max if own.subgroup_min == own.subgroup_max else None
        assert sizes[own.name] == (known if "subgroups" in entry["features"] else None)


def test_tokens_that_a_model_never_gives(tmp_path: Path) -> None:
    """They are in the plan, and shaderlm.js lets no bias raise them."""
    listed = {"tokenizer.ggml.suppress_tokens": [7, 3]}
    with opened(str(write_tiny_llama(tmp_path / "tiny.gguf", metadata=listed))) as model:
        export(model, tmp_path / "made")
    plan = json.loads((tmp_path / "made" / "plan.json").read_text(encoding="utf-8"))
    assert plan["model"]["suppressed"] == [3, 7]
    script = (Path(exporting.__file__).parent / "assets" / "shaderlm.js").read_text(encoding="utf-8")
    assert "new Sampler(answer.options, runner.plan.model.suppressed)" in script
    found = re.search(r"^class Sampler \{.*?^\}$", script, re.M | re.S)
    assert found
    options = "{logit_bias: {7: 100, 9: 1}, repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0}"
    (tmp_path / "run.js").write_text(f"{found[0]}\nconsole.log(new Sampler({options}, [3, 7]).bias.join(' '));")
    assert node.run(tmp_path, "run.js", gpu=False).out == "3,-Infinity 7,-Infinity 9,1\n"
