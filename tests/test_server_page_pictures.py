"""Pictures on the page, in Chromium: added, taken away, sent, kept, taken to another browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shaderlm import load
from shaderlm.server.served import ServedModel

from .browser import Browser
from .serving import Running, running
from .vision_oracles import VisionOracle

pytest.importorskip("PIL", reason="Pillow is in the extra `vision`")
pytestmark = pytest.mark.browser


@pytest.fixture
def server(vision_oracles: dict[str, VisionOracle]) -> Iterator[Running]:
    def loaded() -> ServedModel:
        model = load(vision_oracles["qwen3vl"].folder / "hf", device="cpu")
        # With other seeds the end of the text may come first.
        return ServedModel(model, names=("eyes",), n_predict=4, seed=4)

    with running(loaded) as found:
        yield found


def _choose(browser: Browser, files: list[Path], shown: int) -> None:
    root = browser.call("DOM.getDocument")["root"]["nodeId"]
    field = browser.call("DOM.querySelector", nodeId=root, selector="#picture-file")["nodeId"]
    browser.call("DOM.setFileInputFiles", nodeId=field, files=[str(each) for each in files])
    browser.until(
        f"[...document.querySelectorAll('#pictures img')].filter((each) => each.naturalWidth).length === {shown}"
    )


def test_a_conversation_about_pictures(
    server: Running, vision_oracles: dict[str, VisionOracle], tmp_path: Path
) -> None:
    folder = vision_oracles["qwen3vl"].folder / "images"
    files = sorted(folder.iterdir())[:2]
    text, other = tmp_path / "text.png", tmp_path / "other.png"
    for each in (text, other):
        each.write_text("no picture")
    with closing(Browser(tmp_path)) as browser:
        browser.open(server.url + "/")
        browser.until("!document.querySelector('#add-picture').hidden")
        _choose(browser, files, 2)
        browser.run("document.querySelector('#pictures button').click()")
        assert browser.run("document.querySelectorAll('#pictures img').length") == 1
        browser.run("document.querySelector('#pictures button').click()")
        _choose(browser, [text, files[0], other, files[1]], 2)
        problem = "No pictures that this browser can read: text.png, other.png."
        browser.until(f"document.querySelector('#picture-problem').textContent === {json.dumps(problem)}")
        browser.run("document.querySelector('#pictures button').click()")
        _choose(browser, [text], 1)
        browser.until("document.querySelector('#picture-problem').textContent.includes('no picture that this browser')")
        browser.run("document.querySelector('#prompt').value = 'What is it?'; document.querySelector('#send').click()")
        browser.until("document.querySelector('#stop').hidden && document.querySelectorAll('article').length === 2")
        browser.until("document.querySelector('.figures').textContent.includes('tokens')")
        assert browser.run("document.querySelector('.user .pictures img').naturalWidth") > 0
        assert browser.run("document.querySelectorAll('#pictures img').length") == 0
        kept = json.loads(browser.run("JSON.stringify(Object.values(localStorage).filter((each) => each[0] === '{'))"))
        (conversation,) = map(json.loads, kept)
        (url,) = conversation["messages"][0]["images"]
        assert url.startswith("data:image/jpeg;base64,")
        read = "const { fromJson } = await import('/assets/import_file.js');"
        check = "return JSON.stringify(fromJson(JSON.stringify(each), (given) => given)[0].messages[0].images)"
        again = f"(async () => {{ {read} const each = [{json.dumps(conversation)}]; {check} }})()"
        assert json.loads(browser.run(again)) == [url], "a file has its pictures"
        conversation["messages"][0]["images"] = ["https://elsewhere.example/a.png"]
        bad = f"(async () => {{ {read} const each = [{json.dumps(conversation)}]; {check} }})().catch((e) => e.message)"
        assert "a list of pictures as data URLs" in browser.run(bad), "nothing is fetched from elsewhere"
