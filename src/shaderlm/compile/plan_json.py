"""Plans as JSON, out and in. What is written is enough to run a plan: see `docs/plans.md`."""

from __future__ import annotations

import json
from typing import Any

from ..errors import InputError
from ..gpu import Slot, Step
from ..graph.fuse import RejectedFusion
from ..graph.graph import TensorSlice
from .plan import BufferSpec, Launch, Needs, Plan, WeightSource

FORMAT = 1


def to_json(plan: Plan) -> str:
    """The plan as JSON text. Each shader is written once, as a list of lines."""
    shaders: dict[str, int] = {}
    listed: list[dict[str, Any]] = []
    steps = []
    for launch in plan.launches:
        step = launch.step
        if step.source not in shaders:
            shaders[step.source] = len(listed)
            size, lines = launch.workgroup_size, step.source.splitlines()
            listed.append({"label": step.label, "entry": "main", "workgroup_size": size, "wgsl": lines})
        steps.append(_step(launch, shaders[step.source]))
    document = {
        "format": FORMAT,
        "name": plan.name,
        "tokens": plan.tokens,
        "target": plan.target,
        "features": list(plan.needs.features),
        "limits": dict(plan.needs.limits),
        "buffers": {
            name: {"role": spec.role, "bytes": spec.nbytes, **contents(spec)} for name, spec in plan.buffers.items()
        },
        "outputs": list(plan.outputs),
        "steps": steps,
        "shaders": listed,
        "rejected": [[each.fusion, each.layer, each.reason] for each in plan.rejected],
    }
    return json.dumps(document, indent=1)


def _step(launch: Launch, shader: int) -> dict[str, Any]:
    bindings = []
    for slot in launch.step.slots:
        part = {"offset": slot.offset, "size": slot.size} if slot.offset or slot.size is not None else {}
        bindings.append({"buffer": slot.buffer, "access": slot.access, **part})
    about = {"layer": launch.layer, "op": launch.op, "route": launch.route, "config": launch.config}
    cost = {"dims": dict(launch.dims), "operands": [list(each) for each in launch.operands], "share": launch.share}
    run = {"shader": shader, "bindings": bindings, "grid": list(launch.step.grid)}
    return {**run, **about, "names": list(launch.buffers), **cost}


def from_json(text: str) -> Plan:
    """The plan that `to_json` wrote. An InputError where the text is something else."""
    try:
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            other = document.get("format") if isinstance(document, dict) else type(document).__name__
            raise InputError(f"expected a plan of format {FORMAT}, got {other!r}; write it again with this version")
        buffers = {name: _buffer(about) for name, about in document["buffers"].items()}
        launches = tuple(_launch(step, document["shaders"]) for step in document["steps"])
        unknown = {slot.buffer for launch in launches for slot in launch.step.slots} - set(buffers)
        if unknown:
            raise InputError(f"the plan binds buffers that it does not list: {', '.join(sorted(unknown))}")
        needs = Needs(tuple(document["features"]), document["limits"])
        rejected = tuple(RejectedFusion(*each) for each in document["rejected"])
        name, tokens, target = document["name"], document["tokens"], document["target"]
        return Plan(name, tokens, target, needs, buffers, launches, tuple(document["outputs"]), rejected)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as problem:
        if isinstance(problem, InputError):
            raise
        raise InputError(f"this is not the JSON of a plan: {type(problem).__name__} {problem}") from problem


def contents(spec: BufferSpec) -> dict[str, Any]:
    """What a buffer holds, as JSON has it."""
    weight = spec.weight
    if weight is None:
        words = {"words": spec.words} if spec.words else {}
        return {**spec.table, **({"format": spec.format} if spec.format else {}), **words}
    about: dict[str, Any] = {"tensors": list(map(_fields, weight.tensors)), "interleaved": weight.interleaved}
    if weight.rows is None:
        return {**about, "part": weight.part}
    about |= {"format": weight.format, "columns": weight.columns, "rows": list(weight.rows), "part": weight.part}
    return {**about, "layout": dict(weight.layout)}


def _fields(part: TensorSlice) -> list[Any]:
    """Name and rows; the first of them where it is not 0; head width and rotary where rows are in another order; group
    and stride where they do not follow each other.
    """
    fields = list(part)
    while len(fields) > 2 and not fields[-1]:
        fields.pop()
    return fields


def _buffer(about: dict[str, Any]) -> BufferSpec:
    role, nbytes = about["role"], about["bytes"]
    if role == "weight":
        rows = tuple(about["rows"]) if "rows" in about else None
        if rows is not None and len(rows) != 2:
            raise InputError(f"rows are the first and the end, got {about['rows']}")
        weight = WeightSource(
            tuple(TensorSlice(*fields) for fields in about["tensors"]),
            about["interleaved"],
            about.get("format", ""),
            about.get("columns", 1),
            rows,
            about["part"],
            about.get("layout", {}),
        )
        return BufferSpec(role, nbytes, weight)
    table = {key: value for key, value in about.items() if key not in ("role", "bytes")} if role == "table" else {}
    return BufferSpec(role, nbytes, None, tuple(about.get("words", ())), table, about.get("format", ""))


def _launch(step: dict[str, Any], shaders: list[dict[str, Any]]) -> Launch:
    shader = shaders[step["shader"]]
    slots = tuple(
        Slot(each["buffer"], each["access"], each.get("offset", 0), each.get("size")) for each in step["bindings"]
    )
    source = "\n".join(shader["wgsl"]) + "\n"
    grid = tuple(step["grid"])
    if len(grid) != 3:
        raise InputError(f"a grid has three sides, got {step['grid']}")
    run = Step(shader["label"], source, slots, grid)
    about = (step["layer"], step["op"], step["route"], run, tuple(step["names"]), step["dims"])
    operands = tuple((name, nbytes) for name, nbytes in step["operands"])
    return Launch(*about, operands, step["share"], step["config"], shader["workgroup_size"])
