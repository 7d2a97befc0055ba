"""`shaderlm chat`: a conversation at a terminal or through a pipe.

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
from ..files import atomic_write_text
from .loading import load_model
from .options import generation_options, model_options, sampling_options
from .streaming import tell_cancelled, write_stream

if TYPE_CHECKING:
    from ..engine import GenerationOptions, LanguageModel
    from ..gpu import Backend

_FULL = "the conversation is full: {used:,} tokens, the context holds {limit:,}. /reset starts a new one"
_TOO_LONG = "this message is too long: {used:,} tokens, the context holds {limit:,}"
_DROPPED = "there is no answer yet, and your message is not part of the conversation"
_STOPPED = "the answer ends here, and is part of the conversation as far as it came"
_QUOTES = '"""'


@click.command()
@model_options
@sampling_options(max_tokens=1024, temperature=0.7, top_p=0.95)
@click.option("--system", metavar="TEXT", help="A system message at the beginning.")
def chat(
    model: str | None,
    device: str,
    backend: Backend,
    context: int | None,
    precision: str,
    no_tune: bool,
    ignore_keys: tuple[str, ...],
    system: str | None,
    **given: Any,
) -> None:
    """Chat with a model.

    /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat. A message of several lines is pasted, or
    begins and ends with three quotes.
    """
    options = generation_options(given, model)
    if _interactive():
        _import_readline()
    with load_model(model, device, backend, context, precision, not no_tune, ignore_keys) as loaded:
        if not loaded.has_chat_template:
            raise ModelError(
                f"{loaded.report.name} has no chat template; use `shaderlm generate`, which continues a text"
            )
        conversation = Conversation(loaded, options, system)
        if _interactive():
            _tell(f"{loaded.report.name} on {loaded.report.device}. /help lists the commands")
        _loop(conversation)


def _import_readline() -> None:
    """Give input() line editing and a history. To be called before any adapter is opened.

    Opening adapters may load Mesa, which loads LLVM and with it libedit. If that comes first, readline's functions are
    libedit's, and a long line corrupts the heap.
    """
    with suppress(ImportError):  # not on Windows
        import readline

        # Python switches it off. With it a paste of several lines is one message.
        if os.environ.get("TERM", "dumb") != "dumb":
            readline.parse_and_bind("set enable-bracketed-paste on")


def _interactive() -> bool:
    """Is stdin a keyboard, and not a pipe?"""
    return sys.stdin.isatty()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Conversation:
    """The messages so far, and the model that answers."""

    model: LanguageModel
    options: GenerationOptions
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def say(self, text: str) -> None:
        """Answer on stdout. A message without an answer, because it does not fit or was stopped, is forgotten."""
        message = {"role": "user", "content": text}
        asked = [*self.messages, message]
        used, limit = self._tokens(asked), self.model.config.context
        if used > limit:
            alone = self._tokens([*(m for m in self.messages[:1] if m["role"] == "system"), message])
            _tell((_TOO_LONG if alone > limit else _FULL).format(used=alone if alone > limit else used, limit=limit))
            return
        stream = self.model.stream_chat(asked, **self.options)
        answer, interrupted = write_stream(stream)
        completion = None if interrupted else stream.completion
        if answer or completion is not None:
            self.messages = [*asked, {"role": "assistant", "content": answer}]
        if interrupted:
            tell_cancelled(_STOPPED if answer else _DROPPED, answer)
        if completion is not None and completion.finish_reason == "length":
            max_tokens = self.options["max_tokens"]
            cut = f"answer cut after {max_tokens:,} tokens; --max-tokens (-n) allows more"
            _tell(cut if len(completion.ids) == max_tokens else _FULL.format(used=limit, limit=limit))

    def _tokens(self, messages: list[dict[str, str]]) -> int:
        return len(self.model.chat_ids(messages, parse_special=self.options["parse_special"]))


# The loop ------------------------------------------------------------------------------------------------


def _loop(conversation: Conversation) -> None:
    while True:
        try:
            text, command = _read_message()
            if command:
                if not _command(conversation, text):
                    return
            elif text.strip():
                conversation.say(text)
        except EOFError:
            if _interactive():
                _tell("")
            return
        except InputError as problem:  # the template refuses a message, or half a character was typed
            _tell(f"shaderlm: {problem}")
        except KeyboardInterrupt:
            if not _interactive():  # nobody would type /quit
                raise
            _tell("\n/quit or Ctrl-D ends the chat")


def _read_message() -> tuple[str, bool]:
    """A message, and whether it is a command; EOFError after the last one.

    It is a line, pasted lines, or the lines between three quotes and three quotes.
    """
    line = _read_line("> ")
    if not line.startswith(_QUOTES):
        return line, line.startswith("/") and "\n" not in line
    lines = [line.removeprefix(_QUOTES)]
    with suppress(EOFError):  # what was begun is a message too
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(_read_line("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    # A line that has nothing but the quotes is not part of the message.
    return "\n".join(lines).removeprefix("\n").removesuffix("\n"), False


def _read_line(prompt: str) -> str:
    """The next line without its end; EOFError after the last one."""
    if _interactive():
        if sys.stdout.isatty():
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)  # input() would write it to stdout
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


# Commands ------------------------------------------------------------------------------------------------


def _reset(conversation: Conversation, argument: str) -> None:
    conversation.reset()
    _tell("new conversation")


def _save(conversation: Conversation, argument: str) -> None:
    _save_to(conversation, "/save", argument)


def _save_over(conversation: Conversation, argument: str) -> None:
    _save_to(conversation, "/save!", argument)


def _save_to(conversation: Conversation, command: str, argument: str) -> None:
    if not argument:
        _tell(f"{command} needs the name of a file, such as {command} conversation.json")
        return
    try:
        path = Path(argument).expanduser().resolve()
        if command == "/save" and path.is_file():
            _tell(f"{path} exists; /save! {argument} overwrites it")
            return
        atomic_write_text(path, json.dumps(conversation.messages, ensure_ascii=False, indent=2) + "\n")
    except (OSError, RuntimeError, ValueError) as problem:  # an unknown ~user, a NUL
        _tell(f"{argument} cannot be written: {getattr(problem, 'strerror', None) or problem}")
        return
    _tell(f"saved {len(conversation.messages)} messages to {path}")


def _help(conversation: Conversation, argument: str) -> None:
    for usage, (_, meaning) in COMMANDS.items():
        _tell(f"{usage:<12} {meaning}")
    _tell(
        f"Ctrl-C stops an answer. {_QUOTES} begins a message of several lines, which ends with {_QUOTES}.\n"
        "A space before a / makes the line a message."
    )


COMMANDS: dict[str, tuple[Callable[[Conversation, str], None] | None, str]] = {
    "/reset": (_reset, "start a new conversation"),
    "/save FILE": (_save, "write the conversation to FILE, as JSON messages"),
    "/save! FILE": (_save_over, "the same, also if FILE exists"),
    "/help": (_help, "show this list"),
    "/quit": (None, "end the chat (so does Ctrl-D)"),
}


def _command(conversation: Conversation, line: str) -> bool:
    """Run a command; False if it ends the chat."""
    word, _, argument = line.strip().partition(" ")
    known = {usage.split()[0]: run for usage, (run, _) in COMMANDS.items()}
    if word not in known:
        close = difflib.get_close_matches(word.lower(), known, 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(known)}"
        _tell(f"{word} is not a command; {hint}")
        return True
    run = known[word]
    if run is not None:
        run(conversation, argument.strip())
    return run is not None
