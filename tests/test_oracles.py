"""Checkpoints of every architecture give what `transformers` gives: logits, greedy ids, tokens of texts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.engine.loading import load_with
from shaderlm.engine.tokenizer import Tokenizer
from shaderlm.formats.gguf import GgufFile
from shaderlm.gpu import Device
from shaderlm.runtime.runner import Runner
from shaderlm.runtime.sampler_settings import GREEDY

from .gguf_files import quantised
from .oracles import ARCHITECTURES, F32, NAMES, SOURCES, TOLERANCE, WITH_FOLDER, Case, Oracle, assert_logits
from .session import Session

every_source = pytest.mark.parametrize(
    ("name", "source"), SOURCES, ids=[f"{name} {source}" for name, source in SOURCES]
)
Oracles = dict[str, Oracle]
# Checkpoints and lengths of prompts with a router whose last expert and the next one differ by 2e-5 and 1e-4: rounded
# keys and values decide which of them it is, and logits move by 1.7 and by 0.06.
TIES = {("gemma4-moe", 40), ("gemma4-moe", 300)}

# Matrix units round inputs of products to f16: as close as keys and values of f16 are.
PRECISION = {"f32": "exact", "f16": "fast"}


def by_default(*names: str) -> pytest.MarkDecorator:
    """All checkpoints, of which these are not `long`."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in names else pytest.mark.long) for name in NAMES]
    )


def check(oracle: Oracle, source: str, cache: str = "f32", **options: Any) -> None:
    """All that is recorded of a checkpoint's numbers. Prompts decode together, and the first one alone as well."""
    for context, cases in oracle.cases(source).items():
        with load_with(
            oracle.folder / source, context=context, cache=cache, **{"precision": PRECISION[cache], **options}
        ) as model:
            sessions = [Session(model.runner) for _ in cases]
            for session, case in zip(sessions, cases, strict=True):
                found, tie = session.logits(case.prompt), (oracle.folder.name, len(case.prompt))
                if cache == "f16" and tie in TIES:
                    check_tie(found, oracle, case)
                else:
                    case.check(found, cache)
            if cache == "f32":  # runners-up are as close as 0.02
                wanted = [case.greedy for case in cases]
                assert greedy(model.runner, sessions, cases) == wanted
                assert greedy(model.runner, sessions[:1], cases) == wanted[:1]


def check_tie(found: F32, oracle: Oracle, case: Case) -> None:
    """With the expert that exact keys choose, or with the one that rounded keys choose in NumPy."""
    with load_with(oracle.gguf, context=case.context, cache="f16", precision="exact", device="numpy") as model:
        session = Session(model.runner)
        rounded = session.logits(case.prompt)
    near_rounded = np.abs(found - rounded).max() <= TOLERANCE["f16"] * max(1, np.abs(rounded).max())
    if not near_rounded:
        case.check(found, "f16")


def greedy(runner: Runner, sessions: list[Session], cases: list[Case]) -> list[list[int]]:
    """The ids that follow the prompts that these sessions have read."""
    found = []
    for session, case in zip(sessions, cases, strict=False):
        session.rewind(len(case.prompt) - 1)
        found.append([session.sample(case.prompt[-1:]).wait()])
    sequences = [session.sequence for session in sessions]
    batch = runner.decode_batch(sequences, [GREEDY] * len(sequences))
    for _ in range(len(cases[0].greedy) - 1):
        tokens = batch.step().wait()
        for ids, sequence in zip(found, sequences, strict=True):
            ids.append(int(tokens[sequence.slot]))
    batch.close()
    return found


def test_all_are_here(oracles: Oracles) -> None:
    assert {name: oracle.about["arch"] for name, oracle in oracles.items()} == ARCHITECTURES
    assert {name for name, oracle in oracles.items() if oracle.hf.exists()} == set(WITH_FOLDER)
    for oracle in oracles.values():
        assert len(oracle.texts) >= 6
        for cases in oracle.cases().values():
            assert all(len(case.greedy) == 12 and case.logits.std() > 0.5 for case in cases)


