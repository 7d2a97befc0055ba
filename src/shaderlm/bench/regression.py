"""A guard against regressions: rows of an earlier run, read from a file, matched with those of this one and compared.

Rows are those of `tables.record`, which llama-bench's JSON resembles. Knows no device and prints nothing.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ..errors import InputError
from ..files import write_named
from .speed import Trial

_SHOWN = 4  # values of a list in a message
_OURS = "the rows that `--save` or `-o json` writes"


class RowKey(NamedTuple):
    """What must be the same for two speeds to be comparable. Of the model's path only the name: folders move."""

    model: str
    file: str
    parameters: int
    backend: str
    device: str
    cache: str
    precision: str
    test: Trial

    @property
    def subject(self) -> str:
        """All but the test."""
        how = f"{self.backend}, cache {self.cache}, {self.precision or 'precision not told'}"
        return f"{self.model} ({self.file}) on {self.device} ({how})"


@dataclass(frozen=True)
class Speed:
    """One row: tokens per second, and by which software."""

    key: RowKey
    tokens_per_second: float
    driver: str
    version: str
    commit: str


# Files -----------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Speed]:
    """The rows of a file, all of them checked."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise InputError(f"cannot read {path}: {problem.strerror}; expected {_OURS}") from None
    except UnicodeDecodeError as problem:
        raise InputError(f"{path} is not UTF-8 (byte {problem.start}); expected {_OURS}") from None
    return parse(text, str(path))


def parse(text: str, name: str) -> list[Speed]:
    """The rows of a JSON text; `name` is what errors call it."""
    try:
        records = json.loads(text, parse_constant=_refuse)
    except InputError as problem:
        raise InputError(f"{name}: {problem}") from None
    except (ValueError, RecursionError) as problem:
        reason = " ".join(str(problem).split())
        raise InputError(f"{name} is not JSON ({reason}); expected {_OURS}") from None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise InputError(f"{name} must be a JSON list of objects, {_OURS}; got {reprlib.repr(records)}")
    if not records:
        raise InputError(f"{name} has no rows; expected {_OURS}")
    return [speed(record, f"{name}, row {i}") for i, record in enumerate(records, 1)]


def save(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write records, all or nothing."""
    write_named(path, json.dumps(rows, indent=2, allow_nan=False) + "\n")


def _refuse(constant: str) -> Any:
    raise InputError(f"{constant} is no speed and no time; expected {_OURS}")


# Rows ------------------------------------------------------------------------------------------------------


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e18


_REQUIRED = object()
_TEXT, _COUNT, _POSITIVE = (_is_text, "text"), (_is_count, "a whole number of at least 0"), (_is_positive, "above 0")

# What a row must have, by key: what it is, and what stands for it in files that are older, or llama-bench's.
_FIELDS: Mapping[str, tuple[tuple[Callable[[object], bool], str], object]] = {
    "model_type": (_TEXT, _REQUIRED),
    "model_filename": (_TEXT, _REQUIRED),
    "model_n_params": (_COUNT, _REQUIRED),
    "backends": (_TEXT, _REQUIRED),
    "gpu_info": (_TEXT, _REQUIRED),
    "n_prompt": (_COUNT, _REQUIRED),
    "n_gen": (_COUNT, _REQUIRED),
    "avg_ts": (_POSITIVE, _REQUIRED),
    "n_depth": (_COUNT, 0),
    "type_k": (_TEXT, ""),
    "type_v": (_TEXT, ""),
    "precision": (_TEXT, ""),
    "n_parallel": ((lambda value: _is_count(value) and value != 0, "a whole number of at least 1"), 1),
    "with_text": ((lambda value: isinstance(value, bool), "true or false"), False),
    "driver": (_TEXT, ""),
    "build_number": ((lambda value: _is_text(value) or _is_count(value), "a version"), ""),
    "build_commit": (_TEXT, ""),
}


def speed(record: Mapping[str, Any], where: str) -> Speed:
    """A record, checked; `where` is what errors call it."""
    row: dict[str, Any] = {}
    for name, ((right, expected), default) in _FIELDS.items():
        value = record.get(name, default)
        if value is _REQUIRED:
            raise InputError(f"{where} has no {name!r}; expected {_OURS}")
        if not right(value):
            raise InputError(f"{where}: {name} must be {expected}, got {reprlib.repr(value)}")
        row[name] = " ".join(value.split()) if isinstance(value, str) else value  # notes are lines
    test = Trial(row["n_prompt"], row["n_gen"], row["n_depth"], row["with_text"], row["n_parallel"])
    if not test.tokens:
        raise InputError(f"{where}: n_prompt or n_gen must be above 0, both are 0")
    file = str(row["model_filename"]).replace("\\", "/").rsplit("/", 1)[-1]
    caches = dict.fromkeys((row["type_k"], row["type_v"]))
    names = (row["model_type"], file, row["model_n_params"], row["backends"], row["gpu_info"])
    software = (row["driver"], str(row["build_number"]), row["build_commit"])
    key = RowKey(*names, "/".join(caches), row["precision"], test)
    return Speed(key, float(row["avg_ts"]), *software)


