"""shaderlm.js in Node (`--browser`): the example of docs/web.md, run many times, and words for Node's users."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import shaderlm
from shaderlm.web.export import export
from shaderlm.web.model import opened

from . import node
from .tiny_models import write_tiny_llama

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("web node")]

ROOT = Path(__file__).parent.parent
SHADERLM_JS = ROOT / "src" / "shaderlm" / "web" / "assets" / "shaderlm.js"
RUNS = 6
# Garbage is collected whenever the script waits: what nobody holds is gone at once.
COLLECT = "setInterval(gc, 1).unref();"
COLLECTING = ("--expose-gc", "--import", "./collect.js")
QUESTION = [{"role": "user", "content": "What is gravity?"}]


def documented() -> str:
    """The example."""
    blocks = re.findall(r"^```js\n(.*?)^```", (ROOT / "docs" / "web.md").read_text(encoding="utf-8"), re.M | re.S)
    (found,) = [block for block in blocks if '"webgpu"' in block]
    return str(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the package, the example, a tiny export under its name, and the same one whose shaders are empty."""
    made = tmp_path_factory.mktemp("node")
    node.install(made)
    with opened(str(write_tiny_llama(made / "tiny.gguf", kind="f32", context=1024))) as model:
        export(model, made / "smollm2")
    (made / "example.js").write_text(documented())
    (made / "collect.js").write_text(COLLECT)
    (made / "empty").mkdir()
    for file in (made / "smollm2").iterdir():
        if file.is_file():
            (made / "empty" / file.name).write_bytes(file.read_bytes())
    plan = json.loads((made / "empty" / "plan.json").read_text(encoding="utf-8"))
    probes = {shader for shader, _ in plan["probes"]}
    for name, shader in plan["shaders"].items():
        if name not in probes:
            shader["wgsl"] = "@compute @workgroup_size(1) fn main() {}"
    (made / "empty" / "plan.json").write_text(json.dumps(plan))
    return made


@pytest.mark.long  # 35 s: SwiftShader compiles the kernels
def test_the_example_of_the_documents_gives_the_native_text(folder: Path) -> None:
    native = shaderlm.load(folder / "tiny.gguf", device="cpu")
    try:
        expected = str(native.chat(QUESTION))
    finally:
        native.close()
    ended = node.run(folder, "example.js", *COLLECTING)
    assert (ended.status, ended.out) == (0, expected), ended.err


@pytest.mark.full
def test_the_example_of_the_documents_ends_well(folder: Path) -> None:
    """What `load` was given lives as long as it is needed. Before, the process crashed or never ended in most runs."""
    (folder / "many.js").write_text(documented().replace("smollm2", "empty"))
    found = [node.run(folder, "many.js", *COLLECTING) for _ in range(RUNS)]
    assert [each.status for each in found] == [0] * RUNS, [each.err for each in found]
    assert len({each.out for each in found}) == 1
    assert found[0].out


@pytest.mark.full
def test_models_that_nobody_holds_any_more(folder: Path) -> None:
    """One is closed, another only forgotten. The GPU object serves the next one all the same."""
    (folder / "several.js").write_text("""
        import { create } from "webgpu";
        import { load } from "./empty/shaderlm.js";
        const counts = [];
        const ask = async (gpu, isClosed) => {
            const model = await load("empty", { gpu });
            for await (const _ of model.complete("the answer", { max_tokens: 3 }));
            counts.push(model.last.completionTokens);
            if (isClosed) model.close();
        };
        const two = async (gpu) => { await ask(gpu, true); await ask(gpu, false); };
        await two(create([]));
        for (let i = 0; i < 20; i++) { gc(); await new Promise((done) => setTimeout(done, 5)); }
        await two(create([]));
        console.log(counts.join());
        process.exit(0);
    """)
    ended = node.run(folder, "several.js", *COLLECTING)
    assert (ended.status, ended.out) == (0, "3,3,3,3\n"), ended.err


@pytest.mark.full
def test_the_package_without_a_driver(folder: Path) -> None:
    (folder / "driverless.js").write_text("""
        import { create } from "webgpu";
        import { load } from "./empty/shaderlm.js";
        const problem = await load("empty", { gpu: create([]) }).catch((problem) => problem);
        console.log(problem.code, problem.message);
        process.exit(0);
    """)
    ended = node.run(folder, "driverless.js", gpu=False)
    assert ended.out.startswith("no-adapter WebGPU finds no GPU on this machine. "), ended
    assert "browser" not in ended.out


@pytest.mark.parametrize(
    ("gpu", "code", "words"),
    [
        ("undefined", "no-webgpu", ["Node has no WebGPU of its own", "npm package webgpu", "create([])"]),
        ("{ requestAdapter: async () => null }", "no-adapter", ["finds no GPU on this machine", "Vulkan"]),
    ],
)
def test_words_for_node(gpu: str, code: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"type": "module"}')
    for file in SHADERLM_JS.parent.glob("*.js"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "ask.js").write_text(f"""
        import {{ load }} from "./shaderlm.js";
        const problem = await load("anywhere", {{ gpu: {gpu} }}).catch((problem) => problem);
        console.log(JSON.stringify([problem.code, problem.message]));
    """)
    found, message = json.loads(node.run(tmp_path, "ask.js", gpu=False).out)
    assert found == code
    assert all(each in message for each in words), message
    assert "browser" not in message
    assert "chrome" not in message.lower()
