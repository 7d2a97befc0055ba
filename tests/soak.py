"""A server under load for minutes: `python -m tests.soak --minutes 30`. Not a test that runs by itself.

Three tiny models of which two fit, 64 clients that stream, go away, ask for models in turn and unload some, a pool of
pages and a cache on disk that are always full. Then the server is killed while it writes, and what it left is used
where it is whole. Every answer must be a text, the same text each time, or one of the stated limits. Nothing may grow:
no memory, thread or file of the process, no page that nobody uses, no file of the cache.

    python -m tests.soak --minutes 30 --clients 64 --kills 3 --growth-per-step 8192 -- --device software

How fast the machine is does not matter, as long as each model answers some requests in a quarter of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from .tiny_models import write_tiny

NAMES = ("ant", "bee", "cow")
WORDS = ("the", "an", "in", "ou", "er")
LIMITS = (429, 503)  # with Retry-After
DISK = 2_000_000  # bytes of the cache: twenty records
OPTIONS = ["--kv-memory", "2MB", "--cache-disk", str(DISK), "--parallel", "8", "--queue", "24", "--models-max", "2"]
# Texts of this one depend on nothing that runs beside them, nor on what is cached, to the bit: they must be equal.
SAME, OWN_OPTIONS = "cow", "[cow]\ndeterministic = true\n"
MAX_OTHERS = 0.02  # of the texts of the others: two tokens that are almost as likely
WARM_SHARE, WARM_TEXTS = 0.25, 20  # of the time, and texts of each model, until memory is looked at
MAX_GROWTH = 64 << 20  # bytes of the process from there to the end, beside those of steps
PATIENCE = 600.0  # seconds without a byte, after which a request hangs: on a busy machine some take minutes


@dataclass
class Seen:
    """What all clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    texts: dict[tuple[str, str, int], str] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)  # of each model
    problems: list[str] = field(default_factory=list)

    def text(self, key: tuple[str, str, int], text: str) -> None:
        """Greedy: the same text each time, from whatever batch, cache or restart."""
        self.counts["texts"] += 1
        self.answers[key[0]] += 1
        if self.texts.setdefault(key, text) != text:
            self.counts["other texts"] += 1
            if key[0] == SAME:
                self.problems.append(f"{key}: {text!r} after {self.texts[key]!r}")

    def check_texts(self) -> None:
        """Are there more other texts than rounding makes?"""
        if self.counts["other texts"] > MAX_OTHERS * self.counts["texts"]:
            self.problems.append(f"{self.counts['other texts']} of {self.counts['texts']} texts were others before")


