"""Simulates 1,000 replicas and 100,000 sessions: `python docs/scaling.py` prints the tables of scaling.md.

The routing policy is the one that the ingress runs. Replicas are simple: each has a cache of prefixes with a limit, and
a request takes the time of its uncached prompt and of its answer.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import numpy as np

from shaderlm.engine import EngineStats, Histogram
from shaderlm.ray.metrics import merge
from shaderlm.ray.pages import BOUNDARIES
from shaderlm.ray.routing import Keys, PrefixRouting
from shaderlm.server.metrics import Metrics

# A session: a system prompt that others have as well, and turns. A page is 128 tokens.
SYSTEM_PROMPTS, SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 2_000, 1_536, 128, 256
MEAN_TURNS, THINK_SECONDS = 4, 10.0
# A replica: prompts are read at this speed, a token of an answer takes so long, and the cache holds so many tokens.
PREFILL, TOKEN_SECONDS, CACHE_TOKENS = 10_000.0, 0.02, 200_000
LOAD = 12.0  # requests of a replica at the same time, on average


@dataclass
class Outcome:
    """What a policy came to."""

    policy: str
    hits: float  # tokens of prompts that were in a cache
    imbalance: float  # the largest number of tokens computed by a replica, over the mean
    peak: float  # the 99th percentile of requests at a replica, over the mean
    first_token: float  # seconds to read a prompt, at the mean
    choice_us: float
    router: str = ""  # what it remembers


class Cache:
    """The prefixes of a replica: of systems and of sessions, the least recently used leave first."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[int, int] = OrderedDict()
        self._total = 0

    def hit(self, key: int) -> int:
        """Tokens that are there."""
        if key in self._tokens:
            self._tokens.move_to_end(key)
        return self._tokens.get(key, 0)

    def put(self, key: int, tokens: int) -> None:
        """These are there now."""
        self._total += tokens - self._tokens.pop(key, 0)
        self._tokens[key] = tokens
        while self._total > CACHE_TOKENS:
            self._total -= self._tokens.popitem(last=False)[1]


Choose = Callable[[Keys, list[int], float], int]


def simulate(name: str, choose: Choose, replicas: int, sessions: int, seed: int = 0) -> Outcome:
    """All sessions under one policy. The same seed gives the same sessions to each."""
    random.seed(seed)  # the policy chooses any two replicas by it
    rng = np.random.default_rng(seed)
    turns = rng.geometric(1 / MEAN_TURNS, sessions)
    systems = np.minimum(rng.zipf(1.2, sessions) - 1, SYSTEM_PROMPTS - 1)
    service = ANSWER_TOKENS * TOKEN_SECONDS
    span = float(turns.sum()) * service / (LOAD * replicas)  # seconds in which sessions begin
    begin = np.sort(rng.uniform(0, span, sessions))
    events: list[tuple[float, int, int, int]] = [(float(when), 0, number, 1) for number, when in enumerate(begin)]
    heapq.heapify(events)
    caches, loads, computed = [Cache() for _ in range(replicas)], [0] * replicas, [0.0] * replicas
    running, hits, total, seconds, chosen = 0, 0, 0, 0.0, 0
    peaks, thinks = list[float](), rng.exponential(THINK_SECONDS, int(turns.sum()) + 1)
    while events:
        now, kind, number, turn = heapq.heappop(events)
        if kind == 1:  # a request ends; `number` is its replica
            loads[number] -= 1
            running -= 1
            continue
        prompt = SYSTEM_TOKENS + turn * TURN_TOKENS + (turn - 1) * ANSWER_TOKENS
        system, session = int(systems[number]), 1_000_000 + number
        keys = keys_of(system, session, prompt)
        began = time.perf_counter()
        replica = choose(keys, loads, running / replicas)
        seconds += time.perf_counter() - began
        cache = caches[replica]
        cached = max(cache.hit(session), cache.hit(system))
        cache.put(system, SYSTEM_TOKENS)
        cache.put(session, prompt + ANSWER_TOKENS)
        hits, total = hits + min(cached, prompt - 1), total + prompt
        work = prompt - min(cached, prompt - 1)
        if span / 3 < now < span:  # as many sessions end as begin
            computed[replica] += work + ANSWER_TOKENS * TOKEN_SECONDS * PREFILL / LOAD
        loads[replica] += 1
        running += 1
        chosen += 1
        if chosen % 1000 == 0 and span / 3 < now < span:
            peaks.append(float(np.percentile(loads, 99)) * replicas / running)
        end = now + work / PREFILL + service
        heapq.heappush(events, (end, 1, replica, 0))
        if turn < turns[number]:
            heapq.heappush(events, (end + float(thinks[chosen]), 0, number, turn + 1))
    return Outcome(
        name,
        hits / total,
        max(computed) / (sum(computed) / replicas),
        float(np.median(peaks)),
        (total - hits) / chosen / PREFILL,
        1e6 * seconds / chosen,
    )


def keys_of(system: int, session: int, prompt: int) -> Keys:
    """Hashes of whole pages: those of the system prompt are its own, those behind it the session's."""
    pages = [each for each in BOUNDARIES if 128 * each <= prompt]
    return Keys(
        pages=[hash((system if 128 * each <= SYSTEM_TOKENS else session, each)) & (1 << 63) - 1 for each in pages]
    )


