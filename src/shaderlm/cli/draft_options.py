"""--draft and --draft-tokens: how tokens are drafted that several rows of a step verify."""

from __future__ import annotations

from typing import Any

import click

from .options import Command, apply_options


def draft_options(command: Command) -> Command:
    """Both, as the arguments `draft` and `draft_tokens`."""
    words = "Draft tokens, and verify several in a step: ngram repeats what came before. The text is the same."
    most = "Tokens that are drafted for a text at once, at most.  [default: 15]"
    size: Any = click.IntRange(1, 64)  # as in `engine.draft_settings`, which takes long to import
    options = [
        click.option("--draft", type=click.Choice(["ngram"]), help=words),
        click.option("--draft-tokens", "--draft-max", type=size, metavar="N", help=most),
    ]
    return apply_options(options, command)
