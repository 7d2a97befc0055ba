"""What is exported: an architecture, its sizes, where its weights come from, and its tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..engine.loading import FileSource, config_of_file, quantized
from ..formats.find import find, shown_name
from ..formats.opening import open_checkpoint
from ..formats.quantize import check_kind
from ..models.architecture import Architecture
from ..models.checkpoint import architecture_of
from ..models.config import Config
from ..runtime.weights import Source
from ..text import Tokenizer, Vocabulary

Progress = Callable[[str, int, int], None]  # what is done, bytes done, bytes in total


@dataclass(frozen=True)
class WebModel:
    """`types`: how many tensors of the checkpoint have which format. A model without a tokenizer reads token ids.

    `chat_template`: what the file has, whatever that is, or another one.
    """

    name: str
    architecture: Architecture
    config: Config
    source: Source
    tokenizer: Tokenizer | None
    types: dict[str, int]
    chat_template: object = None


@contextmanager
def opened(
    model: str | None,
    *,
    context: int | None = None,
    quantize: str | None = None,
    ignore_keys: Collection[str] = (),
    chat_template: str | None = None,
    progress: Progress | None = None,
) -> Iterator[WebModel]:
    """The model of a file or a folder, as `load` names it, with its file open; arguments as for `load`.

    chat_template: a Jinja template instead of the model's own.
    """
    if quantize is not None:
        check_kind(quantize)
    path = find(model, progress)
    name = shown_name(model, path)
    if quantize is not None:
        path = quantized(path, quantize, progress, ignore_keys)
    with open_checkpoint(path) as file, file.named_in_errors():
        kind = architecture_of(file)
        config = config_of_file(kind, file, context, dense=False, ignore_keys=ignore_keys)
        vocabulary = Vocabulary.from_metadata(file.metadata, file.vocabulary)
        tokenizer = Tokenizer(vocabulary) if vocabulary.kind != "none" else None
        types = Counter(info.kind for info in file.tensors.values())
        template = vocabulary.chat_template if chat_template is None else chat_template
        yield WebModel(name, kind, config, FileSource(file), tokenizer, dict(types.most_common()), template)
