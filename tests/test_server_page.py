"""The page at `/`: its files and, in a real Chromium (`--browser`), what people do with it.

The server is real. Its model says what the tests want, as fast as they want.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shaderlm.engine.sampling import RANGES, WHOLE_RANGES
from shaderlm.errors import DeviceError, QueueFullError
from shaderlm.graph.sampler_chain import SAMPLERS
from shaderlm.server.served import ServedModel
from shaderlm.text import Tokenizer

from .browser import Browser
from .fake_runner import FakeRunner, model_of, tiny_tokenizer
from .serving import Running, running

pytestmark = pytest.mark.xdist_group("server page")

ASSETS = Path(__file__).parent.parent / "src" / "shaderlm" / "page" / "assets"
SCHEMES = ("light", "dark")
CONTEXT = 512
LONG = "word " * 60
RICH = "# Title\n\nSome **bold** text and `code`.\n\n```python\nprint('a < b')\n```\n\n- one\n- two\n"
ANSWERS = {"hello": "Hello to you.", "long": LONG, "rich": RICH, "json": '{"a": 1}', "endless": "on " * CONTEXT}


HOSTILE = [
    "<script>document.title='harm'</script>",
    "<img src=x onerror=\"document.title='harm'\">",
    "[a](javascript:document.title=1) [b](JaVaScRiPt:alert(1)) [c](data:text/html,<b>x</b>) [d](vbscript:x)",
    "[e](java\nscript:alert(1)) ![f](javascript:alert(1)) <javascript:alert(1)> [g](\u0001javascript:alert(1))",
    '[h](https://a.example/" onclick="x) ![i](https://a.example/i.png)',
    '```"><img src=x onerror=alert(1)>\n</code></pre><script>1</script>',
    "| <b>a</b> | <i onclick=x>b |\n|---|---|\n| <script>1</script> | &lt;script&gt; |",
    "<iframe src='https://a.example'></iframe><svg/onload=alert(1)><style>*{display:none}</style>",
    "# <h1 id=harm>\n- <form action=x><input></form>\n> <base href=x>",
    "&#60;script&#62; &lt;script&gt;alert(1)&lt;/script&gt; \u202e\u0000\ud800 text",
]


class Speaker:
    """Says what ANSWERS has for the last question, else how many questions there were and the last one."""

    def __init__(self) -> None:
        self.tokenizer = tiny_tokenizer()
        self.seconds = 0.0  # for each token
        self.prompts: list[str] = []
        self._start = self._id("<|im_start|>")
        self._end = self._id("<|im_end|>")
        self._answers: dict[str, list[int]] = {}

    def _id(self, token: str) -> int:
        return list(self.tokenizer.vocabulary.tokens).index(token)

    def token(self, known: Sequence[int]) -> int:
        time.sleep(self.seconds)
        ids = list(known)
        begin = len(ids) - 1 - ids[::-1].index(self._start)
        said = len(ids) - begin - 1 - len(self.tokenizer.encode("assistant\n"))
        prompt = self.tokenizer.decode(ids[:begin], skip_special=True)
        if prompt not in self._answers:
            self.prompts.append(prompt)
            questions = re.findall(r"user\n(.*?)(?:<\|im_end\|>)?\n", prompt)
            text = ANSWERS.get(questions[-1], f"{len(questions)}: {questions[-1]}")
            self._answers[prompt] = [*self.tokenizer.encode(text), self._end]
        answer = self._answers[prompt]
        return answer[said] if 0 <= said < len(answer) else self._end

    def load(self) -> ServedModel:
        runner = FakeRunner(self.token, len(self.tokenizer.vocabulary.tokens), context=CONTEXT)
        model = model_of(runner, self.tokenizer)
        model.report = replace(model.report, device="Test GPU 3000", backend="wgpu: the tests are for it")
        return ServedModel(model, names=("tiny-chat",))


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker()


@pytest.fixture(scope="module")
def server(speaker: Speaker) -> Iterator[Running]:
    with running(speaker.load) as made:
        yield made


# The files -----------------------------------------------------------------------------------------------


def test_the_page_and_its_files_are_served_without_a_key(speaker: Speaker) -> None:
    with running(speaker.load, keys=["secret"]) as server, server.client() as http:
        page = http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert page.text == (ASSETS / "index.html").read_text(encoding="utf-8")
        kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
        for path in ASSETS.iterdir():
            found = http.get(f"/assets/{path.name}")
            assert found.status_code == 200
            assert found.headers["content-type"].startswith(kinds[path.suffix])
        assert http.get("/assets/none.js").status_code == 404
        assert http.get("/assets/..%2fpage.py").status_code == 404


def test_the_page_needs_nothing_from_elsewhere() -> None:
    """Nor does it make markup of texts."""
    for path in ASSETS.iterdir():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 300, path
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}, path
        assert not re.search(r"@import|url\(|(inner|outer|Adjacent)HTML|document\.write|eval\(|Function\(", text), path
        assert not re.search(r"<[^>]* (style|on\w+)=", text), path
    page = (ASSETS / "index.html").read_text(encoding="utf-8")
    for reference in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert (ASSETS / reference.removeprefix("assets/")).is_file(), reference
    for script in ASSETS.glob("*.js"):
        text = script.read_text(encoding="utf-8")
        for name in re.findall(r'(?:from |import\()"\./([^"]+)"', text):
            assert (ASSETS / name).is_file(), f"{script.name} imports {name}"


def test_fields_have_the_limits_of_the_server() -> None:
    page = (ASSETS / "index.html").read_text(encoding="utf-8")
    names = {"repetition_penalty": "repeat_penalty"}
    whole = {name: limits for name, limits in WHOLE_RANGES.items() if name.startswith("dry_")}
    for name, (low, high, _) in {**RANGES, **whole}.items():
        found = re.search(rf'name="{names.get(name, name)}" type="number" min="([^"]+)" max="([^"]+)"', page)
        assert found, name
        assert (float(found[1]), float(found[2])) == (low, high), name
    order = re.search(r"const ORDER = (\[.*?\]);", (ASSETS / "settings_check.js").read_text(encoding="utf-8"))
    assert order
    assert json.loads(order[1]) == list(SAMPLERS)


# In the browser ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


def open_new(browser: Browser, url: str, conversations: Sequence[dict[str, Any]] = (), **window: Any) -> Browser:
    """Opens the page in a browser that has never seen it, or that keeps these conversations alone."""
    browser.open(f"{url}/assets/icon.svg")
    browser.call("Storage.clearDataForOrigin", origin=url, storageTypes="all")
    for each in conversations:
        browser.run(f"localStorage.setItem('shaderlm.chat.{each['id']}', {json.dumps(json.dumps(each))})")
    browser.run("sessionStorage.clear()")
    browser.open(f"{url}/", **window)
    return browser


Show = Callable[..., Browser]


@pytest.fixture
def show(chromium: Browser, server: Running, speaker: Speaker) -> Iterator[Show]:
    """See open_new."""
    speaker.seconds = 0.0
    speaker.prompts.clear()

    def opened(url: str | None = None, conversations: Sequence[dict[str, Any]] = (), **window: Any) -> Browser:
        return open_new(chromium, url or server.url, conversations, **window)

    yield opened
    speaker.seconds = 0.0
    chromium.open("about:blank")


def texts(browser: Browser, selector: str) -> list[str]:
    """The texts of all elements that a selector finds and that are shown."""
    find = f"[...document.querySelectorAll({json.dumps(selector)})].filter(n => n.checkVisibility())"
    found = browser.run(f"{find}.map(n => n.textContent.replace(/▍/g, ''))")
    assert isinstance(found, list)
    return found


READY = "document.getElementById('server').dataset.state === 'ready'"
DONE = "!document.getElementById('send').hidden && !document.querySelector('.running')"


def say(browser: Browser, text: str) -> None:
    """Write and send a message by keyboard."""
    browser.run("document.getElementById('prompt').focus()")
    browser.type(text)
    browser.press("Enter", 13)


def ask(browser: Browser, text: str) -> str:
    """Send a message, and wait for the answer."""
    before = len(texts(browser, "article.assistant"))
    say(browser, text)
    browser.until(f"document.querySelectorAll('article.assistant').length > {before} && {DONE}")
    return texts(browser, "article.assistant > .markdown")[-1]


def click(browser: Browser, name: str) -> None:
    """Press the last button of this name that is shown."""
    find = "[...document.querySelectorAll('button')].filter(n => n.checkVisibility())"
    match = f"(n.getAttribute('aria-label') ?? n.textContent).trim() === {json.dumps(name)}"
    assert browser.run(f"(() => {{ const n = {find}.filter(n => {match}).at(-1); n?.click(); return !!n; }})()"), name


@pytest.mark.browser
def test_a_conversation(show: Show, speaker: Speaker) -> None:
    browser = show()
    browser.until(READY)
    assert texts(browser, "#model") == ["tiny-chat"]
    assert texts(browser, "#device") == [f"Test GPU 3000 · wgpu · context {CONTEXT}"]
    click(browser, "Model information")
    rows = dict(zip(texts(browser, "dt"), texts(browser, "dd"), strict=True))
    assert (rows["Runs on"], rows["Device"], rows["Context"]) == ("the server", "Test GPU 3000", f"{CONTEXT} tokens")
    click(browser, "Close")
    browser.run("document.getElementById('prompt').focus()")
    assert ask(browser, "hello") == "Hello to you."
    assert ask(browser, "and now") == "2: and now", "the whole conversation is sent"
    assert texts(browser, "article.user .text") == ["hello", "and now"]
    figures = texts(browser, ".figures")
    assert len(figures) == 2
    assert all(re.fullmatch(r"first token after [\d.]+ m?s · [\d,.]+ tokens/s · \d+ tokens", each) for each in figures)
    assert int(figures[0].split()[-2]) == len(speaker.tokenizer.encode("Hello to you."))
    assert texts(browser, "#said") == ["The answer: 2: and now"]
    assert browser.complaints() == []
    assert all(each.startswith(browser.run("location.origin")) for each in browser.requests())


@pytest.mark.browser
def test_a_model_without_a_chat_template_continues_the_message(show: Show) -> None:
    tokenizer = Tokenizer(replace(tiny_tokenizer().vocabulary, chat_template=None))
    rest = [*tokenizer.encode("inn"), list(tokenizer.vocabulary.tokens).index("<|im_end|>")]

    def token(ids: Sequence[int]) -> int:
        known = list(ids)
        return rest[max(n for n in range(len(rest)) if known[len(known) - n :] == rest[:n])]

    runner = FakeRunner(token, len(tokenizer.vocabulary.tokens), context=CONTEXT)
    with running(lambda: ServedModel(model_of(runner, tokenizer), names=("base",))) as server:
        browser = show(server.url)
        browser.until(READY)
        assert texts(browser, ".note p") == ["This model has no chat template. It continues the text that you write."]
        assert ask(browser, "the") == "inn"
        assert int(texts(browser, ".figures")[0].split()[-2]) == len(rest) - 1
        for _ in range(CONTEXT // len(LONG) + 1):  # only the last is sent: however many there are, they fit
            browser.run(f"document.getElementById('prompt').value = {json.dumps(LONG)}")
            ask(browser, "")
        assert texts(browser, ".problem") == []
        assert browser.complaints() == []


@pytest.mark.browser
def test_an_answer_comes_bit_by_bit_and_can_be_stopped(show: Show, speaker: Speaker, server: Running) -> None:
    browser = show()
    speaker.seconds = 0.02
    say(browser, "long")
    browser.until("document.querySelector('.running > .markdown')?.textContent.includes('word word')")
    assert re.search(r"first token after .* tokens/s · \d+ tokens$", texts(browser, ".figures")[0]), "live"
    assert browser.run("document.querySelector('article.running').ariaBusy") == "true"
    first = texts(browser, "article.assistant > .markdown")[0]
    browser.until(f"document.querySelector('.running > .markdown').textContent.length > {len(first) + 8}")
    click(browser, "Stop")
    browser.until(DONE)
    stopped = texts(browser, "article.assistant > .markdown")[0]
    assert LONG.startswith(stopped.strip())
    assert len(first) < len(stopped) < len(LONG)
    assert texts(browser, ".figures")[0].endswith("Stopped.")
    deadline = time.monotonic() + 60
    while server.model.engine.sequences():
        assert time.monotonic() < deadline, "the server goes on"
        time.sleep(0.02)
    speaker.seconds = 0.0
    assert ask(browser, "hello") == "Hello to you."
    assert stopped.strip() in speaker.prompts[-1], "what was said so far is part of the conversation"
    assert browser.complaints() == []


@pytest.mark.browser
def test_escape_stops_an_answer(show: Show, speaker: Speaker) -> None:
    browser = show()
    speaker.seconds = 0.05
    say(browser, "long")
    browser.until("document.querySelector('.running > .markdown')?.textContent.includes('w')")
    browser.press("Escape", 27)
    browser.until(DONE)
    assert texts(browser, ".figures")[0].endswith("Stopped.")
    assert browser.run("document.activeElement.id") == "prompt"


@pytest.mark.browser
def test_conversations_are_there_after_a_reload(show: Show, speaker: Speaker) -> None:
    browser = show()
    ask(browser, "first question")
    click(browser, "New chat")
    ask(browser, "second question")
    speaker.seconds = 0.03
    say(browser, "long")
    browser.until("document.querySelector('.running > .markdown')?.textContent.includes('word')")
    browser.reload()
    speaker.seconds = 0.0
    browser.until("document.querySelectorAll('article').length === 4 && !document.querySelector('.running')")
    kept = texts(browser, "article.assistant > .markdown")
    assert kept[0] == "1: second question"
    assert kept[1].startswith("word")
    assert "Cut off" in texts(browser, ".figures")[-1]
    assert texts(browser, "#list .chat") == ["second question", "first question"]
    assert texts(browser, "#list .chat[aria-current]") == ["second question"]
    click(browser, "first question")
    assert texts(browser, "article.user .text") == ["first question"]
    assert browser.complaints() == []


@pytest.mark.browser
def test_a_conversation_goes_on_while_another_is_shown(show: Show, speaker: Speaker) -> None:
    browser = show()
    speaker.seconds = 0.01
    say(browser, "long")
    browser.until("document.querySelector('.running')")
    click(browser, "New chat")
    assert ask(browser, "hello") == "Hello to you."
    click(browser, "long")
    browser.until(DONE)
    assert texts(browser, "article.assistant > .markdown")[0].strip() == LONG.strip()


@pytest.mark.browser
def test_regenerate_and_edit(show: Show, speaker: Speaker) -> None:
    browser = show()
    ask(browser, "one")
    ask(browser, "two")
    before = texts(browser, "article")
    browser.run("document.querySelectorAll('article')[3].dataset.old = 1")
    click(browser, "Regenerate")
    browser.until(f"!document.querySelector('[data-old]') && {DONE}")
    assert [each.partition("first token")[0] for each in texts(browser, "article")] == [
        each.partition("first token")[0] for each in before
    ]
    assert "one" in speaker.prompts[-1]
    browser.run("document.querySelector('article.user .actions button:last-child').click()")
    assert browser.run("document.activeElement.value") == "one"
    browser.press("Escape", 27)
    assert len(texts(browser, "article")) == 4, "nothing changed"
    assert browser.run("document.activeElement.textContent") == "Edit"
    browser.press("Enter", 13)
    assert texts(browser, ".edit .soft") == ["What follows this message is replaced."]
    browser.run("document.activeElement.value = ''")
    browser.type("three")
    browser.press("Enter", 13)
    browser.until(f"document.querySelectorAll('article').length === 2 && {DONE}")
    assert texts(browser, "article.user .text") == ["three"]
    assert texts(browser, "article.assistant > .markdown") == ["1: three"]
    assert browser.complaints() == []


@pytest.mark.browser
def test_settings_are_sent_and_kept(
    show: Show, speaker: Speaker, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    submit = server.service.submit

    def submitted(served: Any, requests: Sequence[Any]) -> Any:
        asked.extend(requests)
        return submit(served, requests)

    monkeypatch.setattr(server.service, "submit", submitted)
    browser = show()
    browser.until(READY)
    ask(browser, "hello")
    assert (asked[0].sampling.temperature, asked[0].sampling.top_k) == (0.8, 40), "the server's own for a chat"
    assert asked[0].max_tokens == CONTEXT, "1,024, which is more than the context"
    click(browser, "Settings")
    assert browser.run("document.querySelector('[name=temperature]').placeholder") == "0.8"
    values = {
        "system": "You are an owl.",
        "temperature": "0",
        "top_p": "0.5",
        "max_tokens": "9",
        "seed": "7",
        "dry_multiplier": "0.8",
        "dry_sequence_breakers": "\\n\n:",
        "samplers": "dry, top_k temperature",
        "stop": "a\nb",
    }
    for name, value in values.items():
        browser.run(f"document.querySelector('#settings [name={name}]').value = {json.dumps(value)}")
    click(browser, "Apply")
    assert "system prompt · temperature 0 · top p 0.5" in texts(browser, "#active")[0]
    assert ask(browser, "long") == LONG[:9]
    assert "Ended at the limit of tokens, which is in the settings." in texts(browser, ".figures")[-1]
    found = asked[1]
    assert (found.sampling.temperature, found.sampling.top_p, found.sampling.seed) == (0, 0.5, 7)
    assert (found.sampling.dry_multiplier, found.sampling.dry_sequence_breakers) == (0.8, ("\n", ":"))
    assert found.sampling.samplers == ("dry", "top_k", "temperature")
    assert (found.max_tokens, tuple(found.stop)) == (9, ("a", "b"))
    assert "system\nYou are an owl." in speaker.prompts[-1]
    browser.reload()
    browser.until("document.querySelectorAll('article').length === 4")
    click(browser, "Settings")
    assert browser.run("document.querySelector('[name=seed]').value") == "7"
    click(browser, "Reset")
    click(browser, "Cancel")
    click(browser, "Settings")
    assert browser.run("document.querySelector('[name=seed]').value") == "7", "Cancel changes nothing"
    browser.run("document.querySelector('[name=top_p]').value = 2")
    click(browser, "Apply")
    assert browser.run("document.querySelector('#settings-dialog').open"), "2 is not within the limits"
    assert not browser.run("document.querySelector('#samplers-part').open")
    browser.run("document.querySelector('[name=top_p]').value = 1")
    browser.run("document.querySelector('[name=typical_p]').value = 2")
    click(browser, "Apply")
    assert browser.run("document.querySelector('#samplers-part').open"), "what is wrong is seen"
    browser.run(
        "document.querySelector('[name=typical_p]').value = ''; document.querySelector('[name=samplers]').select()"
    )
    assert browser.run("document.activeElement.placeholder").startswith("penalties dry temperature"), "the server's own"
    browser.type("top_k heat")
    click(browser, "Apply")
    assert browser.run("document.activeElement.validationMessage").startswith("There is no sampler heat. Give some of")


@pytest.mark.browser
def test_a_schema_is_checked_and_sent(show: Show) -> None:
    browser = show()
    browser.until(READY)
    click(browser, "Settings")
    browser.run("document.querySelector('#schema').focus()")
    browser.type('{"type": ')
    assert "This is not JSON" in texts(browser, "#schema-problem")[0]
    click(browser, "Apply")
    assert browser.run("document.querySelector('#settings-dialog').open")
    browser.type('"object"}')
    assert texts(browser, "#schema-problem") == []
    click(browser, "Apply")
    assert texts(browser, "#active") == ["JSON schema"]
    say(browser, "json")
    browser.until(DONE)
    sent = [e["params"]["request"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    bodies = [json.loads(each["postData"]) for each in sent if each["url"].endswith("/chat/completions")]
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    assert texts(browser, "article.assistant pre") == ['{"a": 1}'], "JSON is no Markdown"
    click(browser, "Settings")
    browser.run("document.querySelector('#schema').value = '{\"type\": \"nonsense\"}'")
    click(browser, "Apply")
    ask(browser, "json")
    assert texts(browser, ".problem p")[0].startswith("The server cannot honour the JSON schema.")
    assert "nonsense" in texts(browser, ".problem p")[0]
    assert bodies[0]["response_format"] == {"type": "json_schema", "json_schema": schema}


# A stream of a model that thinks, with comments, both kinds of line ends, and characters of several bytes.
THINKING = (
    ": waiting\n\n"
    'data: {"choices": [], "prompt_progress": {"total": 9, "cache": 0, "processed": 4, "time_ms": 1}}\n\n'
    'data: {"model": "m", "choices": [{"index": 0, "delta": {"role": "assistant", "content": null}}]}\r\n\r\n'
    'data: {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm – "}}]}\n\n'
    'data: {"choices": [{"index": 0, "delta": {"reasoning_content": "ja."}}]}\n\n'
    'event: message\ndata: {"choices": [{"index": 0, "delta": {"content": "Grüße 😀"}}]}\n\n'
    'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
)


@pytest.mark.browser
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stream_may_be_split_anywhere(show: Show, size: int) -> None:
    browser = show()

    def answered(stream: str) -> Any:
        """What becomes of a stream that comes in parts of so many bytes."""
        return browser.run(f"""import("/assets/answer.js").then(async ({{Answer}}) => {{
            const {{chat}} = await import("/assets/api.js");
            const bytes = new TextEncoder().encode({json.dumps(stream)});
            const parts = Array.from({{length: Math.ceil(bytes.length / {size})}},
                (_, i) => bytes.slice({size} * i, {size} * (i + 1)));
            const kept = globalThis.fetch;
            globalThis.fetch = async () => new Response(new ReadableStream({{
                pull(out) {{ parts.length ? out.enqueue(parts.shift()) : out.close(); }}
            }}));
            const message = {{role: "assistant", content: "", figures: {{}}, ended: "left"}};
            const seen = new Set();
            const answer = new Answer({{settings: {{}}, messages: [message]}}, message);
            const source = {{hasSchemas: true, open: async () => ({{chat, defaults: null}})}};
            await answer.run(source, () => seen.add(message.progress?.done ?? 0));
            globalThis.fetch = kept;
            return {{...message, seen: [...seen]}};
        }})""")

    found = answered(THINKING + "data: [DONE]\n\n")
    assert (found["thoughts"], found["content"], found["ended"]) == ("Hm – ja.", "Grüße 😀", "stop")
    assert (found["model"], found["seen"], "problem" in found) == ("m", [0, 4], False)
    cut = answered(THINKING)
    assert (cut["content"], cut["problem"]["kind"]) == ("Grüße 😀", "cut"), "a stream without its end"
    error = (
        'event: error\ndata: {"error": {"message": "the device failed", "code": 503, "type": "unavailable_error"}}\n\n'
    )
    failed = answered(THINKING + error)
    assert (failed["content"], failed["problem"]["kind"]) == ("Grüße 😀", "unavailable")
    assert failed["problem"]["advice"] == "The device failed."


@pytest.mark.browser
def test_what_is_sent_of_a_conversation(show: Show) -> None:
    """Failed answers and thoughts are not; what a person said twice in a row is one message, as templates want it."""
    browser = show()
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "problem": {}},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c", "thoughts": "t"},
        {"role": "user", "content": "d"},
    ]
    sent = browser.run(f"import('/assets/context.js').then(m => m.turns({json.dumps(messages)}, 'be kind'))")
    assert [(each["role"], each["content"]) for each in sent] == [
        ("system", "be kind"),
        ("user", "a\n\nb"),
        ("assistant", "c"),
        ("user", "d"),
    ]


@pytest.mark.browser
def test_a_browser_that_keeps_nothing(show: Show) -> None:
    """Full storage is told, and the conversation goes on."""
    browser = show()
    browser.run("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    assert ask(browser, "hello") == "Hello to you."
    assert "is full" in texts(browser, "#notice")[0]


# What goes wrong -----------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.parametrize(
    ("raised", "title", "advice"),
    [
        (QueueFullError("the queue is full", 4, 4, 3), "The server is busy", "Try again in 3 seconds."),
        (DeviceError("it is gone"), "The server cannot answer yet.", "it is gone"),
        (RuntimeError("bug"), "The server failed.", "its log has the reason"),
    ],
    ids=["429", "503", "500"],
)
def test_errors_are_told_and_a_retry_works(
    show: Show, server: Running, monkeypatch: pytest.MonkeyPatch, raised: Exception, title: str, advice: str
) -> None:
    def refuse(*_: Any) -> Any:
        raise raised

    browser = show()
    with monkeypatch.context() as patch:
        patch.setattr(server.service, "submit", refuse)
        ask(browser, "hello")
        said = texts(browser, ".problem p")[0]
        assert said.startswith(title)
        assert advice in said
        assert browser.run("document.querySelector('.problem').getAttribute('role')") == "alert"
    click(browser, "Try again")
    browser.until(f"document.querySelector('article.assistant > .markdown').textContent === 'Hello to you.' && {DONE}")
    browser.until("document.querySelectorAll('.problem:not([hidden])').length === 0")


@pytest.mark.browser
def test_a_conversation_that_is_too_long(show: Show) -> None:
    """One message alone. Longer conversations lose their oldest turns."""
    browser = show()
    ask(browser, "x " * CONTEXT)
    said = texts(browser, ".problem p")[0]
    assert said.startswith("This message is longer than the model can read.")
    assert f"{CONTEXT} is the most" in said
    assert texts(browser, ".problem button") == [], "trying again changes nothing"
    click(browser, "Edit")
    browser.run("document.activeElement.value = ''")
    browser.type("hello")
    browser.press("Enter", 13)
    browser.until(f"document.querySelector('article.assistant > .markdown').textContent === 'Hello to you.' && {DONE}")


@pytest.mark.browser
def test_the_oldest_turns_are_left_out_of_a_full_context(show: Show, speaker: Speaker, server: Running) -> None:
    """As `shaderlm chat` does it. Settings count, too: the system prompt stays, and an answer needs its room."""
    browser = show()
    browser.until(READY)
    browser.run("document.querySelector('#settings [name=system]').value = 'You are an owl.'")
    browser.run("document.getElementById('settings').requestSubmit()")
    questions = [f"question {number} {'why ' * 12}".strip() for number in range(12)]
    for question in questions:
        ask(browser, question)
        if question is questions[0]:
            with server.client() as http:
                body = {"system": "You are an owl.", "messages": [{"role": "user", "content": question}]}
                counted = http.post("/v1/messages/count_tokens", json={"model": "tiny-chat", **body}).json()[
                    "input_tokens"
                ]
            used = counted + int(texts(browser, ".figures")[0].split()[-2])
            assert texts(browser, "#context-text") == [f"{used} of {CONTEXT} tokens"]
            meter = browser.run("""(n => [n.ariaValueNow, n.ariaValueMax,
                n.firstElementChild.getBoundingClientRect().width / n.getBoundingClientRect().width]
            )(document.getElementById("context-meter"))""")
            assert meter == [str(used), str(CONTEXT), pytest.approx(used / CONTEXT, abs=0.01)]
    assert texts(browser, ".problem") == []
    notes = texts(browser, ".left-out")
    assert notes
    assert all(
        re.fullmatch(rf"The context of {CONTEXT} tokens is full: the oldest .* left out from here on\.", each)
        for each in notes
    )
    assert "You are an owl." in speaker.prompts[-1]
    assert questions[0] not in speaker.prompts[-1]
    assert questions[-2] in speaker.prompts[-1], "what fits stays"
    assert browser.complaints() == []


@pytest.mark.browser
def test_an_answer_that_fills_the_context(show: Show) -> None:
    browser = show()
    ask(browser, "endless")
    assert texts(browser, ".figures")[0].endswith(
        "Cut off: the context is full. The next message leaves out the oldest turns."
    )
    assert texts(browser, "#context-text") == [f"{CONTEXT} of {CONTEXT} tokens"]
    assert ask(browser, "hello") == "Hello to you."


@pytest.mark.browser
def test_a_server_that_goes_away_and_comes_back(show: Show, speaker: Speaker) -> None:
    with running(speaker.load) as gone:
        browser = show(gone.url)
        browser.until(READY)
        ask(browser, "hello")
        port = int(gone.url.rpartition(":")[2])
    say(browser, "are you there")
    browser.until("document.querySelector('.problem:not([hidden])')")
    assert texts(browser, ".problem p")[0].startswith("The server does not answer. Is it still running?")
    browser.until("document.getElementById('model').textContent === 'No connection'")
    assert texts(browser, "article.user .text") == ["hello", "are you there"], "nothing is lost"
    with running(speaker.load, port=port):
        browser.until(READY)
        click(browser, "Try again")
        browser.until(
            f"document.querySelectorAll('article.assistant > .markdown')[1].textContent.startsWith('2:') && {DONE}"
        )
        assert texts(browser, ".problem") == []
        browser.open("about:blank")


@pytest.mark.browser
def test_a_server_that_ends_within_an_answer(show: Show, speaker: Speaker) -> None:
    with running(speaker.load, drain=0) as ending:
        browser = show(ending.url)
        speaker.seconds = 0.03
        say(browser, "long")
        browser.until("document.querySelector('.running > .markdown')?.textContent.includes('word')")
        ending.server.should_exit = True
        browser.until(DONE)
    assert texts(browser, "article.assistant > .markdown")[0].startswith("word"), "what came is kept"
    assert len(texts(browser, ".problem")) == 1


@pytest.mark.browser
def test_the_page_waits_for_a_model(show: Show, speaker: Speaker) -> None:
    go = time.monotonic() + 1.5

    def slowly() -> ServedModel:
        time.sleep(max(0.0, go - time.monotonic()) + 2)
        return speaker.load()

    with running(slowly, wait=False) as server:
        browser = show(server.url)
        browser.until("document.getElementById('model').textContent === 'Waiting for the model'")
        assert "The model is being loaded" in texts(browser, "#device")[0]
        browser.until(READY)
        assert ask(browser, "hello") == "Hello to you."
        browser.open("about:blank")


@pytest.mark.browser
def test_a_server_with_a_key(show: Show, speaker: Speaker) -> None:
    with running(speaker.load, keys=["open sesame"]) as server:
        browser = show(server.url)
        browser.until("document.querySelector('#key-dialog').open")
        click(browser, "Cancel")
        browser.until("document.getElementById('model').textContent === 'A key is needed'")
        say(browser, "hello")  # it asks again
        for key, wrong in (("guess", False), ("open sesame", True)):
            browser.until("document.querySelector('#key-dialog').open")
            assert bool(texts(browser, "#key-wrong")) == wrong
            assert browser.run("document.activeElement.id") == "key"
            browser.type(key)
            browser.press("Enter", 13)
            browser.until(f"!document.querySelector('#key-dialog').open || {json.dumps(not wrong)}")
            if not wrong:
                browser.until("!document.querySelector('#key-wrong').hidden")
        browser.until(f"{READY} && {DONE} && document.querySelector('article.assistant > .markdown').textContent")
        assert texts(browser, "article.assistant > .markdown") == ["Hello to you."]
        assert browser.run("localStorage.getItem('shaderlm.key')") is None, "for this tab only"
        browser.reload()
        browser.until(f"document.querySelectorAll('article').length === 2 && {READY}")
        browser.open("about:blank")


@pytest.mark.browser
def test_a_hostile_conversation_does_no_harm(show: Show) -> None:
    messages = []
    for text in HOSTILE:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": text, "thoughts": text, "model": text})
    browser = show(conversations=[{"id": "x", "updated": 1, "settings": {}, "messages": messages}])
    browser.until(READY)
    title = browser.run("document.title")
    click(browser, HOSTILE[0])
    browser.until(f"document.querySelectorAll('article').length === {len(messages)}")
    forbidden = "#messages :is(script, img, iframe, svg, style, input, base)"
    assert browser.run(f"document.querySelectorAll('{forbidden}').length") == 0
    assert browser.run("document.title") == title
    assert browser.complaints() == []
    assert all(each.startswith(browser.run("location.origin")) for each in browser.requests())
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")


# For everybody -------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_all_of_it_by_keyboard(show: Show) -> None:
    browser = show()
    browser.until(READY)

    def tab_to(name: str, *, back: bool = False) -> None:
        label = (
            "(n => n.getAttribute('aria-label') ?? n.labels?.[0]?.textContent ?? n.textContent)(document.activeElement)"
        )
        for _ in range(40):
            browser.press("Tab", 9, shift=back)
            if browser.run(label).strip() == name:
                assert browser.run("document.activeElement.matches(':focus-visible')")
                return
        raise AssertionError(f"{name} cannot be reached")

    browser.type("a")
    browser.press("Enter", 13, shift=True)
    browser.type("b")
    assert browser.run("document.getElementById('prompt').value") == "a\nb", "Shift and Enter: a new line"
    tab_to("Send")
    browser.press("Enter", 13)
    browser.until(f"document.querySelectorAll('article.assistant').length === 1 && {DONE}")
    assert browser.run("document.activeElement.id") == "prompt"
    tab_to("Regenerate", back=True)
    browser.press("Enter", 13)
    browser.until(DONE)
    tab_to("Edit", back=True)
    browser.press("Enter", 13)
    browser.type(" c")
    browser.press("Enter", 13)
    browser.until(f"document.querySelector('article.user .text')?.textContent.endsWith('c') && {DONE}")
    tab_to("Settings", back=True)
    browser.press("Enter", 13)
    browser.until("document.querySelector('#settings-dialog').open")
    tab_to("Temperature")
    browser.type("0.5")
    browser.press("Enter", 13)
    browser.until("!document.querySelector('#settings-dialog').open")
    assert texts(browser, "#active") == ["temperature 0.5"]
    assert browser.run("document.activeElement.id") == "open-settings"
    tab_to("New chat", back=True)
    browser.press("Enter", 13)
    assert texts(browser, "article") == []
    tab_to("a", back=True)
    browser.press("Enter", 13)
    assert len(texts(browser, "article")) == 2
    tab_to("More: a", back=True)
    browser.press("Enter", 13)
    browser.until("document.querySelector('#chat-dialog').open")
    assert browser.run("document.activeElement.id") == "chat-name"
    browser.type("Letters")
    browser.press("Enter", 13)
    browser.until("!document.querySelector('#chat-dialog').open")
    tab_to("More: Letters", back=True)
    browser.press("Enter", 13)
    tab_to("Delete")
    browser.press("Enter", 13)
    browser.until("document.querySelectorAll('#list .chat').length === 0")
    assert browser.run("document.activeElement.textContent") == "Undo"
    browser.press("Enter", 13)
    browser.until("document.querySelectorAll('#list .chat').length === 1")
    assert texts(browser, "article.user .text") == ["a\nb c"]
    assert browser.run("document.activeElement.matches('.chat')")
    tab_to("Search conversations", back=True)
    browser.type("nothing")
    assert texts(browser, "#list .chat") == []
    browser.press("Escape", 27)
    assert texts(browser, "#list .chat") == ["Letters"]
    assert browser.complaints() == []


# Controls without a name, and pictures that are read aloud.
NAMELESS = """[...document.querySelectorAll("button, input, select, textarea, a, dialog, nav")].filter(node => {
  const name = node.getAttribute("aria-label") || node.labels?.[0]?.textContent || node.textContent
    || document.getElementById(node.getAttribute("aria-labelledby"))?.textContent;
  return !name?.trim();
}).map(node => node.outerHTML)"""


@pytest.mark.browser
def test_everything_has_a_name(show: Show) -> None:
    browser = show()
    ask(browser, "rich")
    assert browser.run(NAMELESS) == []
    assert browser.run("document.querySelectorAll('svg:not([aria-hidden])').length") == 0
    levels = browser.run("[...document.querySelectorAll('#page :is(h1, h2, h3, h4)')].map(n => Number(n.localName[1]))")
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels)), "no level is left out"
    assert browser.run("document.querySelector('#said').getAttribute('role')") == "status"


CODE = "```python\nif x > 10:  # a comment\n    return 'text'\n```\n\n"
WIDE_TABLE = f"|{' column |' * 12}\n|{'---|' * 12}\n|{' cell |' * 12}\n"
WIDE = {
    "id": "wide",
    "updated": 1,
    "settings": {},
    "messages": [
        {"role": "user", "content": "x" * 300},
        {
            "role": "assistant",
            "content": f"{RICH}\n{'y' * 300}\n\n```\n{'z' * 300}\n```\n\n{CODE}{WIDE_TABLE}",
            "model": "m" * 100,
            "thoughts": "t" * 200,
            "figures": {"firstToken": 1234, "rate": 55.5, "tokens": 12345, "used": 123456, "context": 131072},
            "leftOut": 1234,
            "ended": "length",
        },
    ],
}


# What leaves the window, and what is too small for a finger.
OUTSIDE = """[...document.querySelectorAll('#page *, dialog[open] *')].filter(n => n.checkVisibility()
    && !n.closest('pre, .table, .unseen') && (n.getBoundingClientRect().right > innerWidth + 0.5
    || n.getBoundingClientRect().left < -0.5)).map(n => n.outerHTML.slice(0, 80))"""
SMALL = """[...document.querySelectorAll('button, select, input')].filter(n => n.checkVisibility())
    .map(n => [n.textContent, n.getBoundingClientRect().height]).filter(([, h]) => h < 24 && h !== 13)"""


@pytest.mark.browser
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_fits(show: Show, scheme: str, width: int) -> None:
    browser = show(conversations=[WIDE], width=width, height=720, scheme=scheme)
    browser.until(READY)
    browser.run("location.hash = '#chat=wide'")
    browser.until("document.querySelectorAll('article').length === 2")
    browser.run("document.querySelectorAll('details').forEach(n => n.open = true)")
    assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    assert browser.run(OUTSIDE) == []
    assert browser.run("document.getElementById('prompt').getBoundingClientRect().width") > 180
    click(browser, "Settings")
    assert browser.run(OUTSIDE) == []
    assert browser.run(SMALL) == [], "large enough for a finger"
    browser.press("Escape", 27)
    if width == 360:
        assert not browser.run("document.getElementById('new').checkVisibility({checkVisibilityCSS: true})")
        click(browser, "Conversations")
        browser.until("document.getElementById('new').checkVisibility({checkVisibilityCSS: true})")
        assert browser.run("document.activeElement.id") == "new"
        assert browser.run("document.getElementById('page').inert")
        browser.press("Escape", 27)
        assert browser.run("document.activeElement.id") == "menu"
        assert not browser.run("document.getElementById('page').inert")
    assert browser.complaints() == []


TITLED = {
    "id": "titled",
    "updated": 2,
    "settings": {},
    "messages": [
        {"role": "user", "content": "Why is the sky blue at noon, and red at sunset?"},
        {"role": "assistant", "content": "Air."},
    ],
}


@pytest.mark.browser
def test_a_title_takes_the_room_that_there_is(show: Show) -> None:
    """Two lines, beside the button for more."""
    title = str(TITLED["messages"][0]["content"])  # type: ignore[index]
    measured = """(() => {
        const [text, more] = ['.title', '.more'].map(name => document.querySelector(`#list ${name}`));
        const lines = Math.round(text.clientHeight / parseFloat(getComputedStyle(text).lineHeight));
        const right = text.getBoundingClientRect().right - more.getBoundingClientRect().left;
        return [text.textContent, text.scrollHeight <= text.clientHeight + 1, lines, right <= 0];
    })()"""
    browser = show(conversations=[TITLED], width=1280)
    browser.until(READY)
    assert browser.run(measured) == [title, True, 2, True]


@pytest.mark.browser
def test_the_header_of_a_narrow_window_has_two_lines(show: Show) -> None:
    """What is wrong takes as many as it needs."""
    browser = show(width=360)
    browser.until(READY)
    long = "A model with a rather long name, Q4_K_M, of somebody"
    shown = f"import('/assets/status.js').then(m => m.showStatus('STATE', {json.dumps(long)}, {json.dumps(long)}))"
    lines = """['model', 'device'].map(id => document.getElementById(id)).map(
        n => Math.round(n.clientHeight / parseFloat(getComputedStyle(n).lineHeight)))"""
    browser.run(shown.replace("STATE", "ready"))
    assert browser.run(lines) == [1, 1]
    browser.run(shown.replace("STATE", "lost"))
    assert browser.run(lines) == [1, 3]


@pytest.mark.browser
@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_can_be_read(show: Show, scheme: str) -> None:
    from .test_profile_page import CONTRAST

    browser = show(conversations=[WIDE], scheme=scheme)
    browser.until(READY)
    browser.run("location.hash = '#chat=wide'")
    browser.until("document.querySelectorAll('article').length === 2")
    read = [
        "h1",
        "#device",
        ".chat",
        "article h2",
        ".text",
        ".markdown p",
        ".markdown code",
        ".figures",
        ".actions button",
    ]
    read += ["#send", "#open-settings", ".nav-foot p", ".code-head span", "th", "td", "dialog label", "dialog .soft"]
    read += [
        "#new",
        ".left-out",
        "#context-name",
        "#context-text",
        "summary",
        ".markdown h3",
        ".comment",
        ".string",
        ".number",
        ".keyword",
    ]
    found = browser.run(f"{CONTRAST}({json.dumps(read)})")
    assert {selector for selector, _, _ in found} == set(read)
    assert [entry for entry in found if entry[2] < 4.5] == []


@pytest.mark.browser
def test_the_scheme_can_be_chosen(show: Show) -> None:
    browser = show(scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(paper)
    browser.run(
        "(n => { n.value = 'dark'; n.dispatchEvent(new Event('change')); })(document.getElementById('appearance'))"
    )
    dark = browser.run(paper)
    assert dark != light
    browser.reload()
    browser.until(READY)
    assert browser.run(paper) == dark
    assert browser.run("document.getElementById('appearance').value") == "dark"
