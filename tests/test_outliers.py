"""One input far larger than the others, with a weight of 0: what is lost is bounded, and the f32 forms lose nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shaderlm.compile import lower
from shaderlm.formats import blocks
from shaderlm.gpu import Device
from shaderlm.graph import reference, resolve
from shaderlm.kernels import routes_of

from .compare import assert_close
from .weights import unpack_q4gsw

K, N, OUTLIER = 256, 4099, 3e4


def test_outliers(device: Device) -> None:
    rng = np.random.default_rng(1)
    weight, scales = blocks.pack_q4gsw(rng.standard_normal((N, K)) / 16, 32)
    weight[:, 20] = (weight[:, 20] & 0xF0) | 8  # q = 0 at k = 40
    x = rng.standard_normal((1, K)).astype(np.float32)
    x[0, 40] = OUTLIER
    dense = unpack_q4gsw(weight, scales, 32, K)
    expected = reference.linear(x, dense)
    dims = resolve("linear_q4gsw", {"tokens": 1, "K": K, "N": N, "group_size": 32})
    # Without dot4 there are no integer products; with it the GEMV is fixed point.
    for plan, dot4 in {"f32": False, "fixed": True}.items():
        caps = replace(device.caps, kind="discrete", dot4=dot4)
        for route in routes_of("linear_q4gsw"):
            if route.reason(dims, caps) is None and route.exact:
                raw = device.run(lower(route, dims, caps, {"x": x, "weight": weight, "scales": scales}))
                actual = raw["out"].view(np.float32).reshape(1, N)
                label = f"{route.name} ({plan})"
                if plan == "fixed" and route.name == "gemv_packed":
                    block = np.abs(dense[:, 32:64]).sum(axis=1)  # the weights of the outlier's block
                    bound = OUTLIER / 16_646_144 * block + 1e-5
                    assert (np.abs(actual - expected)[0] <= bound).all(), label
                else:
                    assert_close(actual, expected, "linear", label)
