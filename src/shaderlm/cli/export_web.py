"""`shaderlm export-web`: a model as a folder of static files that a browser runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .completion import complete_files, complete_models
from .loading import Progress, progress_bar
from .models import is_synthetic
from .options import context_option, ignore_key_option, quantize_option

if TYPE_CHECKING:
    from ..web.model import WebModel


@click.command("export-web")
@click.argument("model", shell_complete=complete_models)
@click.argument("folder", metavar="DIR", shell_complete=complete_files)
@context_option
@ignore_key_option
@quantize_option
@click.option("--force", is_flag=True, help="Replace an export that is in DIR. A folder with other files stays.")
def export_web(model: str, folder: str, force: bool, **options: Any) -> None:
    """Write a model as static files that browsers run.

    MODEL is what `generate` takes, or synthetic:SHAPE:FORMAT, as for `bench`. DIR is a new or an empty folder. It gets
    the plans for several kinds of GPUs, the weights as the GPU reads them, the tokenizer, and a page.
    """
    from ..gpu.caps import size
    from ..web.export import check_folder, export

    check_folder(Path(folder), force)  # a model may have to be fetched or quantised first
    with progress_bar() as progress, _opened(model, progress, **options) as opened:
        document = export(opened, Path(folder), force=force, progress=progress)
    written = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    about = document["model"]
    print(f"{folder}: {about['name']}, {size(written)}, {about['context']:,} tokens of context")
    print(f"variants: {', '.join(each['name'] for each in document['variants'])}")


@contextmanager
def _opened(
    model: str, progress: Progress | None, context: int | None, quantize: str | None, ignore_keys: Sequence[str]
) -> Iterator[WebModel]:
    from ..errors import InputError
    from ..web import model as web

    if not is_synthetic(model):
        options: dict[str, Any] = {"quantize": quantize, "ignore_keys": ignore_keys, "progress": progress}
        with web.opened(model, context=context, **options) as web_model:
            yield web_model
        return
    if quantize is not None or ignore_keys:
        raise InputError("a synthetic model has no file: leave out --quantize and --ignore-key")
    yield _synthetic(model, context)


def _synthetic(model: str, context: int | None) -> WebModel:
    from collections import Counter
    from dataclasses import replace

    from ..bench.synthetic import RandomWeights, config_of, parse
    from ..engine.loading import check_context
    from ..web.model import WebModel

    shape, mix = parse(model)
    kind, config = config_of(shape, mix)
    check_context(context, config.context)
    config = replace(config, context=context or config.context)
    types = dict(Counter(config.formats.values()).most_common())
    return WebModel(f"{shape.name} {mix}", kind, config, RandomWeights(config), None, types)
