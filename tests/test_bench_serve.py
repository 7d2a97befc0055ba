"""`shaderlm bench serve`: its client, its loads and its report, against real servers with tiny models."""

from __future__ import annotations

import json
import math
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from shaderlm.bench import serve_load
from shaderlm.bench.serve_client import Address, Client, ClientAnswer
from shaderlm.bench.serve_load import Companion, Load, Outcome, Run, Span
from shaderlm.bench.serve_report import summary, warnings, window
from shaderlm.bench.synthetic import load_synthetic, made_up_vocabulary
from shaderlm.errors import InputError
from shaderlm.models.shapes import SYNTHETIC, ModelShape
from shaderlm.server.served import ServedModel
from shaderlm.text import Tokenizer

from .command_line import shaderlm, start
from .serving import Running, loader, running
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("bench-serve") / "tiny.gguf", context=512)


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Running]:
    with running(loader(tiny)) as made:
        yield made


# The client ----------------------------------------------------------------------------------------------


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


BODY = [b'data: {"a":1}\n\n', b": waiting\n\ndata: {", b'"b":2}\n\ndata: [DONE]\n\n']
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(map(chunk, BODY)) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 5, 13, 64, len(STREAM)])
def test_events_have_the_time_of_the_read_that_completed_them(size: int) -> None:
    answer = ClientAnswer()
    reads = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    over = [answer.add(float(i), read) for i, read in enumerate(reads)]
    assert over == [False] * (len(reads) - 1) + [True]
    assert answer.status == 200
    assert answer.body() == b"".join(BODY)
    expected = []
    for data in (b'{"a":1}', b'"b":2}', b"[DONE]"):
        end = STREAM.index(data) + len(data) + 2  # with its empty line
        expected.append(float((end - 1) // size))
    found = list(answer.events())
    assert [data for _, data in found] == [b'{"a":1}', b'{"b":2}', b"[DONE]"]
    assert [came for came, _ in found] == expected


def test_an_answer_whose_text_looks_like_the_last_chunk_goes_on() -> None:
    answer = ClientAnswer()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert not answer.add(0.0, head + b"9\r\nab0\r\n\r\n")
    assert answer.add(1.0, b"yz\r\n0\r\n\r\n")
    assert answer.body() == b"ab0\r\n\r\nyz"


def test_answers_with_a_length_and_without_one() -> None:
    answer = ClientAnswer()
    assert not answer.add(0.0, b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nab")
    assert answer.add(0.0, b"cd")
    assert (answer.status, answer.body(), answer.keeps_open) == (503, b"abcd", True)
    answer = ClientAnswer()
    assert not answer.add(0.0, b"HTTP/1.0 200 OK\r\n\r\nab")
    assert answer.ends_with_connection()
    assert (answer.body(), answer.keeps_open) == (b"ab", False)
    with pytest.raises(ConnectionError, match="no HTTP"):
        ClientAnswer().add(0.0, b"SSH-2.0-x\r\n\r\n")


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:b", "http://a/?x=1"])
def test_urls(url: str) -> None:
    with pytest.raises(InputError, match="--url must be like"):
        Address.of(url)
    found = Address.of("https://example.com/sub/v1/", "k")
    assert (found.host, found.port, found.tls, found.prefix) == ("example.com", 443, True, "/sub")
    assert Address.of("[::1]:80").message("GET", "/x").startswith(b"GET /x HTTP/1.1\r\nHost: [::1]:80\r\n")
    assert b"Authorization: Bearer k\r\n" in found.message("GET", "/x")


# Loads ---------------------------------------------------------------------------------------------------


def measured(server: Running, load: Load, companion: bool = False) -> Run:
    made = Run("run", load)
    with serve_load.open_client(Address.of(server.url)) as (client, loop):
        served = loop.run(serve_load.describe(client, None))
        todo = serve_load.jobs(client, served, load, 1)
        beside = None
        if companion:
            one = Load(1, Span(300, 300), Span(1, 1))
            beside = Companion(serve_load.jobs(client, served, one, 2), once=True)
        loop.run(serve_load.run(client, made, todo, beside))
    return made


def test_every_request_is_sent_and_its_answer_is_whole(server: Running) -> None:
    before = server.model.engine.stats()
    run = measured(server, Load(6, Span(4, 9), Span(3, 7), prefix=140, concurrency=3))
    stats = server.model.engine.stats()
    assert [each.error for each in run.outcomes] == [None] * 6
    assert all(each.output_tokens == each.max_tokens for each in run.outcomes)
    assert all(144 <= each.prompt_tokens <= 149 for each in run.outcomes)
    assert sum(each.prompt_tokens for each in run.outcomes) == stats.prompt_tokens - before.prompt_tokens
    assert sum(each.output_tokens for each in run.outcomes) == stats.generation_tokens - before.generation_tokens
    assert any(each.is_cached for each in run.outcomes)
    for each in run.outcomes:
        assert each.events
        assert each.sent < each.events[0] <= each.events[-1] <= each.ended
        assert list(each.events) == sorted(set(each.events))
    assert 0 < run.seconds < 60
    running_at_once = [sum(a.sent <= b.sent < a.ended for a in run.outcomes) for b in run.outcomes]
    assert max(running_at_once) <= 3


def test_a_load_is_the_same_for_the_same_seed(server: Running) -> None:
    client = Client(Address.of(server.url))
    served = serve_load.ServerInfo("tiny", 200, 512, "", "")

    def bodies(seed: int, salt: int = 0) -> list[dict[str, Any]]:
        made = serve_load.jobs(client, served, Load(20, Span(2, 6), Span(1, 3), prefix=3, seed=seed), salt)
        return [json.loads(job.message.partition(b"\r\n\r\n")[2]) for job in made]

    assert bodies(1) == bodies(1)
    assert bodies(1) != bodies(2)
    assert bodies(1) != bodies(1, salt=1)
    prompts = [body["prompt"] for body in bodies(1)]
    assert len({tuple(prompt[:3]) for prompt in prompts}) == 1
    assert {len(prompt) for prompt in prompts} == {5, 6, 7, 8, 9}
    assert {body["max_tokens"] for body in bodies(1)} == {1, 2, 3}
    assert all(0 <= token < 200 for prompt in prompts for token in prompt)


def test_requests_arrive_at_a_rate(server: Running) -> None:
    load = Load(12, Span(2, 2), Span(1, 1), rate=60.0)
    planned = serve_load._arrivals(load, 12)
    assert planned[0] == 0
    assert planned == sorted(planned)
    assert np.mean(np.diff(serve_load._arrivals(load, 4000))) == pytest.approx(1 / 60, rel=0.1)
    sent = sorted(each.sent for each in measured(server, load).outcomes)
    assert sent[-1] - sent[0] > planned[-1] / 2


def test_a_long_prompt_enters_while_all_streams_run(server: Running) -> None:
    run = measured(server, Load(2, Span(2, 2), Span(300, 300), concurrency=2), companion=True)
    (long,) = run.beside
    assert long.error is None
    assert long.prompt_tokens == 300
    assert all(each.events[0] <= long.sent for each in run.outcomes)
    assert window(run) == (long.sent, long.events[0])


# Numbers -------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_run() -> None:
    outcomes = [
        Outcome(0.0, 1.0, (0.5, 0.6, 0.9), 10, 5, 4, 5),
        Outcome(0.0, 2.0, (0.25, 1.25), 20, 3, 10, 4),
        Outcome(1.0, 1.5, error="400: no"),
    ]
    run = Run(
        "2 streams", Load(3, Span(1, 1), Span(5, 5)), outcomes, [Outcome(0.7, 1.0, (0.95,))], seconds=2.0, busy=1.9
    )
    found = summary(run)
    assert (found["completed"], found["failed"], found["short"]) == (2, 1, 1)
    assert (found["requests_per_second"], found["output_tokens_per_second"]) == (1.0, 4.0)
    assert (found["total_tokens_per_second"], found["cached_tokens"]) == (19.0, 14)
    assert found["ttft_ms"] == pytest.approx(
        {"mean": 375, "p50": 375, "p95": 487.5, "p99": 497.5, "max": 500, "count": 2}
    )
    assert found["ttft_cached_ms"]["mean"] == pytest.approx(250)
    assert found["ttft_uncached_ms"]["mean"] == pytest.approx(500)
    assert found["itl_ms"]["mean"] == pytest.approx((100 + 300 + 1000) / 3)
    assert found["tpot_ms"]["mean"] == pytest.approx((100 + 500) / 2)
    assert found["e2e_ms"]["max"] == pytest.approx(2000)
    assert found["itl_window_ms"]["count"] == 2  # 0.6 … 0.9 and 0.25 … 1.25
    assert [line.partition(": ")[2] for line in warnings(found)] == [
        "1 of 3 requests failed",
        "the server says 400: no",
        "1 answers are shorter than asked for; the server may not know ignore_eos",
        "the client took 95% of a core, and may be what limits",
    ]


def test_answers_that_are_read_at_once_have_no_time_per_token() -> None:
    assert Outcome(0.0, 1.0, (0.5,), 3, 8).per_token is None
    assert Outcome(0.0, 1.0, (0.5, 0.75), 3, 6).per_token == pytest.approx(0.05)


def test_a_run_without_answers_has_no_latencies() -> None:
    found = summary(Run("none", Load(1, Span(1, 1), Span(1, 1)), [Outcome(0.0, 0.0, error="no")]))
    assert found["failed"] == 1
    assert not [key for key in found if key.endswith("_ms")]


# The command ---------------------------------------------------------------------------------------------


def test_the_command_prints_saves_and_draws(server: Running, tmp_path: Path) -> None:
    saved, drawn = tmp_path / "runs.json", tmp_path / "runs.svg"
    options = ["--concurrency", "1,2", "-p", "4-8", "-n", 6, "--num-requests", 3, "--save", saved, "--chart", drawn]
    done = shaderlm("bench", "serve", "--url", server.url, *options)
    assert (done.code, done.err) == (0, "")
    for words in ("1 stream ", "2 streams ", "time to first token", "end to end", "p99"):
        assert words in done.out
    found = json.loads(saved.read_text(encoding="utf-8"))
    # On a busy machine all tokens may come in one event, and then there is nothing between.
    assert ("between tokens" in done.out) == any("itl_ms" in run for run in found["runs"])
    assert found["server"]["name"] == "tiny"
    assert [run["name"] for run in found["runs"]] == ["1 stream", "2 streams"]
    for run in found["runs"]:
        assert run["load"]["prompt"] == {"low": 4, "high": 8}
        assert (run["completed"], run["output_tokens"], len(run["requests"])) == (3, 18, 3)
        assert math.isclose(run["output_tokens_per_second"] * run["seconds"], 18)
    text = drawn.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    shown = [float(number.replace(",", "")) for number in re.findall(r">([\d.,]+) ms", text)]
    for run in found["runs"]:
        assert any(math.isclose(number, run["ttft_ms"]["p50"], abs_tol=0.06) for number in shown)


@pytest.mark.parametrize("kind", ["logprobs", "schema"])
def test_one_row_of_another_kind(kind: str, server: Running) -> None:
    options = ["--concurrency", 2, "-p", 4, "-n", 24, "--num-requests", 2, "--beside", kind, "--json"]
    done = shaderlm("bench", "serve", "--url", server.url, *options)
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert [run["name"] for run in found["runs"]] == ["1 stream and a plain one", f"1 stream and one with {kind}"]
    assert [run["completed"] for run in found["runs"]] == [4, 4]
    if all("tpot_ms" in run for run in found["runs"]):  # a slow reader gets an answer at once
        assert found["slowdown"] == found["runs"][1]["tpot_ms"]["mean"] / found["runs"][0]["tpot_ms"]["mean"]


def test_failed_requests_are_counted_and_explained(server: Running) -> None:
    done = shaderlm("bench", "serve", "--url", server.url, "--vocabulary", 10**6, "-p", 9, "--num-requests", 2)
    assert done.code == 1
    assert "2 of 2 requests failed" in done.err
    assert "400: " in done.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "x://y"], "--url must be like"),
        (["--url", "http://a", "-m", "b"], "--model is for a server that is started here"),
        (["--url", "http://a", "--backend", "wgpu"], "--backend is for a server that is started here"),
        (["--api-key", "k"], "--api-key is for --url"),
        (["-p", "9-3"], "must be a number of tokens, or a range"),
        (["-p", "0"], "a prompt has at least one token"),
        (["-n", "0"], "-n must be at least 1"),
        (["--request-rate", "nan"], "--request-rate must be above 0"),
        (["--beside", "prompt"], "must be prompt:TOKENS"),
        (["--beside", "grammar", "--concurrency", "1"], "--beside needs one --concurrency"),
        (["--concurrency", "0"], "must be numbers above 0"),
        (["--save", "/no/such/folder/x.json"], "cannot write"),
    ],
)
def test_mistakes_are_found_before_anything_starts(options: list[str], words: str) -> None:
    done = shaderlm("bench", "serve", *options)
    assert done.code == 2
    assert words in " ".join(done.err.split())


