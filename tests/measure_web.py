"""Times of an export in headless Chromium: what a visitor waits for, and what a token costs the page's thread.

    python -m tests.measure_web [--model MODEL] [--variant NAME] [--tokens N] [--gpu]

Run it on a machine that does nothing else. Headless Chromium takes a software adapter on Linux, unless --gpu is given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from shaderlm.web.export import export
from shaderlm.web.model import opened

from .browser import WEBGPU, Browser
from .web_serving import WebServer, serving

PAGE = (Path(__file__).parent / "web" / "runtime.html").read_bytes()
PATIENCE = 600.0
WARM_UP, ROUNDS = 64, 5
VULKAN = (
    "--use-angle=vulkan", "--enable-features=Vulkan", "--use-vulkan=native", "--disable-vulkan-surface",
    "--ignore-gpu-blocklist",
)  # fmt: skip
ASK = """
    const model = state.models[name];
    for await (const text of model.chat([{role: "user", content: "What is gravity?"}], {max_tokens: 1})) break;
    return { loaded, first: performance.now(), tokens: model.last.promptTokens };
"""
# A second model on the device of the first takes its pipelines: the same text is not compiled twice. `state.compiled`
# waits for those that are compiled in the background, one after the other.
SHARE = """
    const made = new Map();
    state.compiled = async () => {
        for (let before = -1; before < made.size; ) {
            before = made.size;
            await Promise.all(made.values());
            await new Promise((done) => setTimeout(done, 500));
        }
    };
    const texts = new WeakMap();
    const { createShaderModule, createComputePipelineAsync } = GPUDevice.prototype;
    GPUDevice.prototype.createShaderModule = function (descriptor) {
        const module = createShaderModule.call(this, descriptor);
        texts.set(module, descriptor.code);
        return module;
    };
    GPUDevice.prototype.createComputePipelineAsync = function (descriptor) {
        const text = texts.get(descriptor.compute.module);
        if (!made.has(text)) made.set(text, createComputePipelineAsync.call(this, descriptor));
        return made.get(text);
    };
    const { requestDevice } = GPUAdapter.prototype;
    let device = null;
    GPUAdapter.prototype.requestDevice = async function (...given) {
        return (device ??= await requestDevice.apply(this, given));
    };
