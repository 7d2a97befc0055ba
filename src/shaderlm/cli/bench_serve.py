"""`shaderlm bench serve`: the load of many clients on an HTTP server. Options as those of `bench` and `serve`."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from ..version import __version__
from .loading import spoken
from .options import backend_option, precision_option, tune_option
from .speed import numbers

if TYPE_CHECKING:
    from ..bench.serve_client import Client
    from ..bench.serve_load import Companion, Load, Run, ServerInfo, Span
    from ..bench.serve_process import ServerProcess

_WAVES = 4  # requests per stream, where nothing is said
_STREAMS = 16
_RATED_REQUESTS = 64
_LOAD_SECONDS = 600.0
_ROUNDS = 2  # with and without a companion, in turns
_TELL_SECONDS = 0.5
# Answers of these two do not end. Most tokens are allowed in the schema's strings, and everywhere in the grammar. Masks
# of the schema take 20 µs. Those of the grammar, 2 ms with 128,256 tokens, are the slowest that were found.
_GRAMMAR = "root ::= [a-z ]{8192}"
_SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}
_LENGTHS = "A number, or a range such as 128-1024."


def _span(ctx: click.Context, param: click.Parameter, given: str) -> Span:
    """512, or 128-1024."""
    from ..bench.serve_load import Span

    low, dash, high = given.partition("-")
    try:
        found = Span(int(low), int(high) if dash else int(low))
    except ValueError:
        found = Span(1, 0)
    if not 0 <= found.low <= found.high:
        raise click.BadParameter(f"{given!r} must be a number of tokens, or a range such as 128-1024", ctx, param)
    return found


def _levels(ctx: click.Context, param: click.Parameter, given: str | None) -> tuple[int, ...]:
    """16,64"""
    found = () if given is None else numbers(ctx, param, given)
    if any(number < 1 for number in found):
        raise click.BadParameter(f"{given!r} must be numbers above 0", ctx, param)
    return found


def _beside(ctx: click.Context, param: click.Parameter, given: str | None) -> tuple[str, int] | None:
    """prompt:8192, logprobs:5, schema or grammar."""
    if given is None:
        return None
    kind, _, count = given.partition(":")
    usual = {"logprobs": "5", "schema": "0", "grammar": "0"}
    number = count or usual.get(kind, "")
    if kind not in ("prompt", *usual) or not number.isdigit() or (kind in ("schema", "grammar") and count):
        raise click.BadParameter(
            f"{given!r} must be prompt:TOKENS, logprobs, logprobs:N, schema or grammar", ctx, param
        )
    return kind, int(number)


@click.command()
@click.option(
    "--url", metavar="URL", help="A server that runs, such as http://127.0.0.1:8080. Without it one is started."
)
@click.option("--api-key", metavar="KEY", help="Its key.")
@click.option("-m", "--model", help="What the started server serves: as for `bench`, synthetic:SHAPE:FORMAT too.")
@click.option("--device", help="As for generate; of the started server, like all options up to --deterministic.")
@backend_option
@precision_option
@tune_option
@click.option("-c", "--ctx-size", type=click.IntRange(1), metavar="N", help="As for serve.")
@click.option("-np", "--parallel", type=click.IntRange(1), metavar="N", help="As for serve.")
@click.option("--kv-memory", metavar="SIZE", help="As for serve.")
@click.option("--deterministic", is_flag=True, help="As for serve.")
@click.option("--concurrency", metavar="16,64", callback=_levels, help="Requests at once, at most.  [default: 16]")
@click.option("--request-rate", type=float, metavar="X", help="Requests per second on average, at random times.")
@click.option(
    "--num-requests",
    "--num-prompts",
    type=click.IntRange(1),
    metavar="N",
    help="Requests of a run.  [default: 4 for each stream]",
)
@click.option(
    "-p",
    "--n-prompt",
    "prompt",
    default="512",
    show_default=True,
    callback=_span,
    help=f"Tokens of a prompt. {_LENGTHS}",
)
@click.option(
    "-n", "--n-gen", "output", default="128", show_default=True, callback=_span, help=f"Tokens of an answer. {_LENGTHS}"
)
@click.option(
    "--prefix",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Tokens that all prompts begin with, before those of -p.",
)
@click.option(
    "--beside",
    callback=_beside,
    metavar="KIND",
    help="A request of another kind beside the streams: prompt:N, logprobs:N, schema or grammar.",
)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, metavar="X", help="0: greedy.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Of prompts and times.")
@click.option("--vocabulary", type=click.IntRange(1), metavar="N", help="Token ids, if the server does not say it.")
@click.option("--no-warmup", is_flag=True, help="Measure the first requests too.")
@click.option("--baseline", is_flag=True, help="Run `bench`'s tg128 of the model first, and compare with it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--save", type=click.Path(path_type=Path), metavar="FILE", help="Write JSON there, with every request.")
@click.option("--chart", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw the results.")
def serve(**given: Any) -> None:
    """Measure an HTTP server under the load of many clients.

    Throughput, time to first token, latency between tokens, time per output token, and end to end. The server is one
    that runs (--url), or one that is started for the measurement and ended after it. Ctrl-C reports what was measured.
    """
    from ..files import check_writable

    _check(given)
    loads = _loads(given)
    for path in (given["save"], given["chart"]):
        if path is not None:
            check_writable(path)
    runs: list[Run] = []
    found: dict[str, Any] = {}
    interrupted = False
    try:
        if given["baseline"]:
            from ..bench.serve_process import bench_decode

            with spoken() as say:
                say("tg128 with `bench`")
                found["baseline"] = bench_decode(_model_options(given))
        with _server(given) as (url, process):
            _measure(given, url, process, loads, found, runs)
    except KeyboardInterrupt:
        interrupted = True
    ok = _report(given, found, [run for run in runs if run.outcomes])
    if interrupted:
        what = "what was measured is above" if any(run.outcomes for run in runs) else "nothing was measured"
        print(f"interrupted; {what}", file=sys.stderr)
    sys.exit(130 if interrupted else 0 if ok else 1)


def _check(given: dict[str, Any]) -> None:
    """What can be known to be wrong before anything is started."""
    from ..bench.serve_client import Address

    own = ("model", "device", "ctx_size", "parallel", "kv_memory", "deterministic", "no_tune", "baseline")
    wrong = [name for name in own if given[name]]
    wrong += [name for name, usual in (("backend", "auto"), ("precision", "fast")) if given[name] != usual]
    if given["url"] is not None:
        Address.of(given["url"])
        if wrong:
            flag = wrong[0].replace("_", "-")
            raise click.UsageError(f"--{flag} is for a server that is started here; leave it out, or --url.")
    elif given["api_key"] is not None:
        raise click.UsageError("--api-key is for --url; a server that is started here has none.")
    if given["output"].low < 1:
        raise click.UsageError("-n must be at least 1: an answer without tokens has no times.")
    if given["prompt"].low + given["prefix"] < 1:
        raise click.UsageError("-p and --prefix are 0; a prompt has at least one token.")
    rate = given["request_rate"]
    if rate is not None and not (rate > 0 and math.isfinite(rate)):
        raise click.UsageError(f"--request-rate must be above 0, got {rate:g}.")
    if given["beside"] is not None:
        levels = given["concurrency"] or (_STREAMS,)
        if rate is not None or len(levels) > 1 or levels[0] < 2:
            raise click.UsageError("--beside needs one --concurrency, of at least 2, and no --request-rate.")


def _loads(given: dict[str, Any]) -> list[Load]:
    from ..bench.serve_load import Load

    rate, levels = given["request_rate"], given["concurrency"]
    if not levels:
        levels = (None,) if rate is not None else (_STREAMS,)
    made = []
    for level in levels:
        waves = 1 if given["beside"] is not None and given["beside"][0] == "prompt" else _WAVES
        usual = _RATED_REQUESTS if level is None else waves * level
        count = given["num_requests"] or usual
        lengths = {name: given[name] for name in ("prompt", "output", "prefix", "temperature", "seed")}
        made.append(Load(requests=count, concurrency=level, rate=rate, **lengths))
    return made


def _model_options(given: dict[str, Any]) -> list[str]:
    named = [("--model", "model"), ("--device", "device"), ("--backend", "backend"), ("--precision", "precision")]
    options = [word for flag, name in named if given[name] is not None for word in (flag, given[name])]
    return options + ["--no-tune"] * given["no_tune"]


@contextmanager
def _server(given: dict[str, Any]) -> Iterator[tuple[str, ServerProcess | None]]:
    """The server's address, and its process if it is ours."""
    if given["url"] is not None:
        yield given["url"], None
        return
    from ..bench.serve_process import server_process

    options = _model_options(given) + ["--deterministic"] * given["deterministic"]
    for flag in ("ctx-size", "parallel", "kv-memory"):
        value = given[flag.replace("-", "_")]
        options += [] if value is None else [f"--{flag}", str(value)]
    with server_process(options) as process:
        yield process.url(), process


