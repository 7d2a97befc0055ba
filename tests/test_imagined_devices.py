"""Products of real shapes planned for devices that nobody has here: every pair of their properties is among them."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from shaderlm.engine.planning import LARGE_GPU
from shaderlm.gpu import DeviceCaps, MatrixShape
from shaderlm.gpu.processor_table import processors_of
from shaderlm.graph import resolve
from shaderlm.graph.batch import CONTEXTS
from shaderlm.kernels import choose
from shaderlm.kernels.attention.measured import SPLIT_ROWS
from shaderlm.kernels.linear.int16 import config_for
from shaderlm.kernels.linear.matrix import tiles_for
from shaderlm.kernels.linear.measured import GEMV_INT16
from shaderlm.kernels.route import filling, over_limits, processors
from shaderlm.models.shapes import SYNTHETIC

from .sweeps import every_third_by_default


class Imagined(NamedTuple):
    processors: int
    subgroup: int
    memory: int  # KiB of a workgroup
    features: tuple[str, ...]

    @property
    def caps(self) -> DeviceCaps:
        units = (MatrixShape("f16", "f32", 16, 16, 16),) if "matrix" in self.features else ()
        return replace(
            LARGE_GPU,
            processors=self.processors,
            subgroup_min=self.subgroup,
            subgroup_max=self.subgroup,
            subgroup_size=self.subgroup,
            max_workgroup_memory=self.memory << 10,
            f16="f16" in self.features,
            dot4="dot4" in self.features,
            matrix_shapes=units,
            implementation="dawn" if units else "wgpu",
        )


FEATURES = ((), ("f16",), ("dot4",), ("f16", "dot4"), ("f16", "matrix"), ("f16", "dot4", "matrix"))


@cache
def devices() -> list[Imagined]:
    """Few, with every pair of two properties somewhere."""

    def pairs(each: Imagined) -> set[Hashable]:
        own = [(name, name in each.features) for name in ("f16", "dot4", "matrix")]
        named: list[Hashable] = [("processors", each[0]), ("subgroup", each[1]), ("memory", each[2]), *own]
        return set(itertools.combinations(named, 2))

    every = [Imagined(*each) for each in itertools.product((8, 20, 64, 132), (8, 16, 32, 64), (16, 32, 48), FEATURES)]
    missing, found = set().union(*map(pairs, every)), list[Imagined]()
    while missing:
        found.append(max(every, key=lambda each: len(pairs(each) & missing)))
        missing -= pairs(found[-1])
    return found


PRODUCTS = sorted({size for shape in SYNTHETIC.values() for size in shape.matrices.values()})
LEAST_COLUMNS = 576  # fewer are routers of experts, whose smallest tiles are few


def _most(dims: dict[str, Any]) -> int:
    """Workgroups of the smallest tiles of matrix units, with K in at most 8 parts."""
    return max(config.tiles(dims) * min(8, config.groups(dims)) for config in tiles_for(dims).configs)


@pytest.mark.parametrize("imagined", every_third_by_default(devices()), ids=str)
def test_products_fit_and_fill_a_device(imagined: Imagined) -> None:
    """Within limits; and no more than half of the processors are idle, if the smallest tiles allow."""
    caps = imagined.caps
    for (k, n), tokens in itertools.product(PRODUCTS, (1, 2, 4, 8, 16, 17, 128)):
        dims: dict[str, Any] = resolve("linear", {"tokens": tokens, "K": k, "N": n, "format": "q4_0"})
        route = choose("linear", dims, caps, None, "fast")
        launch_list = route.launch_list(dims, caps)
        assert over_limits(launch_list, caps) is None
        groups = max(dispatch.workgroups for dispatch in launch_list.dispatches)
        if n > LEAST_COLUMNS:
            most = {"matrix": _most(dims), "tile_shared": -(-tokens // 16) * -(-n // 16)}
            wanted = min(imagined.processors, most.get(route.name, imagined.processors))
            assert 2 * groups >= wanted, f"{route.name}: {tokens} rows of {k} × {n} in {groups} workgroups"


HEADS = sorted({(shape.Hq, shape.Hkv, shape.D) for shape in SYNTHETIC.values() if shape.Hq})


@pytest.mark.parametrize("imagined", every_third_by_default(devices()), ids=str)
def test_attention_fits_and_fills_a_device(imagined: Imagined) -> None:
    """Within limits; and no more than half of the processors are idle, if rows, kv heads and splits allow."""
    caps = imagined.caps
    for (heads, kv_heads, head), tokens, context in itertools.product(HEADS, (1, 2, 4, 16, 64), CONTEXTS):
        given = {"tokens": tokens, "Hq": heads, "Hkv": kv_heads, "D": head, "context": context, "cache": "f16"}
        for runs in {False, tokens > 1}:
            dims = resolve("attention", {**given, "paged": True, "runs": runs})
            route = choose("attention", dims, caps, None, "fast")
            launch_list = route.launch_list(dims, caps)
            assert over_limits(launch_list, caps) is None
            if not runs:
                groups = max(dispatch.workgroups for dispatch in launch_list.dispatches)
                # Many rows up to 2,048 keys are not split: a workgroup for each kv head of a row.
                splits = 1 if context == "single_pass" or tokens > SPLIT_ROWS else 32
                wanted = min(imagined.processors, tokens * kv_heads * splits)
                assert 2 * groups >= wanted, f"{route.name}: {tokens} rows of {heads} heads in {groups} workgroups"


def test_few_devices_have_every_pair() -> None:
    assert 12 <= len(devices()) <= 24


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("NVIDIA H200", 132),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 66),
        ("NVIDIA GeForce RTX 4070", 46),
        ("AMD Radeon RX 7900 XTX (RADV NAVI31)", 96),
        ("Intel(R) Arc(TM) A770 Graphics (DG2)", 32),
        ("Apple M2 Max", 38),
        ("Apple M2", 10),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 0),
        ("NVIDIA L40", 0),
        ("SwiftShader Device (LLVM 16.0.0)", 0),
    ],
)
def test_processors_by_name(name: str, count: int) -> None:
    assert processors_of(name) == count


def test_counts_of_workgroups_follow_the_processors() -> None:
    unknown = replace(LARGE_GPU, processors=0)
    assert (processors(unknown), filling(256, unknown)) == (132, 256)
    assert (processors(replace(unknown, processors=20)), filling(256, replace(unknown, processors=20))) == (20, 39)


def test_the_table_has_every_shape() -> None:
    sizes = [edge + more for edge in (1, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768, 1 << 20) for more in (0, 1)]
    for k, n, in_pairs in itertools.product(sizes, sizes, (False, True)):
        assert any(shape.has(k, n, in_pairs) for shape, _ in GEMV_INT16), (k, n, in_pairs)
    for i, (later, _) in enumerate(GEMV_INT16):
        kinds = (False, True) if later.in_pairs is None else (later.in_pairs,)
        corners = list(itertools.product(later.k, later.n, kinds))
        hidden = [all(earlier.has(*corner) for corner in corners) for earlier, _ in GEMV_INT16[:i]]
        assert not any(hidden), f"{later} is never reached"


def test_a_smaller_device_gets_the_rows_of_a_larger_one() -> None:
    """As many rows for each processor, the same workgroups."""
    small, large = (replace(LARGE_GPU, processors=count) for count in (33, 132))
    for k, n in ((2048, 2048), (4096, 14336), (8192, 4096)):
        dims = [resolve("linear", {"tokens": 1, "K": k, "N": rows, "format": "q4_0"}) for rows in (n, 4 * n)]
        assert config_for(dims[0], small) == config_for(dims[1], large)
        assert config_for(dims[0], small).per_group >= config_for(dims[0], large).per_group
