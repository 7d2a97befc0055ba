"""Conversations of the page at `/`, in a real Chromium (`--browser`): names, search, files, and what is deleted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from .browser import PATIENCE, Browser
from .serving import running
from .test_profile_page import CONTRAST
from .test_server_page import (
    DONE,
    HOSTILE,
    NAMELESS,
    OUTSIDE,
    READY,
    SCHEMES,
    SMALL,
    Speaker,
    ask,
    click,
    open_new,
    say,
    texts,
)

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("server page")]


def chat(number: int, question: str, answer: str = "So it is.", **fields: Any) -> dict[str, Any]:
    """A conversation of one turn. Those with larger numbers are newer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer, "figures": {}}]
    return {"id": f"c{number}", "updated": 1000 + number, "settings": {}, "messages": messages, **fields}


RAIN = chat(1, "Why does rain fall?", "Because of **gravity**.")
SEA = chat(2, "How deep is the sea?", "3,700 m (on average).", title="The sea")
TEA = chat(3, "A recipe for tea", "Water, leaves and GRAVITY.")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(Speaker().load) as server:
        yield server.url


@pytest.fixture
def show(chromium: Browser, url: str) -> Iterator[Callable[..., Browser]]:
    def opened(*conversations: dict[str, Any], **window: Any) -> Browser:
        browser = open_new(chromium, url, conversations, **window)
        browser.until(READY)
        return browser

    yield opened
    chromium.open("about:blank")


Show = Callable[..., Browser]


def titles(browser: Browser) -> list[str]:
    return texts(browser, "#list .title")


def look_for(browser: Browser, query: str) -> list[str]:
    """Titles of what is found."""
    browser.run("document.getElementById('search').focus(); document.getElementById('search').select()")
    browser.type(query)
    return titles(browser)


@pytest.fixture
def downloads(chromium: Browser, tmp_path: Path) -> Callable[[], tuple[str, str]]:
    """Waits for a file that the page gives: its name and text."""
    chromium.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))

    def downloaded() -> tuple[str, str]:
        is_whole = "Page.downloadProgress", "completed"
        deadline = time.monotonic() + PATIENCE
        while is_whole not in [(e.get("method"), e.get("params", {}).get("state")) for e in chromium.events]:
            assert time.monotonic() < deadline, "no file comes"
            chromium.run("1")  # events come with its answer
        chromium.events[:] = [e for e in chromium.events if e.get("method") != "Page.downloadProgress"]
        (path,) = tmp_path.iterdir()
        text = path.read_text(encoding="utf-8")
        path.unlink()
        return path.name, text

    return downloaded


def import_file(browser: Browser, folder: Path, content: str | bytes) -> str:
    """What the page says of a file."""
    path = folder / "import.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if not browser.run("document.getElementById('transfer-dialog').open"):
        click(browser, "Export and import")
    browser.run("document.getElementById('import-result').textContent = ''")
    found = browser.call("Runtime.evaluate", expression="document.getElementById('import-file')")["result"]
    browser.call("DOM.setFileInputFiles", files=[str(path)], objectId=found["objectId"])
    browser.until("!['', 'Reading…'].includes(document.getElementById('import-result').textContent)")
    said = browser.run("document.getElementById('import-result').textContent")
    assert isinstance(said, str)
    return said


def kept(browser: Browser) -> list[dict[str, Any]]:
    """What the browser keeps, the newest first."""
    found = browser.run(
        "Object.keys(localStorage).filter(n => n.startsWith('shaderlm.chat.')).map(n => localStorage.getItem(n))"
    )
    return sorted(map(json.loads, found), key=lambda each: -each["updated"])


# Names, search, deletion ---------------------------------------------------------------------------------


def test_a_name_is_given_and_taken_away(show: Show) -> None:
    browser = show(RAIN, SEA)
    assert titles(browser) == ["The sea", "Why does rain fall?"]
    click(browser, "More: Why does rain fall?")
    assert browser.run("document.getElementById('chat-name').placeholder") == "Why does rain fall?"
    browser.type("  <b>Rain</b>\n and  snow ")
    browser.press("Enter", 13)
    browser.until("!document.getElementById('chat-dialog').open")
    assert titles(browser) == ["The sea", "<b>Rain</b> and snow"], "in its place, and as text"
    click(browser, "More: The sea")
    browser.run("document.getElementById('chat-name').value = 'x'")
    click(browser, "Cancel")
    browser.reload()
    browser.until(READY)
    assert titles(browser) == ["The sea", "<b>Rain</b> and snow"]
    click(browser, "More: The sea")
    browser.run("document.getElementById('chat-name').value = ' '")
    click(browser, "Save")
    assert titles(browser) == ["How deep is the sea?", "<b>Rain</b> and snow"], "an empty name is none"
    assert browser.run("document.getElementById('chat-name').maxLength") == 200
    assert browser.complaints() == []


