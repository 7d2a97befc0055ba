"""The page of an export in a real Chromium (`--browser`): visits with and without a network, and what goes wrong.

The page and its server are real. The runtime is a fake, which says and does what the tests want.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from shaderlm.server.web import Export

from .browser import NO_ZEROS, WEBGPU, Browser, BrowserError
from .command_line import shaderlm
from .fake_exports import fake_export
from .serving import Running, running
from .test_profile_page import CONTRAST
from .test_server_page import DONE, NAMELESS, OUTSIDE, READY, SCHEMES, SMALL, ask, click, say, texts
from .tiny_models import write_tiny_llama

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("server page")]

DOT = (  # a picture of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
LOAD = "Load model (4.2 MB)"
OFFERED = "document.querySelector('#panel[data-kind=start]:not([hidden]) button')"
FAILED = "document.querySelector('#panel[data-kind=bad]:not([hidden])')"
# Until the service worker keeps the page.
KEPT = """navigator.serviceWorker.ready.then(({active}) => active.state === "activated" || new Promise(
    done => active.addEventListener("statechange", () => done(true))))"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


class Host:
    """A server of an export in a folder. It counts what it is asked for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.asked = folder, list[str]()
        self._running = ExitStack()
        answer = Export.response

        def counted(export: Export, name: str, request: Any) -> Any:
            self.asked.append(name)
            return answer(export, name, request)

        monkeypatch.setattr(Export, "response", counted)

    def start(self, host: str = "127.0.0.1", **fake: Any) -> Running:
        web = Export(fake_export(self.folder, **fake))
        return self._running.enter_context(running(None, web=web, host=host))

    def stop(self) -> None:
        self._running.close()

    @property
    def weights(self) -> list[str]:
        return [name for name in self.asked if name.startswith("weights-")]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host(tmp_path / "export", monkeypatch)
    yield made
    made.stop()


Show = Callable[..., Browser]


@pytest.fixture
def show(chromium: Browser, host: Host) -> Iterator[Show]:
    """Opens an export that behaves as it is told, in a browser that has never seen it."""

    def opened(
        *,
        loaded: bool = False,
        width: int = 1200,
        scheme: str = "light",
        change: Callable[[Path], object] = lambda folder: None,
        **fake: Any,
    ) -> Browser:
        url = host.start(**fake).url
        change(host.folder)
        chromium.open(f"{url}/web/", width=width, height=720, scheme=scheme)
        if loaded:
            chromium.until(OFFERED)
            click(chromium, LOAD)
            chromium.until(READY)
        return chromium

    yield opened
    chromium.open("about:blank")


# Visits --------------------------------------------------------------------------------------------------


def test_a_first_visit(show: Show, host: Host) -> None:
    browser = show(load=300)
    browser.until(OFFERED)
    assert texts(browser, "#model") == ["Tiny Chat"]
    assert texts(browser, "#device") == ["Not loaded · 4.2 MB"]
    assert texts(browser, "#panel-title") == ["The model is not loaded yet"]
    assert browser.run("document.getElementById('send').disabled")
    say(browser, "hello")
    assert texts(browser, "article") == [], "there is nobody to answer"
    assert browser.run("document.getElementById('prompt').value") == "hello", "and nothing is lost"
    assert host.weights == [], "nothing large is fetched before it is wanted"
    browser.run("document.querySelector('#panel-actions button').focus()")
    click(browser, LOAD)
    browser.until("document.getElementById('panel-done').textContent === '3.0 MB of 4.2 MB'")
    assert texts(browser, "#panel-title") == ["Loading the weights"]
    assert texts(browser, "#device") == ["Loading the weights…"]
    assert browser.run("document.getElementById('panel-bar').value") == pytest.approx(3 / 4.2)
    assert browser.run("document.activeElement.textContent") == "Cancel", "the focus stays where the button was"
    browser.until(READY)
    assert texts(browser, "#device") == ["Fake GPU 1 · portable · context 2,048"]
    assert texts(browser, "#panel") == []
    assert browser.run("document.activeElement.id") == "prompt"
    browser.press("Enter", 13)
    browser.until(f"document.querySelectorAll('article.assistant').length === 1 && {DONE}")
    assert texts(browser, "article.assistant > .markdown") == ["1: hello"]
    assert re.fullmatch(r"first token after [\d.]+ m?s · [\d,.]+ tokens/s · 2 tokens", texts(browser, ".figures")[0])
    assert ask(browser, "and now") == "2: and now"
    click(browser, "Model information")
    assert dict(zip(texts(browser, "dt"), texts(browser, "dd"), strict=True)) == {
        "Model": "Tiny Chat",
        "Architecture": "llama",
        "Parameters": "134.5 million",
        "Size": "4.2 MB",
        "Context": "2,048 tokens",
        "Reads": "text",
        "Runs on": "this device, in the browser",
        "Device": "Fake GPU 1",
        "Variant": "portable",
        "Kept": "in this browser, for the next visit",
    }
    assert browser.run(NAMELESS) == []
    assert browser.complaints() == []
    assert all(each.startswith(browser.run("location.origin")) for each in browser.requests())


def test_later_visits_with_and_without_a_network(show: Show, host: Host) -> None:
    browser = show(loaded=True)
    ask(browser, "hello")
    browser.run(KEPT)
    address = browser.run("location.href")
    host.asked.clear()
    browser.open("about:blank")
    browser.open(address)
    browser.until(READY)
    assert set(host.asked) <= {"sw.js"}, "nothing is fetched again"
    browser.open("about:blank")
    host.stop()
    browser.open(address)
    browser.until(READY)
    assert texts(browser, "article.assistant > .markdown") == ["1: hello"], "the conversation is there"
    assert ask(browser, "without a server") == "2: without a server"
    assert texts(browser, ".note") == []
    assert [each for each in browser.complaints() if "service worker" not in each] == []


def test_loading_can_be_cancelled(show: Show, host: Host) -> None:
    browser = show(load=500)
    browser.until(OFFERED)
    click(browser, LOAD)
    browser.until("document.getElementById('panel-title').textContent === 'Loading the weights'")
    click(browser, "Cancel")
    browser.until(OFFERED)
    assert texts(browser, "#device") == ["Not loaded · 4.2 MB"]
    click(browser, LOAD)
    browser.until(READY)
    assert ask(browser, "hello") == "1: hello"
    assert browser.complaints() == []


def test_going_away_and_coming_back(show: Show, host: Host) -> None:
    """Within an answer, and while the model is loaded."""
    browser = show(loaded=True, word=30, load=300)
    say(browser, "long")
    browser.until("document.querySelector('.running > .markdown')?.textContent.includes('word')")
    address = browser.run("location.href")
    browser.open("about:blank")
    browser.run("setTimeout(() => history.back())")  # afterwards: the answer would be lost with the page
    browser.until("document.querySelector('article:not(.running) .figures')?.textContent.includes('Cut off')")
    assert browser.run("location.href") == address
    browser.open("about:blank")  # the model is not there yet
    browser.open(address)
    browser.until(READY)
    assert texts(browser, "#panel") == []
    assert ask(browser, "hello") == "2: hello"
    assert len(host.weights) == 2, "once each"
    assert browser.complaints() == []


def test_two_tabs(show: Show, host: Host) -> None:
    """Both answer; and both take the new version when one of them is told to."""
    browser = show(loaded=True, word=10)
    browser.run(KEPT)
    browser.open(browser.run("location.href"))
    browser.until(READY)

    def as_if_clicked(expression: str) -> None:
        browser.call("Runtime.evaluate", expression=f"{expression}; 1", userGesture=True)

    as_if_clicked("globalThis.other = window.open(location.pathname, 'other')")
    browser.until("other.document.getElementById('server')?.dataset.state === 'ready'")
    say(browser, "long")
    browser.run("""(page => {
        page.getElementById("prompt").value = "in the other tab";
        page.getElementById("composer").requestSubmit();
    })(other.document)""")
    answer = "other.document.querySelector('article.assistant:not(.running) > .markdown')?.textContent"
    browser.until(f"{answer} === '1: in the other tab'")
    click(browser, "Stop")
    browser.until(DONE)
    assert len(host.weights) == 2, "once each"
    fake_export(host.folder, name="Newer", weights=(2_000_000,))
    browser.run("navigator.serviceWorker.getRegistration().then(found => found.update()).then(() => true)")
    browser.until("document.getElementById('note-update') && other.document.getElementById('note-update')")
    browser.run("other.document.querySelector('#note-update button').click()")
    browser.until("document.getElementById('model')?.textContent === 'Newer'")
    as_if_clicked("globalThis.other = window.open('', 'other')")
    browser.until("other.document.getElementById('model')?.textContent === 'Newer'")
    browser.run("other.close()")
    browser.call("Page.bringToFront")  # nothing is drawn in a tab that nobody sees
    assert browser.complaints() == []


# A newer export at the same address ----------------------------------------------------------------------


def test_a_newer_export_takes_over_when_people_say_so(show: Show, host: Host) -> None:
    browser = show(loaded=True)
    browser.run(KEPT)
    address = browser.run("location.href")
    fake_export(host.folder, name="Newer", weights=(2_000_000,), replies="new ")
    browser.open("about:blank")
    browser.open(address)
    browser.until(READY)
    assert texts(browser, "#model") == ["Tiny Chat"], "all of the old version"
    assert ask(browser, "hello") == "1: hello"
    browser.until("document.getElementById('note-update')")
    assert "There is a new version" in texts(browser, ".note")[0]
    click(browser, "Reload")
    browser.until(f"document.getElementById('model')?.textContent === 'Newer' && {OFFERED}")
    assert texts(browser, ".note") == []
    assert texts(browser, "#panel-actions button") == ["Load model (2.0 MB)"], "it has other weights"
    names = browser.run("caches.keys()")
    assert len([name for name in names if name.startswith("shaderlm page")]) == 1, "the old version is gone"
    assert browser.complaints() == []


def test_a_newer_export_takes_over_at_once_where_the_model_is_not_kept(show: Show, host: Host) -> None:
    """The page of the old one would fetch weights of the new one."""
    browser = show()
    browser.until(OFFERED)
    browser.run(KEPT)
    address = browser.run("location.href")
    fake_export(host.folder, name="Newer", weights=(2_000_000,), replies="new ")
    browser.open("about:blank")
    browser.open(address)
    browser.until(f"document.getElementById('model')?.textContent === 'Newer' && {OFFERED}")
    click(browser, "Load model (2.0 MB)")
    browser.until(READY)
    assert ask(browser, "hello") == "1: new hello"
    assert texts(browser, ".note") == []
    assert browser.complaints() == []


def test_a_newer_export_while_a_page_is_open(show: Show, host: Host) -> None:
    """Files of the old one are gone. The new version is found, and the next try takes it."""
    browser = show()
    browser.until(OFFERED)
    browser.run(KEPT)
    browser.open(browser.run("location.href"))
    browser.until(OFFERED)
    fake_export(host.folder, name="Newer", weights=(2_000_000,))
    click(browser, LOAD)
    browser.until(f"{FAILED} && document.getElementById('note-update')")
    click(browser, "Try again")
    browser.until(f"document.getElementById('model')?.textContent === 'Newer' && {OFFERED}")


def test_a_newer_export_while_the_first_page_is_open(show: Show, host: Host) -> None:
    """A page that came from the server keeps to its version as well, once that is kept."""
    browser = show(loaded=True)
    browser.until("navigator.serviceWorker.controller")
    browser.run("globalThis.isFirst = true")
    fake_export(host.folder, name="Newer", weights=(2_000_000,), replies="new ")
    old = browser.run("fetch('plan.json').then((response) => response.json()).then((plan) => plan.model.name)")
    assert old == "Tiny Chat"
    assert ask(browser, "hello") == "1: hello"
    browser.run("navigator.serviceWorker.getRegistration().then(found => found.update()).then(() => true)")
    browser.until("document.getElementById('note-update')")
    assert browser.run("globalThis.isFirst"), "the first version takes over without a reload"
    click(browser, "Reload")
    browser.until(f"document.getElementById('model')?.textContent === 'Newer' && {OFFERED}")
    assert browser.complaints() == []


def test_a_version_is_kept_whole_or_not_at_all(show: Show, host: Host) -> None:
    """Files that do not belong together, as in the middle of a copy, do not become a version."""
    browser = show(loaded=True)
    browser.run(KEPT)
    address = browser.run("location.href")
    fake_export(host.folder, name="Newer")
    (host.folder / "assets" / "page.js").write_text("broken(")
    browser.open("about:blank")
    browser.open(address)
    browser.until(READY)
    assert texts(browser, "#model") == ["Tiny Chat"]
    browser.run("navigator.serviceWorker.getRegistration().then(found => found.update()).catch(() => {})")
    assert ask(browser, "hello") == "1: hello"
    assert texts(browser, ".note") == []
    fake_export(host.folder, name="Newer")
    browser.run("navigator.serviceWorker.getRegistration().then(found => found.update()).catch(() => {})")
    browser.until("document.getElementById('note-update')")


def test_a_page_that_cannot_be_kept_says_so(show: Show) -> None:
    def change(folder: Path) -> None:
        (folder / "assets" / "icon.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")  # not as it is listed

    browser = show(loaded=True, change=change)
    browser.until("document.getElementById('note-offline')")
    assert texts(browser, ".note p") == [
        "This page will not work without its server: not all of its files could be kept."
    ]
    assert ask(browser, "hello") == "1: hello"
    click(browser, "Close this note")
    assert texts(browser, ".note") == []


# Answers -------------------------------------------------------------------------------------------------


def test_an_answer_can_be_stopped_and_others_wait_for_their_turn(show: Show) -> None:
    browser = show(loaded=True, word=20)
    say(browser, "long")
    browser.until("document.querySelector('.running > .markdown')?.textContent.includes('word word')")
    assert re.search(r"tokens/s · \d+ tokens$", texts(browser, ".figures")[0]), "live"
    click(browser, "New chat")
    assert ask(browser, "hello") == "1: hello"
    click(browser, "long")
    click(browser, "Stop")
    browser.until(DONE)
    stopped = texts(browser, "article.assistant > .markdown")[0]
    assert 9 < len(stopped) < 300
    assert texts(browser, ".figures")[0].endswith("Stopped.")
    assert ask(browser, "and now") == "2: and now"
    assert browser.complaints() == []


def test_settings_that_the_runtime_has(show: Show) -> None:
    """Values of the page are sent where nothing is set."""
    browser = show(loaded=True)
    sent = json.loads(ask(browser, "options"))
    expected = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "max_tokens": 1024}
    assert sent == expected
    click(browser, "Settings")
    shown = browser.run(
        "['temperature', 'max_tokens'].map(name => document.querySelector(`[name=${name}]`).placeholder)"
    )
    assert shown == ["0.8", "1024"]
    assert texts(browser, "label[for=schema]") == [], "the runtime knows no schemas"
    assert texts(browser, "#samplers-part summary") == [], "nor such samplers"
    values = {"temperature": "0", "repeat_penalty": "1.1", "seed": "7", "stop": "a\nb", "top_k": "-1"}
    for name, value in values.items():
        browser.run(f"document.querySelector('#settings [name={name}]').value = {json.dumps(value)}")
    click(browser, "Apply")
    changed = {"temperature": 0, "repetition_penalty": 1.1, "seed": 7, "stop": ["a", "b"], "top_k": 0}
    assert json.loads(ask(browser, "options")) == {**expected, **changed}
    click(browser, "Settings")
    browser.run("document.querySelector('#settings [name=max_tokens]').value = 5")
    click(browser, "Apply")
    assert ask(browser, "long") == "word word word word word"
    assert texts(browser, ".figures")[-1].endswith("Ended at the limit of tokens, which is in the settings.")


def test_a_model_without_a_template_continues_texts(show: Show) -> None:
    """Of a text alone, whatever came before: nothing is left out for it."""
    browser = show(loaded=True, chat=False, context=40)
    assert "no chat template" in texts(browser, ".note")[0]
    for number in range(1, 4):
        assert ask(browser, f"once upon {'a time ' * 12}") == f"1: complete once upon {'a time ' * 12}".strip(), number
    assert texts(browser, ".left-out") == []
    assert texts(browser, "#context") == []


def test_what_an_answer_waits_for_is_shown(show: Show) -> None:
    browser = show(loaded=True, prompt=700)
    say(browser, "hello")
    progress = "document.querySelector('.waiting:not([hidden])')?.textContent"
    browser.until(f"{progress} === 'Compiling shaders, once for this visit: 1 of 3…'")
    browser.until(f"{progress} === 'Reading the prompt: 2 of 3 tokens…'")
    browser.until(DONE)
    assert texts(browser, ".waiting") == []


def test_the_oldest_turns_are_left_out_of_a_full_context(show: Show) -> None:
    """A conversation that is longer than the context goes on, and says what the model no longer sees."""
    browser = show(loaded=True, context=40)
    assert texts(browser, "#context") == []
    assert ask(browser, "one " * 8) == "1: one one one one one one one one"
    assert texts(browser, "#context-text") == ["19 of 40 tokens"]
    assert ask(browser, "two " * 4) == "2: two two two two"
    assert texts(browser, ".left-out") == []
    assert ask(browser, "three " * 9).startswith("1: three"), "the model sees this turn alone"
    expected = ["The context of 40 tokens is full: the oldest 2 turns are left out from here on."]
    assert texts(browser, ".left-out") == expected
    assert ask(browser, "four") == "2: four", "what is left out stays so"
    assert texts(browser, ".left-out") == expected
    browser.reload()
    browser.until(READY)
    assert texts(browser, ".left-out") == expected
    assert ask(browser, "five " * 60) == ""
    assert texts(browser, ".problem p") == [
        "This message is longer than the model can read. It has 62 tokens, and 40 is the most. "
        "Shorten it: Edit changes the message."
    ]
    assert texts(browser, ".problem button") == [], "trying again changes nothing"
    click(browser, "Edit")
    browser.run("document.activeElement.value = 'six'")
    browser.press("Enter", 13)
    browser.until(
        f"[...document.querySelectorAll('article.assistant > .markdown')].at(-1).textContent.endsWith('six') && {DONE}"
    )
    assert browser.complaints() == []


# What goes wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fake", "title", "advice", "action"),
    [
        ({"gpu": "none"}, "This browser has no WebGPU.", "Chrome and Edge have it since version 113", []),
        ({"gpu": "real"}, "The browser finds no GPU that it may use.", "hardware acceleration", ["Try again"]),
    ],
    ids=["no-webgpu", "no-adapter"],
)
def test_what_is_missing_is_told_before_anything_large(
    show: Show, host: Host, fake: dict[str, Any], title: str, advice: str, action: list[str]
) -> None:
    """This Chromium runs without a GPU: what it really finds is no adapter."""
    browser = show(**fake)
    browser.until(FAILED)
    assert (texts(browser, "#panel-title"), texts(browser, "#model")) == ([title], ["Tiny Chat"])
    assert advice in texts(browser, "#panel-text")[0]
    assert texts(browser, "#panel-actions button") == action
    assert host.weights == []
    for label in action:
        click(browser, label)
        browser.until(FAILED)
        assert texts(browser, "#panel-title") == [title]
    assert [each for each in browser.complaints() if "No available adapters" not in each] == []


@pytest.mark.parametrize(
    ("code", "title"),
    [
        ("out-of-memory", "There is too little memory for this model."),
        ("no-variant", "This GPU cannot run this model."),
        ("damaged", "A file of the model is damaged."),
        ("internal", "The model failed."),
    ],
)
def test_a_model_that_cannot_be_loaded(show: Show, code: str, title: str) -> None:
    browser = show(fails={"load": code, "message": "close other tabs"})
    browser.until(OFFERED)
    click(browser, LOAD)
    browser.until(FAILED)
    assert (texts(browser, "#panel-title"), texts(browser, "#panel-text")) == ([title], ["Close other tabs."])
    assert texts(browser, "#device") == [title]
    assert texts(browser, "#panel-actions button") == ([] if code == "no-variant" else ["Try again"])
    assert browser.run("document.getElementById('send').disabled")
    assert browser.complaints() == []


def test_files_that_are_missing_can_come_later(show: Show, host: Host) -> None:
    browser = show(change=lambda folder: (folder / "weights-001.bin").unlink())
    browser.until(OFFERED)
    click(browser, LOAD)
    browser.until(FAILED)
    assert texts(browser, "#panel-title") == ["A file could not be fetched."]
    assert texts(browser, "#panel-text") == ["weights-001.bin has status 404."]
    fake_export(host.folder)
    click(browser, "Try again")
    browser.until(READY)
    assert host.weights.count("weights-000.bin") == 1, "what has arrived is kept"
    assert ask(browser, "hello") == "1: hello"


def test_a_page_without_its_plan(show: Show, host: Host) -> None:
    browser = show(change=lambda folder: (folder / "plan.json").rename(folder / "away.json"))
    # The server itself cannot host such a folder: it is as one that is being replaced.
    assert "being replaced" in browser.run("document.body.innerText")
    (host.folder / "away.json").rename(host.folder / "plan.json")
    browser.reload()
    browser.until(OFFERED)


def test_a_lost_device_is_told_and_the_model_comes_back(show: Show) -> None:
    browser = show(loaded=True, word=5, fails={"chat": "device-lost", "message": "lost (reason)"})
    ask(browser, "hello")
    say(browser, "fail")
    browser.until(f"document.querySelector('.problem:not([hidden])') && {FAILED}")
    assert texts(browser, ".problem p")[0].startswith("The GPU was lost. Its driver was reset,")
    assert texts(browser, "#panel-text")[0].startswith("Its driver was reset,")
    assert texts(browser, "article.assistant > .markdown")[-1] == "2:", "what came is kept"
    assert texts(browser, "#panel-actions button") == ["Reload the model"]
    assert browser.run("document.getElementById('send').disabled")
    click(browser, "Reload the model")
    browser.until(READY)
    assert ask(browser, "again") == "3: again"
    say(browser, "fail")
    browser.until(f"document.querySelectorAll('.problem:not([hidden])').length === 2 && {FAILED}")
    browser.run("document.querySelectorAll('article')[6].querySelector('.actions button:last-child').click()")
    browser.run("document.activeElement.value = 'better'")
    browser.press("Enter", 13)  # an answer loads the model again, too
    browser.until(f"{READY} && {DONE} && document.querySelectorAll('article').length === 8")
    assert texts(browser, "article.assistant > .markdown")[-1].endswith(": better")
    assert texts(browser, "#panel") == []
    assert browser.complaints() == []


def test_a_full_storage_is_told(show: Show) -> None:
    warning = (
        "the browser's storage for this page is full: the model is in memory only, and the next visit loads it again"
    )
    browser = show(loaded=True, cached="memory", warnings=[warning])
    assert texts(browser, ".note p") == [f"T{warning[1:]}."]
    click(browser, "Model information")
    assert texts(browser, "dd")[-1] == "in memory only"
    click(browser, "Close")
    assert ask(browser, "hello") == "1: hello"


def test_plain_http_from_elsewhere(show: Show, host: Host, chromium: Browser) -> None:
    """Browsers call only this machine's own addresses secure: 0.0.0.0 leads to it, too, but is none of them."""
    port = host.start(host="0.0.0.0").url.rpartition(":")[2]
    chromium.open(f"http://0.0.0.0:{port}/web/", width=360, height=720)
    assert chromium.run("isSecureContext") is False
    chromium.until(FAILED)
    assert texts(chromium, "#panel-title") == ["This address gives the page no WebGPU."]
    said = texts(chromium, "#panel-text")[0]
    assert f"not to http://0.0.0.0:{port}." in said
    assert "--ssl-cert-file" in said
    assert texts(chromium, "#panel-actions button") == []
    assert (host.weights, chromium.run(OUTSIDE)) == ([], [])
    assert chromium.complaints() == []