def _measure(
    given: dict[str, Any],
    url: str,
    process: ServerProcess | None,
    loads: Sequence[Load],
    found: dict[str, Any],
    runs: list[Run],
) -> None:
    """Add what is served to `found`, and every run to `runs` when it begins."""
    from ..bench import serve_load
    from ..bench.serve_client import Address

    with spoken() as say, serve_load.open_client(Address.of(url, given["api_key"])) as (client, loop):
        say("as soon as the model is loaded")
        starting = None if process is None else process.is_alive
        if not loop.run(serve_load.wait_until_ready(client, _LOAD_SECONDS, starting)):
            if process is not None and not process.is_alive():
                raise process.failure()
            raise InputError(f"the server at {url} loads its model for longer than {_LOAD_SECONDS:g} s")
        served = found["served"] = loop.run(serve_load.describe(client, given["vocabulary"]))
        _check_context(served, given, loads)
        bench = _ServeBench(client, served, loop.run, say, not given["no_warmup"])
        for load in loads:
            bench.measure(load, given["beside"], runs)


def _check_context(served: ServerInfo, given: dict[str, Any], loads: Sequence[Load]) -> None:
    beside = given["beside"]
    longest = max(load.prefix + load.prompt.high + load.output.high for load in loads)
    if beside is not None and beside[0] == "prompt":
        longest = max(longest, beside[1] + 1)
    if served.context is not None and longest > served.context:
        raise InputError(f"prompt and answer need {longest:,} tokens, the server's context holds {served.context:,}")


