"""`shaderlm perplexity` against slow and obvious computations, llama-perplexity's formulas among them."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shaderlm
from shaderlm.cli import perplexity as command
from shaderlm.engine import LanguageModel
from shaderlm.evaluate import divergence, logits_file
from shaderlm.evaluate.perplexity import estimate, perplexity, scored_windows
from shaderlm.evaluate.windows import Windows, text_tokens, windows_of

from .command_line import shaderlm as run
from .command_line import start
from .folders import folder_of
from .tiny_models import write_tiny_llama

WINDOW, FIRST = 32, 16
TEXT = " ".join(f"the {i} inn <|im_end|> another of the {i * i} owls" for i in range(40))
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("perplexity")
    write_tiny_llama(made / "tiny.gguf")
    write_tiny_llama(made / "q8.gguf", kind="q8_0")
    write_tiny_llama(made / "bos.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    (made / "text.txt").write_text(TEXT + "\n", encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Iterator[LanguageModel]:
    with shaderlm.load(folder / "tiny.gguf", device="numpy") as made:
        yield made


def tokens_of(model: LanguageModel) -> list[int]:
    return model.tokenizer.encode(TEXT, parse_special=False)


def obvious(model: LanguageModel, chunks: int, bos: int | None = None) -> tuple[F64, F64, NDArray[np.int64]]:
    """Logits of the rows that count, −ln p and the tokens that came, window by window and row by row."""
    tokens, rows, targets = tokens_of(model), list[F64](), list[int]()
    tokens = tokens if bos is None else [bos, *tokens]
    for window in range(chunks):
        ids = tokens[window * WINDOW : (window + 1) * WINDOW]
        if bos is not None:
            ids[0] = bos
        logits = model.logits(ids).astype(np.float64)
        for row in range(FIRST, WINDOW - 1):
            rows.append(logits[row])
            targets.append(ids[row + 1])
    pairs = zip(rows, targets, strict=True)
    nll = [math.log(np.exp(row - row.max()).sum()) + row.max() - row[token] for row, token in pairs]
    return np.array(rows), np.array(nll), np.array(targets)


def by_llama_cpp(nll: F64) -> tuple[float, float]:
    """Its last lines: PPL and +/-."""
    count = len(nll)
    mean, square = nll.sum() / count, (nll * nll).sum() / count
    return math.exp(mean), math.sqrt((square - mean * mean) / (count - 1)) * math.exp(mean)


def perplexity_of(folder: Path, *arguments: object, model: str = "tiny.gguf", text: bool = True) -> Any:
    files = [folder / "text.txt"] if text else []
    done = run("perplexity", "-m", folder / model, *files, *arguments)
    assert done.code == 0, done.err
    return done


# Perplexity ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cpu", "numpy"])
def test_perplexity(folder: Path, oracle: LanguageModel, where: str) -> None:
    chunks = len(tokens_of(oracle)) // WINDOW
    value, error = by_llama_cpp(obvious(oracle, chunks)[1])
    options = ("-c", WINDOW, "--device", where)
    found = json.loads(perplexity_of(folder, *options, "--json").out)
    assert (found["windows"], found["context"], found["tokens"]) == (chunks, WINDOW, chunks * (WINDOW - FIRST - 1))
    assert (found["perplexity"], found["error"]) == pytest.approx((value, error), rel=1e-4)
    done = perplexity_of(folder, *options)
    assert re.fullmatch(r"Final estimate: PPL = \d+\.\d{4} \+/- \d+\.\d{5}\n", done.out)
    assert float(done.out.split()[4]) == pytest.approx(value, rel=1e-4)
    assert f"{chunks} windows of 32 tokens" in done.err


def test_bos_begins_every_window(folder: Path) -> None:
    with shaderlm.load(folder / "bos.gguf", device="numpy") as model:
        bos = model.tokenizer.vocabulary.bos
        assert bos is not None
        windows = windows_of(model, text_tokens(model, TEXT), WINDOW, 3)
        assert windows.tokens[:3] == [bos, *tokens_of(model)[:2]]
        assert windows.ids(2)[:2] == [bos, windows.tokens[2 * WINDOW + 1]]
        expected = obvious(model, 3, bos)[1]
        np.testing.assert_allclose(np.concatenate(list(scored_windows(model, windows))), expected, atol=1e-4)


def test_chunks_and_arguments(folder: Path) -> None:
    options = ("-c", WINDOW, "--chunks", 3, "--device", "cpu", "--json")
    expected = json.loads(perplexity_of(folder, *options).out)
    assert expected["windows"] == 3
    model, text = folder / "tiny.gguf", folder / "text.txt"
    ways = [
        run("perplexity", *each, *options) for each in ((model, text), ("-f", text, model), ("-m", model, "-f", text))
    ]
    for done in (*ways, run("perplexity", model, "-", *options, given=TEXT)):
        # How windows share steps depends on when they come.
        assert json.loads(done.out) == {**expected, **_close(expected, "perplexity", "error")}


def _close(expected: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: pytest.approx(expected[name], rel=1e-6) for name in names}


def test_a_folder_gives_what_its_file_gives(folder: Path, tmp_path: Path) -> None:
    options = ("-c", WINDOW, "--chunks", 3, "--device", "cpu", "--json")
    path = folder_of(folder / "tiny.gguf", tmp_path / "folder")
    expected = json.loads(perplexity_of(folder, *options).out)
    found = json.loads(run("perplexity", path, folder / "text.txt", *options).out)
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
    assert found["tokens"] == expected["tokens"]


def test_an_estimate_of_one_value() -> None:
    assert estimate(np.array([2.0])).error == 0
    assert perplexity(np.array([1e4])).mean < math.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{text}", "-c", "2000"], "context must be a whole number from 1 to the model's 128, got 2000"),
        (["{short}", "-c", "32"], "the text has 5 tokens, and two windows of 32 tokens are the least"),
        (["{model}", "-c", "32"], "must be UTF-8"),
        (["{missing}"], "cannot read"),
        (["a", "b"], "expected a model and a file, got 'a', 'b' beside the options"),
        ([], "Missing argument 'FILE'"),
        (["{text}", "--save-logits", "x", "--kl-against", "y"], "Give either --save-logits or --kl-against"),
        (["{text}", "--save-logits", "/nope/x"], "cannot write /nope/x"),
        (["--kl-against", "{missing}"], "cannot read"),
        (["--kl-against", "{text}"], "has no logits; --save-logits writes such files"),
        (["{text}", "-c", "2"], "2 is not in the range x>=4"),
    ],
)
def test_what_is_refused(folder: Path, arguments: list[str], message: str) -> None:
    (folder / "short.txt").write_text("abcde", encoding="utf-8")
    names = {"text": "text.txt", "short": "short.txt", "model": "tiny.gguf", "missing": "missing.txt"}
    files = {name: str(folder / file) for name, file in names.items()}
    done = run(
        "perplexity", "-m", folder / "tiny.gguf", "--device", "cpu", *(each.format(**files) for each in arguments)
    )
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err


# Files of logits -----------------------------------------------------------------------------------------


def packed_by_llama_cpp(logits: list[float]) -> tuple[float, float, list[int]]:
    """Its loop over a row, in single precision."""
    f = np.float32
    top, low = f(max(logits)), f(min(logits))
    low = max(low, f(top - f(16)))
    total = f(math.log(sum(float(np.exp(f(x) - top)) for x in logits)))
    scale = f((top - low) / f(65535))
    words = [int(np.rint(f(1) / scale * (f(x) - low))) if scale and f(x) > low else 0 for x in logits]
    return float(scale), float(low - top - total), words


@pytest.mark.parametrize("vocabulary", [10, 11])
def test_records_are_those_of_llama_cpp(vocabulary: int) -> None:
    rows = np.random.default_rng(1).normal(0, 8, (5, vocabulary)).astype(np.float32)
    rows[1, 3], rows[2] = -40, 2
    rows[3, 1], rows[4, 2] = -np.inf, np.nan
    packed = logits_file.packed(rows)
    assert packed.shape == (5, 4 + vocabulary + vocabulary % 2)
    for row, words in zip(rows[:4], packed, strict=False):
        scale, low, expected = packed_by_llama_cpp([max(-1e9, float(x)) for x in row])
        assert struct.unpack("<ff", words[:4].tobytes()) == pytest.approx((scale, low), rel=1e-6)
        assert np.abs(words[4 : 4 + vocabulary].astype(int) - expected).max() <= 1
    found = logits_file.unpacked(packed, vocabulary)
    known = divergence.log_softmax(rows)
    near = known > known.max(1, keepdims=True) - 16
    np.testing.assert_allclose(found[near], known[near], atol=3e-4)
    assert found[4, 2] == found[4].min()


def test_a_file_of_logits(folder: Path, oracle: LanguageModel) -> None:
    """Read by hand: the head, the tokens and the records are where llama.cpp has them."""
    path = folder / "base.logits"
    options = ("-c", WINDOW, "--chunks", 3, "--device", "cpu", "--json")
    saved = json.loads(perplexity_of(folder, *options, "--save-logits", path).out)
    plain = json.loads(perplexity_of(folder, *options).out)
    assert saved["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-5)
    raw, vocabulary = path.read_bytes(), oracle.config.vocabulary
    assert raw[:8] == b"_logits_"
    assert struct.unpack("<iii", raw[8:20]) == (WINDOW, vocabulary, 3)
    tokens = tokens_of(oracle)[: 3 * WINDOW]
    assert list(struct.unpack(f"<{len(tokens)}i", raw[20 : 20 + 4 * len(tokens)])) == tokens
    rows, _, _ = obvious(oracle, 3)
    words = np.frombuffer(raw[20 + 4 * len(tokens) :], "<u2").reshape(len(rows), -1)
    assert words.shape[1] == 4 + vocabulary + 1, "one more where the vocabulary is odd"
    np.testing.assert_allclose(
        logits_file.unpacked(words, vocabulary), divergence.log_softmax(rows.astype(np.float32)), atol=1e-3
    )
    (folder / "cut.logits").write_bytes(raw[:-2])
    done = run("perplexity", "-m", folder / "tiny.gguf", "--kl-against", folder / "cut.logits", "--device", "cpu")
    assert (done.code, "is cut: 3 windows of 32 tokens" in done.err) == (2, True)


def test_nothing_is_left_of_a_file_that_is_not_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(logits_file.LogitsWriter, "write", full)
    before = set(folder.iterdir())
    arguments = (folder / "tiny.gguf", folder / "text.txt", "-c", WINDOW, "--device", "cpu")
    done = run("perplexity", *arguments, "--save-logits", folder / "full.logits")
    assert (done.code, done.out) == (1, "")
    assert done.err.strip().splitlines() == [f"shaderlm: cannot write the output: {os.strerror(28)}"]
    assert set(folder.iterdir()) == before


# KL divergence -------------------------------------------------------------------------------------------


def test_kl_divergence(folder: Path) -> None:
    path = folder / "kl.logits"
    perplexity_of(folder, "-c", WINDOW, "--chunks", 4, "--device", "cpu", "--save-logits", path)
    found = json.loads(perplexity_of(folder, "--kl-against", path, "--device", "cpu", "--json", model="q8.gguf").out)
    with (
        shaderlm.load(folder / "tiny.gguf", device="numpy") as base,
        shaderlm.load(folder / "q8.gguf", device="numpy") as model,
    ):
        (p, nll_base, _), (q, nll, _) = obvious(base, 4), obvious(model, 4)
    ln_p, ln_q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (p, q))
    kld = (np.exp(ln_p) * (ln_p - ln_q)).sum(1)
    delta = np.exp(-nll) - np.exp(-nll_base)
    count = len(kld)
    assert found["kld"]["count"] == count == 4 * (WINDOW - FIRST - 1)
    close: Any = {"rel": 2e-2, "abs": 2e-5}
    assert found["kld"]["mean"] == pytest.approx(kld.mean(), **close)
    assert found["kld"]["error"] == pytest.approx(kld.std() / math.sqrt(count - 1), **close)
    assert found["kld_extremes"] == pytest.approx([kld.min(), kld.max()], **close)
    for percent, value in found["kld_percentiles"].items():
        assert value == pytest.approx(np.percentile(kld, float(percent)), **close)
    assert found["delta"]["mean"] == pytest.approx(delta.mean(), **close)
    assert found["delta_rms"]["mean"] == pytest.approx(math.sqrt((delta**2).mean()), **close)
    assert found["same_top"]["mean"] == pytest.approx((p.argmax(1) == q.argmax(1)).mean(), abs=0.02)
    ratio = nll.mean() - nll_base.mean()
    assert found["log_ratio"]["mean"] == pytest.approx(ratio, abs=1e-4)
    assert found["log_ratio"]["error"] == pytest.approx((nll - nll_base).std() / math.sqrt(count - 1), rel=1e-2)
    between = math.exp(nll.mean()) - math.exp(nll_base.mean())
    assert found["difference"]["mean"] == pytest.approx(between, abs=1e-4 * math.exp(nll.mean()))
    assert found["correlation"] == pytest.approx(np.corrcoef(nll, nll_base)[0, 1], rel=1e-3)


def test_a_model_against_itself(folder: Path) -> None:
    path = folder / "self.logits"
    perplexity_of(folder, "-c", WINDOW, "--chunks", 4, "--device", "cpu", "--save-logits", path)
    lines = perplexity_of(folder, "--kl-against", path, "--device", "cpu").out.splitlines()
    assert "Median  KLD:   0.000000" in lines
    assert "Same top p: 100.000 ± 0.000 %" in lines
    assert any(line.startswith("Mean PPL(Q)-PPL(base)") for line in lines)
    few = perplexity_of(folder, "--kl-against", path, "--device", "cpu", "--chunks", 1, "--json", text=False).out
    assert json.loads(few)["windows"] == 1
    options = ("--kl-against", path, "--device", "cpu", "--chunks", 1, "--json")
    assert run("perplexity", folder / "tiny.gguf", *options).out == few
    assert run("perplexity", folder / "tiny.gguf", folder / "text.txt", *options).out == few


def test_a_base_that_does_not_fit(folder: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "base.logits", tmp_path / "other.txt"
    perplexity_of(folder, "-c", WINDOW, "--chunks", 2, "--device", "cpu", "--save-logits", path)
    raw = path.read_bytes()
    (tmp_path / "wide.logits").write_bytes(raw[:12] + struct.pack("<i", 100) + raw[16:])
    other.write_text(TEXT.replace("another", "one more"), encoding="utf-8")
    cases = [
        ((folder / "text.txt", "--kl-against", path, "-c", 64), "has windows of 32 tokens; --context 64"),
        ((other, "--kl-against", path), "this is not the text of"),
        (("--kl-against", tmp_path / "wide.logits"), "has a vocabulary of 100 tokens, the model one of 267"),
    ]
    for arguments, message in cases:
        done = run("perplexity", "-m", folder / "tiny.gguf", "--device", "cpu", *arguments)
        assert (done.code, done.out) == (2, "")
        assert message in done.err


# Ctrl-C --------------------------------------------------------------------------------------------------


def test_an_interrupted_run_says_how_far_it_came(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    came, update = list[int](), command._lines_now_and_then

    def interrupting(total: int) -> Any:
        say = update(total)

        def progress(done: int, found: Any) -> None:
            say(done, found)
            came.append(done)
            if done == 2:
                raise KeyboardInterrupt

        return progress

    monkeypatch.setattr(command, "_lines_now_and_then", interrupting)
    for more in ((), ("--save-logits", folder / "interrupted.logits")):
        done = run("perplexity", folder / "tiny.gguf", folder / "text.txt", "-c", WINDOW, "--device", "cpu", *more)
        assert (done.code, done.out) == (130, "")
        assert re.fullmatch(r"interrupted after 2 of \d+ windows; PPL = [\d.]+ \+/- [\d.]+ so far\n", done.err)
    assert came == [1, 2, 1, 2]
    assert not (folder / "interrupted.logits").exists()
    assert not list(folder.glob(".interrupted*"))


def test_ctrl_c(folder: Path, tmp_path: Path) -> None:
    """In a process of its own, in the middle of a long text: soon over, and nothing but a line."""
    text, path = tmp_path / "long.txt", tmp_path / "logits"
    text.write_text(TEXT * 40, encoding="utf-8")
    arguments = (folder / "tiny.gguf", text, "-c", 128, "--device", "cpu", "--save-logits", path)
    child = start("perplexity", *arguments)
    try:
        while not _bytes_in(tmp_path, ".logits*"):  # until it reads windows; an empty file only tries the folder
            assert child.poll() is None
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (child.returncode, out) == (130, "")
    assert err.startswith("interrupted after ")
    assert "Traceback" not in err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["long.txt"]


def _bytes_in(folder: Path, pattern: str) -> int:
    try:
        return sum(each.stat().st_size for each in folder.glob(pattern))
    except FileNotFoundError:  # it was there a moment ago
        return 0


def test_windows() -> None:
    windows = Windows(list(range(20)), 9, 100)
    assert (len(windows), windows.first_row, windows.counted) == (2, 4, 4)
    assert windows.ids(1) == [100, *range(10, 18)]
    assert list(windows.targets(1)) == [14, 15, 16, 17]
