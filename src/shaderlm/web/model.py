"""What is exported: an architecture, its sizes, where its weights come from, and its tokenizer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.loading import FileSource, config_of_file, quantized
from ..engine.tower_files import TowerFile, find_tower
from ..formats.find import find, shown_name
from ..formats.opening import open_checkpoint
from ..formats.quantize import check_kind
from ..models.architecture import Architecture
from ..models.checkpoint import architecture_of
from ..models.config import Config
from ..models.vision import Tower
from ..models.vision.tower import projector
from ..runtime.tower import TowerSource
from ..runtime.weights import Source
from ..text import Tokenizer, Vocabulary
from .vision import exportable

Progress = Callable[[str, int, int], None]  # what is done, bytes done, bytes in total


@dataclass(frozen=True)
class WebModel:
    """`types`: how many tensors of the checkpoint have which format. A model without a tokenizer reads token ids.

    `chat_template`: what the file has, whatever that is, or another one. `tower`: what reads images.
    """

    name: str
    architecture: Architecture
    config: Config
    source: Source
    tokenizer: Tokenizer | None
    types: dict[str, int]
    chat_template: object = None
    tower: Tower | None = None


class _BothSources:
    """The weights of a text model and of its tower."""

    repeats = False

    def __init__(self, text: Source, tower: Source, names: Collection[str]) -> None:
        """names: of tensors of the tower."""
        self._text, self._tower, self._names = text, tower, frozenset(names)

    def _of(self, name: str) -> Source:
        return self._tower if name in self._names else self._text

    def rows(self, name: str, kind: str, first: int, end: int) -> NDArray[Any]:
        """Rows of one tensor in a device's format."""
        return self._of(name).rows(name, kind, first, end)

    def vector(self, name: str) -> NDArray[Any]:
        """A one-dimensional tensor in f32."""
        return np.asarray(self._of(name).vector(name))


@contextmanager
def opened(
    model: str | None,
    *,
    context: int | None = None,
    quantize: str | None = None,
    ignore_keys: Collection[str] = (),
    chat_template: str | None = None,
    vision: bool = True,
    mmproj: str | os.PathLike[str] | None = None,
    image_tokens: tuple[int, int] | None = None,
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
        eyes = find_tower(file, config, mmproj, image_tokens, on_device=True) if vision and tokenizer else None
        found = WebModel(name, kind, config, FileSource(file), tokenizer, dict(types.most_common()), template)
        with nullcontext() if eyes is None else closing(eyes.file):
            yield found if eyes is None else _seeing(found, eyes)


def _seeing(model: WebModel, eyes: TowerFile) -> WebModel:
    """With a tower."""
    tower = exportable(eyes.tower, projector(eyes.file.metadata), model.config)
    source = _BothSources(model.source, TowerSource(eyes.file, tower), tower.padded())
    return replace(model, config=replace(model.config, images=tower.image_rows()), source=source, tower=tower)
