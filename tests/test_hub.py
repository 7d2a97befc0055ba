"""hf: names, against a server of our own that answers as the Hugging Face hub does."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shaderlm.errors import InputError, ModelError
from shaderlm.formats import local_models
from shaderlm.formats.find import find
from shaderlm.formats.hf.folder import Folder
from shaderlm.formats.short_names import SHORT_NAMES

from .command_line import COMMAND, shaderlm
from .folders import folder_of
from .tiny_models import write_tiny

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Hub(BaseHTTPRequestHandler):
    """Repositories are folders ORG/REPO below `root`.

    `cut` names files whose first transfer breaks off half-way; that of `stalled` ones stops there until `go_on`.
    `failing` is the status and the code of the error that answers everything.
    """

    root: Path
    cut: set[str]
    stalled: set[str]
    failing: tuple[int, str] | None
    stops: threading.Event
    go_on: threading.Event
    asked: list[tuple[str, str, str | None]]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        self.asked.append((self.command, "/".join(path), self.headers.get("Range")))
        api = path[:2] == ["api", "models"]
        repo = "/".join(path[2:4] if api else path[:2])
        if self.failing is not None:
            self._refuse(*self.failing)
        elif repo == "org/gated":
            self._refuse(403, "GatedRepo")
        elif repo == "org/expired":
            self._refuse(401, "Unauthorized")
        elif not (self.root / repo).is_dir():
            self._refuse(404, "RepoNotFound")
        elif api:
            self._json(repo, tree="tree" in path)
        else:
            self._file(self.root / repo / "/".join(path[4:]), with_body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, repo: str, tree: bool) -> None:
        files = {path.relative_to(self.root / repo).as_posix(): path for path in sorted((self.root / repo).rglob("*"))}
        files = {name: path for name, path in files.items() if path.is_file()}
        listed = [
            {"type": "file", "path": name, "size": file.stat().st_size, "oid": _oid(file)}
            for name, file in files.items()
        ]
        siblings = [{"rfilename": name} for name in files]
        more = {"private": False, "downloads": 0, "likes": 0, "tags": []}  # old versions of the package ask for them
        found = listed if tree else {"id": repo, "modelId": repo, "sha": _COMMIT, "siblings": siblings, **more}
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, path: Path, with_body: bool) -> None:
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        data = path.read_bytes()
        asked = self.headers.get("Range")
        first = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.send_response(206 if first else 200)
        self.send_header("ETag", f'"{_oid(path)}"')
        self.send_header("X-Repo-Commit", _COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not with_body:
            return
        if path.name in self.cut:
            self.cut.discard(path.name)
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        if path.name in self.stalled:
            self.stalled.discard(path.name)
            self.wfile.write(data[: len(data) // 2])
            self.stops.set()
            self.go_on.wait(60)
            self.close_connection = True
            return
        self.wfile.write(data[first:])


def _oid(path: Path) -> str:
    """Large files have the digest of their content."""
    data = path.read_bytes()
    return (hashlib.sha256 if len(data) > 10 << 20 else hashlib.sha1)(data).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[type[_Hub], str]]:
    root = tmp_path / "hub"
    (root / "org").mkdir(parents=True)
    events = {"stops": threading.Event(), "go_on": threading.Event()}
    kind: Any = type(
        "Hub", (_Hub,), {"root": root, "cut": set(), "stalled": set(), "failing": None, "asked": [], **events}
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield kind, f"http://127.0.0.1:{server.server_address[1]}"
        kind.go_on.set()
        server.shutdown()
        thread.join()


def _find(endpoint: str, cache: Path, name: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads the address when it is imported. Prints the progress, too."""
    code = f"""
{before}
from shaderlm.formats.find import find
print('found', find({name!r}, lambda *given: print('progress', *given)))
"""
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment = {**kept, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


def _start(endpoint: str, cache: Path, *arguments: str) -> subprocess.Popen[str]:
    """A command of the command line."""
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "SHADERLM_CACHE": str(cache)}
    command = [*COMMAND, *arguments]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**kept, **own}, text=True, **pipes)


def _run(endpoint: str, cache: Path, *arguments: str) -> str:
    """What a command of the command line prints."""
    with _start(endpoint, cache, *arguments) as process:
        out, err = process.communicate(timeout=60)
    return out + (err if process.returncode else "")


def _path(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().splitlines()[-1].removeprefix("found "))


