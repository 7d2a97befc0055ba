"""plan.json: what a runner in a browser needs to know, of all variants. `docs/web.md` describes it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..compile.plan import NONE, BufferSpec, Plan
from ..gpu.lanes import probe_sources
from ..graph.batch import IMAGE_WORDS, PAGE, RUN_ROWS, last_key
from ..graph.reference import rope_frequencies
from ..graph.sampling import BIAS
from ..models.config import Config
from ..runtime.pages import pages_for, table_stride
from ..runtime.runner import FIRST_PAGES
from ..runtime.sizes import weights_of
from .plans import DeviceVariant
from .variants import FEATURES, LANGUAGE, LIMITS

FORMAT = 2
MAX_BIASES = 1024  # tokens with a bias of their own
_ACCESS = {"read-only-storage": "r", "storage": "w", "uniform": "u"}


class Shaders:
    """Shaders of all variants, by the beginning of their hash."""

    def __init__(self) -> None:
        self.listed: dict[str, dict[str, Any]] = {}
        self._known: dict[str, str] = {}

    def add(self, source: str, access: tuple[str, ...]) -> str:
        """The name of a shader, which is listed from now on."""
        if source not in self._known:
            text = without_comments(source)
            name = hashlib.sha256(text.encode()).hexdigest()[:16]
            self.listed[name] = {"wgsl": text, "bindings": [_ACCESS[each] for each in access]}
            self._known[source] = name
        return self._known[source]

    def used_by(self, entries: Iterable[dict[str, Any]], probes: Iterable[list[Any]]) -> dict[str, dict[str, Any]]:
        """Those of some variants and of probes: a variant may have been left out."""
        rows = [row for each in entries for part in programs(each) for row in part["dispatches"]]
        pixels = [row for each in entries for row in each.get("pixels", {}).values()]
        names = {row[0] for row in (*rows, *pixels, *probes)}
        return {name: about for name, about in self.listed.items() if name in names}


def without_comments(source: str) -> str:
    """WGSL without comments, indentation and empty lines: half the bytes. WGSL has no strings that could hold //."""
    lines = (line.partition("//")[0].strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def variant_entry(variant: DeviceVariant, config: Config, shaders: Shaders) -> dict[str, Any]:
    """One entry of "variants"."""
    buffers = _Buffers(variant, config)
    bodies: list[dict[str, Any]] = [
        {
            "rows": step.tokens,
            "keys": min(config.context, last_key(step.context, config.head_width)),
            **({"images": True} if step.images else {}),
            "dispatches": _dispatches(plan, buffers, shaders),
        }
        for step, plan in variant.bodies.items()
    ]
    heads: list[dict[str, Any]] = [
        {"rows": head.tokens, "kind": head.kind, "dispatches": _dispatches(plan, buffers, shaders)}
        for head, plan in variant.heads.items()
    ]
    vision = _vision(variant, buffers, shaders)
    used = {row[0] for each in (*bodies, *heads, *vision.get("towers", ())) for row in each["dispatches"]}
    entry: dict[str, Any] = {
        "name": variant.caps.name,
        "software": variant.caps.software,
        "features": sorted(FEATURES[name] for name in variant.features),
        "language": language_features(shaders.listed[name]["wgsl"] for name in used),
        "limits": _limits(variant, buffers),
    }
    if "subgroup_matrix" in variant.features:
        entry["matrix"] = [asdict(shape) for shape in variant.caps.matrix_shapes]
    if "subgroups" in variant.features and variant.caps.same_subgroup_size:
        entry["subgroup_size"] = variant.caps.same_subgroup_size  # plans rely on it, with or without matrices
    return entry | {
        "run_rows": RUN_ROWS if variant.caps.subgroups else None,
        "states": buffers.states,
        "first_pages": FIRST_PAGES,
        "table_first": table_first(config),
        "buffers": buffers.listed,
        "bodies": bodies,
        "heads": heads,
        **vision,
    }


def programs(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Everything of a variant that has dispatches."""
    return [*entry["bodies"], *entry["heads"], *entry.get("towers", ())]


def _vision(variant: DeviceVariant, buffers: _Buffers, shaders: Shaders) -> dict[str, Any]:
    """Plans of a tower, and the shaders from pixels to patches, with their threads."""
    if variant.vision is None:
        return {}
    towers = []
    for count, plan in variant.vision.tower.items():
        own = _TowerBuffers(buffers)
        dispatches = _dispatches(plan, own, shaders)
        towers.append({"patches": count, "buffers": own.listed, "dispatches": dispatches})
    pixels = {
        f"{launch.op}_bytes" if launch.dims["bytes"] else launch.op: [
            shaders.add(launch.step.source, tuple(slot.access for slot in launch.step.slots)),
            launch.workgroup_size,
        ]
        for launch in variant.vision.pixels.launches
        if launch.op in ("resize", "patches")
    }
    return {"pixels": pixels, "towers": towers}


def table_first(config: Config) -> int:
    """Where the pages of the sequence begin in the page table: after what is said of its states."""
    return table_stride(0, config.recurrent)


def language_features(sources: Iterable[str]) -> list[str]:
    """What shaders need of `navigator.gpu.wgslLanguageFeatures`."""
    words = set[str]().union(*(re.findall(r"\w+", source) for source in sources))
    return sorted({feature for function, feature in LANGUAGE.items() if function in words})


def distinct(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without variants that are the same as the next one for other devices: they would never be of use."""
    return [
        entry
        for i, entry in enumerate(entries)
        if not any({**entry, "name": other["name"]} == other for other in entries[i + 1 :])
    ]


def probes(shaders: Shaders) -> list[list[Any]]:
    """Shaders that show how the lanes of subgroups are numbered, with their threads: what `gpu.lanes` runs."""
    return [[shaders.add(source, ("storage",)), threads] for threads, source in probe_sources("dawn").items()]


def _limits(variant: DeviceVariant, buffers: _Buffers) -> dict[str, int]:
    values = {name: variant.limit(name) for name in LIMITS if name != "max_binding"}
    values["max_binding"] = buffers.largest
    return {name: values[cap] for cap, names in LIMITS.items() for name in names}


def _dispatches(plan: Plan, buffers: _Buffers | _TowerBuffers, shaders: Shaders) -> list[list[Any]]:
    dispatches = []
    for launch in plan.launches:
        slots = launch.step.slots
        assert all(not slot.offset and slot.size is None for slot in slots), "bindings are whole buffers"
        name = shaders.add(launch.step.source, tuple(slot.access for slot in slots))
        bound = [buffers.number(slot.buffer, plan.buffers[slot.buffer]) for slot in slots]
        dispatches.append([name, *launch.step.grid, *bound])
    return dispatches


class _Buffers:
    """The buffers of a variant: plans share those of one name, and parameters with the same words."""

    def __init__(self, variant: DeviceVariant, config: Config) -> None:
        rows = max(head.tokens for head in variant.heads)
        body = next(iter(variant.bodies.values()))
        self.states = {name: spec.nbytes for name, spec in body.of_role("state").items()}
        sizes = {
            NONE: 16,
            "batch": 16 * (1 + rows),
            "tokens": 16,
            "page_table": 4 * (table_first(config) + max(FIRST_PAGES, pages_for(config.context))),
            "biases": BIAS.itemsize * MAX_BIASES,
            **_image_sizes(config, rows),
        }
        roles: dict[str, tuple[str, int]] = {}
        if variant.vision is not None:
            roles |= {name: ("weight", spec.nbytes) for name, spec in weights_of(variant.vision.tower.values()).items()}
        for plan in variant.steps:
            for name, spec in plan.buffers.items():
                if spec.role == "params":
                    continue
                role, nbytes = self._role(name, spec), max(spec.nbytes, sizes.get(name, 0))
                known_role, known_bytes = roles.get(name, (role, 0))
                roles[name] = ("output" if known_role == "output" else role, max(nbytes, known_bytes))
        order = ("weight", "table", "state", "recurrent", "input", "output", "scratch")
        items = sorted(roles.items(), key=lambda item: (order.index(item[1][0]), item[0]))
        self.listed: list[list[Any]] = [[name, role, nbytes] for name, (role, nbytes) in items]
        self._numbers: dict[Any, int] = {name: i for i, (name, _) in enumerate(items)}
        per_position = [nbytes for _, role, nbytes in self.listed if role in ("state", "table")]
        most = max(nbytes for _, _, nbytes in self.listed)
        self.largest = max(most, max(per_position) * max(FIRST_PAGES * PAGE, config.context))
        self.largest = max([self.largest, *(plan.needs.limits["max_binding"] for plan in variant.plans)])

    def _role(self, name: str, spec: BufferSpec) -> str:
        """What a head keeps from step to step has one size: a runner makes it and fills it like an input."""
        if name == "features":
            return "input"
        return "input" if spec.role == "state" and name not in self.states else spec.role

    def number(self, name: str, spec: BufferSpec) -> int:
        """The number of a buffer in the list."""
        if spec.role != "params":
            return self._numbers[name]
        words = spec.words
        if words not in self._numbers:
            self._numbers[words] = len(self.listed)
            self.listed.append([f"params.{len(self.listed)}", "params", list(words)])
        return self._numbers[words]


class _TowerBuffers:
    """Those of a tower's plan: its weights are the variant's, and its own have the numbers after all of these."""

    def __init__(self, buffers: _Buffers) -> None:
        self._shared, self._first = buffers, len(buffers.listed)
        self.listed: list[list[Any]] = []
        self._numbers: dict[Any, int] = {}

    def number(self, name: str, spec: BufferSpec) -> int:
        """The number of a buffer."""
        if spec.role == "weight":
            return self._shared.number(name, spec)
        key: Any = spec.words if spec.role == "params" else name
        if key not in self._numbers:
            self._numbers[key] = self._first + len(self.listed)
            content: Any = list(spec.words) if spec.role == "params" else spec.nbytes
            self.listed.append([name, spec.role, content])
        return self._numbers[key]


def _image_sizes(config: Config, rows: int) -> dict[str, int]:
    """Bytes of what steps read of images."""
    if config.images is None:
        return {}
    return {"image_rows": 4 * IMAGE_WORDS * rows, "features": 4 * rows * config.images.levels * config.hidden}


def tables(variants: Iterable[DeviceVariant], config: Config, factors: Mapping[str, Any]) -> dict[str, Any]:
    """The formulas of rope tables: row p has magnitude · (cos(p · f), sin(p · f)) for every frequency f.

    Only of those that plans bind: a model may have numbers of rope, and no layer that rotates positions.
    """
    bound = {name for variant in variants for plan in variant.plans for name in plan.of_role("table")}
    entries = {}
    for name, rope in config.ropes.items():
        if name not in bound:
            continue
        factor = rope.factors_for(config.context)
        frequencies = rope_frequencies(rope.rotary, rope.theta, factors[factor] if factor else None, rope.yarn)
        entries[name] = {
            "formula": "rope",
            "frequencies": (frequencies / rope.linear_scale).tolist(),
            "magnitude": rope.magnitude,
        }
    return entries
