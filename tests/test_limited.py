"""Work in limited processes: what it may cost, and what happens to a process that is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shaderlm.errors import InputError, ModelError, ShaderlmError
from shaderlm.limited import LimitedProgram
from shaderlm.limited.process import HAS_TIMER
from shaderlm.text import ChatTemplate, RenderLimits

PROGRAM = """
import os, time

kept = []

def make():
    def answer(asked):
        kept.append(bytearray(asked.get("keep", 0)))
        if asked.get("sleep"):
            time.sleep(asked["sleep"])
        if asked.get("spin"):
            9 ** 9 ** 9 % 7
        if asked.get("memory"):
            bytearray(asked["memory"])
        if asked.get("end"):
            os._exit(3)
        return "said", asked.get("say", str(os.getpid()))
    return answer
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[LimitedProgram]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    made = LimitedProgram(str(path), (), processes=2)
    yield made
    made.end()


def test_a_process_that_is_started_early_answers_the_first_question(program: LimitedProgram) -> None:
    for _ in range(3):
        program.start()
    said = {program.ask({}, 60, 100).text for _ in range(4)}
    program.start()  # there is one
    assert said == {program.ask({}, 60, 100).text}


def test_a_process_that_cannot_start_early_is_told_at_the_first_question(tmp_path: Path) -> None:
    program = LimitedProgram(str(tmp_path / "missing.py"), ())
    program.start()
    with pytest.raises(ShaderlmError, match="a process ended at once"):
        program.ask({}, 60, 100)


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_of_a_terminal_does_not_reach_a_process_that_starts(program: LimitedProgram) -> None:
    """It goes to the whole group of whoever started the process, also before the process can ignore it."""
    pid = int(program.ask({}, 60, 100).text)
    assert os.getpgid(pid) == pid != os.getpgrp()


def test_a_process_is_kept_for_the_next_request(program: LimitedProgram) -> None:
    first, second = program.ask({}, 60, 100)[:2], program.ask({}, 60, 100)[:2]
    assert first == second
    assert first[0] == "said"
    assert int(first[1]) != os.getpid()


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"sleep": 60}, "time"),
        ({"spin": True}, "time"),  # one call of the interpreter, which no other thread of it could interrupt
        ({"end": True}, "ended"),
        pytest.param({"memory": 1 << 30}, "memory", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux")),
    ],
)
def test_what_costs_too_much_ends(program: LimitedProgram, asked: dict[str, Any], word: str) -> None:
    before = program.ask({}, 60, 100)[:2]
    started = time.monotonic()
    assert program.ask(asked, 0.3, 100)[:2] == (word, "")
    assert time.monotonic() - started < 30  # it is lost, not waited for
    after = program.ask({}, 60, 100)[:2]
    assert after[0] == "said"
    assert after != before, "another process goes on"


@pytest.mark.skipif(not HAS_TIMER, reason="a timer of the processor's time")
def test_only_time_of_the_processor_counts(program: LimitedProgram) -> None:
    """A busy machine refuses nothing."""
    answer = program.ask({"sleep": 0.5, "say": "rested"}, 0.25, 100)
    assert answer[:2] == ("said", "rested")
    assert answer.seconds < 0.25


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how much memory a process has")
def test_a_process_that_keeps_memory_is_not_used_again(program: LimitedProgram) -> None:
    """Otherwise each request would get as much again."""
    assert len({program.ask({"keep": 1 << 20}, 60, 100).text for _ in range(3)}) == 1
    assert len({program.ask({"keep": 30 << 20}, 60, 100).text for _ in range(4)}) == 4


def test_an_answer_of_more_bytes_than_asked_for_is_not_read(program: LimitedProgram) -> None:
    assert program.ask({"say": "é" * 40}, 60, 100)[:2] == ("said", "é" * 40)
    assert program.ask({"say": "é" * 400}, 60, 100)[:2] == ("ended", "")


def test_text_comes_back_as_it_was(program: LimitedProgram) -> None:
    for text in ("", "a\nb", "ü € 😀", "\ud800", "\x00"):
        assert program.ask({"say": text}, 60, 100)[:2] == ("said", text)


def test_a_large_request_is_within_memory_and_ends_its_process(program: LimitedProgram) -> None:
    before = program.ask({}, 60, 100)[:2]
    assert program.ask({"say": "😀" * (1 << 20)}, 60, 8 << 20)[:2] == ("said", "😀" * (1 << 20))
    assert program.ask({}, 60, 100)[:2] != before


def test_what_is_not_json_is_refused(program: LimitedProgram) -> None:
    with pytest.raises(InputError, match="must be JSON; a value of type object is not"):
        program.ask({"say": object()}, 60, 100)


