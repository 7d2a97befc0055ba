"""`shaderlm generate` as a person meets it: text that streams, numbers in JSON, one line for every mistake."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import click
import pytest

import shaderlm as package
from shaderlm.cli import streaming
from shaderlm.cli.generate import generate as generate_command
from shaderlm.cli.loading import LONG_PROMPT, _bar
from shaderlm.cli.sampler_options import default_sampling_options
from shaderlm.engine import Stream, loading
from shaderlm.engine.sampling import SamplingParams
from shaderlm.runtime.numpy_runner import NumpyRunner
from shaderlm.runtime.runner import SequenceChunk
from shaderlm.server.generation import SAMPLER_FIELDS

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


# Text --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("seconds", "states"), [(0.0, 13), (1000.0, 2)])
def test_text_is_flushed_as_it_comes_but_not_too_often(
    tiny: Path, seconds: float, states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 tokens and the newline; where the interval is long, the first token, and all at the end."""
    monkeypatch.setattr("shaderlm.cli.streaming.FLUSH_SECONDS", seconds)
    out = Recorder()
    generate(tiny, "Hello", "-n", 12, out=out)
    assert len(set(out.flushed) - {""}) == states
    assert all(later.startswith(earlier) for earlier, later in zip(out.flushed, out.flushed[1:], strict=False))


def test_a_pause_does_not_hold_text_back_for_long() -> None:
    assert 0 < streaming.FLUSH_SECONDS <= 0.02


@pytest.mark.parametrize("terminal", [True, False])
def test_a_text_does_not_command_the_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\x1b]0;title\x07b\tc\r\nd\x9b2Je é"

    class Text(contextlib.nullcontext[None], Iterator[str]):
        prompt_progress, deltas = (0, 0), iter([text])

        def __next__(self) -> str:
            return next(self.deltas)

    out = Recorder()
    monkeypatch.setattr(out, "isatty", lambda: terminal, raising=False)
    with contextlib.redirect_stdout(out):
        found, _ = streaming.write_stream(cast("Stream", Text()))
    assert found == text
    shown = "a\ufffd]0;title\ufffdb\tc\r\nd\ufffd2Je é" if terminal else text
    assert out.text() == shown + "\n"


def test_dash_reads_standard_input(tiny: Path) -> None:
    expected = generate(tiny, "two\nlines", "-n", 8)
    assert generate(tiny, "-n", 8, given="two\nlines\n") == expected, "a pipe needs no dash"
    assert generate(tiny, "-", "-n", 8, given="two\nlines\n") == expected
    assert generate(tiny, "-", "-n", 8, given="two\nlines") == expected
    wrong = generate(tiny, "-", given=b"ab\xff")
    assert (wrong.code, wrong.err) == (2, "shaderlm: standard input must be UTF-8, byte 2 is not\n")
    assert "the prompt is empty" in generate(tiny, "-", given="\n").err


def test_a_file_is_a_prompt_or_follows_one(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"two\nlines\n")
    expected = generate(tiny, "two\nlines", "-n", 8)
    assert generate(tiny, "-f", path, "-n", 8) == expected
    assert generate(tiny, "-f", "-", "-n", 8, given="two\nlines\n") == expected
    assert generate(tiny, "Count:", "--file", path, "-n", 8) == generate(tiny, "Count:\n\ntwo\nlines", "-n", 8)
    path.write_bytes(b"ab\xff")
    assert generate(tiny, "-f", path).err == f"shaderlm: {path} must be UTF-8, byte 2 is not\n"
    path.write_bytes(b"\n")
    assert "the prompt is empty" in generate(tiny, "-f", path).err


