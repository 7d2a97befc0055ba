"""`shaderlm serve --replicas` to its end, and the end of a cluster's head. It takes minutes: with --all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from shaderlm.ray.cluster import free_port
from shaderlm.ray.loopback import prepare

from .ray_cluster import nothing_of, processes, until
from .tiny_models import write_tiny_llama

pytestmark = [
    *(pytest.mark.ray, pytest.mark.long, pytest.mark.xdist_group("ray")),
    pytest.mark.filterwarnings("ignore"),
]

BODY = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 4}


@contextmanager
def head(environment: dict[str, str], port: int, folder: str) -> Iterator[None]:
    """A head in processes of its own, until all of them are gone."""
    ray = str(Path(sys.executable).parent / "ray")
    command = [ray, "start", "--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
    command += ["--num-cpus=4", "--num-gpus=0", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    try:
        yield
    finally:
        for pid in processes(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not processes(folder), "Ray ends")


@contextmanager
def served(environment: dict[str, str], ray_port: int | None, port: int, tiny: Path) -> Iterator[subprocess.Popen[str]]:
    """`shaderlm serve` on that head, until it answers."""
    command = [sys.executable, "-m", "shaderlm", "serve", "-m", str(tiny), "--device", "cpu", "--port", str(port)]
    command += ["--replicas", "2", *([] if ray_port is None else ["--ray-address", f"127.0.0.1:{ray_port}"])]
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: child.poll() is not None or answers(port), "the server answers")
        assert child.poll() is None, child.communicate()[1]
        yield child
    finally:
        child.kill()
        child.communicate()


def answers(port: int) -> bool:
    try:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=BODY, timeout=10, trust_env=False)
        return answer.status_code == 200
    except httpx.HTTPError:
        return False


def test_ctrl_c_lets_a_stream_finish_and_leaves_nothing(tmp_path: Path) -> None:
    tiny, port = write_tiny_llama(tmp_path / "tiny.gguf", context=4096), free_port("127.0.0.1")
    body = {**BODY, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with served(dict(os.environ), None, port, tiny) as child:
        assert child.stderr is not None
        assert any("is ready on 2 replicas" in line for line in child.stderr), "it says that it is ready"
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(signal.SIGINT)
            time.sleep(0.5)
            refused = httpx.post(url, json=BODY, timeout=10, trust_env=False)
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "unavailable_error")
            assert [line for line in lines if line][-1] == "data: [DONE]"
        _, err = child.communicate(timeout=120)
        assert child.returncode == 130, err
    until(lambda: nothing_of(child.pid), "no process and no file", 30)
    assert not answers(port)


def test_a_new_head_serves_again(tmp_path: Path) -> None:
    tiny, port = write_tiny_llama(tmp_path / "tiny.gguf", context=256), free_port("127.0.0.1")
    environment = dict(os.environ)
    prepare(environment)
    with tempfile.TemporaryDirectory(prefix="slm-t") as folder:
        ray_port = free_port("127.0.0.1")
        with head(environment, ray_port, folder), served(environment, ray_port, port, tiny):
            (gcs,) = [pid for pid, line in processes(folder).items() if line.split()[2].endswith("gcs_server")]
            os.kill(gcs, signal.SIGKILL)
            began = time.monotonic()
            assert answers(port), "what runs goes on"
            while answers(port) and time.monotonic() - began < 180:
                time.sleep(0.5)
            print(f"\nanswered for {time.monotonic() - began:.0f} s without a head")
        began = time.monotonic()
        with head(environment, ray_port, folder), served(environment, ray_port, port, tiny) as child:
            print(f"a new head, and the application on it: {time.monotonic() - began:.0f} s")
            child.send_signal(signal.SIGTERM)
            _, err = child.communicate(timeout=120)
            assert child.returncode == 0, err
            assert not answers(port)
