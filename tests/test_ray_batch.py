"""Batches by Ray Data: the results of one engine, each once, whatever ended the runs before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shaderlm import load
from shaderlm.cli.batch_parquet import ParquetResults, parquet_requests
from shaderlm.errors import InputError

from .ray_cluster import nothing_of, until
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


@pytest.mark.parametrize(("count", "kills"), [(400, 1), pytest.param(10_000, 2, marks=pytest.mark.long)])
def test_a_batch_that_is_killed_has_every_result_once(tiny: Path, tmp_path: Path, count: int, kills: int) -> None:
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("".join(json.dumps(request(number)) + "\n" for number in range(count)))
    began, killed, pids = time.monotonic(), list[int](), list[int]()
    for part in range(1, kills + 1):
        child = subprocess.Popen(command(tiny, requests, output), stderr=subprocess.PIPE, start_new_session=True)
        try:
            while child.poll() is None and len(results(output)) < part * count // 4:
                time.sleep(0.05)
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            _, output_of_child = child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL, output_of_child.decode()
        killed.append(len(results(output)))
        pids.append(child.pid)
    last = subprocess.Popen(command(tiny, requests, output), stderr=subprocess.PIPE, text=True)
    _, err = last.communicate(timeout=590)
    assert last.returncode == 0, err
    assert f"{killed[-1]:,} of {count:,} requests have a result already" in err
    for pid in (*pids, last.pid):  # what a killed run could not remove, the next one does
        until(partial(nothing_of, pid), "no process and no file", 30)
    lines = results(output)
    assert sorted(each["custom_id"] for each in lines) == sorted(f"id-{number}" for number in range(count))
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in lines}
    with load(tiny, device="cpu") as model:
        for number in range(0, count, count // 20):
            messages = request(number)["body"]["messages"]
            assert texts[f"id-{number}"] == model.chat(messages, max_tokens=4)
    seconds = time.monotonic() - began
    print(f"\n{count:,} requests, killed at {killed}, in {seconds:.0f} s: {err.splitlines()[-2:]}")


def test_parquet_holds_requests_and_results(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [request(number) for number in range(3)]
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{**row, "body": json.dumps(row["body"])} for row in rows]), path)
    with parquet_requests(str(path)) as requests:
        assert [requests.read(line) for line in requests.lines] == rows
        ids = [line.id for line in requests.lines]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "structs.parquet")
    with parquet_requests(str(tmp_path / "structs.parquet")) as requests:
        assert [line.id for line in requests.lines] == ids
    folder = tmp_path / "out.parquet"
    for number in range(3):  # three runs, each killed after its part
        output = ParquetResults(folder)
        assert sorted(output.ids) == [f"id-{each}" for each in range(number)]
        line = {
            "id": ids[number],
            "custom_id": f"id-{number}",
            "response": {"status_code": 200, "body": {"model": "m"}},
        }
        output.add(f"id-{number}", json.dumps({**line, "error": None}).encode(), failed=number == 1)
        with pytest.raises(InputError, match="written by another run"):
            ParquetResults(folder)
        output.close()
    output = ParquetResults(folder)
    assert (output.failed, output.model) == ({"id-1"}, "m")
    output.drop_failed()
    output.close()
    assert sorted(parquet.read_table(folder).to_pydict()["custom_id"]) == ["id-0", "id-2"]
    assert not (folder / ".lock").exists()


def test_parquet_that_is_wrong_says_where(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "in.parquet"
    row = {**request(0), "body": "{"}
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    with pytest.raises(InputError, match="row 1: the body must be JSON"), parquet_requests(str(path)):
        pass
    row["body"] = "{}"
    parquet.write_table(pyarrow.Table.from_pylist([row, row]), path)
    with pytest.raises(InputError, match="the custom_id 'id-0' twice"), parquet_requests(str(path)):
        pass