class Server:
    """The server's process."""

    def __init__(self, models: Path, cache: Path, options: list[str]) -> None:
        self.log = cache.with_name("server.log").open("ab")
        command = [sys.executable, "-m", "shaderlm", "serve", "--models-dir", str(models), "--port", "0", "--metrics"]
        command += [
            "--models-file",
            str(models.with_name("models.toml")),
            "--cache-dir",
            str(cache),
            *OPTIONS,
            *options,
        ]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.PIPE)
        self.url, listening = "", threading.Event()

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.log.write(line)
                if line.startswith(b"listening on "):
                    self.url = line.split()[-1].decode()
                    listening.set()
            self.log.flush()
            listening.set()

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        listening.wait(PATIENCE)
        assert self.url, f"the server does not listen; see {self.log.name}"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *problem: object) -> None:
        """No server outlives what it was started for."""
        self.process.kill()
        self.wait()

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit code, after its end."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        self.log.close()
        return code

    async def metrics(self) -> Counter[str]:
        """What `/metrics` says, all models together."""
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, trust_env=False) as http:
            lines = (await http.get("/metrics")).text.splitlines()
        sums = Counter[str]()
        for line in lines:
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                sums[name.split("{")[0]] += float(value)  # type: ignore[assignment]  # counts, and parts of caches
        return sums

    def numbers(self) -> dict[str, int]:
        """Memory, threads and files that the process has."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        files = len(os.listdir(f"/proc/{self.process.pid}/fd"))
        return {"bytes": int(lines["VmRSS"].split()[0]) * 1024, "threads": int(lines["Threads"]), "files": files}


def prompt_of(chance: random.Random) -> str:
    """One of 200: begins like others, is longer than a page as often as not."""
    number = chance.randrange(200)
    begin = " ".join(WORDS[(number % 7 + i) % len(WORDS)] for i in range(40 * (number % 4)))
    return f"{begin} {WORDS[number % 5]} {WORDS[number // 5 % 5]} {WORDS[number // 25 % 5]} {number}"


async def client(url: str, number: int, until: float, seen: Seen) -> None:
    """Asks until the time is over."""
    chance = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False) as http:
        while time.monotonic() < until:
            model, prompt, count = chance.choice(NAMES), prompt_of(chance), chance.choice((1, 8, 40))
            body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": count}
            body |= {"temperature": 0, "stream": True}
            leaves = chance.random() < 0.1
            try:
                if chance.random() < 0.02:
                    await unload(http, model, seen)
                await chat(http, body, (model, prompt, count), leaves, chance, seen)
            except httpx.HTTPError as problem:
                seen.problems.append(f"{type(problem).__name__}: {problem}")
                await asyncio.sleep(0.5)


async def unload(http: httpx.AsyncClient, model: str, seen: Seen) -> None:
    answer = await http.post("/models/unload", json={"model": model})
    seen.counts[f"unload {answer.status_code}"] += 1
    if answer.status_code >= 500 and answer.status_code not in LIMITS:
        seen.problems.append(f"unload: {answer.status_code} {answer.text}")


async def chat(
    http: httpx.AsyncClient,
    body: dict[str, Any],
    key: tuple[str, str, int],
    leaves: bool,
    chance: random.Random,
    seen: Seen,
) -> None:
    """One request. `leaves`: the connection is closed after the first piece."""
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code in LIMITS:
            seen.counts[f"limit {answer.status_code}"] += 1
            if "retry-after" not in answer.headers:
                seen.problems.append(f"{answer.status_code} without Retry-After: {(await answer.aread())[:200]!r}")
            await asyncio.sleep(chance.random())
            return
        if answer.status_code != 200:
            seen.problems.append(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
            return
        text, ended = "", False
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ended = True
                break
            piece = json.loads(line[6:])
            if "error" in piece:
                seen.problems.append(f"in a stream: {line[:300]}")
                return
            text += "".join(choice["delta"].get("content") or "" for choice in piece["choices"])
            if leaves:
                seen.counts["left"] += 1
                return
    if not ended:
        seen.problems.append(f"a stream without an end: {key}")
    seen.text(key, text)


async def load(server: Server, minutes: float, clients: int, seen: Seen) -> Growth:
    """All clients, and a look at the process now and then. What it has when the clients are known, and at the end."""
    began, before = time.monotonic(), seen.answers.copy()
    until, growth = began + 60 * minutes, Growth()
    tasks = [asyncio.create_task(client(server.url, number, until, seen)) for number in range(clients)]
    while time.monotonic() < until:
        await asyncio.sleep(min(20.0, max(0.0, until - time.monotonic())))
        numbers, share = server.numbers(), (time.monotonic() - began) / (60 * minutes)
        answered = all(seen.answers[name] >= before[name] + WARM_TEXTS for name in NAMES)
        if not growth.warm and share >= WARM_SHARE and answered:
            growth.warm, growth.warm_steps = numbers, await steps(server)
        told = {key: value >> 20 if key == "bytes" else value for key, value in numbers.items()}
        print(f"{share:5.0%} {told} {dict(seen.counts)} {len(seen.problems)} problems", flush=True)
    await asyncio.gather(*tasks)
    await until_idle(server, seen)
    growth.end, growth.end_steps = server.numbers(), await steps(server)
    return growth


@dataclass
class Growth:
    """What the process has after the first answers of all models, and at the end; steps of the models until then."""

    warm: dict[str, int] = field(default_factory=dict)
    end: dict[str, int] = field(default_factory=dict)
    warm_steps: int = 0
    end_steps: int = 0

    def check(self, per_step: int, seen: Seen) -> None:
        """Is it more than what each of the steps may keep? A connection may still be closing, a thread rest."""
        if not self.warm:
            seen.problems.append(
                f"growth was not measured: fewer than {WARM_TEXTS} texts of a model; give more --minutes"
            )
            return
        count = self.end_steps - self.warm_steps
        slack = {"bytes": MAX_GROWTH + per_step * count, "threads": 8, "files": 16}
        print(f"after the first answers {self.warm}, {count:,} steps later {self.end}")
        for what, most in slack.items():
            if self.end[what] > self.warm[what] + most:
                seen.problems.append(f"{what} grew from {self.warm[what]:,} to {self.end[what]:,}, in {count:,} steps")


async def steps(server: Server) -> int:
    return int((await server.metrics())["llamacpp:n_decode_total"])


async def until_idle(server: Server, seen: Seen) -> None:
    """Nobody asks any more: soon nothing runs or waits, and running requests use no page."""
    names = [f"shaderlm:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    until = time.monotonic() + 60
    while +(busy := Counter({name: count for name, count in (await server.metrics()).items() if name in names})):
        if time.monotonic() > until:
            seen.problems.append(f"nobody asks, and {dict(busy)}")
            return
        await asyncio.sleep(1)


async def kills(models: Path, cache: Path, options: list[str], seen: Seen, times: int) -> None:
    """Kill the server while it writes, and use what it left."""
    for number in range(times):
        before = records(cache)
        with Server(models, cache, options) as server:
            tasks = [asyncio.create_task(client(server.url, i, time.monotonic() + PATIENCE, seen)) for i in range(8)]
            until = time.monotonic() + PATIENCE
            while not records(cache) - before and time.monotonic() < until:
                await asyncio.sleep(0.002)
            if not records(cache) - before:
                seen.problems.append("the server wrote nothing to the cache on disk")
            await asyncio.sleep(random.Random(number).uniform(0, 0.1))
            server.process.send_signal(signal.SIGKILL)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        print(f"killed, with {len(records(cache))} records on disk", flush=True)
    whole, until = damage(cache), time.monotonic() + PATIENCE
    used, refused = set[str](), 0
    with Server(models, cache, options) as server:
        while not (used and refused) and time.monotonic() < until:
            await load(server, 0.3, 8, seen)
            used |= {path.name for path, before in whole.items() if changed(path, before)}
            refused = int((await server.metrics())["shaderlm:disk_cache_invalid_total"])
        stop(server, seen)
    print(f"{len(used)} of {len(whole)} records that were whole were used, {refused} others were refused")
    if not used or not refused:
        seen.problems.append("of the records that were left, none was used or none refused")


def changed(path: Path, before: int) -> bool:
    """Was a file used, which changes its time?"""
    return path.exists() and path.stat().st_mtime_ns != before


def records(cache: Path) -> set[str]:
    """Names of the records on disk."""
    return {path.name for path in cache.rglob("*") if path.name[0] != "."}


def damage(cache: Path) -> dict[Path, int]:
    """Change a byte of some records, cut others off. The rest, with their times."""
    whole = {}
    for number, name in enumerate(sorted(records(cache))):
        content = bytearray((path := cache / name).read_bytes())
        if number % 3 == 0:
            content[random.Random(number).randrange(len(content))] ^= 255
            path.write_bytes(content)
        elif number % 3 == 1:
            path.write_bytes(content[: len(content) // 2])
        else:
            whole[path] = path.stat().st_mtime_ns
    return whole


def stop(server: Server, seen: Seen) -> None:
    server.process.terminate()
    if code := server.wait():
        seen.problems.append(f"the server ended with {code}")


def check_disk(cache: Path, numbers: Counter[str], seen: Seen) -> None:
    """After the end of a server: the cache was full, is within its size, and has no file that is half written."""
    disk = {name: int(numbers[f"shaderlm:disk_cache_{name}_total"]) for name in ("hits", "evictions", "failed_writes")}
    used = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    print(f"{used:,} bytes in {len(records(cache))} records on disk, {disk}")
    if used > DISK + 4096:  # its salt
        seen.problems.append(f"{used:,} bytes on disk, {DISK:,} are allowed")
    if not disk["evictions"]:
        seen.problems.append("the cache on disk was never full; give more --minutes")
    if disk["failed_writes"] or list(cache.rglob("*.tmp")):
        seen.problems.append(f"{disk['failed_writes']} writes failed; {list(cache.rglob('*.tmp'))} are left")


def main() -> int:
    """Run it, print what was seen, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--models-memory", default="")
    parser.add_argument("--growth-per-step", type=int, default=64, help="bytes; SwiftShader keeps 8192 (docs/log.md)")
    parser.add_argument("options", nargs="*", help="of serve, after --")
    given = parser.parse_args()
    seen, began = Seen(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        models, cache = Path(folder) / "models", Path(folder) / "cache"
        models.mkdir()
        for seed, name in enumerate(NAMES):
            write_tiny(models / f"{name}.gguf", ("llama", "qwen3")[seed % 2], seed=seed, context=256)
        models.with_name("models.toml").write_text(OWN_OPTIONS)
        options = [*given.options, *(["--models-memory", given.models_memory] if given.models_memory else [])]
        with Server(models, cache, options) as server:
            growth = asyncio.run(load(server, given.minutes, given.clients, seen))
            growth.check(given.growth_per_step, seen)
            numbers = asyncio.run(server.metrics())
            stop(server, seen)
        check_disk(cache, numbers, seen)
        asyncio.run(kills(models, cache, options, seen, given.kills))
        log = (Path(folder) / "server.log").read_text(errors="replace")
        seen.problems += [line for line in log.splitlines() if "Traceback" in line]
    seen.check_texts()
    for problem in seen.problems[:20]:
        print(problem)
    print(f"{dict(seen.counts)} in {time.monotonic() - began:.0f} s: {len(seen.problems)} problems")
    return 1 if seen.problems else 0


if __name__ == "__main__":
    sys.exit(main())