def test_jsonl_is_a_line_per_delta_as_it_comes_and_then_all_of_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shaderlm.cli.streaming.FLUSH_SECONDS", 0.0)
    out = Recorder()
    done = generate(tiny, "Hello", "-n", 6, "--jsonl", "--logprobs", 1, out=out)
    assert (done.code, done.err) == (0, "")
    *deltas, last = map(json.loads, done.out.splitlines())
    assert len(deltas) == 6
    assert all(list(delta) == ["delta"] for delta in deltas)
    assert all(flushed.endswith("\n") for flushed in out.flushed if flushed), "no line is flushed in part"
    assert len(set(out.flushed) - {""}) >= 7
    expected = json.loads(generate(tiny, "Hello", "-n", 6, "--json", "--logprobs", 1).out)
    timed = {"seconds_to_first_token", "tokens_per_second"}
    assert {key: value for key, value in last.items() if key not in timed} == {
        key: value for key, value in expected.items() if key not in timed
    }
    assert "".join(delta["delta"] for delta in deltas) == last["text"]


def test_json_is_one_object_with_every_number(tiny: Path) -> None:
    done = generate(tiny, "Hello", "-n", 6, "--json", "--logprobs", 2)
    found = json.loads(done.out)
    with package.load(tiny, device="cpu") as model:
        expected = model.chat([{"role": "user", "content": "Hello"}], max_tokens=6)
    assert (found["text"], found["ids"], found["finish_reason"]) == (str(expected), expected.ids, "length")
    assert (found["model"], found["device"]) == ("tiny", "cpu (LLVM)")
    assert (found["prompt_tokens"], found["completion_tokens"]) == (len(expected.prompt_ids), 6)
    assert found["seconds_to_first_token"] > 0
    assert found["tokens_per_second"] > 0
    assert [entry["id"] for entry in found["logprobs"]] == expected.ids
    for entry in found["logprobs"]:
        assert entry["top"][0]["id"] == entry["id"], "greedy takes the likeliest"
        assert entry["top"][0]["logprob"] == entry["logprob"] >= entry["top"][1]["logprob"]
    assert json.loads(generate(tiny, "Hello", "-n", 2, "--json").out)["logprobs"] is None


def test_logprobs_without_json_are_lines_on_stderr(tiny: Path) -> None:
    done = generate(tiny, "Hello", "-n", 3, "--logprobs", 3)
    assert done.out == greedy(tiny, "Hello", max_tokens=3) + "\n"
    assert len(done.err.splitlines()) == 3
    for line in done.err.splitlines():
        tokens = [entry.split(maxsplit=1)[1] for entry in line.split(" | ")]
        assert len(tokens) == len(set(tokens)) == 3, "the sampled token is one of the three, and printed once"


