"""`/slots/{id}`: what is cached of a prompt is saved into a file, restored and erased, each client its own."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shaderlm import load
from shaderlm.engine.page_transfer import PageTransfer
from shaderlm.server import slots
from shaderlm.server.errors import ApiError
from shaderlm.server.loading import ServeOptions, serve_model
from shaderlm.server.served import ServedModel
from shaderlm.server.slots import checked_name

from .serving import running
from .tiny_models import write_tiny_llama

PROMPT = [3 + i * 7 % 200 for i in range(300)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("slots") / "tiny.gguf", context=1024)


def loader(path: Path, folder: Path | None, **more: Any) -> Callable[[], ServedModel]:
    options = ServeOptions(slot_save_path=None if folder is None else str(folder), warmup=False, **more)
    return lambda: serve_model(load(path, device="numpy"), "tiny", options)


@pytest.fixture
def http(tiny: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    with running(loader(tiny, tmp_path / "saved")) as server, server.client() as made:
        yield made


def complete(http: httpx.Client, prompt: Any = PROMPT, slot: int = 1, **more: Any) -> tuple[str, int]:
    """A text, and how many tokens of the prompt were computed."""
    body = {"prompt": prompt, "n_predict": 8, "id_slot": slot, "temperature": 0, **more}
    answer = http.post("/completion", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["content"], found["timings"]["prompt_n"]


def change(http: httpx.Client, action: str, slot: int = 1, name: str | None = "a.bin", **more: Any) -> Any:
    answer = http.post(f"/slots/{slot}", params={"action": action}, json={"filename": name}, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_save_erase_restore(http: httpx.Client, tmp_path: Path) -> None:
    """Also the last page, which is not whole; in another process, too."""
    text, computed = complete(http)
    assert computed == len(PROMPT)
    saved = change(http, "save")
    assert (saved["id_slot"], saved["filename"]) == (1, "a.bin")
    assert saved["n_saved"] == len(PROMPT) + 8 - 1, "the last token was sampled, and not run"
    path = tmp_path / "saved" / "a.bin"
    assert saved["n_written"] == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert complete(http) == (text, 1)
    assert change(http, "erase", name=None)["n_erased"] == len(PROMPT) + 8
    assert complete(http, slot=2) == (text, len(PROMPT)), "nothing is cached any more"
    change(http, "erase", slot=2, name=None)
    restored = change(http, "restore", slot=3)
    assert restored["n_restored"] == saved["n_saved"]
    assert restored["n_read"] == saved["n_written"]
    assert complete(http) == (text, 1)
    assert change(http, "save", slot=3, name="b.bin")["n_saved"] == saved["n_saved"], "a slot has what was restored"
    assert change(http, "save", slot=9, name="none.bin")["n_saved"] == 0
    assert change(http, "restore", slot=9, name="none.bin")["n_restored"] == 0


def test_erase_leaves_what_others_begin_with(http: httpx.Client) -> None:
    complete(http)
    complete(http, [*PROMPT[:200], 5, *PROMPT], slot=2)
    change(http, "erase", slot=1, name=None)
    assert complete(http, [*PROMPT[:200], 5, *PROMPT], slot=2)[1] == 1
    assert complete(http)[1] == len(PROMPT) - 200


def test_a_stream_and_a_chat_have_slots(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "the an in"}], "max_tokens": 4, "stream": True}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert change(http, "save", slot=0)["n_saved"] > 4


def test_a_request_that_runs_nothing_leaves_slots_alone(http: httpx.Client) -> None:
    complete(http, slot=0)
    assert http.post("/api/generate", json={"model": "tiny"}).json()["done_reason"] == "load"
    assert change(http, "save", slot=0)["n_saved"] == len(PROMPT) + 8 - 1


def test_embeddings_leave_slots_alone(tiny: Path, tmp_path: Path) -> None:
    with running(loader(tiny, tmp_path, embedding=True)) as server, server.client() as http:
        complete(http, slot=0)
        for route, field in (("/api/embed", "input"), ("/api/embeddings", "prompt"), ("/embedding", "content")):
            answer = http.post(route, json={"model": "tiny", field: "the an"})
            assert answer.status_code == 200, answer.text
        assert http.post("/v1/embeddings", json={"input": "the"}).status_code == 200
        assert change(http, "save", slot=0)["n_saved"] == len(PROMPT) + 8 - 1


def test_another_start_restores_it(tiny: Path, tmp_path: Path) -> None:
    with running(loader(tiny, tmp_path)) as server, server.client() as http:
        text, _ = complete(http)
        change(http, "save")
        chosen = len(change(http, "save", name="b.bin"))
        assert chosen
    with running(loader(tiny, tmp_path)) as server, server.client() as http:
        change(http, "restore")
        assert complete(http) == (text, 1)
    other = write_tiny_llama(tmp_path / "other.gguf", context=1024, seed=4)
    with running(loader(other, tmp_path)) as server, server.client() as http:
        refused(http, "restore", "a.bin", "was saved by another model")
        assert complete(http)[1] == len(PROMPT)


def refused(http: httpx.Client, action: str, name: Any, message: str, slot: str = "1", **more: Any) -> None:
    answer = http.post(f"/slots/{slot}", params={"action": action}, json={"filename": name}, **more)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert message in error["message"], error


def test_files_that_are_no_saved_slots(http: httpx.Client, tmp_path: Path) -> None:
    complete(http)
    change(http, "save")
    path = tmp_path / "saved" / "a.bin"
    raw = path.read_bytes()
    refused(http, "restore", "missing.bin", "there is no missing.bin")
    for changed in (b"", raw[:50], raw[:-1], raw[:-1] + bytes([raw[-1] ^ 1]), b"x" + raw[1:]):
        path.write_bytes(changed)
        refused(http, "restore", "a.bin", "no saved prompt that can be used")
        assert path.exists(), "what a client saved is not removed"
    path.unlink()
    path.mkdir()
    refused(http, "restore", "a.bin", "cannot read a.bin")
    refused(http, "save", "a.bin", "cannot write a.bin")
    refused(http, "save", "a.bin", "the slot must be a number", slot="x")
    refused(http, "save", "a.bin", "the slot must be a number", slot="99999999999")
    refused(http, "save", "a.bin", "the slot must be a number", slot="256")
    refused(http, "other", "a.bin", "action must be one of")
    refused(http, "save", None, "filename must be")
    refused(http, "save", "../a", "filename must be")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["a.bin"]
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", ".salt", "/etc/passwd", "../a", "a/b", "a\\b", "..\\a", "C:a", "a:b", "a\0b", "a\nb", "a*"),
        *("a.", "a ", "\ud800", "x" * 201, "é" * 101, "a?b", '"', "<", None),
    ],
)
def test_names_that_are_refused(name: str | None) -> None:
    with pytest.raises(ApiError, match="filename must be a file name without a path"):
        checked_name(name)


@pytest.mark.parametrize("name", ["a", "slot1.bin", "chat 3", "ünï-😀_1", "x" * 200, "a..b"])
def test_names_that_are_taken(name: str) -> None:
    assert checked_name(name) == name


def test_files_are_few(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_FILES", 2)
    complete(http)
    for name in ("a", "b", "a"):
        change(http, "save", name=name)
    refused(http, "save", "c", "there are 2 saved files")


def test_a_step_that_fails_leaves_a_saved_file_as_it_was(
    http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(http)
    change(http, "save")
    raw = (tmp_path / "saved" / "a.bin").read_bytes()
    monkeypatch.setattr(PageTransfer, "read", lambda self, find: find() and None)
    answer = http.post("/slots/1", params={"action": "save"}, json={"filename": "a.bin"})
    assert answer.status_code == 503
    assert "a step failed while a.bin was to be written" in answer.json()["error"]["message"]
    assert (tmp_path / "saved" / "a.bin").read_bytes() == raw


def test_keys_have_slots_and_files_of_their_own(tiny: Path, tmp_path: Path) -> None:
    keys = ("first-key", "second-key")
    first, second = ({"x-api-key": key} for key in keys)
    with running(loader(tiny, tmp_path, keys=keys), keys=keys) as server, server.client(headers=first) as http:
        text, _ = complete(http)
        saved = change(http, "save")["n_saved"]
        assert saved > 300
        assert change(http, "save", headers=second)["n_saved"] == 0
        refused(http, "restore", "b.bin", "there is no b.bin", headers=second)
        assert change(http, "restore")["n_restored"] == saved, "the other key has not replaced it"
        folders = [path for path in tmp_path.iterdir() if path.is_dir()]
        assert len(folders) == 2
        (own,) = (path for path in folders if (path / "a.bin").stat().st_size > 10_000)
        (other,) = (path for path in folders if path != own)
        (other / "a.bin").write_bytes((own / "a.bin").read_bytes())
        refused(http, "restore", "a.bin", "for another key", headers=second)
        answer = http.post("/completion", json={"prompt": PROMPT, "n_predict": 8, "temperature": 0}, headers=second)
        assert answer.json()["timings"]["prompt_n"] == len(PROMPT)
        assert answer.json()["content"] == text
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not any(key.encode() in everything for key in keys)


def test_a_folder_is_needed(tiny: Path, tmp_path: Path) -> None:
    with running(loader(tiny, None)) as server, server.client() as http:
        answer = http.post("/slots/0", params={"action": "save"}, json={"filename": "a"})
        assert answer.status_code == 501
        assert "--slot-save-path" in answer.json()["error"]["message"]


def test_what_is_erased_is_not_on_disk_either(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with running(loader(tiny, tmp_path / "saved", cache_dir=str(folder))) as server, server.client() as http:
        complete(http)
        change(http, "erase", name=None)
        assert not list(folder.glob("*.pages"))
        assert complete(http)[1] == len(PROMPT)
