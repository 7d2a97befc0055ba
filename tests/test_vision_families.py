"""Families of models that see, without an oracle: what `transformers` computes for tiny checkpoints, from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.engine.loading import load_with
from shaderlm.errors import InputError, ModelError
from shaderlm.formats.hf.config import FolderConfig
from shaderlm.formats.hf.tower_families import FAMILIES
from shaderlm.formats.hf.towers import folder_metadata, open_folder_tower
from shaderlm.formats.vision_files import open_mmproj
from shaderlm.models.vision import described_tower, read_tower
from shaderlm.runtime.tower import NumpyTower, TowerSource
from shaderlm.vision import open_picture

from .vision_checkpoints import ROWS, messages, recorded, unpack_families, write_folder
from .vision_oracles import VisionOracle

pytest.importorskip("PIL", reason="Pillow is in the extra `vision`")
pytestmark = pytest.mark.xdist_group("test_vision_families")
SOURCES = [(name, source) for name in ROWS for source in ("hf", "model.gguf")]
_GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VisionOracle]:
    """All checkpoints, as files."""
    return unpack_families(tmp_path_factory.mktemp("families"))


def _tokens(name: str, source: str) -> tuple[int, int] | None:
    """Of a picture, where the file does not say it."""
    return None if source == "hf" else ROWS[name].image_tokens


def _messages(oracle: VisionOracle, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a case, with its pictures."""
    found = messages(case["images"])
    for part, path in zip(found[0]["content"], oracle.pictures(case), strict=False):
        part["image"] = path
    return found


@pytest.mark.parametrize(("name", "source"), SOURCES)
def test_pixels_and_features(name: str, source: str, families: dict[str, VisionOracle]) -> None:
    """Pixels are those of the processor to the bit; features of all cases."""
    oracle = families[name]
    file = open_folder_tower(oracle.folder / "hf") if source == "hf" else open_mmproj(oracle.folder / "mmproj.gguf")
    assert file is not None
    tower = read_tower(file.metadata, file.shapes, dict.fromkeys(file.shapes, "f32"), _tokens(name, source))
    runner = NumpyTower(tower, TowerSource(file, tower))
    for number, case in enumerate(oracle.cases):
        pictures = [open_picture(path) for path in oracle.pictures(case)]
        layouts = [tower.processor.layout(each.width, each.height) for each in pictures]
        rows = [runner.patches(picture.pixels, each) for picture, each in zip(pictures, layouts, strict=True)]
        made = np.concatenate([runner.features(*each) for each in zip(rows, layouts, strict=True)])
        wanted = oracle.arrays[f"features-{number}"]
        np.testing.assert_allclose(made, wanted, atol=1e-5 * np.abs(wanted).max())
        total = sum(float(each.astype(np.float64).sum()) for each in rows)
        assert abs(total - case["pixel_values"]["sum"]) < 1e-2
        if (pixels := oracle.arrays.get(f"pixels-{number}")) is not None:
            places, p = layouts[0].places() * tower.patch, tower.patch
            cut = [pixels[:, y : y + p, x : x + p].reshape(-1) for y, x in places]
            np.testing.assert_allclose(rows[0][:, : 3 * p * p], cut, atol=1e-6)
    file.close()


@pytest.mark.parametrize(("name", "source"), SOURCES)
def test_ids_and_logits(name: str, source: str, families: dict[str, VisionOracle]) -> None:
    """Ids are those of the processor, what follows them is the same; the last row of logits; with a text beside."""
    oracle = families[name]
    with load_with(
        oracle.folder / source, device="numpy", precision="exact", image_tokens=_tokens(name, source)
    ) as model:
        conversations = [_messages(oracle, case) for case in oracle.cases]
        text = [{"role": "user", "content": "what is in the street?"}]
        plain, *seen = model.chat([text, *conversations], **_GREEDY)
        assert plain.ids == model.chat(text, **_GREEDY).ids
        for number, (case, each) in enumerate(zip(oracle.cases, seen, strict=True)):
            assert each.prompt_ids == case["ids"]
            assert each.ids == case["greedy"]
            request = model.chat_request(conversations[number], max_tokens=1, cache_prompt=False)
            handle = model.engine.submit(replace(request, output="logits", first_row=len(case["ids"]) - 1))
            handle.result()
            assert handle.logits is not None
            np.testing.assert_allclose(handle.logits[-1], oracle.logits[number], atol=2e-4)
        with pytest.raises(InputError, match="stand for images"):
            model.generate(oracle.cases[0]["ids"], max_tokens=1)


