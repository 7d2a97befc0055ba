"""`shaderlm bench serve`: the load of many clients on an HTTP server. Options as those of `bench` and `serve`."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from ..version import __version__
from .completion import complete_models
from .loading import console, spoken
from .options import backend_option, json_option, precision_option, tune_option
from .speed import numbers_above_0

if TYPE_CHECKING:
    from ..bench.serve_load import Companion, Job, Load, Run, ServerInfo, Span
    from ..bench.serve_process import ServerProcess

_WAVES = 4  # requests per stream, where nothing is said
_STREAMS = 16
_RATED_REQUESTS = 64
_LOAD_SECONDS = 600.0
_ROUNDS = 2  # with and without a companion, in turns
_TELL_SECONDS = 0.5
# Answers of these two do not end. Most tokens are allowed in the schema's strings, and everywhere in the grammar. Masks
# of the schema take 20 µs. Those of the grammar, 2 ms with 128,256 tokens, are the slowest that were found.
_GRAMMAR = {"grammar": "root ::= [a-z ]{8192}"}
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
_LOGPROBS = 5
# Options of the server that is started, and of them those of `bench`.
_OF_MODEL = ("model", "device", "backend", "precision", "no_tune")
_OF_STARTED_SERVER = (*_OF_MODEL, "ctx_size", "parallel", "kv_memory", "deterministic")
_LENGTHS = "A number, or a range such as 128-1024."


def _span(ctx: click.Context, param: click.Parameter, text: str) -> Span:
    """512, or 128-1024."""
    from ..bench.serve_load import Span

    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    span = Span(int(match[1]), int(match[2] or match[1])) if match else None
    if span is None or span.low > span.high:
        raise click.BadParameter(f"{text!r} must be a number of tokens, or a range such as 128-1024", ctx, param)
    return span


def _beside(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, int] | None:
    """prompt:8192, logprobs:5, schema or grammar."""
    if text is None:
        return None
    match = re.fullmatch(r"(prompt|logprobs):(\d+)|logprobs|schema|grammar", text)
    if match is None:
        raise click.BadParameter(f"{text!r} must be prompt:TOKENS, logprobs, logprobs:N, schema or grammar", ctx, param)
    return match[1] or text, int(match[2] or _LOGPROBS)


@click.command()
@click.option(
    "--url", metavar="URL", help="A server that runs, such as http://127.0.0.1:8080. Without it one is started."
)
@click.option("--api-key", metavar="KEY", help="Its key.")
@click.option(
    "-m",
    "--model",
    shell_complete=complete_models,
    help="What the started server serves: as for `bench`, synthetic:SHAPE:FORMAT too.",
)
@click.option("--device", help="As for generate; of the started server, like all options up to --deterministic.")
@backend_option
@precision_option
@tune_option
@click.option("-c", "--ctx-size", "--context", type=click.IntRange(1), metavar="N", help="As for serve.")
@click.option("-np", "--parallel", type=click.IntRange(1), metavar="N", help="As for serve.")
@click.option("--kv-memory", metavar="SIZE", help="As for serve.")
@click.option("--deterministic", is_flag=True, help="As for serve.")
@click.option(
    "--concurrency", metavar="16,64", callback=numbers_above_0, help="Requests at once, at most.  [default: 16]"
)
@click.option("--request-rate", type=float, metavar="X", help="Requests per second on average, at random times.")
@click.option(
    "--num-requests",
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
@json_option
@click.option("--save", type=click.Path(path_type=Path), metavar="FILE", help="Write JSON there, with every request.")
@click.option("--chart", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw the results.")
def serve(**options: Any) -> None:
    """Measure an HTTP server under the load of many clients.

    Throughput, time to first token, latency between tokens, time per output token, and end to end. The server is one
    that runs (--url), or one that is started for the measurement and ended after it. Ctrl-C reports what was measured.
    """
    from ..files import check_writable

    _check(options)
    loads = _loads(options)
    for path in (options["save"], options["chart"]):
        if path is not None:
            check_writable(path)
    bench = _ServeBench(options)
    interrupted = False
    try:
        bench.run(loads)
    except KeyboardInterrupt:
        interrupted = True
    bench.runs = [run for run in bench.runs if run.outcomes]
    ok = _report(options, bench)
    if interrupted:
        what = "what was measured is above" if bench.runs else "nothing was measured"
        print(f"interrupted; {what}", file=sys.stderr)
    sys.exit(130 if interrupted else 0 if ok else 1)


def _check(options: Mapping[str, Any]) -> None:
    """What can be known to be wrong before anything is started."""
    from ..bench.serve_client import Address

    if options["url"] is not None:
        Address.of(options["url"])
        usual = {"backend": "auto", "precision": "fast"}
        for name in (*_OF_STARTED_SERVER, "baseline"):
            if options[name] and options[name] != usual.get(name):
                flag = name.replace("_", "-")
                raise click.UsageError(f"--{flag} is for a server that is started here; leave it out, or --url.")
    elif options["api_key"] is not None:
        raise click.UsageError("--api-key is for --url; a server that is started here has none.")
    if options["output"].low < 1:
        raise click.UsageError("-n must be at least 1: an answer without tokens has no times.")
    if options["prompt"].low + options["prefix"] < 1:
        raise click.UsageError("-p and --prefix are 0; a prompt has at least one token.")
    rate = options["request_rate"]
    if rate is not None and not (rate > 0 and math.isfinite(rate)):
        raise click.UsageError(f"--request-rate must be above 0, got {rate:g}.")
    if options["beside"] is not None:
        levels = options["concurrency"] or (_STREAMS,)
        if rate is not None or len(levels) > 1 or levels[0] < 2:
            raise click.UsageError("--beside needs one --concurrency, of at least 2, and no --request-rate.")


def _has_long_prompt(options: Mapping[str, Any]) -> bool:
    return options["beside"] is not None and options["beside"][0] == "prompt"


def _loads(options: Mapping[str, Any]) -> list[Load]:
    from ..bench.serve_load import Load

    rate = options["request_rate"]
    waves = 1 if _has_long_prompt(options) else _WAVES
    lengths = {name: options[name] for name in ("prompt", "output", "prefix", "temperature", "seed")}
    levels = options["concurrency"] or ((_STREAMS,) if rate is None else (None,))
    usual = [_RATED_REQUESTS if level is None else waves * level for level in levels]
    return [
        Load(requests=options["num_requests"] or count, concurrency=level, rate=rate, **lengths)
        for level, count in zip(levels, usual, strict=True)
    ]


def _flags(options: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """These options for a process that is started; those that were not given are left out."""
    words = []
    for name in names:
        if options[name]:
            words += [f"--{name.replace('_', '-')}"] + ([] if options[name] is True else [str(options[name])])
    return words


class _ServeBench:
    """Runs loads, each after a warm-up: the same with other tokens. Ended early, it has what was measured."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._beside: tuple[str, int] | None = options["beside"]
        self._salt = 0
        self.baseline: float | None = None  # tokens per second of tg128
        self.served: ServerInfo | None = None
        self.runs: list[Run] = []  # each is added when it begins

    def run(self, loads: Sequence[Load]) -> None:
        """Measure what the options ask for."""
        from ..bench import serve_process

        options = self._options
        if options["baseline"]:
            with spoken() as say:
                say("tg128 with `bench`")
                self.baseline = serve_process.bench_decode(_flags(options, _OF_MODEL))
        if options["url"] is not None:
            self._measure(options["url"], None, loads)
            return
        with serve_process.server_process(_flags(options, _OF_STARTED_SERVER)) as process:
            self._measure(process.url(), process, loads)

    def _measure(self, url: str, process: ServerProcess | None, loads: Sequence[Load]) -> None:
        from ..bench import serve_load
        from ..bench.serve_client import Address

        address = Address.of(url, self._options["api_key"])
        with spoken() as self._say, serve_load.open_client(address) as (self._client, self._loop):
            self._say("as soon as the model is loaded")
            starting = None if process is None else process.is_alive
            if not self._loop.run(serve_load.wait_until_ready(self._client, _LOAD_SECONDS, starting)):
                if process is not None and not process.is_alive():
                    raise process.failure()
                raise InputError(f"the server at {url} loads its model for longer than {_LOAD_SECONDS:g} s")
            self.served = self._loop.run(serve_load.describe(self._client, self._options["vocabulary"]))
            self._check_context(loads)
            for load in loads:
                self._measure_load(load)

    def _check_context(self, loads: Sequence[Load]) -> None:
        assert self.served is not None
        longest = max(load.prefix + load.prompt.high + load.output.high for load in loads)
        if self._beside is not None and self._beside[0] == "prompt":
            longest = max(longest, self._beside[1] + 1)
        limit = self.served.context
        if limit is not None and longest > limit:
            raise InputError(f"prompt and answer need {longest:,} tokens, the server's context holds {limit:,}")

    def _measure_load(self, load: Load) -> None:
        """Add the runs of a load."""
        if self._beside is None:
            self._run(load, load.name)
        elif _has_long_prompt(self._options):
            self._run(load, f"{load.name} and a prompt of {self._beside[1]:,}", self._beside)
        else:
            others = dataclasses.replace(load, concurrency=(load.concurrency or 2) - 1)
            plain = ("plain", 0)
            runs = [
                (self._run(others, f"{others.name} and a plain one", plain), plain),
                (self._run(others, f"{others.name} and one with {self._beside[0]}", self._beside), self._beside),
            ]
            for _ in range(_ROUNDS - 1):
                for run, beside in runs:
                    self._once(run, beside)

    def _run(self, load: Load, name: str, beside: tuple[str, int] | None = None) -> Run:
        from ..bench.serve_load import Run

        if not self._options["no_warmup"]:
            few = min(load.requests, load.concurrency or load.requests)
            self._once(Run(f"warm-up of {name}", dataclasses.replace(load, requests=few)), beside)
        run = Run(name, load)
        self.runs.append(run)
        self._once(run, beside)
        return run

    def _once(self, run: Run, beside: tuple[str, int] | None) -> None:
        from ..bench import serve_load

        todo = self._jobs(run.load)
        companion = None if beside is None else self._companion(run.load, *beside)
        shown_at = -math.inf

        def progress(done: int) -> None:
            nonlocal shown_at
            if time.monotonic() - shown_at > _TELL_SECONDS:
                shown_at = time.monotonic()
                self._say(f"{run.name}: {done:,} of {len(todo):,} requests")

        progress(0)
        self._loop.run(serve_load.run(self._client, run, todo, companion, progress))

    def _jobs(self, load: Load, constraint: Mapping[str, Any] | None = None) -> list[Job]:
        """Requests with other tokens than all before."""
        from ..bench import serve_load

        assert self.served is not None
        self._salt += 1
        return serve_load.jobs(self._client, self.served, load, self._salt, constraint)

    def _companion(self, load: Load, kind: str, count: int) -> Companion:
        from ..bench.serve_load import Companion, Span

        if kind == "prompt":
            one = dataclasses.replace(load, requests=1, prefix=0, prompt=Span(count, count), output=Span(1, 1))
            return Companion(self._jobs(one), once=True)
        constraints: dict[str, Mapping[str, Any]] = {
            "logprobs": {"logprobs": count},
            "schema": {"json_schema": _SCHEMA},
            "grammar": _GRAMMAR,
        }
        return Companion(self._jobs(load, constraints.get(kind)))


