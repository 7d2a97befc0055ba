"""`shaderlm bench drafts`: what drafts gain, with the models and the device at hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from .completion import complete_models
from .loading import spoken
from .models import load_any
from .options import backend_option, json_option, tune_option
from .speed import numbers_above_0

if TYPE_CHECKING:
    from ..gpu import Backend


@click.command()
@click.option("-m", "--model", shell_complete=complete_models, help="As for `bench`.")
@click.option("-md", "--draft-model", shell_complete=complete_models, help="Draft by this model.  [default: n-grams]")
@click.option("--draft-tokens", type=click.IntRange(1, 64), default=15, show_default=True, metavar="N", help="At once.")
@click.option(
    "--draft-acceptance",
    type=click.FloatRange(0, 1),
    metavar="P",
    help="Accept so many of the drafts, whatever the model draws: for random weights. Texts are not compared.",
)
@click.option(
    "--always", is_flag=True, help="Draft as many tokens as there are, also where it was measured not to pay."
)
@click.option("--text", "texts", multiple=True, type=click.Choice(["repeats", "free"]), help="Only this text.")
@click.option("-np", "--parallel", callback=numbers_above_0, default="1", show_default=True, help="Streams: 1,4,16.")
@click.option("-n", "--n-gen", type=click.IntRange(2), default=256, show_default=True, help="Tokens of a text.")
@click.option("-r", "--repetitions", type=click.IntRange(1), default=5, show_default=True, metavar="N")
@click.option("-c", "--context", "--ctx-size", type=click.IntRange(1), metavar="N", help="Of the model that verifies.")
@click.option("--device", default="auto", show_default=True, help="As for generate.")
@backend_option
@tune_option
@click.option("--deterministic", is_flag=True, help="As for serve.")
@json_option
def drafts(
    model: str | None,
    draft_model: str | None,
    draft_tokens: int,
    draft_acceptance: float | None,
    always: bool,
    texts: tuple[str, ...],
    parallel: tuple[int, ...],
    n_gen: int,
    repetitions: int,
    context: int | None,
    device: str,
    backend: Backend,
    no_tune: bool,
    deterministic: bool,
    as_json: bool,
) -> None:
    """Time texts with drafts and without, in turns.

    One text repeats its prompt, the other is free. Speeds are those of decoding, of all streams together.
    """
    from ..bench import drafts as measuring
    from ..engine.drafts import Drafts, NgramDrafter

    if draft_acceptance is not None and draft_model is None:
        raise InputError("--draft-acceptance is for --draft-model: n-grams have no drafts where nothing repeats")
    how: dict[str, Any] = {"backend": backend, "tune": not no_tune, "context": context, "deterministic": deterministic}
    with load_any(model, device, draft_model=draft_model, draft_tokens=draft_tokens, **how) as loaded, spoken() as say:
        drafter = NgramDrafter() if draft_model is None else loaded.engine.drafter
        assert drafter is not None
        used = Drafts(drafter, draft_tokens, measured=not always, acceptance=draft_acceptance)
        say("compiling kernels")
        loaded.engine.warm_up()
        results = measuring.measure(
            loaded, used, texts or tuple(measuring.TEXTS), parallel, n_gen, repetitions, say=say
        )
    if as_json:
        print(json.dumps([asdict(each) for each in results], indent=1))
    else:
        print("\n".join(measuring.lines(results)))
    if draft_acceptance is None and not all(each.same for each in results):
        note = "the same by the rule for batches: rows of other steps are rounded otherwise"
        click.echo(f"some texts with drafts are not those without, which is {note}", err=True)