def test_search_finds_titles_and_texts(show: Show) -> None:
    browser = show(RAIN, SEA, TEA)
    assert look_for(browser, "gravity") == ["A recipe for tea", "Why does rain fall?"]
    assert texts(browser, "#list .excerpt") == ["Water, leaves and GRAVITY.", "Because of **gravity**."]
    assert texts(browser, "#list mark") == ["GRAVITY", "gravity"]
    assert texts(browser, "#found") == ["2 of 3 conversations"]
    assert texts(browser, "#said") == ["2 of 3 conversations"]
    assert look_for(browser, "gravity RAIN") == ["Why does rain fall?"], "all words, in whatever text"
    assert look_for(browser, "sea") == ["The sea"]
    assert texts(browser, "#list .excerpt") == [], "the title says it"
    for query in ("(on", "m (on average).", "\\", "[", "**g", "a{2}|/"):
        assert len(look_for(browser, query)) == (query in ("(on", "m (on average).", "**g"))
    click(browser, "New chat")
    ask(browser, "snow")
    assert titles(browser) == [], "what is looked for stays"
    assert look_for(browser, "Snow") == ["snow"]
    browser.run("document.getElementById('search').focus()")
    browser.press("Escape", 27)
    assert len(titles(browser)) == 4
    assert browser.complaints() == []


def test_search_is_fast_with_many_conversations(show: Show) -> None:
    """500, of 8,000 characters each: nearly all that browsers keep."""
    browser = show()
    browser.run("""(() => {
        for (let i = 0; i < 500; i++) {
            const content = `number ${i} `.padEnd(8000, "Äpfel and pears, ");
            const messages = [{role: "user", content: `Question ${i}`}, {role: "assistant", content, figures: {}}];
            const all = {id: `many${i}`, updated: i, settings: {}, messages};
            localStorage.setItem(`shaderlm.chat.many${i}`, JSON.stringify(all));
        }
    })()""")
    browser.reload()
    browser.until(READY)
    assert len(titles(browser)) == 500
    took = browser.run("""(() => {
        const field = document.getElementById("search");
        return ["äpfel", "number 499", "not there"].map(query => {
            const start = performance.now();
            field.value = query;
            field.dispatchEvent(new Event("input"));
            document.body.offsetHeight;
            return [document.querySelectorAll("#list li").length, performance.now() - start];
        });
    })()""")
    assert [found for found, _ in took] == [500, 1, 0]
    assert max(ms for _, ms in took) < 1000, f"milliseconds: {took}"  # 30 to 60 on two busy cores


def test_what_is_deleted_comes_back(show: Show) -> None:
    browser = show(RAIN, SEA)
    click(browser, "The sea")
    click(browser, "More: The sea")
    click(browser, "Delete")
    assert titles(browser) == ["Why does rain fall?"]
    assert [each["id"] for each in kept(browser)] == ["c1"]
    assert texts(browser, "article") == []
    assert texts(browser, "#said") == ["Deleted: The sea"]
    assert browser.run("document.activeElement.textContent") == "Undo"
    click(browser, "Undo")
    assert titles(browser) == ["The sea", "Why does rain fall?"]
    assert kept(browser)[0] == SEA
    assert texts(browser, "article.user .text") == ["How deep is the sea?"]
    assert texts(browser, "#deleted button") == []
    for title in ("The sea", "Why does rain fall?"):
        click(browser, f"More: {title}")
        click(browser, "Delete")
    click(browser, "Undo")
    assert titles(browser) == ["Why does rain fall?"], "the last one"
    assert browser.complaints() == []


# Files ---------------------------------------------------------------------------------------------------

