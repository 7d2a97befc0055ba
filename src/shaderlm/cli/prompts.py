"""The text that a command is given: as an argument, in a file, or on standard input."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..errors import InputError


class TextCommand(click.Command):
    """A command whose last argument is a text: several words without quotes are told apart from other mistakes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as problem:
            if not problem.message.startswith("Got unexpected extra argument"):
                raise
            raise click.UsageError(f"{problem.message}. Put a text of several words in quotes.", ctx) from None


def prompt_text(argument: str | None, file: str | None, name: str = "PROMPT") -> str:
    """The text of the argument of this name and of FILE, with an empty line between them; without both, of a pipe."""
    if argument is None and file is None:
        if sys.stdin.isatty():
            raise click.UsageError(f"Missing argument '{name}', or -f FILE.")
        argument = "-"
    if argument == file == "-":
        raise click.UsageError(f"{name} and -f FILE cannot both be standard input.")
    texts = [] if argument is None else [read_text("-") if argument == "-" else argument]
    text = "\n\n".join(texts if file is None else [*texts, read_text(file)])
    if not text:
        raise InputError(f"the {name.lower()} is empty; give at least one word")
    return text


def read_text(path: str) -> str:
    """A text file, or standard input for `-`. The newline that ends the last line is not part of a prompt."""
    name = "standard input" if path == "-" else path
    try:
        read = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return read.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as problem:
        raise InputError(f"{name} must be UTF-8, byte {problem.start} is not") from None
    except OSError as problem:
        raise InputError(f"cannot read {name}: {problem.strerror}") from None
