"""`shaderlm profile`: where the time of a prompt and of a token goes, dispatch by dispatch."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..version import __version__
from .loading import console, spoken
from .models import load_any, name_with_format, open_described
from .options import adapter_option, backend_option, model_argument, precision_option, tune_option

if TYPE_CHECKING:
    from rich.console import Console

    from ..gpu import Backend
    from ..profile.files import Profile
    from ..profile.measure import Event, Phase
    from ..runtime.gpu_runner import GpuRunner

_file = click.Path(dir_okay=False, path_type=Path)


@click.command()
@model_argument
@click.option(
    "-p", "--n-prompt", "prompt", type=click.IntRange(0), default=128, show_default=True, help="Prompt tokens."
)
@click.option(
    "-n", "--n-gen", "generated", type=click.IntRange(0), default=32, show_default=True, help="Tokens written."
)
@click.option("-d", "--n-depth", "depth", type=click.IntRange(0), default=0, help="Tokens already in the cache.")
@click.option(
    "--parallel", type=click.IntRange(1), default=1, metavar="N", help="Sequences that write tokens together."
)
@click.option("-r", "--repetitions", type=click.IntRange(1, 1000), default=3, show_default=True, help="Of the prompt.")
@adapter_option
@backend_option
@precision_option
@tune_option
@click.option("--unfused", multiple=True, metavar="FUSION", help="Leave out a fusion, or `all`. May be repeated.")
@click.option("--json", type=_file, help="Write the profile there, for --compare.")
@click.option("--trace", type=_file, help="Write a trace for ui.perfetto.dev or chrome://tracing.")
@click.option("--html", type=_file, help="Write a page with plots, to look at in a browser.")
@click.option("--compare", nargs=2, type=_file, metavar="A.json B.json", help="Compare two profiles; runs nothing.")
@click.pass_context
def profile(
    ctx: click.Context,
    model: str | None,
    prompt: int,
    generated: int,
    depth: int,
    parallel: int,
    repetitions: int,
    device: str | None,
    backend: Backend,
    precision: str,
    no_tune: bool,
    unfused: tuple[str, ...],
    json: Path | None,
    trace: Path | None,
    html: Path | None,
    compare: tuple[Path, Path] | None,
) -> None:
    """Time every dispatch of a prefill and of decoding.

    MODEL is a path or a name (default: smollm2-135m), or synthetic:SHAPE:FORMAT, random weights of that shape, as for
    `bench`.
    """
    from ..engine.planning import open_adapter
    from ..errors import InputError
    from ..profile.measure import check
    from ..runtime.gpu_runner import GpuRunner

    out = console(120)
    if compare is not None:
        _refuse_others(ctx)
        _print_comparison(out, *compare)
        return
    if not prompt and not generated:
        raise InputError("nothing to profile: -p and -n are both 0")
    fusions = _fusions_without(unfused)
    files = {"json": json, "trace": trace, "html": html}
    _check_files([path for path in files.values() if path is not None])
    _, config, checkpoint = open_described(model)
    check(config.context, prompt, generated, depth)
    adapter = open_adapter(device, "profiling", backend)
    if adapter.caps.software:
        words = "computes on the CPU: this may take minutes; -p 16 -n 2 -r 1 takes less"
        print(f"shaderlm: {adapter.caps.name} {words}", file=sys.stderr)
    options: dict[str, Any] = {"fusions": fusions, "precision": precision, "tune": not no_tune}
    with checkpoint or nullcontext(), load_any(model, adapter, checkpoint=checkpoint, **options) as loaded:
        assert isinstance(loaded.runner, GpuRunner), "an open device runs it"
        counts = (prompt, generated, depth, repetitions, parallel)
        measured, events, interrupted = _measure(loaded.runner, name_with_format(loaded), *counts, unfused)
    _write(measured, events, files)  # first: who reads what is printed may go away
    _print(out, measured)
    if interrupted:
        print("interrupted; what was measured is above", file=sys.stderr)
        sys.exit(130)


def _refuse_others(ctx: click.Context) -> None:
    """--compare runs nothing: another option beside it is a misunderstanding."""
    from click.core import ParameterSource

    others = [name for name in ctx.params if name != "compare"]
    if any(ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE and ctx.params[name] != () for name in others):
        raise click.UsageError("--compare takes two saved profiles and nothing else", ctx)


def _fusions_without(unfused: Sequence[str]) -> list[str] | None:
    from ..errors import InputError
    from ..graph.fuse import FUSIONS

    names = [fusion.name for fusion in FUSIONS]
    unknown = [name for name in unfused if name not in (*names, "all")]
    if unknown:
        raise InputError(f"no fusion {unknown[0]!r}; --unfused takes all, {', '.join(names)}")
    return [name for name in names if name not in unfused and "all" not in unfused] if unfused else None


def _check_files(paths: Sequence[Path]) -> None:
    from ..errors import InputError
    from ..files import check_writable

    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise InputError("--json, --trace and --html must name different files")
    for path in paths:
        check_writable(path)


def _measure(
    runner: GpuRunner,
    name: str,
    prompt: int,
    generated: int,
    depth: int,
    repetitions: int,
    parallel: int,
    unfused: Sequence[str],
) -> tuple[Profile, list[tuple[str, list[Event]]], bool]:
    from ..compile.roofline import measure_roofline
    from ..profile.files import Profile
    from ..profile.measure import check
    from ..profile.measure import profile as measure
    from .build import commit

    phases: list[Phase] = []
    events: list[tuple[str, list[Event]]] = []
    interrupted = False
    caps = runner.device.caps
    check(runner.config.context, prompt, generated, depth)  # a device may hold less than the model's
    with spoken() as say:
        say("copy bandwidth and arithmetic")
        roofline = measure_roofline(runner.device)
        # Phases report by themselves that they were interrupted; here between them.
        with suppress(KeyboardInterrupt):
            counts = (prompt, generated, depth, repetitions)
            measured = measure(runner, *counts, roofline.timestamp_us, say, parallel)
            for phase, spans, interrupted in measured:  # noqa: B007
                phases.append(phase)
                events.append((phase.name, spans))
    result = Profile(
        model=name,
        device=caps.name,
        backend=caps.backend,
        driver=caps.driver,
        software=caps.software,
        package=__version__,
        commit=commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["shaderlm", *sys.argv[1:]]),
        clock=runner.device.clock,
        notes=tuple(_notes(runner, prompt, unfused)),
        roofline=roofline,
        phases=tuple(phases),
    )
    return result, events, interrupted or len(phases) < bool(prompt) + bool(generated)


def _notes(runner: GpuRunner, prompt: int, unfused: Sequence[str]) -> Iterator[str]:
    from ..compile.workload import SOFTWARE_WARNING
    from ..gpu.tracer import BY_PASS, WALL
    from ..runtime.runner import bucket

    if runner.device.caps.software:
        yield SOFTWARE_WARNING
    rows = prompt % runner.max_tokens
    if rows and bucket(rows) != rows:
        yield f"{rows} tokens run in a plan for {bucket(rows)}: bytes and FLOP of the prefill are counted for so many"
    if unfused:
        yield f"without the fusions {', '.join(unfused)}"
    if runner.device.clock == WALL:
        yield (
            "this device has no timestamps: each dispatch was submitted alone and timed by the host's clock, "
            "with the way there and back"
        )
    if runner.device.clock == BY_PASS:
        yield (
            "this device has timestamps for whole passes only: each dispatch ran in a pass of its own, "
            "which takes longer"
        )


def _print(out: Console, measured: Profile) -> None:
    from ..profile.report import head, summary, tables

    print("\n".join(head(measured)))
    for phase in measured.phases:
        print("\n" + "\n".join(summary(phase, measured.roofline)), flush=True)
        for table in tables(phase, measured.roofline):
            out.print()
            out.print(table)


def _print_comparison(out: Console, before: Path, after: Path) -> None:
    from ..profile.files import read
    from ..profile.report import comparison

    for part in comparison(read(before), read(after)):
        print(part) if isinstance(part, str) else out.print(part)


def _write(measured: Profile, events: Sequence[tuple[str, list[Event]]], files: Mapping[str, Path | None]) -> None:
    import json

    from ..files import write_named
    from ..profile.files import trace
    from ..profile.page import page

    if not measured.phases:
        return
    texts: Mapping[str, Callable[[], str]] = {
        "json": lambda: json.dumps(measured.record(), indent=1),
        "trace": lambda: json.dumps(trace(events)),
        "html": lambda: page(measured.record()),
    }
    for form, path in files.items():
        if path is not None:
            write_named(path, texts[form]())
            print(f"wrote {path}", file=sys.stderr)
