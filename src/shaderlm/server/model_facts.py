"""What a model is: of one that is loaded, what runs; of another one, what its header says. Knows no HTTP library."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engine.sampling import sampling_of_file
from ..engine.tower_files import find_tower
from ..errors import ShaderlmError
from ..formats.checkpoint import Checkpoint
from ..formats.opening import open_checkpoint
from ..models.checkpoint import architecture_of, read_config
from ..models.config import Config
from ..text import ChatTemplate
from .models import HostedModel, stamp_of
from .served import ServedModel


@dataclass(frozen=True)
class ModelFacts:
    """What Ollama's routes say of a model. `config` None: there is no file yet, or it cannot be read."""

    name: str
    path: Path | None = None
    own_name: str = ""
    file_bytes: int = 0
    parameters: int = 0
    types: tuple[str, ...] = ()  # of tensors, the most frequent first
    context: int = 0
    config: Config | None = None
    template: ChatTemplate | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    embedding: bool = False
    vision: bool = False


def facts_of(served: ServedModel) -> ModelFacts:
    """Of a model that is loaded."""
    model, report = served.model, served.model.report
    return ModelFacts(
        name=served.name,
        path=report.path,
        own_name=report.own_name,
        file_bytes=report.file_bytes,
        parameters=report.parameters,
        types=(*report.types,),
        context=served.context,
        config=model.config,
        template=model.chat_template,
        sampling=served.sampling_defaults,
        embedding=served.embedding,
        vision=model.vision is not None,
    )


class FactReader:
    """Reads headers, each once. Its methods are for threads."""

    def __init__(self) -> None:
        self._read = dict[Path, tuple[object, ModelFacts]]()

    def facts(self, model: HostedModel) -> ModelFacts:
        """Of a model, loaded or not."""
        served, path = model.served, model.path
        if served is not None:
            return facts_of(served)
        if path is None:
            return ModelFacts(model.name)
        stamp = stamp_of(path)
        known = self._read.get(path)
        if known is None or known[0] != stamp or known[1].name != model.name:
            known = self._read[path] = stamp, _of_header(model, path)
        return known[1]


def _of_header(model: HostedModel, path: Path) -> ModelFacts:
    source = model.source
    with suppress(ShaderlmError, OSError), open_checkpoint(path) as file:
        metadata = file.metadata
        config = read_config(architecture_of(file), file)
        template = metadata.get("tokenizer.chat_template")
        infos = file.tensors.values()
        return ModelFacts(
            name=model.name,
            path=path,
            own_name=str(metadata.get("general.name") or ""),
            file_bytes=file.size,
            parameters=sum(math.prod(info.shape) for info in infos),
            types=tuple(kind for kind, _ in Counter(info.kind for info in infos).most_common()),
            context=source.context or config.context,
            config=config,
            template=None if template is None else ChatTemplate(template),
            sampling=sampling_of_file(metadata),
            embedding=source.embedding,
            vision=source.vision and _sees(file, config, source.mmproj),
        )
    return ModelFacts(model.name, path)


def _sees(file: Checkpoint, config: Config, mmproj: str | None) -> bool:
    """Will it read images? As when it is loaded, what does not fit is a warning."""
    with suppress(ShaderlmError, OSError):
        tower = find_tower(file, config, mmproj, None, on_device=False)
        if tower is not None:
            tower.file.close()
            return True
    return False
