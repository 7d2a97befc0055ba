"""Every architecture on its tiny checkpoint: recorded logits, fusions, ways to cut a prompt.

What is refused is in test_right_or_refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shaderlm
from shaderlm.engine.loading import load_with
from shaderlm.errors import InputError, ModelError
from shaderlm.formats.gguf import GgufFile
from shaderlm.gpu import Device
from shaderlm.graph.fuse import fuse
from shaderlm.graph.reference import Yarn
from shaderlm.models.architecture import LOCAL_ROPE, Config, Step, architecture
from shaderlm.models.checkpoint import architecture_of, read_config

from . import checkpoints
from .architecture_files import PROMPTS, kept, recorded, write

RECORDED = recorded()
NAMES = sorted(RECORDED)
# What a file may have with an effect; None leaves it out. What is recorded must not be found any more.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {
        "attention.sliding_window": 3,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 1.0,
        "attention.sliding_window_pattern": [False, False],
    },
    "gemma3": {
        "attention.sliding_window": 3,
        "rope.freq_base_swa": 500.0,
        "rope.freq_base": 500.0,
        "rope.scaling.factor": 2.0,
        "final_logit_softcapping": 1.0,
        "attention.sliding_window_pattern": 3,
    },
    "glm4": {"rope.dimension_count": 4},
    "granite": {"attention.scale": 0.5, "embedding_scale": 2.0, "residual_scale": 1.5, "logit_scale": 1.0},
    "llama-yarn": {
        "rope.scaling.factor": 2.0,
        "rope.scaling.type": "none",
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_beta_fast": 2.0,
        "rope.scaling.yarn_beta_slow": 0.1,
        "rope.scaling.yarn_ext_factor": 0.5,
        "rope.scaling.yarn_attn_factor": 2.0,
        "rope.scaling.attn_factor": 2.0,
        "attention.sliding_window": 3,
    },
    "olmo2": {"attention.sliding_window": 3},
    "phi3": {"attention.sliding_window": 3},
    "phi3-longrope": {"rope.scaling.attn_factor": 2.0, "rope.scaling.original_context_length": 4096},
    "starcoder2": {"attention.layer_norm_epsilon": 0.5, "attention.sliding_window": 3},
}


def _config(path: Path) -> Config:
    with GgufFile.open(path) as file:
        return read_config(architecture_of(file), file)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("architectures")
    return {name: write(folder / f"{name}.gguf", entry) for name, entry in RECORDED.items()}


def _logits(path: Path, prompt: list[int], **options: Any) -> Any:
    with load_with(path, device="cpu", **options) as model:
        return model.logits(prompt)


def test_every_architecture_is_here() -> None:
    with pytest.raises(ModelError) as caught:
        architecture({})
    known = str(caught.value).split("supported: ")[1].split(", ")
    assert set(known) == {checkpoints.recorded(name)["architecture"] for name in checkpoints.names()}


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_that_were_recorded(name: str, files: dict[str, Path]) -> None:
    with shaderlm.load(files[name], device="cpu") as model:
        for prompt, wanted in zip(PROMPTS, RECORDED[name]["logits"], strict=True):
            assert np.std(wanted) > 0.1
            np.testing.assert_allclose(kept(model.logits(prompt)[-1]), wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_fusions_change_nothing_and_neither_do_parts_of_a_prompt(name: str, files: dict[str, Path]) -> None:
    prompt = PROMPTS[1]
    whole = _logits(files[name], prompt)
    np.testing.assert_allclose(_logits(files[name], prompt, fusions=()), whole, atol=1e-4, rtol=0)
    with shaderlm.load(files[name], device="cpu") as model:
        at = 0
        session = model.runner.session()
        for count in (3, 1, 1, 17, 1, 17):
            found = session.logits(prompt[at : at + count])
            at += count
            np.testing.assert_allclose(found, whole[at - 1], atol=1e-4, rtol=0)
        session.close()


# The others take long to compile.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "starcoder2" else pytest.mark.long) for name in NAMES]
)
def test_a_gpu_gives_the_same(name: str, files: dict[str, Path], device: Device) -> None:
    with load_with(files[name], device=device, cache="f32") as model:
        for prompt, wanted in zip(PROMPTS, RECORDED[name]["logits"], strict=True):
            np.testing.assert_allclose(kept(model.logits(prompt)[-1]), wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in CHANGES.items() for key in keys])
def test_a_key_that_is_honoured_changes_the_logits(name: str, key: str, tmp_path: Path) -> None:
    entry = RECORDED[name]
    path = write(tmp_path / "changed.gguf", entry, {f"{entry['architecture']}.{key}": CHANGES[name][key]})
    found = kept(_logits(path, PROMPTS[1])[-1])
    assert np.abs(np.subtract(found, entry["logits"][1])).max() > 1e-3


@pytest.mark.parametrize(("name", "epilogue"), [("gemma2", "gelu_mul"), ("starcoder2", "gelu"), ("phi3", "silu_mul")])
def test_activations_are_fused(name: str, epilogue: str, files: dict[str, Path]) -> None:
    with GgufFile.open(files[name]) as file:
        kind = architecture_of(file)
        graph = fuse(kind.build(read_config(kind, file), Step(4)))[0]
    found = [node.dims["epilogue"] for node in graph.nodes if node.op == "linear"]
    assert found.count(epilogue) == 2
    assert epilogue not in {node.op for node in graph.nodes}


def test_layers_of_gemma3(files: dict[str, Path]) -> None:
    config = _config(files["gemma3"])
    assert [config.layer(i).window for i in range(6)] == [12] * 5 + [0]
    assert [config.layer(i).rope == LOCAL_ROPE for i in range(6)] == [True] * 5 + [False]
    assert config.rope.linear_scale == 8
    assert config.ropes[LOCAL_ROPE].linear_scale == 1


def test_a_pattern_must_have_a_value_for_each_layer(tmp_path: Path) -> None:
    metadata = {"gemma2.attention.sliding_window_pattern": [True, False, True]}
    with pytest.raises(ModelError, match="sliding_window_pattern must be 2 truth values"):
        _config(write(tmp_path / "wrong.gguf", RECORDED["gemma2"], metadata))


def test_long_factors_are_for_contexts_longer_than_the_original(files: dict[str, Path]) -> None:
    short, long = (_logits(files["phi3-longrope"], PROMPTS[1], context=context) for context in (512, 513))
    assert np.abs(short - long).max() > 1e-2


def test_yarn_by_hand() -> None:
    # 16 values, base 10,000, 64 positions: pairs turn 64 / (2π · 10000^(i / 8)) times, 10.2, 3.2, 1.02, 0.32 …
    # pair(32) < 0 → 0, pair(1) = 8 · ln(64 / 2π) / ln(10000) = 2.02 → 3: pairs 0 … 3 go from 1 to 4 in thirds.
    kept_share = np.array([1, 2 / 3, 1 / 3, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(Yarn(4.0, 64).factors(16, 1e4), 1 / (kept_share + (1 - kept_share) / 4))


@pytest.mark.parametrize(
    ("changes", "context"),
    [({}, 64), ({"attention.temperature_length": 32}, 32), ({"attention.temperature_scale": 0.0}, 128)],
)
def test_the_context_of_mistral3_ends_where_queries_would_be_scaled(
    changes: dict[str, Any], context: int, tmp_path: Path
) -> None:
    metadata = {f"mistral3.{key}": value for key, value in changes.items()}
    path = checkpoints.write_gguf(tmp_path / "tiny.gguf", checkpoints.recorded("mistral3"), metadata)
    assert _config(path).context == context
    with shaderlm.load(path, device="cpu") as model, pytest.raises(InputError):
        model.logits([1] * (context + 1))
