"""Exports that see, in a real Chromium (`--browser`): features and greedy ids of `transformers`, and pictures of all kinds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.web import plans
from shaderlm.web.export import export
from shaderlm.web.model import opened
from shaderlm.web.variants import SOFTWARE

from .browser import NO_ZEROS, WEBGPU, Browser
from .test_web_runtime import PAGE, Page
from .vision_oracles import IMAGE_TOKENS, NAMES, VisionOracle, unpack_vision
from .web_serving import serving

pytestmark = [pytest.mark.xdist_group("web vision"), pytest.mark.browser]

# Features of the pictures of the last answer: no function of the runtime gives them.
ENCODED = b"""
const encode = Vision.prototype.encode;
Vision.prototype.encode = async function (images, ...rest) {
  const done = await encode.call(this, images, ...rest);
  globalThis.encoded = images.images.map(({ picture }) => Array.from(picture.features));
  return done;
};
"""
ASSETS = Path(plans.__file__).parent / "assets"
SOURCES = {"qwen3vl": "model.gguf"}  # of the others a folder


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VisionOracle]:
    return unpack_vision(tmp_path_factory.mktemp("oracles"))


@pytest.fixture(scope="module")
def page(oracles: dict[str, VisionOracle], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """With exports under their names, for software alone."""
    folder, folders = tmp_path_factory.mktemp("exports"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "VARIANTS", (SOFTWARE,))
        for name in NAMES:
            source = oracles[name].folder / SOURCES.get(name, "hf")
            with opened(str(source), image_tokens=IMAGE_TOKENS.get(name)) as model:
                export(model, folder / name)
            folders |= {name: [folder / name], f"{name}-images": [oracles[name].folder / "images"]}
    own = (ASSETS / "vision.js").read_bytes() + ENCODED
    pages = {"/page.html": PAGE, "/model/vision.js": own}
    browser = Browser(tmp_path_factory.mktemp("browser"), flags=(*WEBGPU, NO_ZEROS))
    try:
        with serving(pages, folders | {"model": [ASSETS]}) as server:
            made = Page(browser, server)
            made.open()
            for name in NAMES:
                info = made.call(f"return state.open({json.dumps(name)}, {{}}, '/{name}/')")
                assert info["vision"], info
            yield made
    finally:
        browser.close()


def messages_of(name: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    """With the addresses of pictures."""
    images = iter(f"/{name}-images/{image}" for image in case["images"])
    return [
        {
            **each,
            "content": [
                part | ({"image": next(images)} if part["type"] == "image" else {}) for part in each["content"]
            ],
        }
        for each in case["messages"]
    ]


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_features_and_greedy_ids(name: str, page: Page, oracles: dict[str, VisionOracle]) -> None:
    oracle = oracles[name]
    for number, case in enumerate(oracle.cases):
        count = len(case["greedy"])
        answer = page.chat(messages_of(name, case), f"{{max_tokens: {count}, ignore_eos: true}}", name)
        print(
            name,
            number,
            case["images"],
            answer["promptTokens"],
            answer["ids"] == case["greedy"],
            answer["ids"],
            case["greedy"],
            answer["promptSeconds"],
        )
        found = np.concatenate([np.array(each, np.float32) for each in page.call("return encoded")])
        wanted = oracle.arrays[f"features-{number}"]
        found = found.reshape(len(wanted), -1)[:, : wanted.shape[1]]
        print(np.abs(found - wanted).max(), np.abs(wanted).max())
