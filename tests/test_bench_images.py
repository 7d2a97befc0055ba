"""`shaderlm bench --image`: times of pictures, in the forms of the other benches."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from shaderlm.bench.images import ImageTrial, run
from shaderlm.bench.synthetic import load_synthetic, tower_of
from shaderlm.engine.loading import load_with
from shaderlm.errors import InputError
from shaderlm.models.shapes import SYNTHETIC
from shaderlm.runtime.tower import NumpyTower

from .command_line import shaderlm
from .tiny_models import write_tiny_llama
from .vision_oracles import VisionOracle

pytest.importorskip("PIL", reason="Pillow is in the extra `vision`")
pytestmark = pytest.mark.xdist_group("test_vision")


def test_rows(vision_oracles: dict[str, VisionOracle]) -> None:
    """One for each size and number of pictures at once, for programs and for people."""
    options = ("bench", "-m", vision_oracles["qwen3vl"].folder / "hf", "--device", "numpy", "--no-warmup", "-r", 2)
    done = shaderlm(*options, "--image", "64x64,40×80", "-np", "1,2", "-o", "json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)
    seen = [
        tuple(row[f"{name}"] for name in ("image_width", "image_height", "image_tokens", "n_parallel")) for row in rows
    ]
    assert seen == [(64, 64, 16, 1), (64, 64, 16, 2), (40, 80, 10, 1), (40, 80, 10, 2)]
    for row in rows:
        assert row["avg_ns"] == round(fmean(row["samples_ns"])) > 0
        assert row["images_per_second"] == pytest.approx(1e9 / row["avg_ns"], rel=1e-6)
        assert len(row["samples_first_token_ns"]) == 2
    head, _, line = shaderlm(*options, "--image", "64x64", "-np", "2").out.splitlines()
    cells = [[cell.strip() for cell in each.strip("|").split("|")] for each in (head, line)]
    assert cells[0][5:] == ["parallel", "image", "tokens", "ms per image", "images/s", "ms to first token"]
    assert cells[1][5:8] == ["2", "64 × 64", "16"]


def test_pictures_are_all_different(vision_oracles: dict[str, VisionOracle], monkeypatch: pytest.MonkeyPatch) -> None:
    """So no cache knows them: each is encoded alone, and again for its request."""
    pictures: list[bytes] = []
    encode = NumpyTower.encode

    def noted(self: NumpyTower, pixels: Any, layout: Any) -> Any:
        pictures.append(pixels.tobytes())
        return encode(self, pixels, layout)

    monkeypatch.setattr(NumpyTower, "encode", noted)
    with load_with(vision_oracles["gemma3-vision"].folder / "hf", device="numpy") as model:
        *_, samples = run(model, ImageTrial(9, 7, 3), 2, warmup=False)
    assert len(samples) == 2
    assert len(pictures) == 12
    assert all(pictures.count(each) == 2 for each in pictures)
    assert min(samples[0].encode_ns, samples[0].first_token_ns) > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--image", "0x4"), "one pixel at least and 50 megapixels at most"),
        (("--image", "9999x9999"), "50 megapixels at most"),
        (("--image", "wide"), "1024x1024"),
        (("--image", "8x8", "-np", "65"), "1 to 64 pictures at once"),
        (("--image", "8x8", "-np", "0"), "1 to 64 pictures at once"),
        (("--image", "8x8", "-p", "16", "--save", "x"), "leave out --n-prompt, --save"),
        (("--image", "8x8"), "does not read images"),
    ],
)
def test_what_is_refused(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    """Before a model is loaded."""
    done = shaderlm("bench", "-m", write_tiny_llama(tmp_path / "tiny.gguf"), "--device", "numpy", *options)
    assert done.code != 0
    assert words in done.err.replace("\n", " ")


_SMALL = {"embedding_length": 64, "feed_forward_length": 80, "attention.head_count": 2, "projection_dim": 256}


@pytest.mark.parametrize("where", ["numpy", pytest.param("device", marks=pytest.mark.full)])
@pytest.mark.parametrize(("name", "tokens"), [("qwen3-vl-4b", 70), ("gemma-3-4b", 4)])
def test_synthetic_models_that_see(
    name: str, tokens: int, where: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Random weights in both parts; as many tokens as the family has of such a picture."""
    shape = SYNTHETIC[name]
    tower = {**shape.tower, **_SMALL, "block_count": 2}
    tower |= {"is_deepstack_layers": [True, False]} if "is_deepstack_layers" in tower else {"image_size": 112}
    small = replace(shape, layers=4, hidden=256, Hq=2, Hkv=1, ffn=512, vocab=400, context=512, tower=tower)
    monkeypatch.setitem(SYNTHETIC, "small", small)
    device = where if where == "numpy" else request.getfixturevalue(where)
    with load_synthetic("synthetic:small:f16", device) as model:
        *_, samples = run(model, ImageTrial(200, 150), 1, warmup=False)
        assert samples[0].tokens == tokens
        assert model.vision is not None
        layout = model.vision.processor.layout(200, 150)
        features = np.asarray(model.vision.runner.encode(np.zeros((150, 200, 3), np.uint8), layout))
        assert features.shape == (tokens, 256 * model.vision.runner.tower.levels)
        assert np.isfinite(features).all()
        assert features.std() > 0


def test_the_shapes_of_models_that_see() -> None:
    """Millions of weights of the towers, with what projects features, and tokens of a picture."""
    sizes = {}
    for name in ("qwen3-vl-4b", "gemma-3-4b"):
        tower = tower_of(SYNTHETIC[name])
        assert tower is not None
        weights = sum(math.prod(shape) for shape in tower.wanted().values())
        sizes[name] = round(weights / 1e6), tower.processor.layout(1024, 1024).tokens
    assert sizes == {"qwen3-vl-4b": (415, 1024), "gemma-3-4b": (420, 256)}


def test_a_picture_that_the_model_does_not_take(vision_oracles: dict[str, VisionOracle]) -> None:
    folder = vision_oracles["qwen3vl"].folder / "hf"
    with load_with(folder, device="numpy") as model, pytest.raises(InputError, match="200 times"):
        next(run(model, ImageTrial(2000, 1), 1, warmup=False))
