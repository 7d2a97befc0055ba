"""The cache on disk behind the server and the commands: restarts, keys, and what `/metrics` says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from shaderlm import load
from shaderlm.server.loading import ServeOptions, serve_model
from shaderlm.server.served import ServedModel

from .command_line import shaderlm
from .serving import Running, running
from .tiny_models import write_tiny_llama

PROMPT = [3 + i * 7 % 200 for i in range(300)]
KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("server_disk") / "tiny.gguf", context=1024)


def loader(path: Path, folder: Path, keys: tuple[str, ...] = KEYS) -> Callable[[], ServedModel]:
    options = ServeOptions(cache_dir=str(folder), cache_disk=1 << 20, keys=keys, warmup=False)
    return lambda: serve_model(load(path, device="numpy"), "tiny", options)


def ask(server: Running, key: str | None) -> tuple[str, int]:
    """A text, and how many tokens of the prompt were cached."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with server.client(headers=headers) as http:
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        answer: httpx.Response = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def metrics(server: Running, key: str) -> dict[str, float]:
    with server.client(headers={"x-api-key": key}) as http:
        lines = http.get("/metrics").text.splitlines()
    named = [line.split(" ") for line in lines if line.startswith("shaderlm:disk_cache")]
    return {name.removeprefix("shaderlm:disk_cache_").partition("{")[0]: float(value) for name, value in named}


def test_a_restart_finds_what_a_key_left(tiny: Path, tmp_path: Path) -> None:
    with running(loader(tiny, tmp_path), keys=KEYS) as server:
        text, cached = ask(server, KEYS[0])
        assert cached == 0
        assert metrics(server, KEYS[0])["hits_total"] == 0
    with running(loader(tiny, tmp_path), keys=KEYS) as server:
        assert ask(server, KEYS[1]) == (text, 0), "another key finds nothing"
        assert ask(server, KEYS[0]) == (text, 256)
        numbers = metrics(server, KEYS[0])
        assert numbers["hits_total"] == 256
        assert numbers["read_bytes_total"] > 0
        assert 0 < numbers["bytes"] <= 1 << 20
        assert numbers["invalid_total"] == numbers["evictions_total"] == numbers["failed_writes_total"] == 0
    with running(loader(tiny, tmp_path, KEYS[1:]), keys=KEYS[1:]) as server:
        assert ask(server, KEYS[1]) == (text, 256), "in another place, the key is the same"
    with running(loader(tiny, tmp_path, ())) as server:
        assert ask(server, None) == (text, 0)
    assert all(key.encode() not in path.read_bytes() for path in tmp_path.iterdir() for key in KEYS)


def test_commands_share_a_folder(tiny: Path, tmp_path: Path) -> None:
    prompt = "the an in ou er " * 40
    arguments = ("generate", prompt, "-m", tiny, "--device", "numpy", "--raw", "-n", 4, "--json")
    options = ("--cache-dir", tmp_path / "cache", "--cache-disk", "1M")
    plain, first, second = (json.loads(shaderlm(*arguments, *more).out) for more in ((), options, options))
    assert plain["text"] == first["text"] == second["text"]
    assert list((tmp_path / "cache").glob("*.pages"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--cache-disk", "1M"], "--cache-disk is for --cache-dir"),
        (["--cache-dir", "{here}/file"], "is a file"),
        (["--cache-dir", "{here}/new", "--cache-disk", "much"], "must be a size such as 512M or 8G"),
        (["--cache-dir", "{here}/file/below"], "cannot use the folder"),
    ],
)
def test_wrong_options(options: list[str], expected: str, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    given = [each.replace("{here}", str(tmp_path)) for each in options]
    done = shaderlm("generate", "the", "-m", tiny, "--device", "numpy", *given)
    assert done.code != 0
    assert expected in done.err
