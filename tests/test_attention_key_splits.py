"""Attention that leaves splits of its keys, as large subgroups run it. Software adapters have small ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shaderlm.compile import lower
from shaderlm.gpu import Device
from shaderlm.kernels import LaunchList, routes_of

from .cases import CASES, Case, make
from .compare import assert_close
from .sweeps import by_default

OP = "rms_norm_rope_attention_linear"
SHORT = [case for case in CASES if case.op == OP and case.dims["D"] == 64]


@pytest.mark.parametrize("case", by_default(SHORT, SHORT[:1].__contains__), ids=lambda case: case.name)
def test_keys_of_a_subgroup_are_joined_first(case: Case, gpu: Device) -> None:
    """Two lanes have a key, so that four have two of them, as 32 lanes of a GPU do."""
    dims = case.dims
    (route,) = routes_of(OP)
    usual = route.launch_list(dims, gpu.caps)
    attention, *product = usual.dispatches
    threads = int(attention.constants["WG"]) * 2 // int(attention.constants["LANES_PER_KEY"])  # for as many keys
    changed = {"WG": threads, "LANES_PER_KEY": 2, "OWN": dims["D"] // 8 // 2, "JOINED": 2}
    joining = replace(attention, constants={**attention.constants, **changed})
    operands, expected = make(case)
    program = lower(route, dims, gpu.caps, operands, launch_list=LaunchList((joining, *product), usual.buffers))
    found, wanted = gpu.run(program)["out"].view(np.float32), expected["out"]
    assert wanted is not None
    assert_close(found[: wanted.size], wanted[0], "attention f16", str(case))
