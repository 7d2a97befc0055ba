"""Options that the commands with a model share, and their checks: all of them before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from ..errors import InputError

Command = TypeVar("Command", bound=Callable[..., Any])


def _biases(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> dict[int, float]:
    """ID=VALUE, each a pair of the mapping."""
    found = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            expected = "a token id and a number, such as 42=-1.5 or 42=-inf"
            raise click.BadParameter(f"{text!r} must be {expected}", ctx, param) from None
    return found


def _applied(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def precision_option(command: Command) -> Command:
    """--precision, as the argument `precision`."""
    words = "exact: no rounding of the inputs of matrix products to 16 bits, which GPUs do for speed."
    return click.option("--precision", type=click.Choice(["fast", "exact"]), default="fast", help=words)(command)


def tune_option(command: Command) -> Command:
    """--no-tune, as the argument `no_tune`."""
    words = "Take the built-in routes, not those that were timed on this device; time none."
    return click.option("--no-tune", is_flag=True, help=words)(command)


def model_options(command: Command) -> Command:
    """--model, --device, --context, --precision and --no-tune, as arguments of these names."""
    named = "Path of a .gguf file, hf:ORG/REPO/FILE.gguf, or a name (default: smollm2-135m, fetched once)."
    where = "auto (default: a GPU, or else the CPU), cpu, or an adapter: a kind, a number or part of its name."
    options = [
        click.option("-m", "--model", help=named),
        click.option("--device", default="auto", help=where),
        click.option("--context", type=click.IntRange(1), help="Most tokens of a conversation (default: the model's)."),
        precision_option,
        tune_option,
    ]
    return _applied(options, command)


def model_argument(command: Command) -> Command:
    """MODEL as an argument, and as -m like in the other commands: both as `given`, for `one_model`."""
    argument = click.argument("given", metavar="[MODEL]", nargs=-1)
    option = click.option("-m", "--model", help="The same as MODEL.")
    return _applied([argument, option], command)


def one_model(given: Sequence[str], model: str | None) -> str | None:
    """The model that was named in either way, or neither."""
    named = [*given, *([] if model is None else [model])]
    if len(named) > 1:
        raise InputError(f"expected one model, got {', '.join(map(repr, named))}")
    return named[0] if named else None


def sampling_options(*, max_tokens: int, temperature: float, top_p: float) -> Callable[[Command], Command]:
    """How much is answered and how tokens are chosen: together what `answer_options` takes."""
    options = [
        click.option(
            "-n", "--max-tokens", type=click.IntRange(1), default=max_tokens, help="Most tokens.", show_default=True
        ),
        click.option("-t", "--temperature", type=float, default=temperature, help="0 is greedy.", show_default=True),
        click.option("--top-k", type=int, default=0, help="Only the K likeliest tokens (0: all)."),
        click.option("--top-p", type=float, default=top_p, help="Only the likeliest that reach P.", show_default=True),
        click.option("--min-p", type=float, default=0.0, help="Only those with this part of the likeliest's share."),
        click.option("--repetition-penalty", type=float, default=1.0, help="Divides logits of tokens seen before."),
        click.option("--presence-penalty", type=float, default=0.0, help="Subtracted once from tokens seen before."),
        click.option("--frequency-penalty", type=float, default=0.0, help="Subtracted per time a token was seen."),
        click.option(
            "--logit-bias",
            multiple=True,
            callback=_biases,
            metavar="ID=VALUE",
            help="Added to a token's logit. May be repeated.",
        ),
        click.option("--seed", type=int, help="The same seed gives the same answer."),
        click.option("--stop", multiple=True, metavar="TEXT", help="Ends the answer. May be repeated."),
        click.option("--ignore-eos", is_flag=True, help="Go on past the model's end."),
    ]
    return lambda command: _applied(options, command)


def answer_options(given: dict[str, Any]) -> dict[str, Any]:
    """Keywords for `LanguageModel.stream`, checked: a wrong one is an InputError now and not after a long load."""
    from ..engine import Sampling

    Sampling(**{name: value for name, value in given.items() if name not in ("max_tokens", "stop", "ignore_eos")})
    return given
