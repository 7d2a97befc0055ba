"""Batches by Ray Data: the results of one engine, each once, whatever ended the runs before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm import load
from shaderlm.cli import batch_parquet
from shaderlm.cli.batch_parquet import ParquetResults, parquet_requests
from shaderlm.cli.batch_ray import RayEngines
from shaderlm.errors import DeviceError, InputError, ShaderlmError
from shaderlm.ray.cluster import local_ray
from shaderlm.ray.config import cluster_config
from shaderlm.ray.rows import request_of
from shaderlm.server.batch_ids import request_id

from .command_line import COMMAND, Done, shaderlm
from .ray_cluster import nothing_of, processes, until
from .tiny_models import write_tiny_llama

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.filterwarnings("ignore")]

WORDS = ("the", "an", "in", "ou", "er")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", context=256)


def request(number: int) -> dict[str, Any]:
    content = f"{number} {WORDS[number % len(WORDS)]}"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def command(tiny: Path, requests: Path, output: Path) -> list[str]:
    options = ["-m", str(tiny), "--device", "cpu", "--ray", "--replicas", "2"]
    return [sys.executable, "-m", "shaderlm", "batch", str(requests), "-o", str(output), *options]


def results(output: Path) -> list[dict[str, Any]]:
    """Whole lines: a run that was killed may have cut off its last one."""
    if not output.exists():
        return []
    return [json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]]


def start(*arguments: object) -> subprocess.Popen[str]:
    """In a session of its own: a kill ends its processes, too, as the end of a machine does."""
    return subprocess.Popen([*map(str, arguments)], stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True)


def finished(child: subprocess.Popen[str], seconds: float) -> str:
    """What it says until its end."""
    try:
        return child.communicate(timeout=seconds)[1]
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)


def leaves_nothing(*pids: int) -> None:
    """What a killed run could not remove, the next one does."""
    for pid in pids:
        until(partial(nothing_of, pid), "no process and no file", 30)


@pytest.mark.parametrize(("count", "kills"), [(400, 1), pytest.param(10_000, 2, marks=pytest.mark.long)])
def test_a_batch_that_is_killed_has_every_result_once(tiny: Path, tmp_path: Path, count: int, kills: int) -> None:
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("".join(json.dumps(request(number)) + "\n" for number in range(count)))
    began, killed, pids = time.monotonic(), list[int](), list[int]()
    for part in range(1, kills + 1):
        child = start(*command(tiny, requests, output))
        try:
            while child.poll() is None and len(results(output)) < part * count // 4:
                time.sleep(0.05)
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            _, output_of_child = child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL, output_of_child
        killed.append(len(results(output)))
        pids.append(child.pid)
    last = start(*command(tiny, requests, output))
    err = finished(last, 590)
    assert last.returncode == 0, err
    assert f"{killed[-1]:,} of {count:,} requests have a result already" in err
    leaves_nothing(*pids, last.pid)
    lines = results(output)
    assert sorted(each["custom_id"] for each in lines) == sorted(f"id-{number}" for number in range(count))
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in lines}
    with load(tiny, device="cpu") as model:
        for number in range(0, count, count // 20):
            messages = request(number)["body"]["messages"]
            assert texts[f"id-{number}"] == model.chat(messages, max_tokens=4)
    seconds = time.monotonic() - began
    print(f"\n{count:,} requests, killed at {killed}, in {seconds:.0f} s: {err.splitlines()[-2:]}")


def test_ctrl_c_is_heard_while_no_result_comes(tiny: Path, tmp_path: Path) -> None:
    requests, output = tmp_path / "in.parquet", tmp_path / "out.parquet"
    write_table(requests, [request(number) for number in range(8)])
    child = start(*COMMAND, *command(tiny, requests, output)[3:])
    try:
        # Ray Data's own actor is there while it waits for ours, which take seconds to load.
        until(lambda: "ActorLocationTracker" in "".join(processes(f"/slm-{child.pid}-").values()), "Ray Data")
        child.send_signal(signal.SIGINT)
    finally:
        err = finished(child, 60)
    assert child.returncode == 130, err
    assert err.endswith("interrupted: 0 of 8 results are written; the same command goes on\n")
    leaves_nothing(child.pid)
    last = start(*command(tiny, requests, output))
    err = finished(last, 120)
    assert last.returncode == 0, err
    assert ids_in(output) == [f"id-{number}" for number in range(8)]


def test_a_lost_device_is_another_process(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = tmp_path / "losses"
    monkeypatch.setenv("SHADERLM_TEST_LOSSES", str(losses))
    args = {"model": str(tiny), "device": "cpu", "num_cpus": 0}
    rows = [request(number) for number in range(8)]
    with local_ray(2):
        import ray

        from shaderlm.ray.predictor import STARTS, results_of

        from .lost_device import LosingPredictor, LosingRunner

        def run(**more: Any) -> list[str]:
            (config,) = cluster_config({"models": {"model": args | more}}).models.values()
            came = results_of(iter(rows), config, actors=1, block=4, runner=LosingRunner)
            return sorted(custom_id for block in came for custom_id, _ in block)

        def predict() -> list[str]:
            dataset = ray.data.from_items([{**row, "body": json.dumps(row["body"])} for row in rows])
            one = ray.data.ActorPoolStrategy(size=1)
            options = {"compute": one, "batch_size": 4, "num_cpus": 0}
            return sorted(
                row["custom_id"]
                for row in dataset.map_batches(LosingPredictor, fn_constructor_kwargs=args, **options).take_all()
            )

        losses.write_text("x")
        assert predict() == [f"id-{number}" for number in range(8)]
        assert losses.read_text() == ""
        losses.write_text("x" * 9)
        words = f"an engine was lost {STARTS} times with no block finished: the device is lost"
        with pytest.raises(DeviceError, match=f"^{words}$"):
            run()
        with pytest.raises(DeviceError, match=r"^no adapter matches 'nosuch'"):  # it was never there
            run(device="nosuch")


def test_an_error_of_an_actor_is_one_line() -> None:
    from shaderlm.ray.problems import error_of

    traceback = """\x1b[36mray::MapWorker(MapBatches(RequestRunner)).submit()\x1b[39m (pid=1, ip=127.0.0.1)
  File "predictor.py", line 1, in run
    raise self._problem
shaderlm.errors.{}: must be a: b

The above exception was the direct cause of the following exception:

ray.exceptions.UserCodeException: UDF failed to process a data block."""
    for name, kind in (("InputError", InputError), ("ModelError", ShaderlmError), ("DeviceError", DeviceError)):
        problem = error_of(Exception(traceback.format(name)))
        assert (type(problem), str(problem)) == (kind, "must be a: b")
    problem = error_of(Exception(traceback.replace("shaderlm.errors.{}", "KeyError")))
    assert (type(problem), str(problem)) == (DeviceError, "Ray has ended the engines: KeyError: must be a: b")
    problem = error_of(Exception("The actor died unexpectedly before finishing this task.\n\tclass_name: MapWorker"))
    assert str(problem) == "Ray has ended the engines: The actor died unexpectedly before finishing this task."


# Before Ray starts -----------------------------------------------------------------------------------------


def test_what_is_wrong_is_told_before_ray_starts(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayEngines, "started", lambda self: pytest.fail("Ray was started"))
    requests, output, other = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "other.gguf"
    lines = [request(0), request(1)]
    requests.write_text("".join(json.dumps(each) + "\n" for each in lines))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")

    def run(*arguments: object) -> Done:
        return shaderlm("batch", requests, "-o", output, "--device", "cpu", "--ray", *arguments)

    cases: list[tuple[tuple[object, ...], int, str]] = [
        (("-m", "smolm2-135m"), 1, "did you mean smollm2-135m"),
        (("-m", tmp_path / "none.gguf"), 1, "none.gguf does not exist"),
        (("-m", broken), 1, "broken.gguf"),
        (("-m", tiny, "--ctx-size", 1 << 30), 2, "context must be a whole number from 1 to the model's 256"),
        (("-m", "synthetic:tiny"), 2, "random weights"),
    ]
    for arguments, code, words in cases:
        done = run(*arguments)
        assert (done.code, done.out, done.err.count("\n")) == (code, "", 1), done.err
        assert words in done.err
    body = {"model": "tiny", "choices": []}
    result = {"id": request_id(lines[0]), "custom_id": "id-0", "response": {"status_code": 200, "body": body}}
    before = json.dumps({**result, "error": None}) + "\n"
    output.write_text(before)
    write_tiny_llama(other, context=256)
    for arguments in (("-m", other), ("-m", other, "--retry-failed"), ("-m", tiny, "--alias", "gpt")):
        done = run(*arguments)
        assert (done.code, output.read_text()) == (2, before)
        assert "has results of the model 'tiny', and this one is" in done.err
    lines[1]["body"]["model"] = "gpt"
    requests.write_text("".join(json.dumps(each) + "\n" for each in lines))
    done = run("-m", tiny)
    assert done.code == 2
    assert f"{requests} line 2 asks for the model 'gpt', and this one is 'tiny'; --alias gpt" in done.err


# Parquet ---------------------------------------------------------------------------------------------------


def write_table(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def result_line(row: dict[str, Any], *, failed: bool = False) -> bytes:
    response = {"status_code": 400 if failed else 200, "body": {"model": "m"}}
    return json.dumps(
        {"id": request_id(row), "custom_id": row["custom_id"], "response": response, "error": {} if failed else None}
    ).encode()


def ids_in(folder: Path) -> list[str]:
    """Those that any reader of Parquet sees."""
    from pyarrow import parquet

    return sorted(parquet.read_table(folder).to_pydict()["custom_id"])


def test_parquet_has_bodies_as_json_or_as_structs(tmp_path: Path) -> None:
    rows = [request(number) for number in range(3)]
    # Each has a field that others have not, at every depth. A null in a list is a value.
    rows[0]["body"] |= {"model": "tiny", "response_format": {"type": "json_object"}}
    rows[1]["body"]["messages"][0]["name"] = "you"
    rows[2]["body"] |= {"stop": ["a", None], "response_format": {"json_schema": {"name": "one"}}}
    texts = [{**row, "body": json.dumps(row["body"])} for row in rows]
    for path in (write_table(tmp_path / "a.parquet", texts), write_table(tmp_path / "b.parquet", rows)):
        with parquet_requests(path) as requests:
            assert [requests.read(line) for line in requests.lines] == rows
            assert [line.id for line in requests.lines] == [request_id(row) for row in rows]
            assert requests.models == {"tiny": 1}


def test_rows_of_numpy_are_requests() -> None:
    """What `Predictor` has of structs: arrays in dicts, and NumPy's numbers."""
    messages = np.array([{"role": "user", "content": "one", "name": None}], dtype=object)
    body = {"messages": messages, "max_tokens": np.int64(4), "stop": None, "logit_bias": [("5", np.float32(1))]}
    assert request_of({"custom_id": "a", "method": np.str_("POST"), "body": body}) == {
        "custom_id": "a",
        "method": "POST",
        "body": {"messages": [{"role": "user", "content": "one"}], "max_tokens": 4, "logit_bias": {"5": 1.0}},
    }
    with pytest.raises(ValueError, match="body: Expecting value"):
        request_of({"custom_id": "a", "body": "text"})


def test_parquet_that_is_wrong_says_where(tmp_path: Path) -> None:
    row = {**request(0), "body": "{}"}
    for rows, words in (
        ([row, {**row, "custom_id": "b", "body": "{"}], "row 2 must be JSON in UTF-8: body: Expecting property name"),
        ([{**row, "body": {"at": datetime(2026, 1, 1)}}], "row 1 must be JSON in UTF-8: body: Object of type datetime"),
        ([row, row], "row 2 has the custom_id 'id-0' of row 1"),
        ([{**row, "custom_id": 5}], "row 1 must be an object with a custom_id, a text; got custom_id 5"),
        ([{"custom_id": "a"}], "which must have the columns custom_id, method, url, body"),
    ):
        path = write_table(tmp_path / "in.parquet", rows)
        with pytest.raises(InputError, match=words), parquet_requests(path):
            pass
    (tmp_path / "text.parquet").write_text("text")
    for name, words in (("text.parquet", "must have the columns"), ("none.parquet", "No such")):
        with pytest.raises(InputError, match=words), parquet_requests(str(tmp_path / name)):
            pass


def test_parquet_results_are_in_few_parts_and_none_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, folder = [request(number) for number in range(10)], tmp_path / "out.parquet"
    lines = [result_line(row, failed=number == 1) for number, row in enumerate(rows)]
    monkeypatch.setattr(batch_parquet, "PART_BYTES", 4 * len(lines[0]))

    def parts() -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    output = ParquetResults(folder)
    for number in range(6):
        output.add(f"id-{number}", lines[number], failed=number == 1)
        output.sync()
    assert parts() == [".newest.jsonl", "part-000000.parquet"], "a part has some size, however often it is synced"
    assert ids_in(folder) == [f"id-{number}" for number in range(4)]
    with pytest.raises(InputError, match="is being written by another run"):
        ParquetResults(folder)
    os.close(output._fd)  # a kill
    output = ParquetResults(folder)
    assert sorted(output.ids) == [f"id-{number}" for number in range(6)]
    assert (output.failed, output.model) == ({"id-1"}, "m")

    def killed(fd: int, size: int) -> None:
        raise KeyboardInterrupt

    output.add("id-6", lines[6], failed=False)
    with monkeypatch.context() as patched:  # after a part is written, and before the file is emptied
        patched.setattr("shaderlm.cli.batch_parquet.os.ftruncate", killed)
        with pytest.raises(KeyboardInterrupt):
            output.add("id-7", lines[7], failed=False)
    os.close(output._fd)
    (folder / ".part-000002.parquet.1.1").touch()  # a part that a kill has cut off
    output = ParquetResults(folder)
    assert sorted(output.ids) == [f"id-{number}" for number in range(8)]
    for number in (8, 9):
        output.add(f"id-{number}", lines[number], failed=False)
    output.close()
    assert ids_in(folder) == [f"id-{number}" for number in range(10)]
    assert parts() == [f"part-{number:06d}.parquet" for number in range(3)]
    output = ParquetResults(folder)
    output.drop_failed()
    output.close()
    assert ids_in(folder) == [f"id-{number}" for number in range(10) if number != 1]


def test_a_run_that_ends_and_one_that_begins_do_not_both_write(tmp_path: Path) -> None:
    """The second has opened the file that locks, and the first removes it before the second has the lock."""
    import fcntl

    folder, flock = tmp_path / "out.parquet", fcntl.flock
    first = ParquetResults(folder)
    waiting = [first]

    def late(fd: int, operation: int) -> None:
        if waiting:
            waiting.pop().close()
        flock(fd, operation)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fcntl, "flock", late)
        second = ParquetResults(folder)
    with pytest.raises(InputError, match="written by another run"):
        ParquetResults(folder)
    second.close()
    assert [*folder.iterdir()] == []


def test_a_folder_of_other_parts_is_not_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "out.parquet"
    folder.mkdir()
    write_table(folder / "part-0.parquet", [{"a": 1}])
    for _ in range(2):  # the lock is free again
        with pytest.raises(InputError, match="which must have the columns custom_id, id, failed"):
            ParquetResults(folder)