RICH = chat(
    4,
    "What is 1 + 1?",
    '{"sum": 2}',
    settings={"system": "You are an owl.", "temperature": 0.5, "samplers": "top_k temperature", "seed": 7},
    title="Sums / of: two?",
)
RICH["messages"][1] |= {
    "isJson": True,
    "thoughts": "One.\nTwo.",
    "model": "tiny-chat",
    "figures": {"firstToken": 12.5, "rate": 50.25, "tokens": 6, "used": 40, "context": 512},
    "ended": "stop",
}
RICH["messages"] += [
    {"role": "user", "content": "and now?"},
    {
        "role": "assistant",
        "content": "",
        "model": "tiny-chat",
        "figures": {},
        "ended": "problem",
        "problem": {"kind": "offline", "title": "The server does not answer.", "advice": "Is it still running?"},
        "first": 2,
        "leftOut": 1,
    },
]
MARKDOWN = """# Sums / of: two?

## System prompt

You are an owl.

## You

What is 1 + 1?

## tiny-chat

> One.
> Two.

```json
{"sum": 2}
```

## You

and now?

## tiny-chat

*The server does not answer.*
"""


def test_one_conversation_as_a_file(show: Show, downloads: Callable[[], tuple[str, str]]) -> None:
    browser = show(RAIN, RICH)
    click(browser, "More: Sums / of: two?")
    click(browser, "As Markdown")
    assert downloads() == ("Sums-of-two.md", MARKDOWN)
    click(browser, "More: Sums / of: two?")
    click(browser, "As JSON")
    name, text = downloads()
    assert name == "Sums-of-two.json"
    assert json.loads(text) == {"format": "shaderlm conversations", "version": 1, "conversations": [RICH]}
    assert browser.complaints() == []
    assert all(each.startswith(browser.run("location.origin")) for each in browser.requests() if each[:5] != "blob:")


def test_all_conversations_go_to_another_browser(
    show: Show, downloads: Callable[[], tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("import")
    hostile = chat(5, HOSTILE[0], HOSTILE[1], title=HOSTILE[1])
    browser = show(RAIN, SEA, RICH, hostile)
    click(browser, "Export and import")
    click(browser, "All as Markdown")
    name, text = downloads()
    assert name.endswith(".md")
    assert text.count("\n---\n") == 3
    click(browser, "All as JSON")
    name, text = downloads()
    assert name.endswith(".json")
    browser = show()
    assert titles(browser) == []
    click(browser, "Export and import")
    assert browser.run("document.getElementById('all-json').disabled"), "there is nothing"
    assert import_file(browser, folder, text) == "4 conversations are imported."
    assert kept(browser) == [hostile, RICH, SEA, RAIN], "to the letter"
    assert import_file(browser, folder, text) == "4 conversations are here already."
    changed = json.loads(text)
    changed["conversations"][3]["messages"][1]["content"] = "Nobody knows."
    said = import_file(browser, folder, json.dumps(changed))
    assert said == "One conversation is imported. 3 are here already."
    assert len(kept(browser)) == 5, "beside the one that it was"
    browser.press("Escape", 27)
    click(browser, "Sums / of: two?")
    assert texts(browser, "article.assistant pre") == ['{"sum": 2}']
    assert "temperature 0.5" in texts(browser, "#active")[0]
    assert browser.complaints() == []


def test_files_of_others_are_read(show: Show, tmp_path: Path) -> None:
    """A list of messages as OpenAI has them, and one conversation alone."""
    browser = show()
    messages = [
        {"role": "system", "content": "You are an owl."},
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "Hoo.",
            "name": "x",
            "__proto__": {"harm": 1},
            "figures": {"rate": 1, "x": "y"},
        },
    ]
    assert import_file(browser, tmp_path, json.dumps(messages)) == "One conversation is imported."
    assert import_file(browser, tmp_path, json.dumps({"messages": messages[1:], "id": "../x"})).startswith("One")
    first, second = sorted(kept(browser), key=lambda each: len(each["settings"]), reverse=True)
    assert first["settings"] == {"system": "You are an owl."}
    assert second["settings"] == {}
    assert first["messages"] == second["messages"]
    assert first["messages"][1] == {"role": "assistant", "content": "Hoo.", "figures": {"rate": 1}}
    assert second["id"].isalnum()
    strange = {"leftOut": 3, "ended": "toString", "first": 1, "isJson": 1, "problem": {}, "thoughts": "", "settings": 1}
    assert import_file(browser, tmp_path, with_message(**strange)) == "One conversation is imported."
    browser.press("Escape", 27)
    click(browser, "a")
    assert [each for each in texts(browser, ".left-out, .figures") if each] == []
    browser.run("document.querySelectorAll('#list .chat')[1].click()")
    assert ask(browser, "and now") == "2: and now"
    for wrong in (7, ["abc"]):
        assert import_file(browser, tmp_path, json.dumps({"messages": messages[1:2], "id": wrong})).startswith("One")
    assert {type(each["id"]) for each in kept(browser)} == {str}
    assert browser.complaints() == []


def with_message(**fields: Any) -> str:
    return json.dumps(
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **fields}]}]
    )


