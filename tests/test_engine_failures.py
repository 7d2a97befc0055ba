"""What goes wrong during a generation: a model that is closed, memory that runs out, limits that are met."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info

import shaderlm
from shaderlm.engine import EngineOptions, LanguageModel
from shaderlm.engine.loading import load_with
from shaderlm.errors import DeviceError, InputError, KernelError
from shaderlm.gpu import Device, open_device
from shaderlm.models.config import StepSpec
from shaderlm.runtime.gpu_runner import GpuRunner
from shaderlm.runtime.numpy_runner import one_blas_thread
from shaderlm.runtime.runner import FIRST_PAGES, OutputKind, SequenceChunk
from shaderlm.runtime.sizes import max_tokens

from .session import Session
from .sweeps import with_all
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("tiny f32")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", layers=1, context=1024)


def gpu(model: LanguageModel) -> GpuRunner:
    assert isinstance(model._runner, GpuRunner)
    return model._runner


@pytest.mark.parametrize("on", ["cpu", "gpu"])
@pytest.mark.parametrize("stop", [None, "\u1234"])
def test_a_model_closed_during_a_generation(on: str, stop: str | None, tiny: Path, device: Device) -> None:
    """From another thread; also while the text is held back because of a stop string that never comes."""
    model = shaderlm.load(tiny, device="cpu" if on == "cpu" else device)
    held = str(model.generate("hello", max_tokens=600, ignore_eos=True)) + stop if stop else None
    ended: list[Any] = []
    begun = threading.Event()

    def run() -> None:
        begun.set()
        try:
            ended.append(model.generate("hello", max_tokens=900, ignore_eos=True, stop=held))
        except InputError as problem:
            ended.append(str(problem))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait()
    time.sleep(0.05)
    model.close()
    for thread in threads:
        thread.join(60)
    assert ended == ["this model is closed; load it again"] * 3


def test_a_stream_closed_by_another_thread(tiny: Path) -> None:
    with shaderlm.load(tiny, device="cpu") as model:
        stream = model.stream("hello", max_tokens=900, ignore_eos=True)
        pieces: list[str] = []
        thread = threading.Thread(target=lambda: pieces.extend(stream))
        thread.start()
        while not pieces and thread.is_alive():
            time.sleep(0.001)
        stream.close()
        thread.join(60)
        assert not thread.is_alive()
        assert stream.completion is not None
        assert stream.completion.finish_reason == "closed"
        assert len(stream.completion.ids) < 900


def test_a_generation_that_failed_has_no_completion(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shaderlm.load(tiny, device="cpu") as model:
        stream = model.stream("hello", logprobs=1)
        next(stream)
        monkeypatch.setattr("shaderlm.runtime.numpy_runner.logprobs", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            next(stream)
        assert stream.completion is None
        assert list(stream) == [], "it is over"
        monkeypatch.undo()
        assert model.generate("hello", max_tokens=3, logprobs=1).logprobs


def conversation(model: LanguageModel) -> list[dict[str, str]]:
    """Longer than the first pages of the pool, after a part that is not."""
    first = [{"role": "user", "content": "x" * 300}]
    answer = model.chat(first, max_tokens=20, ignore_eos=True)
    assert model.runner.pool.pages == FIRST_PAGES
    return [*first, {"role": "assistant", "content": str(answer)}, {"role": "user", "content": "y" * 300}]


def test_memory_that_runs_out_while_the_cache_grows(
    tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer fails; the next one is right again, and so is one that goes on from the conversation before."""
    with shaderlm.load(tiny, device="cpu") as oracle, load_with(tiny, device=device, cache="f32") as model:
        longer = conversation(model)
        expected = oracle.chat(longer, max_tokens=20, ignore_eos=True)
        whole, pool = device.buffer, iter([1])  # the first of the pool's larger buffers can be made

        def scarce(contents: Any) -> Any:
            if isinstance(contents, int) and contents >= 1 << 17 and next(pool, None) is None:
                raise DeviceError("no room")
            return whole(contents)

        monkeypatch.setattr(device, "buffer", scarce)
        with pytest.raises(DeviceError, match="no room"):
            model.chat(longer, max_tokens=20, ignore_eos=True)
        assert gpu(model).pool.pages == FIRST_PAGES
        monkeypatch.setattr(device, "buffer", whole)
        for _ in range(2):
            assert model.chat(longer, max_tokens=20, ignore_eos=True).ids == expected.ids


