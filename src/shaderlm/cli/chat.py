"""`shaderlm chat`: a conversation at a terminal or through a pipe.

Answers go to stdout and everything else to stderr, so that a pipe gets the answers alone.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..errors import InputError, ModelError
from ..files import atomic_write_text
from .cache_options import cache_options
from .conversation import ChatSession
from .draft_options import draft_options
from .history import History, redraw_after_stop, set_up_readline
from .image_options import picture_path, vision_options
from .loading import load_model
from .options import CHAT_SAMPLING, ModelOptions, generation_options, model_options, sampling_options, with_model_values
from .streaming import tell

_QUOTES = '"""'
# What other programs call the commands: Ollama and llama-cli.
_ELSEWHERE = {"/exit": "/quit", "/bye": "/quit", "/clear": "/reset", "/regen": "/regenerate", "/?": "/help"}


@click.command()
@model_options
@cache_options
@draft_options
@vision_options
@sampling_options(max_tokens=1024, **CHAT_SAMPLING, parse_special=False)
@click.option("--system", metavar="TEXT", help="A system message at the beginning.")
@click.option("--no-history", is_flag=True, help="Do not keep what is typed for the arrow keys of later chats.")
@click.option("-v", "--verbose", is_flag=True, help="Print tokens per second after each answer.")
def chat(model_options: ModelOptions, system: str | None, no_history: bool, verbose: bool, **generation: Any) -> None:
    """Chat with a model.

    /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat. A message of several lines is pasted, or
    begins and ends with three quotes; Alt-Enter begins a new line. Where the context is full, the oldest turns are
    left out.
    """
    options = generation_options(generation)
    history = None
    if _interactive():
        set_up_readline()
        history = History(keep=not no_history)
        _tell_problem(history)
    with load_model(model_options, options) as loaded:
        options = with_model_values(options, loaded)
        if not loaded.has_chat_template:
            raise ModelError(
                f"{loaded.report.name} has no chat template; use `shaderlm generate`, which continues a text"
            )
        conversation = ChatSession(loaded, options, system, verbose)
        if _interactive():
            tell(f"{loaded.report.name} on {loaded.report.device}. /help lists the commands")
        _loop(conversation, history)


def _interactive() -> bool:
    """Is stdin a keyboard, and not a pipe?"""
    return sys.stdin.isatty()


def _tell_problem(history: History) -> None:
    if history.problem is not None:
        tell(f"shaderlm: {history.problem}")
        history.problem = None


# The loop ------------------------------------------------------------------------------------------------


def _loop(conversation: ChatSession, history: History | None) -> None:
    while True:
        try:
            typed, text, command = _read_message()
            if history is not None:
                history.add(typed)
                _tell_problem(history)
            picture = picture_path(text) if conversation.model.vision is not None else None
            if picture is not None:  # which may begin with a /
                _image(conversation, picture)
            elif command:
                if not _command(conversation, text):
                    return
            elif text.strip():
                conversation.say(text)
        except EOFError:
            if _interactive():
                tell("")
            return
        except (InputError, ModelError) as problem:  # of what was typed, or of the template
            tell(f"shaderlm: {problem}")
        except KeyboardInterrupt:
            if not _interactive():  # nobody would type /quit
                raise
            tell("\n/quit or Ctrl-D ends the chat")


def _read_message() -> tuple[str, str, bool]:
    """What was typed, the message in it, and whether that is a command; EOFError after the last one.

    It is a line, pasted lines, or the lines between three quotes and three quotes. What a command is given may be
    quoted, too.
    """
    line = _read_line("> ")
    word, space, argument = line.partition(" ")
    if line.startswith(_QUOTES):
        typed, text = _read_quoted(line)
        return typed, text, False
    if line.startswith("/") and argument.startswith(_QUOTES):
        typed, text = _read_quoted(argument)
        return word + space + typed, word + space + text, True
    return line, line, line.startswith("/") and "\n" not in line


def _read_quoted(begun: str) -> tuple[str, str]:
    """What was typed up to the second three quotes, and what is between them."""
    lines = [begun.removeprefix(_QUOTES)]
    with suppress(EOFError):  # what was begun is a message too
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(_read_line("... "))
    typed = _QUOTES + "\n".join(lines)
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    # A line that has nothing but the quotes is not part of the message.
    return typed, "\n".join(lines).removeprefix("\n").removesuffix("\n")


def _read_line(prompt: str) -> str:
    """The next line without its end; EOFError after the last one."""
    if _interactive():
        if sys.stdout.isatty():
            with redraw_after_stop(prompt):
                return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)  # input() would write it to stdout
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


# Commands ------------------------------------------------------------------------------------------------


def _reset(conversation: ChatSession, argument: str) -> None:
    conversation.reset()
    tell("new conversation")


