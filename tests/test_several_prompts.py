"""Lists of prompts and of conversations run together; embeddings as an array."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest
from numpy.typing import NDArray

from shaderlm.engine import Completion, Handle, LanguageModel, load
from shaderlm.errors import ContextSizeError, DeviceError, InputError, UnavailableError

from .fake_runner import FakeRunner, hashed, model_of, tiny_tokenizer
from .tiny_models import write_tiny_llama

PROMPTS = ["the", "an owl in the", "th"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    path = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    with load(path, device="cpu") as loaded:
        yield loaded


@pytest.fixture
def fake() -> Iterator[tuple[LanguageModel, FakeRunner]]:
    tokenizer = tiny_tokenizer()
    vocabulary = len(tokenizer.vocabulary.tokens)
    runner = FakeRunner(hashed(vocabulary), vocabulary)
    with model_of(runner, tokenizer) as made:
        yield made, runner


def test_a_list_of_prompts_is_a_list_of_results(model: LanguageModel) -> None:
    alone = [model.generate(prompt, max_tokens=5) for prompt in PROMPTS]
    found = model.generate(PROMPTS, max_tokens=5)
    assert_type(alone, list[Completion])
    assert_type(found, list[Completion])
    assert found == alone
    assert [each.ids for each in found] == [each.ids for each in alone]
    ids = [model.tokenize(prompt) for prompt in PROMPTS]
    assert model.generate(ids, max_tokens=5) == alone
    assert_type(model.generate(ids[0], max_tokens=5), Completion)
    assert model.generate(tuple(PROMPTS), max_tokens=5) == alone
    mixed: list[Any] = [PROMPTS[0], ids[1], np.array(ids[2])]
    assert model.generate(mixed, max_tokens=5) == alone
    assert model.generate(PROMPTS[:1], max_tokens=5) == alone[:1]


def test_prompts_of_a_list_share_steps(fake: tuple[LanguageModel, FakeRunner]) -> None:
    made, _ = fake
    options: Any = {"max_tokens": 20, "ignore_eos": True}
    found = made.generate(["the"] * 8, **options)
    assert made.engine.stats().steps < 2 * 20
    assert [each.ids for each in found] == [made.generate("the", **options).ids] * 8


def test_a_list_of_conversations(model: LanguageModel) -> None:
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    alone = [model.chat(messages, max_tokens=5) for messages in conversations]
    found = model.chat(conversations, max_tokens=5)
    assert_type(found, list[Completion])
    assert found == alone
    assert [each.message for each in found] == [each.message for each in alone]


@pytest.mark.parametrize(
    ("prompts", "kind", "said"),
    [
        (["the", ""], InputError, "prompt 1: the prompt is empty; give at least one word"),
        (["the", []], InputError, "prompt 1: the prompt is empty"),
        (["the", "an", 7], InputError, "prompt 2: prompt must be a str or a list of token ids"),
        (["the", ["an"]], InputError, "prompt 1: prompt must be a str or a list of token ids"),
        ([[1], [10**6]], InputError, "prompt 1: "),
        (["the", [1] * 1000], ContextSizeError, "prompt 1: the prompt has 1,000 tokens, the context holds"),
        ([], InputError, "^the prompt is empty"),
    ],
)
def test_a_wrong_prompt_is_named_before_anything_runs(
    prompts: Any, kind: type[Exception], said: str, model: LanguageModel
) -> None:
    before = model.engine.stats().steps
    with pytest.raises(kind, match=said):
        model.generate(prompts)
    assert model.engine.stats().steps == before
    assert model.engine.sequences() == []


def test_a_wrong_option_is_not_that_of_a_prompt(model: LanguageModel) -> None:
    options: Any = {"max_tokns": 3}
    with pytest.raises(InputError, match=r"^unknown option 'max_tokns'"):
        model.generate(PROMPTS, **options)
    with pytest.raises(InputError, match=r"^unknown option 'max_tokns'"):
        model.chat([[{"role": "user", "content": "the"}]], **options)
    with pytest.raises(InputError, match=r"^conversation 1: "):
        model.chat([[{"role": "user", "content": "the"}], []])


async def _first(model: LanguageModel, prompts: Any) -> None:
    async for _ in model.astream(prompts):
        return


def test_what_takes_one_prompt_says_what_takes_several(model: LanguageModel) -> None:
    prompts: Any = PROMPTS
    for call in (
        lambda: model.stream(prompts),
        lambda: asyncio.run(model.agenerate(prompts)),
        lambda: asyncio.run(_first(model, prompts)),
    ):
        with pytest.raises(
            InputError, match=r"got \['the', .*; only generate\(\) and embed\(\) take a list of prompts"
        ):
            call()


def test_an_error_while_they_run_ends_all(
    fake: tuple[LanguageModel, FakeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, runner = fake

    def lost(tokens: object) -> None:
        raise DeviceError("the device is lost")

    monkeypatch.setattr(runner, "awaited", lost)
    with pytest.raises(DeviceError, match="the device is lost"):
        made.generate(PROMPTS, max_tokens=20, ignore_eos=True)
    assert made.engine.drain(60)
    assert made.engine.sequences() == []


def test_ctrl_c_ends_all(fake: tuple[LanguageModel, FakeRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    made, runner = fake
    cancelled = threading.Event()

    def interrupted(handle: Handle) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "awaited", lambda tokens: cancelled.wait(60))
    monkeypatch.setattr(Handle, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.generate(PROMPTS, max_tokens=10**6, ignore_eos=True)
    cancelled.set()
    assert made.engine.drain(60)
    assert made.engine.stats().finished == {"closed": 3}


def test_a_closed_model_generates_no_list(tmp_path: Path) -> None:
    closed = load(write_tiny_llama(tmp_path / "tiny.gguf"), device="cpu")
    closed.close()
    with pytest.raises(UnavailableError, match="closed"):
        closed.generate(PROMPTS)


def test_embeddings(model: LanguageModel) -> None:
    """In order, each as if it were alone; of length 1, or as the model has them."""
    found = model.embed(PROMPTS)
    assert_type(found, NDArray[np.float32])
    assert found.shape == (3, model.config.hidden)
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    for row, prompt in zip(found, PROMPTS, strict=True):
        np.testing.assert_allclose(model.embed(prompt), row[None], atol=1e-5)
        np.testing.assert_allclose(model.embed(model.tokenize(prompt)), row[None], atol=1e-5)
    raw = model.embed(PROMPTS, normalize=False)
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), found, atol=1e-6)
    assert not np.allclose(np.linalg.norm(raw, axis=1), 1)


def test_what_cannot_be_embedded(model: LanguageModel) -> None:
    wrong: Any = "yes"
    with pytest.raises(InputError, match="normalize must be True or False, got 'yes'"):
        model.embed("the", normalize=wrong)
    with pytest.raises(InputError, match=r"^text 1: the prompt is empty"):
        model.embed(["the", ""])
    with pytest.raises(InputError, match=r"^the prompt is empty"):
        model.embed("")
