"""--image, --mmproj and others: pictures of a prompt, and how the part of a model that reads them is loaded."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from .completion import complete_files
from .options import Command, apply_options

_SUFFIXES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif", ".bmp": "bmp"}


def vision_options(command: Command) -> Command:
    """All, as the arguments `mmproj`, `no_vision` and `image_tokens`."""
    beside = "The mmproj file of a GGUF model that reads images.  [default: the one beside it]"
    without = "Leave out the part that reads images."
    size: Any = click.IntRange(1, 16384)
    tokens = "The least and the most tokens of an image, where its size decides.  [default: the checkpoint's]"
    options = [
        click.option("--mmproj", metavar="FILE", shell_complete=complete_files, help=beside),
        click.option("--no-vision", is_flag=True, help=without),
        click.option("--image-tokens", type=(size, size), metavar="MIN MAX", help=tokens),
    ]
    return apply_options(options, command)


def image_option(command: Command) -> Command:
    """--image, as the argument `images`."""
    words = "A picture for the prompt: PNG, JPEG, WebP, GIF or BMP. May be repeated; pictures go before the text."
    name = "--image", "images"
    return click.option(*name, multiple=True, metavar="FILE", shell_complete=complete_files, help=words)(command)


def content_with(images: Sequence[str], text: str) -> str | list[dict[str, Any]]:
    """The content of a message with pictures of files, which are read now: a conversation can be saved."""
    if not images:
        return text
    return [*map(_part, images), {"type": "text", "text": text}]


def _part(path: str) -> dict[str, Any]:
    from ..vision.pictures import file_bytes, open_picture

    content = file_bytes(path)
    open_picture(content)  # what is no picture is an error here
    kind = _SUFFIXES.get(Path(path).suffix.lower(), "png")
    url = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def picture_path(text: str) -> str | None:
    """The path of a picture, if a line is nothing else: what a terminal pastes of a file."""
    path = text.strip().strip("'\"").removeprefix("file://").replace("\\ ", " ")
    try:
        there = Path(path).suffix.lower() in _SUFFIXES and Path(path).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # no path at all
        return None
    return path if there else None
