"""Layers that predict further tokens are left aside: no logits depend on them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shaderlm.errors import ModelError
from shaderlm.formats.hf.folder import Folder
from shaderlm.models.checkpoint import architecture_of, read_config

from . import checkpoints
from .changed import InMemory, in_memory, logits
from .command_line import shaderlm
from .gguf_files import write_gguf
from .safetensors_files import write_safetensors

NAME = "glm4moe"
FILE = in_memory(NAME)
LAYERS = FILE.keys()["block_count"]


def with_predictor(file: InMemory, layer: int) -> InMemory:
    """The same with a copy of its last layer, and what mixes the token before into it."""
    last = {name: array for name, array in file.arrays.items() if name.startswith(f"blk.{LAYERS - 1}.")}
    hidden = file.keys()["embedding_length"]
    added = {f"blk.{layer}.{name.split('.', 2)[2]}": array for name, array in last.items()}
    added[f"blk.{layer}.nextn.eh_proj.weight"] = np.ones((hidden, 2 * hidden), np.float32)
    return file.changed(tensors=dict(added))


def test_logits_are_those_without_it() -> None:
    file = with_predictor(FILE, LAYERS).changed({"block_count": LAYERS + 1, "nextn_predict_layers": 1})
    assert read_config(architecture_of(file), file).predictors == 1
    np.testing.assert_array_equal(logits(file), logits(FILE))


def test_lists_of_layers_count_it() -> None:
    """Of Nemotron 3, where a layer is one thing of several, and that which predicts attends and has experts."""
    file = in_memory("nemotron_h_moe")
    keys, hidden = file.keys(), file.keys()["embedding_length"]
    layers = keys["block_count"]
    lists = {key: [*keys[key], max(keys[key])] for key in ("attention.head_count_kv", "feed_forward_length")}
    eh_proj = {f"blk.{layers}.nextn.eh_proj.weight": np.ones((hidden, 2 * hidden), np.float32)}
    changed = file.changed({**lists, "block_count": layers + 1, "nextn_predict_layers": 1}, eh_proj)
    np.testing.assert_array_equal(logits(changed), logits(file))
    with pytest.raises(ModelError, match=f"head_count_kv must be {layers} whole numbers"):
        read_config(architecture_of(file), file.changed({"attention.head_count_kv": lists["attention.head_count_kv"]}))


def test_a_folder_counts_its_layers_without_it(tmp_path: Path) -> None:
    entry = checkpoints.recorded(NAME)
    folder = checkpoints.write_folder(tmp_path / "folder", entry)
    tensors = checkpoints.tensors_of(entry)
    last, hidden = f"model.layers.{LAYERS - 1}.", entry["config"]["hidden_size"]
    more = {
        name.replace(last, f"model.layers.{LAYERS}."): value for name, value in tensors.items() if name.startswith(last)
    }
    more[f"model.layers.{LAYERS}.eh_proj.weight"] = np.ones((hidden, 2 * hidden), np.float32)
    write_safetensors(folder / "model.safetensors", {**tensors, **more})
    file = Folder.open(folder)
    assert read_config(architecture_of(file), file).predictors == 1
    file.close()


@pytest.mark.parametrize(
    ("at", "keys", "message"),
    [
        (LAYERS, {"block_count": LAYERS + 2, "nextn_predict_layers": 2}, "nextn_predict_layers is 2"),
        (LAYERS, {"block_count": LAYERS + 1}, f"blk.{LAYERS}.nextn.eh_proj.weight"),
        (0, {}, "blk.0.nextn.eh_proj.weight"),
        (LAYERS, {"nextn_predict_layers": LAYERS}, "nextn_predict_layers must be less than block_count"),
    ],
)
def test_a_file_that_counts_otherwise_is_refused(at: int, keys: dict[str, int], message: str) -> None:
    file = with_predictor(FILE, at).changed(keys)
    with pytest.raises(ModelError, match=message):
        read_config(architecture_of(file), file)


def test_info_names_it_and_counts_what_runs(tmp_path: Path) -> None:
    file = with_predictor(FILE, LAYERS).changed({"block_count": LAYERS + 1, "nextn_predict_layers": 1})
    metadata = {key: value for key, value in file.metadata.items() if key != "general.architecture"}
    tensors = {name: ("f32", array) for name, array in file.arrays.items()}
    path = write_gguf(tmp_path / "model.gguf", tensors, metadata, architecture=NAME)
    facts = json.loads(shaderlm("info", path, "--json").out)
    assert (facts["runs"], facts["layers"], facts["predictors"]) == (True, LAYERS, 1)
    assert facts["parameters"] == sum(array.size for array in FILE.arrays.values())
    assert "left aside" in shaderlm("info", path).out
