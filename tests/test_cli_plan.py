"""`shaderlm plan`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shaderlm.compile.plan_json import from_json
from shaderlm.compile.plan_text import describe
from shaderlm.engine import planning
from shaderlm.errors import DeviceError
from shaderlm.gpu import Device

from .command_line import shaderlm
from .conftest import taken_for
from .tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q4_0")


def test_plans_of_a_prefill_and_of_a_decode_step(tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    software = taken_for(device, kind="software")  # the plans of a GPU join more ops
    monkeypatch.setattr(planning, "open_device", lambda *_, **__: software)
    done = shaderlm("plan", tiny)
    assert done.code == 0
    prefill, decode = done.out.split("\n\n")
    assert prefill.startswith("prefill: 128 tokens, ")
    assert decode.startswith("decode: 1 token, ")
    for op in ("embedding", "rms_norm_mul", "rope_kv_write", "attention", "linear+silu_mul", "linear+add", "sample"):
        assert op in decode
    assert shaderlm("plan", "-m", tiny).out == done.out


def test_options(tiny: Path) -> None:
    fused, unfused = (shaderlm("plan", tiny, *more).out.splitlines() for more in ((), ("--unfused",)))
    assert len(unfused) > len(fused) + 10
    assert shaderlm("plan", tiny, "--tokens", 7).out.startswith("prefill: 8 tokens"), "the next power of two"


def test_a_longer_context_takes_other_kernels() -> None:
    command = ("plan", "synthetic:smollm2-135m:q4_0", "--target", "large-gpu", "--no-tune")
    short, long = (shaderlm(*command, "--depth", depth).out.split("\n\n")[1] for depth in (0, 4000))
    assert "attention_single_pass" in short
    assert "attention_split" in long
    assert "attention_single_pass" not in long


def test_plans_as_json(tiny: Path) -> None:
    plans = json.loads(shaderlm("plan", tiny, "--json").out)
    assert [(plan["name"], plan["tokens"]) for plan in plans] == [("prefill", 128), ("decode", 1)]
    described = shaderlm("plan", tiny).out.split("\n\n")
    for plan, text in zip(plans, described, strict=True):
        assert describe(from_json(json.dumps(plan))) == text.rstrip("\n")


def test_the_text_of_a_kernel(tiny: Path) -> None:
    done = shaderlm("plan", tiny, "--wgsl", "rope_kv_write")
    assert done.code == 0
    assert "@compute @workgroup_size(WG)" in done.out
    assert "fn cache_pack" in done.out, "what is included is there too"


def test_the_text_of_a_kernel_that_only_a_gpu_runs(tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the README says it, on a machine without a GPU, and on one without any adapter."""
    software = taken_for(device, kind="software")
    monkeypatch.setattr(planning, "open_device", lambda *_, **__: software)
    here = shaderlm("plan", tiny, "--wgsl", "linear_gemv_staged")
    assert (here.code, here.err) == (0, "")
    assert here.out.startswith("// linear_gemv_staged for a large GPU: ")
    assert shaderlm("plan", tiny, "--device", "0", "--wgsl", "linear_gemv_staged").code == 2, "a device that was named"

    def none(*_: object, **__: object) -> Device:
        raise DeviceError("no WebGPU adapter was found")

    monkeypatch.setattr(planning, "open_device", none)
    assert shaderlm("plan", tiny, "--wgsl", "linear_gemv_staged") == here
    without = shaderlm("plan", tiny)
    assert (without.code, without.out) == (1, "")
    assert "--target large-gpu plans for a GPU that is not here" in without.err
    assert shaderlm("plan", tiny, "--target", "large-gpu").out.startswith("prefill: 128 tokens")


def test_a_kernel_with_several_texts() -> None:
    """A format makes another text of the same kernel: they are listed, and each can be had."""
    model = "synthetic:smollm2-135m:q4_0"  # with an embedding in q8_0
    command = ("plan", model, "--target", "webgpu-default", "--no-tune", "--wgsl", "linear_gemv_staged")
    first = shaderlm(*command).out
    comment = [line for line in first.splitlines() if line.startswith("//")]
    head = re.fullmatch(r"// linear_gemv_staged for .*: variant 1 of (\d+)", comment[0])
    assert head
    count = int(head[1])
    assert count >= 2
    assert all(re.search(rf"^//   {i}  (prefill|decode) linear", first, re.M) for i in range(1, count + 1))
    texts = [shaderlm(*command, "--variant", i).out for i in range(1, count + 1)]
    assert texts[0] == first
    assert [text.splitlines()[0].split(": ")[1] for text in texts] == [
        f"variant {i + 1} of {count}" for i in range(count)
    ]
    bodies = {text.split("\n\n", 1)[1] for text in texts}
    assert len(bodies) == count
    assert any("q8_0" in line for line in comment)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tokens", 513, "--target", "large-gpu"), "a prefill takes 2 to 512 tokens at once on a large GPU, got 513"),
        (("--tokens", 8, "--depth", 121), "121 tokens in the cache and 8 more do not fit the model's context of 128"),
        (("--json", "--why"), "--json prints plans; leave out --wgsl and --why"),
        (("--wgsl", "rope"), "no kernel 'rope' in the plans for "),
        (("--device", "cpu"), "a plan needs a WebGPU adapter, real or in software; 'cpu' has no dispatches"),
        (("--target", "gameboy"), "no target 'gameboy'; --target takes large-gpu or webgpu-default"),
        (("--target", "large-gpu", "--device", "0"), "--device and --target both say what to plan for"),
        (("--variant", 2), "give --wgsl KERNEL too"),
        (("--target", "large-gpu", "--wgsl", "rope_kv_write", "--variant", 9), "--variant 9: rope_kv_write has "),
        (("-m", "other.gguf"), "expected one model, got "),
    ],
)
def test_wrong_options(arguments: tuple[object, ...], words: str, tiny: Path) -> None:
    done = shaderlm("plan", tiny, *arguments)
    assert done.code == 2
    assert words in done.err
    assert len(done.err.splitlines()) == 1
