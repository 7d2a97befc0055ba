"""`shaderlm batch`: the results that Python gives, all of them once, whatever ended the run before."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shaderlm as package
from shaderlm.cli import batch
from shaderlm.cli.batch_files import ResultFile, request_file
from shaderlm.cli.loading import load_model
from shaderlm.engine import Engine, LanguageModel
from shaderlm.errors import DeviceError, InputError
from shaderlm.install import install_command

from .command_line import COMMAND, Done, Recorder, shaderlm
from .tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", context=512)


def chat_line(name: str, content: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return line(name, "/v1/chat/completions", {"messages": messages, "max_tokens": 5, "temperature": 0} | body)


def line(name: str, url: str, body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    return path


def run(model: Path, asked: Path | str, output: Path, *arguments: object, **options: Any) -> Done:
    return shaderlm("batch", asked, "-o", output, "-m", model, "--device", "cpu", *arguments, **options)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Results by custom_id; none is there twice."""
    found = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def answers(path: Path) -> dict[str, str]:
    return {name: each["response"]["body"]["choices"][0]["message"]["content"] for name, each in read(path).items()}


def expected(model: Path, contents: dict[str, str], max_tokens: int = 5) -> dict[str, str]:
    """What Python answers, one by one."""
    with package.load(model, device="cpu") as loaded:
        ask = {name: [{"role": "user", "content": content}] for name, content in contents.items()}
        return {name: str(loaded.chat(messages, max_tokens=max_tokens)) for name, messages in ask.items()}


# Results ---------------------------------------------------------------------------------------------------


