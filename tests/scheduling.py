"""Which tests stay together when several workers share them, and which come first. Only the time depends on it.

Every worker compiles its own kernels and loads its own models, and a software adapter takes a second per kernel. So
what needs the same ones stays in one worker: the tests of a file, of files with the same tiny model, and of one family
of kernels in one format. (Marks would say so where the tests are, but pytest-xdist 3.8 does not see its own ones under
pytest 9.2.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

# Files that test kernels of every family.
_KERNELS = ("bounds", "equalities", "gpu_weights", "kernels", "properties", "properties_attention")
# What the name of a test or its parameters say, first come first served.
_FAMILIES = {
    "q4gsw": "q4gsw",
    "linear": "linear|gemv|product|quantised",
    "attention": "sdpa|attention|kv_write|cache|queries|logits|rope",
}
# A kernel is concatenated with the functions of a format: of another format it is another kernel.
_FORMAT = re.compile(r"(?:\[|-|format|cache)(f32|f16|q\d_\w)(?=-|\])")
_SAME_MODEL = {
    "bench_guard": "tiny q8_0",
    "bench_models": "tiny q8_0",
    "engine": "tiny q8_0",
    "profile": "tiny q8_0",
    "profile_cli": "tiny q8_0",
    "cli_info": "tiny models",
    "models": "tiny models",
    "qwen3": "tiny models",
    "engine_failures": "tiny f32",
    "growth": "tiny f32",
    "stock": "tiny f32",
    "tune": "tiny f32",
}
# Those that take minutes begin, so that the workers end together.
_FIRST = ("dawn", "q4gsw", "linear", "attention", "tiny models", "tiny q8_0", "smollm2", "int16", "tiny f32")


def group_of(nodeid: str) -> str:
    """The group of a test: its members run in one worker."""
    path, _, name = nodeid.partition("::")
    stem = PurePosixPath(path).stem.removeprefix("test_")
    if stem not in _KERNELS:
        return _SAME_MODEL.get(stem, stem)
    family = next((family for family, words in _FAMILIES.items() if re.search(words, name)), "other kernels")
    found = _FORMAT.search(name)
    return f"{family} {found[1]}" if found else family


def in_order(items: Sequence[Any]) -> list[Any]:
    """Tests in the order in which workers should get them; as they were within a group."""

    def place(item: Any) -> int:
        group = group_of(item.nodeid)
        return next((i for i, first in enumerate(_FIRST) if group.startswith(first)), len(_FIRST))

    return sorted(items, key=place)
