"""What `bench serve` found: numbers for programs, tables for people, and a chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from .serve_load import Outcome, Run
from .svg import WIDTH, card

PERCENTILES = (50, 95, 99)
BUSY = 0.8  # of a core: from here on the client may be what limits
SHORT = 0.5  # seconds: a run that is too short to say so
# Keys in JSON, and words for people.
LATENCIES = {
    "ttft_ms": "time to first token",
    "ttft_cached_ms": "… with a cached prefix",
    "ttft_uncached_ms": "… without one",
    "itl_ms": "between tokens",
    "itl_window_ms": "… while the prompt enters",
    "tpot_ms": "time per output token",
    "e2e_ms": "end to end",
}


def summary(run: Run) -> dict[str, Any]:
    """Everything about a run. Latencies are in milliseconds; failed requests have none."""
    good = [each for each in run.outcomes if each.error is None]
    seconds = run.seconds
    inputs, outputs = sum(each.prompt_tokens for each in good), sum(each.output_tokens for each in good)
    errors = [each.error for each in (*run.outcomes, *run.beside) if each.error is not None]

    def per_second(count: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    return {
        "name": run.name,
        "load": asdict(run.load),
        "completed": len(good),
        "failed": len(run.outcomes) - len(good),
        "errors": sorted(set(errors)),
        "short": sum(each.output_tokens < each.max_tokens for each in good),
        "seconds": seconds,
        "prompt_tokens": inputs,
        "cached_tokens": sum(each.cached_tokens for each in good),
        "output_tokens": outputs,
        "requests_per_second": per_second(len(good)),
        "output_tokens_per_second": per_second(outputs),
        "total_tokens_per_second": per_second(inputs + outputs),
        "client_cpu": run.busy / seconds if seconds > 0 else 0.0,
        **{key: _spread(values) for key, values in _latencies(run, good).items() if values},
    }


def _latencies(run: Run, good: Sequence[Outcome]) -> dict[str, list[float]]:
    first = [(each, each.first_token) for each in good]
    cached = any(each.is_cached for each in good)
    seconds = {
        "ttft_ms": [s for _, s in first if s is not None],
        "ttft_cached_ms": [s for each, s in first if s is not None and each.is_cached],
        "ttft_uncached_ms": [s for each, s in first if s is not None and cached and not each.is_cached],
        "itl_ms": [b - a for each in good for a, b in pairwise(each.events)],
        "itl_window_ms": _gaps_while(run, good),
        "tpot_ms": [each.per_token for each in good if each.per_token is not None],
        "e2e_ms": [each.ended - each.sent for each in good],
    }
    return {key: [value * 1e3 for value in values] for key, values in seconds.items()}


def window(run: Run) -> tuple[float, float] | None:
    """From the moment that a companion's only request was sent to its first token."""
    long = run.beside[0] if len(run.beside) == 1 else None
    return (long.sent, long.events[0]) if long is not None and long.events else None


def _gaps_while(run: Run, good: Sequence[Outcome]) -> list[float]:
    """Latencies between tokens that overlap the window."""
    span = window(run)
    if span is None:
        return []
    begin, end = span
    return [b - a for each in good for a, b in pairwise(each.events) if b > begin and a < end]


def _spread(values: Sequence[float]) -> dict[str, float]:
    percentiles = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(np.mean(values)), **percentiles, "max": max(values), "count": len(values)}


def warnings(run: Mapping[str, Any]) -> list[str]:
    """What makes the numbers of a run doubtful."""
    lines = []
    if run["failed"]:
        lines.append(f"{run['failed']} of {run['failed'] + run['completed']} requests failed")
    lines += [f"the server says {error}" for error in run["errors"][:3]]
    if run["short"]:
        lines.append(f"{run['short']} answers are shorter than asked for; the server may not know ignore_eos")
    if run["client_cpu"] > BUSY and run["seconds"] > SHORT:
        lines.append(f"the client took {run['client_cpu']:.0%} of a core, and may be what limits")
    return [f"{run['name']}: {line}" for line in lines]


