"""What an export has of a model that sees: plans of its tower for several numbers of patches, and its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..compile.lowering import Lowering
from ..compile.plan import Plan
from ..engine.vision import placeholder_ids
from ..errors import ModelError
from ..graph.fuse import fuse
from ..graph.graph import Graph
from ..models.config import Config
from ..models.vision import Tower, patches_graph
from ..runtime.sizes import max_tokens
from ..text import Tokenizer
from .variants import PORTABLE

# What vision.js runs: other towers have inputs, or texts around pictures, that it does not make.
EXPORTED = ("qwen3vl_merger", "gemma3", "idefics3", "pixtral")
_ANY_SIZE = ("area", "longest")  # so pictures have any number of patches
_LEAST = 256  # patches that there is a plan for, where pictures may be as small as a token
WITHOUT = "--no-vision exports the part that reads text"


@dataclass(frozen=True)
class TowerPlans:
    """Plans of one kind of device: by the patches of a tile, and one from pixels to patches, for its shaders."""

    tower: dict[int, Plan]
    pixels: Plan


def exportable(tower: Tower, name: str, config: Config) -> Tower:
    """The tower as browsers run it: where pictures may have any size, no larger than one binding takes."""
    if name not in EXPORTED:
        raise ModelError(
            f"pictures for the tower {name} cannot be exported, only those for {', '.join(EXPORTED)}; {WITHOUT}"
        )
    most, processor = _most_patches(tower), tower.processor
    if processor.sizing == "area":
        processor = replace(processor, most_pixels=min(processor.most_pixels, most * tower.patch**2))
    if processor.sizing == "longest":
        unit = tower.patch * tower.merge
        processor = replace(processor, longest=min(processor.longest, math.isqrt(most) // tower.merge * unit))
    if (processor.sizing == "area" and processor.least_pixels > processor.most_pixels) or _fixed(tower) > most:
        raise ModelError(f"a binding of a browser takes {most:,} patches, and pictures have more; {WITHOUT}")
    rows = max_tokens(config, PORTABLE)
    if tower.family.sees_itself and _fixed(tower) // tower.merge**2 > rows:
        raise ModelError(f"a step has {rows} rows in a browser, and a picture that must be in one has more; {WITHOUT}")
    return replace(tower, processor=processor)


def _fixed(tower: Tower) -> int:
    """Patches of a tile, where all have the same; else 0."""
    return 0 if tower.processor.sizing in _ANY_SIZE else tower.side**2


def _most_patches(tower: Tower) -> int:
    """As many as let everything that a tower computes fit one binding."""
    graph, unit = tower.build(tower.merge**2), tower.merge**2
    widest = max(math.prod(each.shape) for each in graph.tensors.values() if each.role not in ("weight", "state"))
    return PORTABLE.max_operand // (4 * widest) * unit


def patch_counts(tower: Tower) -> list[int]:
    """Patches that there are plans for: of a tile, or steps of a half from the least to the most."""
    if _fixed(tower):
        return [_fixed(tower)]
    processor, side, unit = tower.processor, tower.patch * tower.merge, tower.merge**2
    if processor.sizing == "area":
        return list(_steps(-(-processor.least_pixels // side**2), processor.most_pixels // side**2, unit))
    most = (-(-processor.longest // side)) ** 2
    return list(_steps(min(most, max(1, _LEAST // unit)), most, unit))


def _steps(count: int, last: int, unit: int) -> Iterator[int]:
    """Patches of so many tokens, and of more up to the last number."""
    while count < last:
        yield count * unit
        power = 1 << (count.bit_length() - 1)
        count = power + power // 2 if power > 1 and count < power + power // 2 else 2 * power
    yield last * unit


def tower_plans(tower: Tower, lowering: Lowering) -> TowerPlans:
    """Of one kind of device."""
    processor = tower.processor
    layout = processor.layout(2 * processor.side + 1, 2 * processor.side + 3)  # it is resized on both axes
    plans = {count: _plan(lowering, "tower", tower.build(count)) for count in patch_counts(tower)}
    return TowerPlans(plans, _plan(lowering, "pixels", patches_graph(layout, processor)))


def _plan(lowering: Lowering, name: str, graph: Graph) -> Plan:
    fused, rejected = fuse(graph, None, lowering.unsupported_reason)
    return lowering.plan(name, fused, rejected)


def vision_entry(tower: Tower, tokenizer: Tokenizer) -> dict[str, Any]:
    """ "vision" of plan.json: what becomes of pictures before and after a tower."""
    special, processor, family = tokenizer.special_tokens, tower.processor, tower.family
    if processor.token not in special:
        raise ModelError(f"the vocabulary has no token {processor.token!r}, which stands for images; {WITHOUT}")
    return {
        "processor": asdict(processor),
        "patch_width": tower.patch_width,
        "position_side": tower.side,
        "positions": family.positions,
        "rotary": tower.head if family.rope else 0,
        "rotary_offset": 0.5 if family.rope == "between" else 0,
        "theta": tower.theta,
        "out": tower.out,
        "levels": tower.levels,
        "several_axes": family.several_axes,
        "sees_itself": family.sees_itself,
        "token": special[processor.token],
        "placeholders": sorted(placeholder_ids(tokenizer)),
    }