def test_the_results_are_those_of_python(tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    asked = write(
        tmp_path / "in.jsonl",
        chat_line("chat", "Hello", model="tiny"),
        line("text", "/v1/completions", {"prompt": ["one", "two"], "max_tokens": 4, "temperature": 0}),
        line("vectors", "/v1/embeddings", {"input": ["one", "two"], "model": "Tiny Llama"}),
    )
    done = run(tiny, asked, output)
    assert (done.code, done.out) == (0, "")
    assert f"{output} has the results of 3 requests\n" in done.err
    found = read(output)
    assert set(found) == {"chat", "text", "vectors"}
    for each in found.values():
        assert list(each) == ["id", "custom_id", "response", "error"]
        assert each["error"] is None
        assert each["response"]["status_code"] == 200
        assert each["id"].removeprefix("batch_") == each["response"]["request_id"]
    with package.load(tiny, device="cpu") as model:
        texts = [str(model.generate(prompt, max_tokens=4)) for prompt in ("one", "two")]
    chat = found["chat"]["response"]["body"]
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["content"] == expected(tiny, {"": "Hello"})[""]
    assert chat["usage"]["completion_tokens"] == 5
    assert [choice["text"] for choice in found["text"]["response"]["body"]["choices"]] == texts
    vectors = [np.array(each["embedding"]) for each in found["vectors"]["response"]["body"]["data"]]
    assert all(np.linalg.norm(vector) == pytest.approx(1, abs=1e-3) for vector in vectors)
    assert not np.allclose(vectors[0], vectors[1])


def test_many_run_at_once_and_each_is_as_if_it_were_alone(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {f"r{i}": f"Question {i}" for i in range(24)}
    loaded = captured(monkeypatch, lambda model: waits_for_company(model.engine, 8, len(contents)))
    asked = write(tmp_path / "in.jsonl", *(chat_line(name, text) for name, text in contents.items()))
    assert run(tiny, asked, tmp_path / "out.jsonl", "--parallel", 8).code == 0
    stats = loaded[0].engine.stats()
    assert stats.options.parallel == 8
    assert stats.generation_tokens / stats.steps > 3
    assert answers(tmp_path / "out.jsonl") == expected(tiny, contents)


def waits_for_company(engine: Engine, parallel: int, requests: int) -> None:
    """A turn begins when as many requests are there as run at once, or all that are left, however slowly they come."""
    iterate = engine._iterate

    def turn() -> Any:
        until = time.monotonic() + 60
        while len(engine._inbox.active) < min(parallel, requests - sum(engine.stats().finished.values())):
            assert time.monotonic() < until, "the requests do not come"
            time.sleep(0.001)
        return iterate()

    engine._iterate = turn  # type: ignore[method-assign]


def captured(
    monkeypatch: pytest.MonkeyPatch, then: Callable[[LanguageModel], None] = lambda model: None
) -> list[LanguageModel]:
    """The models that the command loads, and what is done with each."""
    loaded: list[LanguageModel] = []

    def kept(*given: Any) -> LanguageModel:
        loaded.append(load_model(*given))
        then(loaded[-1])
        return loaded[-1]

    monkeypatch.setattr(batch, "load_model", kept)
    return loaded


def test_errors_are_results_and_can_be_tried_again(tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    wrong = [
        chat_line("range", "Hello", temperature=-1),
        chat_line("stream", "Hello", stream=True),
        chat_line("long", "x" * 600),
        line("route", "/v1/nothing", {"input": "one"}),
        line("body", "/v1/embeddings", ["one"]),
        {**line("method", "/v1/embeddings", {"input": "one"}), "method": "GET"},
        {"custom_id": "empty"},
    ]
    asked = write(tmp_path / "in.jsonl", chat_line("right", "Hello"), *wrong)
    done = run(tiny, asked, output)
    assert done.code == 1
    assert "has the results of 8 requests, 7 of them failed; --retry-failed runs those again\n" in done.err
    found = read(output)
    right = found.pop("right")
    assert right["error"] is None
    status = {name: each["response"]["status_code"] for name, each in found.items()}
    assert status == {
        "range": 400,
        "stream": 400,
        "long": 400,
        "route": 404,
        "body": 400,
        "method": 405,
        "empty": 405,
    }
    for each in found.values():
        assert each["error"]["message"] == each["response"]["body"]["error"]["message"]
        assert each["error"]["code"] == each["response"]["body"]["error"]["type"]
    assert found["long"]["error"]["code"] == "exceed_context_size_error"
    assert "temperature" in found["range"]["error"]["message"]
    before = output.read_bytes()
    again = run(tiny, asked, output)
    assert (again.code, output.read_bytes()) == (1, before), "what failed has a result, too"
    assert "8 of 8 requests have a result already\n" in again.err
    refused = run(tiny, asked, output, "--retry-failed", "--alias", "other")
    assert (refused.code, output.read_bytes()) == (2, before), "nothing is dropped before all is checked"
    again = run(tiny, asked, output, "--retry-failed")
    assert again.code == 1
    assert "1 of 8 requests have a result already\n7 requests in " in again.err
    assert read(output)["right"] == right
    assert {name: each["id"] for name, each in read(output).items()} == {
        name: each["id"] for name, each in (found | {"right": right}).items()
    }


def test_names_of_the_model(tiny: Path, tmp_path: Path) -> None:
    asked, output = write(tmp_path / "in.jsonl", chat_line("a", "Hello", model="gpt")), tmp_path / "out.jsonl"
    done = run(tiny, asked, output)
    assert (done.code, output.read_bytes()) == (2, b"")
    words = "line 1 asks for the model 'gpt', and this one is 'tiny'; --alias gpt gives it that name"
    assert words in done.err
    assert run(tiny, asked, output, "--alias", "gpt").code == 0
    assert read(output)["a"]["response"]["body"]["model"] == "gpt"


def test_defaults_for_requests_that_say_nothing(tiny: Path, tmp_path: Path) -> None:
    body = {"prompt": "one", "temperature": 2.0}
    asked = write(tmp_path / "in.jsonl", line("a", "/v1/completions", body), line("b", "/v1/completions", body))
    assert run(tiny, asked, tmp_path / "out.jsonl", "-n", 7, "--seed", 5).code == 0
    found = {name: each["response"]["body"] for name, each in read(tmp_path / "out.jsonl").items()}
    assert found["a"]["usage"]["completion_tokens"] == 7
    assert found["a"]["choices"] == found["b"]["choices"]


def test_standard_input(tiny: Path, tmp_path: Path) -> None:
    given = json.dumps(chat_line("a", "Hello")) + "\n\n  \n" + json.dumps(chat_line("b", "Bye"))
    assert run(tiny, "-", tmp_path / "out.jsonl", given=given).code == 0
    assert answers(tmp_path / "out.jsonl") == expected(tiny, {"a": "Hello", "b": "Bye"})


def test_standard_output(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = write(tmp_path / "asked.jsonl", chat_line("a", "Hello"), line("b", "/v1/none", {}))
    done = run(tiny, asked, Path("-"))
    assert sorted(json.loads(text)["custom_id"] for text in done.out.splitlines()) == ["a", "b"]
    assert done.code == 1
    assert "standard output has the results of 2 requests, 1 of them failed" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["asked.jsonl"], "no file is named -"


def test_a_full_disk_is_told_with_the_file(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, output = write(tmp_path / "asked.jsonl", chat_line("a", "Hello")), tmp_path / "out.jsonl"

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ResultFile, "_write", full)
        done = run(tiny, asked, output)
    words = "No space left on device. 0 results are written; the same command goes on"
    assert (done.code, done.err) == (1, f"shaderlm: cannot write {output}: {words}\n")
    assert run(tiny, asked, output).code == 0


def test_a_terminal_sees_a_bar(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "isatty", lambda self: True)
    asked = write(tmp_path / "in.jsonl", *(chat_line(f"r{i}", "Hello") for i in range(3)))
    done = run(tiny, asked, tmp_path / "out.jsonl")
    assert done.code == 0
    assert "/3" in done.err
    assert "tok/s" in done.err


# What cannot be run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "has no requests; each line must be one"),
        ("\n\n", "has no requests"),
        ('{"custom_id": "a"', "line 1 must be JSON in UTF-8: "),
        ("[1]", "line 1 must be an object with a custom_id, a text; got list"),
        ('{"custom_id": 5}', "got custom_id 5"),
        ('{"url": "x"}', "got custom_id None"),
        ('{"custom_id": "\\ud800"}', "got custom_id '\\ud800'"),
        ('{"custom_id": "a"}\n\n{"custom_id": "a"}', "line 3 has the custom_id 'a' of line 1"),
        ("x\nx\nx\nx\nx", "line 3 must be JSON in UTF-8: Expecting value: line 1 column 1 (char 0); and 2 more"),
        ("[" * 100_000, "line 1 must be JSON in UTF-8: "),
    ],
)
def test_a_file_that_is_no_batch_is_refused_before_anything_runs(
    tiny: Path, tmp_path: Path, lines: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "load_model", lambda *_: pytest.fail("the model was loaded"))
    asked = tmp_path / "in.jsonl"
    asked.write_text(lines, encoding="utf-8")
    done = run(tiny, asked, tmp_path / "out.jsonl")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert words in done.err
    assert not (tmp_path / "out.jsonl").exists()


def test_other_files_are_not_written_to(tiny: Path, tmp_path: Path) -> None:
    asked, output = write(tmp_path / "in.jsonl", chat_line("a", "Hello")), tmp_path / "out.jsonl"
    done = run(tiny, asked, output)
    assert done.code == 0
    assert "1 request in " in done.err
    assert "has the results of 1 request\n" in done.err
    before = output.read_bytes()
    cases = [
        (write(tmp_path / "changed.jsonl", chat_line("a", "Other")), "'a', which has changed in ", 0),
        (write(tmp_path / "other.jsonl", chat_line("b", "Hello")), "'a', which ", 0),
        (
            write(tmp_path / "more.jsonl", chat_line("a", "Hello"), chat_line("b", "Hello")),
            "of the model 'tiny', and",
            1,
        ),
    ]
    for path, words, alias in cases:
        done = run(tiny, path, output, *(("--alias", "other") if alias else ()))
        assert (done.code, output.read_bytes()) == (2, before)
        assert words in done.err
    for notes in ("notes\n", "notes", "{", '{"id":"batch_req_1"}\n'):
        output.write_text(before.decode() + notes)
        done = run(tiny, asked, output)
        if notes == "{":
            assert (done.code, output.read_bytes()) == (0, before), "the beginning of a result"
        else:
            assert "line 2 is not the result of a request. Give another -o" in done.err
            assert output.read_text() == before.decode() + notes
    for path, words in (
        (asked, "another file than the requests"),
        (tmp_path, "not a file"),
        (tmp_path / "a/b", "No such"),
    ):
        done = run(tiny, asked, path)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert words in done.err
    assert "cannot read" in run(tiny, tmp_path / "none", tmp_path / "x").err
    (tmp_path / "there").touch()
    assert "cannot read" in run(tiny, tmp_path / "none", tmp_path / "there").err


@pytest.mark.skipif(os.name == "nt", reason="files are locked on POSIX alone")
def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    first = ResultFile(tmp_path / "out.jsonl")
    with pytest.raises(InputError, match="is being written by another run"):
        ResultFile(tmp_path / "out.jsonl")
    first.close()
    ResultFile(tmp_path / "out.jsonl").close()


def test_without_its_package_it_says_what_to_install(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "msgspec", None)
    done = run(tiny, "-", tmp_path / "out.jsonl")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert install_command("serve") in done.err


# Runs that end early ---------------------------------------------------------------------------------------


def test_a_file_that_ends_anywhere_is_repaired(tmp_path: Path) -> None:
    """Whatever was written before a kill: results that are whole stay, the rest of a line goes."""
    whole = [
        f'{{"id":"batch_req_{name}","custom_id":"{name}","response":{response},"error":{error}}}\n'.encode()
        for name, response, error in (
            ("a", '{"status_code":200,"body":{"model":"m","text":"é🙂"}}', "null"),
            ("b", '{"status_code":400,"body":{"error":{}}}', '{"code":"x","message":"y"}'),
            ("c", '{"status_code":200,"body":{"model":"m"}}', "null"),
        )
    ]
    path, everything = tmp_path / "out.jsonl", b"".join(whole)
    for size in range(len(everything) + 1):
        path.write_bytes(everything[:size])
        results = ResultFile(path)
        count = sum(len(b"".join(whole[: n + 1])) - 1 <= size for n in range(3))  # the newline may be missing
        assert list(results.ids) == ["a", "b", "c"][:count], size
        assert results.failed == ({"b"} if count > 1 else set())
        assert path.read_bytes() == b"".join(whole[:count])
        for text in whole[count:]:
            results.add("x", text.removesuffix(b"\n"), failed=False)
        results.close()
        assert path.read_bytes() == everything


def test_requests_are_read_again_where_they_lie(tmp_path: Path) -> None:
    path, long = tmp_path / "in.jsonl", b"\xc3\xa9" * 200_000  # more than a buffer holds
    path.write_bytes(b'\xef\xbb\xbf{"custom_id": "a", "body": "' + long + b'"}\r\n\n{"custom_id": "b", "url": "u"}')
    with request_file(str(path)) as asked:
        assert [(each.number, each.custom_id) for each in asked.lines] == [(1, "a"), (3, "b")]
        assert asked.read(asked.lines[0])["body"] == long.decode()
        assert asked.read(asked.lines[1])["url"] == "u"
        path.write_bytes(b'{"custom_id": "a", "body": "e"}')
        with pytest.raises(InputError, match="line 1 has changed since the batch began"):
            asked.read(asked.lines[0])


def batch_of(count: int, path: Path) -> dict[str, str]:
    contents = {f"r{i}": f"Question {i}" for i in range(count)}
    write(path, *(chat_line(name, text, max_tokens=20) for name, text in contents.items()))
    return contents


def started(model: Path, asked: Path, output: Path) -> subprocess.Popen[str]:
    command = [*COMMAND, "batch", asked, "-o", output, "-m", model, "--device", "cpu", "--parallel", "2"]
    return subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, encoding="utf-8")


def wait_for_results(child: subprocess.Popen[str], output: Path, count: int) -> None:
    until = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert child.poll() is None, child.stderr and child.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.005)


