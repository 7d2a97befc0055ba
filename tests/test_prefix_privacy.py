"""One client guesses the prompts of another: nothing that it can see tells a right guess from a wrong one."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from shaderlm.engine import EngineOptions
from shaderlm.graph.batch import PAGE

from .serving import loader, running
from .tiny_models import write_tiny_llama

OWNER, ATTACKER = "owner", "attacker"
SIZE = 2 * PAGE  # tokens of a secret: what is cached of it would save most of the time


@dataclass
class Clients:
    """Both of them, and what the attacker can see."""

    http: httpx.Client

    def ask(self, key: str, prompt: list[int]) -> tuple[list[dict[str, Any]], list[float]]:
        """Events of a stream, with the time of each."""
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"return_progress": True, "timings_per_token": True, "stream_options": {"include_usage": True}}
        events, times, started = list[dict[str, Any]](), list[float](), time.perf_counter()
        headers = {"authorization": f"Bearer {key}"}
        with self.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
                    times.append(time.perf_counter() - started)
        return events, [*times, time.perf_counter() - started]

    def seen(self, prompt: list[int]) -> dict[str, float]:
        """All that a guess shows, as numbers."""
        before = self._metrics()
        events, times = self.ask(ATTACKER, prompt)
        after = self._metrics()
        found = {"seconds to the first event": times[0], "seconds to the end": times[-1], "events": float(len(events))}
        for event in events:
            for name in ("prompt_progress", "timings"):
                found |= {f"{name} {key}": value for key, value in (event.get(name) or {}).items()}
            if event.get("usage"):
                found["cached_tokens"] = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        found |= {name: after[name] - before[name] for name in after}
        slots = self.http.get("/slots", headers={"x-api-key": ATTACKER}).json()
        found |= {f"slot {i} {key}": value for i, slot in enumerate(slots) for key, value in _numbers(slot).items()}
        return found

    def _metrics(self) -> dict[str, float]:
        text = self.http.get("/metrics", headers={"x-api-key": ATTACKER}).text
        # The sums of histograms are times, as those of the answer are.
        return {
            name: float(value) for name, value in re.findall(r"^(\w+:[^ ]*) (\S+)$", text, re.M) if "le=" not in name
        }


def _numbers(given: dict[str, Any], prefix: str = "") -> dict[str, float]:
    found = dict[str, float]()
    for key, value in given.items():
        if isinstance(value, dict):
            found |= _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)):
            found[prefix + key] = float(value)
    return found


def auc(right: Sequence[float], wrong: Sequence[float]) -> float:
    """How often a right guess has the larger number, ties count half."""
    values = np.concatenate([right, wrong])
    order = values.argsort(kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(1, len(values) + 1)
    for value in np.unique(values[order][1:][np.diff(values[order]) == 0]):
        ranks[values == value] = ranks[values == value].mean()
    n = len(right)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * len(wrong)))


def test_the_measure() -> None:
    assert auc([1, 1], [1, 1]) == 0.5
    assert auc([2, 3], [0, 1]) == 1.0
    assert auc([0, 1, 1], [1, 2]) == pytest.approx(1 / 6)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("privacy") / "tiny.gguf", context=2048)


def measured(path: Path, guesses: int, *, share: bool) -> dict[str, float]:
    """The AUC of each observable over so many right guesses and as many wrong ones, in random order."""
    rng, numbers, tokens = random.Random(0), itertools.count(), range(3, 250)

    def prompt() -> list[int]:
        """No two begin alike by chance: the attacker's own ones would be found."""
        high, low = divmod(next(numbers), len(tokens))
        return [tokens[high], tokens[low], *rng.choices(tokens, k=SIZE - 2)]

    options = EngineOptions(parallel=2, queue=8, share_prefixes=share)
    order = [True] * guesses + [False] * guesses
    rng.shuffle(order)
    seen: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with running(loader(path, options), keys=[OWNER, ATTACKER]) as server, server.client() as http:
        clients = Clients(http)
        for _ in range(5):
            clients.seen(prompt())
        for is_right in order:
            secret, other = prompt(), prompt()
            clients.ask(OWNER, secret)
            seen[is_right].append(clients.seen(secret if is_right else other))
    names = {name for found in seen.values() for each in found for name in each}
    return {name: auc(*([each.get(name, -1.0) for each in seen[kind]] for kind in (True, False))) for name in names}


_TIMES = re.compile("second|_ms|_sum|created|events|progress")  # how often progress is told depends on time


def test_a_right_guess_looks_like_a_wrong_one(path: Path) -> None:
    found = measured(path, 12, share=False)
    assert {"cached_tokens", "timings cache_n", "prompt_progress cache", "seconds to the end"} <= set(found)
    assert any("prefix_cache_hits" in name for name in found)
    assert any(name.startswith("slot ") for name in found)
    for name, value in found.items():
        if _TIMES.search(name) is None or name == "prompt_progress cache":
            assert value == 0.5, f"{name} tells right guesses from wrong ones"
    assert abs(found["seconds to the end"] - 0.5) < 0.45  # of so few; the long form is stricter


@pytest.mark.full
def test_shared_prefixes_tell(path: Path) -> None:
    """What the test above would find."""
    found = measured(path, 10, share=True)
    assert found["cached_tokens"] == 1.0
    assert found["timings cache_n"] == 1.0


@pytest.mark.long
def test_ten_thousand_guesses(path: Path) -> None:
    found = measured(path, 5000, share=False)
    for name, value in sorted(found.items(), key=lambda each: -abs(each[1] - 0.5)):
        print(f"{value:.4f} {name}")
    assert all(abs(value - 0.5) <= 0.02 for value in found.values())
