"""`shaderlm serve --web DIR`: what it hosts, how, and what it does not."""

from __future__ import annotations

import hashlib
import json
import os
import re
import ssl
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from shaderlm.cli.serve import _page_address
from shaderlm.errors import InputError
from shaderlm.page import POLICY, assets, export_files, listed_files, service_worker
from shaderlm.server.web import Export

from .command_line import shaderlm, start
from .fake_exports import WEIGHTS, fake_export
from .fake_runner import FakeRunner, model_of, tiny_tokenizer
from .javascript import run_in_chromium
from .serving import Running, running

CERTIFICATES = Path(__file__).parent / "data" / "tls"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_export(tmp_path_factory.mktemp("web") / "export")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    (folder.parent / "secret.txt").write_text("secret")
    (folder / "notes.txt").write_text("not of the export")
    with running(None, web=Export(folder), keys=["k"]) as made:
        yield made


def test_the_files_of_an_export_are_hosted(server: Running, folder: Path) -> None:
    kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    kinds |= {".json": "application/json", ".bin": "application/octet-stream"}
    with server.client() as http:
        for path in (each for each in folder.rglob("*") if each.is_file() and each.name != "notes.txt"):
            found = http.get(f"/web/{path.relative_to(folder).as_posix()}")
            assert (found.status_code, found.content) == (200, path.read_bytes()), path
            assert found.headers["content-type"].startswith(kinds[path.suffix])
            assert found.headers["x-content-type-options"] == "nosniff"
            assert found.headers["cache-control"] == "no-cache"
            assert "default-src 'self'" in found.headers["content-security-policy"]
            again = http.get(f"/web/{path.relative_to(folder)}", headers={"If-None-Match": found.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert http.get("/web/").content == (folder / "index.html").read_bytes()
        for address in ("/web", "/"):
            assert (http.get(address).status_code, http.get(address).headers["location"]) == (307, "web/")
        head = http.head("/web/weights-000.bin")
        assert (head.headers["content-length"], head.content) == (str(WEIGHTS[0]), b"")


def test_ranges(server: Running, folder: Path) -> None:
    content = (folder / "weights-001.bin").read_bytes()
    with server.client() as http:

        def ranged(given: str) -> httpx.Response:
            return http.get("/web/weights-001.bin", headers={"Range": given})

        part = ranged("bytes=100-299")
        assert (part.status_code, part.content) == (206, content[100:300])
        assert part.headers["content-range"] == f"bytes 100-299/{len(content)}"
        assert ranged("bytes=-5").content == content[-5:]
        assert ranged(f"bytes={len(content)}-").status_code == 416
        assert http.get("/web/weights-001.bin").headers["accept-ranges"] == "bytes"


OUTSIDE = ["../secret.txt", "..%2fsecret.txt", "%2e%2e/secret.txt", "assets/../../secret.txt", "..%5csecret.txt"]


@pytest.mark.parametrize(
    "path", [*OUTSIDE, "/etc/passwd", "notes.txt", "assets", "assets/", "none.js", "%00", "plan.json/", ".", ".."]
)
def test_nothing_else_is_hosted(server: Running, path: str) -> None:
    client = HTTPConnection(server.url.partition("//")[2])  # which sends paths as they are
    client.request("GET", f"/web/{path}")
    found = client.getresponse()
    text = found.read().decode()
    client.close()
    assert found.status == 404, text
    assert "secret" not in text.replace("secret.txt", "")


def test_a_list_that_leads_out_of_the_folder_is_no_export(tmp_path: Path) -> None:
    """An export may come from anywhere: neither its list nor a link in it opens other files."""
    folder = fake_export(tmp_path / "export")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    for name in ("../secret.txt", "link.txt", str(tmp_path / "secret.txt")):
        (folder / "sw.js").write_bytes(service_worker({"index.html": "0" * 64, name: "0" * 64}))
        with pytest.raises(InputError, match=r"is not a whole export: .* is missing"):
            Export(folder)


def test_a_newer_export_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    folder = fake_export(tmp_path / "export", weights=(100, 100))
    with running(None, web=Export(folder)) as server, server.client() as http:
        assert http.get("/web/weights-001.bin").status_code == 200
        fake_export(folder, name="Newer", weights=(50,))
        assert http.get("/web/weights-001.bin").status_code == 404, "it is still there, but of the old one"
        assert http.get("/web/plan.json").json()["model"]["name"] == "Newer"
        (folder / "plan.json").unlink()
        gone = http.get("/web/index.html")
        assert gone.status_code == 503
        assert "being replaced" in gone.json()["error"]["message"]


def test_without_a_model_the_api_says_so(server: Running) -> None:
    with server.client(headers={"x-api-key": "k"}) as http:
        assert http.get("/health").json() == {"status": "ok"}
        for found in (http.get("/v1/models"), http.get("/props"), http.post("/v1/chat/completions", json={})):
            assert found.status_code == 501
            assert "start it with -m MODEL" in found.json()["error"]["message"]


def test_an_export_beside_a_model(folder: Path) -> None:
    from shaderlm.server.served import ServedModel

    tokenizer = tiny_tokenizer()

    def load() -> ServedModel:
        return ServedModel(model_of(FakeRunner(lambda known: 1, len(tokenizer.vocabulary.tokens)), tokenizer))

    with running(load, web=Export(folder), keys=["k"]) as server, server.client() as http:
        assert http.get("/web/plan.json").status_code == 200, "no key, like the page"
        assert http.get("/").content == assets()["index.html"]
        assert http.get("/v1/models").status_code == 401
        assert http.get("/slots", headers={"x-api-key": "k"}).status_code == 200


def test_without_web_there_is_none(folder: Path) -> None:
    with running(None) as server, server.client() as http:
        assert http.get("/web/plan.json").status_code == 404


# The command ---------------------------------------------------------------------------------------------


def test_the_command_hosts_an_export_over_https(folder: Path) -> None:
    """Without loading a model, and with its words."""
    tls = ("--ssl-cert-file", CERTIFICATES / "server.pem", "--ssl-key-file", CERTIFICATES / "server.key")
    process = start("serve", "--web", folder, "--port", 0, *tls)
    try:
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]
        assert address.startswith("https://127.0.0.1:")
        assert process.stderr.readline() == f"{address}/web/ runs Tiny Chat in browsers\n"
        context = ssl.create_default_context(cafile=str(CERTIFICATES / "server.pem"))
        found = httpx.get(f"{address}/web/plan.json", verify=context, trust_env=False)
        assert found.json()["model"]["name"] == "Tiny Chat"
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_plain_http_beyond_this_machine_is_told(folder: Path) -> None:
    with running(None, host="0.0.0.0") as other:
        port = other.url.rpartition(":")[2]
        found = shaderlm("serve", "--web", folder, "--host", "0.0.0.0", "--port", port)
    words, _, taken = found.err.partition("\n")
    assert words.startswith("shaderlm: browsers on other devices need HTTPS for WebGPU; give --ssl-cert-file")
    assert words.endswith("or /web/ runs only here")
    assert "cannot listen on 0.0.0.0" in taken


def test_the_address_of_the_page_is_one_with_webgpu() -> None:
    for same in ("https://127.0.0.1:80", "https://192.168.1.7:80", "http://127.0.0.1:80", "http://[::1]:80"):
        assert _page_address(same) == same
    assert re.fullmatch(r"https://[\d.]+:8443", _page_address("https://0.0.0.0:8443") or "")
    for unsafe in ("http://0.0.0.0:8080", "http://[::]:8080"):
        assert _page_address(unsafe) == "http://localhost:8080", "of addresses over HTTP, browsers trust this one"
    assert _page_address("http://192.168.1.7:8080") is None


def _without(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def _with(name: str, content: bytes) -> Any:
    return lambda folder: (folder / name).write_bytes(content)


def _cut(name: str) -> Any:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 8)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (_without("plan.json"), [], "is not an export: it has no plan.json of one; make it with: shaderlm export-web"),
        (_with("plan.json", b"[]"), [], "is not an export"),
        (_with("plan.json", json.dumps({"files": [{"name": 1}]}).encode()), [], "is not an export"),
        (_without("weights-001.bin"), [], "is not a whole export: weights-001.bin is missing"),
        (_with("weights-001.bin", b"cut"), [], "weights-001.bin has 3 bytes, plan.json says 1,200,000"),
        (_with("plan.json", json.dumps({"files": [{"name": "plan.json"}]}).encode()), [], "is not an export"),
        (_without("sw.js"), [], "is not a whole export: sw.js is missing"),
        (_cut("sw.js"), [], "is not a whole export: sw.js does not list the page"),
        (lambda folder: None, ["--ctx-size", 512], "--ctx-size is for a model that this server runs; give -m"),
        (lambda folder: None, ["--api-key", "k"], "--api-key is for a model"),
    ],
)
def test_mistakes(tmp_path: Path, change: Any, options: list[Any], words: str) -> None:
    folder = fake_export(tmp_path / "export")
    change(folder)
    found = shaderlm("serve", "--web", folder, "--port", 0, *options)
    assert (found.code, words in found.err) == (2, True), found.err


