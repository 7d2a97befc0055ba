"""Runs kernels with a watch on every index of their arrays: what is read or written past an end is told by name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from shaderlm.gpu import Device, Program, Slot
from shaderlm.gpu.adapters import choose as choose_adapter

DECLARED = re.compile(r"@binding\((\d+)\)\s*var<storage[^>]*>\s*(\w+)\s*:\s*array<(.+)>;")
SHARED = re.compile(r"var<workgroup>\s*(\w+)\s*:\s*array<(.+),\s*([^,;]+)>;")
_MAIN = re.compile(r"@compute @workgroup_size\(WG\)\s*fn main\(([^{]*)\)\s*\{")
_ARGUMENT = re.compile(r"@builtin\((\w+)\)\s*(\w+)\s*:\s*([\w<>]+)")


def _element(kind: str, aliases: dict[str, str]) -> int:
    kind = kind.strip()
    while kind in aliases:
        kind = aliases[kind].strip()
    return 4 if kind in ("f32", "u32", "atomic<u32>") else {"2": 8, "3": 16, "4": 16}[kind[3]]


def closing(text: str, at: int) -> int:
    """Where the bracket that opens at `at` is closed."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "[") - (text[i] == "]")
        if depth == 0:
            return i
    raise AssertionError("a bracket is not closed")


def _guarded(source: str, sizes: dict[str, int]) -> tuple[str, list[str]]:
    """The source with a watch on every index of its arrays, one bit each in a buffer more; and their names."""
    text = re.sub(r"//[^\n]*", "", source)
    aliases = dict(re.findall(r"^alias (\w+)\s*=\s*(.+?);", text, re.M))
    lengths = {name: f"{-(-sizes[name] // _element(kind, aliases))}u" for _, name, kind in DECLARED.findall(text)}
    lengths |= {name: f"u32({length})" for name, _, length in SHARED.findall(text)}
    for bit, (name, length) in enumerate(lengths.items()):
        at, pattern = 0, re.compile(rf"(?<![\w.]){name}\[")
        while found := pattern.search(text, at):
            end = closing(text, found.end() - 1)
            index = f"guarded({text[found.end() : end]}, {length}, {bit}u)"
            text, at = text[: found.end()] + index + text[end:], found.end()
    entry = _MAIN.search(text)
    assert entry
    arguments = _ARGUMENT.findall(entry.group(1))
    plain = ", ".join(f"{name}: {kind}" for _, name, kind in arguments)
    text = text[: entry.start()] + f"fn guarded_main({plain}) {{" + text[entry.end() :]
    built_in = ", ".join(f"@builtin({what}) {name}: {kind}" for what, name, kind in arguments)
    text += f"""
@group(0) @binding({text.count("@binding(")}) var<storage, read_write> outside: array<atomic<u32>>;
var<private> seen_outside: u32;
fn guarded(i: u32, length: u32, bit: u32) -> u32 {{
    seen_outside = seen_outside | select(0u, 1u << bit, i >= length);
    return min(i, length - 1u);
}}
@compute @workgroup_size(WG) fn main({built_in}) {{
    guarded_main({", ".join(name for _, name, _ in arguments)});
    if (seen_outside != 0u) {{
        atomicOr(&outside[0], seen_outside);
    }}
}}
"""
    return text, list(lengths)


def unchecked_device(adapter: str | None) -> Device:
    """The adapter as a GPU is used: parameters written into the source, and no checks that would hide a bad index."""
    device = Device(choose_adapter(adapter), without=("pass_timestamps",))
    device.caps = replace(device.caps, kind="discrete")
    return device


def run_guarded(device: Device, program: Program) -> tuple[dict[str, Any], list[str]]:
    """What a program computes, and which arrays it reads or writes past their end."""
    buffers, steps, names = dict(program.buffers), [], []
    for i, step in enumerate(program.steps):
        sizes = {}
        for number, name, _ in DECLARED.findall(step.source):
            contents = program.buffers[step.slots[int(number)].buffer]
            sizes[name] = contents if isinstance(contents, int) else contents.nbytes
        source, arrays = _guarded(step.source, sizes)
        buffers[f"outside.{i}"] = 16
        steps.append(replace(step, source=source, slots=(*step.slots, Slot(f"outside.{i}", "storage"))))
        names.append([f"{step.label}: {name}" for name in arrays])
    watched = tuple(f"outside.{i}" for i in range(len(steps)))
    found = device.run(Program(buffers, tuple(steps), (*program.outputs, *watched)))
    bits = [int(found.pop(name).view(np.uint32)[0]) for name in watched]
    pairs = zip(bits, names, strict=True)
    return found, [name for each, arrays in pairs for i, name in enumerate(arrays) if each >> i & 1]