# For people ------------------------------------------------------------------------------------------------


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i > 0)
    return table


def tables(title: str, runs: Sequence[Mapping[str, Any]], baseline: float | None = None) -> list[Table]:
    """Throughput of all runs, and the latencies of each. `baseline`: tokens per second of tg128."""
    compared = ["× tg128"] if baseline else []
    rates = _table(title, ["tokens per second", "requests", "requests/s", "output", "total", *compared])
    for run in runs:
        output = run["output_tokens_per_second"]
        cells = [f"{run['completed']:,}", f"{run['requests_per_second']:,.2f}", f"{output:,.1f}"]
        cells += [f"{run['total_tokens_per_second']:,.1f}"] + ([f"{output / baseline:.2f}"] if baseline else [])
        rates.add_row(run["name"], *cells)
    latencies = []
    columns = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    for run in runs:
        table = _table("", [f"{run['name']}: ms", *columns])
        for key, words in LATENCIES.items():
            if key in run:
                table.add_row(words, *(_ms(run[key][column]) for column in columns))
        latencies.append(table)
    return [rates, *latencies]


def _ms(value: float) -> str:
    return f"{value:,.{2 if value < 10 else 1}f}"


# The chart -------------------------------------------------------------------------------------------------

_LEFT, _RIGHT, _TOP = 190, 150, 66
_BAR, _GAP, _GROUP = 18, 6, 44  # heights: a bar, the space between bars, the title of a group with its margins
_STYLES = (
    ".mid{fill:#0969da}.far{fill:#b6d7ff}",
    ".mid{fill:#4493f8}.far{fill:#1c3d66}",
    ".group{font-weight:600}",
)


def chart(title: str, note: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """An SVG: for each number a bar per run. Of latencies, the dark part ends at p50 and the light one at p99."""
    parts: list[str] = []
    words_of_bars: list[str] = []
    y = _TOP

    def group(name: str, key: str, mid: Callable[[Any], float], far: Callable[[Any], float], unit: str) -> None:
        nonlocal y
        shown = [(run["name"], run[key]) for run in runs if key in run]
        longest = max((far(value) for _, value in shown), default=0.0)
        if longest <= 0:
            return
        parts.append(f'<text class="text group" x="20" y="{y + 28}">{escape(name)}</text>')
        for i, (run, value) in enumerate(shown):
            top = y + _GROUP - 6 + i * (_BAR + _GAP)
            wide = [round((WIDTH - _LEFT - _RIGHT) * each / longest) for each in (far(value), mid(value))]
            words = f"{_ms(mid(value))}{unit}" + (f", p99 {_ms(far(value))}" if far(value) != mid(value) else "")
            parts.extend(
                [
                    f'<text class="text" x="{_LEFT - 10}" y="{top + 14}" text-anchor="end">{escape(run)}</text>',
                    f'<rect class="far" x="{_LEFT}" y="{top}" width="{wide[0]}" height="{_BAR}" rx="3"/>',
                    f'<rect class="mid" x="{_LEFT}" y="{top}" width="{wide[1]}" height="{_BAR}" rx="3"/>',
                    f'<text class="text" x="{_LEFT + wide[0] + 8}" y="{top + 14}">{words}</text>',
                ]
            )
            words_of_bars.append(f"{name}, {run}: {words}")
        y += _GROUP + len(shown) * (_BAR + _GAP)

    group("output tokens per second", "output_tokens_per_second", float, float, "")
    for key, words in LATENCIES.items():
        if not words.startswith("…"):
            group(f"{words}, p50 and p99", key, lambda value: value["p50"], lambda value: value["p99"], " ms")
    return card(escape(title), escape(note), escape("; ".join(words_of_bars)), y + 14, parts, _STYLES)
