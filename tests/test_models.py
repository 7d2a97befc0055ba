"""Whole models, tiny ones: the GPU's plans against the interpreter, every tensor type, every way to cut a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shaderlm
from shaderlm.engine import LanguageModel
from shaderlm.engine.loading import load_with
from shaderlm.errors import InputError, ModelError
from shaderlm.formats.gguf import GgufFile
from shaderlm.gpu import Device
from shaderlm.graph.fuse import FUSIONS
from shaderlm.runtime.runner import SequenceChunk, StepResult

from .session import Session
from .sweeps import every_third_by_default
from .tiny_models import KINDS, write_tiny_llama

pytestmark = pytest.mark.xdist_group("tiny models")

# Weight formats whose kernels are those of others with another table or scales.
# Types on a device: planes of blocks, superblocks, tables of codes, and plain rows. test_kernels has all of them.
IDS = [int(i) for i in np.random.default_rng(5).integers(0, 256, 70)]


def assert_logits(actual: Any, expected: Any, tolerance: float, label: str) -> None:
    """Logits of tiny models are of the order of 1."""
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all(), f"{label}: not finite"
    worst = np.unravel_index(np.abs(actual - expected).argmax(), actual.shape)
    given = f"{actual[worst]:.6f}, expected {expected[worst]:.6f}"
    assert abs(actual[worst] - expected[worst]) <= tolerance, f"{label}: at {worst} {given}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q4_0")


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> Iterator[LanguageModel]:
    with shaderlm.load(tiny, device="cpu", precision="exact") as model:
        yield model


@pytest.fixture(scope="module")
def on_gpu(tiny: Path, device: Device) -> Iterator[LanguageModel]:
    with load_with(tiny, device=device, cache="f32", precision="exact") as model:
        yield model


def test_the_gpu_computes_what_the_interpreter_does(on_gpu: LanguageModel, oracle: LanguageModel) -> None:
    expected = oracle.logits(IDS)
    assert expected.std() > 0.1
    assert_logits(on_gpu.logits(IDS), expected, 2e-4, "tiny q4_0")


def test_a_cache_of_f16(tiny: Path, device: Device, oracle: LanguageModel) -> None:
    with load_with(tiny, device="cpu", cache="f16") as model:
        expected = model.logits(IDS)
    assert_logits(expected, oracle.logits(IDS), 5e-2, "f16 cache against f32")
    with load_with(tiny, device=device, cache="f16") as model:
        assert model.report.cache == "f16"
        assert_logits(model.logits(IDS), expected, 5e-3, "f16 cache")


def twin(path: Path, source: Path, **options: Any) -> Path:
    """The same model with its weights dequantised."""
    with GgufFile.open(source) as file:
        tensors = {name: file.dense(name) for name in file.tensors}
        sizes = {"hidden": file.metadata["llama.embedding_length"], "ffn": file.metadata["llama.feed_forward_length"]}
    return write_tiny_llama(path, kind="f32", tensors=tensors, **sizes, **options)


@pytest.fixture
def twins(kind: str, tmp_path: Path) -> tuple[Path, Any]:
    """A model with tensors of a type, and the logits of the same with its weights dequantised."""
    source = write_tiny_llama(tmp_path / f"{kind}.gguf", kind=kind, layers=1, tied=False)
    same = twin(tmp_path / "twin.gguf", source, layers=1, tied=False)
    with shaderlm.load(same, device="numpy") as model:
        return source, model.logits(IDS[:9])


@pytest.mark.parametrize("kind", every_third_by_default(KINDS))
def test_every_tensor_type_is_like_its_dequantised_twin(kind: str, twins: tuple[Path, Any]) -> None:
    source, expected = twins
    with shaderlm.load(source, device="numpy") as model:
        assert_logits(model.logits(IDS[:9]), expected, 1e-5, f"{kind} in the interpreter")
    for precision, tolerance in (("exact", 5e-4), ("fast", 5e-3)):
        with shaderlm.load(source, device="cpu", precision=precision) as model:
            assert_logits(model.logits(IDS[:9]), expected, tolerance, f"{kind} packed, {precision}")


@pytest.mark.long  # test_kernels has every format, test_oracles a model of mxfp4
@pytest.mark.parametrize("kind", KINDS)
def test_tensor_types_on_a_device(kind: str, twins: tuple[Path, Any], device: Device) -> None:
    source, expected = twins
    with load_with(source, device=device, cache="f32", precision="exact") as model:
        assert_logits(model.logits(IDS[:9]), expected, 5e-4, f"{kind} on the GPU")
        one = model.logits(IDS[:1])  # through the kernels of decoding
        assert_logits(one, expected[:1], 5e-4, f"{kind} on the GPU, one row")
        file_bytes = sum(info.nbytes for info in GgufFile.open(source).tensors.values())
        assert model.report.weight_bytes <= 1.1 * file_bytes + 4096


def test_bf16_beyond_the_range_of_f16(tmp_path: Path, device: Device) -> None:
    large = np.random.default_rng(0).standard_normal((267, 64)).astype(np.float32) * 0.01
    large[3, 5] = 1e5
    path = write_tiny_llama(tmp_path / "large.gguf", kind="bf16", tensors={"output.weight": large}, tied=False)
    with shaderlm.load(path, device="cpu") as model:
        expected = model.logits(IDS[:3])
    with shaderlm.load(path, device=device) as model:
        actual = model.logits(IDS[:3])
        np.testing.assert_allclose(actual, expected, rtol=1e-2, atol=1e-2)
        assert np.abs(actual).max() > 100


@pytest.mark.parametrize("on", ["cpu", "gpu"])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_prompt_in_chunks_is_the_same_prompt(
    chunk: int, on: str, on_gpu: LanguageModel, oracle: LanguageModel
) -> None:
    """Row t of a long prefill is what a decode step t computes."""
    model = oracle if on == "cpu" else on_gpu
    expected = oracle.logits(IDS)
    session = Session(model._runner)
    try:
        for first in range(0, len(IDS), chunk):
            found = session.logits(IDS[first : first + chunk])
            last = min(first + chunk, len(IDS)) - 1
            assert_logits(
                found, expected[last], 2e-3, f"row {last} in chunks of {chunk} on {on}"
            )  # the cache may be f16
    finally:
        session.close()


@pytest.mark.parametrize("fusions", [(), *[(fusion.name,) for fusion in FUSIONS], ("rms_norm_mul", "add_rms_norm")])
def test_fused_is_unfused_on_the_gpu(
    fusions: tuple[str, ...], tiny: Path, device: Device, oracle: LanguageModel
) -> None:
    with load_with(tiny, device=device, fusions=fusions, cache="f32", precision="exact") as model:
        assert_logits(model.logits(IDS[:6]), oracle.logits(IDS[:6]), 2e-4, f"{fusions}, 6 rows")
        assert_logits(model.logits(IDS[:1]), oracle.logits(IDS[:1]), 2e-4, f"{fusions}, one row")


def test_two_conversations_do_not_disturb_each_other(on_gpu: LanguageModel) -> None:
    prompts = ["the cat", "an owl in the night"]
    alone = [on_gpu.generate(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts]
    assert alone[0] != alone[1]
    streams = [on_gpu.stream(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts]
    open_streams = list(streams)
    while open_streams:
        for stream in list(open_streams):
            if next(stream, None) is None:
                open_streams.remove(stream)
    assert [stream.completion for stream in streams] == alone


def test_a_conversation_that_goes_on_computes_only_what_is_new(
    on_gpu: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [{"role": "user", "content": "the cat"}]
    answer = on_gpu.chat(first, max_tokens=5, ignore_eos=True)
    longer = [*first, {"role": "assistant", "content": str(answer)}, {"role": "user", "content": "and the owl"}]
    fed: list[int] = []
    step = on_gpu.runner.step

    def watched(parts: Sequence[SequenceChunk]) -> StepResult:
        fed.extend(i for part in parts for i in part.ids or ())
        return step(parts)

    monkeypatch.setattr(on_gpu.runner, "step", watched)
    again = on_gpu.chat(longer, max_tokens=6, ignore_eos=True)
    assert 0 < len(fed) < len(on_gpu.chat_ids(longer))
    fresh = on_gpu.generate(on_gpu.chat_ids(longer), max_tokens=6, ignore_eos=True, cache_prompt=False)
    assert again == fresh


def test_the_cache_grows(tmp_path: Path, device: Device) -> None:
    """Past 512 positions the pool is moved to a larger one, in the middle of a prompt and of a generation."""
    path = write_tiny_llama(tmp_path / "long.gguf", kind="q4_0", layers=1, context=1200)
    ids = [int(i) for i in np.random.default_rng(6).integers(0, 256, 556)]
    exact: Any = {"cache": "f32", "precision": "exact"}
    with shaderlm.load(path, device="cpu") as oracle, load_with(path, device=device, **exact) as model:
        assert_logits(model.logits(ids)[-1], oracle.logits(ids)[-1], 5e-4, "556 tokens")
        text = [m.generate(ids[:506], max_tokens=10, ignore_eos=True) for m in (oracle, model)]
        assert text[0].ids == text[1].ids
        assert len(text[1].ids) == 10


def test_a_full_context_ends_the_answer(tmp_path: Path, device: Device) -> None:
    path = write_tiny_llama(tmp_path / "short.gguf", kind="q4_0", layers=1, context=12)
    exact: Any = {"cache": "f32", "precision": "exact"}  # as other tests have it: the same shaders
    for on, how in (("cpu", {}), (device, exact)):
        with load_with(path, device=on, **how) as model:
            answer = model.generate(IDS[:9], max_tokens=50, ignore_eos=True)
            assert answer.finish_reason == "length"
            assert len(answer.ids) == 4  # 9 + 3 in the cache, and the token that the last of them makes
            full = model.generate(IDS[:12], max_tokens=50, ignore_eos=True)
            assert len(full.ids) == 1
            if on == "cpu":  # a device would compile the kernels of penalties for it
                penalised = model.generate(IDS[:9], max_tokens=50, ignore_eos=True, presence_penalty=0.5)
                assert len(penalised.ids) == 4
            with pytest.raises(InputError, match="the prompt has 13 tokens, the context holds 12"):
                model.generate(IDS[:13])
            with pytest.raises(InputError, match="the context holds 12"):
                model.logits(IDS[:13])


def test_a_shorter_context_can_be_asked_for(tiny: Path) -> None:
    with shaderlm.load(tiny, device="cpu", context=20) as model, pytest.raises(InputError, match="holds 20"):
        model.generate(IDS[:21])
    with pytest.raises(InputError, match="from 1 to the model's 128, got 129"):
        shaderlm.load(tiny, device="cpu", context=129)


VARIANTS: dict[str, dict[str, Any]] = {
    "biases": {
        "tensors": {
            f"blk.{i}.{name}.bias": np.linspace(-0.5, 0.5, size, dtype=np.float32)
            for i in range(2)
            for name, size in (
                ("attn_q", 64), ("attn_k", 32), ("attn_v", 32), ("attn_output", 64),
                ("ffn_gate", 96), ("ffn_up", 96), ("ffn_down", 64),
            )
        }
    },
    "some biases": {
        "tensors": {f"blk.{i}.attn_q.bias": np.linspace(-0.5, 0.5, 64, dtype=np.float32) for i in range(2)}
    },
    "rope factors": {"tensors": {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}},
    "linear rope scaling": {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}},
    "part of a head rotated": {"metadata": {"llama.rope.dimension_count": 8}},
    "untied": {"tied": False},
    "one kv head": {"kv_heads": 1},
    "as many kv heads": {"kv_heads": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_the_architecture(name: str, tmp_path: Path, device: Device) -> None:
    path = write_tiny_llama(tmp_path / "variant.gguf", kind="f16", **VARIANTS[name])
    plain = write_tiny_llama(tmp_path / "plain.gguf", kind="f16")
    with shaderlm.load(path, device="cpu") as model:
        expected = model.logits(IDS[:20])
    with shaderlm.load(plain, device="cpu") as model:
        assert np.abs(model.logits(IDS[:20]) - expected).max() > 1e-2, "the variant changes nothing"
    with load_with(path, device=device, cache="f32", precision="exact") as model:
        assert_logits(model.logits(IDS[:20]), expected, 2e-4, name)
        assert_logits(model.logits(IDS[:1]), expected[:1], 2e-4, f"{name}, one row")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metadata": {"general.architecture": "mamba"}}, "architecture is 'mamba'; supported: .*llama"),
        ({"metadata": {"llama.block_count": 3}}, "no tensor 'blk.2.attn_q.weight'"),
        ({"metadata": {"llama.attention.head_count": None}}, "llama.attention.head_count must be a whole number"),
        ({"metadata": {"llama.attention.head_count": 0}}, "from 1 to 4,096, the file has 0"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, "must be a multiple of head_count_kv, got 4 and 3"),
        ({"metadata": {"llama.feed_forward_length": 97}}, r"'blk.0.ffn_gate.weight' must be \[97, 64\]"),
        ({"metadata": {"llama.attention.layer_norm_rms_epsilon": -1.0}}, "must be a number above 0, the file has -1.0"),
        ({"metadata": {"llama.rope.dimension_count": 7}}, "must be even and at most 16, the file has 7"),
        ({"metadata": {"llama.context_length": "long"}}, "llama.context_length must be a whole number"),
        ({"metadata": {"llama.attention.value_length": 8}}, "value_length differs from key_length"),
        ({"tensors": {"token_embd.weight": np.zeros((99, 64), np.float32)}}, "the tokenizer has 267 tokens"),
        ({"tensors": {"rope_freqs.weight": np.ones(3, np.float32)}}, r"'rope_freqs.weight' must be \[8\]"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused(options: Any, message: str, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "wrong.gguf", **options)
    with pytest.raises(ModelError, match=message):
        shaderlm.load(path, device="cpu")
