"""Synthetic models: random weights of a known shape."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shaderlm.bench.synthetic import MIXES, RandomWeights, config_of, load_synthetic, parse
from shaderlm.engine.planning import LARGE_GPU, plans
from shaderlm.errors import InputError
from shaderlm.formats.gguf import GgufFile
from shaderlm.gpu import Device
from shaderlm.models.shapes import MODELS, SYNTHETIC, ModelShape
from shaderlm.runtime.sizes import weights_of

from .command_line import shaderlm
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("tiny q8_0")

SMALL = ModelShape("small", 2, 256, 4, 2, 64, 512, 300, tied=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q8_0")


@pytest.mark.parametrize("mix", MIXES)
def test_synthetic_weights_are_of_the_size_of_real_ones(
    mix: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SYNTHETIC, "small", SMALL)
    runner, report = load_synthetic(f"synthetic:small:{mix}", device)
    try:
        session = runner.session()
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
