"""Tokens per second of one engine and of two on the same GPU: `python docs/two_engines.py --parallel 16`.

Each engine is a process, as a replica is; `--parallel` sequences decode in each. The two have the GPU together, as
replicas with `num_gpus = 0.5` have.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

SECONDS = 8.0


def engine(model: str, device: str, parallel: int, tokens: int) -> None:
    """One process: loads, says so, waits for a line, decodes until the time is over, and says how many tokens."""
    from importlib import import_module

    speed = import_module("shaderlm.bench.speed")
    loaded = import_module("shaderlm.cli.models").load_any(model, device, tune=False)
    runs = speed.run(loaded, speed.Trial(0, tokens, parallel=parallel), 10**6)
    next(runs)  # compiles
    print("ready", flush=True)
    sys.stdin.readline()
    count, began = 0, time.monotonic()
    while time.monotonic() - began < SECONDS:
        next(runs)
        count += tokens * parallel
    print(json.dumps(count / (time.monotonic() - began)), flush=True)


def measure(engines: int, options: argparse.Namespace) -> float:
    """Tokens per second of all engines together."""
    command = [sys.executable, __file__, "--engine", "--model", options.model, "--device", options.device]
    command += ["--parallel", str(options.parallel), "--tokens", str(options.tokens)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(engines)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n", "an engine did not load"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    return float(sum(json.loads(child.communicate()[0]) for child in children))


def main() -> None:
    """One engine, two, and one again with the sequences of both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="synthetic:llama-3.2-1b:q4_0")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        engine(options.model, options.device, options.parallel, options.tokens)
        return
    one, two = measure(1, options), measure(2, options)
    options.parallel *= 2
    both = measure(1, options)
    half = options.parallel // 2
    print(f"one engine, {half} sequences: {one:,.0f} tokens/s")
    print(f"two engines, {half} sequences each: {two:,.0f} tokens/s, {two / one:.2f} times as many")
    print(f"one engine, {options.parallel} sequences: {both:,.0f} tokens/s, {both / one:.2f} times as many")


if __name__ == "__main__":
    main()
