"""The plans of an export: of every variant, for the rows of prompts and of decoding, and for the kinds of heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..compile.lowering import Lowering
from ..compile.plan import BufferSpec, Plan
from ..compile.steps import Head, body_plan, head_plan
from ..errors import ModelError, RouteError
from ..gpu.caps import DeviceCaps
from ..graph.batch import CONTEXTS, RUN_ROWS, last_key
from ..graph.fuse import fuse
from ..models.architecture import Architecture
from ..models.config import Config, ImageRows, StepSpec
from ..models.vision import Tower
from ..runtime.sizes import cache_format, max_context, max_tokens, weights_of
from .variants import PORTABLE, VARIANTS
from .vision import TowerPlans, tower_plans

ROWS = (1, 8, 32, 64, 128, 512)  # of bodies: decoding, and chunks of prompts; a question in a template has 33 to 64
IMAGE_ROWS = (8, 64, 512)  # of bodies for chunks with rows of images, or after some
KINDS = ("greedy", "sample", "adjusted")  # of heads


@dataclass(frozen=True)
class DeviceVariant:
    """The plans for one kind of device."""

    caps: DeviceCaps
    bodies: Mapping[StepSpec, Plan]
    heads: Mapping[Head, Plan]
    vision: TowerPlans | None = None

    @property
    def steps(self) -> list[Plan]:
        """Those of steps."""
        return [*self.bodies.values(), *self.heads.values()]

    @property
    def plans(self) -> list[Plan]:
        """All of them."""
        return [*self.steps, *([self.vision.pixels, *self.vision.tower.values()] if self.vision else [])]

    @property
    def features(self) -> set[str]:
        """What the plans need, by the names of `DeviceCaps`."""
        return {feature for plan in self.plans for feature in plan.needs.features}

    def limit(self, name: str) -> int:
        """The most that any plan needs of a limit, by the name of `DeviceCaps`."""
        return max(plan.needs.limits[name] for plan in self.plans)


def web_config(config: Config) -> Config:
    """With as much context as one binding of the least device holds."""
    return replace(config, context=min(config.context, max_context(config, PORTABLE, cache_format(PORTABLE))))


def variants(
    kind: Architecture, config: Config, tower: Tower | None = None
) -> tuple[list[DeviceVariant], dict[str, BufferSpec]]:
    """The plans of all variants, and the weight buffers that all of them bind."""
    all_variants = []
    for caps in VARIANTS:
        try:
            all_variants.append(_variant(kind, config, caps, tower))
        except (ModelError, RouteError) as problem:
            raise ModelError(f"this model cannot run in a browser, variant {caps.name}: {problem}") from problem
    return all_variants, _shared_weights(all_variants)


def _shared_weights(variants: Sequence[DeviceVariant]) -> dict[str, BufferSpec]:
    """Weights by name. That all variants bind the same, and in the same layout, is what makes one export of them."""
    shared = weights_of(variants[0].plans)
    for variant in variants:
        weights = [plan.of_role("weight") for plan in variant.plans]
        bound = set[str]().union(*weights)
        others = {name for each in weights for name, spec in each.items() if shared.get(name) != spec}
        if others or bound != set(shared):
            names = ", ".join(sorted(others | (bound ^ set(shared)))[:3])
            both = f"the variants {variants[0].caps.name} and {variant.caps.name}"
            raise ModelError(f"{both} of this model want different weights: {names}")
    return shared


def _variant(kind: Architecture, config: Config, caps: DeviceCaps, tower: Tower | None) -> DeviceVariant:
    lowering = Lowering(caps, "fast", views=False)  # what a browser binds are whole buffers
    most = max_tokens(config, caps)
    bodies, heads = {}, {}
    for step in _steps(config, caps, most):
        graph, rejected = fuse(kind.build(config, step), None, lowering.unsupported_reason)
        bodies[step] = body_plan(lowering, graph, rejected, step, config)
    for rows in (1, most):
        graph, rejected = fuse(kind.head(config, 1, rows), None, lowering.unsupported_reason)
        for name in KINDS:
            head = Head(1, rows, name, paged=rows > 1)
            heads[head] = head_plan(lowering, graph, rejected, head, config)
    return DeviceVariant(caps, bodies, heads, tower_plans(tower, lowering) if tower else None)


def _steps(config: Config, caps: DeviceCaps, most: int) -> Iterator[StepSpec]:
    """Rows × context classes. One row has no page table: the sequence of a page is alone in its pool."""
    cache = cache_format(caps)
    for rows in sorted({min(rows, most) for rows in ROWS}):
        for context in contexts(config):
            yield StepSpec(rows, context, cache, paged=rows > 1)
            # The kernels of runs read any number of keys in every class. Fewer rows than a run may be in its bucket.
            if caps.subgroups and rows > RUN_ROWS:
                break
    if config.images is not None:
        yield from _image_steps(config, caps, most, config.images)


def _image_steps(config: Config, caps: DeviceCaps, most: int, images: ImageRows) -> Iterator[StepSpec]:
    """With records of images: of prompts, and where positions follow some, of decoding."""
    cache, classes = cache_format(caps), contexts(config)
    if images.axes:
        yield from (StepSpec(1, context, cache, decode=True, images=True) for context in classes)
    for rows in sorted({min(rows, most) for rows in IMAGE_ROWS}):
        # Where rows see all of an image, in the class that serves any number of keys: there are few such steps.
        for context in classes[-1:] if images.sees_itself else classes:
            yield StepSpec(rows, context, cache, paged=True, images=True)
            if caps.subgroups and rows > RUN_ROWS:
                break


def contexts(config: Config) -> list[str]:
    """The context classes that sequences of a model reach."""
    last = next(i for i, name in enumerate(CONTEXTS) if last_key(name, config.head_width) >= config.context)
    return list(CONTEXTS[: last + 1])