def test_a_prompt_that_does_not_fit(server: Running) -> None:
    done = shaderlm("bench", "serve", "--url", server.url, "-p", 500, "-n", 13)
    assert done.code == 2
    assert "need 513 tokens, the server's context holds 512" in done.err


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as taken:  # bound, but it does not listen
        taken.bind(("127.0.0.1", 0))
        done = shaderlm("bench", "serve", "--url", f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert done.code == 1
    assert "cannot connect to 127.0.0.1:" in done.err


def test_serve_refuses_a_synthetic_model_that_there_is_not() -> None:
    done = shaderlm("serve", "-m", "synthetic:llama-3.2-2b")
    assert (done.code, done.out) == (2, "")
    assert "no synthetic model 'llama-3.2-2b'" in done.err


def test_a_server_that_wants_a_key(tiny: Path) -> None:
    with running(loader(tiny), keys=["secret"]) as made:
        options = ["--url", made.url, "--concurrency", 1, "-p", 4, "-n", 2, "--no-warmup"]
        refused = shaderlm("bench", "serve", *options)
        assert refused.code == 2
        assert "with status 401" in refused.err
        assert shaderlm("bench", "serve", *options, "--api-key", "secret").code == 0


def test_ctrl_c_reports_what_was_measured(server: Running) -> None:
    options = ["--concurrency", 2, "-p", 4, "-n", 8, "--num-requests", 20_000, "--no-warmup"]
    before = server.model.engine.stats().finished["length"]
    with start("bench", "serve", "--url", server.url, *options) as process:
        while process.poll() is None and server.model.engine.stats().finished["length"] < before + 20:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == "interrupted; what was measured is above\n"
    assert "time to first token" in out


def test_a_server_is_started_and_ended(tiny: Path) -> None:
    before = children()
    done = shaderlm("bench", "serve", "-m", tiny, "--device", "cpu", "--concurrency", 2, "-p", 4, "-n", 4, "--json")
    assert (done.code, done.err.count("\n"), done.err.split(" takes")[0]) == (0, 1, "the KV cache")
    found = json.loads(done.out)
    assert (found["server"]["name"], found["server"]["device"]) == ("tiny", "cpu (LLVM)")
    assert found["runs"][0]["completed"] == 8
    assert children() == before


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_ends_with_the_command(number: signal.Signals, tiny: Path) -> None:
    with start("bench", "serve", "-m", tiny, "--device", "cpu", "--num-requests", 20_000) as process:
        while not (found := children(process.pid)) and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert found
    assert not any(Path(f"/proc/{each}").exists() for each in found), "the server is left behind"


def children(pid: int | str = "self") -> list[int]:
    """Processes that were started by another one, where the system says so."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(each) for path in found for each in path.read_text().split())


def test_a_server_that_does_not_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = shaderlm("bench", "serve", "-m", tmp_path / "none.gguf", "--device", "cpu")
    assert done.code in (1, 2)
    assert "before it could be measured" in done.err
    assert "none.gguf" in done.err


# Synthetic models ----------------------------------------------------------------------------------------


def test_a_made_up_vocabulary_reads_and_writes_text() -> None:
    vocabulary = made_up_vocabulary(20_000)
    tokenizer = Tokenizer(vocabulary)
    assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == 20_000
    assert tokenizer.stop_ids == {19_999}
    assert tokenizer.decode(tokenizer.encode("Grüße: 1 + 1")) == "Grüße: 1 + 1"
    assert tokenizer.decode([300, 301, 19_998]) == " sba tba ifdb"


def test_a_synthetic_model_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SYNTHETIC, "small", ModelShape("small", 1, 64, 4, 2, 16, 96, 300, tied=True))
    spec = "synthetic:small:f16"
    with running(lambda: ServedModel(load_synthetic(spec, "cpu", context=256), names=(spec,))) as made:
        assert made.model.config.context == 256
        options = ["--concurrency", 2, "-p", 16, "-n", 8, "--num-requests", 4, "--beside", "grammar", "--json"]
        done = shaderlm("bench", "serve", "--url", made.url, *options)
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["server"]["name"], found["server"]["vocabulary"]) == (spec, 300)
    assert [run["output_tokens"] for run in found["runs"]] == [64, 64]
