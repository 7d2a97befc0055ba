"""--draft, --draft-model and --draft-tokens: how tokens are drafted that several rows of a step verify."""

from __future__ import annotations

from typing import Any

import click

from .completion import complete_models
from .options import Command, apply_options


def draft_options(command: Command) -> Command:
    """All, as the arguments `draft`, `draft_model` and `draft_tokens`."""
    words = "Draft tokens, and verify several in a step: ngram repeats what came before. The text is the same."
    most = "Tokens that are drafted for a text at once, at most.  [default: 15]"
    size: Any = click.IntRange(1, 64)  # as in `engine.draft_settings`, which takes long to import
    model = "Draft by this model, which has the same vocabulary: a file, folder or name, as for -m."
    options = [
        click.option("--draft-model", "-md", shell_complete=complete_models, metavar="MODEL", help=model),
        click.option("--draft", type=click.Choice(["ngram"]), help=words),
        click.option("--draft-tokens", "--draft-max", type=size, metavar="N", help=most),
    ]
    return apply_options(options, command)
