"""Options of samplers that few texts need, as llama.cpp spells them; and those that `serve` takes as defaults."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import click
from click.core import ParameterSource

Command = TypeVar("Command", bound=Callable[..., Any])


class _Number(NamedTuple):
    """An option that takes a number. Its first flag is its name in Python."""

    flags: tuple[str, ...]
    default: float
    help: str

    @property
    def name(self) -> str:
        """Of the argument."""
        return self.flags[0].removeprefix("--").replace("-", "_")

    def option(self, command: Command) -> Command:
        """A command with this option."""
        kind = type(self.default)
        options = {"type": kind, "default": self.default, "show_default": True, "metavar": "N", "help": self.help}
        return click.option(*self.flags, self.name, **options)(command)  # type: ignore[arg-type]


_SAMPLERS = (
    _Number(("--dry-multiplier",), 0.0, "DRY: lower tokens that would repeat a sequence. 0: off, 0.8 is common."),
    _Number(("--dry-base",), 1.75, "DRY: factor for each further token of the sequence."),
    _Number(("--dry-allowed-length",), 2, "DRY: tokens that may be repeated."),
    _Number(("--dry-penalty-last-n",), 64, "DRY: how many of the last tokens it looks at; -1: all."),
    _Number(("--xtc-probability",), 0.0, "XTC: how often only the least likely of the likely tokens is kept."),
    _Number(("--xtc-threshold",), 0.1, "XTC: tokens with at least this probability are likely."),
    _Number(("--typical-p", "--typical"), 1.0, "Sample from tokens of typical probability that add up to N; 1: all."),
    _Number(("--top-n-sigma", "--top-nsigma"), -1.0, "Sample from logits within N deviations of the largest; -1: all."),
    _Number(("--dynatemp-range",), 0.0, "The temperature follows the entropy within ±N; 0: it does not."),
    _Number(("--dynatemp-exponent", "--dynatemp-exp"), 1.0, "How it follows: by this power of the entropy."),
    _Number(("--mirostat",), 0, "2: Mirostat 2.0, instead of all filters."),
    _Number(("--mirostat-tau", "--mirostat-ent"), 5.0, "Mirostat: bits of surprise that it aims at."),
    _Number(("--mirostat-eta", "--mirostat-lr"), 0.1, "Mirostat: how quickly it follows."),
)
# Those that every request has. The defaults are not used: a family of APIs has its own.
_COMMON = (
    _Number(("--temperature", "--temp"), 0.0, "Temperature of requests that do not say."),
    _Number(("--top-k",), 0, "The same of top_k."),
    _Number(("--top-p",), 1.0, "The same of top_p."),
    _Number(("--min-p",), 0.0, "The same of min_p."),
    _Number(("--repetition-penalty", "--repeat-penalty"), 1.0, "The same of repetition_penalty."),
    _Number(("--presence-penalty",), 0.0, "The same of presence_penalty."),
    _Number(("--frequency-penalty",), 0.0, "The same of frequency_penalty."),
)


# All of them, as `generate` calls them.
SAMPLING_NAMES = (*(number.name for number in (*_COMMON, *_SAMPLERS)), "dry_sequence_breakers", "samplers")


def _breakers(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> list[str]:
    r"""Those that are given; none: no breaker. \n and \t are a newline and a tab."""
    return [text.replace("\\n", "\n").replace("\\t", "\t") for text in texts if text != "none"]


def sampler_options(command: Command) -> Command:
    """DRY, XTC and others: each as an argument with the name that `generate` has for it."""
    order = 'Which samplers act, in which order, such as "top_k;temperature".  [default: all]'
    command = click.option("--samplers", metavar="NAMES", help=order)(command)
    for number in reversed(_SAMPLERS[4:]):
        command = number.option(command)
    breakers: dict[str, Any] = {"multiple": True, "metavar": "TEXT", "callback": _breakers}
    command = click.option(
        "--dry-sequence-breaker",
        "dry_sequence_breakers",
        default=("\n", ":", '"', "*"),
        help='DRY: no sequence reaches over this text; none: over any. May be repeated.  [default: \\n, :, ", *]',
        **breakers,
    )(command)
    for number in reversed(_SAMPLERS[:4]):
        command = number.option(command)
    return command


def default_sampling_options(command: Command) -> Command:
    """The same and the common ones for `serve`: those that somebody gave, as the argument `sampling`."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        context = click.get_current_context()
        values = {name: options.pop(name) for name in SAMPLING_NAMES}
        said = [name for name in SAMPLING_NAMES if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
        return command(*args, sampling={name: values[name] for name in said}, **options)

    wrapped: Any = sampler_options(run)
    for number in reversed(_COMMON):
        wrapped = number.option(wrapped)
    return wrapped  # type: ignore[no-any-return]