def with_settings(**settings: Any) -> str:
    return json.dumps([chat(1, "a"), chat(2, "b", settings=settings)])


BAD_FILES: dict[str | bytes, str] = {
    "": "The file is not JSON: ",
    "{": "The file is not JSON: ",
    b"\xff\xfe[": "The file is not text in UTF-8.",
    "7": "The file must have conversations, and it is 7.",
    "null": "The file must have conversations, and it is null.",
    "{}": "The file has no conversations. Choose one that this page exported as JSON.",
    "[]": "The file has no conversations.",
    '{"format": "shaderlm conversations", "version": 2}': "A newer version of this page wrote the file. Import it",
    "[[]]": "Conversation 1 must be an object, and it is a list.",
    '[{"messages": 1}]': "Conversation 1: messages must be a list, and it is 1.",
    '[{"messages": []}]': "Conversation 1 has no messages.",
    '[{"messages": [null]}]': "Conversation 1, message 1 must be an object, and it is null.",
    '[{"role": "tool"}]': 'Conversation 1, message 1: role must be user or assistant, and it is the text "tool".',
    '[{"role": "user"}]': "Conversation 1, message 1: content must be a text, and it is nothing.",
    '[{"role": "user", "content": [1]}]': "Conversation 1, message 1: content must be a text, and it is a list.",
    with_message(thoughts=1): "Conversation 1, message 2: thoughts must be a text, and it is 1.",
    with_message(first=2): "Conversation 1, message 2: first must be the number of an earlier message, and it is 2.",
    with_message(figures={"rate": -1}): "Conversation 1, message 2: figures: rate must be a number of at least 0, and",
    with_message(problem="x"): 'Conversation 1, message 2: problem must be an object, and it is the text "x".',
    with_message(model="m" * 1001): "Conversation 1, message 2: model has 1001 characters, and 1000 is the most.",
    json.dumps([chat(1, "a", title="t" * 201)]): "Conversation 1: title has 201 characters, and 200 is the most.",
    json.dumps([{"messages": [{}] * 20001}]): "Conversation 1 has 20001 messages, and 20000 is the most.",
    json.dumps([{}] * 5001): "The file has 5001 conversations, and 5000 is the most.",
    with_settings(temperature=-1): "Conversation 2: temperature: it must be a number in 0 … 1000000.",
    with_settings(seed=1.5): "Conversation 2: seed: it must be a whole number in 0 … 9007199254740991.",
    with_settings(mirostat=1): "Conversation 2: mirostat: it must be a number in 0 … 2 in steps of 2.",
    with_settings(schema="["): "Conversation 2: schema: This is not JSON: ",
    with_settings(samplers="top_k top_k"): "Conversation 2: samplers: top_k is there twice.",
    with_settings(system={}): "Conversation 2: system: it must be a text.",
    "[" * 100_000: "The file is not JSON: ",
    " " * 16_000_001: "The file has 17 MB, and 16 MB is the most.",
}  # fmt: skip


def test_a_bad_file_is_refused_in_words(show: Show, tmp_path: Path) -> None:
    browser = show(RAIN)
    for content, expected in BAD_FILES.items():
        said = import_file(browser, tmp_path, content)
        assert said.startswith(f"Nothing is imported. {expected}"), (content[:80], said)
        assert said == f"Nothing is imported. {expected}" or expected[-1] != "." or "twice" in expected
        assert kept(browser) == [RAIN]
    assert browser.complaints() == []


# What the browser does not give --------------------------------------------------------------------------


