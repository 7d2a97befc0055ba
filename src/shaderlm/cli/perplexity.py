"""`shaderlm perplexity`: how well a model predicts a text, and how far it is from another one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from ..errors import InputError
from ..files import check_writable
from .completion import complete_files
from .loading import LINE_SECONDS, count_bar, load_model
from .options import ModelOptions, model_options, window_option
from .prompts import read_text
from .streaming import tell

if TYPE_CHECKING:
    from ..engine import LanguageModel
    from ..evaluate.divergence import Statistics
    from ..evaluate.perplexity import Estimate
    from ..evaluate.windows import Windows

Values = TypeVar("Values")


@click.command()
@click.argument("arguments", nargs=-1, metavar="[MODEL] [FILE]", shell_complete=complete_files)
@click.option(
    "-f", "--file", metavar="FILE", shell_complete=complete_files, help="The same as FILE; - is standard input."
)
@partial(model_options, context=window_option)
@click.option("--chunks", type=click.IntRange(1), metavar="N", help="Read the first N windows only.")
@click.option(
    *("--save-logits", "--save-all-logits"),
    type=click.Path(path_type=Path),
    help="Write all log probabilities to a file, for --kl-against. llama-perplexity reads it, too.",
)
@click.option(
    "--kl-against",
    type=click.Path(path_type=Path),
    help="Compare with the model that wrote this file, here or in llama.cpp. FILE may be left out.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def perplexity(
    arguments: tuple[str, ...],
    file: str | None,
    model_options: ModelOptions,
    chunks: int | None,
    save_logits: Path | None,
    kl_against: Path | None,
    as_json: bool,
) -> None:
    """Measure how well a model predicts a text.

    The numbers are llama-perplexity's. FILE is read in windows of --context tokens, and those of the second half of
    each count. --kl-against also tells how far the probabilities are from those of another model, such as the same one
    in full precision.
    """
    model, file = _model_and_file(arguments, model_options.model, file, needs_file=kl_against is None)
    if save_logits is not None and kl_against is not None:
        raise click.UsageError("Give either --save-logits or --kl-against.")
    if save_logits is not None:
        check_writable(save_logits)
    text = None if file is None else read_text(file)
    if kl_against is None:
        assert text is not None
        _perplexity(replace(model_options, model=model), text, chunks, save_logits, as_json)
    else:
        _compare(replace(model_options, model=model), text, chunks, kl_against, as_json)


def _model_and_file(
    arguments: tuple[str, ...], model: str | None, file: str | None, *, needs_file: bool
) -> tuple[str | None, str | None]:
    """MODEL and FILE, either of which may be an option. One argument is FILE, unless it may be left out."""
    left = list(arguments)
    if file is None and left and (needs_file or model is not None or len(left) > 1):
        file = left.pop()
    if model is None and left:
        model = left.pop()
    if left:
        raise InputError(f"expected a model and a file, got {', '.join(map(repr, arguments))} beside the options")
    if file is None and needs_file:
        raise click.UsageError("Missing argument 'FILE', the text that is read.")
    return model, file


# Perplexity ----------------------------------------------------------------------------------------------


def _perplexity(options: ModelOptions, text: str, chunks: int | None, save: Path | None, as_json: bool) -> None:
    from ..evaluate.perplexity import perplexity as perplexity_of
    from ..evaluate.perplexity import scored_windows
    from ..evaluate.windows import WINDOW, text_tokens, windows_of

    options = replace(options, context=options.context or WINDOW)
    assert options.context is not None
    with load_model(options) as model:
        windows = windows_of(model, text_tokens(model, text), options.context, chunks)
        values = scored_windows(model, windows) if save is None else _saved_windows(model, windows, save)
        nll = _collect(values, len(windows), lambda all_of_them: perplexity_of(_concatenated(all_of_them)))
        found = perplexity_of(_concatenated(nll))
    if as_json:
        record = {"model": model.report.name, "device": model.report.device, **_sizes(windows)}
        print(json.dumps({**record, "perplexity": found.mean, "error": found.error, "tokens": found.count}), flush=True)
        return
    print(f"Final estimate: PPL = {found.mean:.4f} +/- {found.error:.5f}", flush=True)
    tell(f"{_described(windows)}; {found.count:,} tokens count")


def _saved_windows(model: LanguageModel, windows: Windows, path: Path) -> Generator[Any]:
    """The same values, from all logits, which go to a file."""
    import numpy as np

    from ..evaluate.divergence import log_softmax, run_logits
    from ..evaluate.logits_file import logits_writer

    with logits_writer(path, windows, model.config.vocabulary) as writer:
        for index in range(len(windows)):
            targets, nll = np.array(windows.targets(index)), list[Any]()

            def take(first: int, logits: Any, targets: Any = targets, nll: list[Any] = nll) -> None:
                writer.write(logits)
                rows = np.arange(len(logits))
                nll.append(-log_softmax(logits)[rows, targets[first : first + len(logits)]])

            run_logits(model, windows, index, take)
            yield np.concatenate(nll)


# KL divergence -------------------------------------------------------------------------------------------


def _compare(options: ModelOptions, text: str | None, chunks: int | None, path: Path, as_json: bool) -> None:
    from ..evaluate.divergence import check_base, compared_windows, joined, statistics
    from ..evaluate.logits_file import LogitsFile
    from ..evaluate.perplexity import perplexity as perplexity_of
    from ..evaluate.windows import Windows, bos_of, text_tokens

    with closing(LogitsFile(path)) as base:
        if options.context not in (None, base.size):
            raise InputError(
                f"{path} has windows of {base.size:,} tokens; --context {options.context:,} differs from that"
            )
        with load_model(replace(options, context=base.size)) as model:
            tokens = None if text is None else text_tokens(model, text)
            check_base(base, model, tokens)
            count = base.count if chunks is None else min(chunks, base.count)
            windows = Windows(base.tokens[: count * base.size], base.size, bos_of(model))
            values = compared_windows(model, windows, base)
            rows = _collect(values, count, lambda so_far: perplexity_of(joined(so_far).nll))
            found = statistics(joined(rows))
    if as_json:
        record = {"model": model.report.name, "device": model.report.device, **_sizes(windows), "base": str(path)}
        print(json.dumps(record | asdict(found)), flush=True)
        return
    print("\n".join(_lines(found)), flush=True)
    tell(f"{_described(windows)}; {found.kld.count:,} tokens count")


def _lines(found: Statistics) -> Iterator[str]:
    """llama-perplexity's tables."""

    def line(name: str, value: Estimate, digits: int = 6) -> str:
        return f"{name:<30}: {value.mean:10.{digits}f} ± {value.error:10.{digits}f}"

    yield "====== Perplexity statistics ======"
    yield line("Mean PPL(Q)", found.ppl)
    yield line("Mean PPL(base)", found.ppl_base)
    correlation = "–" if found.correlation is None else f"{100 * found.correlation:6.2f}%"
    yield f"Cor(ln(PPL(Q)), ln(PPL(base))): {correlation}"
    yield line("Mean ln(PPL(Q)/PPL(base))", found.log_ratio)
    yield line("Mean PPL(Q)/PPL(base)", found.ratio)
    yield line("Mean PPL(Q)-PPL(base)", found.difference)
    yield ""
    yield "====== KL divergence statistics ======"
    yield f"Mean    KLD: {found.kld.mean:10.6f} ± {found.kld.error:10.6f}"
    yield f"Maximum KLD: {found.kld_extremes[1]:10.6f}"
    for percent, value in found.kld_percentiles.items():
        yield f"{_percent(percent):<8}KLD: {value:10.6f}"
    yield f"Minimum KLD: {found.kld_extremes[0]:10.6f}"
    yield ""
    yield "====== Token probability statistics ======"
    yield f"Mean    Δp: {100 * found.delta.mean:6.3f} ± {100 * found.delta.error:5.3f} %"
    yield f"Maximum Δp: {100 * found.delta_extremes[1]:6.3f}%"
    for percent, value in found.delta_percentiles.items():
        yield f"{_percent(percent):<8}Δp: {100 * value:6.3f}%"
    yield f"Minimum Δp: {100 * found.delta_extremes[0]:6.3f}%"
    yield f"RMS Δp    : {100 * found.delta_rms.mean:6.3f} ± {100 * found.delta_rms.error:5.3f} %"
    yield f"Same top p: {100 * found.same_top.mean:6.3f} ± {100 * found.same_top.error:5.3f} %"


