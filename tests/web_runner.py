"""Runs an export as a page does, from plan.json and its files alone: one conversation, greedy or sampled.

Of the package it uses the device, and nothing of graphs, plans or models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.gpu import BoundProgram, Copy, Device, DeviceCaps, Program, Slot, Step
from shaderlm.gpu.caps import MatrixShape

LAST, NONE, RUN, RUN_ROWS = 0x8000_0000, 0xFFFF_FFFF, 0x8000_0000, 8
ACCESS: dict[str, Any] = {"r": "read-only-storage", "w": "storage", "u": "uniform"}


class WebRunner:
    """One variant of an export on a device."""

    def __init__(self, folder: Path, variant: str, device: Device) -> None:
        self.plan: dict[str, Any] = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        self.variant: dict[str, Any] = next(each for each in self.plan["variants"] if each["name"] == variant)
        self.device, self.position = device, 0
        self.stream = weight_stream(folder, self.plan)
        self.buffers: list[Any] = [self._made(*each) for each in self.variant["buffers"]]
        self.numbers = {name: i for i, (name, *_) in enumerate(self.variant["buffers"])}
        self.bound: dict[int, BoundProgram] = {}
        self.positions = 0
        self._grow(self.variant["first_pages"] * self.plan["page"])

    def _made(self, name: str, role: str, size: Any) -> Any:
        if role == "params":
            return self.device.buffer(np.array(size, np.uint32))
        if role == "weight":
            offset, nbytes = self.plan["weights"][name]
            return self.device.buffer(self.stream[offset : offset + nbytes])
        return None if role in ("state", "table") else self.device.buffer(size)

    def _grow(self, positions: int) -> None:
        """States for so many positions, which keep what they have; tables and pages for them."""
        for number, (name, role, nbytes) in enumerate(self.variant["buffers"]):
            old = self.buffers[number]
            if role == "state":
                self.buffers[number] = self.device.buffer(nbytes * positions)
                if old is not None:
                    self.device.copy(Copy(old, self.buffers[number], old.size))
            elif role == "table":
                self.buffers[number] = self.device.buffer(table(self.plan["tables"][name], positions))
            else:
                continue
            if old is not None:
                old.destroy()
        self.positions = positions
        self.bound.clear()
        if "page_table" in self.numbers:
            pages = positions // self.plan["page"]
            room = self.buffers[self.numbers["page_table"]].size // 4
            before = np.array([NONE, 0][: self.variant["table_first"]], np.uint32)
            numbers = np.arange(min(pages, room - len(before)), dtype=np.uint32)
            self.write("page_table", np.concatenate([before, numbers]))

    def write(self, name: str, data: NDArray[Any]) -> None:
        """Into a buffer, by its name. One that no plan of this variant binds is not there."""
        if name in self.numbers:
            self.device.write(self.buffers[self.numbers[name]], data)

    def _program(self, entry: dict[str, Any]) -> BoundProgram:
        if id(entry) not in self.bound:
            steps, shared = [], {}
            for shader, x, y, z, *bound in entry["dispatches"]:
                about = self.plan["shaders"][shader]
                slots = []
                for number, letter in zip(bound, about["bindings"], strict=True):
                    slots.append(Slot(str(number), ACCESS[letter]))
                    shared[str(number)] = self.buffers[number]
                text = about["wgsl"]
                if self.device.caps.implementation == "wgpu":  # which knows no such line
                    text = text.replace("enable subgroups;", "")
                steps.append(Step(shader, text, tuple(slots), (x, y, z)))
            program = Program(dict.fromkeys(shared, 0), tuple(steps), ())
            self.bound[id(entry)] = self.device.bind(program, shared)
        return self.bound[id(entry)]

    def _body(self, rows: int, keys: int) -> dict[str, Any] | None:
        """The smallest body that takes so many rows and sees so many keys."""
        run_rows = self.variant["run_rows"]
        anything = run_rows is not None and rows >= run_rows
        fitting = [
            each for each in self.variant["bodies"] if each["rows"] >= rows and (anything or each["keys"] >= keys)
        ]
        return min(fitting, key=lambda each: (each["rows"], each["keys"]), default=None)

    def _head(self, rows: int, kind: str) -> dict[str, Any]:
        one = rows == 1
        return next(each for each in self.variant["heads"] if (each["rows"] == 1) == one and each["kind"] == kind)

    def prefill(self, ids: Sequence[int], kind: str = "greedy", record: NDArray[Any] | None = None) -> int:
        """Run a prompt in chunks; the token that follows it."""
        left = list(ids)
        largest = max(each["rows"] for each in self.variant["bodies"])
        while left:
            chunk = left[:largest]
            body = self._body(len(chunk), self.position + len(chunk))
            if body is None:
                chunk = left[:1]
                body = self._body(1, self.position + 1)
            assert body is not None, "the context is full"
            left = left[len(chunk) :]
            self._chunk(chunk, body, kind if not left else None, record)
        return int(self.device.read(self.buffers[self.numbers["tokens"]], 4).view(np.uint32)[0])

    def _chunk(self, ids: list[int], body: dict[str, Any], kind: str | None, record: NDArray[Any] | None) -> None:
        rows, first = len(ids), self.position
        self._reserve(first + rows + 1)
        batch = np.zeros((1 + body["rows"], 4), np.uint32)
        batch[0] = (rows, int(kind is not None), 0, 0)
        batch[1:, 2] = NONE
        batch[1 : 1 + rows, 0] = ids
        batch[1 : 1 + rows, 1] = batch[1 : 1 + rows, 2] = np.arange(first, first + rows)
        batch[1 : 1 + rows, 3] = self.variant["table_first"] | (RUN if rows >= RUN_ROWS else 0)
        self.write("batch", batch)
        programs = [self._program(body)]
        if kind is not None:
            self._outputs(rows - 1, record)
            programs.append(self._program(self._head(body["rows"], kind)))
        self.device.submit(programs)
        self.position += rows

    def _outputs(self, row: int, record: NDArray[Any] | None) -> None:
        words = np.zeros(8, np.uint32) if record is None else record.view(np.uint32).copy()
        words[0] = row
        self.write("outputs", words)

    def _reserve(self, positions: int) -> None:
        if positions > self.positions:
            self._grow(2 * self.positions)

    def decode(self, count: int, kind: str = "greedy", record: NDArray[Any] | None = None) -> list[int]:
        """So many tokens after the one that was sampled last. The host writes records once."""
        self._reserve(self.position + count + 1)
        batch = np.array([[1, 1, 0, 0], [LAST, self.position, self.position, self.variant["table_first"]]], np.uint32)
        self.write("batch", batch)
        self._outputs(0, record)
        found = []
        for _ in range(count):
            body = self._body(1, self.position + 1)
            assert body is not None, "the context is full"
            programs = [self._program(body), self._program(self._head(1, kind))]
            pending = self.device.submit(programs, (self.buffers[self.numbers["tokens"]], 4))
            assert pending is not None
            found.append(int(pending.wait().view(np.uint32)[0]))
            self.position += 1
        return found

    def generate(self, ids: Sequence[int], count: int) -> list[int]:
        """Greedy ids after a prompt."""
        return [self.prefill(ids), *(self.decode(count - 1) if count > 1 else [])]

    def close(self) -> None:
        """Give the buffers back."""
        for buffer in self.buffers:
            buffer.destroy()


FEATURES = {"shader-f16": "f16", "subgroups": "subgroups", "chromium-experimental-subgroup-matrix": "subgroup_matrix"}
LIMITS = {
    "maxStorageBufferBindingSize": "max_binding",
    "maxBufferSize": "max_buffer",
    "maxComputeInvocationsPerWorkgroup": "max_invocations",
    "maxStorageBuffersPerShaderStage": "max_storage_buffers",
    "maxComputeWorkgroupStorageSize": "max_workgroup_memory",
    "maxComputeWorkgroupsPerDimension": "max_workgroups",
}


def chosen(plan: dict[str, Any], caps: DeviceCaps) -> str:
    """The name of the variant that a page takes on a device."""

    def runs(variant: dict[str, Any]) -> bool:
        if not all(getattr(caps, FEATURES[name]) for name in variant["features"]):
            return False
        if not all(getattr(caps, cap) >= variant["limits"][name] for name, cap in LIMITS.items()):
            return False
        lanes = variant.get("subgroup_size")
        if lanes is not None and (caps.subgroup_min, caps.subgroup_max) != (lanes, lanes):
            return False
        return {MatrixShape(**each) for each in variant.get("matrix", ())} <= set(caps.matrix_shapes)

    fitting = [each for each in plan["variants"] if runs(each) and (caps.software or not each["software"])]
    name: str = max(fitting, key=lambda each: each["software"])["name"]
    return name


def weight_stream(folder: Path, plan: dict[str, Any]) -> NDArray[np.uint8]:
    """The bytes of all weight files."""
    names = [each["name"] for each in plan["files"] if each["name"].startswith("weights-")]
    return np.concatenate([np.fromfile(folder / name, np.uint8) for name in names])


def table(about: dict[str, Any], positions: int) -> NDArray[np.float32]:
    """(cos, sin) of every position and frequency."""
    assert about["formula"] == "rope", about
    angles = np.arange(positions, dtype=np.float64)[:, None] * np.array(about["frequencies"])
    return np.asarray(about["magnitude"] * np.stack([np.cos(angles), np.sin(angles)], axis=-1), np.float32)