# The report ------------------------------------------------------------------------------------------------


def _report(options: Mapping[str, Any], bench: _ServeBench) -> bool:
    """Print, save and draw. Did all requests succeed?"""
    from ..bench import serve_report
    from ..files import write_named
    from .build import commit

    summaries = [serve_report.summary(run) for run in bench.runs]
    served = bench.served
    record = {
        "version": __version__,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": options["url"],
        "server": None if served is None else dataclasses.asdict(served),
        "tg128_tokens_per_second": bench.baseline,
        "slowdown": _slowdown(options, summaries),
        "runs": summaries,
    }
    about = [served.name, served.device] if served else [str(options["model"] or options["url"])]
    if options["as_json"]:
        print(json.dumps(record, indent=2))
    elif summaries:
        out = console(120)
        for table in serve_report.tables(" · ".join(filter(None, about)), summaries, bench.baseline):
            out.print(table)
        for line in _remarks(options, record, bench.runs):
            print(line)
    for summary in summaries:
        for line in serve_report.warnings(summary):
            print(f"shaderlm: {line}", file=sys.stderr)
    if options["save"] is not None and summaries:
        detailed = [
            dict(summary, requests=[dataclasses.asdict(outcome) for outcome in run.outcomes])
            for summary, run in zip(summaries, bench.runs, strict=True)
        ]
        write_named(options["save"], json.dumps(dict(record, runs=detailed), indent=1) + "\n")
    if options["chart"] is not None and summaries:
        note = ", ".join(filter(None, [*about, f"shaderlm {__version__}", record["date"][:10]]))
        write_named(options["chart"], serve_report.chart("Load of many clients", note, summaries))
    return all(not each["failed"] and not each["errors"] for each in summaries)


def _slowdown(options: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Time per output token with a companion of another kind, over that with a plain one."""
    beside = options["beside"]
    if beside is None or beside[0] == "prompt" or len(runs) < 2 or not all("tpot_ms" in run for run in runs):
        return None
    return float(runs[1]["tpot_ms"]["mean"] / runs[0]["tpot_ms"]["mean"])


def _remarks(options: Mapping[str, Any], record: Mapping[str, Any], runs: Sequence[Run]) -> Iterator[str]:
    from ..bench.serve_report import window

    if record["tg128_tokens_per_second"] is not None:
        yield f"tg128 with `bench`: {record['tg128_tokens_per_second']:,.1f} tokens per second"
    if record["slowdown"] is not None:
        percent = (record["slowdown"] - 1) * 100
        yield f"one with {options['beside'][0]}: the time per output token of the others changes by {percent:+.1f} %"
    span = window(runs[0]) if _has_long_prompt(options) else None
    if span is not None:
        begin, end = span
        yield f"the prompt of {options['beside'][1]:,} tokens entered in {(end - begin) * 1e3:,.0f} ms"
        early = sum(each.ended < end for each in runs[0].outcomes)
        if early:
            yield f"{early} streams had ended before that; a larger -n lets all of them run"
