"""Products of bytes that a software driver compiles quickly.

`dot4I8Packed` takes SwiftShader four times as long as the same sum written out: 18 s instead of 4 s for a tile of
16-bit inputs. So the tests' software adapter is given the sum. `tests/test_byte_products.py` compares the two, front
ends read what is shipped (`tests/test_shaders.py`), and Chromium and GPUs run it.
"""

from __future__ import annotations

from typing import Any

from shaderlm.gpu import Device

BUILT_IN, WRITTEN_OUT = "dot4I8Packed(", "sum_of_byte_products("
_FUNCTION = """
fn sum_of_byte_products(a: u32, b: u32) -> i32 {
    let x = bitcast<i32>(a);
    let y = bitcast<i32>(b);
    return ((x << 24u) >> 24u) * ((y << 24u) >> 24u) + ((x << 16u) >> 24u) * ((y << 16u) >> 24u)
        + ((x << 8u) >> 24u) * ((y << 8u) >> 24u) + (x >> 24u) * (y >> 24u);
}
"""


def written_out(source: str) -> str:
    """The same shader without the built-in function."""
    return source.replace(BUILT_IN, WRITTEN_OUT) + _FUNCTION if BUILT_IN in source else source


def compiled_quickly(device: Device) -> Device:
    """The device, which from now on compiles its shaders so, if a CPU computes."""
    native: Any = device._native
    if device.caps.software and not hasattr(native, "create_pipeline_as_is"):
        native.create_pipeline_as_is = native.create_pipeline
        native.create_pipeline = lambda label, source, accesses: native.create_pipeline_as_is(
            label, written_out(source), accesses
        )
    return device