@pytest.mark.full
@pytest.mark.parametrize("name", ROWS)
def test_on_a_device(name: str, families: dict[str, VisionOracle], device: Any) -> None:
    """Greedy ids and features by kernels, from a GGUF file; on a CPU with packed weights greedy ids alone."""
    oracle = families[name]
    conversations = [_messages(oracle, case) for case in oracle.cases]
    for where, cache in ((device, "f32"), ("cpu", None)):
        with load_with(
            oracle.folder / "model.gguf",
            device=where,
            precision="exact",
            cache=cache,
            image_tokens=ROWS[name].image_tokens,
        ) as model:
            found = model.chat(conversations, cache_prompt=False, **_GREEDY)
            assert [each.ids for each in found] == [case["greedy"] for case in oracle.cases]
            assert model.vision is not None
            picture = open_picture(oracle.pictures(oracle.cases[0])[0])
            layout = model.vision.processor.layout(picture.width, picture.height)
            wanted = oracle.arrays["features-0"]
            made = np.asarray(model.vision.runner.encode(picture.pixels, layout))
            np.testing.assert_allclose(made, wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mistral3", {"vision_feature_layer": -2}, "vision_feature_layer is -2"),
        ("qwen25vl", {"vision_config": {"fullatt_block_indexes": [9]}}, "fullatt_block_indexes must be numbers"),
        ("gemma4-blocks", {"vision_config": {"num_key_value_heads": 1}}, "must have 2 heads of 16 values for keys"),
        ("gemma4-blocks", {"vision_config": {"patch_size": None}}, "other values than expected"),
        ("mistral3", {"projector_hidden_act": "relu"}, "projector_hidden_act is 'relu'"),
        ("llava-clip", {"vision_feature_layer": [-2, -1]}, "vision_feature_layer must be one of 3 layers"),
        ("llava-siglip", {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy is 'default'"),
        ("pixtral", {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy is 'default'"),
    ],
)
def test_what_is_refused(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By name, and text is read as before."""
    entry = recorded(name)
    config = entry["config"]
    inside = {key: {**config[key], **value} if isinstance(value, dict) else value for key, value in changes.items()}
    folder = write_folder(tmp_path / name, name, {**entry, "config": {**config, **inside}})
    with load_with(folder, device="numpy") as model:
        assert words in caplog.text
        content = [{"type": "image", "image": np.zeros((8, 8, 3), np.uint8)}]
        with pytest.raises(InputError, match="does not read images"):
            model.chat([{"role": "user", "content": content}], max_tokens=1)


_SIDE = {"hidden_size": 64, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}


@pytest.mark.parametrize(
    ("family", "processor", "words"),
    [
        ("qwen3_vl", {"do_resize": False}, "do_resize of the processor is False"),
        ("qwen3_vl", {"do_normalize": False}, "do_normalize of the processor is False"),
        ("qwen3_vl", {"rescale_factor": 1}, "rescale_factor of the processor is 1"),
        ("gemma3", {"do_pan_and_scan": True}, "must resize whole pictures to 32 × 32"),
        ("gemma3", {"size": {"height": 64, "width": 64}}, "must resize whole pictures to 32 × 32"),
        ("smolvlm", {"max_image_size": {"longest_edge": 48}}, "tiles of 32 × 32"),
        ("smolvlm", {"do_image_splitting": False}, "tiles of 32 × 32"),
    ],
)
def test_processors_that_are_refused(family: str, processor: dict[str, Any], words: str, tmp_path: Path) -> None:
    """What would give other pixels or tokens than the processor does."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(ModelError, match=words):
        folder_metadata(tmp_path, {"vision_config": _SIDE}, FAMILIES[family])


@pytest.mark.parametrize("resample", [0, 4, "cubic", [3]])
def test_resampling_that_is_not_known(resample: Any, tmp_path: Path) -> None:
    """Refused by name, and not taken for the family's."""
    half = [0.5, 0.5, 0.5]
    given = {"resample": resample, "image_mean": half, "image_std": half}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    (tmp_path / "processor_config.json").write_text('{"image_processor": null}')
    config = {"vision_config": _SIDE, "mm_tokens_per_image": 4}
    metadata = folder_metadata(tmp_path, config, FAMILIES["gemma3"])
    with pytest.raises(ModelError, match=r"clip\.vision\.resample must be bilinear or bicubic or lanczos"):
        described_tower({**metadata, "clip.vision.projection_dim": 64}, {}, {})


def test_what_files_of_llava_leave_out() -> None:
    """Pixtral 12B's config.json says little: the rest is what the classes have, of the text model that it names."""
    text = {"model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "num_hidden_layers": 40, "rope_theta": 1e9}
    text |= {"is_composition": True, "max_position_embeddings": 1024000, "rms_norm_eps": 1e-5, "sliding_window": None}
    outer = {"model_type": "llava", "ignore_index": -100, "image_seq_length": 1, "image_token_index": 10}
    about = FolderConfig({**outer, "text_config": {**text, "vocab_size": 131072}, "vision_config": {}}).metadata
    assert about["general.architecture"] == "llama"
    assert (about["llama.attention.head_count"], about["llama.attention.head_count_kv"]) == (32, 8)
    assert about["llama.feed_forward_length"] == 14336
    assert not [key for key in about if ".config." in key]
    with pytest.raises(ModelError, match="model_type is 'gemma'"):
        FolderConfig({**outer, "text_config": {"model_type": "gemma"}})
