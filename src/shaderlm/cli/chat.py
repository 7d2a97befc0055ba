"""`shaderlm chat`: a conversation, line by line, at a terminal or through a pipe.

Answers go to stdout and everything else to stderr, so that a pipe gets the answers alone.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError, ModelError
from .loading import load_model
from .options import answer_options, model_options, sampling_options

if TYPE_CHECKING:
    from ..engine import Completion, LanguageModel, Stream

_FULL = "the conversation is full: {used:,} tokens, the context holds {most:,}. /reset starts a new one"


@click.command()
@model_options
@sampling_options(max_tokens=1024, temperature=0.7, top_p=0.95)
@click.option("--system", metavar="TEXT", help="A system message at the beginning.")
def chat(
    model: str | None,
    device: str,
    context: int | None,
    precision: str,
    no_tune: bool,
    system: str | None,
    **given: Any,
) -> None:
    """Hold a conversation. /help lists the commands; Ctrl-C stops an answer, Ctrl-D ends."""
    options = answer_options(given)
    with load_model(model, device, context, precision, not no_tune) as loaded:
        if not loaded.has_chat_template:
            raise ModelError(
                f"{loaded.report.name} has no chat template: it continues text; use `shaderlm generate` for that"
            )
        conversation = Conversation(loaded, options, system)
        if _typed():
            _tell(f"{loaded.report.name} on {loaded.report.device}. /help lists the commands")
            with suppress(ImportError):  # not on Windows
                import readline  # noqa: F401  input() has a history once it is imported
        _loop(conversation)


def _typed() -> bool:
    """Does somebody sit at the keyboard, and not a pipe?"""
    return sys.stdin.isatty()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Conversation:
    """What was said so far, and who answers."""

    model: LanguageModel
    options: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def say(self, text: str) -> None:
        """Answer on stdout. A message that could not be answered, or was stopped before that, is forgotten again."""
        asked = [*self.messages, {"role": "user", "content": text}]
        used, most = len(self.model.chat_ids(asked)), self.model.config.context
        if used > most:
            _tell(_FULL.format(used=used, most=most))
            return
        answer, completion = _stream(self.model.stream_chat(asked, **self.options))
        if answer or completion is not None:
            self.messages = [*asked, {"role": "assistant", "content": answer}]
        if completion is not None and completion.finish_reason == "length":
            limit = self.options["max_tokens"]
            cut = f"the answer was cut after {limit:,} tokens; --max-tokens allows more"
            _tell(cut if len(completion.ids) == limit else _FULL.format(used=most, most=most))


def _stream(stream: Stream) -> tuple[str, Completion | None]:
    """Write an answer as it comes: the text that was written, and the completion unless Ctrl-C stopped it."""
    written: list[str] = []
    completion = None
    try:
        with stream:
            for piece in stream:
                written.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        completion = stream.completion
    except KeyboardInterrupt:
        pass
    print(flush=True)
    return "".join(written), completion


# The loop ------------------------------------------------------------------------------------------------


def _loop(conversation: Conversation) -> None:
    while True:
        try:
            line = _read_line()
            if line.startswith("/"):
                if not _command(conversation, line):
                    return
            elif line.strip():
                conversation.say(line)
        except EOFError:
            if _typed():
                _tell("")
            return
        except InputError as problem:  # the template refuses a message, or half a character was typed
            _tell(f"shaderlm: {problem}")
        except KeyboardInterrupt:
            if not _typed():  # nobody would type /quit
                raise
            _tell("\n/quit or Ctrl-D ends")


def _read_line() -> str:
    """The next line without its end; EOFError after the last one."""
    if _typed():
        if sys.stdout.isatty():
            return input("> ")
        print("> ", end="", file=sys.stderr, flush=True)  # input() would write it to stdout
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


# Commands ------------------------------------------------------------------------------------------------


def _reset(conversation: Conversation, argument: str) -> None:
    conversation.reset()
    _tell("a new conversation")


def _save(conversation: Conversation, argument: str) -> None:
    if not argument:
        _tell("/save needs the name of a file, such as /save conversation.json")
        return
    try:
        path = Path(argument).expanduser().resolve()
        _write(path, json.dumps(conversation.messages, ensure_ascii=False, indent=2) + "\n")
    except (OSError, RuntimeError, ValueError) as problem:  # an unknown ~user, a NUL
        _tell(f"{argument} cannot be written: {getattr(problem, 'strerror', None) or problem}")
        return
    _tell(f"saved {len(conversation.messages)} messages to {path}")


def _write(path: Path, text: str) -> None:
    """All or nothing: a file that was there stays whole until the new one is."""
    fresh = path.with_name(f".{path.name[:100]}.{os.getpid()}.tmp")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise


def _help(conversation: Conversation, argument: str) -> None:
    for usage, (_, meaning) in COMMANDS.items():
        _tell(f"{usage:<11} {meaning}")
    _tell("Ctrl-C stops an answer. A message that begins with / needs a space before it.")


COMMANDS: dict[str, tuple[Callable[[Conversation, str], None] | None, str]] = {
    "/reset": (_reset, "forget the conversation"),
    "/save FILE": (_save, "write the conversation to FILE, as JSON messages"),
    "/help": (_help, "this list"),
    "/quit": (None, "end; so does Ctrl-D"),
}


def _command(conversation: Conversation, line: str) -> bool:
    """Run a command; False if it ends the chat."""
    word, _, argument = line.strip().partition(" ")
    known = {usage.split()[0]: run for usage, (run, _) in COMMANDS.items()}
    if word not in known:
        close = difflib.get_close_matches(word.lower(), known, 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        _tell(f"{word} is not a command; {hint}")
        return True
    run = known[word]
    if run is not None:
        run(conversation, argument.strip())
    return run is not None