def test_a_folder_of_the_hub(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    """What runs is fetched, nothing else, and it is found again without the hub."""
    kind, endpoint = hub
    there = folder_of(write_tiny(tmp_path / "tiny.gguf", "llama"), kind.root / "org" / "repo")
    (there / "pytorch_model.bin").write_bytes(b"not wanted")
    done = _find(endpoint, tmp_path / "cache", "hf:org/repo")
    found = _path(done)
    wanted = {path.name: path.read_bytes() for path in there.iterdir() if path.suffix != ".bin"}
    assert {path.name: path.read_bytes() for path in found.iterdir()} == wanted
    total = sum(len(data) for data in wanted.values())
    assert _progress(done)[-1] == ("fetching org/repo", total, total)
    assert _path(_find("http://127.0.0.1:9", tmp_path / "cache", "hf:org/repo")) == found


@pytest.mark.parametrize("parts", [1, 2])
def test_only_what_is_read_of_a_folder_is_fetched(hub: tuple[type[_Hub], str], tmp_path: Path, parts: int) -> None:
    """Not the same weights under another name or in another folder, nor tables that nothing reads."""
    kind, endpoint = hub
    there = folder_of(write_tiny(tmp_path / "tiny.gguf", "llama"), kind.root / "org" / "repo", parts=parts)
    wanted = {path.name for path in there.iterdir()}
    for name in ("consolidated.safetensors", "original/model.safetensors", "original/config.json", "vocab.json"):
        (there / name).parent.mkdir(exist_ok=True)
        (there / name).write_bytes(b"not wanted")
    found = _path(_find(endpoint, tmp_path / "cache", "hf:org/repo"))
    assert {path.relative_to(found).as_posix() for path in found.rglob("*")} == wanted
    with Folder.open(found) as folder:
        assert {path.name for path in folder.files()} == wanted
    with Folder.open(there) as folder:
        assert {path.name for path in folder.files()} == wanted
    fetched = {each[1].rpartition("/")[2] for each in kind.asked if each[0] == "GET" and "/resolve/" in each[1]}
    assert fetched == wanted


def _progress(done: subprocess.CompletedProcess[str]) -> list[tuple[str, int, int]]:
    """What was told: label, bytes, bytes in total; nothing but this and the path was printed."""
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*["progress"] * (len(lines) - 1), "found"]
    assert "%|" not in done.stderr  # no bar of the package
    told = [line.removeprefix("progress ").rsplit(" ", 2) for line in lines[:-1]]
    return [(label, int(count), int(total)) for label, count, total in told]