# The files of the page -----------------------------------------------------------------------------------


def test_one_source_for_both() -> None:
    """The page of an export differs from the server's in the word that says where answers come from."""
    made = export_files()
    assert made.keys() == {name if name == "index.html" else f"assets/{name}" for name in assets()}
    for name, content in assets().items():
        if name != "index.html":
            assert made[f"assets/{name}"] == content
    assert made["index.html"].replace(b'data-source="local"', b'data-source="server"') == assets()["index.html"]


def test_the_policy_is_the_same_without_our_server() -> None:
    """A static host sends no header. `frame-ancestors` works in a header only."""
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', assets()["index.html"].decode())
    assert found
    assert found[1] == POLICY.replace("frame-ancestors 'none'; ", "")


def test_a_service_worker_lists_its_files() -> None:
    hashes = {"index.html": "a" * 64, "assets/page.js": "b" * 64}
    first, other = service_worker(hashes), service_worker({**hashes, "index.html": "c" * 64})
    assert listed_files(first.decode()) == hashes
    version = re.compile(rb'const VERSION = "([0-9a-f]{16})";')
    assert version.findall(first) != version.findall(other)
    assert listed_files("no list") == listed_files("const FILES = {broken};") == {}


def test_the_defaults_of_a_chat_are_those_of_the_server() -> None:
    from shaderlm.server.generation import LLAMA_DEFAULTS

    found = re.search(r"const DEFAULTS = \{ (.*?) \};", assets()["local.js"].decode())
    assert found
    assert dict(each.split(": ") for each in found[1].split(", ")) == {k: str(v) for k, v in LLAMA_DEFAULTS.items()}


