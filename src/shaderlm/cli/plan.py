"""`shaderlm plan`: the dispatches of a prefill and of a decode step on a device, without loading any weight."""

from __future__ import annotations

import click

from .options import model_argument, one_model, precision_option, tune_option


@click.command()
@model_argument
@click.option("--device", default=None, help="Adapter to plan for: a kind, a number or part of a name.")
@click.option("--rows", type=click.IntRange(2), help="Tokens of the prefill; 128, or the context if that is shorter.")
@click.option("--capacity", type=click.IntRange(1), help="Positions in the cache; 256, or the context.")
@click.option("--unfused", is_flag=True, help="Without any fusion.")
@precision_option
@tune_option
@click.option("--why", is_flag=True, help="Also say which routes were timed for each matmul, and who won.")
@click.option("--wgsl", metavar="KERNEL", help="Print the composed WGSL of this kernel instead.")
def plan(
    given: tuple[str, ...],
    model: str | None,
    device: str | None,
    rows: int | None,
    capacity: int | None,
    unfused: bool,
    precision: str,
    no_tune: bool,
    why: bool,
    wgsl: str | None,
) -> None:
    """Print the plans of MODEL (default: smollm2-135m): which kernels run, in which order, on what."""
    from ..compile.plan_text import describe, describe_choices
    from ..compile.tuning import Tuning, read
    from ..engine.planning import adapter, plans
    from ..errors import InputError

    fusions = () if unfused else None
    sizes = {"rows": rows, "capacity": capacity}
    named = one_model(given, model)
    target = adapter(device, "a plan")
    tuning = Tuning(origin="--no-tune") if no_tune else read(target.caps)
    made = plans(named, device=target, **sizes, fusions=fusions, precision=precision, tuning=tuning)
    if wgsl is None:
        reasons = [describe_choices(made[-1], tuning, precision)] if why else []
        print("\n\n".join([*map(describe, made), *reasons]))
        return
    sources = {launch.step.label: launch.step.source for plan in made for launch in plan.launches}
    if wgsl not in sources:
        raise InputError(f"no kernel {wgsl!r} in these plans; there are {', '.join(sorted(sources))}")
    print(sources[wgsl])