def test_nothing_is_lost_and_nothing_comes_twice_after_kills(tiny: Path, tmp_path: Path) -> None:
    kill_and_finish(tiny, tmp_path, kills=1)


@pytest.mark.long
def test_nothing_is_lost_and_nothing_comes_twice_after_many_kills(tiny: Path, tmp_path: Path) -> None:
    kill_and_finish(tiny, tmp_path, kills=20)


def kill_and_finish(model: Path, folder: Path, kills: int) -> None:
    asked, output = folder / "in.jsonl", folder / "out.jsonl"
    contents = batch_of(60, asked)
    for kill in range(1, kills + 1):
        child = started(model, asked, output)
        try:
            wait_for_results(child, output, 2 * kill)
        finally:
            child.kill()
            child.communicate()
    before = output.read_bytes()
    assert before.count(b"\n") < 60
    done = run(model, asked, output)
    assert done.code == 0
    assert output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert answers(output) == expected(model, contents, 20)


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_keeps_what_is_finished(tiny: Path, tmp_path: Path) -> None:
    asked, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    batch_of(60, asked)
    child = started(tiny, asked, output)
    wait_for_results(child, output, 1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err == f"interrupted: {len(read(output))} of 60 results are written; the same command goes on\n"


def test_a_request_that_ends_while_it_is_looked_at_is_not_lost(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, output, looks = tmp_path / "in.jsonl", tmp_path / "out.jsonl", Counter[str]()
    contents = batch_of(3, asked)

    def finished(job: Any) -> bool:
        """Each runs at the first look, and has ended at the second."""
        looks[job.key] += 1
        return looks[job.key] > 1

    monkeypatch.setattr("shaderlm.server.batch._Job.finished", property(finished))
    assert run(tiny, asked, output).code == 0
    assert answers(output) == expected(tiny, contents, 20)


def test_a_lost_device_is_no_result(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    contents, loaded, add = batch_of(6, asked), captured(monkeypatch), ResultFile.add

    def lost(*given: Any, **options: Any) -> None:
        add(*given, **options)
        loaded[0].engine._inbox.lost = DeviceError("the device is lost")

    with monkeypatch.context() as patched:
        patched.setattr(ResultFile, "add", lost)
        done = run(tiny, asked, output, "--parallel", 2)
    assert done.code == 1
    count = len(read(output))
    assert done.err == f"shaderlm: the device is lost. {count} of 6 results are written; the same command goes on\n"
    assert 1 <= count <= 2
    assert run(tiny, asked, output).code == 0
    assert answers(output) == expected(tiny, contents, 20)