def test_a_full_browser_takes_all_of_a_file_or_nothing(show: Show, tmp_path: Path) -> None:
    browser = show(RAIN)
    large = [chat(number, "x" * 1_000_000) for number in range(10, 18)]
    said = import_file(browser, tmp_path, json.dumps(large))
    assert said == "Nothing is imported. The browser's space for this page is too small for these conversations."
    assert kept(browser) == [RAIN]
    assert titles(browser) == ["Why does rain fall?"]
    assert import_file(browser, tmp_path, json.dumps(large[:1])) == "One conversation is imported."
    assert browser.complaints() == []


def test_a_browser_without_storage(show: Show, downloads: Callable[[], tuple[str, str]]) -> None:
    """Private windows of some browsers forbid it. Everything works, as long as the page is open."""
    browser = show()
    script = (
        """Object.defineProperty(window, "localStorage", {get() { throw new DOMException("no", "SecurityError"); }})"""
    )
    number = browser.call("Page.addScriptToEvaluateOnNewDocument", source=script)["identifier"]
    try:
        browser.reload()
        browser.until(READY)
        assert "keeps nothing" in texts(browser, "#notice")[0]
        ask(browser, "hello")
        click(browser, "More: hello")
        browser.type("Greeting")
        browser.press("Enter", 13)
        assert titles(browser) == ["Greeting"]
        click(browser, "More: Greeting")
        click(browser, "As JSON")
        text = downloads()[1]
        assert [each["content"] for each in json.loads(text)["conversations"][0]["messages"]] == [
            "hello",
            "Hello to you.",
        ]
        click(browser, "More: Greeting")
        click(browser, "Delete")
        assert titles(browser) == []
        click(browser, "Undo")
        assert titles(browser) == ["Greeting"]
        assert look_for(browser, "you") == ["Greeting"]
        assert browser.complaints() == []
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=number)


# For everybody -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [360, 1200])
def test_the_list_and_its_dialogs(show: Show, scheme: str, width: int) -> None:
    wide = chat(6, "gravity " + "w" * 300, "y" * 300 + " gravity", title="t" * 200)
    browser = show(RAIN, SEA, wide, width=width, height=720, scheme=scheme)
    outside = OUTSIDE.replace("#page *, dialog", "#page *, #chats *, dialog")
    if width == 360:
        click(browser, "Conversations")
        browser.until("document.getElementById('new').checkVisibility({checkVisibilityCSS: true})")
        browser.run("document.getElementById('chats').getAnimations().forEach(each => each.finish())")
    look_for(browser, "gravity")
    read = ["#new", "#search", "#found", ".title", ".excerpt", "mark", ".more", ".nav-foot p", "#open-transfer"]

    def check(selectors: Sequence[str]) -> None:
        found = browser.run(f"{CONTRAST}({json.dumps(selectors)})")
        assert {selector for selector, _, _ in found} == set(selectors)
        assert [entry for entry in found if entry[2] < 4.5] == []
        assert browser.run(outside) == []
        assert browser.run(SMALL) == []
        assert browser.run(NAMELESS) == []

    check(read)
    click(browser, f"More: {'t' * 200}")
    check(["#chat-title", "#chat-dialog .name", "#chat-markdown", "#chat-delete"])
    click(browser, "Delete")
    check(["#deleted p", "#deleted button"])
    browser.run("document.getElementById('open-transfer').focus()")
    click(browser, "Export and import")
    check(["#transfer-title", "#transfer-dialog .soft", "#all-json", "#import-result"])
    browser.press("Escape", 27)
    assert browser.run("document.activeElement.id") == "open-transfer"
    assert browser.complaints() == []


def test_a_conversation_is_deleted_while_it_is_answered(chromium: Browser) -> None:
    """Its answer ends, and comes back as far as it was."""
    speaker = Speaker()
    with running(speaker.load) as server:
        browser = open_new(chromium, server.url)
        browser.until(READY)
        speaker.seconds = 0.03
        say(browser, "long")
        browser.until("document.querySelector('.running > .markdown')?.textContent.includes('word')")
        click(browser, "More: long")
        click(browser, "Delete")
        browser.until(DONE)
        assert kept(browser) == []
        click(browser, "Undo")
        assert texts(browser, ".figures")[0].endswith("Stopped.")
        assert kept(browser)[0]["messages"][1]["content"].startswith("word")
        browser.open("about:blank")