def test_a_page_that_is_opened_as_a_file(chromium: Browser, tmp_path: Path) -> None:
    chromium.open(f"file://{fake_export(tmp_path / 'export')}/index.html", width=360, height=720)
    assert texts(chromium, "#panel-title") == ["This page needs a web server."]
    assert "shaderlm serve --web" in texts(chromium, "#panel-text")[0]
    assert (texts(chromium, "#device"), chromium.run(OUTSIDE)) == (["Not loaded"], [])
    chromium.open("about:blank")


# Pictures ------------------------------------------------------------------------------------------------


def test_a_model_that_sees_is_asked_about_a_picture(show: Show, tmp_path: Path) -> None:
    browser = show(sees=True)
    browser.until(OFFERED)
    assert not browser.run("document.getElementById('add-picture').hidden"), (
        "a picture may be added before the model is loaded"
    )
    (tmp_path / "dot.png").write_bytes(base64.b64decode(DOT))
    root = browser.call("DOM.getDocument")["root"]["nodeId"]
    field = browser.call("DOM.querySelector", nodeId=root, selector="#picture-file")["nodeId"]
    browser.call("DOM.setFileInputFiles", nodeId=field, files=[str(tmp_path / "dot.png")])
    browser.until("document.querySelector('#pictures img')?.naturalWidth")
    click(browser, LOAD)
    browser.until(READY)
    assert ask(browser, "what is it") == "1: data:image/jpeg what is it"
    assert browser.run("document.querySelector('article.user .pictures img').naturalWidth") == 1
    for _ in range(3):
        ask(browser, "long")
    browser.call("DOM.setFileInputFiles", nodeId=field, files=[str(tmp_path / "dot.png")])
    browser.until("document.querySelector('#pictures img')?.naturalWidth")
    left = "(n => n.scrollHeight - n.scrollTop - n.clientHeight)(document.getElementById('scroller'))"
    assert browser.run(left) < 60, "who reads the end stays at the end"
    assert browser.run(OUTSIDE) == []
    click(browser, "Model information")
    assert dict(zip(texts(browser, "dt"), texts(browser, "dd"), strict=True))["Reads"] == "text and pictures"
    assert browser.complaints() == []


