"""Tells what was measured: a table for people, rows for programs."""

from __future__ import annotations

import datetime
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from ..compile.workload import SOFTWARE_WARNING
from ..gpu import DeviceCaps
from ..version import __version__
from .measure import Row

COLUMNS = ("op", "model", "phase", "what", "shape", "before µs", "after µs", "ratio", "rate", "% roof")
WIDE = 104  # columns of a terminal that hold the whole table
LEGEND = (
    "before, after: medians of one call of either route; ratio: before / after; rate: of the new route, each byte "
    "counted once; % roof: the least time, by the bandwidth of a copy or by the arithmetic that the new route uses "
    "(measured), divided by its time."
)


def rate_text(row: Row) -> str:
    """GFLOP/s or TFLOP/s where arithmetic is the work, GB/s where memory is."""
    if not (row.comparison.phase == "prefill" and row.comparison.flops):
        return f"{row.bandwidth / 1e9:,.{0 if row.bandwidth >= 1e10 else 1}f} GB/s"
    if row.rate >= 1e12:
        return f"{row.rate / 1e12:,.1f} TFLOP/s"
    return f"{row.rate / 1e9:,.{0 if row.rate >= 1e10 else 1}f} GFLOP/s"


def cells(row: Row) -> tuple[str, ...]:
    """One row as text, in the order of COLUMNS."""
    c = row.comparison
    return (
        c.op, c.model, c.phase, c.what, c.shape, f"{row.before * 1e6:,.1f}", f"{row.after * 1e6:,.1f}",
        f"{row.ratio:.2f}", rate_text(row), f"{row.roof_share:.0%}",
    )  # fmt: skip


def tables(rows: list[Row], caps: DeviceCaps, width: int) -> list[Table]:
    """A table per model for people. A terminal narrower than WIDE gets it without its last two columns."""
    best = rows[0].roofline if rows else "nothing measured"
    names = ("op", *COLUMNS[3:]) if width >= WIDE else ("op", *COLUMNS[3:-2])
    shown = []
    for model in dict.fromkeys(row.comparison.model for row in rows):
        title = f"{model} shapes · {caps.name} · {best}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for i, name in enumerate(names):
            table.add_column(name, justify="left" if i < 3 else "right", no_wrap=i != 1)
        for row in rows:
            if row.comparison.model == model:
                op, _, phase, *rest = cells(row)
                table.add_row(*(f"{op} {phase}", *rest)[: len(names)])
        shown.append(table)
    return shown


def markdown(rows: list[Row]) -> str:
    """The same table for a document."""
    lines = [" | ".join(COLUMNS), " | ".join("---" if i < 5 else "---:" for i in range(len(COLUMNS)))]
    lines += [" | ".join(cells(row)) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def records(rows: list[Row], caps: DeviceCaps) -> dict[str, Any]:
    """Everything, for programs."""
    named = ("op", "change", "operand", "model", "phase", "shape")
    return {
        "version": __version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": asdict(caps),
        "warning": SOFTWARE_WARNING if caps.software else None,
        "clock": "timestamps" if caps.timestamps else "wall",
        "roofline": asdict(rows[0].roofline) if rows else None,
        "rows": [
            {
                **{key: getattr(row.comparison, key) for key in named},
                "before_us": row.before * 1e6,
                "after_us": row.after * 1e6,
                "ratio": row.ratio,
                "gb_per_s": row.bandwidth / 1e9,
                "gflop_per_s": row.rate / 1e9,
                "matrix_units": row.matrix_units,
                "roof_share": row.roof_share,
            }
            for row in rows
        ],
    }
