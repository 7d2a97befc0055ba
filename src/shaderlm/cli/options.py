"""Options that the commands with a model share, and their checks: all of them before anything is loaded."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from ..errors import InputError
from ..formats.weight_formats import QUANTIZED
from .completion import complete_files, complete_models
from .prompts import read_text
from .sampler_options import sampler_options

if TYPE_CHECKING:
    from ..engine import GenerationOptions, LanguageModel
    from ..gpu import Backend

# Of conversations, with a model that has no values of its own: those of llama-server and of the page.
CHAT_SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class ModelOptions:
    """A model, where it runs, and how it is loaded."""

    model: str | None
    device: str
    backend: Backend
    context: int | None
    precision: str
    no_tune: bool
    ignore_keys: tuple[str, ...]
    quantize: str | None
    cache_dir: str | None = None
    cache_disk: int | None = None
    draft: str | None = None
    draft_model: str | None = None
    draft_tokens: int | None = None
    mmproj: str | None = None
    no_vision: bool = False
    image_tokens: tuple[int, int] | None = None


def _biases(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[int, float]:
    """ID=VALUE, each a pair of the mapping."""
    biases = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            expected = "a token id and a number, such as 42=-1.5 or 42=-inf"
            raise click.BadParameter(f"{text!r} must be {expected}", ctx, param) from None
    return biases


def apply_options(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    """A command with these options, in their order."""
    for option in reversed(options):
        command = option(command)
    return command


def precision_option(command: Command) -> Command:
    """--precision, as the argument `precision`."""
    words = "fast: inputs of matrix products may be rounded to 16 bits. exact: they may not."
    options = {"type": click.Choice(["fast", "exact"]), "default": "fast", "show_default": True}
    return click.option("--precision", help=words, **options)(command)  # type: ignore[arg-type]


def backend_option(command: Command) -> Command:
    """--backend, as the argument `backend`."""
    words = "Implementation of WebGPU: wgpu, dawn, or auto: the one that suits the adapter."
    options = {"type": click.Choice(["auto", "wgpu", "dawn"]), "default": "auto", "show_default": True}
    return click.option("--backend", help=words, **options)(command)  # type: ignore[arg-type]


def tune_option(command: Command) -> Command:
    """--no-tune, as the argument `no_tune`."""
    words = "Use the built-in kernels: ignore earlier measurements on this device, and measure nothing."
    return click.option("--no-tune", is_flag=True, help=words)(command)


def ignore_key_option(command: Command) -> Command:
    """--ignore-key, as the argument `ignore_keys`."""
    words = "Read the file as if it had no metadata key NAME, which is refused otherwise. May be repeated."
    return click.option("--ignore-key", "ignore_keys", multiple=True, metavar="NAME", help=words)(command)


def quantize_option(command: Command) -> Command:
    """--quantize, as the argument `quantize`."""
    words = "Compute with F32, F16 and BF16 matrices in this format. The copy is made once and kept."
    return click.option("--quantize", type=click.Choice(QUANTIZED), help=words)(command)


def adapter_option(command: Command) -> Command:
    """--device, as the argument `device`: one of the adapters, or None."""
    words = "Adapter: a kind (discrete, integrated, software), a number or part of its name.  [default: the best one]"
    return click.option("--device", help=words)(command)


def json_option(command: Command) -> Command:
    """--json, as the argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def model_option(command: Command) -> Command:
    """--model, as the argument `model`."""
    words = "A .gguf file, a Hugging Face folder, hf:ORG/REPO[/FILE.gguf], or a name.  [default: smollm2-135m]"
    return click.option("-m", "--model", shell_complete=complete_models, help=words)(command)


def context_option(command: Command) -> Command:
    """--context, as the argument `context`; llama.cpp's names for it are known, too."""
    words = "Largest number of tokens of a conversation.  [default: the model's own]"
    return click.option("-c", "--context", "--ctx-size", type=click.IntRange(1), metavar="N", help=words)(command)


def window_option(command: Command) -> Command:
    """--context of commands that read a text in windows, as the argument `context`."""
    words = "Tokens of a window of the text, which the model reads by itself.  [default: 512, or as in the file]"
    return click.option("-c", "--context", "--ctx-size", type=click.IntRange(4), metavar="N", help=words)(command)


def model_options(command: Callable[..., Any], context: Callable[[Any], Any] = context_option) -> Callable[..., Any]:
    """--model, --device and others, together as the argument `model_options`; --context by `context`."""

    @functools.wraps(command)
    def run(**options: Any) -> Any:
        named = {each.name: options.pop(each.name) for each in fields(ModelOptions) if each.name in options}
        return command(model_options=ModelOptions(**named), **options)

    return model_option(load_options(run, context))


def load_options(command: Command, context: Callable[[Any], Any] = context_option) -> Command:
    """--device and others: how a model is loaded, each as an argument of its own."""
    where = (
        "auto (a GPU, or the CPU if there is none), cpu, numpy, or an adapter: its number, kind, or part of its name."
    )
    options = [
        click.option("--device", default="auto", show_default=True, help=where),
        backend_option,
        context,
        precision_option,
        tune_option,
        ignore_key_option,
        quantize_option,
    ]
    return apply_options(options, command)


