"""Products of several rows with inputs of 16 bits: every configuration, odd numbers, rows that pad, which shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shaderlm.compile import lower
from shaderlm.gpu import Device
from shaderlm.graph import reference, resolve
from shaderlm.graph.batch import contiguous_batch
from shaderlm.kernels import LaunchList, choose, options, routes_of
from shaderlm.kernels.linear import rows_int16
from shaderlm.kernels.linear.rows_int16 import GemvConfig, TileConfig

from .cases import INT16
from .compare import assert_close
from .weights import make_weight, whole_k

CONFIGS = [
    GemvConfig(32, 4, 1, 2),
    GemvConfig(64, 4, 2, 4),
    GemvConfig(32, 4, 4, 4),
    TileConfig(4, 2, 4, 16),  # many slices
    TileConfig(4, 4, 8, 2, 2),  # several blocks of each slice
]
# Software adapters take 20 to 45 s to compile one.
LONG_CONFIGS = [TileConfig(4, 2, 4, 4), TileConfig(4, 4, 8, 4), TileConfig(8, 2, 8, 1)]


def launch_list(config: GemvConfig | TileConfig, dims: dict[str, Any], device: Device) -> LaunchList:
    if isinstance(config, GemvConfig):
        return rows_int16.gemv_with(config, dims, device.caps)
    return rows_int16.tile_with(config, dims, device.caps)


def product(device: Device, config: GemvConfig | TileConfig, dims: dict[str, Any], operands: dict[str, Any]) -> Any:
    route = next(found for found in routes_of("linear") if found.name == "tile_int16")
    program = lower(route, dims, device.caps, operands, launch_list=launch_list(config, dims, device))
    return device.run(program)["out"].view(np.float32)[: dims["tokens"] * dims["N"]].reshape(dims["tokens"], dims["N"])


@pytest.mark.parametrize(
    "config", [*CONFIGS, *(pytest.param(config, marks=pytest.mark.long) for config in LONG_CONFIGS)], ids=str
)
def test_every_config(config: GemvConfig | TileConfig, gpu: Device) -> None:
    """Several steps, of which the last is not full; several tiles, of which the last are not full in n and in rows."""
    rng = np.random.default_rng(3)
    if isinstance(config, GemvConfig):
        tokens, K, N = (
            config.x_rows - 1,
            32 * (2 * config.lanes_per_row + 1),
            2 * config.threads // config.lanes_per_row * config.rows + 1,
        )
    else:
        (rows, columns), step = config.tile, config.slices * config.blocks
        tokens, K, N = 2 * rows - 1, 32 * (2 * step + 1), 2 * columns + 3
    dims = resolve("linear", {"tokens": tokens, "K": K, "N": N, "format": "q4_0"})
    weight, dense = make_weight(rng, "q4_0", N, K)
    x = rng.standard_normal((tokens, K)).astype(np.float32)
    actual = product(gpu, config, dims, {"x": x, "weight": weight})
    assert_close(actual, reference.linear(x, dense), "linear", str(config))


@pytest.mark.parametrize("kind", INT16)
def test_odd_numbers(kind: str, gpu: Device) -> None:
    """Rows of zeros, near the smallest and the largest numbers, and with one that is none: each minds its own."""
    rng = np.random.default_rng(5)
    K, N, config = whole_k(128, kind), 9, GemvConfig(32, 4, 1, 4)
    dims = resolve("linear", {"tokens": 6, "K": K, "N": N, "format": kind})
    weight, dense = make_weight(rng, kind, N, K)
    ordinary = rng.standard_normal(K).astype(np.float32)
    x = np.stack([ordinary * factor for factor in np.array([0, 1e-38, 1, 1e30, 1, 1], np.float32)])
    x[4, 40], x[5, 3] = np.nan, -np.inf
    out = product(gpu, config, dims, {"x": x, "weight": weight})
    expected = reference.linear(ordinary[None], dense)[0]
    assert not out[0].any()
    assert np.abs(out[1]).max() < 1e-30
    assert_close(out[2], expected, "linear", "1")
    assert_close(out[3] / 1e30, expected, "linear", "1e30")
    assert np.isnan(out[4:]).all(), "an input that is no number is not hidden"


@pytest.mark.parametrize("config", [GemvConfig(32, 4, 2, 4), TileConfig(4, 2, 4, 4)], ids=str)
def test_rows_that_pad_are_not_computed(config: GemvConfig | TileConfig, gpu: Device) -> None:
    rng = np.random.default_rng(8)
    dims = resolve("linear", {"tokens": 13, "K": 96, "N": 40, "format": "q4_0", "batched": True})
    weight, dense = make_weight(rng, "q4_0", 40, 96)
    x = rng.standard_normal((13, 96)).astype(np.float32)
    x[5:] = np.nan
    batch = contiguous_batch(0, 13)
    batch[0, 0] = 5
    out = product(gpu, config, dims, {"x": x, "weight": weight, "batch": batch})
    assert_close(out[:5], reference.linear(x[:5], dense), "linear", str(config))
    assert not out[5:].any()


def test_which_shapes_take_them(gpu: Device) -> None:
    caps = replace(gpu.caps, matrix_shapes=())  # where there are matrix units, those take the larger ones

    def taken(tokens: int, precision: str, **more: Any) -> str:
        dims = resolve("linear", {"tokens": tokens, "K": 2048, "N": 2048, "format": "q4_0", **more})
        return choose("linear", dims, caps, None, precision).name

    few = ["gemv_int16", "gemv_int16", "gemv_int16", "gemv_int16", "tile_int16", "tile_int16"]
    assert [taken(tokens, "fast") for tokens in (1, 2, 8, 16, 17, 512)] == few
    assert [taken(tokens, "fast", N=16384) for tokens in (2, 4, 8, 9)] == [*["gemv_int16"] * 3, "tile_int16"]
    assert [taken(tokens, "fast", N=128256) for tokens in (2, 4)] == ["gemv_int16"] * 2
    # Shapes that were not measured are rounded before, or multiplied row by row.
    assert [taken(tokens, "fast", K=1152, N=13824) for tokens in (2, 4)] == ["gemv_int16", "gemv_rows_int16"]
    assert taken(8, "exact") == taken(512, "exact") == "tile_shared"
    assert taken(8, "fast", format="f16") == taken(512, "fast", format="q5_k") == "tile_shared"
    software = replace(gpu.caps, kind="software")
    dims = resolve("linear", {"tokens": 8, "K": 2048, "N": 2048, "format": "q4_0"})
    assert choose("linear", dims, software, None, "fast").name == "rows"


@pytest.mark.parametrize(
    ("tokens", "N", "memory", "expected"),
    [
        (3, 2048, 48 << 10, TileConfig(4, 2, 4, 4)),
        (8, 2048, 48 << 10, TileConfig(4, 2, 4, 16)),
        (8, 2048, 8 << 10, TileConfig(4, 2, 4, 4)),  # there is no room for many slices
        (8, 16384, 48 << 10, TileConfig(4, 2, 4, 4)),  # nor need of them
        (16, 2048, 48 << 10, TileConfig(4, 2, 4, 16)),
        (16, 16384, 48 << 10, TileConfig(4, 4, 8, 8)),
        (512, 2048, 48 << 10, TileConfig(8, 8, 16, 1, 2)),
    ],
)
def test_which_tiles_are_taken(tokens: int, N: int, memory: int, expected: TileConfig, gpu: Device) -> None:
    caps = replace(gpu.caps, max_workgroup_memory=memory, max_invocations=1024)
    dims = resolve("linear", {"tokens": tokens, "K": 2048, "N": N, "format": "q4_0"})
    assert rows_int16.tile_config(dims, caps) == expected


def test_the_tuner_has_candidates_for_each_bucket(gpu: Device) -> None:
    caps = replace(gpu.caps, max_workgroup_memory=48 << 10, max_invocations=1024, subgroup_size=32)
    for tokens in (2, 4, 8, 16, 32, 64, 128, 256, 512):
        dims = resolve("linear", {"tokens": tokens, "K": 2048, "N": 2048, "format": "q4_0"})
        found = [option.name for option in options("linear", dims, caps, "fast")]
        assert len([name for name in found if "_int16" in name]) >= 2, found