# A runtime with a chat that waits for its turn for ever, and whose `last` is the answer that runs.
WAITING = """
export class ShaderlmError extends Error {}
export const load = async () => ({
  info: { chat: true }, lost: new Promise(() => {}), last: { completionTokens: 30, finishReason: "stop" },
  async *chat(_, { signal }) { await new Promise((done) => signal.addEventListener("abort", done)); },
});
"""
STOP_A_CHAT = """
const said = [];
let take;
globalThis.addEventListener = (_, listener) => { take = (data) => listener({ data }); };
globalThis.postMessage = (message) => said.push(message);
await import("./assets/worker.js");
await take({ id: 1, task: "load" });
const chat = take({ id: 2, task: "chat", messages: [], options: {} });
take({ task: "stop", of: 2 });
await chat;
export const found = said.at(-1);
"""


@pytest.mark.browser
def test_a_chat_that_is_stopped_before_its_turn(tmp_path: Path) -> None:
    files = {"shaderlm.js": WAITING, "assets/worker.js": assets()["worker.js"].decode()}
    found = run_in_chromium(tmp_path, files, STOP_A_CHAT)
    assert (found["kind"], found["finishReason"]) == ("done", "abort"), "not the reason of the answer that runs"


# A service worker with a storage that takes two files.
INSTALL = """
const stored = new Map();
const made = { put: async () => { if (++made.count > 2) throw new Error("full"); }, count: 0 };
const storage = {
  open: async (name) => { stored.set(name, made); return made; },
  delete: async (name) => stored.delete(name),
};
const listeners = {};
const worker = {
  registration: { scope: "https://example.com/web/" }, addEventListener: (kind, take) => { listeners[kind] = take; },
};
Object.defineProperty(globalThis, "caches", { value: storage });
Object.defineProperty(globalThis, "self", { value: worker });
globalThis.fetch = async () => new Response("");
await import("./sw.js");
let end = "kept";
let work;
listeners.install({ waitUntil: (given) => { work = given; } });
await work.catch((problem) => { end = problem.message; });
export const found = [end, [...stored.keys()]];
"""


@pytest.mark.browser
def test_a_version_that_storage_cannot_hold_leaves_nothing(tmp_path: Path) -> None:
    nothing = hashlib.sha256(b"").hexdigest()
    worker = service_worker(dict.fromkeys(("index.html", "plan.json", "shaderlm.js"), nothing)).decode()
    assert run_in_chromium(tmp_path, {"sw.js": worker}, INSTALL) == ["full", []]
