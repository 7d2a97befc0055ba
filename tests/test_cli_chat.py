"""`shaderlm chat`, scripted through a pipe and at a terminal of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import shaderlm as package
from shaderlm.errors import InputError
from shaderlm.runtime.numpy_runner import NumpyRunner
from shaderlm.runtime.runner import Part

from .command_line import COMMAND, Done, Recorder, shaderlm, start
from .tiny_models import write_tiny_llama

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX signals and terminals")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("slow") / "slow.gguf", layers=8, context=1 << 20)


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
    assert all(name in done.err for name in ("/reset", "/save FILE", "/save! FILE", "/help", "/quit"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/rest", "/rest is not a command; did you mean /reset?"),
        ("/Quit", "did you mean /quit?"),
        ("/zzz", "the commands are /reset, /save, /save!, /help, /quit"),
        ("/", "the commands are /reset"),
        ("/save", "/save needs the name of a file"),
        ("/save!", "/save! needs the name of a file"),
    ],
)
def test_a_wrong_command_says_so_and_the_chat_goes_on(tiny: Path, line: str, words: str) -> None:
    done = chat(tiny, f"{line}\nHello\n")
    assert words in done.err
    assert done.out == conversation(tiny, "Hello")[1]["content"] + "\n"


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


def test_a_full_conversation_says_reset_and_forgets_the_message(tiny: Path, tmp_path: Path) -> None:
    path, long = tmp_path / "talk.json", "x" * 100
    done = chat(tiny, f"Hello\n{long}\n/save {path}\n/reset\nHello\n")
    first = conversation(tiny, "Hello")
    assert done.code == 0
    assert "the conversation is full: " in done.err
    assert "the context holds 128. /reset starts a new one" in done.err
    assert saved(path) == first
    assert done.out == f"{first[1]['content']}\n" * 2


def test_a_first_message_beyond_the_context_is_too_long(tiny: Path, tmp_path: Path) -> None:
    """/reset does not help then."""
    path = tmp_path / "talk.json"
    for system in ((), ("--system", "Be brief")):
        done = chat(tiny, "x" * 200 + f"\nHello\n/save! {path}\n", *system)
        assert "this message is too long: 2" in done.err
        assert "tokens, the context holds 128\n" in done.err
        assert "/reset" not in done.err
        assert len(saved(path)) == 2 + len(system) // 2, "it is forgotten"


def test_an_answer_that_fills_the_context_says_so(tiny: Path) -> None:
    done = chat(tiny, "x" * 80, "-n", 100)
    assert "the conversation is full: 128 tokens" in done.err
    assert "cut after" not in done.err
    assert "answer cut after 6 tokens; --max-tokens (-n) allows more" in chat(tiny, "Hello").err


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


def test_a_model_without_a_template(tmp_path: Path) -> None:
    done = chat(write_tiny_llama(tmp_path / "plain.gguf", template=False), "Hello\n")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert "has no chat template" in done.err


def test_sampling_has_the_usual_defaults_and_a_seed_repeats_it(tiny: Path) -> None:
    def said(*more: object) -> str:
        return shaderlm("chat", "-m", tiny, "--device", "cpu", "-n", 12, *more, given="Hello\n").out

    assert said("--seed", 1) == said("--seed", 1, "-t", 0.7, "--top-p", 0.95) != said("--seed", 1, "-t", 3)
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


def test_ctrl_c_before_the_answer_says_that_the_message_is_dropped(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, step, expected = tmp_path / "talk.json", NumpyRunner.step, conversation(tiny, "Again")
    presses = iter([True, False])

    def interrupted(self: NumpyRunner, parts: list[Part]) -> Any:
        if parts[0].ids is not None and next(presses):  # while a prompt is read
            raise KeyboardInterrupt
        return step(self, parts)

    monkeypatch.setattr(NumpyRunner, "step", interrupted)
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
def terminal(*arguments: object, term: str = "dumb") -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    import pty

    control, far = pty.openpty()
    options: dict[str, Any] = {"stdin": far, "stdout": far, "stderr": far, "start_new_session": True}
    child = subprocess.Popen([*COMMAND, *map(str, arguments)], env={**os.environ, "TERM": term}, **options)
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
        screen.wait_for("Tiny Llama on cpu (NumPy). /help lists the commands")
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


def paste(screen: Terminal, text: str) -> None:
    """As terminals do that know bracketed paste."""
    screen.type(f"\x1b[200~{text}\x1b[201~")


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
    module = sys.modules["shaderlm.cli.chat"]

    def load(*_: object) -> None:
        order.append("load")
        raise InputError("enough")

    monkeypatch.setattr(module, "_interactive", lambda: True)
    monkeypatch.setattr(module, "_import_readline", lambda: order.append("readline"))
    monkeypatch.setattr(module, "load_model", load)
    chat(tiny, "/quit\n")
    assert order == ["readline", "load"]


def test_the_prompt_does_not_go_into_a_file(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input is a terminal, standard output is not."""
    module = sys.modules["shaderlm.cli.chat"]
    monkeypatch.setattr(module, "_interactive", lambda: True)
    done = chat(tiny, "Hello\n")
    assert done.out == conversation(tiny, "Hello")[1]["content"] + "\n"
    assert done.err.count("> ") == 2
