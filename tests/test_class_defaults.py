"""A key that config.json of a folder does not have means what it means to the class of `transformers`, or is asked for.

`make_class_defaults` recorded what that is, in two versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shaderlm.errors import ModelError
from shaderlm.formats.hf.models import MODEL_TYPES
from shaderlm.formats.hf.tower_families import FAMILIES
from shaderlm.formats.hf.towers import folder_metadata

from . import checkpoints
from .sweeps import every_third_by_default
from .test_right_or_refused import FOLDERS, Computed

DATA = Path(__file__).parent / "data" / "class_defaults.json"
ROPE = ("rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq")
# Classes of what reads images, by model_type of the folder.
TOWERS = {
    "smolvlm_vision": "smolvlm",
    "idefics3_vision": "idefics3",
    "siglip_vision_model": "gemma3",
    "qwen3_vl_vision": "qwen3_vl",
}
# Keys whose absence means something else, and why.
OTHERWISE: Mapping[str, str] = {
    "tie_word_embeddings": "whether there is an output matrix says it",
    "pad_token_id": "the tokenizer has it",
}


def _class_of(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The defaults by version, of the class that reads the text model's keys."""
    known, name = json.loads(DATA.read_text(encoding="utf-8")), config["model_type"]
    inner = config.get(MODEL_TYPES[name].nested or "", {}).get("model_type", name)
    found: Mapping[str, Mapping[str, Any]] = known.get(inner) or known.get(f"{name}_text") or known[name]
    return found


@pytest.mark.parametrize("name", every_third_by_default(FOLDERS))
def test_a_key_that_is_not_there(name: str, tmp_path: Path) -> None:
    computed, entry = Computed(False), checkpoints.recorded(name)
    folder, config = checkpoints.write_folder(tmp_path / "folder", entry), entry["config"]
    nested = MODEL_TYPES[config["model_type"]].nested
    nested = nested if nested in config else None
    text = config[nested] if nested else config

    @cache  # versions differ in few defaults
    def outcome_of(changed: str) -> str | None:
        (folder / "config.json").write_text(changed, encoding="utf-8")
        try:
            return computed.of(folder)
        except ModelError:
            return None

    def outcome(changed: Mapping[str, Any]) -> str | None:
        """What is computed; None if it is refused."""
        return outcome_of(json.dumps({**config, nested: changed} if nested else changed, sort_keys=True))

    assert outcome(text) is not None
    compared, different = 0, []
    for version, defaults in _class_of(config).items():
        for key, default in defaults.items():
            away = ROPE if key in ROPE else (key,)
            without = {each: value for each, value in text.items() if each not in away}
            absent = outcome(without)
            if absent is not None and key not in OTHERWISE:
                compared += 1
                if absent != outcome({**without, key: default}):
                    different.append(f"{key} is {default!r} in transformers {version}")
    assert not different
    assert compared > 5


@pytest.mark.parametrize("name", TOWERS)
def test_a_key_of_a_tower_that_is_not_there(name: str, tmp_path: Path) -> None:
    """Of vision_config: it is what its class has."""
    family = FAMILIES[TOWERS[name]]
    for defaults in json.loads(DATA.read_text(encoding="utf-8"))[name].values():
        read = {key: value for key, value in defaults.items() if key in {*family.keys, *family.absent}}
        assert len(read) >= 8

        def metadata(vision: Mapping[str, Any]) -> Mapping[str, Any]:
            config = {"model_type": TOWERS[name], "text_config": {"hidden_size": 64}, "vision_config": vision}
            return folder_metadata(tmp_path, config, family)

        whole = metadata(read)
        assert metadata({}) == whole
        for key, value in read.items():
            assert metadata({other: read[other] for other in read if other != key}) == whole
            if isinstance(value, int):
                assert metadata({**read, key: 2 * value}) != whole
