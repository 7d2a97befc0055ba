"""`shaderlm plan`: the dispatches of a prefill and of a decode step on a device, without loading any weight."""

from __future__ import annotations

import click

from .options import model_argument, one_model, precision_option


@click.command()
@model_argument
@click.option("--device", default=None, help="Adapter to plan for: a kind, a number or part of a name.")
@click.option("--rows", type=click.IntRange(2), help="Tokens of the prefill; 128, or the context if that is shorter.")
@click.option("--capacity", type=click.IntRange(1), help="Positions in the cache; 256, or the context.")
@click.option("--unfused", is_flag=True, help="Without any fusion.")
@precision_option
@click.option("--wgsl", metavar="KERNEL", help="Print the composed WGSL of this kernel instead.")
def plan(
    given: tuple[str, ...],
    model: str | None,
    device: str | None,
    rows: int | None,
    capacity: int | None,
    unfused: bool,
    precision: str,
    wgsl: str | None,
) -> None:
    """Print the plans of MODEL (default: smollm2-135m): which kernels run, in which order, on what."""
    from ..engine.loading import plans
    from ..errors import InputError
    from ..runtime.plan_text import describe

    fusions = () if unfused else None
    sizes = {"rows": rows, "capacity": capacity}
    made = plans(one_model(given, model), device=device, **sizes, fusions=fusions, precision=precision)
    if wgsl is None:
        print("\n\n".join(map(describe, made)))
        return
    sources = {launch.step.label: launch.step.source for plan in made for launch in plan.launches}
    if wgsl not in sources:
        raise InputError(f"no kernel {wgsl!r} in these plans; there are {', '.join(sorted(sources))}")
    print(sources[wgsl])