def test_memory_that_runs_out_in_the_interpreter(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shaderlm.load(tiny, device="cpu") as model:
        longer = conversation(model)
        zeros, pool = np.zeros, iter([1])

        def scarce(shape: Any, *given: Any) -> Any:
            if np.prod(shape) >= 1 << 15 and next(pool, None) is None:
                raise MemoryError
            return zeros(shape, *given)

        monkeypatch.setattr("shaderlm.runtime.numpy_runner.np.zeros", scarce)
        with pytest.raises(MemoryError):
            model.chat(longer, max_tokens=20, ignore_eos=True)
        assert model.runner.pool.pages == FIRST_PAGES
        monkeypatch.undo()
        expected = model.generate(model.chat_ids(longer), max_tokens=20, ignore_eos=True)
        for _ in range(2):
            assert model.chat(longer, max_tokens=20, ignore_eos=True).ids == expected.ids


@pytest.mark.full
def test_a_device_with_room_for_a_short_context(
    tiny: Path, pytestconfig: pytest.Config, caplog: pytest.LogCaptureFixture
) -> None:
    """2 kv heads × 16 × f32 are 128 bytes a position: 64 KiB hold 512 of them. Said at load, and kept to."""
    small = open_device(pytestconfig.getoption("--device"), limits={"max_binding": 1 << 16})
    with caplog.at_level(logging.WARNING, "shaderlm"), load_with(tiny, device=small, cache="f32") as model:
        assert model.config.context == model.report.context == 512
        assert "reduced from 1,024 to 512 tokens" in caplog.text
        full = model.generate(list(range(200)) * 2 + list(range(90)), max_tokens=100, ignore_eos=True)
        assert (full.finish_reason, len(full.ids)) == ("length", 512 - 490 + 1)
        with pytest.raises(InputError, match="the context holds 512"):
            model.generate(list(range(250)) * 3)
        assert len(model.generate("hello", max_tokens=3, ignore_eos=True).ids) == 3
        assert model.logits(list(range(100))).shape == (100, 267)
        runner = gpu(model)
        assert runner.max_tokens <= (1 << 16) // (4 * 192)  # rows of gate and up
        assert runner.max_outputs == 32, "a power of two; 61 rows of 267 logits are 64 KiB"
        assert max_tokens(model.config, replace(small.caps, kind="discrete")) == runner.max_tokens == 64
        runner.max_tokens = 16
        model.engine.configure(EngineOptions())  # the limits follow from it
        again = model.generate(list(range(200)) * 2 + list(range(90)), max_tokens=100, ignore_eos=True)
        assert again.ids == full.ids


@pytest.mark.parametrize("kind", [with_all("q8_0"), "q4_0"])
def test_scales_of_odd_length(kind: str, tmp_path: Path, device: Device) -> None:
    """267 rows × 3 blocks of f16 scales are no multiple of four bytes."""
    path = write_tiny_llama(tmp_path / "tiny.gguf", kind=kind, layers=1, hidden=96, tied=False)
    with shaderlm.load(path, device="cpu") as oracle, load_with(path, device=device, cache="f32") as model:
        expected = oracle.logits([1, 2, 3])
        assert np.abs(model.logits([1, 2, 3]) - expected).max() < 1e-3


def test_only_the_last_chunk_makes_logits(tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with load_with(tiny, device=device, cache="f32") as model, shaderlm.load(tiny, device="cpu") as oracle:
        runner = gpu(model)
        runner.max_tokens = 4
        seen: list[tuple[int, str]] = []
        step = runner.step

        def watched(parts: Any) -> Any:
            seen.extend((part.rows, part.gives) for part in parts)
            return step(parts)

        monkeypatch.setattr(runner, "step", watched)
        ids = list(range(10))
        session = Session(runner)
        found = session.logits(ids)
        assert seen == [(4, "nothing"), (4, "nothing"), (2, "logits")]
        assert np.abs(found - oracle.logits(ids)[-1]).max() < 1e-3
        session.close()


def test_a_part_that_gives_nothing_runs_no_head(tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with load_with(tiny, device=device, cache="f32") as model:
        runner = gpu(model)
        sequence = runner.add()
        submitted: list[int] = []
        submit = runner.device.submit

        def watched(programs: Any, *more: Any) -> Any:
            if programs:  # not a read-back alone
                submitted.append(len(programs))
            return submit(programs, *more)

        monkeypatch.setitem(vars(runner.device), "submit", watched)  # which leaves nothing behind
        kinds: list[OutputKind] = ["nothing", "logits", "token"]
        for gives in kinds:
            runner.step([SequenceChunk(sequence, [1, 2], gives)])
        assert submitted == [1, 2, 2]
        runner.free(sequence)


def test_a_plan_without_its_buffers_is_an_error(tiny: Path, device: Device) -> None:
    with shaderlm.load(tiny, device=device) as model:
        runner = gpu(model)
        key = StepSpec(1, "single_pass", runner.cache)
        missing = runner._buffers.pop("blk.0.k_cache")
        with pytest.raises(KernelError, match=r"a plan wants the buffer 'blk.0.k_cache', which nobody made"):
            runner.bound(key)
        runner._buffers["blk.0.k_cache"] = missing
        assert runner.bound(key)


def test_blas_gets_its_threads_back() -> None:
    def threads() -> list[int]:
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    before = threads()
    inside: list[list[int]] = []

    def run() -> None:
        for _ in range(20):
            with one_blas_thread():
                inside.append(threads())

    users = [threading.Thread(target=run) for _ in range(3)]
    for user in users:
        user.start()
    run()
    for user in users:
        user.join()
    assert inside == [[1] * len(before)] * 80
    assert threads() == before
