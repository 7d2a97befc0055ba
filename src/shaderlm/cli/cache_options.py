"""--cache-dir and --cache-disk: what is computed of prompts is kept in a folder. And how sizes are written."""

from __future__ import annotations

import re
from typing import Any

import click

from .options import Command, apply_options

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size_in_bytes(context: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """A size such as 512M or 8GiB."""
    if text is None:
        return None
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if size is None or float(size[1]) <= 0:
        raise click.BadParameter(f"{text!r} must be a size such as 512M or 8G", context, param)
    return int(float(size[1]) * _UNITS[size[2]])


def _disk(context: click.Context, param: click.Parameter, text: str | None) -> int | None:
    if text is not None and context.params.get("cache_dir") is None:
        raise click.UsageError("--cache-disk is for --cache-dir; give that, too.", context)
    return size_in_bytes(context, param, text)


def cache_options(command: Command) -> Command:
    """Both, as the arguments `cache_dir` and `cache_disk`."""
    words = "Keep what is computed of prompts in this folder: later processes do not compute it again."
    path: Any = click.Path(file_okay=False)
    options = [
        click.option("--cache-dir", type=path, is_eager=True, metavar="DIR", help=words),
        click.option("--cache-disk", callback=_disk, metavar="SIZE", help="Of its files, at most.  [default: 8G]"),
    ]
    return apply_options(options, command)