def _percent(value: float) -> str:
    return "Median" if value == 50 else f"{value:4.1f}%"


# Both ----------------------------------------------------------------------------------------------------


def _collect(values: Generator[Values], total: int, perplexity_of: Callable[[list[Values]], Estimate]) -> list[Values]:
    """The values of all windows. Ctrl-C ends the program, and says how far it came."""
    came = list[Values]()
    try:
        with _progress(total) as progress, closing(values):
            for each in values:
                came.append(each)
                progress(len(came), perplexity_of(came))
    except KeyboardInterrupt:
        _interrupted(len(came), total, perplexity_of(came) if came else None)
    return came


def _interrupted(done: int, total: int, found: Estimate | None) -> NoReturn:
    so_far = "" if found is None else f"; PPL = {found.mean:.4f} +/- {found.error:.5f} so far"
    tell(f"interrupted after {done:,} of {total:,} windows{so_far}")
    sys.exit(130)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, Estimate], None]]:
    """A bar on a terminal's standard error, gone afterwards; elsewhere a line now and then."""
    if not sys.stderr.isatty():
        yield _lines_now_and_then(total)
        return
    from rich.progress import TimeRemainingColumn

    bars = count_bar(TimeRemainingColumn())
    task = bars.add_task("PPL", total=total)
    with bars:
        yield lambda done, found: bars.update(task, completed=done, description=f"PPL {found.mean:.4f}")


def _lines_now_and_then(total: int) -> Callable[[int, Estimate], None]:
    due = time.monotonic() + LINE_SECONDS

    def say(done: int, found: Estimate) -> None:
        nonlocal due
        if time.monotonic() >= due:
            tell(f"{done:,} of {total:,} windows, PPL = {found.mean:.4f}")
            due = time.monotonic() + LINE_SECONDS

    return say


def _concatenated(values: list[Any]) -> Any:
    import numpy as np

    return np.concatenate(values)


def _sizes(windows: Windows) -> dict[str, int]:
    return {"windows": len(windows), "context": windows.size}


def _described(windows: Windows) -> str:
    return f"{len(windows):,} window{'s' * (len(windows) > 1)} of {windows.size:,} tokens"