@every_source
def test_in_numpy(name: str, source: str, oracles: Oracles) -> None:
    check(oracles[name], source, device="numpy")


@every_source
@pytest.mark.parametrize("precision", ["exact", pytest.param("fast", marks=pytest.mark.full)])
def test_on_the_cpu(name: str, source: str, precision: str, oracles: Oracles) -> None:
    """With weights as they are stored. Inputs of 16 bits are as close as those of f32."""
    check(oracles[name], source, device="cpu", precision=precision)


@every_source
def test_texts(name: str, source: str, oracles: Oracles) -> None:
    tokenizer = Tokenizer.from_file(oracles[name].folder / source)
    for text, ids in oracles[name].texts:
        assert tokenizer.encode(text) == ids


@by_default("gemma3", "gemma4", "gemma4-moe", "llama-yarn", "qwen35", "qwen3moe", "starcoder2")
def test_on_a_device(name: str, oracles: Oracles, device: Device) -> None:
    check(oracles[name], "model.gguf", device=device)


@pytest.mark.parametrize("name", WITH_FOLDER)
def test_folders_on_a_device(name: str, oracles: Oracles, device: Device) -> None:
    with load_with(oracles[name].hf, device=device, cache="f32", precision="exact") as model:
        case = oracles[name].cases("hf")[512][1]
        case.check(model.logits(case.prompt)[-1])


@pytest.mark.long
@pytest.mark.parametrize("cache", ["f32", "f16"])
@pytest.mark.parametrize("name", WITH_FOLDER)
def test_all_of_a_folder_on_a_device(name: str, cache: str, oracles: Oracles, device: Device) -> None:
    check(oracles[name], "hf", cache, device=device)


@by_default("gemma2", "gpt-oss-mxfp4")
def test_on_a_device_with_an_f16_cache(name: str, oracles: Oracles, device: Device) -> None:
    check(oracles[name], "model.gguf", "f16", device=device)


@by_default("gpt-oss-mxfp4")
@pytest.mark.parametrize("cache", ["f32", pytest.param("f16", marks=pytest.mark.long)])
def test_by_the_kernels_of_a_gpu(name: str, cache: str, oracles: Oracles, gpu: Device) -> None:
    check(oracles[name], "model.gguf", cache, device=gpu)


def check_q8_0(oracle: Oracle, path: Path, cache: str = "f32", **options: Any) -> None:
    """Matrices in Q8_0: `transformers` was given the numbers that they stand for. The eight largest logits."""
    about = oracle.about
    with GgufFile.open(quantised(oracle.gguf, path)) as file:
        kinds = Counter(info.kind.upper() for info in file.tensors.values())
    assert kinds == about["q8_0_types"]
    for context in sorted(set(about["contexts"])):
        with load_with(path, context=context, cache=cache, precision=PRECISION[cache], **options) as model:
            for prompt, size, wanted in zip(about["prompts"], about["contexts"], about["q8_0"], strict=True):
                if size == context:
                    session = Session(model.runner)
                    ids, logits = zip(*wanted["top8"], strict=True)
                    assert_logits(session.logits(prompt)[list(ids)], np.array(logits), f"{len(prompt)} tokens", cache)
                    session.close()


WITH_Q8_0 = [name for name in NAMES if name != "gpt-oss-mxfp4"]  # which is MXFP4


@pytest.mark.parametrize("name", WITH_Q8_0)
def test_q8_0_in_numpy(name: str, oracles: Oracles, tmp_path: Path) -> None:
    check_q8_0(oracles[name], tmp_path / "q8_0.gguf", device="cpu")


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_Q8_0)
@pytest.mark.parametrize("cache", ["f32", "f16"])
@pytest.mark.parametrize("where", ["device", "gpu"])
def test_q8_0_on_a_device(
    name: str, cache: str, where: str, oracles: Oracles, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    check_q8_0(oracles[name], tmp_path / "q8_0.gguf", cache, device=request.getfixturevalue(where))
