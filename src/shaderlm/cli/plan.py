"""`shaderlm plan`: the dispatches of a prefill and of a decode step on a device, without loading any weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from .models import described
from .options import (
    adapter_option,
    backend_option,
    ignore_key_option,
    json_option,
    model_argument,
    precision_option,
    tune_option,
)

if TYPE_CHECKING:
    from ..compile.plan import Plan
    from ..gpu import Backend, DeviceCaps

_TARGET_HELP = "Plan for a GPU that need not be here: large-gpu, or webgpu-default, what every browser grants."


@click.command()
@model_argument
@ignore_key_option
@adapter_option
@backend_option
@click.option("--target", metavar="NAME", help=_TARGET_HELP)
@click.option("--tokens", type=click.IntRange(2), help="Tokens of the prefill; 128, or as many as fit.")
@click.option("--depth", type=click.IntRange(0), default=0, show_default=True, help="Tokens already in the cache.")
@click.option("--unfused", is_flag=True, help="Without any fusion.")
@precision_option
@tune_option
@click.option("--why", is_flag=True, help="Also say which routes were timed for each matmul, and who won.")
@click.option("--wgsl", metavar="KERNEL", help="Print the composed WGSL of this kernel instead.")
@json_option
@click.option("--variant", type=click.IntRange(1), metavar="N", help="Of the texts that --wgsl lists, the N-th.")
def plan(
    model: str | None,
    ignore_keys: tuple[str, ...],
    device: str | None,
    backend: Backend,
    target: str | None,
    no_tune: bool,
    why: bool,
    wgsl: str | None,
    as_json: bool,
    variant: int | None,
    unfused: bool,
    **options: Any,
) -> None:
    """Print the plans of a model: its kernels in their order.

    MODEL is a path or a name (default: smollm2-135m), or synthetic:SHAPE:FORMAT, as for `bench`. A kernel of --wgsl
    that this machine's adapter does not use is composed for a target that does, unless --device or --target is given.
    """
    from ..compile.plan_json import to_json
    from ..compile.plan_text import describe, describe_choices
    from ..compile.tuning import Tuning, read
    from ..engine.planning import plans
    from ..errors import InputError

    if device is not None and target is not None:
        raise InputError("--device and --target both say what to plan for; give one of them")
    if variant is not None and wgsl is None:
        raise InputError("--variant chooses among the texts of a kernel; give --wgsl KERNEL too")
    if as_json and (wgsl is not None or why):
        raise InputError("--json prints plans; leave out --wgsl and --why")
    architecture, config = described(model, ignore_keys)
    options["fusions"] = () if unfused else None

    def plans_for(caps: DeviceCaps) -> tuple[list[Plan], Tuning]:
        tuning = Tuning(origin="--no-tune") if no_tune else read(caps)
        return plans(architecture, config, caps, tuning=tuning, **options), tuning

    if wgsl is not None:
        targets = _targets(device, backend, target, others=True)
        print(_wgsl(wgsl, variant, ((caps.name, plans_for(caps)[0]) for caps in targets)))
        return
    step_plans, tuning = plans_for(next(_targets(device, backend, target)))
    if as_json:
        print(f"[{','.join(map(to_json, step_plans))}]")
        return
    reasons = [describe_choices(step_plans[-1], tuning, options["precision"])] if why else []
    print("\n\n".join([*map(describe, step_plans), *reasons]))


def _targets(device: str | None, backend: Backend, target: str | None, others: bool = False) -> Iterator[DeviceCaps]:
    """What to plan for: the target or the device that was named, else the best adapter and, if asked, all targets."""
    from ..engine.planning import TARGETS, open_adapter
    from ..errors import DeviceError, InputError

    if target is not None:
        if target not in TARGETS:
            raise InputError(f"no target {target!r}; --target takes {' or '.join(TARGETS)}")
        yield TARGETS[target]
        return
    try:
        yield open_adapter(device, "a plan", backend).caps
    except DeviceError as problem:
        if device is not None:
            raise
        if not others:
            raise DeviceError(
                f"{problem}\n--target {next(iter(TARGETS))} plans for a GPU that is not here"
            ) from problem
    if device is None and others:
        yield from TARGETS.values()


def _wgsl(kernel: str, number: int | None, plans_by_target: Iterator[tuple[str, list[Plan]]]) -> str:
    """The text of a kernel for the first of these that uses it."""
    from ..compile.plan_wgsl import kernels_of, labelled, variants_of
    from ..errors import InputError

    names: set[str] = set()
    tried: list[str] = []
    for target, plans in plans_by_target:
        variants = variants_of(plans, kernel)
        if variants and (number or 1) > len(variants):
            raise InputError(f"--variant {number}: {kernel} has {len(variants)} for {target}")
        if variants:
            return labelled(kernel, target, variants, number or 1)
        names.update(kernels_of(plans))
        tried.append(target)
    raise InputError(f"no kernel {kernel!r} in the plans for {', '.join(tried)}; there are {', '.join(sorted(names))}")
