"""shaderlm.js in a real Chromium (`--browser`): the same tokens as natively, and every fault by its name.

The model is tiny and its adapter is software. Its export is served by a server that counts and damages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shaderlm
from shaderlm.engine import LanguageModel
from shaderlm.text import Tokenizer
from shaderlm.text.splits import SPLITS
from shaderlm.web.export import export
from shaderlm.web.model import opened
from shaderlm.web.template import compile_template
from shaderlm.web.text import text_entry, tokenizer_json

from .browser import NO_ZEROS, WEBGPU, Browser
from .checkpoints import recorded, write_gguf
from .sweeps import with_all
from .test_smollm2 import RECORDED
from .test_text import VOCABULARIES
from .test_text import recorded as recorded_texts
from .test_text import tokenizer as tokenizer_of
from .test_web_tokenizer import BY_SPLIT, small_vocabulary
from .tiny_models import write_tiny_llama
from .web_serving import WebServer, serving

pytestmark = [pytest.mark.xdist_group("web runtime"), pytest.mark.browser]

ASSETS = Path(__file__).parent.parent / "src" / "shaderlm" / "web" / "assets"
PAGE = (Path(__file__).parent / "web" / "runtime.html").read_bytes()
VARIANTS = ("portable", "subgroups")
SHARED = "portable"  # what is the same in all variants is asked of this one, which is loaded once
FAST = "software"  # the one that loads fastest
PATIENCE = 300.0
PROMPT = "the answer is an other"
TALK = [{"role": "user", "content": "say the <|im_end|> word"}]
WEIGHTS = "/model/weights-000.bin"


def export_file(path: Path | None, folder: Path) -> None:
    """Write the export of a checkpoint; None: of SmolLM2."""
    with opened(None if path is None else str(path)) as model:
        export(model, folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="f32", context=1024)


@pytest.fixture(scope="module")
def native(path: Path) -> Iterator[LanguageModel]:
    with shaderlm.load(path, device="cpu") as model:
        yield model


@pytest.fixture(scope="module")
def server(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    folder = tmp_path_factory.mktemp("export") / "tiny"
    export_file(path, folder)
    inside = (ASSETS / "shaderlm.js").read_bytes() + b"\nexport { Text, TextStream };\n"
    pages = {"/page.html": PAGE, "/inside/inside.js": inside}
    with serving(pages, {"model": [folder, ASSETS], "inside": [ASSETS]}) as made:
        yield made


WITHOUT_KERNELS = """({ GPUDevice }) => {
    const make = GPUDevice.prototype.createComputePipelineAsync;
    const code = "@compute @workgroup_size(1) fn main() {}";
    GPUDevice.prototype.createComputePipelineAsync = function ({ layout, compute }) {
        if (layout === "auto") return make.call(this, { layout, compute }); // looks for the order of lanes
        return make.call(this, { layout, compute: { ...compute, module: this.createShaderModule({ code }) } });
    };
}"""


class Page:
    """The test page in a Chromium. `call` runs JavaScript in which `state`, `shaderlm` and `models` are known."""

    def __init__(self, browser: Browser, server: WebServer) -> None:
        self.browser, self.server = browser, server

    def open(self) -> None:
        """Show it anew: nothing is loaded."""
        self.server.faults.clear()
        self.server.requests.clear()
        self.browser.open(f"{self.server.address}/page.html")
        self.browser.until("window.state")

    def call(self, code: str, patience: float = PATIENCE) -> Any:
        """The value of an async function's body. As if somebody had clicked: it may open a tab."""
        expression = f"(async () => {{ const {{ shaderlm, models }} = state; {code} }})()"
        how = {"expression": expression, "returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = self.browser.call("Runtime.evaluate", patience=patience, **how)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]["exception"]["description"]
        return answer["result"].get("value")

    def without_kernels(self) -> Page:
        """Loads compile nothing, until the page is shown anew: for tests of files. Answers are wrong."""
        self.call(f"({WITHOUT_KERNELS})(window)")
        return self

    def load(self, name: str = "tiny", **options: Any) -> dict[str, Any]:
        """Load the model under a name; its info."""
        info: dict[str, Any] = self.call(f"return state.open({json.dumps(name)}, {json.dumps(options)})")
        return info

    def caught(self, promise: str) -> dict[str, Any]:
        """The error by which a promise ends. It is one of ours, and nothing was left unhandled."""
        found: dict[str, Any] | None = self.call(f"return state.caught({promise})")
        assert found is not None, f"{promise} did not fail"
        assert found["known"], found
        self.check()
        return found

    def check(self) -> None:
        """Nobody left a rejection unhandled."""
        assert self.call("return state.rejections") == []

    def complete(self, prompt: Any, options: str = "{}", name: str = "tiny") -> dict[str, Any]:
        """An answer to a text."""
        model = f"models[{json.dumps(name)}]"
        code = f"return state.answer({model}.complete({json.dumps(prompt)}, {options}), {model})"
        found: dict[str, Any] = self.call(code)
        return found

    def chat(self, messages: Any, options: str = "{}", name: str = "tiny") -> dict[str, Any]:
        """An answer to a conversation."""
        model = f"models[{json.dumps(name)}]"
        code = f"return state.answer({model}.chat({json.dumps(messages)}, {options}), {model})"
        found: dict[str, Any] = self.call(code)
        return found


@pytest.fixture(scope="module")
def page(server: WebServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    browser = Browser(tmp_path_factory.mktemp("browser"), flags=(*WEBGPU, NO_ZEROS))
    try:
        made = Page(browser, server)
        made.open()
        yield made
    finally:
        browser.close()


@pytest.fixture
def loaded(page: Page) -> Callable[[str], Page]:
    """The page with a model of a variant, by its name, loaded once."""

    def load(variant: str) -> Page:
        if page.call(f"return !models[{json.dumps(variant)}]"):
            info = page.load(variant, variant=variant)
            assert info["variant"] == variant
        return page

    return load


@pytest.fixture
def fresh(page: Page) -> Page:
    """The page without a model, and with an empty cache."""
    page.open()
    page.call('await caches.delete("shaderlm")')
    return page


# Answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_answers_are_the_native_ones(variant: str, loaded: Callable[[str], Page], native: LanguageModel) -> None:
    page = loaded(variant)
    answer, expected = page.chat(TALK, "{max_tokens: 10}", variant), native.chat(TALK, max_tokens=10)
    assert answer["promptTokens"] == len(expected.prompt_ids)
    assert (answer["ids"], answer["text"]) == (expected.ids, str(expected))
    assert (answer["finishReason"], answer["completionTokens"]) == ("length", 10)
    answer, expected = page.complete(PROMPT, "{max_tokens: 6}", variant), native.generate(PROMPT, max_tokens=6)
    assert (answer["ids"], answer["text"]) == (expected.ids, str(expected))
    page.check()


@pytest.mark.parametrize("variant", VARIANTS)
def test_sampled_answers_are_the_native_ones(
    variant: str, loaded: Callable[[str], Page], native: LanguageModel
) -> None:
    page = loaded(variant)
    for seed in (7, -5, (1 << 64) - 3):
        options: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "max_tokens": 8}
        given = json.dumps(options)[:-1] + f', "seed": {seed}n}}'
        assert page.complete(PROMPT, given, variant)["ids"] == native.generate(PROMPT, seed=seed, **options).ids


def test_penalties_and_biases(loaded: Callable[[str], Page], native: LanguageModel) -> None:
    page = loaded(SHARED)
    plain = native.generate(PROMPT, max_tokens=8).ids
    options: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    expected = native.generate(PROMPT, max_tokens=8, **options).ids
    assert expected != plain
    assert page.complete(PROMPT, json.dumps(options | {"max_tokens": 8}), SHARED)["ids"] == expected
    banned = plain[0]
    expected = native.generate(PROMPT, max_tokens=4, logit_bias={banned: float("-inf"), 5: 1.5}).ids
    given = f"{{max_tokens: 4, logit_bias: {{{banned}: -Infinity, 5: 1.5}}}}"
    assert page.complete(PROMPT, given, SHARED)["ids"] == expected


def test_stop_strings_are_not_shown(loaded: Callable[[str], Page], native: LanguageModel) -> None:
    page = loaded(SHARED)
    whole = str(native.generate(PROMPT, max_tokens=10))
    for stop in (whole[3:6], whole[1:3], whole[5:] + "x"):
        expected = native.generate(PROMPT, max_tokens=10, stop=stop)
        answer = page.complete(PROMPT, f"{{max_tokens: 10, stop: {json.dumps(stop)}}}", SHARED)
        assert (answer["text"], answer["finishReason"]) == (str(expected), expected.finish_reason)
        assert answer["ids"] == expected.ids


def test_a_conversation_goes_on_from_the_cache(loaded: Callable[[str], Page], native: LanguageModel) -> None:
    page = loaded(SHARED)
    first = page.chat(TALK, "{max_tokens: 4}", SHARED)
    talk = [*TALK, {"role": "assistant", "content": first["text"]}, {"role": "user", "content": "more"}]
    again, expected = page.chat(talk, "{max_tokens: 4}", SHARED), native.chat(talk, max_tokens=4)
    assert again["cachedTokens"] >= first["promptTokens"]
    assert again["ids"] == expected.ids
    assert page.chat(TALK, "{max_tokens: 4}", SHARED)["ids"] == first["ids"]


def test_a_long_prompt_makes_the_cache_grow(loaded: Callable[[str], Page], native: LanguageModel) -> None:
    page = loaded(SHARED)
    ids = [(i * i) % 200 for i in range(523)]
    expected = native.generate(ids, max_tokens=3).ids
    assert page.complete(ids, "{max_tokens: 3}", SHARED)["ids"] == expected
    expected = native.generate(ids[:506], max_tokens=12, ignore_eos=True).ids
    page.load("small", variant=FAST)
    found = page.complete(ids[:506], "{max_tokens: 12, ignore_eos: true}", "small")["ids"]
    page.call("models.small.close()")
    assert found == expected, "it grows in the middle of an answer, and what was there stays"
    too_long = page.caught(f"models.portable.complete({json.dumps([1] * 1025)}).next()")
    assert too_long["code"] == "input"
    assert "the context holds 1024" in too_long["message"]


def test_a_conversation_is_counted_as_it_is_asked(loaded: Callable[[str], Page], native: LanguageModel) -> None:
    page = loaded(SHARED)
    ids = page.call(f"return models.portable.tokenizeChat({json.dumps(TALK)})")
    assert ids == native.chat_ids(TALK)
    assert page.chat(TALK, "{max_tokens: 1}", SHARED)["promptTokens"] == len(ids)
    marked = page.call(f"return models.portable.tokenizeChat({json.dumps(TALK)}, {{ parse_special: true }})")
    assert marked == native.chat_ids(TALK, parse_special=True) != ids


def test_an_answer_can_be_stopped(loaded: Callable[[str], Page]) -> None:
    page = loaded(SHARED)
    whole = page.complete(PROMPT, "{max_tokens: 20}", SHARED)["text"]
    stopped = page.call(f"""
        const controller = new AbortController(), model = models.portable, found = [];
        const options = {{ max_tokens: 200, signal: controller.signal }};
        for await (const text of model.complete({json.dumps(PROMPT)}, options)) {{
            found.push(text);
            if (found.length === 3) controller.abort();
        }}
        return [found.join(""), model.last.finishReason];
    """)
    assert stopped == [whole[: len(stopped[0])], "abort"]
    left = page.call(f"""
        for await (const text of models.portable.complete({json.dumps(PROMPT)}, {{ max_tokens: 200 }})) break;
        return models.portable.last.finishReason;
    """)
    assert left == "abort"
    assert page.complete(PROMPT, "{max_tokens: 20}", SHARED)["text"] == whole
    page.check()


def test_a_second_call_waits_for_the_first(loaded: Callable[[str], Page], native: LanguageModel) -> None:
    page = loaded(SHARED)
    both = page.call(f"""
        const ask = async (prompt) => {{
            let all = "";
            for await (const text of models.portable.complete(prompt, {{ max_tokens: 5 }})) all += text;
            return all;
        }};
        return Promise.all([ask({json.dumps(PROMPT)}), ask("an other")]);
    """)
    assert both == [str(native.generate(prompt, max_tokens=5)) for prompt in (PROMPT, "an other")]


def test_a_call_that_is_stopped_while_it_waits_leaves_the_other_alone(loaded: Callable[[str], Page]) -> None:
    page = loaded(SHARED)
    found = page.call(f"""
        const controller = new AbortController(), model = models.portable, parts = [];
        let waiting = null;
        for await (const text of model.complete({json.dumps(PROMPT)}, {{ max_tokens: 12, ignore_eos: true }})) {{
            waiting ??= model.complete("an other", {{ signal: controller.signal }}).next();
            if (parts.push(text) === 3) controller.abort();
        }}
        return [await waiting, model.last.completionTokens, model.last.finishReason];
    """)
    assert found == [{"done": True}, 12, "length"]
    page.check()


def test_what_is_asked_is_checked(loaded: Callable[[str], Page]) -> None:
    page = loaded(SHARED)
    calls = {
        "complete('')": "empty",
        "complete(5)": "string",
        "complete('a\\ud800')": "surrogate",
        "complete([1, 1e6])": "token ids",
        "complete('a', {temprature: 1})": "unknown option temprature",
        "complete('a', {temperature: -1})": "temperature must be",
        "complete('a', {seed: 1.5})": "seed must be",
        "complete('a', {logit_bias: {300000: 1}})": "logit_bias must have",
        "chat([])": "at least one message",
        "chat([{role: 'poet', content: ''}])": "a role of",
        "chat([{role: 'user', content: 5}])": "a content that is a string",
    }
    for call, words in calls.items():
        found = page.caught(f"models.portable.{call}.next()")
        assert found["code"] == "input"
        assert words in found["message"]


def test_the_types_are_those_of_the_module(loaded: Callable[[str], Page]) -> None:
    page, types = loaded(SHARED), (ASSETS / "shaderlm.d.ts").read_text(encoding="utf-8")
    declared = re.findall(r"^export (?:function|class) (\w+)", types, re.M)
    assert page.call("return Object.keys(shaderlm).sort()") == sorted(declared)

    def members(name: str) -> set[str]:
        body = re.search(rf"^export interface {name} {{\n(.*?)^}}", types, re.M | re.S)
        assert body is not None
        return set(re.findall(r"^  (?:readonly )?(\w+)\??[:(]", body[1], re.M))

    own = page.call("""
        const model = models.portable;
        return [...Object.getOwnPropertyNames(Object.getPrototypeOf(model)), ...Object.keys(model)];
    """)
    assert set(own) - {"constructor"} == members("Model")
    assert set(page.call("return Object.keys(models.portable.info)")) == members("ModelInfo")
    page.complete(PROMPT, "{max_tokens: 1}", SHARED)
    assert set(page.call("return Object.keys(models.portable.last)")) == members("AnswerInfo")
    options = page.caught("models.portable.complete('a', {x: 1}).next()")["message"].split("The options are ")[1]
    assert set(options.split(", ")) == members("GenerationOptions")
    options = page.caught("shaderlm.load('/model/', {x: 1})")["message"].split("The options are ")[1]
    assert set(options.split(", ")) == members("LoadOptions")
    script = (ASSETS / "shaderlm.js").read_text(encoding="utf-8")
    codes = set(re.findall(r'ShaderlmError\(\s*"([\w-]+)"', script))
    assert codes == set(re.findall(r'^  \| "([\w-]+)"', types, re.M))


@pytest.mark.long  # a real clock
def test_what_a_thread_spends_on_a_token(
    page: Page, server: WebServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many layers as SmolLM2 has. Software computes on the same cores: only the faster steps tell what it takes."""
    export_file(write_tiny_llama(tmp_path / "deep.gguf", kind="q8_0", layers=30), tmp_path / "deep")
    server.folders["deep"] = [tmp_path / "deep"]
    page.call('await state.open("deep", {variant: "software", cache: "none"}, "/deep/")')
    steps = page.call("""
        const times = [];
        let before = 0;
        for await (const text of models.deep.complete("the an", {max_tokens: 30, ignore_eos: true})) {
            times.push(models.deep.last.hostSeconds - before);
            before = models.deep.last.hostSeconds;
        }
        models.deep.close();
        return times.slice(5).sort((a, b) => a - b);
    """)
    content = server.content("/deep/plan.json")
    assert content is not None
    plan = next(each for each in json.loads(content)["variants"] if each["name"] == FAST)
    dispatches = len(plan["bodies"][0]["dispatches"]) + len(plan["heads"][0]["dispatches"])
    fast, median = 1e3 * steps[len(steps) // 10], 1e3 * steps[len(steps) // 2]
    with capsys.disabled():
        print(
            f"\n{dispatches} dispatches take {fast:.3f} ms of the page's thread at best, {median:.3f} ms in the median"
        )
    assert fast < 1.0


def test_a_model_with_states(page: Page, server: WebServer, tmp_path: Path) -> None:
    """A prompt begins where the states stand, or their copy after the last prompt, or anew: texts are Python's."""
    path = write_gguf(tmp_path / "states.gguf", recorded("lfm2"))
    export_file(path, tmp_path / "states")
    server.folders["states"] = [tmp_path / "states"]
    page.call('await state.open("states", {variant: "software", cache: "none"}, "/states/")')
    first, longer, other = "the answer is", "the answer is an other word", "an end"
    with shaderlm.load(path, device="numpy") as native:
        wanted = {
            text: native.generate(text, max_tokens=6, ignore_eos=True, temperature=0) for text in (first, longer, other)
        }
        tokens = {text: len(native.tokenize(text)) for text in wanted}
    for text, cached in ((first, 0), (longer, tokens[first]), (other, None), (longer, None), (first, 0)):
        options = "{max_tokens: 6, ignore_eos: true, temperature: 0}"
        found = page.call(f"""
            let all = "";
            for await (const text of models.states.complete({json.dumps(text)}, {options})) all += text;
            return [all, models.states.last.cachedTokens];
        """)
        assert found[0] == str(wanted[text]), text
        if cached is not None:
            assert found[1] == cached, text
    page.call("models.states.close()")


def test_in_a_worker(page: Page, native: LanguageModel) -> None:
    expected = str(native.generate(PROMPT, max_tokens=4))
    code = f"""
        import {{ load }} from "{page.server.address}/model/shaderlm.js";
        const model = await load("{page.server.address}/model/", {{ variant: "software" }});
        let all = "";
        for await (const text of model.complete({json.dumps(PROMPT)}, {{ max_tokens: 4 }})) all += text;
        model.close();
        postMessage(all);
    """
    found = page.call(f"""
        const url = URL.createObjectURL(new Blob([{json.dumps(code)}], {{ type: "text/javascript" }}));
        const worker = new Worker(url, {{ type: "module" }});
        return new Promise((done, failed) => {{
            worker.onmessage = (event) => done(event.data);
            worker.onerror = (event) => failed(new Error(event.message));
        }}).finally(() => worker.terminate());
    """)
    assert found == expected


# Files -----------------------------------------------------------------------------------------------------------


def test_the_page_table_has_every_page_of_the_context(fresh: Page) -> None:
    """A wrong last page changes few keys of many: tokens of a tiny model stay the same."""
    fresh.without_kernels().call("""
        const write = GPUQueue.prototype.writeBuffer;
        window.written = [];
        GPUQueue.prototype.writeBuffer = function (buffer, at, words, ...rest) {
            if (words instanceof Uint32Array) written.push([...words]);
            return write.call(this, buffer, at, words, ...rest);
        };
    """)
    fresh.load(variant=FAST)
    written = fresh.call("return written")
    fresh.open()
    assert list(range(1024 // 128)) in written


def test_a_second_visit_asks_for_no_weights(fresh: Page) -> None:
    assert fresh.call('return shaderlm.cached("/model/")') is False
    assert fresh.without_kernels().load(variant=FAST)["cached"] == "cache"
    assert (fresh.server.asked("weights-"), fresh.server.asked("tokenizer.json")) == (1, 1)
    fresh.browser.open("about:blank")
    fresh.open()
    assert fresh.call('return shaderlm.cached("/model/")') is True
    assert fresh.without_kernels().load(variant=FAST)["cached"] == "cache"
    asked = [fresh.server.asked(name) for name in ("weights-", "tokenizer.json", "chat_template")]
    assert asked == [0, 0, 0]
    weights = fresh.call("return state.progress.filter((each) => each.stage === 'weights').at(-1)")
    assert weights["done"] == weights["total"] > 0


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [("missing", "fetch", "404"), ("damaged", "damaged", "SHA-256"), ("cut", "fetch", "check the connection")],
)
def test_a_faulty_file(fault: Any, code: str, words: str, fresh: Page) -> None:
    fresh.without_kernels()
    fresh.server.faults[WEIGHTS] = fault
    found = fresh.caught('state.open("tiny", {variant: "software"})')
    assert (found["code"], "weights-000.bin" in found["message"]) == (code, True)
    assert words in found["message"]
    hashes = [file["sha256"] for file in _files(fresh) if "weights" in file["name"]]
    assert not any(sha256 in key for key in fresh.call("return state.kept()") for sha256 in hashes)
    del fresh.server.faults[WEIGHTS]
    assert fresh.load(variant=FAST)["cached"] == "cache"


def _files(page: Page) -> list[dict[str, Any]]:
    content = page.server.content("/model/plan.json")
    assert content is not None
    files: list[dict[str, Any]] = json.loads(content)["files"]
    return files


@pytest.mark.parametrize("change", ["bytes[100] ^= 1", with_all("bytes = bytes.slice(0, 1000)")])
def test_a_damaged_cache_is_mended(change: str, fresh: Page, native: LanguageModel) -> None:
    fresh.without_kernels().load(variant=FAST)
    fresh.call(f"""
        const cache = await caches.open("shaderlm");
        for (const request of await cache.keys()) {{
            let bytes = new Uint8Array(await (await cache.match(request)).arrayBuffer());
            if (request.url.includes("/index/") || bytes.length < 2000) continue;
            {change};
            await cache.put(request, new Response(bytes));
        }}
    """)
    fresh.open()
    assert fresh.load(variant=FAST)["cached"] == "cache"
    assert fresh.server.asked("weights-") == 1
    assert fresh.complete(PROMPT, "{max_tokens: 3}")["ids"] == native.generate(PROMPT, max_tokens=3).ids
    fresh.open()
    fresh.without_kernels().load(variant=FAST)
    assert fresh.server.asked("weights-") == 0


def test_what_an_export_no_longer_has_is_forgotten(fresh: Page) -> None:
    fresh.without_kernels().load(variant=FAST)
    before = fresh.call("return state.kept()")
    content = fresh.server.content("/model/plan.json")
    assert content is not None
    plan = json.loads(content)
    other = b" " + (fresh.server.content("/model/chat_template.json") or b"")
    old = next(file for file in plan["files"] if file["name"] == "chat_template.json")
    gone = old["sha256"]
    old |= {"bytes": len(other), "sha256": hashlib.sha256(other).hexdigest()}
    fresh.server.pages |= {"/model/plan.json": json.dumps(plan).encode(), "/model/chat_template.json": other}
    try:
        fresh.open()
        fresh.without_kernels().load(variant=FAST)
    finally:
        for name in ("plan.json", "chat_template.json"):
            del fresh.server.pages[f"/model/{name}"]
    after = fresh.call("return state.kept()")
    assert set(before) - set(after) == {f"/.shaderlm/{gone}"}


@pytest.mark.parametrize("size", [with_all(1), 20_000])  # nothing can be kept; the tokenizer can, weights cannot
def test_a_full_quota(size: int, fresh: Page) -> None:
    fresh.browser.call("Storage.overrideQuotaForOrigin", origin=fresh.server.address, quotaSize=size)
    try:
        info = fresh.without_kernels().load(variant=FAST)
        assert info["cached"] == "memory"
        assert any("storage for this page is full" in warning for warning in info["warnings"])
        said = fresh.call("return state.progress.map((each) => each.message).filter(Boolean)")
        assert said == info["warnings"]
        fresh.check()
    finally:
        fresh.browser.call("Storage.overrideQuotaForOrigin", origin=fresh.server.address)


def test_a_storage_that_holds_one_version_and_not_two(fresh: Page) -> None:
    """What the folder had before goes when there is no other way."""
    size = sum(file["bytes"] for file in _files(fresh))
    fresh.call(f"""
        const cache = await caches.open("shaderlm"), folder = new URL("/model/", location.href).href;
        await cache.put("/.shaderlm/0ld", new Response(new Uint8Array({size})));
        await cache.put(`/.shaderlm/index/${{encodeURIComponent(folder)}}`, new Response('["0ld"]'));
    """)
    # A browser may still count files of the tests before, which are deleted.
    used = fresh.call("return (await navigator.storage.estimate()).usage")
    quota = used + size * 3 // 4
    fresh.browser.call("Storage.overrideQuotaForOrigin", origin=fresh.server.address, quotaSize=quota)
    try:
        info = fresh.load(variant=FAST)
    finally:
        fresh.browser.call("Storage.overrideQuotaForOrigin", origin=fresh.server.address)
    assert (info["cached"], info["warnings"]) == ("cache", [])
    assert "/.shaderlm/0ld" not in fresh.call("return state.kept()")
    fresh.check()


def test_no_cache_is_used_where_none_is_wanted(fresh: Page) -> None:
    info = fresh.without_kernels().load(variant=FAST, cache="none")
    assert (info["cached"], info["warnings"]) == ("memory", [])
    assert fresh.call("return state.kept()") == []


@pytest.mark.parametrize("stage", ["plan", "weights", "compile"])
def test_loading_can_be_aborted(stage: str, fresh: Page) -> None:
    fresh.without_kernels()
    found = fresh.caught(f"""(() => {{
        const controller = new AbortController();
        const onProgress = (progress) => progress.stage === "{stage}" && controller.abort();
        return shaderlm.load("/model/", {{ variant: "software", signal: controller.signal, onProgress }});
    }})()""")
    assert found["code"] == "aborted"
    assert fresh.load(variant=FAST)["cached"] == "cache"


def test_navigating_away_and_back(fresh: Page, native: LanguageModel) -> None:
    fresh.call('window.loading = state.open("tiny", {variant: "software"}).catch(() => {}); ')
    fresh.browser.open("about:blank")  # while it is loading
    fresh.open()
    fresh.without_kernels().load(variant=FAST)
    fresh.call(f"models.tiny.complete({json.dumps(PROMPT)}, {{ max_tokens: 500 }}).next()")
    fresh.browser.open("about:blank")  # while it answers
    fresh.open()
    fresh.load(variant=FAST)
    assert fresh.server.asked("weights-") == 0
    assert fresh.complete(PROMPT, "{max_tokens: 3}")["ids"] == native.generate(PROMPT, max_tokens=3).ids


def test_two_tabs_at_once(fresh: Page) -> None:
    found = fresh.call(f"""
        const other = window.open("/page.html");
        while (!other.state) await new Promise((done) => setTimeout(done, 20));
        for (const each of [window, other]) ({WITHOUT_KERNELS})(each);
        const ask = async (its) => {{
            await its.open("tiny", {{ variant: "software" }});
            return its.answer(its.models.tiny.complete({json.dumps(PROMPT)}, {{ max_tokens: 3 }}), its.models.tiny);
        }};
        const both = await Promise.all([ask(state), ask(other.state)]);
        const left = other.state.rejections;
        other.close();
        return [both.map((each) => each.ids.length), left];
    """)
    assert found == [[3, 3], []]
    fresh.check()


# Devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [with_all(0), 1000])
def test_a_device_lost_in_mid_answer(delay: int, fresh: Page) -> None:
    # Under load, calls fail on the device long before the browser says that it is lost.
    fresh.call(f"state.lossDelay = {delay}")
    fresh.load(variant=FAST)
    found = fresh.caught(f"""(async () => {{
        for await (const text of models.tiny.complete({json.dumps(PROMPT)}, {{ max_tokens: 500 }})) {{
            state.devices.at(-1).destroy();
        }}
    }})()""")
    assert found["code"] == "device-lost"
    assert "Load the model again" in found["message"]
    assert fresh.caught("models.tiny.complete('a').next()")["code"] == "device-lost"
    assert fresh.call("return (await models.tiny.lost).code") == "device-lost"
    fresh.without_kernels().load(variant=FAST)
    assert fresh.complete(PROMPT, "{max_tokens: 2}")["completionTokens"] == 2


def test_a_closed_model(fresh: Page) -> None:
    fresh.without_kernels().load(variant=FAST)
    found = fresh.caught(f"""(async () => {{
        for await (const text of models.tiny.complete({json.dumps(PROMPT)}, {{ max_tokens: 500 }})) models.tiny.close();
    }})()""")
    assert found["code"] == "closed"
    assert fresh.caught("models.tiny.chat([{role: 'user', content: 'a'}]).next()")["code"] == "closed"


def test_too_little_memory(fresh: Page) -> None:
    found = fresh.caught("""(() => {
        const pop = GPUDevice.prototype.popErrorScope;
        GPUDevice.prototype.popErrorScope = async function () {
            await pop.apply(this);
            return new GPUOutOfMemoryError("as if");
        };
        return state.open("tiny", {variant: "software"}).finally(() => (GPUDevice.prototype.popErrorScope = pop));
    })()""")
    assert found["code"] == "out-of-memory"
    assert "MB of GPU memory" in found["message"]


def test_what_a_browser_may_lack(fresh: Page) -> None:
    """It is taken away one by one; then the page is opened anew."""
    nothing = "{ requestAdapter: async () => null }"
    assert fresh.caught(f'shaderlm.load("/model/", {{ gpu: {nothing} }})')["code"] == "no-adapter"
    found = fresh.caught('shaderlm.load("/model/", { variant: "best" })')
    assert found["code"] == "input"
    assert "portable" in found["message"]
    found = fresh.caught('shaderlm.load("/model/", { variant: "matrix" })')
    assert found["code"] == "no-variant"
    assert "matrix: it lacks the feature" in found["message"]
    several = """{
        requestAdapter: async () => ({
            features: { has: () => true }, limits: new Proxy({}, { get: () => Infinity }),
            info: { subgroupMinSize: 8, subgroupMaxSize: 32 },
        }),
        wgslLanguageFeatures: { has: () => true },
    }"""
    found = fresh.caught(f'shaderlm.load("/model/", {{ variant: "matrix", gpu: {several} }})')
    assert "matrix: its subgroups have 8 to 32 threads, not 32" in found["message"]
    assert fresh.caught('shaderlm.load("/nothing/")')["code"] == "fetch"
    assert fresh.caught('shaderlm.load("/model/", { cash: "none" })')["code"] == "input"
    fresh.call('Object.defineProperty(navigator, "gpu", { value: undefined, configurable: true })')
    assert fresh.caught('shaderlm.load("/model/")')["code"] == "no-webgpu"
    fresh.call('Object.defineProperty(window, "isSecureContext", { value: false, configurable: true })')
    assert fresh.caught('shaderlm.load("/model/")')["code"] == "insecure"
    fresh.open()


def test_the_best_variant_is_taken(fresh: Page) -> None:
    """Of an adapter in software, the one that is made for it; and none with subgroups whose lanes are not in order."""
    assert fresh.without_kernels().load()["variant"] == FAST
    content = fresh.server.content("/model/plan.json")
    assert content is not None
    plan = json.loads(content)
    probe = plan["shaders"][plan["probes"][-1][0]]
    assert "(lane, size)" in probe["wgsl"]
    probe["wgsl"] = probe["wgsl"].replace("(lane, size)", "(size - 1u - lane, size)")
    fresh.server.pages["/model/plan.json"] = json.dumps(plan).encode()
    try:
        info = fresh.load()
        found = fresh.caught('shaderlm.load("/model/", { variant: "subgroups" })')
    finally:
        del fresh.server.pages["/model/plan.json"]
    assert info["variant"] == "portable"
    assert len(info["warnings"]) == sum("subgroups" in each["features"] for each in plan["variants"] if _fits(each))
    assert all("not in order" in warning for warning in info["warnings"])
    assert found["code"] == "no-variant"


def test_a_shader_that_is_refused_leads_to_the_next_variant(fresh: Page, native: LanguageModel) -> None:
    content = fresh.server.content("/model/plan.json")
    assert content is not None
    plan = json.loads(content)
    used = {
        variant["name"]: {row[0] for part in (*variant["bodies"], *variant["heads"]) for row in part["dispatches"]}
        for variant in plan["variants"]
    }
    first = next(each for each in plan["variants"] if each["name"] == FAST)["bodies"][0]
    others = set().union(*(hashes for name, hashes in used.items() if name != FAST))
    own = next(row[0] for row in first["dispatches"] if row[0] not in others)
    plan["shaders"][own]["wgsl"] += "fn main() {}"
    fresh.server.pages["/model/plan.json"] = json.dumps(plan).encode()
    try:
        info = fresh.load()
        found = fresh.caught(f'shaderlm.load("/model/", {{ variant: "{FAST}" }})')
    finally:
        del fresh.server.pages["/model/plan.json"]
    assert info["variant"] == "subgroups"
    assert [f"cannot compile shader {own}" in warning for warning in info["warnings"]] == [True]
    assert fresh.complete(PROMPT, "{max_tokens: 2}")["ids"] == native.generate(PROMPT, max_tokens=2).ids
    assert found["code"] == "internal"
    fresh.check()


def _fits(variant: dict[str, Any]) -> bool:
    """Does Chromium's adapter in software have what this variant needs?"""
    return variant["limits"]["maxComputeInvocationsPerWorkgroup"] <= 256 and "shader-f16" not in variant["features"]


# Progress ------------------------------------------------------------------------------------------------------------


# No shader is compiled while the gate is closed.
GATE = """({ GPUDevice }) => {
    const make = GPUDevice.prototype.createComputePipelineAsync;
    window.gate = { promise: Promise.resolve(), open: () => {}, close() {
        this.promise = new Promise((open) => Object.assign(this, { open }));
    } };
    GPUDevice.prototype.createComputePipelineAsync = async function (given) {
        await window.gate.promise;
        return make.call(this, given);
    };
}"""
PROGRESS = """
    const told = [];
    const onProgress = (progress) => told.push(progress);
    const ask = async (prompt, options) => {
        told.length = 0;
        const all = { max_tokens: 2, ignore_eos: true, onProgress, ...options };
        for await (const _ of models.tiny.complete(prompt, all));
        return told.map(({ stage }) => stage).filter((stage, i, stages) => stage !== stages[i - 1]);
    };
    const question = Array.from({ length: 60 }, (_, i) => i);
"""


def test_a_first_question_waits_for_no_shader(fresh: Page) -> None:
    """What it needs is compiled while the weights come, and counted. Whatever else is missing is told as it comes."""
    fresh.without_kernels().call(f"({GATE})(window)")
    found = fresh.call("""
        const shaders = [];
        const onProgress = ({ stage, done, total }) => {
            if (stage === "compile") shaders.push(done);
            if (stage === "compile" && done === total) window.gate.close();
        };
        models.tiny = await shaderlm.load("/model/", { variant: "software", onProgress });
        return shaders;
    """)
    assert found == list(range(1, len(found) + 1))
    found = fresh.call(f"{PROGRESS} return [await ask(question, {{ temperature: 0.8 }}), await ask(question, {{}})];")
    assert found == [["prompt"], ["prompt"]]
    found = fresh.call(f"""{PROGRESS}
        const penalised = ask(question, {{ presence_penalty: 1 }});
        await new Promise((done) => setTimeout(done, 100));
        const isWaiting = told.every(({{ stage, done, total }}) => stage === "compile" && done < total);
        window.gate.open();
        return [isWaiting, await penalised, told.filter(({{ stage }}) => stage === "compile").at(-1)];
    """)
    assert found[:2] == [True, ["compile", "prompt"]]
    assert found[2]["done"] == found[2]["total"] > 1
    fresh.check()


def test_an_answer_can_be_stopped_while_shaders_compile(fresh: Page) -> None:
    fresh.without_kernels().call(f"({GATE})(window)")
    found = fresh.call("""
        const onProgress = ({ stage, done, total }) => stage === "compile" && done === total && window.gate.close();
        models.tiny = await shaderlm.load("/model/", { variant: "software", onProgress });
        const controller = new AbortController(), options = { presence_penalty: 1, signal: controller.signal };
        const answer = models.tiny.complete("an other", options).next();
        setTimeout(() => controller.abort(), 50);
        const { done } = await answer;
        const reason = models.tiny.last.finishReason;
        window.gate.open();
        let text = 0;
        for await (const _ of models.tiny.complete("an other", { max_tokens: 2, ignore_eos: true })) text++;
        return [done, reason, models.tiny.last.completionTokens];
    """)
    assert found == [True, "abort", 2]
    fresh.check()


def test_what_a_prompt_is_read_in_is_told(fresh: Page) -> None:
    """Chunk by chunk; what is in the cache counts as read."""
    fresh.without_kernels().load(variant=FAST)
    found = fresh.call(f"""{PROGRESS}
        const ids = Array.from({{ length: 700 }}, (_, i) => i % 200);
        await ask(ids);
        const first = told.filter(({{ stage }}) => stage === "prompt");
        await ask([...ids, 1, 2]);
        return [first, told.filter(({{ stage }}) => stage === "prompt")];
    """)
    assert found[0] == [{"stage": "prompt", "done": done, "total": 700} for done in range(0, 700, 128)]
    assert found[1] == [{"stage": "prompt", "done": 700, "total": 702}]


# Text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VOCABULARIES)
def test_token_ids_are_those_of_python(name: str, page: Page) -> None:
    words = tokenizer_of(name)
    special = next(iter(words.special_tokens))
    texts = [
        *(text for text, _ in recorded_texts(name)),
        f"a {special} b{special}",
        special,
        "",
        " ",
        "▁",
        "\u00a0 \ufeff",
    ]
    about = json.dumps(text_entry(words, None))
    page.server.pages["/inside/tokenizer.json"] = tokenizer_json(words).encode()
    found = page.call(f"""
        const {{ Text }} = await import("/inside/inside.js");
        const tokenizer = await (await fetch("/inside/tokenizer.json", {{ cache: "no-store" }})).json();
        const text = new Text({{ ...{about}, add_bos: false }}, tokenizer, null);
        window.text = text;
        return {json.dumps(texts)}.map((each) => {{
            const [ids, plain] = [true, false].map((parseSpecial) => text.encode(each, {{ parseSpecial }}));
            return [ids, plain, text.decode(ids)];
        }});
    """)
    for text, (ids, plain, decoded) in zip(texts, found, strict=True):
        assert ids == words.encode(text), repr(text)
        assert plain == words.encode(text, parse_special=False), repr(text)
        assert decoded == words.decode(ids, skip_special=True), repr(text)


def test_every_split_gives_the_ids_of_python(page: Page) -> None:
    texts = [
        "Hello, it's 12345 o'clock: 3.14 or 1,000,000!  Two  spaces\n\n\ttab HTTPServer don'T I'LL we've",
        "Fünf Äpfel für 5€ — naïve café №7 Ⅷ ½ ²",
        "你好,世界!今天是2024年。こんにちは 日本語 カタカナ 한국어 텍스트",
        "नमस्ते दुनिया। السلام عليكم، مرحبا؟ שלום",
        "😀👍🏽 👩‍👩‍👧 a\u0301b e\u0301\u200d \u00a0\u2003x \ufeff\u200b y",
        "if (x[i] >= 0 && y != 1) { return `${a}`; } // <|im_end|> #tag @me $5 ^~|",
        "   leading\r\n\r\nlines \n \n end   ",
    ]
    tokenizers = {name: Tokenizer(replace(small_vocabulary(), pre=name)) for name in BY_SPLIT.values()}
    files = {name: json.loads(tokenizer_json(each)) for name, each in tokenizers.items()}
    about = json.dumps({**text_entry(tokenizers["qwen35"], None), "add_bos": False})
    page.server.pages["/inside/tokenizers.json"] = json.dumps(files).encode()
    found = page.call(f"""
        const {{ Text }} = await import("/inside/inside.js");
        const files = await (await fetch("/inside/tokenizers.json", {{ cache: "no-store" }})).json();
        const ids = ([name, file]) => {{
            const text = new Text({about}, file, null);
            return [name, {json.dumps(texts)}.map((each) => text.encode(each))];
        }};
        return Object.fromEntries(Object.entries(files).map(ids));
    """)
    expected = {name: [each.encode(text) for text in texts] for name, each in tokenizers.items()}
    assert {name for name in expected if found[name] != expected[name]} == set()


def test_a_word_that_is_too_long_is_refused(page: Page) -> None:
    """Where the regular expressions of the browser have no stack left."""
    name = BY_SPLIT[SPLITS["llama-bpe"]]
    tokenizer = Tokenizer(replace(small_vocabulary(), pre=name))
    page.server.pages["/inside/tokenizer.json"] = tokenizer_json(tokenizer).encode()
    found = page.call(f"""
        const {{ Text }} = await import("/inside/inside.js");
        const file = await (await fetch("/inside/tokenizer.json", {{ cache: "no-store" }})).json();
        const text = new Text({json.dumps(text_entry(tokenizer, None))}, file, null);
        try {{
            text.encode("\u4e2d".repeat(8e6));
        }} catch (problem) {{
            return [problem.name, problem.code, problem.message];
        }}
    """)
    assert found[:2] == ["ShaderlmError", "input"]
    assert "a word of millions of characters" in found[2]


def test_special_tokens_in_messages_are_text(page: Page) -> None:
    """Also where a message is nothing else, and lies between two special tokens."""
    words = tokenizer_of("phi-3")
    end = "<|end|>"
    about = json.dumps(text_entry(words, None))
    page.server.pages["/inside/tokenizer.json"] = tokenizer_json(words).encode()
    template = compile_template("{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}").decode()
    found = page.call(f"""
        const {{ Text }} = await import("/inside/inside.js");
        const tokenizer = await (await fetch("/inside/tokenizer.json", {{ cache: "no-store" }})).json();
        const text = new Text({{ ...{about}, add_bos: false }}, tokenizer, {template});
        const encode = (content) => text.encodeChat([{{ role: "user", content }}], {{}}, false);
        return ["{end}", "a {end} b", "hello"].map(encode);
    """)
    mark = "\U000f0000"
    for content, ids in zip([end, f"a {end} b", "hello"], found, strict=True):
        marked = content.replace(end, end[0] + mark + end[1:])
        assert ids == words.encode_marked(f"<|user|>{marked}<|end|>", mark)
        assert ids.count(words.special_tokens[end]) == 1


def test_what_a_template_does_not_render(page: Page) -> None:
    """What it says of a conversation, what it does wrong, and one that this script cannot read."""
    words = tokenizer_of("phi-3")
    page.server.pages["/inside/tokenizer.json"] = tokenizer_json(words).encode()
    about = json.dumps(text_entry(words, None))
    templates = [compile_template(each).decode() for each in ("{{ raise_exception('no\n!') }}", "{{ 1 / 0 }}")]
    found = page.call(f"""
        const {{ Text }} = await import("/inside/inside.js");
        const tokenizer = await (await fetch("/inside/tokenizer.json", {{ cache: "no-store" }})).json();
        return [{", ".join(templates)}, [["nonsense"]]].map((template) => {{
            try {{
                new Text({about}, tokenizer, template).encodeChat({json.dumps(TALK)}, {{}}, false);
            }} catch (problem) {{
                return [problem.code, problem.message];
            }}
        }});
    """)
    prefix = "the chat template of this model"
    assert found[0] == ["input", f"{prefix} refuses this conversation: no !"]
    assert found[1] == ["input", f"{prefix} fails: division by zero"]
    assert found[2][0] == "damaged"
    assert "the export has nonsense, which its template.js does not know" in found[2][1]


def test_text_is_whole_characters(page: Page) -> None:
    found = page.call("""
        const { TextStream } = await import("/inside/inside.js");
        const bytes = [...new TextEncoder().encode("a\\ufeff€ END of 😀"), 0xf0, 0x9f];
        const text = { bytesOf: (id) => Uint8Array.of(id) };
        const pieces = (stop) => {
            const stream = new TextStream(text, stop);
            const found = [];
            for (const byte of bytes) if (!stream.stopped) found.push(stream.push(byte));
            return [...found, stream.finish()].filter(Boolean);
        };
        return [pieces([]), pieces(["END of", "never"]), pieces(["😀!"])];
    """)
    assert found[0] == list("a\ufeff€ END of 😀")
    assert "".join(found[1]) == "a\ufeff€ "
    assert "".join(found[2]) == "a\ufeff€ END of 😀"


# A whole model -----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_answers_of_smollm2(variant: str, page: Page, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A software adapter takes eight seconds and more for a token of plans that are made for GPUs: 25 minutes each."""
    folder = tmp_path_factory.getbasetemp() / "smollm2 web"
    if not folder.exists():
        export_file(None, folder)
    page.server.folders["smollm2"] = [folder]
    page.call(f'await state.open("smollm2", {{variant: "{variant}", cache: "none"}}, "/smollm2/")')
    for entry in RECORDED:
        talk = json.dumps([{"role": "user", "content": entry["prompt"]}])
        asked = f"chat({talk}" if entry["chat"] else f"complete({json.dumps(entry['prompt'])}"
        ids = entry["greedy_ids"]
        code = f"return (await state.answer(models.smollm2.{asked}, {{max_tokens: {len(ids)}}}), models.smollm2)).ids"
        assert page.call(code, patience=3600) == ids, entry["prompt"]
    page.call("models.smollm2.close()")
