"""How far the probabilities of a model are from those of a base: KL divergence, and what llama-perplexity says beside.

Q is the model that runs, the base is in a file (`logits_file`). Of each row that counts, with p the probabilities of
the base: KLD = Σ p · (ln p − ln q) over tokens with ln p > −16; Δp = q − p of the token that came; and whether both
have the same most likely token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine import LanguageModel, Request
from ..errors import InputError
from .logits_file import LogitsFile
from .perplexity import Estimate, estimate
from .windows import Windows

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
_FEW = 10  # values, of which no error is told
KLD_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)
DELTA_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1)


@dataclass(frozen=True)
class Rows:
    """Of rows that count, one value each."""

    nll: F64  # −ln p of the token that came
    nll_base: F64
    kld: F64
    same_top: NDArray[np.bool_]

    @property
    def delta(self) -> F64:
        """What the probability of the token that came is above that of the base."""
        return np.asarray(np.exp(-self.nll) - np.exp(-self.nll_base))


def log_softmax(logits: F32) -> F64:
    """[rows, vocabulary] → the same in float64. NaN counts as −inf."""
    x = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    x = x - x.max(1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(1, keepdims=True)))


def compare(logits: F32, base: F32, targets: NDArray[np.int64]) -> Rows:
    """Rows of logits with log probabilities of the base, both [rows, vocabulary]."""
    q, p = log_softmax(logits), base.astype(np.float64)
    at = np.arange(len(targets)), targets
    counts = p > -16
    terms = np.exp(p) * np.where(counts, p - np.where(counts, q, 0), 0)
    return Rows(-q[at], -p[at], terms.sum(1), q.argmax(1) == p.argmax(1))


def joined(rows: list[Rows]) -> Rows:
    """All of them as one."""
    columns = zip(*((each.nll, each.nll_base, each.kld, each.same_top) for each in rows), strict=True)
    return Rows(*map(np.concatenate, columns))


def run_logits(model: LanguageModel, windows: Windows, index: int, take: Callable[[int, F32], None]) -> None:
    """The logits of the rows of a window that count, as they come: the number of the first one, and the rows.

    They are never all in memory: a step gives `Runner.max_outputs` rows at most.
    """

    def rows(at: int, logits: F32) -> None:
        first = at - windows.first_row
        logits = logits[: windows.counted - first]  # the last row of a window has no token after it
        if len(logits):
            take(first, logits)

    options: Mapping[str, Any] = {"first_row": windows.first_row, "take_logits": rows, "keep_cache": False}
    model.engine.submit_lazy(Request(windows.ids(index), output="logits", **options)).result()


def compared_windows(model: LanguageModel, windows: Windows, base: LogitsFile) -> Generator[Rows]:
    """One window after the other."""
    for index in range(len(windows)):
        targets, found = np.array(windows.targets(index)), list[Rows]()

        def take(
            first: int, logits: F32, index: int = index, targets: Any = targets, found: list[Rows] = found
        ) -> None:
            rows = base.rows(index, first, len(logits))
            found.append(compare(logits, rows, targets[first : first + len(logits)]))

        run_logits(model, windows, index, take)
        yield joined(found)


def check_base(base: LogitsFile, model: LanguageModel, tokens: list[int] | None) -> None:
    """A base of another vocabulary or of another text is an InputError."""
    if base.vocabulary != model.config.vocabulary:
        has = f"{base.path} has a vocabulary of {base.vocabulary:,} tokens"
        raise InputError(f"{has}, the model one of {model.config.vocabulary:,}. Compare models with the same tokens")
    if tokens is None:
        return
    pairs = enumerate(zip(base.tokens, tokens, strict=False))
    different = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
    if different is not None or len(tokens) < len(base.tokens):
        place = len(tokens) if different is None else different
        raise InputError(f"this is not the text of {base.path}: token {place:,} differs. Give the same text, or none")


@dataclass(frozen=True)
class Statistics:
    """All that is said of two models on a text. Shares and probabilities are in 0 … 1."""

    ppl: Estimate
    ppl_base: Estimate
    correlation: float | None  # of ln PPL(Q) and ln PPL(base); None: one of them does not vary
    log_ratio: Estimate  # ln (PPL(Q) / PPL(base))
    ratio: Estimate
    difference: Estimate
    kld: Estimate
    kld_extremes: tuple[float, float]
    kld_percentiles: Mapping[float, float]
    delta: Estimate
    delta_extremes: tuple[float, float]
    delta_percentiles: Mapping[float, float]
    delta_rms: Estimate
    same_top: Estimate


def statistics(rows: Rows) -> Statistics:
    """As llama-perplexity computes them."""
    nll, base, delta, count = rows.nll, rows.nll_base, rows.delta, len(rows.nll)
    log_q, log_base = _estimate(nll), _estimate(base)
    covariance = float((nll * base).mean() - nll.mean() * base.mean()) / (count - 1) if count >= _FEW else 0.0
    q, p = (Estimate(math.exp(each.mean), math.exp(each.mean) * each.error, count) for each in (log_q, log_base))
    log_ratio = log_q.mean - log_base.mean
    ratio_error = _root(log_q.error**2 + log_base.error**2 - 2 * covariance)
    difference_error = _root(q.error**2 + p.error**2 - 2 * q.mean * p.mean * covariance)
    errors, square = log_q.error * log_base.error, _estimate(delta * delta)
    rms, top = math.sqrt(square.mean), float(rows.same_top.mean())
    return Statistics(
        ppl=q,
        ppl_base=p,
        correlation=covariance / errors if errors else None,
        log_ratio=Estimate(log_ratio, ratio_error, count),
        ratio=Estimate(math.exp(log_ratio), math.exp(log_ratio) * ratio_error, count),
        difference=Estimate(q.mean - p.mean, difference_error, count),
        kld=_estimate(rows.kld),
        kld_extremes=(float(rows.kld.min()), float(rows.kld.max())),
        kld_percentiles=_percentiles(rows.kld, KLD_PERCENTILES),
        delta=_estimate(delta),
        delta_extremes=(float(delta.min()), float(delta.max())),
        delta_percentiles=_percentiles(delta, DELTA_PERCENTILES),
        delta_rms=Estimate(rms, square.error / (2 * rms) if rms else 0.0, count),
        same_top=Estimate(top, math.sqrt(top * (1 - top) / max(1, count - 1)), count),
    )


def _estimate(values: F64) -> Estimate:
    found = estimate(values)
    return found if found.count > _FEW else Estimate(found.mean, 0.0, found.count)


def _root(square: float) -> float:
    return math.sqrt(max(0.0, square))


def _percentiles(values: F64, which: tuple[float, ...]) -> Mapping[float, float]:
    return dict(zip(which, np.percentile(values, which).tolist(), strict=True))
