"""The choice between several models on the page at `/`, in a real Chromium (`--browser`)."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from shaderlm.errors import ModelError
from shaderlm.server.models import Models, ModelsOptions, ModelSource
from shaderlm.server.served import ServedModel
from shaderlm.text import Tokenizer

from .browser import Browser
from .fake_runner import FakeRunner, model_of, tiny_tokenizer
from .serving import Running, running
from .test_profile_page import CONTRAST
from .test_server_page import (
    CONTEXT,
    DONE,
    NAMELESS,
    OUTSIDE,
    READY,
    SCHEMES,
    Speaker,
    ask,
    click,
    open_new,
    say,
    texts,
)

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("server page")]


class House:
    """Three models: `owl`, `fox`, which has no chat template, and `bad`, which does not load until it is mended."""

    def __init__(self) -> None:
        self.speaker, self.is_mended = Speaker(), False
        self.gate = threading.Event()  # that loads wait for
        self.gate.set()

    def load(self, name: str) -> ServedModel:
        assert self.gate.wait(60)
        if name == "bad" and not self.is_mended:
            raise ModelError("bad.gguf is cut off")
        tokenizer = tiny_tokenizer()
        if name == "fox":
            tokenizer = Tokenizer(replace(tokenizer.vocabulary, chat_template=None))
        size = len(tokenizer.vocabulary.tokens)
        token = (
            (lambda ids: list(tokenizer.vocabulary.tokens).index("<|im_end|>")) if name == "fox" else self.speaker.token
        )
        runner = FakeRunner(token, size, context=CONTEXT if name == "owl" else 2 * CONTEXT)
        return ServedModel(model_of(runner, tokenizer), names=(name,))

    def models(self, *names: str, **options: Any) -> Models:
        def source(name: str) -> ModelSource:
            return ModelSource(name=name, load=lambda: self.load(name), aliases=(f"{name}-1b",))

        return Models(lambda: [source(name) for name in names], ModelsOptions(**options))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
def server(house: House) -> Iterator[Running]:
    with running(house.models("owl", "fox", "bad", most=1)) as made:
        yield made


@pytest.fixture
def browser(chromium: Browser, server: Running) -> Iterator[Browser]:
    browser = open_new(chromium, server.url)
    browser.until("document.getElementById('models').options.length === 3")
    yield browser
    chromium.open("about:blank")


def choose(browser: Browser, name: str) -> None:
    browser.run(f"""(n => {{ n.value = {json.dumps(name)}; n.dispatchEvent(new Event("change")); }})(
        document.getElementById("models"))""")


def is_line(pattern: str) -> str:
    return f"/^{pattern}$/.test(document.getElementById('device').textContent)"


def options(browser: Browser) -> list[str]:
    found = browser.run("[...document.getElementById('models').options].map(n => n.text)")
    assert isinstance(found, list)
    return found


def asked_models(browser: Browser) -> list[str]:
    """Of the questions since the page was opened."""
    sent = [e["params"]["request"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    return [json.loads(each["postData"])["model"] for each in sent if each["url"].endswith("completions")]


def test_a_model_is_chosen_and_loaded_by_a_question(browser: Browser, house: House) -> None:
    assert options(browser) == ["owl · not loaded", "fox · not loaded", "bad · not loaded"]
    assert texts(browser, "#device") == ["Not loaded. The next message loads it."]
    assert browser.run("document.getElementById('models').labels.length || document.getElementById('models').ariaLabel")
    house.gate.clear()
    say(browser, "hello")
    browser.until("document.querySelector('.waiting').textContent === 'Waiting for the model…'")
    browser.until(is_line("Loading…"))
    assert options(browser)[0] == "owl · loading…"
    house.gate.set()
    browser.until(DONE)
    assert texts(browser, "article.assistant > .markdown") == ["Hello to you."]
    browser.until(f"{READY} && {is_line(f'.*context {CONTEXT}')}")
    assert options(browser) == ["owl", "fox · not loaded", "bad · not loaded"]
    assert texts(browser, "#context-text")[0].endswith(f"of {CONTEXT} tokens"), "known for the first answer, too"
    choose(browser, "fox")
    browser.until(is_line("Not loaded. The next message loads it."))
    ask(browser, "and now")
    browser.until(f"{READY} && {is_line('.*context 1,024')}")
    assert options(browser) == ["owl · not loaded", "fox", "bad · not loaded"], "there is room for one"
    assert texts(browser, "article h2") == ["You", "owl", "You", "fox"]
    assert texts(browser, ".note p") == ["This model has no chat template. It continues the text that you write."]
    assert asked_models(browser) == ["owl", "fox"]
    assert browser.complaints() == []


def test_each_conversation_has_its_model(browser: Browser) -> None:
    ask(browser, "hello")
    click(browser, "New chat")
    choose(browser, "fox")
    ask(browser, "hi")
    click(browser, "hello")
    browser.until("document.getElementById('models').value === 'owl'")
    assert ask(browser, "and now") == "2: and now"
    assert asked_models(browser) == ["owl", "fox", "owl"]
    browser.run("document.getElementById('open-settings').click()")
    browser.run("document.querySelector('[name=seed]').value = 3; document.getElementById('settings').requestSubmit()")
    click(browser, "hi")
    browser.run("document.getElementById('open-settings').click()")
    browser.run("document.querySelector('[name=seed]').value = 4; document.getElementById('settings').requestSubmit()")
    browser.reload()
    browser.until("document.getElementById('models').value === 'fox'")
    assert browser.complaints() == []


def test_a_model_that_does_not_load(browser: Browser, house: House) -> None:
    choose(browser, "bad")
    say(browser, "hello")
    browser.until("document.querySelector('.problem:not([hidden])')")
    assert "bad.gguf is cut off" in texts(browser, ".problem p")[0]
    browser.until("document.getElementById('server').dataset.state === 'lost'")
    assert texts(browser, "#device") == ["It failed to load: bad.gguf is cut off. The next message tries again."]
    assert options(browser)[2] == "bad · failed to load"
    choose(browser, "owl")
    assert browser.run("document.getElementById('models').value") == "owl"
    click(browser, "Try again")
    browser.until(f"{DONE} && document.querySelector('article.assistant > .markdown').textContent === 'Hello to you.'")


def test_waiting_for_a_model_can_be_stopped(browser: Browser, house: House) -> None:
    house.gate.clear()
    say(browser, "hello")
    browser.until(is_line("Loading…"))
    click(browser, "Stop")
    browser.until(DONE)
    assert texts(browser, ".figures")[0] == "Stopped."
    house.gate.set()
    browser.until(READY)
    assert ask(browser, "again") == "Hello to you.", "both are one message"


def test_a_model_that_is_gone(chromium: Browser, server: Running) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hi.", "figures": {}}]
    there = [
        {"id": name, "updated": 1, "settings": {"model": name}, "messages": messages} for name in ("cat", "fox-1b")
    ]
    browser = open_new(chromium, server.url, there)
    browser.run("location.hash = '#chat=cat'")
    browser.until("document.querySelector('.note')")
    assert texts(browser, ".note p") == ["The model cat is not served here. Another one answers."]
    assert ask(browser, "and now") == "2: and now"
    browser.run("location.hash = '#chat=fox-1b'")
    browser.until("document.getElementById('models').value === 'fox'")  # by another of its names
    browser.open("about:blank")


# Lists that other servers have, and what is shown of them: the label, and the line below.
LISTS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"id": "a"}, "a", None),
    ({"id": "a", "status": None, "aliases": None}, "a", None),
    ({"id": "a", "state": "ready"}, "a", None),
    ({"id": "a", "status": {"value": "loaded", "args": []}}, "a", None),
    ({"id": "a", "status": "loading"}, "a · loading…", "Loading…"),
    ({"id": "a", "status": {"value": "unloaded", "failed": True, "exit_code": 1}}, "a · failed to load",
     "It failed to load. The next message tries again."),
    ({"id": "a", "status": {"value": "draining"}}, "a · draining", "draining."),
    ({"id": "<b>", "status": {"value": "sleeping"}}, "<b> · not loaded", "Not loaded. The next message loads it."),
]  # fmt: skip


def test_lists_with_other_fields(browser: Browser) -> None:
    for model, label, line in LISTS:
        found = browser.run(f"""import("/assets/models.js").then(m => {{
            m.showModels([{json.dumps(model)}, {{id: "b"}}], "b");
            return [document.getElementById("models").options[0].text, m.lineOf({json.dumps(model)}),
                    m.stateOf({json.dumps(model)})];
        }})""")
        assert found[0] == label
        assert (found[2] == "loaded") == (line is None)
        assert line is None or found[1] == line
    names = "[null, 'x', 'b'].map(name => m.choose([{id: 'a', status: {value: 'unloaded'}}, {id: 'b'}], name, null).id)"
    assert browser.run(f"import('/assets/models.js').then(m => {names})") == ["b", "b", "b"]
    assert browser.complaints() == []


def test_one_model_has_no_list(chromium: Browser) -> None:
    with running(Speaker().load) as server:
        browser = open_new(chromium, server.url)
        browser.until(READY)
        assert texts(browser, "#models") == []
        assert texts(browser, "h1") == ["tiny-chat"]
        browser.open("about:blank")


def test_no_model_at_all(chromium: Browser, house: House) -> None:
    with running(house.models()) as server:
        browser = open_new(chromium, server.url)
        browser.until("document.getElementById('model').textContent === 'No model'")
        assert re.search(r"there are none", texts(browser, "#device")[0])
        browser.open("about:blank")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [360, 1200])
def test_the_list_fits(chromium: Browser, scheme: str, width: int) -> None:
    house = House()
    long = "A-model-with-a-rather-long-name-" * 4
    with running(house.models(long, "owl")) as server:
        browser = open_new(chromium, server.url, width=width, height=720, scheme=scheme)
        browser.until("document.getElementById('models').options.length === 2")
        assert browser.run(OUTSIDE) == []
        assert browser.run(NAMELESS) == []
        assert browser.run("document.getElementById('models').getBoundingClientRect().height") >= 24
        found = browser.run(f"{CONTRAST}(['#models', '#device'])")
        assert [entry for entry in found if entry[2] < 4.5] == []
        browser.run("document.getElementById('prompt').focus()")
        for _ in range(12):
            browser.press("Tab", 9, shift=True)
            if browser.run("document.activeElement.id") == "models":
                break
        assert browser.run("document.activeElement.id") == "models", "by keyboard"
        browser.press("ArrowDown", 40)
        assert browser.run("document.getElementById('models').value") == "owl"
        assert browser.complaints() == []
        browser.open("about:blank")
