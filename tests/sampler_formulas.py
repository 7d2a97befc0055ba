"""Samplers of a chain once more: slow and obvious, over lists of candidates.

A candidate is a pair of a token and its logit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Candidates = list[tuple[int, float]]


def softmax(found: Candidates) -> list[float]:
    top = max(logit for _, logit in found)
    weights = [math.exp(logit - top) for _, logit in found]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def entropy(probs: Sequence[float]) -> float:
    return -math.fsum(p * math.log(p) for p in probs if p > 0)


def in_order(found: Candidates) -> Candidates:
    return sorted(found, key=lambda pair: -pair[1])


def penalties(
    found: Candidates, history: Sequence[int], repeat: float, presence: float, frequency: float
) -> Candidates:
    out = []
    for token, logit in found:
        count = list(history).count(token)
        if count:
            logit = logit / repeat if logit > 0 else logit * repeat
            logit -= presence + frequency * count
        out.append((token, logit))
    return out


def top_k(found: Candidates, k: int) -> Candidates:
    return in_order(found)[:k] if k > 0 else found


def top_p(found: Candidates, p: float) -> Candidates:
    found, kept, total = in_order(found), [], 0.0
    for pair, prob in zip(found, softmax(found), strict=True):
        kept.append(pair)
        total += prob
        if total >= p:
            break
    return kept


def min_p(found: Candidates, p: float) -> Candidates:
    probs = softmax(found)
    return [pair for pair, prob in zip(found, probs, strict=True) if prob >= p * max(probs)]


def typical_p(found: Candidates, p: float) -> Candidates:
    probs = softmax(found)
    h = entropy(probs)
    order = sorted(range(len(found)), key=lambda i: abs(-math.log(probs[i]) - h))
    kept, total = [], 0.0
    for i in order:
        kept.append(found[i])
        total += probs[i]
        if total > p:
            break
    return kept


def top_n_sigma(found: Candidates, n: float) -> Candidates:
    logits = [logit for _, logit in found]
    mean = math.fsum(logits) / len(logits)
    sigma = math.sqrt(math.fsum((logit - mean) ** 2 for logit in logits) / len(logits))
    return [(token, logit) for token, logit in found if logit >= max(logits) - n * sigma]


def xtc(found: Candidates, threshold: float) -> Candidates:
    """Where it acts, which is by chance."""
    found = in_order(found)
    last = -1
    for i, prob in enumerate(softmax(found)):
        if prob >= threshold:
            last = i
    return found[max(last, 0) :]


def temperature(found: Candidates, t: float) -> Candidates:
    if t == 0:
        return in_order(found)[:1]
    return [(token, logit / t) for token, logit in found]


def dynamic_temperature(found: Candidates, t: float, reach: float, exponent: float) -> Candidates:
    if len(found) < 2:
        return found
    low, high = max(0.0, t - reach), t + reach
    share = entropy(softmax(found)) / math.log(len(found))
    return temperature(found, low + (high - low) * share**exponent)


def mirostat(found: Candidates, mu: float) -> Candidates:
    found = in_order(found)
    kept = [pair for pair, prob in zip(found, softmax(found), strict=True) if -math.log2(prob) <= mu]
    return kept or found[:1]


def dry(
    tokens: Sequence[int],
    piece: Callable[[int], bytes],
    *,
    multiplier: float,
    base: float,
    allowed: int,
    last_n: int,
    breakers: Sequence[str],
) -> dict[int, float]:
    """What is subtracted from logits, by token: every earlier place is compared with the end, token by token."""
    window = list(tokens)[max(0, len(tokens) - last_n) :] if last_n >= 0 else list(tokens)
    raw = [text.encode() for text in breakers]
    unbroken = 0  # tokens at the end, after the last one in which a breaker ends
    while unbroken < len(window) and not _ends_in_last(window[: len(window) - unbroken], piece, raw):
        unbroken += 1
    found: dict[int, float] = {}
    for place in range(1, len(window)):
        length = 0
        while length < min(place, unbroken) and window[place - 1 - length] == window[-1 - length]:
            length += 1
        token = window[place]
        if length >= allowed and not any(each in piece(token) for each in raw):
            found[token] = max(found.get(token, 0.0), multiplier * base ** (length - allowed))
    return found


def _ends_in_last(tokens: Sequence[int], piece: Callable[[int], bytes], breakers: Sequence[bytes]) -> bool:
    """Does a breaker end in the last of these tokens?"""
    text = b"".join(map(piece, tokens))
    ends = range(len(text) - len(piece(tokens[-1])) + 1, len(text) + 1)
    return any(text[:end].endswith(each) for end in ends for each in breakers)