def test_a_model_that_does_not_see(show: Show) -> None:
    browser = show(loaded=True)
    assert browser.run("document.getElementById('add-picture').hidden")


# For everybody -------------------------------------------------------------------------------------------


LONG_TEXT = f"{'x' * 200} and many words that say what to do about it " * 3


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [360, 1280])
def test_all_states_fit_and_can_be_read(show: Show, scheme: str, width: int) -> None:
    browser = show(
        width=width,
        scheme=scheme,
        name="A model with a rather long name, Q4_K_M",
        load=400,
        warnings=[LONG_TEXT],
        fails={"chat": "out-of-memory", "message": LONG_TEXT},
    )

    def check(*read: str) -> None:
        assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
        assert browser.run(OUTSIDE) == []
        assert browser.run(SMALL) == []
        found = browser.run(f"{CONTRAST}({json.dumps(read)})")
        assert {selector for selector, _, _ in found} == set(read)
        assert [entry for entry in found if entry[2] < 4.5] == []

    browser.until(OFFERED)
    check("#panel-title", "#panel-text", "#panel-actions button", "#model", "#device")
    click(browser, LOAD)
    browser.until("document.getElementById('panel-title').textContent === 'Loading the weights'")
    check("#panel-title", "#panel-done", "#panel-actions button")
    browser.until(READY)
    check(".note p", ".note button")
    click(browser, "Model information")
    check("dt", "dd", "#info-dialog h2")
    click(browser, "Close")
    say(browser, "fail")
    browser.until(FAILED)
    check("#panel-title", "#panel-text", "#panel-actions button", "#device", ".problem p")
    visible = "(n => n.bottom <= innerHeight && n.top >= 0)(document.getElementById('prompt').getBoundingClientRect())"
    assert browser.run(visible), "the box for messages stays in sight"
    assert browser.complaints() == []


