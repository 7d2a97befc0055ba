"""Results of speed tests as llama-bench writes them: the same columns in Markdown, the same keys elsewhere."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .regression import RegressionCheck
from .speed import Result, Trial, deviation, mean


@dataclass(frozen=True)
class Subject:
    """What was measured: a model on a device, with this software."""

    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    backend: str
    device: str
    driver: str
    version: str
    commit: str
    cache: str
    precision: str


def record(subject: Subject, result: Result, when: str) -> dict[str, Any]:
    """One row for programs."""
    return {
        "build_commit": subject.commit,
        "build_number": subject.version,
        "backends": subject.backend,
        "gpu_info": subject.device,
        "driver": subject.driver,
        "model_filename": subject.model_filename,
        "model_type": subject.model_type,
        "model_size": subject.model_size,
        "model_n_params": subject.model_n_params,
        "type_k": subject.cache,
        "type_v": subject.cache,
        "precision": subject.precision,
        "n_prompt": result.test.prompt,
        "n_gen": result.test.generated,
        "n_depth": result.test.depth,
        "n_parallel": result.test.parallel,
        "with_text": result.test.text,
        "test_time": when,
        "avg_ns": round(mean(result.samples_ns)),
        "stddev_ns": round(deviation(result.samples_ns)),
        "avg_ts": mean(result.samples_ts),
        "stddev_ts": deviation(result.samples_ts),
        "samples_ns": list(result.samples_ns),
        "samples_ts": list(result.samples_ts),
    }


_WIDTHS = {"model": 30, "size": 10, "params": 10, "backend": 12, "device": 24, "parallel": 8, "test": 20, "t/s": 20}


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def _params(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _trial(row: Mapping[str, Any]) -> Trial:
    return Trial(row["n_prompt"], row["n_gen"], row["n_depth"], row["with_text"], row["n_parallel"])


def _markdown(row: Mapping[str, Any], first: bool, parallel: bool) -> str:
    """A row of the table, under its head if it is the first. The column `parallel` is there where it was asked for."""
    cells = {
        "model": row["model_type"],
        "size": _size(row["model_size"]),
        "params": _params(row["model_n_params"]),
        "backend": row["backends"],
        "device": row["gpu_info"],
        "parallel": str(row["n_parallel"]),
        "test": _trial(row).test,
        "t/s": f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
    }
    widths = {name: width for name, width in _WIDTHS.items() if parallel or name != "parallel"}
    head = f"{_line(tuple(widths), tuple(widths.values()))}\n{_rule(tuple(widths.values()))}\n" if first else ""
    return head + _line([cells[name] for name in widths], tuple(widths.values())) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    left, *right = (_fitted(cell, width) for cell, width in zip(cells, widths, strict=True))
    padded = [left.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(right, widths[1:], strict=True))]
    return "| " + " | ".join(padded) + " |"


def _fitted(text: str, width: int) -> str:
    """The beginning and the end of a text that is too long for its column: its end tells formats apart."""
    if len(text) <= width:
        return text
    end = width // 3
    return f"{text[: width - end - 1]}…{text[-end:]}"


def _rule(widths: Sequence[int]) -> str:
    return "| " + " | ".join(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]) + " |"


_COMPARED = {"model": 30, "backend": 12, "device": 24, "test": 20, "before t/s": 12, "now t/s": 12, "ratio": 6}
_COMPARED_WIDTHS = (*_COMPARED.values(), 7)


def compared(comparison: RegressionCheck) -> list[str]:
    """What a guard found, in lines of Markdown: what was compared, what could not be, and the verdict."""
    found = [_line((*_COMPARED, "verdict"), _COMPARED_WIDTHS), _rule(_COMPARED_WIDTHS)]
    for pair in comparison.pairs:
        row, speeds = pair.row, (f"{pair.before:.2f}", f"{pair.now:.2f}", f"{pair.ratio:.3f}")
        cells = (row.model, row.backend, row.device, row.test.name, *speeds, pair.verdict)
        found.append(_line(cells, _COMPARED_WIDTHS))
    return [*found, "", *comparison.notes]


def _csv(rows: Sequence[Mapping[str, Any]], header: bool) -> str:
    out = io.StringIO()
    for row in rows:
        flat = {key: json.dumps(value) if isinstance(value, list) else value for key, value in row.items()}
        flat = {key: int(value) if isinstance(value, bool) else value for key, value in flat.items()}
        writer = csv.DictWriter(out, list(flat), lineterminator="\n", quoting=csv.QUOTE_ALL)
        if header:
            writer.writeheader()
            header = False
        writer.writerow(flat)
    return out.getvalue()


def _sql(row: Mapping[str, Any]) -> str:
    def literal(value: Any) -> str:
        if isinstance(value, (int, float)):
            return repr(int(value) if isinstance(value, bool) else value)
        text = json.dumps(value) if isinstance(value, list) else str(value)
        return "'" + text.replace("'", "''") + "'"

    return f"INSERT INTO llama_bench ({', '.join(row)}) VALUES ({', '.join(map(literal, row.values()))});\n"


def _sql_table(row: Mapping[str, Any]) -> str:
    kinds = {bool: "INTEGER", int: "INTEGER", float: "REAL"}
    columns = ",\n".join(f"  {name} {kinds.get(type(value), 'TEXT')}" for name, value in row.items())
    return f"CREATE TABLE IF NOT EXISTS llama_bench (\n{columns}\n);\n"


@dataclass(frozen=True)
class TableFormat:
    """How rows are printed: what comes before the first, each row by number, and what comes after the last."""

    row: Callable[[Mapping[str, Any], int], str]
    end: str = ""


def formats(*, parallel: bool = False) -> Mapping[str, TableFormat]:
    """Formats by name; `parallel`: tests may run several sequences at once, and the table says how many."""
    return {
        "md": TableFormat(lambda row, i: _markdown(row, i == 0, parallel)),
        "csv": TableFormat(lambda row, i: _csv([row], header=i == 0)),
        "json": TableFormat(lambda row, i: ("[\n" if i == 0 else ",\n") + json.dumps(row, indent=2), "\n]\n"),
        "jsonl": TableFormat(lambda row, i: json.dumps(row) + "\n"),
        "sql": TableFormat(lambda row, i: ("" if i else _sql_table(row)) + _sql(row)),
    }
