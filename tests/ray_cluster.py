"""A Ray of the tests' own for the tests with `--ray`: on this machine alone, gone afterwards, with one Serve in it."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from shaderlm.ray.cluster import free_port, local_ray
from shaderlm.ray.config import ClusterConfig, cluster_config

APP = "tested"
START_SECONDS = 120.0


@dataclass
class Deployed:
    """An application that answers."""

    url: str
    config: ClusterConfig

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, trust_env=False, **options)

    def async_client(self, **options: Any) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=120, trust_env=False, limits=limits, **options)

    def replicas(self) -> list[str]:
        """Those of the models, as Ray calls their actors."""
        import ray

        actors = ray.util.list_named_actors(all_namespaces=True)
        prefix = f"SERVE_REPLICA::{APP}#"
        return sorted(
            each["name"]
            for each in actors
            if each["name"].startswith(prefix) and not each["name"].startswith(f"{prefix}ingress#")
        )

    def kill(self, replica: str) -> None:
        """End a replica's process at once, as a crash does."""
        import ray

        ray.kill(ray.get_actor(replica, namespace="serve"))

    def counts(self) -> dict[str, int]:
        """Why requests went where they did, of all models."""
        with self.client() as http:
            text = http.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("shaderlm:routed_requests_total")]
        return {line.partition('reason="')[2].partition('"')[0]: int(float(line.split()[-1])) for line in lines}

    def samples(self, name: str) -> dict[str, float]:
        """A metric of each replica."""
        with self.client() as http:
            text = http.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        return {line.partition('replica="')[2].partition('"')[0]: float(line.split()[-1]) for line in lines}


class RayServe:
    """Ray Serve on a port, for one application after the other."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self, engine: Any = None, **args: Any) -> Deployed:
        """An application in place of the one before: an update, if its names are the same."""
        from ray import serve

        from shaderlm.ray.app import application

        config = cluster_config(args if "models" in args else {"device": "cpu", "num_cpus": 0, **args})
        more = {} if engine is None else {"engine": engine}
        serve.run(application(config, **more), name=APP, route_prefix="/")
        deployed = Deployed(self.url, config)
        until(lambda: _is_healthy(deployed), "the application answers")
        return deployed


def _is_healthy(deployed: Deployed) -> bool:
    with deployed.client() as http:
        return http.get("/health").status_code == 200


def until(condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> float:
    """Wait for it; how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - began


def processes(text: str) -> dict[int, str]:
    """Processes whose command line has a text, and those that they started."""
    table = subprocess.run(["ps", "-ewwo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [(int(line.split()[0]), int(line.split()[1]), line) for line in table.splitlines()]
    with_text = {pid: line for pid, _, line in rows if text in line and pid != os.getpid()}
    return with_text | {pid: line for pid, parent, line in rows if parent in with_text}


def nothing_of(pid: int) -> bool:
    """Has a process that ran Ray left neither processes nor files?"""
    return not processes(f"/slm-{pid}-") and not [*Path(tempfile.gettempdir()).glob(f"slm-{pid}-*")]


@contextmanager
def ray_serve() -> Iterator[RayServe]:
    """Ray and Serve, from their start to their end."""
    port = free_port("127.0.0.1")
    with local_ray(8):
        from ray import serve

        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            yield RayServe(port)
        finally:
            serve.shutdown()
