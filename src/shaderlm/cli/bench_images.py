"""`shaderlm bench --image`: how fast models read pictures."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .models import check_device, load_any, open_described
from .speed import Rows, bar, subject_of

if TYPE_CHECKING:
    from ..formats.checkpoint import Checkpoint
    from ..gpu import Backend

# Options of `bench` that say something of tokens alone.
_OF_TOKENS = ("prompts", "generated", "both", "depths", "with_text", "save", "against", "threshold")


def measure_images(
    ctx: click.Context,
    sizes: Sequence[tuple[int, int]],
    *,
    models: Sequence[str],
    devices: Sequence[str],
    parallel: Sequence[int],
    output: str,
    repetitions: int,
    no_warmup: bool,
    precision: str,
    no_tune: bool,
    backend: Backend,
    ignore_keys: Sequence[str],
    **of_tokens: Any,
) -> None:
    """Run every size on every model and device; print a row as soon as there is one."""
    from ..bench.images import ImageTrial, check, run
    from ..bench.tables import image_record

    _refuse(ctx, of_tokens)
    trials = [ImageTrial(width, height, count) for width, height in sizes for count in parallel]
    for trial in trials:
        check(trial)
    options: dict[str, Any] = {"precision": precision, "tune": not no_tune, "measure": True, "ignore_keys": ignore_keys}
    subjects = list(itertools.product(models or (None,), devices or ("auto",)))
    rows, started = Rows(output, parallel != (1,)), time.monotonic()
    done, total = itertools.count(0, repetitions), len(subjects) * len(trials) * repetitions
    try:
        with ExitStack() as opened:
            checkpoints = _checkpoints(models, devices, backend, ignore_keys, opened)
            for name, device in subjects:
                with load_any(name, device, backend=backend, checkpoint=checkpoints.get(name), **options) as loaded:
                    subject = subject_of(loaded)
                    for trial in trials:
                        samples = []
                        with bar(trial.name, next(done), total, started, warming=not no_warmup) as repeated:
                            for samples in run(loaded, trial, repetitions, not no_warmup):
                                repeated(len(samples))
                        when = datetime.now(UTC).isoformat(timespec="seconds")
                        rows.add(image_record(subject, trial, samples, when))
    except KeyboardInterrupt:
        print("interrupted; what was measured is above", file=sys.stderr)
        sys.exit(130)
    finally:
        rows.end()


def _refuse(ctx: click.Context, of_tokens: Collection[str]) -> None:
    """Options that would say nothing here."""
    assert set(of_tokens) == set(_OF_TOKENS), "each option of `bench` is for pictures, too, or is not"
    given = [name for name in _OF_TOKENS if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if given:
        options = {param.name: max(param.opts, key=len) for param in ctx.command.params}
        named = ", ".join(options[name] for name in given)
        raise click.UsageError(f"--image times pictures alone: leave out {named}", ctx)


def _checkpoints(
    models: Sequence[str], devices: Sequence[str], backend: Backend, ignore_keys: Sequence[str], opened: ExitStack
) -> dict[str | None, Checkpoint]:
    """Of all models, open as long as `opened`. One that does not read images is an error before weights are loaded."""
    from ..bench.synthetic import parse
    from ..engine.tower_files import find_tower
    from ..errors import InputError

    for device in devices:
        check_device(device, backend)
    checkpoints: dict[str | None, Checkpoint] = {}
    for model in models or (None,):
        _, config, checkpoint = open_described(model, ignore_keys)
        if checkpoint is None:
            sees = bool(parse(str(model))[0].tower)
        else:
            checkpoints[model] = opened.enter_context(checkpoint)
            eyes = find_tower(checkpoint, config, None, None, on_device=False)
            sees = eyes is not None
            if eyes is not None:
                eyes.file.close()
        if not sees:
            raise InputError(f"{model or 'the default model'} does not read images, so --image has nothing to measure")
    return checkpoints
