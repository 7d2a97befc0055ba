"""The products of bytes that the tests' software adapter computes are those of the built-in function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shaderlm.gpu import Device, Program, Slot, Step

from .byte_products import BUILT_IN, written_out

_SOURCE = """
@group(0) @binding(0) var<storage, read> a: array<u32>;
@group(0) @binding(1) var<storage, read> b: array<u32>;
@group(0) @binding(2) var<storage, read_write> out: array<i32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) thread: vec3<u32>) {
    out[thread.x] = dot4I8Packed(a[thread.x], b[thread.x]);
}
"""


@pytest.mark.smoke
def test_the_sum_is_that_of_the_built_in_function(device: Device) -> None:
    rng = np.random.default_rng(7)
    bytes_ = [rng.integers(-128, 128, (1024, 4), np.int8) for _ in range(2)]
    bytes_[0][:16], bytes_[1][:8], bytes_[1][8:16] = -128, -128, 127
    expected = (bytes_[0].astype(np.int32) * bytes_[1]).sum(axis=1)
    slots = (Slot("a", "read-only-storage"), Slot("b", "read-only-storage"), Slot("out", "storage"))
    buffers: dict[str, Any] = {"a": bytes_[0], "b": bytes_[1], "out": 4 * len(expected)}
    native = device._native
    as_is = getattr(native, "create_pipeline_as_is", native.create_pipeline)
    for source in (_SOURCE, written_out(_SOURCE)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "create_pipeline", as_is)
            raw = device.run(Program(buffers, (Step("dot", source, slots, (16, 1, 1)),), ("out",)))
        assert raw["out"].view(np.int32).tolist() == expected.tolist()
    assert BUILT_IN not in written_out(_SOURCE)
