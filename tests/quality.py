"""How far logits are from those without rounding, over a text, with rows of several sequences in each step.

`python -m tests.quality [ROWS …]` prints it for the default model on this GPU, with 1, 2, 4, 8, 16 and 64 rows
unless others are given: 2,000 positions each, and the same cache on both sides.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shaderlm.engine.loading import load_with
from shaderlm.runtime.runner import Runner, SequenceChunk

F64 = NDArray[np.float64]
ROWS, POSITIONS = (1, 2, 4, 8, 16, 64), 2000


def text_of_docs() -> str:
    """Our own documentation: prose, tables and code, which no model has seen."""
    docs = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    return "".join(path.read_text(encoding="utf-8") for path in docs)


def compare(q: F64, p: F64) -> tuple[list[float], list[bool]]:
    """Rows of logits with those without rounding: the divergence of each in nats, and whether the likeliest is one."""
    q, p = (logits - np.logaddexp.reduce(logits, axis=1, keepdims=True) for logits in (q, p))
    return (np.exp(p) * (p - q)).sum(1).tolist(), (p.argmax(1) == q.argmax(1)).tolist()


def compare_rows(fast: Runner, exact: Runner, ids: list[int], rows: int) -> tuple[list[float], list[bool]]:
    """The same of a text in as many parts as a step has rows: in each step, every part gets its next token."""
    size = len(ids) // rows
    parts = [ids[i * size : (i + 1) * size] for i in range(rows)]
    divergences, same = list[float](), list[bool]()
    sequences = [[runner.add() for _ in parts] for runner in (fast, exact)]
    for tokens in zip(*parts, strict=True):
        pair = []
        for runner, each in zip((fast, exact), sequences, strict=True):
            chunks = [SequenceChunk(kv, [token], "logits") for kv, token in zip(each, tokens, strict=True)]
            logits = runner.step(chunks).logits
            assert logits is not None
            pair.append(logits.astype(np.float64))
        more = compare(*pair)
        divergences += more[0]
        same += more[1]
    for runner, each in zip((fast, exact), sequences, strict=True):
        for kv in each:
            runner.free(kv)
    return divergences, same


def main(rows_of_steps: list[int]) -> None:
    """The table."""
    with load_with(cache="f16") as fast, load_with(cache="f16", precision="exact") as exact:
        print(fast.report.device, fast.report.name)
        ids = fast.tokenize(text_of_docs())[:POSITIONS]
        for rows in rows_of_steps:
            divergences, same = compare_rows(fast.runner, exact.runner, ids, rows)
            where = f"{rows:3} rows, {len(same):,} positions"
            print(
                f"{where}: divergence {np.mean(divergences):.2e}, the same likeliest token {np.mean(same):.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]] or list(ROWS))