# The real runtime ----------------------------------------------------------------------------------------


class Patient(Browser):
    """Waits longer: on SwiftShader the first answer needs kernels that take a while to compile."""

    def until(self, expression: str) -> None:
        for _ in range(5):
            with suppress(BrowserError):
                return super().until(expression)
        return super().until(expression)


def test_a_real_model_that_loses_its_gpu_and_its_server(tmp_path: Path) -> None:
    """What `export-web` writes, hosted, loaded and asked. The adapter is SwiftShader."""
    model = write_tiny_llama(tmp_path / "tiny.gguf", kind="q8_0", context=256)
    done = shaderlm("export-web", model, tmp_path / "export")
    assert done.code == 0, done.err
    browser = Patient(tmp_path, flags=(*WEBGPU, NO_ZEROS))

    def set_to(**settings: object) -> None:
        for name, value in settings.items():
            browser.run(f"document.querySelector('#settings [name={name}]').value = {json.dumps(value)}")
        browser.run("document.getElementById('settings').requestSubmit()")

    try:
        with running(None, web=Export(tmp_path / "export")) as server:
            browser.open(f"{server.url}/web/")
            browser.until(OFFERED)
            browser.run(f"{OFFERED}.click()")
            browser.until(READY)
            set_to(max_tokens=8, temperature=0)
            first = ask(browser, "hello")
            assert texts(browser, ".problem") == []
            assert re.search(r"tokens/s · [1-8] tokens?", texts(browser, ".figures")[0])
            set_to(max_tokens="", temperature=2)
            say(browser, "go on")
            browser.until("document.querySelector('.running > .markdown')?.textContent")
            browser.call("Browser.crashGpuProcess")
            browser.until(f"{FAILED} && {DONE}")
            assert texts(browser, "#panel-title") == ["The GPU was lost."]
            assert texts(browser, ".problem b") == ["The GPU was lost."]
            click(browser, "Reload the model")
            browser.until(READY)
            browser.run(KEPT)
            browser.open("about:blank")
        browser.open(f"{server.url}/web/")
        browser.until(READY)
        set_to(max_tokens=8, temperature=0)
        assert ask(browser, "hello") == first, "the same tokens"
        assert texts(browser, ".problem") == []
        assert [each for each in browser.complaints() if "service worker" not in each] == []
    finally:
        browser.close()
