"""Checks of the arguments of every command, before the command reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import click

_NUMBERS = {"integer": "whole number", "float": "number"}
_NO_NUMBER = re.compile(r"is not a valid (integer|float)(?: range)?(?=\.)")


class CommandGroup(click.Group):
    """A group whose commands get arguments that are text, and short options that are theirs."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with these checks."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            context = click.Context(command, info_name=name, parent=ctx)
            _check_text(context, rest)
            _check_options(context, rest)
        return name, command, rest


def use_plain_words(problem: click.ClickException) -> None:
    """Let a refused number say what it is not, in words that are not click's."""
    if isinstance(problem, click.BadParameter):
        problem.message = _NO_NUMBER.sub(lambda found: f"is not a {_NUMBERS[found[1]]}", problem.message)  # type: ignore[misc]  # not changed otherwise


def _check_text(context: click.Context, args: Sequence[str]) -> None:
    """Names of files may be any bytes. Everything else is text."""
    for arg in args:
        try:
            arg.encode()
        except UnicodeEncodeError:
            if not os.path.lexists(arg):
                message = f"Arguments must be UTF-8, got {os.fsencode(arg)!r}."
                raise click.UsageError(message, context) from None


def _check_options(context: click.Context, args: Sequence[str]) -> None:
    """Those of `shaderlm` itself go before the command. `-ngl` is no option of ours, and not `-n` with the value `gl`,
    as click reads it. `-n5` and `-hv` are fine.
    """
    command = context.command
    options = [each for each in command.get_params(context) if isinstance(each, click.Option)]
    named = {name: each for each in options for name in (*each.opts, *each.secondary_opts)}
    commands = command.commands if isinstance(command, click.Group) else {}
    before = {name for each in context.find_root().command.params for name in each.opts if name.startswith("--")}
    is_value = False
    for arg in args:
        if is_value:
            is_value = False
        elif arg == "--" or arg in commands:  # what follows is another command's
            return
        elif arg in named:
            is_value = _takes_value(named[arg])
        elif (name := arg.partition("=")[0]) in before:
            message = f"{name} goes before the command, as in `shaderlm {name} … {context.info_name}`."
            raise click.UsageError(message, context)
        elif re.match(r"-[^\W\d]{2}", arg):
            for at, letter in enumerate(arg[1:], 1):
                option = named.get(f"-{letter}")
                is_value = option is not None and _takes_value(option)
                if option is None or (is_value and arg[at + 1 :]):
                    raise click.UsageError(_no_such_option(arg, at, option), context)


def _no_such_option(arg: str, at: int, option: click.Option | None) -> str:
    if option is None or at > 1 or not _accepts(option, arg[2:]):
        return f"No such option: {arg}"
    return f"No such option: {arg}. (A value follows after a space: {arg[:2]} {arg[2:]})"


def _accepts(option: click.Option, value: str) -> bool:
    try:
        option.type.convert(value, option, None)
    except click.BadParameter:
        return False
    return True


def _takes_value(option: click.Option) -> bool:
    return not option.is_flag and not option.count