# Comparing -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """One row of both runs, in tokens per second."""

    row: RowKey
    before: float
    now: float
    threshold: float  # the part of the speed that may be lost

    @property
    def ratio(self) -> float:
        """Above 1 is faster now."""
        return self.now / self.before

    @property
    def slower(self) -> bool:
        """By more than the threshold allows."""
        return self.now < (1 - self.threshold) * self.before

    @property
    def verdict(self) -> str:
        """In a word."""
        return "slower" if self.slower else "faster" if self.now > (1 + self.threshold) * self.before else "same"


@dataclass(frozen=True)
class RegressionCheck:
    """What two runs have in common, and what there is to say about the rest, in lines."""

    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]

    @property
    def slower(self) -> tuple[Pair, ...]:
        """The regressions."""
        return tuple(pair for pair in self.pairs if pair.slower)


def compare(before: Sequence[Speed], now: Sequence[Speed], percent: float) -> RegressionCheck:
    """Compare the rows that both runs have; an InputError where there is none: a guard must not pass on nothing.

    A run may have a row several times; then the mean counts.
    """
    old, new = _means(before), _means(now)
    pairs = tuple(Pair(key, old[key], speed, percent / 100) for key, speed in new.items() if key in old)
    if not pairs:
        raise InputError(_nothing_in_common(before, now))
    notes = [
        *_unmatched("saved, but not measured now", (key for key in old if key not in new)),
        *_unmatched("measured now, but not saved", (key for key in new if key not in old)),
        *_changes(before, now),
    ]
    notes.append(f"slower by more than {percent:g} %: {sum(pair.slower for pair in pairs)} of {len(pairs)}")
    return RegressionCheck(pairs, tuple(notes))


def _means(rows: Sequence[Speed]) -> dict[RowKey, float]:
    speeds: dict[RowKey, list[float]] = {}
    for row in rows:
        speeds.setdefault(row.key, []).append(row.tokens_per_second)
    return {key: fmean(several) for key, several in speeds.items()}


def _unmatched(what: str, keys: Iterable[RowKey]) -> list[str]:
    """One line for the rows of one side only, or none."""
    tests: dict[str, list[str]] = {}
    for key in keys:
        tests.setdefault(key.subject, []).append(key.test.name)
    return [f"{what}: " + "; ".join(f"{', '.join(names)} of {of}" for of, names in tests.items())] if tests else []


def _listed(values: Sequence[str]) -> str:
    more = len(values) - _SHOWN
    return ", ".join(map(repr, values[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


_KEY_PARTS: Mapping[str, Callable[[Speed], str]] = {
    "model": lambda row: row.key.model,
    "file": lambda row: row.key.file,
    "backend": lambda row: row.key.backend,
    "device": lambda row: row.key.device,
    "cache": lambda row: row.key.cache,
    "precision": lambda row: row.key.precision,
    "tests": lambda row: row.key.test.name,
}
_OTHER_PARTS: Mapping[str, Callable[[Speed], str]] = {
    "device": _KEY_PARTS["device"],
    "driver": lambda row: row.driver,
    "version": lambda row: row.version,
    "commit": lambda row: row.commit,
}


def _differences(
    before: Sequence[Speed], now: Sequence[Speed], parts: Mapping[str, Callable[[Speed], str]]
) -> dict[str, str]:
    """The parts that differ between the runs: part → "then → now"."""
    differences = {}
    for name, of in parts.items():
        then, here = (list(dict.fromkeys(map(of, rows))) for rows in (before, now))
        if set(then) != set(here):
            differences[name] = f"{name} {_listed(then)} → {_listed(here)}"
    return differences


def _changes(before: Sequence[Speed], now: Sequence[Speed]) -> list[str]:
    """One line on what else changed, or none. A device here is one of several: some rows matched."""
    differences = _differences(before, now, _OTHER_PARTS)
    if not differences:
        return []
    warning = "; rows are compared on the same device only, and another driver is no regression of this package"
    shown = warning if {"device", "driver"} & set(differences) else ""
    return [f"since then: {', '.join(differences.values())}{shown}"]


def _nothing_in_common(before: Sequence[Speed], now: Sequence[Speed]) -> str:
    differences = _differences(before, now, _KEY_PARTS)
    reason = ", ".join(differences.values()) or "each part is in both, but not together"
    foreign = "; speeds of two devices say nothing about a regression" if "device" in differences else ""
    hint = "run the saved tests, or save rows of these on this device with --save"
    return f"nothing was compared, no saved row is of what was measured: {reason}{foreign}; {hint}"
