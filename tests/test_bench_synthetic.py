"""Synthetic models: random weights of a known shape."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.bench.synthetic import MIXES, RandomWeights, config_of, load_synthetic, parse
from shaderlm.engine.planning import LARGE_GPU, plans
from shaderlm.errors import InputError
from shaderlm.formats.gguf import GgufFile
from shaderlm.gpu import Device
from shaderlm.models.shapes import MODELS, SYNTHETIC, ModelShape
from shaderlm.runtime.sizes import weights_of
from shaderlm.runtime.weights import jobs

from .command_line import shaderlm
from .session import Session
from .sweeps import with_all
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("tiny q8_0, profiles")

SMALL = ModelShape("small", 2, 256, 4, 2, 64, 512, 300, tied=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q8_0")


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("where", ["cpu", pytest.param("device", marks=pytest.mark.long)])
def test_synthetic_weights_are_of_the_size_of_real_ones(
    mix: str, where: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SYNTHETIC, "small", SMALL)
    device = "cpu" if where == "cpu" else request.getfixturevalue(where)
    model = load_synthetic(f"synthetic:small:{mix}", device)
    runner, report = model.runner, model.report
    try:
        session = Session(runner)
        logits = session.logits(list(range(20)))
        assert np.isfinite(logits).all()
        assert 0.1 < logits.std() < 10
        session.close()
        assert report.parameters == sum(int(np.prod(size)) for size in runner.config.shapes.values())
    finally:
        runner.close()


@pytest.mark.parametrize(("name", "mix", "gigabytes"), [("llama-3.2-1b", "q4_0", 0.83), ("llama-3.1-8b", "q4_0", 5.04)])
def test_synthetic_models_are_as_large_as_they_should_be(name: str, mix: str, gigabytes: float) -> None:
    kind, config = config_of(*parse(f"synthetic:{name}:{mix}"))
    weights = weights_of(plans(kind, config, LARGE_GPU))
    assert sum(spec.nbytes for spec in weights.values()) / 1e9 == pytest.approx(gigabytes, abs=0.01)


def test_the_size_of_a_model_is_that_of_its_tensors_on_every_device(
    tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama-bench has it: neither the file with its vocabulary nor the f32 copy that the CPU computes with."""
    monkeypatch.setitem(SYNTHETIC, "small", SMALL)
    _, config = config_of(SMALL, "q8_0")
    matrices = sum(int(np.prod(size)) for size in config.shapes.values() if len(size) > 1)
    vectors = sum(size[0] for size in config.shapes.values() if len(size) == 1)
    wanted = matrices // 32 * 34 + 4 * vectors
    with GgufFile.open(tiny) as file:
        of_tiny = sum(info.nbytes for info in file.tensors.values())
    command = ("bench", "-m", "synthetic:small:q8_0", "-m", tiny, "-p", 2, "-n", 0, "-r", 1, "-o", "jsonl")
    for name in ("cpu", device.caps.name):
        rows = [json.loads(line) for line in shaderlm(*command, "--device", name).out.splitlines()]
        assert [row["model_size"] for row in rows] == [wanted, of_tiny]


# What the makers of these models say.
PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "gemma-3-1b": 999_885_952,
    "qwen2.5-7b": 7_615_616_512,
    "phi-4-mini": 3_836_021_760,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_the_parameters_of_its_model(name: str) -> None:
    _, config = config_of(SYNTHETIC[name], "q4_0")
    factors = sum(math.prod(size) for tensor, size in config.shapes.items() if tensor.startswith("rope_factors"))
    assert sum(map(math.prod, config.shapes.values())) - factors == PARAMETERS[name]


def test_routers_stay_as_they_are_and_experts_have_a_format_of_their_own() -> None:
    _, config = config_of(SYNTHETIC["qwen3-30b-a3b"], "mxfp4_moe")
    wanted = {"ffn_gate_inp": "f32", "ffn_down_exps": "mxfp4", "attn_q": "q8_0"}
    assert {name: config.formats[f"blk.47.{name}.weight"] for name in wanted} == wanted
    assert config.shapes["blk.47.ffn_down_exps.weight"] == (128, 2048, 768)


@pytest.mark.parametrize(
    "name", ["gemma-3-1b", "qwen2.5-7b", "phi-4-mini", "qwen3-30b-a3b", "gemma-4-4b", with_all("gpt-oss-20b")]
)
def test_small_models_of_other_architectures(name: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the large ones, but narrow and shallow: every weight is made, and logits are of the usual size."""
    monkeypatch.setitem(SYNTHETIC, "small", shrunken(SYNTHETIC[name]))
    made = []
    for on in ("cpu", device):
        model = load_synthetic("synthetic:small:q8_0", on, precision="exact")
        runner, report = model.runner, model.report
        session = Session(runner)
        made.append(session.logits(list(range(20))))
        session.close()
        runner.close()
        assert report.architecture == SYNTHETIC[name].architecture
    for logits in made:
        assert np.isfinite(logits).all()
        assert 0.1 < logits.std() < 10


def shrunken(shape: ModelShape) -> ModelShape:
    further, vectors = dict(shape.further), dict(shape.vectors)
    if "rope.dimension_count" in further:
        further["rope.dimension_count"] = 48
        vectors = dict.fromkeys(vectors, 24)
    further |= {key: value for key, value in {**SMALL_EXPERTS, **SMALL_LAYERS}.items() if key in further}
    sizes: dict[str, Any] = {"layers": 2, "hidden": 128, "Hq": 4, "Hkv": 2, "D": 64, "ffn": 256, "vocab": 300}
    if "attention.shared_kv_layers" in further:  # layers of both kinds before and among those
        sizes["layers"], vectors = 12, {"rope_freqs.weight": 32}
    return replace(shape, **sizes, context=512, further=further, vectors=vectors)


SMALL_LAYERS = {
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "attention.shared_kv_layers": 6,
    "embedding_length_per_layer_input": 32,
}
SMALL_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64}


def test_repeated_rows_are_packed_once() -> None:
    """A source that repeats gives every matrix of a shape the same bytes, and those that packing anew gives."""
    kind, config = config_of(SMALL, "q4_0")
    buffers = weights_of(plans(kind, config, LARGE_GPU))
    source = RandomWeights(config)
    once = {(p.buffer, p.offset): p.data for job in jobs(buffers, source) for p in job()}
    source.repeats = False
    anew = {(p.buffer, p.offset): p.data for job in jobs(buffers, source) for p in job()}
    assert once.keys() == anew.keys()
    assert all(data.nbytes == anew[key].nbytes for key, data in once.items())
    layers = [data for (name, _), data in once.items() if name.endswith("ffn_down.weight/weight.0")]
    assert len(layers) == 2
    assert layers[0] is layers[1]


def test_a_mix_has_finer_layers() -> None:
    _, config = config_of(MODELS["llama-3.1-8b"], "q4_k_m")
    finer = sum(config.formats[f"blk.{i}.attn_v.weight"] == "q6_k" for i in range(32))
    assert finer == 16
    assert config.formats["blk.0.attn_q.weight"] == "q4_k"
    assert config.formats["output.weight"] == "q6_k"


def test_random_rows_are_cut_to_size() -> None:
    _, config = config_of(MODELS["smollm2-135m"], "q4_0")
    source = RandomWeights(config)
    rows = source.rows("blk.3.ffn_up.weight", "q4_0", 10, 20)
    assert rows.shape == (10, 576 // 32 * 18)
    with pytest.raises(InputError, match="no synthetic model 'nope'"):
        parse("synthetic:nope")
