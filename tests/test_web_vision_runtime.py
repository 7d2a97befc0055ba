"""Exports that see, in a real Chromium (`--browser`): features and greedy ids of `transformers`.

Each of three tiny models has plans for software and few of them: their shaders take most of the time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.web import plans

from .browser import NO_ZEROS, WEBGPU, Browser
from .test_web_runtime import PAGE, Page
from .test_web_vision import NAMES, export_oracle, few_plans
from .vision_checkpoints import unpack_families
from .vision_oracles import VisionOracle
from .web_serving import WebServer, serving

pytest.importorskip("PIL", reason="Pillow is in the extra `vision`")  # it writes pictures
pytestmark = [pytest.mark.xdist_group("web vision"), pytest.mark.browser, pytest.mark.full]

# Features of the pictures of the last answer, and how often the tower ran: no function of the runtime tells.
TOLD = b"""
globalThis.encoded = [];
globalThis.runs = 0;
const { encode } = Vision.prototype;
Vision.prototype.encode = async function (images, ...rest) {
  const done = await encode.call(this, images, ...rest);
  globalThis.encoded = images.images.map(({ picture }) => Array.from(picture.features));
  return done;
};
const { encode: run } = Tower.prototype;
Tower.prototype.encode = function (...given) {
  globalThis.runs++;
  return run.apply(this, given);
};
"""
ASSETS = Path(plans.__file__).parent / "assets"


@pytest.fixture(scope="module")
def models(
    vision_oracles: dict[str, VisionOracle], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, VisionOracle]:
    return {**vision_oracles, **unpack_families(tmp_path_factory.mktemp("families"))}


@pytest.fixture(scope="module")
def server(models: dict[str, VisionOracle], tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    """Exports and pictures under the names of models."""
    folder, folders = tmp_path_factory.mktemp("exports"), {"model": [ASSETS]}
    with few_plans():
        for name in NAMES:
            export_oracle(models[name], folder / name)
            folders |= {name: [folder / name], f"{name}-images": [models[name].folder / "images"]}
    pages = {"/page.html": PAGE, "/model/vision.js": (ASSETS / "vision.js").read_bytes() + TOLD}
    with serving(pages, folders) as made:
        yield made


@pytest.fixture(scope="module")
def page(server: WebServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    browser = Browser(tmp_path_factory.mktemp("browser"), flags=(*WEBGPU, NO_ZEROS))
    try:
        made = Page(browser, server)
        made.open()
        yield made
    finally:
        browser.close()


def loaded(page: Page, name: str) -> Page:
    """With a model under its name, loaded once."""
    if page.call(f"return !models[{json.dumps(name)}]"):
        info = page.call(f"return state.open({json.dumps(name)}, {{}}, '/{name}/')")
        assert info["vision"] is True
    return page


def messages_of(name: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    """With the addresses of pictures."""
    images = iter(f"/{name}-images/{image}" for image in case["images"])

    def part_of(part: dict[str, Any]) -> dict[str, Any]:
        return part | ({"image": next(images)} if part["type"] == "image" else {})

    return [{**message, "content": [part_of(part) for part in message["content"]]} for message in case["messages"]]


@pytest.mark.parametrize("name", NAMES)
def test_features_and_greedy_ids(name: str, page: Page, models: dict[str, VisionOracle]) -> None:
    """Of one and two pictures, of awkward sizes, grey, with alpha; from pixels on."""
    oracle = models[name]
    for number, case in enumerate(oracle.cases):
        options = f"{{max_tokens: {len(case['greedy'])}, ignore_eos: true}}"
        answer = loaded(page, name).chat(messages_of(name, case), options, name)
        found = np.concatenate([np.array(each, np.float32) for each in page.call("return encoded")])
        wanted = oracle.arrays[f"features-{number}"]
        np.testing.assert_allclose(found.reshape(len(wanted), -1)[:, : wanted.shape[1]], wanted, atol=1e-5)
        assert answer["promptTokens"] == len(case["ids"])
        assert answer["ids"] == case["greedy"], case["images"]
    page.check()


def test_a_second_question_about_a_picture(page: Page, models: dict[str, VisionOracle]) -> None:
    """No pixel is read again, whatever the picture comes as; the cache has its rows, text after it its positions."""
    name = "qwen3vl"
    case = models[name].cases[0]
    loaded(page, name)
    first = page.chat(messages_of(name, case), "{max_tokens: 4, ignore_eos: true}", name)
    runs = page.call("return runs")
    found = page.call(f"""
        const model = models[{json.dumps(name)}];
        const bytes = await (await fetch("/{name}-images/{case["images"][0]}")).blob();
        const reader = new FileReader();
        await new Promise((done) => {{ reader.onload = done; reader.readAsDataURL(bytes); }});
        const given = [bytes, new File([bytes], "a.png"), reader.result, URL.createObjectURL(bytes)];
        const answers = [];
        for (const image of given) {{
            const content = [{{ type: "image", image }}, {{ type: "text", text: "what is in the street?" }}];
            const answer = model.chat([{{ role: "user", content }}], {{ max_tokens: 4, ignore_eos: true }});
            answers.push((await state.answer(answer, model)).ids);
        }}
        const url = {{ type: "image_url", image_url: {{ url: reader.result }} }};
        const question = [{{ role: "user", content: [url, {{ type: "text", text: "what is in the street?" }}] }}];
        const talk = [...question, {{ role: "assistant", content: "a cat" }}, {{ role: "user", content: "where?" }}];
        const counted = await model.tokenizeChat(talk);
        const more = await state.answer(model.chat(talk, {{ max_tokens: 4, ignore_eos: true }}), model);
        await state.answer(model.complete("the", {{ max_tokens: 1 }}), model);
        const anew = await state.answer(model.chat(talk, {{ max_tokens: 4, ignore_eos: true }}), model);
        return {{ answers, counted: counted.length, more, anew }};
    """)
    assert found["answers"] == [first["ids"]] * 4
    assert page.call("return runs") == runs, "its features are known"
    more, anew = found["more"], found["anew"]
    assert more["promptTokens"] == found["counted"]
    assert (more["cachedTokens"] >= len(case["ids"]) - 3, anew["cachedTokens"]) == (True, 0)
    assert more["ids"] == anew["ids"], "rows from the cache are those that are computed"
    page.check()


def test_pictures_that_are_none(page: Page) -> None:
    """By our own errors."""
    name = "smolvlm"
    loaded(page, name)
    cases = {
        'new Blob(["no picture"])': "cannot be decoded",
        "new Blob([])": "0 bytes",
        "new Blob([new Uint8Array((32 << 20) + 1)])": "32 MiB",
        "{ width: 10000, height: 10000, data: new Uint8Array(4) }": "50 megapixels",
        "{ width: 2, height: 2, data: new Uint8Array(4) }": "must be 16 bytes",
        '"https://elsewhere.example/a.png"': "the page's own origin alone",
        '"/nothing.png"': "404",
        '"data:image/png,abc"': "must begin with data:image/TYPE;base64,",
        "5": "must be a File",
        "null": "a part of a message must be",
    }
    for image, words in cases.items():
        content = f'[{{ type: "image", image: {image} }}]'
        found = page.caught(f'models.{name}.chat([{{ role: "user", content: {content} }}]).next()')
        assert found["code"] == "input"
        assert words in found["message"]
    token = page.call(f"return models.{name}.tokenize('<image>')")
    refused = page.caught(f"models.{name}.complete({json.dumps(token)}).next()")
    assert "stand for images, and no image" in refused["message"]
    answer = page.call(f"""
        const data = new Uint8ClampedArray(4 * 700 * 3).map((_, i) => i % 251), model = models.{name};
        const content = [{{ type: "image", image: {{ width: 700, height: 3, data }} }}, {{ type: "text", text: "a" }}];
        return state.answer(model.chat([{{ role: "user", content }}], {{ max_tokens: 1 }}), model);
    """)
    assert answer["completionTokens"] <= 1, "the next one is answered"
    page.check()