def model_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """MODEL as an argument, and as -m like in the other commands: either one as the argument `model`."""

    @functools.wraps(command)
    def run(models: tuple[str, ...], model: str | None, **options: Any) -> Any:
        models += () if model is None else (model,)
        if len(models) > 1:
            raise InputError(f"expected one model, got {', '.join(map(repr, models))}")
        return command(model=models[0] if models else None, **options)

    argument = click.argument("models", metavar="[MODEL]", nargs=-1, shell_complete=complete_models)
    option = click.option("-m", "--model", shell_complete=complete_models, help="The same as MODEL.")
    return apply_options([argument, option], run)


def sampling_options(
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    parse_special: bool | None = None,
) -> Callable[[Command], Command]:
    """Length, sampling and stopping: together what `generation_options` takes. llama.cpp's names are known, too."""

    def number(name: str, default: float, words: str, *others: str) -> Callable[[Command], Command]:
        names = [name, *others, name[2:].replace("-", "_")]
        return click.option(*names, type=float, default=default, show_default=shown(default), metavar="X", help=words)

    def shown(default: float) -> str:
        return f"the model's own, or {default:g}"

    limit = "Largest number of tokens to generate."
    options = [
        click.option(
            "-n",
            "--max-tokens",
            "--n-predict",
            "max_tokens",
            type=click.IntRange(1),
            default=max_tokens,
            metavar="N",
            help=limit,
            show_default=True,
        ),
        number("--temperature", temperature, "Randomness; 0 always takes the most likely token.", "-t", "--temp"),
        click.option(
            "--top-k",
            type=int,
            default=top_k,
            show_default=shown(top_k),
            metavar="K",
            help="Sample from the K most likely tokens (0: all).",
        ),
        number("--top-p", top_p, "Sample from the most likely tokens whose probabilities add up to X."),
        number("--min-p", min_p, "Sample from tokens with at least X times the largest probability."),
        number(
            "--repetition-penalty", 1.0, "Lower the logits of tokens seen before, by this factor.", "--repeat-penalty"
        ),
        click.option(
            "--presence-penalty",
            type=float,
            default=0.0,
            show_default=True,
            metavar="X",
            help="Subtract X from the logits of tokens seen before.",
        ),
        click.option(
            "--frequency-penalty",
            type=float,
            default=0.0,
            show_default=True,
            metavar="X",
            help="Subtract X from a token's logit for each time it was seen.",
        ),
        click.option(
            "--logit-bias",
            multiple=True,
            callback=_biases,
            metavar="ID=VALUE",
            help="Add VALUE to the logit of token ID; -inf excludes it. May be repeated.",
        ),
        sampler_options,
        click.option(
            "-s", "--seed", type=int, metavar="N", help="Seed of the sampler: the same seed gives the same text."
        ),
        click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text. May be repeated."),
        click.option("--ignore-eos", is_flag=True, help="Continue after the model's end-of-turn token."),
        click.option(
            "--parse-special/--no-parse-special",
            default=parse_special,
            show_default="only without a chat template" if parse_special is None else True,
            help="Read the text of a special token, such as <|im_end|>, as that token.",
        ),
    ]
    return lambda command: apply_options(options, command)


def structure_options(command: Command) -> Command:
    """--json-schema and --grammar: what `generation_options` takes, too."""
    schema = "The text is JSON that validates against the schema in FILE. Needs the extra `structured`."
    grammar = "The text is in the language of the grammar in FILE: GBNF as llama.cpp has it, or Lark."
    options = [
        click.option("--json-schema", callback=_schema_in, metavar="FILE", shell_complete=complete_files, help=schema),
        click.option("--grammar", callback=_text_in, metavar="FILE", shell_complete=complete_files, help=grammar),
    ]
    return apply_options(options, command)


def _text_in(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    try:
        return None if path is None else read_text(path)
    except InputError as problem:
        raise click.BadParameter(str(problem)) from None


def _schema_in(context: click.Context, parameter: click.Parameter, path: str | None) -> Any:
    text = _text_in(context, parameter, path)
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise click.BadParameter(f"{path} is not JSON: {problem}") from None


def generation_options(options: Any) -> GenerationOptions:
    """Keywords for `LanguageModel.stream`, checked: a wrong one is an InputError now and not after a long load."""
    from ..engine.options import generation_params

    if options["parse_special"] is None:
        del options["parse_special"]  # its default depends on whether there is a chat template
    checked: GenerationOptions = options
    generation_params(checked)
    return checked


# Where the value of an option comes from, if somebody gave it.
_EXPLICIT = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)


def with_model_values(options: GenerationOptions, model: LanguageModel) -> GenerationOptions:
    """The same with the model's own values of the options that nobody gave."""
    own: Any = {name: value for name, value in model.sampling_defaults.items() if not _is_explicit(name)}
    return {**options, **own}


def _is_explicit(name: str) -> bool:
    """To this command, or to the one that runs it."""
    context: click.Context | None = click.get_current_context()
    while context is not None:
        if context.get_parameter_source(name) in _EXPLICIT:
            return True
        context = context.parent
    return False


def with_flags(message: str) -> str:
    """A message for Python's users with its keyword arguments as flags: `device="x"` becomes `--device x`."""
    return re.sub(
        r'\b(device|context)=(?:"([^"]*)")?', lambda match: f"--{match[1]} {match[2] or ''}".rstrip(), message
    )
