"""What configs and graphs of single architectures have. Their logits are in test_oracles and test_checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shaderlm
from shaderlm.errors import InputError, ModelError
from shaderlm.formats.gguf import GgufFile
from shaderlm.graph.fuse import fuse
from shaderlm.graph.reference import Yarn
from shaderlm.models.checkpoint import architecture_of, read_config
from shaderlm.models.config import LOCAL_ROPE, Config, StepSpec

from . import checkpoints
from .oracles import Oracle


def _config(path: Path) -> Config:
    with GgufFile.open(path) as file:
        return read_config(architecture_of(file), file)


@pytest.mark.parametrize(("name", "epilogue"), [("gemma2", "gelu_mul"), ("starcoder2", "gelu"), ("phi3", "silu_mul")])
def test_activations_are_fused(name: str, epilogue: str, oracles: dict[str, Oracle]) -> None:
    with GgufFile.open(oracles[name].gguf) as file:
        kind = architecture_of(file)
        graph = fuse(kind.build(read_config(kind, file), StepSpec(4)))[0]
    found = [node.dims["epilogue"] for node in graph.nodes if node.op == "linear"]
    assert found.count(epilogue) == 2
    assert epilogue not in {node.op for node in graph.nodes}


def test_layers_of_gemma3(oracles: dict[str, Oracle]) -> None:
    config = _config(oracles["gemma3"].gguf)
    assert [config.layer(i).window for i in range(6)] == [12] * 5 + [0]
    assert [config.layer(i).rope == LOCAL_ROPE for i in range(6)] == [True] * 5 + [False]
    assert config.rope.linear_scale == 8
    assert config.ropes[LOCAL_ROPE].linear_scale == 1


def test_a_pattern_must_have_a_value_for_each_layer(tmp_path: Path) -> None:
    metadata = {"gemma2.attention.sliding_window_pattern": [True, False, True]}
    with pytest.raises(ModelError, match="sliding_window_pattern must be 2 truth values"):
        _config(checkpoints.write_gguf(tmp_path / "wrong.gguf", checkpoints.recorded("gemma2"), metadata))


def test_yarn_by_hand() -> None:
    # 16 values, base 10,000, 64 positions: pairs turn 64 / (2π · 10000^(i / 8)) times, 10.2, 3.2, 1.02, 0.32 …
    # pair(32) < 0 → 0, pair(1) = 8 · ln(64 / 2π) / ln(10000) = 2.02 → 3: pairs 0 … 3 go from 1 to 4 in thirds.
    kept_share = np.array([1, 2 / 3, 1 / 3, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(Yarn(4.0, 64).factors(16, 1e4), 1 / (kept_share + (1 - kept_share) / 4))


@pytest.mark.parametrize("keys", [(), ("attn_factor",), ("yarn_attn_factor",), ("attn_factor", "yarn_attn_factor")])
@pytest.mark.parametrize("value", [1.2079441541679836, 1.0])
def test_the_magnitude_of_yarn_counts_once(keys: tuple[str, ...], value: float, tmp_path: Path) -> None:
    """OLMo 3: converters write the whole magnitude, 1 + 0.1 ln 8, under one key or both; other files a factor of it."""
    given = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64}
    given |= {f"rope.scaling.{key}": value for key in keys}
    metadata = {f"olmo2.{key}": each for key, each in given.items()}
    path = checkpoints.write_gguf(tmp_path / "tiny.gguf", checkpoints.recorded("olmo3"), metadata)
    assert _config(path).rope.magnitude == pytest.approx(1.2079441541679836)


def test_a_magnitude_of_yarn_that_may_mean_two_things(tmp_path: Path) -> None:
    given = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.attn_factor": 1.5}
    path = checkpoints.write_gguf(
        tmp_path / "tiny.gguf", checkpoints.recorded("olmo3"), {f"olmo2.{key}": each for key, each in given.items()}
    )
    with pytest.raises(ModelError, match=r"attn_factor is 1\.5: it is not known whether"):
        _config(path)


@pytest.mark.parametrize(
    ("changes", "context"),
    [({}, 128), ({"attention.temperature_length": 32}, 32), ({"attention.temperature_scale": 0.0}, 512)],
)
def test_the_context_of_mistral3_ends_where_queries_would_be_scaled(
    changes: dict[str, Any], context: int, tmp_path: Path
) -> None:
    metadata = {f"mistral3.{key}": value for key, value in changes.items()}
    path = checkpoints.write_gguf(tmp_path / "tiny.gguf", checkpoints.recorded("mistral3"), metadata)
    assert _config(path).context == context
    with shaderlm.load(path, device="cpu") as model, pytest.raises(InputError):
        model.logits([1] * (context + 1))
