"""`shaderlm export-web`: a model as a folder of static files that a browser runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .completion import complete_files, complete_models
from .image_options import vision_options
from .loading import Progress, progress_bar
from .models import is_synthetic
from .options import context_option, ignore_key_option, quantize_option
from .prompts import read_text

if TYPE_CHECKING:
    from ..web.model import WebModel


@click.command("export-web")
@click.argument("model", shell_complete=complete_models)
@click.argument("folder", metavar="DIR", shell_complete=complete_files)
@context_option
@ignore_key_option
@quantize_option
@vision_options
@click.option("--chat-template-file", type=click.Path(exists=True, dir_okay=False), help="Another Jinja template.")
@click.option("--force", is_flag=True, help="Replace an export that is in DIR. A folder with other files stays.")
def export_web(model: str, folder: str, force: bool, **options: Any) -> None:
    """Write a model as static files that browsers run.

    MODEL is what `generate` takes, or synthetic:SHAPE:FORMAT, as for `bench`. DIR is a new or an empty folder. It gets
    the plans for several kinds of GPUs, the weights as the GPU reads them, the tokenizer, and a page. A model that sees
    is exported with the part that reads images.
    """
    from ..gpu.caps import size
    from ..web.export import check_folder, export

    check_folder(Path(folder), force)  # a model may have to be fetched or quantised first
    with progress_bar() as progress, _opened(model, progress, **options) as opened:
        document = export(opened, Path(folder), force=force, progress=progress)
    written = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    about = document["model"]
    print(f"{folder}: {about['name']}, {size(written)}, {about['context']:,} tokens of context")
    if document["vision"] is not None:
        print("it reads images")
    print(f"variants: {', '.join(each['name'] for each in document['variants'])}")


@contextmanager
def _opened(
    model: str,
    progress: Progress | None,
    context: int | None,
    quantize: str | None,
    ignore_keys: Sequence[str],
    chat_template_file: str | None,
    mmproj: str | None,
    no_vision: bool,
    image_tokens: tuple[int, int] | None,
) -> Iterator[WebModel]:
    from ..errors import InputError
    from ..web import model as web

    if not is_synthetic(model):
        template = None if chat_template_file is None else read_text(chat_template_file)
        options: dict[str, Any] = {"quantize": quantize, "ignore_keys": ignore_keys, "chat_template": template}
        options |= {"vision": not no_vision, "mmproj": mmproj, "image_tokens": image_tokens}
        with web.opened(model, context=context, progress=progress, **options) as web_model:
            yield web_model
        return
    if quantize is not None or ignore_keys or chat_template_file is not None or mmproj is not None or image_tokens:
        options_of_files = "--quantize, --ignore-key, --chat-template-file, --mmproj and --image-tokens"
        raise InputError(f"a synthetic model has no file: leave out {options_of_files}")
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