"""


class Measured:
    """A page in a Chromium whose models are loaded from one export."""

    def __init__(self, browser: Browser, server: WebServer, options: str) -> None:
        self.browser, self.server, self.options = browser, server, options

    def call(self, code: str) -> Any:
        """The value of an async function's body."""
        how = {"expression": f"(async () => {{ {code} }})()", "returnByValue": True, "awaitPromise": True}
        answer = self.browser.call("Runtime.evaluate", patience=PATIENCE, **how)
        if "exceptionDetails" in answer:
            raise SystemExit(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def open(self) -> None:
        """A new visit."""
        self.server.requests.clear()
        self.browser.open(f"{self.server.address}/page.html")
        self.browser.until("window.state")

    def load_and_ask(self, name: str) -> dict[str, float]:
        """Milliseconds from the navigation on: `begin`, `loaded`, `first` token; and the prompt's `tokens`."""
        code = f'const [name, begin] = ["{name}", performance.now()]; await state.open(name, {self.options});'
        found: dict[str, float] = self.call(
            f"{code} const loaded = performance.now(); const rest = await (async () => {{ {ASK} }})(); "
            "return { begin, ...rest };"
        )
        return found

    def answer(self, tokens: int) -> int:
        """Generate so many tokens; how many there are."""
        code = """
            const { one } = state.models;
            for await (const text of one.complete("Once upon a time", {max_tokens: %d, ignore_eos: true}));
            return one.last.completionTokens;
        """
        made: int = self.call(code % tokens)
        return made

    def traced(self, tokens: int) -> list[dict[str, Any]]:
        """The tasks of JavaScript while so many tokens are generated: what follows on a token that has arrived."""
        self.browser.events.clear()
        how = {"includedCategories": ["v8.execute", "devtools.timeline"], "excludedCategories": ["*"]}
        self.browser.call("Tracing.start", transferMode="ReportEvents", traceConfig=how)
        assert self.answer(tokens) == tokens
        self.browser.call("Tracing.end")
        self.browser.wait_for("Tracing.tracingComplete")
        parts = [each["params"]["value"] for each in self.browser.events if each["method"] == "Tracing.dataCollected"]
        events = [event for part in parts for event in part]
        return [event for event in events if event["name"] == "RunMicrotasks" and event["ph"] == "X"]


def visits(page: Measured) -> None:
    """Print the times of two visits, and of a load without compilation."""
    for number in (1, 2):
        page.open()
        found = page.load_and_ask("one")
        loaded, first = found["loaded"] / 1e3, found["first"] / 1e3
        print(
            f"visit {number}: loaded after {loaded:.1f} s, first token after {first:.1f} s "
            f"(prompt: {found['tokens']} tokens); {page.server.asked('weights-')} requests of weights"
        )
    page.open()
    page.call(SHARE)
    page.load_and_ask("one")
    page.call("await state.compiled()")
    found = page.load_and_ask("two")
    begin = page.call("return performance.getEntriesByType('navigation')[0].domComplete")
    loaded, first = (found[key] - found["begin"] + begin for key in ("loaded", "first"))
    print(f"nothing to compile: loaded after {loaded / 1e3:.1f} s, first token after {first / 1e3:.1f} s")


def tokens(page: Measured, count: int) -> None:
    """Print what a token takes of the page's main thread, by traces of it."""
    page.open()
    page.call(SHARE)
    page.call(f'await state.open("one", {page.options}); await state.compiled()')
    page.answer(WARM_UP)  # JavaScript is compiled, and what loading left is collected
    spent: dict[str, list[float]] = {"CPU time": [], "wall time": []}
    speeds = []
    for _ in range(ROUNDS):
        traced = page.traced(count)
        speeds.append(page.call("return state.models.one.last.tokensPerSecond"))
        for what, key in (("CPU time", "tdur"), ("wall time", "dur")):
            spent[what].append(sum(event[key] for event in traced) / 1e3 / count)
    info = page.call("return state.models.one.info")
    print(f"a token, {info['variant']}, {info['device']}, {ROUNDS} rounds of {count}:")
    print("milliseconds of the page's thread in JavaScript and what it calls, without waiting for the GPU")
    for what, rounds in spent.items():
        print(f"  {what}: median {statistics.median(rounds):.2f}, all {', '.join(f'{each:.2f}' for each in rounds)}")
    print(f"tokens per second: median {statistics.median(speeds):.1f}, traced")


def main() -> None:
    """Export the model, and print the table."""
    parser = argparse.ArgumentParser(description="Times of an export in headless Chromium.")
    parser.add_argument("--model", help="as in `shaderlm export-web`; the embedded model if left out")
    parser.add_argument("--variant", help="of the plan; what the page takes by itself if left out")
    parser.add_argument("--tokens", type=int, default=64, help="of a round")
    parser.add_argument("--only", choices=("visits", "tokens"))
    parser.add_argument("--gpu", action="store_true", help="take a GPU, by Vulkan")
    given = parser.parse_args()
    options = json.dumps({"variant": given.variant} if given.variant else {})
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "export"
        with opened(given.model) as model:
            export(model, folder)
        with serving({"/page.html": PAGE}, {"model": [folder]}) as server:
            browser = Browser(Path(place), flags=(*WEBGPU, *VULKAN) if given.gpu else WEBGPU)
            try:
                page = Measured(browser, server, options)
                if given.only != "tokens":
                    visits(page)
                if given.only != "visits":
                    tokens(page, given.tokens)
            finally:
                browser.close()


if __name__ == "__main__":
    main()
