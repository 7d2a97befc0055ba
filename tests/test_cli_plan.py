"""`shaderlm plan`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .command_line import shaderlm
from .tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q4_0")


def test_plans_of_a_prefill_and_of_a_decode_step(tiny: Path) -> None:
    done = shaderlm("plan", tiny)
    assert done.code == 0
    prefill, decode = done.out.split("\n\n")
    assert prefill.startswith("prefill: 128 rows, room for 128 positions")  # the context is no longer
    assert decode.startswith("decode: 1 row, room for 128 positions")
    assert "blk.0 … blk.1 (2 layers alike)" in decode
    for op in ("embedding", "rms_norm_mul", "rope_kv_write", "attention", "linear_silu_mul", "linear_add"):
        assert op in decode
    assert shaderlm("plan", "-m", tiny).out == done.out


def test_options(tiny: Path) -> None:
    fused, unfused = (shaderlm("plan", tiny, *more).out.splitlines() for more in ((), ("--unfused",)))
    assert len(unfused) > len(fused) + 10
    assert shaderlm("plan", tiny, "--rows", 7, "--capacity", 20).out.startswith("prefill: 7 rows, room for 20")
    source = shaderlm("plan", tiny, "--wgsl", "rope_kv_write").out
    assert "@compute @workgroup_size(WG)" in source
    assert "fn cache_pack" in source, "what is included is there too"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rows", 129), "rows ≤ capacity ≤ the model's context of 128 must hold, got 129 and 128"),
        (("--rows", 8, "--capacity", 4), "got 8 and 4"),
        (("--wgsl", "rope"), "no kernel 'rope' in these plans; there are "),
        (("--device", "cpu"), "a plan is for a GPU"),
        (("-m", "other.gguf"), "expected one model, got "),
    ],
)
def test_wrong_options(arguments: tuple[object, ...], words: str, tiny: Path) -> None:
    done = shaderlm("plan", tiny, *arguments)
    assert done.code == 2
    assert words in done.err
    assert len(done.err.splitlines()) == 1