def _system(conversation: ChatSession, argument: str) -> None:
    if argument:
        conversation.set_system(None if argument in ('""', "''") else argument)
        tell("there is no system message from here on" if conversation.system is None else "system message set")
    elif conversation.system is None:
        tell("there is no system message; /system TEXT sets one")
    else:
        tell(f'{conversation.system}\n(/system TEXT changes it, /system "" removes it)')


def _image(conversation: ChatSession, argument: str) -> None:
    if not argument:
        tell("/image needs the name of a file, such as /image photo.jpg")
        return
    count = conversation.attach(argument)
    tell(f"{_count(count, 'picture')} for your next message")


def _regenerate(conversation: ChatSession, argument: str) -> None:
    conversation.regenerate()


def _undo(conversation: ChatSession, argument: str) -> None:
    if conversation.undo():
        tell(f"your last message and its answer are gone; {_count(conversation.turns, 'turn')} left")
    else:
        tell("there is no message to undo")


def _save(conversation: ChatSession, argument: str, *, overwrite: bool = False) -> None:
    command = "/save!" if overwrite else "/save"
    if not argument:
        tell(f"{command} needs the name of a file, such as {command} conversation.json")
        return
    try:
        path = Path(argument).expanduser().resolve()
        if not overwrite and path.is_file():
            tell(f"{path} exists; /save! {argument} overwrites it")
            return
        atomic_write_text(path, json.dumps(conversation.all_messages, ensure_ascii=False, indent=2) + "\n")
    except (OSError, RuntimeError, ValueError) as problem:  # an unknown ~user, a NUL
        tell(f"{argument} cannot be written: {getattr(problem, 'strerror', None) or problem}")
        return
    tell(f"saved {_count(len(conversation.all_messages), 'message')} to {path}")


def _load(conversation: ChatSession, argument: str) -> None:
    if not argument:
        tell("/load needs the name of a file that /save wrote, such as /load conversation.json")
        return
    try:
        messages = json.loads(Path(argument).expanduser().read_text(encoding="utf-8"))
    except json.JSONDecodeError as problem:
        tell(f"{argument} is not a file that /save wrote; it is not JSON: {problem}")
        return
    except (OSError, RuntimeError, ValueError, RecursionError) as problem:
        tell(f"{argument} cannot be read: {getattr(problem, 'strerror', None) or problem}")
        return
    if not isinstance(messages, list):
        tell(f"{argument} must have a list of messages, as /save writes it; it has {type(messages).__name__}")
        return
    conversation.replace(messages)
    unanswered = conversation.messages[-1:] and conversation.messages[-1]["role"] == "user"
    hint = "; the last one has no answer, /regenerate makes one" if unanswered else ""
    tell(f"loaded {_count(len(messages), 'message')}{hint}")


def _set(conversation: ChatSession, argument: str) -> None:
    """Show the settings, or change one."""
    from .settings import change_setting, shown_settings

    name, _, value = argument.partition("=" if "=" in argument.split(" ")[0] else " ")
    if name:
        change_setting(conversation, name, value.strip())
    for line in shown_settings(conversation, name):
        tell(line)


def _help(conversation: ChatSession, argument: str) -> None:
    for usage, (_, meaning) in COMMANDS.items():
        tell(f"{usage:<17}  {meaning}")
    tell(
        f"Ctrl-C stops an answer. {_QUOTES} begins a message of several lines, which ends with {_QUOTES}.\n"
        "Alt-Enter begins a new line, too. A space before a / makes the line a message."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


COMMANDS: dict[str, tuple[Callable[[ChatSession, str], None] | None, str]] = {
    "/regenerate": (_regenerate, "answer your last message once more"),
    "/image FILE": (_image, "add a picture to your next message; so does a line that is its path"),
    "/undo": (_undo, "forget your last message and its answer"),
    "/reset": (_reset, "start a new conversation"),
    "/system [TEXT]": (_system, "show or change the system message"),
    "/set [NAME VALUE]": (_set, "show or change settings, such as /set temperature 0.5"),
    "/save FILE": (_save, "write the conversation to FILE, as JSON messages"),
    "/save! FILE": (partial(_save, overwrite=True), "the same, also if FILE exists"),
    "/load FILE": (_load, "continue the conversation of FILE"),
    "/help": (_help, "show this list"),
    "/quit": (None, "end the chat (so does Ctrl-D)"),
}


def _command(conversation: ChatSession, line: str) -> bool:
    """Run a command; False if it ends the chat."""
    word, _, argument = line.strip().partition(" ")
    word = _ELSEWHERE.get(word, word)
    known = {usage.split()[0]: run for usage, (run, _) in COMMANDS.items()}
    if word not in known:
        close = difflib.get_close_matches(word.lower(), known, 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(known)}"
        tell(f"{word} is not a command; {hint}")
        return True
    run = known[word]
    if run is not None:
        run(conversation, argument.strip())
    return run is not None
