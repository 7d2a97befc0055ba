"""Drafts on and off, in turns: tokens per second of a text that repeats its prompt, and of free text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..engine import LanguageModel, Request
from ..engine.drafts import Drafts

# A text that goes on as it began: who copies it is right.
_FUNCTION = '''def total_price(items, discount):
    """The price of all items, after a discount in percent."""
    total = 0.0
    for name, price, count in items:
        if count < 0:
            raise ValueError(f"{name} has a negative count: {count}")
        total += price * count
    return round(total * (100 - discount) / 100, 2)

'''
_FREE = "A letter from a lighthouse keeper to a sister in the city, about the storm of last week:\n\nDear sister,\n"
TEXTS: dict[str, str] = {"repeats": 4 * _FUNCTION, "free": _FREE}


@dataclass(frozen=True)
class DraftResult:
    """Of one text at one number of streams. Speeds are of all streams, medians of the rounds; so is the ratio."""

    text: str
    streams: int
    off: float  # tokens per second
    on: float
    ratio: float
    ratios: Sequence[float]
    drafted: int  # tokens of all rounds
    accepted: int
    same: bool  # are the texts those without drafts? With a forced acceptance they are not


@dataclass(frozen=True)
class _Round:
    speed: float
    ids: list[list[int]]
    drafted: int
    accepted: int


def measure(
    model: LanguageModel,
    drafts: Drafts,
    texts: Sequence[str],
    streams: Sequence[int],
    tokens: int,
    rounds: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[DraftResult]:
    """Each text with each number of streams: rounds with and without drafts in turns, after one of each."""
    results = []
    for text in texts:
        for count in streams:
            requests = [_request(model, text, i, tokens) for i in range(count)]
            offs, ons = list[_Round](), list[_Round]()
            for i in range(rounds + 1):
                for used, found in ((None, offs), (drafts, ons)):
                    say(f"{text}, {count} streams, {'on' if used else 'off'}, {i} of {rounds}")
                    model.engine.use_drafts(used)
                    found.append(_run(model, requests))
            del offs[0], ons[0]  # kernels were compiled, and clocks came up
            ratios = [on.speed / off.speed for off, on in zip(offs, ons, strict=True)]
            results.append(
                DraftResult(
                    text,
                    count,
                    median(each.speed for each in offs),
                    median(each.speed for each in ons),
                    median(ratios),
                    ratios,
                    sum(each.drafted for each in ons),
                    sum(each.accepted for each in ons),
                    all(on.ids == off.ids for off, on in zip(offs, ons, strict=True)),
                )
            )
    model.engine.use_drafts(drafts)  # which is closed with the model
    return results


def _request(model: LanguageModel, text: str, number: int, tokens: int) -> Request:
    """Greedy where the prompt is repeated, otherwise drawn: texts of a model that take the likeliest repeat soon."""
    how: dict[str, Any] = {} if text == "repeats" else {"temperature": 0.8, "seed": number}
    prompt = f"# Part {number + 1}\n{TEXTS[text]}"
    return model.request(prompt, max_tokens=tokens, ignore_eos=True, cache_prompt=False, **how)


def _run(model: LanguageModel, requests: Sequence[Request]) -> _Round:
    """The speed is that of decoding: from the time when all have their first token."""
    handles = model.engine.submit_all(requests)
    ids = [list[int]() for _ in handles]
    for handle, found in zip(handles, ids, strict=True):
        for delta in handle:
            found += delta.ids
    begin, end = max(each.first for each in handles), max(each.last for each in handles)
    usages = [handle.usage for handle in handles]
    decoded = sum(len(each) - 1 for each in ids)
    return _Round(
        decoded / max(end - begin, 1e-9),
        ids,
        sum(each.drafted_tokens for each in usages),
        sum(each.accepted_tokens for each in usages),
    )


def lines(results: Sequence[DraftResult]) -> list[str]:
    """A table in Markdown."""
    rows = [
        "| text | streams | off, tok/s | on, tok/s | on / off | drafted | accepted |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in results:
        share = f" ({each.accepted / each.drafted:.0%})" if each.drafted else ""
        numbers = f"{each.off:,.0f} | {each.on:,.0f} | {each.ratio:.2f} | {each.drafted:,} | {each.accepted:,}{share}"
        rows.append(f"| {each.text} | {each.streams} | {numbers} |")
    return rows
