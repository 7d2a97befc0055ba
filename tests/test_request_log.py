"""The log of requests: what its lines say, and what they never do."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shaderlm.errors import InputError
from shaderlm.server.request_log import RequestLog

from .command_line import shaderlm
from .serving import Running, loader, running
from .test_server import ASK
from .tiny_models import write_tiny_llama

KEYS = ("first-key", "second-key")
SECRET = "zebra"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("log") / "tiny.gguf", context=512)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tuple[RequestLog, Path]]:
    made = RequestLog(str(tmp_path / "requests"), "json")
    yield made, tmp_path / "requests"
    made.close()


def ask(server: Running, key: str = KEYS[1], **more: Any) -> None:
    with server.client(headers={"x-api-key": key}) as http:
        http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 5, "ignore_eos": True, **more})


def test_what_a_line_says(path: Path, log: tuple[RequestLog, Path]) -> None:
    made, file = log
    with running(loader(path), keys=KEYS, log=made) as server:
        ask(server)
        ask(server, stream=True, n=2)
        ask(server, key=SECRET)
        with server.client(headers={"authorization": f"Bearer {KEYS[0]}"}) as http:
            http.get(f"/v1/models/{SECRET}?{SECRET}={SECRET}")
            http.get(f"/{SECRET}%0A{SECRET}")
            http.post("/v1/chat/completions", content=b'{"' + SECRET.encode())
            http.post("/v1/completions", json={"prompt": [SECRET], "stop": SECRET, "grammar": SECRET})
            http.get("/health")
            http.get("/")
    made.close()
    text = file.read_text()
    for never in (SECRET, *KEYS, ASK[0]["content"]):
        assert never not in text
    entries = [json.loads(line) for line in text.splitlines()]
    found = [(each["method"], each["route"], each["status"], each.get("key")) for each in entries]
    chat = "/v1/chat/completions"
    assert found == [
        ("POST", chat, 200, 2),
        ("POST", chat, 200, 2),
        ("POST", "-", 401, None),
        ("GET", "/v1/models/{model}", 404, 1),
        ("GET", "-", 404, 1),
        ("POST", chat, 400, 1),
        ("POST", "/v1/completions", 400, 1),
    ]
    assert [each.get("completion_tokens") for each in entries[:3]] == [5, 10, None]
    assert entries[0]["prompt_tokens"] * 2 == entries[1]["prompt_tokens"]
    assert entries[1]["cached_tokens"] > 0
    assert entries[0]["finish"] == ["length"]
    for entry in entries:
        assert entry["client"] == "127.0.0.1"
        assert 0 <= entry["seconds"] < 60
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", entry["time"])


def test_text_for_people_on_stderr(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = RequestLog(verbose=True)
    with running(loader(path), log=made) as server, server.client() as http:
        ask(server)
        http.get("/health")
        http.get("/")
    made.close()
    first, second, third = capfd.readouterr().err.splitlines()
    number = r"\d+\.\d{3} s"
    times = f"queue {number}, prompt {number}, decode {number}"
    assert re.fullmatch(
        rf"\S+ 127\.0\.0\.1 POST /v1/chat/completions 200 prompt \d+ \(0 cached\), 5 tokens, {times}, length, {number}",
        first,
    )
    assert re.fullmatch(rf"\S+ 127\.0\.0\.1 GET /health 200 {number}", second)
    assert re.fullmatch(rf"\S+ 127\.0\.0\.1 GET - 200 {number}", third)


def test_a_client_that_leaves_is_logged(path: Path, log: tuple[RequestLog, Path]) -> None:
    made, file = log
    with running(loader(path), log=made) as server, server.client() as http:
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    made.close()
    assert json.loads(file.read_text())["finish"] == ["closed"]


def test_a_file_that_is_moved_away(log: tuple[RequestLog, Path]) -> None:
    made, file = log
    made.add({"n": 1})
    _until(lambda: file.read_text() == '{"n": 1}\n')
    file.rename(file.with_name("old"))
    made.add({"n": 2})
    made.close()
    assert file.read_text() == '{"n": 2}\n'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_once_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    log = RequestLog("/dev/full", "json")
    for number in range(3):
        log.add({"n": number})
    log.close()
    assert capsys.readouterr().err == "shaderlm: --log-file /dev/full cannot be written: no space left on device\n"


def test_what_a_proxy_says_is_an_address_or_nothing(path: Path, log: tuple[RequestLog, Path]) -> None:
    made, file = log
    with running(loader(path), log=made) as server, server.client() as http:
        for said in ("203.0.113.7", f"{SECRET} key 1 POST /v1/chat/completions 200"):
            http.get("/v1/models", headers={"x-forwarded-for": said})
    made.close()
    assert [json.loads(line)["client"] for line in file.read_text().splitlines()] == ["203.0.113.7", "-"]


def test_a_folder_that_goes_away_and_comes_back(log: tuple[RequestLog, Path], tmp_path: Path) -> None:
    made, file = log
    gone = tmp_path.with_name("gone")
    tmp_path.rename(gone)
    made.add({"n": 1})
    _until(lambda: made._lost == 1)
    gone.rename(tmp_path)
    made.add({"n": 2})
    made.close()
    assert file.read_text().splitlines() == ["1 requests are missing here: the log could not be written", '{"n": 2}']


def test_a_log_that_cannot_be_written_stops_nobody(
    log: tuple[RequestLog, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, file = log
    goes_on, written = threading.Event(), made._print

    def stuck(line: str) -> None:
        assert goes_on.wait(60)
        if "first" in line:
            raise OSError("no space left on device")
        written(line)

    monkeypatch.setattr(made, "_print", stuck)
    made.add({"first": 0})
    for i in range(20_000):
        made.add({"n": i})
    goes_on.set()
    made.close()
    lines = file.read_text().splitlines()
    assert lines[0].endswith("requests are missing here: the log could not be written")
    assert int(lines[0].split()[0].replace(",", "")) + len(lines) - 1 == 20_001


def _until(reached: Any) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_file_that_cannot_be_opened(tmp_path: Path, path: Path) -> None:
    with pytest.raises(InputError, match=r"--log-file .*none/log cannot be written: no such file or directory"):
        RequestLog(str(tmp_path / "none" / "log"))
    done = shaderlm("serve", "-m", path, "--log-file", tmp_path / "none" / "log", "--port", 0)
    assert done.code == 2
    assert "cannot be written" in done.err
    assert "Traceback" not in done.err
