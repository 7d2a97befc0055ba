"""The kernels of plans as WGSL: each variant once, with what it is used for.

A kernel is specialised for shapes and formats, so one name may stand for several texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Plan
from .tuning import key_of


@dataclass(frozen=True)
class ShaderVariant:
    """One text of a kernel, and the dispatches that run it, in words."""

    source: str
    uses: tuple[str, ...]


def kernels_of(plans: Sequence[Plan]) -> list[str]:
    """The names of all kernels, sorted."""
    return sorted({launch.step.label for plan in plans for launch in plan.launches})


def variants_of(plans: Sequence[Plan], kernel: str) -> list[ShaderVariant]:
    """The texts of a kernel in the order of their first dispatch."""
    texts: dict[str, Counter[str]] = {}
    for plan in plans:
        for launch in plan.launches:
            if launch.step.label == kernel:
                use = f"{plan.name} {key_of(launch.op, launch.dims)}, route {launch.candidate}"
                texts.setdefault(launch.step.source, Counter())[use] += 1
    return [
        ShaderVariant(source, tuple(f"{use}, {n} dispatch{'es' if n > 1 else ''}" for use, n in counts.items()))
        for source, counts in texts.items()
    ]


def labelled(kernel: str, target: str, variants: Sequence[ShaderVariant], number: int) -> str:
    """Variant `number`, counted from 1, under a comment that lists all of them."""
    which = f"variant {number} of {len(variants)}" if len(variants) > 1 else "the only variant"
    lines = [f"{kernel} for {target}: {which}"]
    for i, variant in enumerate(variants, 1):
        lines += [f"  {' ' if n else i}  {use}" for n, use in enumerate(variant.uses)]
    if len(variants) > 1:
        lines.append("--variant N prints another one")
    return "\n".join([*(f"// {line}" for line in lines), "", variants[number - 1].source])