def test_no_more_processes_than_asked_for(program: LimitedProgram) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: program.ask({"sleep": 0.02}, 60, 100)[:2], range(16)))
    assert {kind for kind, _ in found} == {"said"}
    assert 1 <= len({pid for _, pid in found}) <= 2


def test_a_process_that_was_killed_is_replaced(program: LimitedProgram) -> None:
    pid = int(program.ask({}, 60, 100)[1])
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while (answer := program.ask({}, 60, 100)[:2]) in (("ended", ""), ("said", str(pid))):
        assert time.monotonic() < deadline
    assert answer[0] == "said"


def test_a_program_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import nothing_of_this_name")
    broken = LimitedProgram(str(tmp_path / "program.py"), (), processes=1)
    for _ in range(2):  # and its place is free again
        with pytest.raises(ShaderlmError, match=r"a process ended at once: .*program\.py"):
            broken.ask({}, 60, 100)


def test_the_process_sees_nothing_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text(
        "import json, os, sys\ndef make():\n    return lambda asked: ('said', json.dumps([dict(os.environ), sys.path]))"
    )
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = LimitedProgram(str(tmp_path / "program.py"), ())
    _, text = made.ask({}, 60, 1 << 16)[:2]
    made.end()
    environment, path = json.loads(text)
    assert "HF_TOKEN" not in environment
    assert str(tmp_path) not in path
    assert not any("site-packages" in each for each in path)


@pytest.mark.full
def test_processes_end_with_whoever_started_them(tmp_path: Path) -> None:
    """Even if that is killed while one of them works."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "main.py").write_text(
        textwrap.dedent(f"""
        import threading, time
        from shaderlm.limited import LimitedProgram
        program = LimitedProgram({str(tmp_path / "program.py")!r}, ())
        pid = program.ask({{}}, 60, 100)[1]
        threading.Thread(target=program.ask, args=({{"sleep": 600}}, 2, 100), daemon=True).start()
        time.sleep(0.2)
        print(pid, flush=True)
        time.sleep(600)
        """)
    )
    with subprocess.Popen([sys.executable, tmp_path / "main.py"], stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None
        pid = int(main.stdout.readline())
        main.kill()
    deadline = time.monotonic() + 60
    while _runs(pid):
        assert time.monotonic() < deadline, "it goes on without its parent"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


# Chat templates --------------------------------------------------------------------------------------------

ASK = [{"role": "user", "content": "hello"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='ab') %}{% for i in range(50) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (LOOP, "takes more than 0.3 s, which is the most"),
        ("{% for i in range(99999) %}{{ range(99999)|list|sort|length }}{% endfor %}", "takes more than 0.3 s"),
        ("{{ [1]|slice(10**9)|list|length }}", "takes more than 0.3 s"),
        ("{% for i in range(99999) %}12345678901{% endfor %}", "makes a text of more than 1,000,000 bytes"),
        (DOUBLED, "needs too much memory"),
        ("{{ 'a' * 10**12 }}", "needs too much memory"),  # when it is compiled
        ("{{ messages[0].content * 10**12 }}", "needs too much memory"),
        ("{{ '%1000000000000d'|format(messages|length) }}", "needs too much memory"),
        ("{{ {'a': 1}|tojson(indent=10**12) }}", "needs too much memory"),
    ],
)
def test_a_template_costs_what_it_may(source: str, words: str) -> None:
    """Other threads run meanwhile."""
    template = ChatTemplate(source, limits=RenderLimits(0.3, 1_000_000))
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        with pytest.raises(ModelError, match=f"the chat template of this model {words}"):
            template.render(ASK)
    finally:
        done.set()
        thread.join()
    assert "takes" not in words or ticks[0] > 10
    assert ChatTemplate("{{ messages[0].content }}").render(ASK) == "hello"


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_a_large_stack_takes_no_memory_of_a_template() -> None:
    code = (
        "from shaderlm.text import ChatTemplate; print(ChatTemplate('ok').render([{'role': 'user', 'content': 'x'}]))"
    )
    command = ["bash", "-c", 'ulimit -s 1000000 2>/dev/null || true; exec "$0" -c "$1"', sys.executable, code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "ok\n"


def test_a_template_within_its_limits() -> None:
    exact = ChatTemplate("{{ messages[0].content }}", limits=RenderLimits(60, 1000))
    assert exact.render([{"role": "user", "content": "é" * 500}]) == "é" * 500
    with pytest.raises(ModelError, match="more than 1,000 bytes"):
        exact.render([{"role": "user", "content": "é" * 500 + "a"}])
