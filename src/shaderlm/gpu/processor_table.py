"""How many processors a GPU has, by its name, from the data sheets of its maker."""

from __future__ import annotations

import re

# By a part of the adapter's name, in lower case.
_PROCESSORS = {
    "nvidia h200": 132,
    "nvidia h100 pcie": 114,
    "nvidia h100": 132,
    "nvidia a100": 108,
    "nvidia l40s": 142,
    "nvidia l4": 58,
    "nvidia a10": 72,
    "tesla t4": 40,
    "rtx 5090": 170,
    "rtx 5080": 84,
    "rtx 5070 ti": 70,
    "rtx 5070": 48,
    "rtx 4090": 128,
    "rtx 4080 super": 80,
    "rtx 4080": 76,
    "rtx 4070 ti super": 66,
    "rtx 4070 ti": 60,
    "rtx 4070 super": 56,
    "rtx 4070": 46,
    "rtx 4060 ti": 34,
    "rtx 4060": 24,
    "rtx 3090 ti": 84,
    "rtx 3090": 82,
    "rtx 3080 ti": 80,
    "rtx 3080": 68,
    "rtx 3070": 46,
    "rtx 3060 ti": 38,
    "rtx 3060": 28,
    "rtx 2080 ti": 68,
    "rtx 2070": 36,
    "rtx 2060": 30,
    "rx 9070 xt": 64,
    "rx 9070": 56,
    "rx 7900 xtx": 96,
    "rx 7900 xt": 84,
    "rx 7800 xt": 60,
    "rx 7700 xt": 54,
    "rx 7600": 32,
    "rx 6900 xt": 80,
    "rx 6800 xt": 72,
    "rx 6800": 60,
    "rx 6700 xt": 40,
    "mi300x": 304,
    "arc a770": 32,
    "arc a750": 28,
    "arc a380": 8,
    "arc b580": 20,
    "arc b570": 18,
    "apple m1 ultra": 64,
    "apple m1 max": 32,
    "apple m1 pro": 16,
    "apple m1": 8,
    "apple m2 ultra": 76,
    "apple m2 max": 38,
    "apple m2 pro": 19,
    "apple m2": 10,
    "apple m3 max": 40,
    "apple m3 pro": 18,
    "apple m3": 10,
    "apple m4 max": 40,
    "apple m4 pro": 20,
    "apple m4": 10,
}


def processors_of(name: str) -> int:
    """Of an adapter with this name; 0 if it is not known. Laptops' variants of a GPU have others, so they are not."""
    words = " ".join(re.sub(r"\((r|tm)\)", "", name.lower()).split())
    if any(word in words for word in ("laptop", "mobile", "max-q")):
        return 0
    known = (key for key in sorted(_PROCESSORS, key=len, reverse=True) if re.search(rf"\b{key}\b", words))
    return next((_PROCESSORS[key] for key in known), 0)