def run(policy: str, replicas: int, sessions: int) -> Outcome:
    """This project's policy, or one of two that know no prompts."""
    if policy == "round-robin":
        turn = itertools.count()
        return simulate(policy, lambda keys, loads, mean: next(turn) % replicas, replicas, sessions)
    if policy == "least loaded":
        return simulate(policy, lambda keys, loads, mean: loads.index(min(loads)), replicas, sessions)
    routing, numbers = PrefixRouting(), {f"r{number:04d}": number for number in range(replicas)}
    routing.update(numbers)

    def prefix(keys: Keys, loads: list[int], mean: float) -> int:
        names, reason = routing.choose(keys, lambda name: loads[numbers[name]], mean)
        routing.reserve(keys, names[0])
        routing.sent(keys, names[0], reason)
        return numbers[names[0]]

    outcome = simulate(policy, prefix, replicas, sessions)
    outcome.router = f"{len(routing):,} hashes, {state_bytes(routing) / 1e6:.1f} MB; chosen by {dict(routing.counts)}"
    return outcome


POLICIES = ("prefix", "round-robin", "least loaded")


def metrics_bytes(replicas: int) -> tuple[int, int]:
    """Bytes and samples of one answer of /metrics over all replicas."""
    fields = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    stats = SimpleNamespace(**fields | {"finished": {}, "token_gaps": Histogram((0.001, 0.01))})
    served: Any = SimpleNamespace(name="m", model=SimpleNamespace(engine=SimpleNamespace(stats=lambda: stats)))
    text = Metrics().text(served).decode()
    whole = merge([(f"replica{number:05d}", text) for number in range(replicas)], "front", {}, {}).decode()
    return len(whole), sum(not line.startswith("#") for line in whole.splitlines())


def state_bytes(routing: PrefixRouting) -> int:
    """Memory of the router's table: the entries, their keys and the order; names of replicas are shared."""
    homes = routing._homes
    return sys.getsizeof(homes) + sum(sys.getsizeof(key) for key in homes)


# Dollars for an hour of a GPU: https://deploybase.ai/articles/runpod-gpu-pricing (on demand, 2026-03) and AWS's
# p5.48xlarge, 98.32 for eight, https://disintermediate.global/insights/gpu-cloud-pricing-models (2026-Q1).
PRICES = {"L4, RunPod": 0.78, "H100, RunPod": 4.76, "H200, RunPod": 6.35, "H100, AWS": 98.32 / 8}


# llama-3.2-1b, Q4_0, 64 streams on the H200: docs/benchmarks.md, "The server under load".
MEASURED, MEASURED_TOKENS_PER_SECOND = "H200, RunPod", 29_021.0


def dollars_per_million(price: float, tokens_per_second: float, used: float) -> float:
    """price / 3600 s / (tokens per second × the part of the time that is used) × 1e6."""
    return price / 3600 / (tokens_per_second * used) * 1e6


# A replica that starts: its process with Ray and this package, measured on two cores (tests/test_ray_serve.py), and the
# kernels of a first run (docs/benchmarks.md, "The start"). A network of 10 Gbit/s, a disk that reads 2 GB/s.
PROCESS_SECONDS, KERNEL_SECONDS, NETWORK, DISK = 8.0, 1.8, 1.25e9, 2e9
MODELS = {"1B, Q4_0": 0.77e9, "8B, Q4_0": 4.66e9, "30B, Q4_0": 17.3e9}


def cold_start(nbytes: float, *, fetched: bool) -> float:
    """Seconds until a replica answers, on a node that is there."""
    return PROCESS_SECONDS + KERNEL_SECONDS + nbytes / DISK + (0.0 if fetched else nbytes / NETWORK)


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1_000)
    parser.add_argument("--sessions", type=int, default=100_000)
    options = parser.parse_args()
    began = time.monotonic()
    print(f"{options.replicas:,} replicas, {options.sessions:,} sessions")
    print(
        "\n| policy | cached tokens of prompts | imbalance | p99 of load | reading a prompt | a choice |",
        "|---|---|---|---|---|---|",
        sep="\n",
    )
    router = ""
    with ProcessPoolExecutor() as processes:
        outcomes = processes.map(run, POLICIES, repeat(options.replicas), repeat(options.sessions))
        for out in outcomes:
            print(
                f"| {out.policy} | {out.hits:.1%} | {out.imbalance:.2f} | {out.peak:.2f} "
                f"| {1000 * out.first_token:.0f} ms | {out.choice_us:.0f} µs |"
            )
            router = router or out.router
    print(f"\nrouter: {router}")
    size, samples = metrics_bytes(options.replicas)
    print(f"/metrics: {size / 1e6:.1f} MB, {samples:,} samples; every 15 s {size / 15e6:.2f} MB/s")
    print("\n| model | file is there | file is fetched |\n|---|---|---|")
    for model, nbytes in MODELS.items():
        times = (cold_start(nbytes, fetched=each) for each in (True, False))
        print(f"| {model}, {nbytes / 1e9:.2f} GB |", " | ".join(f"{each:.0f} s" for each in times), "|")
    print("\n| GPU | $ an hour | $ for a million tokens, for each 1,000 tokens/s |\n|---|---|---|")
    for gpu, price in PRICES.items():
        print(f"| {gpu} | {price:.2f} | {dollars_per_million(price, 1_000, 1.0):.2f} |")
    for used in (1.0, 0.5, 0.1):
        dollars = dollars_per_million(PRICES[MEASURED], MEASURED_TOKENS_PER_SECOND, used)
        print(f"{MEASURED}: {MEASURED_TOKENS_PER_SECOND:,.0f} tokens/s, used {used:.0%} of the time: ${dollars:.3f}")
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
