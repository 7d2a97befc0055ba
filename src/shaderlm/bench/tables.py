"""Results of speed tests as llama-bench writes them: the same columns in Markdown, the same keys in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from .images import ImageSample, ImageTrial
from .regression import RegressionCheck
from .speed import Trial


def record(subject: Mapping[str, Any], test: Trial, samples_ns: Sequence[int], when: str) -> dict[str, Any]:
    """One row for programs. `subject`: what was measured, a model on a device with this software."""
    several = len(samples_ns) > 1
    samples_ts = [test.tokens * 1e9 / ns for ns in samples_ns]
    return {
        **subject,
        "n_prompt": test.prompt,
        "n_gen": test.generated,
        "n_depth": test.depth,
        "n_parallel": test.parallel,
        "with_text": test.text,
        "test_time": when,
        "avg_ns": round(fmean(samples_ns)),
        "stddev_ns": round(stdev(samples_ns)) if several else 0,
        "avg_ts": fmean(samples_ts),
        "stddev_ts": stdev(samples_ts) if several else 0.0,
        "samples_ns": list(samples_ns),
        "samples_ts": samples_ts,
    }


def image_record(
    subject: Mapping[str, Any], test: ImageTrial, samples: Sequence[ImageSample], when: str
) -> dict[str, Any]:
    """One row for programs, of pictures: nanoseconds of each, and until the first token of their requests."""
    encode, first = [each.encode_ns for each in samples], [each.first_token_ns for each in samples]
    return {
        **subject,
        "image_width": test.width,
        "image_height": test.height,
        "image_tokens": samples[0].tokens,
        "n_parallel": test.parallel,
        "test_time": when,
        "avg_ns": round(fmean(encode)),
        "stddev_ns": round(stdev(encode)) if len(encode) > 1 else 0,
        "images_per_second": 1e9 / fmean(encode),
        "avg_first_token_ns": round(fmean(first)),
        "stddev_first_token_ns": round(stdev(first)) if len(first) > 1 else 0,
        "samples_ns": encode,
        "samples_first_token_ns": first,
    }


_WIDTHS = {"model": 30, "size": 10, "params": 10, "backend": 12, "device": 24, "parallel": 8, "test": 20, "t/s": 20}
_WIDTHS |= {"image": 13, "tokens": 6, "ms per image": 18, "images/s": 8, "ms to first token": 18}


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"


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
        **({"parallel": str(row["n_parallel"])} if parallel else {}),
        **(_image_cells(row) if "image_width" in row else _token_cells(row)),
    }
    widths = [_WIDTHS[name] for name in cells]
    head = f"{_line(list(cells), widths)}\n{_rule(widths)}\n" if first else ""
    return head + _line(list(cells.values()), widths) + "\n"


def _token_cells(row: Mapping[str, Any]) -> dict[str, str]:
    return {"test": _trial(row).test, "t/s": f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"}


def _image_cells(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "image": f"{row['image_width']} × {row['image_height']}",
        "tokens": str(row["image_tokens"]),
        "ms per image": f"{row['avg_ns'] / 1e6:.2f} ± {row['stddev_ns'] / 1e6:.2f}",
        "images/s": f"{row['images_per_second']:.2f}",
        "ms to first token": f"{row['avg_first_token_ns'] / 1e6:.2f} ± {row['stddev_first_token_ns'] / 1e6:.2f}",
    }


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (_fitted(cell, width) for cell, width in zip(cells, widths, strict=True))
    padded = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
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
_COMPARED |= {"verdict": 7}
_COMPARED_WIDTHS = tuple(_COMPARED.values())


def compared(comparison: RegressionCheck) -> list[str]:
    """What a guard found, in lines of Markdown: what was compared, what could not be, and the verdict."""
    lines = [_line(tuple(_COMPARED), _COMPARED_WIDTHS), _rule(_COMPARED_WIDTHS)]
    for pair in comparison.pairs:
        row, speeds = pair.row, (f"{pair.before:.2f}", f"{pair.now:.2f}", f"{pair.ratio:.3f}")
        cells = (row.model, row.backend, row.device, row.test.name, *speeds, pair.verdict)
        lines.append(_line(cells, _COMPARED_WIDTHS))
    return [*lines, "", *comparison.notes]


def printed(form: str, row: Mapping[str, Any], number: int, *, parallel: bool = False) -> str:
    """A row in one of FORMATS, the first one with what comes before it. `parallel`: the table has that column."""
    if form == "json":
        return (",\n" if number else "[\n") + json.dumps(row, indent=2)
    return json.dumps(row) + "\n" if form == "jsonl" else _markdown(row, number == 0, parallel)
