"""`shaderlm chat`, scripted through a pipe and at a terminal of its own."""

from __future__ import annotations

import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import shaderlm as package
from shaderlm.cli import chat as command
from shaderlm.cli import history
from shaderlm.cli.conversation import ChatSession
from shaderlm.errors import InputError
from shaderlm.runtime.numpy_runner import NumpyRunner
from shaderlm.runtime.runner import SequenceChunk

from .command_line import COMMAND, Done, Recorder, shaderlm, start
from .tiny_models import write_tiny_llama

NAMES = ["/regenerate", "/image", "/undo", "/reset", "/system", "/set", "/save", "/save!", "/load", "/help", "/quit"]
posix = pytest.mark.skipif(os.name == "nt", reason="POSIX signals and terminals")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("slow") / "slow.gguf", layers=8, context=1 << 20)


@pytest.fixture(autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the history of a test is kept."""
    path = tmp_path_factory.mktemp("state") / "below"
    monkeypatch.setenv("SHADERLM_STATE", str(path))
    return path


def chat(model: Path, lines: str, *arguments: object) -> Done:
    return shaderlm("chat", "-m", model, "--device", "cpu", "-n", 6, "-t", 0, *arguments, given=lines)


def saved(path: Path) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def conversation(model: Path, *said: str, system: str | None = None, max_tokens: int = 6) -> list[dict[str, str]]:
    """What Python makes of the same messages."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    with package.load(model, device="cpu") as loaded:
        for text in said:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": str(loaded.chat(messages, max_tokens=max_tokens))})
    return messages


def test_run_is_chat_or_generate(tiny: Path) -> None:
    """The same with the model named first. `/set` shows the same settings."""
    options: tuple[object, ...] = ("--device", "cpu", "-n", 6, "-t", 0, "--top-p", 1)
    lines = "Hello\nAnd you?\n/set\n"
    assert shaderlm("run", tiny, *options, given=lines) == chat(tiny, lines, "--top-p", 1)
    done = shaderlm("run", tiny, "Hello", *options, "--system", "Be brief")
    assert done == shaderlm("generate", "Hello", "-m", tiny, *options, "--system", "Be brief")
    assert done.code == 0
    assert done.out.strip()
    assert shaderlm("run", tiny, "-", *options, given="Hello").out == shaderlm("run", tiny, "Hello", *options).out
    assert "Missing argument 'NAME'" in shaderlm("run").err


def test_answers_come_line_by_line_and_the_history_is_kept(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    done = chat(tiny, f"Hello\n\n  \nAnd you?\n/save {path}\n", "--system", "Be brief")
    expected = conversation(tiny, "Hello", "And you?", system="Be brief")
    assert done.code == 0
    assert done.out == f"{expected[2]['content']}\n{expected[4]['content']}\n"
    assert saved(path) == expected
    assert f"saved 5 messages to {path}" in done.err
    assert ">" not in done.err, "no prompts in a pipe"


def test_text_is_flushed_as_it_comes(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shaderlm.cli.streaming.FLUSH_SECONDS", 0.0)
    out = Recorder()
    shaderlm("chat", "-m", tiny, "--device", "cpu", "-n", 8, "-t", 0, given="Hello\n", out=out)
    assert len(set(out.flushed)) >= 8


def test_reset_forgets_all_but_the_system_message(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    chat(tiny, f"Hello\n/reset\nAgain\n/save {path}\n", "--system", "Be brief")
    assert saved(path) == conversation(tiny, "Again", system="Be brief")


def test_quit_ends_and_help_lists_every_command(tiny: Path) -> None:
    done = chat(tiny, "/help\n/quit\nHello\n")
    assert (done.code, done.out) == (0, "")
    assert [line.split()[0] for line in done.err.splitlines() if line.startswith("/")] == NAMES


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/rest", "/rest is not a command; did you mean /reset?"),
        ("/Quit", "did you mean /quit?"),
        ("/zzz", f"the commands are {', '.join(NAMES)}"),
        ("/", "the commands are /regenerate"),
        ("/regenerate", "there is no message to answer yet"),
        ("/undo", "there is no message to undo"),
        ("/load", "/load needs the name of a file"),
        ("/system", "there is no system message; /system TEXT sets one"),
        ("/save", "/save needs the name of a file"),
        ("/save!", "/save! needs the name of a file"),
    ],
)
def test_a_wrong_command_says_so_and_the_chat_goes_on(tiny: Path, line: str, words: str) -> None:
    done = chat(tiny, f"{line}\nHello\n")
    assert words in done.err
    assert done.out == conversation(tiny, "Hello")[1]["content"] + "\n"


def test_commands_have_the_names_of_other_programs_too(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    done = chat(tiny, f"Hello\n/clear\nAgain\n/save {path}\n/?\n/bye\nHello\n")
    assert saved(path) == conversation(tiny, "Again")
    assert "/quit              end the chat" in done.err
    assert len(done.out.splitlines()) == 2
    assert chat(tiny, "/exit\nHello\n").out == ""


def test_a_message_may_begin_with_a_slash(tiny: Path) -> None:
    assert chat(tiny, " /reset\n").out == conversation(tiny, " /reset")[1]["content"] + "\n"


def test_a_bad_path_is_one_line_and_nothing_is_left_behind(tiny: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    lines = f"/save {tmp_path}/none/file.json\n/save {kept}\n/save ~nobody-of-that-name/x\n/save a\0b\n"
    done = chat(tiny, f"{lines}Hello\n")
    assert (done.code, done.err.count("cannot be written: ")) == (0, 4)
    assert len(done.err.splitlines()) == 5, "and one that the answer was cut"
    assert done.out
    assert sorted(tmp_path.rglob("*")) == [kept]


def test_saving_replaces_a_file_as_a_whole(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "talk.json"
    path.write_text("before", encoding="utf-8")

    def refused(*_: object) -> None:
        raise OSError("no")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refused)
        assert "cannot be written: no" in chat(tiny, f"Hello\n/save! {path}\n").err
    assert path.read_text(encoding="utf-8") == "before"
    assert f"{path} exists; /save! {path} overwrites it" in chat(tiny, f"Hello\n/save {path}\n").err
    assert path.read_text(encoding="utf-8") == "before"
    chat(tiny, f"Hello\n/save! {path}\n")
    assert saved(path) == conversation(tiny, "Hello")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('"""\none\n\ntwo\n"""\n', "one\n\ntwo"),
        ('"""one\n  two  \nthree"""\n', "one\n  two  \nthree"),
        ('"""/reset"""\n', "/reset"),
        ('"""  \n/quit\n"""  \n', "  \n/quit"),
        ('"""one\ntwo', "one\ntwo"),
        ('""""""\n"""\n\n"""\none\n', "one"),
    ],
)
def test_three_quotes_begin_a_message_of_several_lines(tiny: Path, tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "talk.json"
    ended = lines.endswith("\n")
    done = chat(tiny, lines + (f"/save {path}\n" if ended else ""))
    expected = conversation(tiny, message)
    assert done.out == expected[1]["content"] + "\n"
    assert not ended or saved(path) == expected


# Commands that change the conversation ----------------------------------------------------------------------


def test_undo_forgets_the_last_turn(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    done = chat(tiny, f"Hello\nWrong\n/undo\nAgain\n/save {path}\n/undo\n/undo\n/undo\n")
    assert saved(path) == conversation(tiny, "Hello", "Again")
    assert [line for line in done.err.splitlines() if "are gone" in line or "to undo" in line] == [
        "your last message and its answer are gone; 1 turn left",
        "your last message and its answer are gone; 1 turn left",
        "your last message and its answer are gone; 0 turns left",
        "there is no message to undo",
    ]


def test_regenerate_replaces_the_last_answer(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    lines = f"Hello\n/regenerate\n/regenerate\nAnd you?\n/save! {path}\n"
    done = chat(tiny, lines, "-t", 2, "--seed", 5)
    answers = done.out.splitlines()
    assert len(set(answers[:3])) == 3, "the seed is fixed, the answers differ"
    assert [message["content"] for message in saved(path)] == ["Hello", answers[2], "And you?", answers[3]]
    assert chat(tiny, lines, "-t", 2, "--seed", 5).out == done.out
    greedy = chat(tiny, "Hello\n/regenerate\n")
    first, second = greedy.out.splitlines()
    assert first == second
    assert "temperature is 0, so the same text comes again; /set temperature 0.7 changes that\n" in greedy.err


def test_ctrl_c_before_another_answer_leaves_the_first(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = tmp_path / "talk.json", conversation(tiny, "Hello")
    interrupt_prompt(2, monkeypatch)
    done = chat(tiny, f"Hello\n/regenerate\n/save {path}\n")
    assert "cancelled: there is no other answer yet; the conversation is as it was\n" in done.err
    assert saved(path) == expected


def test_system_shows_changes_and_removes_the_system_message(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    done = chat(tiny, f"/system Be brief\nHello\n/system\n/save {path}\n")
    assert saved(path) == conversation(tiny, "Hello", system="Be brief")
    assert 'Be brief\n(/system TEXT changes it, /system "" removes it)\n' in done.err
    done = chat(tiny, f'/system """two\nlines"""\nHello\n/save! {path}\n/system ""\n/save! {path}\n')
    assert saved(path) == conversation(tiny, "Hello", system="two\nlines")[1:]
    assert "there is no system message from here on\n" in done.err


def test_a_system_message_that_the_template_refuses_is_not_taken(tmp_path: Path) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    model = write_tiny_llama(tmp_path / "strict.gguf", metadata={"tokenizer.chat_template": template})
    done = chat(model, "/system Be brief\nHello\n")
    assert "refuses this conversation: no system message" in done.err
    assert done.out == conversation(model, "Hello")[1]["content"] + "\n"


def test_load_continues_what_save_wrote(tiny: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    chat(tiny, f"Hello\n/save {first}\n", "--system", "Be brief")
    done = chat(tiny, f"Other\n/load {first}\nAnd you?\n/save {second}\n", "--system", "Never mind")
    assert saved(second) == conversation(tiny, "Hello", "And you?", system="Be brief")
    assert "loaded 3 messages\n" in done.err
    first.write_text('[{"role": "user", "content": "Hello"}]', encoding="utf-8")
    done = chat(tiny, f"/load {first}\n/regenerate\n/save! {second}\n")
    assert "loaded 1 message; the last one has no answer, /regenerate makes one\n" in done.err
    assert saved(second) == conversation(tiny, "Hello")
    first.write_text("[]", encoding="utf-8")
    assert chat(tiny, f"/load {first}\nHello\n", "--system", "Be").out == done.out, "its system message, too"


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is not a file that /save wrote; it is not JSON: Expecting property name"),
        ('{"role": "user"}', "must have a list of messages, as /save writes it; it has dict"),
        ('["Hello"]', "chat: message 0 must have a role of system, user, assistant, tool; got 'str'"),
        ('[{"role": "user", "content": 5}]', "chat: message 0 must have a content that is a str, got 5"),
        ("[" * 100_000, "cannot be read: "),
    ],
)
def test_a_file_that_cannot_be_loaded_leaves_the_conversation(
    tiny: Path, tmp_path: Path, contents: str | None, words: str
) -> None:
    path, result = tmp_path / "talk.json", tmp_path / "result.json"
    if contents is not None:
        path.write_text(contents, encoding="utf-8")
    done = chat(tiny, f"Hello\n/load {path}\n/save {result}\n")
    assert words in done.err
    assert saved(result) == conversation(tiny, "Hello")


# Settings -------------------------------------------------------------------------------------------------


def test_set_changes_what_the_next_answer_is_made_with(tiny: Path) -> None:
    lines = "/set max-tokens 3\n/set seed=7\n/set temperature 1.5\nHello\n"
    expected = chat(tiny, "Hello\n", "-n", 3, "--seed", 7, "-t", 1.5)
    done = chat(tiny, lines)
    assert done.out == expected.out
    assert done.err.splitlines()[:3] == ["max_tokens 3", "seed 7", "temperature 1.5"]
    assert chat(tiny, "/set seed 7\n/set seed none\n/set seed\n").err.splitlines()[1:] == ["seed none"] * 2


def test_set_shows_all_settings(tiny: Path) -> None:
    lines = chat(tiny, "/set\n", "--stop", "a", "--stop", "b\n").err.splitlines()
    found = dict(line.split(maxsplit=1) for line in lines)
    assert found["max_tokens"] == "6"
    assert found["stop"] == '["a", "b\\n"]'
    assert (found["seed"], found["ignore_eos"], found["parse_special"], found["verbose"]) == (
        "none",
        "off",
        "off",
        "off",
    )
    changed = "".join(f"/set {name} {value}\n" for name, value in found.items())
    assert chat(tiny, changed + "/set\n").err.splitlines()[len(found) :] == lines, "what is shown can be given"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("temperature warm", "temperature must be 0 (greedy) or a positive number, at most 1e6, got 'warm'"),
        ("max_tokens 0", "max_tokens must be a whole number of at least 1, got 0"),
        ("max_tokens none", "max_tokens must be a whole number of at least 1, got None"),
        ("ignore_eos 1", "ignore_eos must be True or False, got 1"),
        ("temprature 1", "temprature is not a setting; did you mean temperature?"),
        ("zzz 1", "zzz is not a setting; the settings are max_tokens, "),
        ("logit_bias 1", "logit_bias is not a setting"),
        ("verbose 1", "verbose must be on or off, got '1'"),
        ("stop [1]", "stop must be a str or a list of them, got [1]"),
    ],
)
def test_a_wrong_setting_is_one_line_and_changes_nothing(tiny: Path, given: str, words: str) -> None:
    done = chat(tiny, f"/set {given}\nHello\n")
    assert done.err.splitlines()[0].startswith(f"shaderlm: {words}")
    assert len(done.err.splitlines()) == 2
    assert done.out == conversation(tiny, "Hello")[1]["content"] + "\n"


def test_stop_strings_can_be_set(tiny: Path) -> None:
    (answer,) = chat(tiny, "Hello\n").out.splitlines()
    stop = answer[1:3]
    for given in (stop, json.dumps(stop), json.dumps([stop])):
        assert chat(tiny, f"/set stop {given}\nHello\n").out == answer[:1] + "\n"
    assert chat(tiny, "/set stop none\nHello\n", "--stop", stop).out == answer + "\n"


@pytest.mark.parametrize("how", ["--verbose", "/set verbose on\n"])
def test_tokens_per_second_come_after_an_answer_where_they_are_asked_for(tiny: Path, how: str) -> None:
    done = chat(tiny, "Hello\n", how) if how.startswith("--") else chat(tiny, f"{how}Hello\n")
    form = r"6 tokens, [\d.]+ tok/s, [\d.]+ s to the first token; (\d+) of 128 tokens of the context are used"
    found = re.fullmatch(form, done.err.splitlines()[-1])
    assert found
    with package.load(tiny, device="cpu") as model:
        assert int(found[1]) == len(model.chat_ids([{"role": "user", "content": "Hello"}])) + 6
    assert "tok/s" not in chat(tiny, "Hello\n").err


# A context that is full -------------------------------------------------------------------------------------


def test_a_full_context_leaves_out_the_oldest_turns_and_says_so(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    lines = "".join(f"{letter * 20}\n" for letter in "abcdef")
    done = chat(tiny, f"{lines}/save {path}\n", "--system", "Be brief")
    said = [line for line in done.err.splitlines() if "is full" in line]
    assert set(said) == {"the context of 128 tokens is full: the oldest turn is left out from here on"}
    messages = saved(path)
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 6], "all are saved"
    first = 0
    with package.load(tiny, device="cpu") as model:
        for turn in range(6):

            def seen(start: int, turn: int = turn) -> list[dict[str, str]]:
                return [messages[0], *messages[1 + 2 * start : 2 + 2 * turn]]

            if len(model.chat_ids(seen(first))) + 6 > 128:
                first = next(at for at in range(first, turn + 1) if len(model.chat_ids(seen(at))) + 12 <= 128)
            assert messages[2 + 2 * turn]["content"] == str(model.chat(seen(first), max_tokens=6))
    assert first == len(said) > 0


def test_turns_that_are_left_out_make_way_for_two_answers(tiny: Path) -> None:
    """So that the next message does not leave out another one, for which all the others are read again."""
    with package.load(tiny, device="cpu") as model:
        options: Any = {"max_tokens": 16, "parse_special": True, "temperature": 0.0, "seed": None}
        talk = ChatSession(model, options)
        firsts = []
        for letter in "abcdefgh":
            talk.say(letter)
            firsts.append(talk.first)
            seen = len(model.chat_ids(talk.messages[talk.first : -1]))
            assert seen + 16 <= 128
            if len(firsts) > 1 and firsts[-1] > firsts[-2]:
                assert seen + 32 <= 128
    assert firsts[-1] > 0
    assert all(first % 2 == 0 for first in firsts), "the first message is the user's"


def test_the_context_is_that_of_the_command_line(tiny: Path) -> None:
    assert "the context of 64 tokens is full: " in chat(tiny, "a\nb\nc\nd\n", "--context", 64).err


def test_a_first_message_beyond_the_context_is_too_long(tiny: Path, tmp_path: Path) -> None:
    """/reset does not help then."""
    path = tmp_path / "talk.json"
    for system, counted in (((), "tokens"), (("--system", "Be brief"), "tokens with the system message")):
        done = chat(tiny, "x" * 200 + f"\nHello\n/save! {path}\n", *system)
        assert "this message is too long: 2" in done.err
        assert f"{counted}, the context holds 128\n" in done.err
        assert "/reset" not in done.err
        assert len(saved(path)) == 2 + len(system) // 2, "it is forgotten"


def test_what_is_many_times_the_context(tiny: Path, tmp_path: Path) -> None:
    """So long that its tokens are more than the context holds, however many bytes a token has."""
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    talk = [{"role": role, "content": "ab" * 10_000} for role in ("user", "assistant")]
    before.write_text(json.dumps(talk))
    done = chat(tiny, f"/system {'ab' * 10_000}\n/load {before}\nHello\n/save {after}\n")
    assert done.err.count("shaderlm: the system message is too long: 20,0") == 1
    assert (
        "loaded 2 messages\nthe context of 128 tokens is full: the oldest turn is left out from here on\n" in done.err
    )
    assert saved(after) == [*talk, *conversation(tiny, "Hello")]


def test_an_answer_that_fills_the_context_says_so(tiny: Path) -> None:
    done = chat(tiny, "x" * 80, "-n", 100)
    full = "answer cut: the context of 128 tokens is full. The next message leaves out the oldest turns\n"
    assert done.err == full
    cut = "answer cut after 6 tokens; /set max_tokens (or --max-tokens, -n) allows more\n"
    assert chat(tiny, "Hello").err == cut
    done = chat(tiny, "x" * 80 + "\nHello\n", "-n", 100)
    assert done.err.splitlines()[1] == "the context of 128 tokens is full: the oldest turn is left out from here on"
    assert done.out.splitlines()[1] == conversation(tiny, "Hello", max_tokens=100)[1]["content"]


def test_what_the_template_refuses_is_one_line(tmp_path: Path) -> None:
    template = (
        "{% if messages|length > 1 %}{{ raise_exception('one message, please') }}{% endif %}{{ messages[0].content }}"
    )
    model = write_tiny_llama(tmp_path / "strict.gguf", metadata={"tokenizer.chat_template": template})
    done = chat(model, "Hello\nAgain\n/reset\nHello\n")
    assert done.code == 0
    assert done.err.count("shaderlm: the chat template refuses this conversation: one message, please") == 1
    first, second = done.out.splitlines()
    assert first == second


def test_a_template_that_fails_does_not_end_the_chat(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content | length / (message.content != 'zero') }}{% endfor %}"
    model = write_tiny_llama(tmp_path / "failing.gguf", metadata={"tokenizer.chat_template": template})
    path = tmp_path / "talk.json"
    path.write_text('[{"role": "user", "content": "zero"}]')
    done = chat(model, f"zero\n/system zero\n/load {path}\nHello\n/save! {path}\n")
    assert done.code == 0
    assert done.err.count("shaderlm: the chat template of this model failed") == 3, done.err
    assert saved(path)[0]["content"] == "Hello"


def test_a_model_without_a_template(tmp_path: Path) -> None:
    done = chat(write_tiny_llama(tmp_path / "plain.gguf", template=False), "Hello\n")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert "has no chat template" in done.err


def test_sampling_has_the_usual_defaults_and_a_seed_repeats_it(tiny: Path) -> None:
    def said(*more: object) -> str:
        return shaderlm("chat", "-m", tiny, "--device", "cpu", "-n", 12, *more, given="Hello\n").out

    usual = ("-t", 0.8, "--top-k", 40, "--top-p", 0.95, "--min-p", 0.05)
    assert said("--seed", 1) == said("--seed", 1, *usual) != said("--seed", 1, "-t", 3)
    assert shaderlm("chat", "-m", tiny, "--top-p", 2, given="").code == 2


def test_broken_bytes_in_a_pipe_do_not_end_it(tiny: Path) -> None:
    done = shaderlm("chat", "-m", tiny, "--device", "cpu", "-n", 4, "-t", 0, given=b"a\xffb\nHello\n")
    assert done.code == 0
    assert len(done.out.splitlines()) == 2


# Ctrl-C --------------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("device", ["cpu", "0"])
def test_ctrl_c_stops_the_answer_and_not_the_program(slow: Path, tmp_path: Path, device: str) -> None:
    path = tmp_path / "talk.json"
    child = start("chat", "-m", slow, "-n", 1 << 19, "-t", 0, "--device", device)
    assert child.stdin
    assert child.stdout
    child.stdin.write("Hello\n")
    out = child.stdout.read(2)
    child.send_signal(signal.SIGINT)
    out += child.stdout.readline()
    child.stdin.write(f"/save {path}\nAgain\n")
    assert len(child.stdout.read(2)) == 2
    child.send_signal(signal.SIGINT)
    _, err = child.communicate("/quit\n", timeout=120)
    assert child.returncode == 0
    assert saved(path) == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": out[:-1]}]
    assert err.count("cancelled: the answer ends here, and is part of the conversation as far as it came\n") == 2
    assert "Traceback" not in err


def interrupt_prompt(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C while this prompt is read, counted from 1; never again."""
    step, prompts = NumpyRunner.step, itertools.count(1)

    def interrupted(self: NumpyRunner, parts: list[SequenceChunk]) -> Any:
        if parts[0].ids is not None and next(prompts) == number:
            raise KeyboardInterrupt
        return step(self, parts)

    monkeypatch.setattr(NumpyRunner, "step", interrupted)


def test_ctrl_c_before_the_answer_says_that_the_message_is_dropped(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = tmp_path / "talk.json", conversation(tiny, "Again")
    interrupt_prompt(1, monkeypatch)
    done = chat(tiny, f"Hello\nAgain\n/save {path}\n")
    assert done.out == expected[1]["content"] + "\n", "no empty line for what has no answer"
    assert saved(path) == expected
    said = "cancelled: there is no answer yet, and your message is not part of the conversation"
    assert done.err.splitlines()[0] == said


@posix
def test_ctrl_c_between_the_lines_of_a_pipe_ends_it(tiny: Path) -> None:
    child = start("chat", "-m", tiny, "-n", 2, "--device", "cpu")
    assert child.stdin
    assert child.stdout
    child.stdin.write("Hello\n")
    child.stdout.readline()
    time.sleep(0.2)  # now it waits for the next line
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in err


class Terminal:
    """What a person sees and types."""

    def __init__(self, control: int) -> None:
        self._control, self.seen = control, ""

    def type(self, keys: str) -> None:
        os.write(self._control, keys.encode())

    def wait_for(self, words: str) -> None:
        """Until the words are on the screen, after what was waited for before."""
        until = time.monotonic() + 60
        while words not in self.seen:
            assert time.monotonic() < until, f"{words!r} did not come: {self.seen!r}"
            if select.select([self._control], [], [], 0.2)[0]:
                with suppress(OSError):  # the other end is closed
                    self.seen += os.read(self._control, 4096).decode(errors="replace")
        self.seen = self.seen.split(words, 1)[1]

    def read(self) -> None:
        """What is on the screen by now, so that the other side can go on writing."""
        while select.select([self._control], [], [], 0.05)[0]:
            self.seen += os.read(self._control, 65536).decode(errors="replace")


@contextmanager
def terminal(
    *arguments: object, term: str = "dumb", command: Sequence[str] = COMMAND
) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    import pty

    control, far = pty.openpty()
    options: dict[str, Any] = {"stdin": far, "stdout": far, "stderr": far, "start_new_session": True}
    child = subprocess.Popen([*command, *map(str, arguments)], env={**os.environ, "TERM": term}, **options)
    os.close(far)
    try:
        yield Terminal(control), child
    finally:
        child.kill()
        child.wait()
        os.close(control)


@posix
@pytest.mark.parametrize("ending", ["/quit\n", "\x04"])
def test_at_a_terminal(slow: Path, ending: str) -> None:
    arguments = ("chat", "-m", slow, "--device", "cpu", "-t", 0, "-n", 1 << 19)
    with terminal(*arguments) as (screen, child):
        screen.wait_for("slow on cpu (LLVM). /help lists the commands")
        screen.wait_for("> ")
        time.sleep(0.3)  # readline shows the prompt a moment before it listens
        child.send_signal(signal.SIGINT)
        screen.wait_for("/quit or Ctrl-D ends")
        screen.wait_for("> ")
        screen.type("Hello\n")
        screen.wait_for("Hello\r\n")
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        screen.wait_for("\r\n> ")
        time.sleep(0.3)  # as above: the terminal would take Ctrl-D for itself
        screen.type(ending)
        assert child.wait(60) == 0
        assert "Traceback" not in screen.seen


# What a shell does with a job: it stops with Ctrl-Z, the terminal has the shell's modes, and `fg` goes on.
_SHELL = """
import os, signal, subprocess, sys, termios

terminal = os.open(os.ttyname(0), os.O_RDWR)  # of this session from now on
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
modes = termios.tcgetattr(terminal)
job = subprocess.Popen(sys.argv[1:], process_group=0, preexec_fn=lambda: signal.signal(signal.SIGTTOU, signal.SIG_DFL))
os.tcsetpgrp(terminal, job.pid)
_, status = os.waitpid(job.pid, os.WUNTRACED)
assert os.WIFSTOPPED(status), status
termios.tcsetattr(terminal, termios.TCSANOW, modes)
print("stopped", flush=True)
os.killpg(job.pid, signal.SIGCONT)
sys.exit(job.wait())
"""


@posix
def test_the_prompt_is_drawn_again_after_ctrl_z_and_fg(tiny: Path) -> None:
    pytest.importorskip("readline")
    shell = [sys.executable, "-c", _SHELL, *COMMAND]
    arguments = ("chat", "-m", tiny, "--device", "cpu", "-t", 0, "-n", 4)
    with terminal(*arguments, term="xterm", command=shell) as (screen, child):
        screen.wait_for("> ")
        time.sleep(0.3)  # readline shows the prompt a moment before it listens
        screen.type("Hel")
        screen.wait_for("Hel")
        screen.type("\x1a")
        screen.wait_for("stopped")
        screen.wait_for("> Hel")
        screen.type("lo\n")
        screen.wait_for("answer cut after 4")
        screen.type("/quit\n")
        assert child.wait(60) == 0


def paste(screen: Terminal, text: str) -> None:
    """As terminals do that know bracketed paste."""
    screen.type(f"\x1b[200~{text}\x1b[201~")


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_z_stays_ignored_where_it_is() -> None:
    """Nobody could say `fg`."""
    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        with history.redraw_after_stop("> "):
            assert signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTSTP, before)


@posix
def test_a_paste_of_several_lines_is_one_message(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("readline")
    path = tmp_path / "talk.json"
    with terminal("chat", "-m", tiny, "--device", "cpu", "-t", 0, "-n", 4, term="xterm") as (screen, child):
        screen.wait_for("> ")
        time.sleep(0.3)  # readline shows the prompt a moment before it listens
        paste(screen, "one\ntwo\n/quit")
        screen.type("\n")
        screen.wait_for("answer cut after 4")
        screen.wait_for("> ")
        screen.type(f"/save {path}\n")
        screen.wait_for("saved 2 messages")
        screen.type("/quit\n")  # not Ctrl-D: before readline listens, the terminal takes it for itself
        assert child.wait(60) == 0
    assert saved(path) == conversation(tiny, "one\ntwo\n/quit", max_tokens=4)


@posix
def test_a_long_line_does_not_abort(tiny: Path, tmp_path: Path) -> None:
    """Looking for adapters loads Mesa and with it libedit; readline must be there before, or the heap is corrupted."""
    pytest.importorskip("readline")
    with terminal("chat", "-m", tiny, "-t", 0, "-n", 2, term="xterm") as (screen, child):
        screen.wait_for("> ")
        time.sleep(0.3)  # readline shows the prompt a moment before it listens
        for _ in range(20):
            screen.type("ab" * 500)
            screen.read()
        screen.type("\n")
        screen.wait_for("this message is too long: 20,0")
        screen.wait_for("> ")
        screen.type("Hello\n")
        screen.wait_for("answer cut after 2")
        screen.type("/quit\n")
        assert child.wait(60) == 0


def test_readline_comes_before_adapters(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def load(*_: object) -> None:
        order.append("load")
        raise InputError("enough")

    monkeypatch.setattr(command, "_interactive", lambda: True)
    monkeypatch.setattr(command, "set_up_readline", lambda: order.append("readline"))
    monkeypatch.setattr(command, "load_model", load)
    chat(tiny, "/quit\n")
    assert order == ["readline", "load"]


def test_the_prompt_does_not_go_into_a_file(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input is a terminal, standard output is not."""
    monkeypatch.setattr(command, "_interactive", lambda: True)
    done = chat(tiny, "Hello\n")
    assert done.out == conversation(tiny, "Hello")[1]["content"] + "\n"
    assert done.err.count("> ") == 2


# History ---------------------------------------------------------------------------------------------------


@posix
def test_what_is_typed_is_kept_for_the_next_chat(tiny: Path, tmp_path: Path, state: Path) -> None:
    pytest.importorskip("readline")
    path, arguments = tmp_path / "talk.json", ("chat", "-m", tiny, "--device", "cpu", "-t", 0, "-n", 4)
    with terminal(*arguments, term="xterm") as (screen, child):
        screen.wait_for("> ")
        time.sleep(0.3)  # readline shows the prompt a moment before it listens
        screen.type("one\x1b\rtwo\r")  # Alt-Enter
        screen.wait_for("answer cut after 4")
        screen.wait_for("> ")
        screen.type('"""three\r')
        screen.wait_for("... ")
        screen.type('four"""\r')
        screen.wait_for("answer cut after 4")
        screen.wait_for("> ")
        screen.type("/quit\r")
        assert child.wait(60) == 0
    (kept,) = state.iterdir()
    assert [json.loads(line) for line in kept.read_text().splitlines()] == ["one\ntwo", '"""three\nfour"""', "/quit"]
    assert (kept.stat().st_mode & 0o777, state.stat().st_mode & 0o777) == (0o600, 0o700)
    with terminal(*arguments, term="xterm") as (screen, child):
        screen.wait_for("> ")
        time.sleep(0.3)
        screen.type("\x1b[A" * 3 + "\r")  # up: /quit, three four, one two
        screen.wait_for("answer cut after 4")
        screen.wait_for("> ")
        screen.type("\x1b[A" * 3 + "\r")  # the last is now one two
        screen.wait_for("answer cut after 4")
        screen.wait_for("> ")
        screen.type(f"/save {path}\r")
        screen.wait_for("saved 4 messages")
        screen.type("/quit\r")
        assert child.wait(60) == 0
    assert saved(path) == conversation(tiny, "one\ntwo", "three\nfour", max_tokens=4)


def test_the_history_is_limited_private_and_survives_broken_lines(state: Path) -> None:
    state.mkdir()
    path = state / "chat_history.jsonl"
    lines = [json.dumps(f"line {i}") for i in range(2 * history.ENTRIES)]
    path.write_text("\n".join([*lines, "5", '"not its end', '"last"']) + "\n")
    os.chmod(path, 0o644)
    found = history.History(keep=True)
    assert len(found.entries) == history.ENTRIES
    assert (found.entries[0], found.entries[-1]) == (f"line {history.ENTRIES + 1}", "last")
    assert len(path.read_text().splitlines()) == history.ENTRIES, "the file is shortened"
    if os.name != "nt":
        assert path.stat().st_mode & 0o777 == 0o600
    for text in ("last", "  ", "x" * (history.LONGEST + 1), "new"):
        found.add(text)
    assert found.entries[-2:] == ["last", "new"]
    history.History(keep=False).add("secret")
    assert history.History(keep=True).entries == found.entries[-history.ENTRIES :]
    path.write_text(json.dumps("y" * 100) + "\n" + (json.dumps("x" * history.LONGEST) + "\n") * 500)
    assert len(history.History(keep=True).entries) < 500
    assert path.stat().st_size < history.SHORTEN_BYTES


@pytest.mark.parametrize("flags", [(), ("--no-history",)])
def test_the_history_can_be_left_out(
    tiny: Path, state: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_interactive", lambda: True)
    assert chat(tiny, "Hello\n", *flags).code == 0
    assert [path.read_text() for path in state.glob("*")] == ([] if flags else ['"Hello"\n'])
    assert chat(tiny, "Hello\n", *flags).code == 0


def test_a_history_that_cannot_be_kept_is_told_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("SHADERLM_STATE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(command, "_interactive", lambda: True)
    done = chat(tiny, "Hello\nHello\n")
    assert done.err.count("what you type is not kept for later chats: ") == 1
    assert "Not a directory" in done.err
    assert len(done.out.splitlines()) == 2