class _ServeBench:
    """Runs loads, each after a warm-up: the same with other tokens."""

    def __init__(
        self, client: Client, served: ServerInfo, wait: Callable[[Any], Any], say: Callable[[str], None], warmup: bool
    ) -> None:
        self._client, self._served, self._wait, self._say, self._warmup = client, served, wait, say, warmup
        self._salt = 0

    def measure(self, load: Load, beside: tuple[str, int] | None, runs: list[Run]) -> None:
        """Add the runs of a load to `runs`."""
        if beside is None:
            self._run(load, load.name, runs)
        elif beside[0] == "prompt":
            self._run(load, f"{load.name} and a prompt of {beside[1]:,}", runs, beside)
        else:
            others = dataclasses.replace(load, concurrency=(load.concurrency or 2) - 1)
            pair = [(f"{others.name} and a plain one", None), (f"{others.name} and one with {beside[0]}", beside)]
            for at in range(_ROUNDS):
                for name, kind in pair:
                    if at == 0:
                        self._run(others, name, runs, kind or ("plain", 0))
                    else:
                        same = next(run for run in runs if run.name == name)
                        self._once(same, kind or ("plain", 0))

    def _run(self, load: Load, name: str, runs: list[Run], beside: tuple[str, int] | None = None) -> None:
        from ..bench.serve_load import Run

        if self._warmup:
            few = min(load.requests, load.concurrency or load.requests)
            self._once(Run(f"warm-up of {name}", dataclasses.replace(load, requests=few)), beside)
        runs.append(Run(name, load))
        self._once(runs[-1], beside)

    def _once(self, run: Run, beside: tuple[str, int] | None) -> None:
        from ..bench import serve_load

        self._salt += 1
        todo = serve_load.jobs(self._client, self._served, run.load, self._salt)
        companion = None if beside is None else self._companion(run.load, *beside)
        told_at = 0.0

        def told(done: int) -> None:
            nonlocal told_at
            if time.monotonic() - told_at > _TELL_SECONDS:
                told_at = time.monotonic()
                self._say(f"{run.name}: {done:,} of {len(todo):,} requests")

        told(0)
        self._wait(serve_load.run(self._client, run, todo, companion, told))

    def _companion(self, load: Load, kind: str, count: int) -> Companion:
        from ..bench import serve_load

        self._salt += 1
        kinds: dict[str, dict[str, Any]] = {
            "logprobs": {"logprobs": count},
            "schema": {"json_schema": _SCHEMA},
            "grammar": {"grammar": _GRAMMAR},
        }
        if kind == "prompt":
            one: dict[str, Any] = {
                "requests": 1,
                "prefix": 0,
                "prompt": serve_load.Span(count, count),
                "output": serve_load.Span(1, 1),
            }
            load = dataclasses.replace(load, **one)
        made = serve_load.jobs(self._client, self._served, load, self._salt, kinds.get(kind))
        return serve_load.Companion(made, once=kind == "prompt")


