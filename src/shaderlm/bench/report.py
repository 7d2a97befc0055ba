"""Tells what was measured: a table for people, rows for programs."""

from __future__ import annotations

import datetime
from dataclasses import asdict
from typing import Any

from rich.table import Table

from .. import __version__
from ..gpu import Facts
from .measure import Row

SOFTWARE_WARNING = (
    "This is a software adapter: it computes on the CPU. The numbers are right, but their times and ratios say "
    "nothing about GPUs."
)


def rate_text(row: Row) -> str:
    """GFLOP/s where arithmetic is the work, GB/s where memory is."""
    if row.comparison.phase == "prefill" and row.comparison.flops:
        return f"{row.rate / 1e9:,.0f} GFLOP/s"
    return f"{row.bandwidth / 1e9:,.0f} GB/s"


def verdict(row: Row) -> str:
    """The claimed ratio, and whether it was met."""
    if row.comparison.claimed is None:
        return "–"
    return f"{row.comparison.claimed:.2f}{' ✓' if row.ratio >= row.comparison.claimed else ' ✗'}"


COLUMNS = (
    "result",
    "model",
    "phase",
    "what",
    "shape",
    "before µs",
    "after µs",
    "ratio",
    "claimed",
    "rate",
    "% copy",
)


def cells(row: Row) -> tuple[str, ...]:
    """One row as text, in the order of COLUMNS."""
    c = row.comparison
    share = row.bandwidth / row.copy_bandwidth
    return (
        c.result, c.model, c.phase, c.what, c.shape, f"{row.before * 1e6:,.1f}", f"{row.after * 1e6:,.1f}",
        f"{row.ratio:.2f}", verdict(row), rate_text(row), f"{share:.0%}",
    )  # fmt: skip


def table(rows: list[Row], facts: Facts) -> Table:
    """The table for people."""
    copy = f"{rows[0].copy_bandwidth / 1e9:,.0f} GB/s copied" if rows else "nothing measured"
    shown = Table(title=f"{facts.name} · {copy}", title_justify="left", header_style="bold")
    for i, name in enumerate(COLUMNS):
        shown.add_column(name, justify="left" if i < 5 else "right", no_wrap=i not in (3, 4))
    for row in rows:
        shown.add_row(*cells(row))
    return shown


def markdown(rows: list[Row], facts: Facts) -> str:
    """The same table for a document."""
    lines = [" | ".join(COLUMNS), " | ".join("---" if i < 5 else "---:" for i in range(len(COLUMNS)))]
    lines += [" | ".join(cells(row)) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def records(rows: list[Row], facts: Facts) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "version": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": asdict(facts),
        "warning": SOFTWARE_WARNING if facts.software else None,
        "clock": "timestamps" if facts.timestamps else "wall",
        "copy_bandwidth": rows[0].copy_bandwidth if rows else None,
        "rows": [
            {
                **{key: getattr(row.comparison, key) for key in ("result", "what", "model", "phase", "shape")},
                "before_us": row.before * 1e6,
                "after_us": row.after * 1e6,
                "ratio": row.ratio,
                "claimed": row.comparison.claimed,
                "gb_per_s": row.bandwidth / 1e9,
                "gflop_per_s": row.rate / 1e9,
                "copy_share": row.bandwidth / row.copy_bandwidth,
            }
            for row in rows
        ],
    }
