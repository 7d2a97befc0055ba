"""The Python API: what generate, stream, chat, logits and load promise, on a tiny model."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shaderlm
from shaderlm.engine import LanguageModel, load
from shaderlm.engine.loading import choose_device, load_with
from shaderlm.errors import DeviceError, InputError, ModelError
from shaderlm.gpu import Device, adapters

from .tiny_models import write_tiny_llama

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q8_0")


@pytest.fixture(
    scope="module",
    params=["cpu", *(pytest.param(each, marks=pytest.mark.full) for each in ("gpu", "gpu, three steps ahead"))],
)
def model(request: pytest.FixtureRequest, tiny: Path) -> Iterator[LanguageModel]:
    where: Any = "cpu" if request.param == "cpu" else request.getfixturevalue("device")
    with load_with(tiny, device=where, cache="f32") as loaded:
        if "ahead" in request.param:
            loaded.runner.steps_ahead = loaded.runner.steps_ahead_alone = 3
        yield loaded


def test_a_completion_is_text_that_knows_its_tokens(model: LanguageModel) -> None:
    found = model.generate("the", max_tokens=7)
    assert isinstance(found, str)
    assert found == model.detokenize(found.ids)
    assert found.prompt_ids == model.tokenize("the")
    assert len(found.ids) == 7
    assert found.finish_reason == "length"
    assert found.logprobs is None
    assert found.timing.decoded == 6
    assert found.timing.tokens_per_second > 0


def test_a_stream_gives_the_same_in_pieces(model: LanguageModel) -> None:
    whole = model.generate("the owl", max_tokens=9)
    stream = model.stream("the owl", max_tokens=9)
    assert stream.completion is None
    pieces = list(stream)
    assert "".join(pieces) == whole
    assert len(pieces) > 3
    assert stream.completion is not None
    assert stream.completion.ids == whole.ids


def test_a_stream_can_be_left_early(model: LanguageModel) -> None:
    with model.stream("the owl", max_tokens=50) as stream:
        first = next(stream)
    assert stream.completion is not None
    assert stream.completion == first
    assert stream.completion.finish_reason == "closed"
    assert list(stream) == []
    assert model.generate("the owl", max_tokens=3)  # the model goes on


def test_an_unfinished_character_at_the_end_is_left_out(model: LanguageModel) -> None:
    """Cut after the first two bytes of €. A byte that is no character is U+FFFD as before."""
    tokens = model.tokenizer.vocabulary.tokens
    first, second = (tokens.index(letter) for letter in "âĤ")  # bytes e2, 82
    forced: Any = {"logit_bias": {first: 50, second: 45}, "presence_penalty": 50}
    cut = model.generate("the", max_tokens=2, **forced)
    assert (cut.ids, str(cut), cut.finish_reason) == ([first, second], "", "length")
    assert "".join(model.stream("the", max_tokens=2, **forced)) == ""
    assert "\ufffd" in model.generate("the", max_tokens=4, logit_bias={first: 100})


def test_a_stop_string_ends_the_answer_also_across_tokens(model: LanguageModel) -> None:
    whole = str(model.generate("the", max_tokens=20))
    stop = whole[4:9]
    assert len(model.tokenize(stop)) > 1
    for given in (stop, [stop], ["not there", stop]):
        found = model.generate("the", max_tokens=20, stop=given)
        assert found == whole[: whole.index(stop)]
        assert found.finish_reason == "stop"


def test_the_end_of_an_answer(tiny: Path, model: LanguageModel) -> None:
    """A token that ends answers is neither text nor counted, and ignore_eos goes past it."""
    eos = model.tokenizer.vocabulary.eos
    assert eos is not None
    forced = model.generate("the", max_tokens=5, logit_bias={eos: 100})
    assert (str(forced), forced.ids, forced.finish_reason) == ("", [], "stop")
    past = model.generate("the", max_tokens=5, logit_bias={eos: 100}, ignore_eos=True)
    assert past.ids == [eos] * 5
    assert past.finish_reason == "length"


def test_the_same_seed_gives_the_same_text(model: LanguageModel) -> None:
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.01}
    texts = [str(model.generate("the", seed=seed, **options)) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_greedy_settings_are_greedy(model: LanguageModel) -> None:
    greedy = model.generate("the", max_tokens=10)
    assert model.generate("the", max_tokens=10, temperature=1.0, top_k=1, seed=9) == greedy
    assert model.generate("the", max_tokens=10, temperature=0.001, seed=9) == greedy


def test_a_bias_of_0_changes_nothing(model: LanguageModel) -> None:
    """But the plan that samples."""
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 4}
    assert model.generate("an owl", **options).ids == model.generate("an owl", logit_bias={3: 0}, **options).ids


def test_penalties_and_biases_change_the_answer(model: LanguageModel) -> None:
    plain = model.generate("the", max_tokens=12)
    banned = model.generate("the", max_tokens=12, logit_bias={plain.ids[0]: float("-inf")})
    assert plain.ids[0] not in banned.ids
    once = model.generate("the", max_tokens=12, presence_penalty=100)
    assert len(set(once.ids)) == len(once.ids)


def test_tokens_that_a_model_never_gives(tmp_path: Path) -> None:
    """Its file lists them; a number that is no token is not one of them."""
    with load_with(write_tiny_llama(tmp_path / "plain.gguf"), device="cpu") as plain:
        never = plain.generate("the", max_tokens=12).ids
        banned = plain.generate("the", max_tokens=12, logit_bias=dict.fromkeys(never, float("-inf"))).ids
    listed = {"tokenizer.ggml.suppress_tokens": [*never, 1 << 20]}
    with load_with(write_tiny_llama(tmp_path / "listed.gguf", metadata=listed), device="cpu") as model:
        assert model.generate("the", max_tokens=12).ids == banned
        for options in ({"mirostat": 2}, {"logit_bias": {never[0]: 100}}, {"min_tokens": 4}, {"presence_penalty": 1}):
            found = model.generate("the", max_tokens=12, temperature=2.0, seed=3, **options)
            assert found.ids
            assert not set(found.ids) & set(never)
    broken = {"tokenizer.ggml.suppress_tokens": [1.5]}
    with pytest.raises(ModelError, match="suppress_tokens must be a list of whole numbers, the file"):
        load_with(write_tiny_llama(tmp_path / "broken.gguf", metadata=broken), device="cpu")


def test_penalties_count_a_cached_prefix(model: LanguageModel) -> None:
    """All of the prompt, whether it is run or in the cache of the conversation before."""
    options: dict[str, Any] = {"max_tokens": 8, "presence_penalty": 100, "ignore_eos": True}
    first = model.chat(CHAT, max_tokens=4, ignore_eos=True)
    longer = [*CHAT, {"role": "assistant", "content": str(first)}, {"role": "user", "content": "the"}]
    found = model.chat(longer, **options)
    assert not set(found.ids) & set(found.prompt_ids)
    assert found.ids == model.generate(found.prompt_ids, **options).ids


def test_log_probabilities(model: LanguageModel) -> None:
    found = model.generate("the", max_tokens=3, logprobs=4)
    assert found.logprobs is not None
    logits = model.logits([*found.prompt_ids, *found.ids[:-1]])[-3:].astype(np.float64)
    for row, entry in zip(logits, found.logprobs, strict=True):
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert entry.id == int(row.argmax())
        assert entry.logprob == pytest.approx(expected.max(), abs=1e-3)
        assert [token for token, _ in entry.top] == list(np.argsort(-row)[:4])


def test_chat_uses_the_models_template(model: LanguageModel) -> None:
    found = model.chat(CHAT, max_tokens=3)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert found.prompt_ids == model.tokenizer.encode(text)
    assert found == model.generate(text, max_tokens=3)
    assert "".join(model.stream_chat(CHAT, max_tokens=3)) == found


def test_answers_from_several_threads(model: LanguageModel) -> None:
    prompts = ["the", "an owl", "in the", "ou"]
    expected = {prompt: model.generate(prompt, max_tokens=8) for prompt in prompts}
    found: dict[str, str] = {}

    def run(prompt: str) -> None:
        found[prompt] = model.generate(prompt, max_tokens=8)

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_a_model_without_template_cannot_chat(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "base.gguf", template=False)
    with load(path, device="cpu") as model:
        assert not model.has_chat_template
        with pytest.raises(ModelError, match="no chat template"):
            model.chat(CHAT)


def test_a_closed_model_says_so(tiny: Path) -> None:
    model = load(tiny, device="cpu")
    stream = model.stream("the", max_tokens=30)
    next(stream)
    model.close()
    model.close()
    for call in (lambda: model.generate("x"), lambda: model.logits([1]), lambda: model.chat(CHAT)):
        with pytest.raises(InputError, match="this model is closed; load it again"):
            call()
    with pytest.raises(InputError, match="this model is closed; load it again"):
        list(stream)


def test_the_report_says_what_was_loaded(tiny: Path, device: Device) -> None:
    with load(tiny, device=device) as model:
        report = model.report
    assert report.types == {"q8_0": 15, "f32": 5}
    assert report.device.startswith(device.caps.name)
    text = "\n".join(report.lines())
    assert "Tiny Llama" in text
    assert "128 tokens" in text


def test_a_prompt_beyond_the_context_says_what_helps(tiny: Path) -> None:
    with load(tiny, device="cpu", context=16) as model:
        assert model.report.max_context == 128
        for call in (lambda: model.generate("x" * 20), lambda: model.logits([1] * 20)):
            with pytest.raises(InputError, match=r"20 tokens, the context holds 16\..* raise context= \(up to 128\)"):
                call()
    with load(tiny, device="cpu") as model, pytest.raises(InputError, match="use a model with a longer context"):
        model.generate("x" * 200)


def test_a_prompt_that_is_not_counted_to_its_end_says_so(tiny: Path) -> None:
    at_least = r"the prompt has at least [\d,]+ tokens, the context holds 128\..* use a model with a longer context"
    with load(tiny, device="cpu") as model, pytest.raises(InputError, match=at_least):
        model.generate("x" * 10_000_000)


def test_a_short_prompt_needs_no_look_at_every_token(tiny: Path) -> None:
    with load(tiny, device="cpu") as model:
        model.generate("xx", max_tokens=1)
        assert "_max_token_bytes" not in vars(model.tokenizer)
        with pytest.raises(InputError, match="the context holds 128"):
            model.generate("x" * 10_000_000)
        assert "_max_token_bytes" in vars(model.tokenizer)


def test_a_wrong_context_is_an_error(tiny: Path) -> None:
    for context in (0, 129, 1.5, True):
        with pytest.raises(InputError, match="context must be a whole number from 1 to the model's 128"):
            load(tiny, device="cpu", context=context)  # type: ignore[arg-type]


def test_test_knobs_are_not_part_of_the_public_load(tiny: Path) -> None:
    assert set(inspect.signature(load).parameters) >= {"model", "device", "context", "progress", "precision", "tune"}
    for name in ("fusions", "cache"):
        assert name not in inspect.signature(load).parameters


@pytest.mark.parametrize(
    "metadata", [{"general.architecture": "klingon"}, {"tokenizer.ggml.pre": "klingon"}, {"tokenizer.ggml.model": "x"}]
)
def test_a_model_that_is_not_supported_is_named(tmp_path: Path, metadata: dict[str, str]) -> None:
    path = write_tiny_llama(tmp_path / "strange.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=r"strange\.gguf"):
        load(path, device="cpu")
    if "general.architecture" not in metadata:
        with pytest.raises(ModelError, match=r"strange\.gguf"):
            shaderlm.Tokenizer.from_file(path)


def test_progress_reaches_the_end(tiny: Path, device: Device) -> None:
    seen: list[tuple[str, int, int]] = []
    for where in ("cpu", device):
        seen.clear()
        load(tiny, device=where, progress=lambda *step: seen.append(step)).close()
        label, done, total = seen[-1]
        assert label == "loading weights"
        assert done == total > 0
        assert [step[1] for step in seen] == sorted(step[1] for step in seen)


# Devices -------------------------------------------------------------------------------------------------


def test_a_named_device_is_never_replaced(tiny: Path) -> None:
    with pytest.raises(DeviceError, match="no adapter matches 'radeon 9999'"):
        load(tiny, device="radeon 9999")


def test_auto_prefers_a_real_gpu_and_says_when_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shaderlm"):
        chosen = choose_device("auto")
    real = [adapter for adapter in adapters() if not adapter.caps.software]
    if real:
        assert chosen is not None
        assert not chosen.caps.software
        assert not caplog.records
    else:
        assert chosen is None
        assert len(caplog.records) == 1
        assert "computing on the CPU" in caplog.text
        assert 'device="' in caplog.text
        assert "--device" not in caplog.text, "there is no flag in Python"


def test_auto_without_any_adapter(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> Any:
        raise DeviceError("the wgpu package cannot be loaded: no such file")

    for fake, words in ((lambda *_: None, "shaderlm devices"), (broken, "no GPU can be used")):
        caplog.clear()
        monkeypatch.setattr("shaderlm.engine.loading.preferred_adapter", fake)
        assert choose_device(None) is None
        assert words in caplog.text


# The tokenizer -------------------------------------------------------------------------------------------


def test_a_tokenizer_from_a_file(tiny: Path) -> None:
    vocabulary_only = Path(__file__).parent / "data" / "vocab" / "gpt-2.gguf"
    for path in (tiny, vocabulary_only, str(vocabulary_only)):
        tokenizer = shaderlm.Tokenizer.from_file(path)
        ids = tokenizer.encode("the owl in the night", add_special=False)
        assert tokenizer.decode(ids) == "the owl in the night"
    with pytest.raises(ModelError, match="does not exist"):
        shaderlm.Tokenizer.from_file("no such file.gguf")