# The report ------------------------------------------------------------------------------------------------


def _report(given: dict[str, Any], found: dict[str, Any], runs: Sequence[Run]) -> bool:
    """Print, save and draw. Did all requests succeed?"""
    from rich.console import Console

    from ..bench import serve_report
    from ..files import write_named
    from .build import commit

    summaries = [serve_report.summary(run) for run in runs]
    served, baseline = found.get("served"), found.get("baseline")
    record = {
        "version": __version__,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": given["url"],
        "server": None if served is None else dataclasses.asdict(served),
        "tg128_tokens_per_second": baseline,
        "slowdown": _slowdown(given, summaries),
        "runs": summaries,
    }
    if given["as_json"]:
        print(json.dumps(record, indent=2))
    elif summaries:
        out = Console(width=None if Console().is_terminal else 120)
        title = (
            " · ".join(filter(None, (served.name, served.device))) if served else str(given["model"] or given["url"])
        )
        for table in serve_report.tables(title, summaries, baseline):
            out.print(table)
        for line in _remarks(given, record, runs):
            print(line)
    for summary in summaries:
        for line in serve_report.warnings(summary):
            print(f"shaderlm: {line}", file=sys.stderr)
    if given["save"] is not None and summaries:
        detailed = [
            dict(each, requests=[dataclasses.asdict(x) for x in r.outcomes])
            for each, r in zip(summaries, runs, strict=True)
        ]
        write_named(given["save"], json.dumps(dict(record, runs=detailed), indent=1) + "\n")
    if given["chart"] is not None and summaries:
        about = [str(served.name), served.device] if served else [str(given["model"] or given["url"])]
        note = ", ".join(filter(None, [*about, f"shaderlm {__version__}", record["date"][:10]]))
        write_named(given["chart"], serve_report.chart("Load of many clients", note, summaries))
    return all(not each["failed"] and not each["errors"] for each in summaries)


def _slowdown(given: dict[str, Any], runs: Sequence[dict[str, Any]]) -> float | None:
    """Time per output token with a companion of another kind, over that with a plain one."""
    kinds = given["beside"]
    if kinds is None or kinds[0] == "prompt" or len(runs) < 2 or not all("tpot_ms" in run for run in runs):
        return None
    return float(runs[1]["tpot_ms"]["mean"] / runs[0]["tpot_ms"]["mean"])


def _remarks(given: dict[str, Any], record: dict[str, Any], runs: Sequence[Run]) -> Iterator[str]:
    from ..bench.serve_report import window

    if record["tg128_tokens_per_second"] is not None:
        yield f"tg128 with `bench`: {record['tg128_tokens_per_second']:,.1f} tokens per second"
    if record["slowdown"] is not None:
        percent = (record["slowdown"] - 1) * 100
        yield f"one with {given['beside'][0]}: the time per output token of the others changes by {percent:+.1f} %"
    found = window(runs[0]) if given["beside"] is not None and given["beside"][0] == "prompt" else None
    if found is not None:
        yield f"the prompt of {given['beside'][1]:,} tokens entered in {(found[1] - found[0]) * 1e3:,.0f} ms"
        early = sum(each.ended < found[1] for each in runs[0].outcomes)
        if early:
            yield f"{early} streams had ended before that; a larger -n lets all of them run"