def test_a_transfer_that_breaks_off_is_resumed(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    kind, endpoint = hub
    file = kind.root / "org" / "repo" / "large.gguf"
    file.parent.mkdir()
    file.write_bytes(os.urandom(24 << 20))  # the package keeps pieces of 10 MB
    kind.cut.add(file.name)
    done = _find(endpoint, tmp_path / "cache", "hf:org/repo/large.gguf")
    assert _path(done).read_bytes() == file.read_bytes()
    told = _progress(done)
    assert {label for label, _, _ in told} == {"fetching large.gguf"}
    assert [count for _, count, _ in told] == sorted(count for _, count, _ in told)
    assert len(told) > 2
    assert told[-1] == ("fetching large.gguf", 24 << 20, 24 << 20)
    ranges = [each[2] for each in kind.asked if each[0] == "GET" and each[1].endswith(file.name)]
    assert ranges[0] is None
    assert ranges[-1] not in (None, "bytes=0-")


@pytest.mark.parametrize("how", [signal.SIGINT, getattr(signal, "SIGKILL", signal.SIGTERM)])
@pytest.mark.parametrize("files", ["gguf", "safetensors"])
def test_an_interrupted_download_goes_on_in_the_next_process(
    how: signal.Signals, files: str, hub: tuple[type[_Hub], str], tmp_path: Path
) -> None:
    """It ends at once, keeps what it has, and only the rest is asked for."""
    kind, endpoint = hub
    repo, cache, name = kind.root / "org" / "repo", tmp_path / "cache", "hf:org/repo"
    if files == "gguf":
        repo.mkdir()
    else:
        folder_of(write_tiny(tmp_path / "tiny.gguf", "llama"), repo)
    file = repo / ("large.gguf" if files == "gguf" else "model.safetensors")
    file.write_bytes(os.urandom(48 << 20))  # the package keeps pieces of 10 MB
    kind.stalled.add(file.name)
    process = _start(endpoint, cache, "pull", name)
    assert kind.stops.wait(60)
    blobs = cache / "hub" / "models--org--repo" / "blobs"
    while sum(part.stat().st_size for part in blobs.glob("*.incomplete")) < 20 << 20:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert "Traceback" not in out + err
    unfinished = [path.name for path in blobs.iterdir() if path.stat().st_size >= 20 << 20]
    assert [each.rpartition(".")[2] for each in unfinished] == ["incomplete"]
    kind.asked.clear()
    found = Path(_run(endpoint, cache, "pull", name).strip().splitlines()[-1])
    assert (found if files == "gguf" else found / file.name).read_bytes() == file.read_bytes()
    ranges = [each[2] for each in kind.asked if each[0] == "GET" and each[1].endswith(file.name)]
    assert ranges == [f"bytes={20 << 20}-"]
    assert not list(blobs.glob("*.incomplete"))
    kind.asked.clear()
    assert _run(endpoint, cache, "pull", name).strip() == str(found)
    assert not [each for each in kind.asked if each[0] == "GET" and "resolve" in each[1]]


def test_what_is_unfinished_is_checked_and_can_be_removed(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    kind, endpoint = hub
    file, cache = kind.root / "org" / "repo" / "large.gguf", tmp_path / "cache"
    file.parent.mkdir()
    file.write_bytes(os.urandom(11 << 20))
    blob = cache / "hub" / "models--org--repo" / "blobs" / _oid(file)
    part = blob.with_name(blob.name + ".large.gguf.shaderlm.incomplete")
    for name in ("hf:org/repo", "hf:org/repo/large.gguf"):
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(b"of another file")
        listed = _run(endpoint, cache, "models")
        assert listed.startswith("no model is kept")
        assert re.search(r"\n\ninterrupted downloads; .*\nhf:org/repo/large.gguf +15 B ", listed)
        assert "there is no model" in _run(endpoint, cache, "rm", "hf:org/repo/other.gguf")
        assert f"removed {name}, 15 B" in _run(endpoint, cache, "rm", name)
        assert not part.exists()
        assert f"there is no model '{name}' to remove" in _run(endpoint, cache, "rm", name)
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(b"of another file")
    found = Path(_run(endpoint, cache, "pull", "hf:org/repo").strip().splitlines()[-1])
    assert found.read_bytes() == file.read_bytes()


def test_a_repository_that_was_interrupted_is_removed(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    """Also the files of it that are complete."""
    kind, endpoint = hub
    there = folder_of(write_tiny(tmp_path / "tiny.gguf", "llama"), kind.root / "org" / "repo", parts=2)
    cache = tmp_path / "cache"
    kind.stalled.add(sorted(path.name for path in there.glob("*.safetensors"))[1])
    with _start(endpoint, cache, "pull", "hf:org/repo") as process:
        assert kind.stops.wait(60)
        process.kill()
    folder = cache / "hub" / "models--org--repo"
    assert any(path.stat().st_size > 10_000 for path in (folder / "blobs").iterdir())
    assert re.search("interrupted downloads; .*\nhf:org/repo +[0-9.]+ [kM]B ", _run(endpoint, cache, "models"))
    assert "removed hf:org/repo, " in _run(endpoint, cache, "rm", "hf:org/repo")
    assert not folder.exists()
    assert "there is no model" in _run(endpoint, cache, "rm", "hf:org/repo")


def test_one_file_is_removed_and_an_unfinished_one_stays(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    kind, endpoint = hub
    (kind.root / "org" / "repo").mkdir()
    write_tiny(kind.root / "org" / "repo" / "a.gguf", "llama")
    cache = tmp_path / "cache"
    _run(endpoint, cache, "pull", "hf:org/repo/a.gguf")
    part = cache / "hub" / "models--org--repo" / "blobs" / "0.b.gguf.shaderlm.incomplete"
    part.write_bytes(b"half")
    assert "removed hf:org/repo/a.gguf, " in _run(endpoint, cache, "rm", "hf:org/repo/a.gguf")
    assert part.exists()
    assert "removed hf:org/repo/b.gguf, 4 B" in _run(endpoint, cache, "rm", "hf:org/repo/b.gguf")


@pytest.mark.parametrize("files", ["gguf", "safetensors"])
def test_a_hub_that_fails_and_a_model_that_is_kept(
    files: str, hub: tuple[type[_Hub], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, endpoint = hub
    repo, cache = kind.root / "org" / "repo", tmp_path / "cache"
    if files == "gguf":
        repo.mkdir()
        write_tiny(repo / "a.gguf", "llama")
    else:
        folder_of(write_tiny(tmp_path / "tiny.gguf", "llama"), repo)
    names = ["hf:org/repo", *(["hf:org/repo/a.gguf"] if files == "gguf" else [])]
    found = [_path(_find(endpoint, cache, name)) for name in names]
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "2")
    for failing in ((403, "GatedRepo"), (401, "Unauthorized"), (404, "RepoNotFound"), (500, "")):
        kind.failing = failing
        assert [_path(_find(endpoint, cache, name)) for name in names] == found, failing
    said = _find(endpoint, cache, "hf:org/other").stderr.splitlines()[-1]
    assert "ModelError: hf:org/other: the hub could not be used, " in said


def test_a_model_that_is_kept_is_not_touched(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    """Its cache may be read-only."""
    kind, endpoint = hub
    (kind.root / "org" / "repo").mkdir()
    write_tiny(kind.root / "org" / "repo" / "a.gguf", "llama")
    found = _path(_find(endpoint, tmp_path / "cache", "hf:org/repo/a.gguf"))
    shutil.rmtree(tmp_path / "cache" / "hub" / ".locks")
    kind.asked.clear()
    assert _path(_find(endpoint, tmp_path / "cache", "hf:org/repo/a.gguf")) == found
    assert not (tmp_path / "cache" / "hub" / ".locks").exists()
    assert [each[0] for each in kind.asked if "resolve" in each[1]] == ["HEAD"]


def test_without_symbolic_links_a_file_is_there_once(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    kind, endpoint = hub
    (kind.root / "org" / "repo").mkdir()
    file = write_tiny(kind.root / "org" / "repo" / "a.gguf", "llama")
    before = "from huggingface_hub import file_download; file_download.are_symlinks_supported = lambda *_: False"
    for _ in range(2):
        done = _find(endpoint, tmp_path / "cache", "hf:org/repo/a.gguf", before)
        assert _path(done).read_bytes() == file.read_bytes()
        large = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size > 10_000]
        assert large == [_path(done)]


def test_a_repository_is_removed_by_its_name(tmp_path: Path) -> None:
    """Not by its commit: one that was renamed may be there twice."""
    for name in ("old", "new"):
        folder = tmp_path / "hub" / f"models--org--{name}"
        for part in ("blobs", "refs", f"snapshots/{_COMMIT}"):
            (folder / part).mkdir(parents=True)
        (folder / "refs" / "main").write_text(_COMMIT)
        (folder / "blobs" / "x").write_bytes(name.encode() * 100)
        (folder / "snapshots" / _COMMIT / "model.safetensors").symlink_to("../../blobs/x")
    assert "removed hf:org/new, 300 B" in _run("http://127.0.0.1:1", tmp_path, "rm", "hf:org/new")
    assert [path.name for path in (tmp_path / "hub").glob("models--*")] == ["models--org--old"]


def test_offline_by_choice(hub: tuple[type[_Hub], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the cache is found, and nothing is asked for."""
    kind, endpoint = hub
    folder_of(write_tiny(tmp_path / "tiny.gguf", "llama"), kind.root / "org" / "repo")
    (kind.root / "org" / "one").mkdir()
    write_tiny(kind.root / "org" / "one" / "a.gguf", "llama")
    names = ("hf:org/repo", "hf:org/one/a.gguf")
    found = [_path(_find(endpoint, tmp_path / "cache", name)) for name in names]
    kind.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [_path(_find(endpoint, tmp_path / "cache", name)) for name in names] == found
    for name, what in (("hf:org/other", "repository"), ("hf:org/one/b.gguf", "file b.gguf")):
        said = f"{name}: HF_HUB_OFFLINE is set and the {what} is not in the hub's cache; unset it once"
        assert said in _find(endpoint, tmp_path / "cache", name).stderr.splitlines()[-1]
    assert kind.asked == []


def test_a_token_that_is_no_longer_valid(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    kind, endpoint = hub
    (kind.root / "org" / "repo").mkdir()
    said = _run(endpoint, tmp_path, "pull", "hf:org/expired")
    assert "is HF_TOKEN, or the token of `hf auth login`, still valid?" in said
    assert len(said.splitlines()) == 1


def test_processes_that_begin_together_fetch_a_file_once(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    """Replicas of a machine do: each has a process."""
    kind, endpoint = hub
    repo = kind.root / "org" / "repo"
    repo.mkdir()
    file = write_tiny(repo / "a.gguf", "llama")
    cache = tmp_path / "cache"
    with ThreadPoolExecutor() as threads:
        found = [*threads.map(lambda _: _path(_find(endpoint, cache, "hf:org/repo/a.gguf")), range(3))]
    assert [path.read_bytes() for path in found] == [file.read_bytes()] * 3
    assert sum(method == "GET" and path.endswith("a.gguf") for method, path, _ in kind.asked) == 1


def test_gguf_files_of_the_hub(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    kind, endpoint = hub
    repo = kind.root / "org" / "repo"
    repo.mkdir()
    first = write_tiny(repo / "a.gguf", "llama")
    assert _path(_find(endpoint, tmp_path / "cache", "hf:org/repo")).read_bytes() == first.read_bytes()
    write_tiny(repo / "b.gguf", "llama", seed=1)
    assert "has 2 .gguf files, name one of them: hf:org/repo/a.gguf, hf:org/repo/b.gguf" in (
        _find(endpoint, tmp_path / "cache", "hf:org/repo").stderr
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf:org/gated", "ModelError: hf:org/gated: org/gated is gated: accept its terms on http://127.0.0.1:"),
        ("hf:org/gated/a.gguf", "/org/gated, then run `hf auth login`, or set HF_TOKEN to a token that may read it"),
        ("hf:org/nothing", "there is no public repository org/nothing"),
        ("hf:org/repo/b.gguf", "there is no file b.gguf in org/repo"),
    ],
)
def test_what_the_hub_refuses(hub: tuple[type[_Hub], str], tmp_path: Path, name: str, said: str) -> None:
    kind, endpoint = hub
    (kind.root / "org" / "repo").mkdir()
    assert said in _find(endpoint, tmp_path / "cache", name).stderr.splitlines()[-1]


def test_models_are_fetched_listed_and_removed(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    kind, endpoint = hub
    folder_of(write_tiny(tmp_path / "tiny.gguf", "qwen3"), kind.root / "org" / "repo")
    cache = tmp_path / "cache"
    assert "no model is kept" in _run(endpoint, cache, "models")
    found = Path(_run(endpoint, cache, "pull", "hf:org/repo").strip().splitlines()[-1])
    assert (found / "model.safetensors").exists()
    listed = _run(endpoint, cache, "models")
    assert listed.startswith("hf:org/repo ")
    assert "interrupted" not in listed
    # A dataset of the same name is no model.
    dataset = cache / "hub" / "datasets--org--repo"
    other = dataset / "snapshots" / _COMMIT[::-1] / "data.safetensors"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"data")
    assert "removed hf:org/repo" in _run(endpoint, cache, "rm", "hf:org/repo")
    assert not found.exists()
    assert other.exists()
    assert "there is no model 'hf:org/repo' to remove; kept are none" in _run(endpoint, cache, "rm", "hf:org/repo")


# Short names, and sizes ----------------------------------------------------------------------------------


def _short(kind: type[_Hub], name: str = "qwen3-0.6b") -> Path:
    """Where the hub has the file of a short name. Its repository has other files, too."""
    row = SHORT_NAMES[name]
    file = kind.root / row.repo / row.file
    file.parent.mkdir(parents=True)
    for other in ("README.md", "another-Q8_0.gguf", "config.json", "model.safetensors"):
        (file.parent / other).write_bytes(b"not wanted")
    return file


def _downloads(kind: type[_Hub]) -> list[str]:
    return [each[1].rpartition("/")[2] for each in kind.asked if each[0] == "GET" and "/resolve/" in each[1]]


def _both(endpoint: str, cache: Path, *arguments: str) -> tuple[int, str, list[str]]:
    """Exit code, standard output, and the lines of standard error."""
    with _start(endpoint, cache, *arguments) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err.splitlines()


def test_run_downloads_one_file_and_answers(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    kind, endpoint = hub
    file = write_tiny(_short(kind), "qwen3", layers=6)
    size = f"{file.stat().st_size / 1e6:.0f} MB"
    arguments = ("run", "qwen3-0.6b", "Hello", "-n", "3", "-t", "0", "--device", "cpu", "--ignore-eos")
    code, out, err = _both(endpoint, tmp_path / "cache", *arguments)
    assert (code, err) == (0, [f"shaderlm: fetching {file.name} from {SHORT_NAMES['qwen3-0.6b'].repo}: {size}"])
    assert out.strip()
    assert _downloads(kind) == [file.name]
    kind.asked.clear()
    assert _both(endpoint, tmp_path / "cache", *arguments) == (0, out, [])
    assert _downloads(kind) == []


def test_a_short_name_that_is_interrupted_goes_on(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    kind, endpoint = hub
    file, cache = _short(kind), tmp_path / "cache"
    file.write_bytes(os.urandom(48 << 20))
    kind.stalled.add(file.name)
    process = _start(endpoint, cache, "run", "qwen3-0.6b", "Hello")
    assert kind.stops.wait(60)
    while sum(part.stat().st_size for part in cache.rglob("*.incomplete")) < 20 << 20:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    source = SHORT_NAMES["qwen3-0.6b"].repo
    assert (process.returncode, out) == (130, "")
    assert err.split("\n")[0] == f"shaderlm: fetching {file.name} from {source}: 50 MB"
    assert not err.split("\n", 1)[1].strip()
    kind.asked.clear()
    code, out, lines = _both(endpoint, cache, "pull", "qwen3-0.6b")
    assert (code, lines) == (0, [f"shaderlm: fetching {file.name} from {source}: 50 MB, 21 MB are here"])
    assert Path(out.strip()).read_bytes() == file.read_bytes()
    assert [each[2] for each in kind.asked if each[0] == "GET" and "/resolve/" in each[1]] == [f"bytes={20 << 20}-"]


def test_all_parts_are_one_download(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    kind, endpoint = hub
    repo = kind.root / "org" / "repo"
    (repo / "sub").mkdir(parents=True)
    names = [f"a-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for name in names:
        (repo / "sub" / name).write_bytes(os.urandom(1 << 20))
    code, out, err = _both(endpoint, tmp_path / "cache", "pull", f"hf:org/repo/sub/{names[1]}")
    assert (code, err) == (0, [f"shaderlm: fetching {names[0]} from org/repo: 3 MB"])
    assert Path(out.strip()).name == names[1]
    found = Path(out.strip()).parent
    assert {path.name: path.read_bytes() for path in found.iterdir()} == {
        name: (repo / "sub" / name).read_bytes() for name in names
    }
    done = _find(endpoint, tmp_path / "other", f"hf:org/repo/sub/{names[0]}")
    assert _progress(done)[-1] == (f"fetching {names[0]}", 3 << 20, 3 << 20)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (
            "import shutil, types; shutil.disk_usage = lambda path: types.SimpleNamespace(total=2000, free=1000)",
            "fetching large.gguf needs 12 MB, 1,000 B are free in ",
        ),
        (
            "from shaderlm.formats import hub_transfer\n"
            "def full(*_): raise OSError(28, 'No space left on device')\n"
            "hub_transfer._transfer = full",
            "cannot be written: No space left on device; make room, or set HF_HOME to another folder",
        ),
    ],
    ids=["before", "meanwhile"],
)
def test_a_full_disk(before: str, said: str, hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    kind, endpoint = hub
    file = kind.root / "org" / "repo" / "large.gguf"
    file.parent.mkdir()
    file.write_bytes(os.urandom(12_000_000))
    last = _find(endpoint, tmp_path / "cache", "hf:org/repo/large.gguf", before).stderr.splitlines()[-1]
    assert last.startswith("shaderlm.errors.ModelError: ")
    assert said in last
    assert _downloads(kind) == []


def test_a_disk_that_tells_no_sizes(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    kind, endpoint = hub
    file = kind.root / "org" / "repo" / "large.gguf"
    file.parent.mkdir()
    file.write_bytes(os.urandom(2_000_000))
    before = "import shutil, types; shutil.disk_usage = lambda path: types.SimpleNamespace(total=0, free=0)"
    _find(endpoint, tmp_path / "cache", "hf:org/repo/large.gguf", before)
    assert _downloads(kind) == [file.name]


def test_run_without_a_network_is_one_line(tmp_path: Path) -> None:
    code, out, err = _both("http://127.0.0.1:9", tmp_path, "run", "qwen3-0.6b", "Hello", "--device", "cpu")
    assert (code, out, len(err)) == (1, "", 1)
    assert "the hub cannot be reached and the file Qwen3-0.6B-Q4_K_M.gguf is not in its cache" in err[0]
    assert "; connect to the network once" in err[0]


@pytest.mark.parametrize(
    ("name", "near"), [("qwen3-0.7b", "qwen3-1.7b, qwen3-0.6b or qwen3-8b"), ("qwen3:0.6b", "qwen3-0.6b")]
)
def test_run_suggests_names(name: str, near: str) -> None:
    done = shaderlm("run", name, "Hello", "--device", "cpu")
    assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1)
    assert done.err.startswith(f"shaderlm: there is no model or file {name!r}: did you mean {near}?")


def test_each_gguf_file_of_a_repository_is_a_model(hub: tuple[type[_Hub], str], tmp_path: Path) -> None:
    """Its name loads it, and `rm` leaves the others. Files of equal content are stored once."""
    kind, endpoint = hub
    repo, cache = kind.root / "org" / "several", tmp_path / "cache"
    repo.mkdir()
    given = write_tiny(repo / "a.gguf", "llama").read_bytes()
    (repo / "same.gguf").write_bytes(given)
    write_tiny(repo / "sub-00001-of-00002.gguf", "qwen3")
    (repo / "sub-00002-of-00002.gguf").write_bytes(b"GGUF, the second part")
    names = [f"hf:org/several/{name}" for name in ("a.gguf", "same.gguf", "sub-00001-of-00002.gguf")]

    def listed() -> list[str]:
        lines = _run(endpoint, cache, "models").split("\n\n")[0].splitlines()
        return [line.split()[0] for line in lines if line.startswith("hf:")]

    for i, name in enumerate(names):
        _run(endpoint, cache, "pull", name)
        assert listed() == names[: i + 1]
    snapshot = cache / "hub" / "models--org--several" / "snapshots" / _COMMIT
    assert f"removed {names[0]}, 0" in _run(endpoint, cache, "rm", names[0])
    assert (snapshot / "same.gguf").read_bytes() == given
    assert "removed" in _run(endpoint, cache, "rm", names[2])
    assert listed() == names[1:2]
    assert [path.name for path in snapshot.iterdir()] == ["same.gguf"]
    assert "kept are hf:org/several/same.gguf" in _run(endpoint, cache, "rm", names[0])
    assert "removed" in _run(endpoint, cache, "rm", "hf:org/several")
    assert listed() == []
    assert not snapshot.exists()


@pytest.mark.parametrize(
    "name", ["hf:", "hf:a", "hf:/x", "hf:a b/c", "hf:a/..", "hf:a--b/c", "hf:a/b/../c.gguf", "x/y"]
)
def test_names_that_no_model_can_have_are_not_removed(name: str, tmp_path: Path) -> None:
    said = _run("http://127.0.0.1:1", tmp_path, "rm", name)
    assert said.strip() == f"shaderlm: there is no model {name!r} to remove; kept are none"


@pytest.mark.parametrize("endpoint", ["http://x:abc", "http://x:99999", "http://[x", "http://.."])
@pytest.mark.parametrize("name", ["hf:a/b", "hf:a/b/c.gguf"])
def test_an_endpoint_that_is_no_address(endpoint: str, name: str, tmp_path: Path) -> None:
    said = _run(endpoint, tmp_path, "pull", name)
    assert said.startswith("shaderlm: HF_ENDPOINT must be an address such as https://huggingface.co, it is ")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", ["a-00003-of-00002.gguf", "a-00001-of-00000.gguf", "a-00000-of-00001.gguf"])
def test_parts_that_there_cannot_be(name: str) -> None:
    with pytest.raises(InputError, match="there is no such part"):
        find(f"hf:a/b/{name}")


def test_what_cannot_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Path) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(local_models, "folders", lambda: {"org/x": Path()})
    monkeypatch.setattr(local_models, "_remove_repository", refused)
    with pytest.raises(ModelError, match="hf:org/x cannot be removed: Permission denied"):
        local_models.remove("hf:org/x")


def test_a_cache_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file")
    for command in (("models",), ("rm", "x"), ("rm", "hf:org/x")):
        said = _run("http://127.0.0.1:1", tmp_path, *command)
        assert said.startswith("shaderlm: the hub's cache cannot be read: ")
        assert len(said.splitlines()) == 1