def test_a_cut_is_told_to_a_person_and_not_to_a_pipe(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = "output cut after 4 tokens; --max-tokens (-n) allows more\n"
    assert generate(tiny, "Hello", "-n", 4).err == ""
    assert cut in generate(tiny, "Hello", "-n", 4, "--verbose").err
    monkeypatch.setattr(Recorder, "isatty", lambda self: True)
    assert generate(tiny, "Hello", "-n", 4).err == cut
    assert generate(tiny, "Hello", "-n", 4, "--json").err == ""
    assert generate(tiny, "x", "-n", 4, "--logit-bias", f"{EOS}=100").err == "", "it ended by itself"
    full = generate(tiny, "Hello", "-n", 400).err
    assert full == "output cut: the context of 128 tokens is full\n"


def test_special_tokens_in_the_prompt(tiny: Path) -> None:
    def prompt_tokens(*more: object) -> int:
        return int(json.loads(generate(tiny, "<|im_end|>", "-n", 1, "--json", *more).out)["prompt_tokens"])

    for raw in ((), ("--raw",)):
        assert prompt_tokens(*raw, "--parse-special") + 9 == prompt_tokens(*raw, "--no-parse-special")
    assert prompt_tokens() == prompt_tokens("--no-parse-special"), "text of a user is text"
    assert prompt_tokens("--raw") == prompt_tokens("--raw", "--parse-special")


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


def test_samplers(tiny: Path) -> None:
    """Each option is that of `LanguageModel.generate`, with its default; a breaker may be written as in JSON."""
    given = {option.name: option.default for option in generate_command.params}
    names = [*SAMPLER_FIELDS, "dry_sequence_breakers"]
    assert {name: given[name] for name in names} == {name: getattr(SamplingParams(), name) for name in names}
    common = ("Hello", "-n", 12, "--seed", 1, "-t", 1.5, "--raw", "--ignore-eos")
    dry = ("--dry-multiplier", 3, "--dry-allowed-length", 1, "--dry-penalty-last-n", -1)
    cases: list[tuple[tuple[object, ...], dict[str, Any]]] = [
        (
            (*dry, "--dry-sequence-breaker", "\\n", "--dry-sequence-breaker", "e"),
            {"dry_sequence_breakers": ["\n", "e"]},
        ),
        ((*dry, "--dry-sequence-breaker", "none"), {"dry_sequence_breakers": []}),
        (("--xtc-probability", 1, "--xtc-threshold", 0.01), {"xtc_probability": 1, "xtc_threshold": 0.01}),
        (("--typical", 0.3, "--dynatemp-exp", 2), {"typical_p": 0.3, "dynatemp_exponent": 2}),
        (("--mirostat", 2, "--mirostat-ent", 2, "--mirostat-lr", 0.5), {"mirostat": 2, "mirostat_tau": 2.0}),
        (("--samplers", "top_k;temperature", "--top-p", 0.1), {"samplers": ["top_k", "temperature"]}),
    ]
    with package.load(tiny, device="cpu") as model:
        for arguments, options in cases:
            if "dry_sequence_breakers" in options:
                options |= {"dry_multiplier": 3, "dry_allowed_length": 1, "dry_penalty_last_n": -1}
            if "mirostat" in options:
                options |= {"mirostat_eta": 0.5}
            expected = model.generate("Hello", max_tokens=12, seed=1, temperature=1.5, ignore_eos=True, **options)
            assert generate(tiny, *common, *arguments).out == f"{expected}\n", arguments


def test_what_serve_takes_as_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what somebody said, here or in the environment: all else is the model's or the API's own."""
    said: list[dict[str, Any]] = []

    @click.command(context_settings={"auto_envvar_prefix": "PROBE"})
    @default_sampling_options
    def probe(sampling: dict[str, Any]) -> None:
        said.append(sampling)

    monkeypatch.setenv("PROBE_TOP_P", "0.5")
    arguments = ["--temp", "0.7", "--dry-multiplier", "0.8", "--dry-sequence-breaker", "none", "--samplers", "kt"]
    for given in ([], arguments):
        probe.main(given, standalone_mode=False)
    assert said[0] == {"top_p": 0.5}
    expected = {"temperature": 0.7, "dry_multiplier": 0.8, "dry_sequence_breakers": [], "samplers": "kt"}
    assert said[1] == {"top_p": 0.5, **expected}


def test_a_model_with_sampling_values_of_its_own(tmp_path: Path) -> None:
    """They hold in `generate` and `chat`, unless the command line says otherwise."""
    own = {"general.sampling.temp": 2.0, "general.sampling.top_k": 30}
    model = write_tiny_llama(tmp_path / "tiny.gguf", metadata=own)
    usual = generate(model, "Hello", "-n", 12, "--seed", 1)
    assert usual == generate(model, "Hello", "-n", 12, "--seed", 1, "-t", 2, "--top-k", 30)
    assert usual != generate(model, "Hello", "-n", 12, "--seed", 1, "-t", 0)
    for command in (("chat", "-m", model), ("run", model)):
        settings = shaderlm(*command, "--device", "cpu", "--top-k", 9, given="/set\n").err
        assert re.search(r"temperature +2\.0\ntop_k +9\ntop_p +0\.95\n", settings)


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
    for words in (
        'model    tiny (llama, 78.8 K parameters; its file says "Tiny Llama")',
        "cpu (LLVM)",
        "to the first token",
        "tok/s",
        "finish reason: length",
    ):
        assert words in done.err
    assert "drafts" not in done.err
    drafting = generate(tiny, "Hello", "-n", 4, "--verbose", "--draft", "ngram")
    assert re.search(r"^drafts   \d+ tokens, \d+ accepted$", drafting.err, re.M)


def test_auto_says_that_it_computes_on_the_cpu(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shaderlm.engine.loading.preferred_adapter", lambda *_: None)
    done = shaderlm("generate", "Hello", "-m", tiny, "-n", 4)
    assert done.out == greedy(tiny, "Hello", max_tokens=4) + "\n"
    assert done.err.startswith("shaderlm: no GPU was found; computing on the CPU")
    assert done.err.count("\n") == 1


def test_a_bar_on_the_terminal_where_loading_takes_long(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None in a pipe, none where it is quick, and nothing of it on stdout."""
    expected = greedy(tiny, "Hello", max_tokens=4) + "\n"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("shaderlm.cli.loading.DELAY_SECONDS", 0.05)

    def shown_if_slow(name: str) -> str:
        function = getattr(loading, name)

        def slow(*given: Any, **options: Any) -> Any:
            found = function(*given, **options)
            time.sleep(0.4)
            return found

        with monkeypatch.context() as patched:
            patched.setattr(loading, name, slow)
            return shown()

    def shown() -> str:
        done = generate(tiny, "Hello", "-n", 4)
        assert done.out == expected
        return done.err

    assert shown_if_slow("find") == "", "a pipe"
    monkeypatch.setattr(Recorder, "isatty", lambda self: True)
    assert "loading" in shown_if_slow("find")
    assert "loading weights" in shown_if_slow("cpu_runner")
    monkeypatch.setattr("shaderlm.cli.loading.DELAY_SECONDS", 1000.0)
    assert shown() == "output cut after 4 tokens; --max-tokens (-n) allows more\n"


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_line_on_the_terminal_where_the_prompt_takes_long(
    tiny: Path, form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None in a pipe and none where it is quick. It is gone before the text comes, and stdout has nothing of it."""
    step, asked = NumpyRunner.step, "generating …" if form else "reading the prompt …"

    def slow(self: NumpyRunner, parts: list[SequenceChunk]) -> Any:
        if parts[0].ids is not None:  # the prompt
            time.sleep(0.4)
        return step(self, parts)

    def shown() -> str:
        done = generate(tiny, "Hello", "-n", 4, *form)
        expected = greedy(tiny, "Hello", max_tokens=4)
        assert (json.loads(done.out)["text"] if form else done.out.removesuffix("\n")) == expected
        return done.err

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("shaderlm.cli.loading.DELAY_SECONDS", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(NumpyRunner, "step", slow)
        assert shown() == "", "a pipe"
    monkeypatch.setattr(Recorder, "isatty", lambda self: True)
    with monkeypatch.context() as patched:
        patched.setattr(NumpyRunner, "step", slow)
        said = shown()
        assert asked in said
        assert " tokens, " not in said, "no bar for a short prompt"
        if not form:
            patched.setattr("shaderlm.cli.loading.LONG_PROMPT", 0)
            assert re.search(r"reading the prompt … [━─]{8} \d+ of \d+ tokens, \d s", shown())
    monkeypatch.setattr("shaderlm.cli.loading.DELAY_SECONDS", 1000.0)
    assert "…" not in shown()


def test_the_bar_of_a_long_prompt_fills() -> None:
    assert _bar(None) == _bar(lambda: (9, LONG_PROMPT)) == ""
    assert _bar(lambda: (4096, 8192)) == "━━━━──── 4,096 of 8,192 tokens, "
    assert _bar(lambda: (8192, 8192)).count("━") == 8


def test_a_bar_waits_for_a_second() -> None:
    from shaderlm.cli.loading import DELAY_SECONDS

    assert DELAY_SECONDS == 1.0


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
    assert err == "cancelled: the text ends here and is not complete\n"


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_ctrl_c_before_the_first_text_says_so(
    tiny: Path, form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(NumpyRunner, "step", interrupted)
    assert generate(tiny, "x", *form) == Done(130, "", "cancelled: there is no text yet\n")


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
    assert (done.code, done.err) == (1, "shaderlm: cannot write the output: No space left on device\n")
