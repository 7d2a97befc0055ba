"""`shaderlm tokenize`: a text as token ids, or token ids as text. Reads a file's vocabulary, and no weight."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from .loading import progress_bar
from .options import model_option
from .prompts import TextCommand, prompt_text

if TYPE_CHECKING:
    from ..engine.tokenizer import Tokenizer


@click.command(cls=TextCommand)
@click.argument("text", required=False)
@click.option(
    "-f",
    "--file",
    metavar="FILE",
    help="Read the text from FILE; - is standard input. TEXT goes first, if there is one.",
)
@model_option
@click.option("--ids", is_flag=True, help="TEXT or FILE has token ids; print their text.")
@click.option("--skip-special", is_flag=True, help="With --ids: leave out special tokens, such as <|im_end|>.")
@click.option("--no-bos", is_flag=True, help="Leave out the first token that the model wants before a text.")
@click.option(
    "--parse-special/--no-parse-special",
    default=True,
    show_default=True,
    help="Read the text of a special token, such as <|im_end|>, as that token.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as llama-server's /tokenize has it.")
def tokenize(
    text: str | None,
    file: str | None,
    model: str | None,
    ids: bool,
    skip_special: bool,
    no_bos: bool,
    parse_special: bool,
    as_json: bool,
) -> None:
    """Show the tokens of a text, or the text of tokens.

    Each line has an id and the text of the token. TEXT `-`, or nothing in a pipe, reads standard input. No chat
    template is applied.
    """
    if skip_special and not ids:
        raise click.UsageError("--skip-special is about the text of token ids; give --ids, too.")
    text = prompt_text(text, file, "TEXT")
    tokens = _token_ids(text) if ids else []
    tokenizer = _tokenizer(model)
    if ids:
        content = tokenizer.decode(tokens, skip_special=skip_special)
        print(json.dumps({"content": content}, ensure_ascii=False) if as_json else content, flush=True)
        return
    tokens = tokenizer.encode(text, parse_special=parse_special)
    bos = tokenizer.vocabulary.bos
    if tokenizer.vocabulary.add_bos and bos is not None and not no_bos and tokens[:1] != [bos]:
        tokens.insert(0, bos)
    pieces = [tokenizer.text_or_bytes(token) for token in tokens]
    if as_json:
        listed = [{"id": token, "piece": piece} for token, piece in zip(tokens, pieces, strict=True)]
        print(json.dumps({"tokens": listed}, ensure_ascii=False), flush=True)
        return
    width = len(str(max(tokens, default=0)))
    for token, piece in zip(tokens, pieces, strict=True):
        print(f"{token:>{width}} {piece!r}" if isinstance(piece, str) else f"{token:>{width}} {bytes(piece)!r}")
    if sys.stdout.isatty():
        print(f"{len(tokens):,} tokens", file=sys.stderr)


def _tokenizer(model: str | None) -> Tokenizer:
    from ..engine.tokenizer import Tokenizer
    from ..formats.find import find

    with progress_bar() as progress:
        path = find(model, progress)
    return Tokenizer.from_file(path)


def _token_ids(text: str) -> list[int]:
    """Numbers between spaces, commas or brackets; or what --json prints."""
    ids: list[Any] = []
    if text.lstrip().startswith("{"):
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            ids = [each["id"] if isinstance(each, dict) else each for each in json.loads(text)["tokens"]]
    elif re.fullmatch(r"[\s\d,\[\]]+", text):
        digits = re.findall(r"\d+", text)
        ids = list(map(int, digits)) if max(map(len, digits), default=0) < 20 else []
    if not ids or not all(type(each) is int for each in ids):
        shown = text if len(text) <= 40 else text[:40] + "…"
        raise InputError(f"--ids takes token ids such as 504 2365, or what --json prints; got {shown!r}")
    return ids
