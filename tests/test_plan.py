"""Plans: the list of dispatches as text, and that buffers are shared without anyone noticing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shaderlm.compile.plan import NONE, Plan
from shaderlm.compile.plan_text import describe
from shaderlm.errors import ModelError
from shaderlm.gpu import WEBGPU_DEFAULT, DeviceCaps
from shaderlm.graph.fuse import fuse
from shaderlm.models.architecture import Step
from shaderlm.runtime.gpu_model import plan_of
from shaderlm.runtime.weights import buffer_sizes

from .architectures import LLAMA_1B, LLAMA_8B, QWEN3, SMOLLM2, TINY, model

SNAPSHOTS = Path(__file__).parent / "data" / "plans"
LARGE_GPU = replace(
    WEBGPU_DEFAULT,
    name="a large GPU",
    kind="discrete",
    backend="Vulkan",
    f16=True,
    subgroups=True,
    timestamps=True,
    max_binding=(2 << 30) - 4,
    max_buffer=4 << 30,
    max_invocations=1024,
    max_workgroup_memory=48 << 10,
    max_storage_buffers=16,
)
SOFTWARE = replace(WEBGPU_DEFAULT, name="software", kind="software", subgroups=True)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], DeviceCaps]] = {
    "smollm2-135m on a large GPU": (SMOLLM2, {"kind": "q4_1", "formats": {"token_embd": "q8_0"}}, LARGE_GPU),
    "llama-3.2-1b on WebGPU's default limits": (LLAMA_1B, {"kind": "q4_0"}, WEBGPU_DEFAULT),
    "llama-3.1-8b q4_k_m on a large GPU": (
        LLAMA_8B,
        {"kind": "q4_k", "formats": {"attn_v": "q6_k", "ffn_down": "q6_k", "token_embd": "q6_k"}},
        LARGE_GPU,
    ),
    "qwen3-0.6b on a large GPU": (
        QWEN3,
        {"name": "qwen3", "kind": "q4_0", "formats": {"token_embd": "q8_0"}},
        LARGE_GPU,
    ),
    "smollm2-135m in software": (SMOLLM2, {"kind": "q4_1", "formats": {"token_embd": "q8_0"}}, SOFTWARE),
}


def plans(shape: tuple[int, ...], options: dict[str, Any], caps: DeviceCaps) -> list[Plan]:
    made, config = model(shape, **options)
    return [plan_of(made, config, caps, rows, 256) for rows in (128, 1)]


@pytest.mark.parametrize("name", CASES)
def test_plans_are_as_recorded(name: str) -> None:
    """A refactor must not change them; a change that is meant is recorded with `python -m tests.record_plans`."""
    text = "\n\n".join(map(describe, plans(*CASES[name]))) + "\n"
    assert text == (SNAPSHOTS / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fused", [True, False])
def test_buffers_are_shared_without_anyone_noticing(name: str, fused: bool) -> None:
    """Replays a plan on names alone: what a dispatch reads is what was last meant to be there."""
    shape, options, caps = CASES[name]
    made, config = model(shape, **options)
    plan = plan_of(made, config, caps, 5, 64, None if fused else ())
    holds: dict[str, str] = {}
    for launch in plan.launches:
        written = [slot.buffer for slot in launch.step.slots if slot.access == "storage"]
        read = [slot.buffer for slot in launch.step.slots if slot.access == "read-only-storage"]
        assert not set(written) & set(read), f"{launch.op} of {launch.layer} writes what it reads"
        assert len(written) == len(set(written)), f"{launch.op} of {launch.layer} binds a buffer twice for writing"
        slots = [s for s in launch.step.slots if s.access != "uniform" and s.buffer != NONE]
        slots = [s for s in slots if not s.buffer.split("/")[-1].startswith("scales")]
        for slot, tensor in zip(slots, launch.buffers, strict=True):
            if not slot.buffer.startswith("arena"):
                continue
            if slot.access == "read-only-storage":
                assert holds[slot.buffer] == tensor, f"{launch.op} of {launch.layer} finds {holds[slot.buffer]}"
            else:
                holds[slot.buffer] = tensor


def test_the_arena_is_much_smaller_than_its_tensors() -> None:
    plan = plans(*CASES["llama-3.2-1b on WebGPU's default limits"])[0]
    assert sum(plan.arena.values()) < 40e6  # 16 layers of 128 rows would be 400 MB
    assert max(plan.arena.values()) <= WEBGPU_DEFAULT.max_operand


@pytest.mark.parametrize("name", CASES)
def test_weights_are_where_plans_look_for_them(name: str) -> None:
    shape, options, caps = CASES[name]
    made, config = model(shape, **options)
    for fusions in (None, ()):
        for rows in (128, 1):
            plan = plan_of(made, config, caps, rows, 256, fusions)
            graph = fuse(made.build(config, Step(1, 1)), fusions)[0]
            known = set(buffer_sizes(graph, caps)) | set(plan.params) | set(plan.arena)
            known |= {"ids", "positions", "rope_table", "logits", NONE}
            states = {n for n in plan.program.buffers if n.endswith(("k_cache", "v_cache"))}
            assert set(plan.program.buffers) <= known | states


def test_widths_that_kernels_cannot_read_are_refused() -> None:
    made, config = model((1, 48, 2, 1, 24, 96, 40), "f32")
    with pytest.raises(ModelError, match="48 columns; on a GPU they must be a multiple of 32"):
        plan_of(made, config, LARGE_GPU, 1, 8)
    made, config = model((1, 64, 2, 1, 22, 96, 40), "f32")
    with pytest.raises(ModelError, match=r"multiple of 32|multiple of 4"):
        plan_of(made, config, LARGE_GPU, 1, 8)


def test_a_device_that_is_too_small_is_refused_before_anything_is_allocated() -> None:
    made, config = model(TINY)
    small = replace(WEBGPU_DEFAULT, max_storage_buffers=4)
    with pytest.raises(ModelError, match="this device cannot run"):
        plan_of(made, config, small, 1, 8)
