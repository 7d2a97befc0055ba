"""From what a user typed to a model that answers: file, tokenizer, device, weights."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import DeviceError, InputError, ModelError
from ..formats.convert import device_format, rows_for_device
from ..formats.find import find
from ..formats.gguf import GgufFile
from ..gpu import Array, Device, adapters, open_device
from ..models.architecture import Architecture, Config, architecture
from ..runtime.gpu_model import GpuModel
from ..runtime.interpreter import Interpreter
from ..text import Vocabulary
from .language_model import LanguageModel
from .report import LoadReport
from .tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]  # what is going on, bytes done, bytes in all

PRECISIONS = ("fast", "exact")
_log = logging.getLogger("shaderlm")


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str | int | Device | None = None,
    context: int | None = None,
    progress: Progress | None = None,
    precision: str = "fast",
    fusions: Sequence[str] | None = None,
    cache: str | None = None,
    tune: bool = True,
) -> LanguageModel:
    """Load a model: a .gguf path, "hf:ORG/REPO/FILE", or a name (default: smollm2-135m, fetched once).

    device: "auto" (default) takes a real GPU, or the CPU where there is none and says so; "cpu" computes in NumPy;
    anything else names an adapter (see `shaderlm devices`) and is never replaced by another. context: the most tokens
    of a conversation (default: the model's own). progress(label, done, total) is called while files and weights move.
    precision: "fast" (default) lets a GPU round the inputs of matrix products to 16 bits while it writes tokens, where
    that is faster; "exact" does not.
    tune: take the kernels that were measured to be the fastest on this GPU, and measure for shapes that are new, for at
    most 2 s; False takes the built-in ones.
    fusions (names, () for none) and cache ("f32" or "f16") are for tests and comparisons.
    """
    if cache not in (None, "f32", "f16"):
        raise InputError(f"cache must be 'f32' or 'f16', got {cache!r}")
    check_precision(precision)
    path = find(model, progress)
    started = time.perf_counter()
    # Drivers take up to a second to start; the file's header and tokenizer are read meanwhile.
    with GgufFile.open(path) as file, ThreadPoolExecutor(1, "device") as pool:
        opening = pool.submit(choose_device, device)
        tokenizer = Tokenizer(Vocabulary.from_metadata(file.metadata))
        kind = architecture(file.metadata)
        target = opening.result()
        config = config_of_file(kind, file, context, dense=target is None)
        if len(tokenizer.vocabulary.tokens) != config.vocabulary:
            raise ModelError(
                f"{path}: the tokenizer has {len(tokenizer.vocabulary.tokens):,} tokens, the embedding matrix "
                f"{config.vocabulary:,} rows"
            )
        moved = (lambda done, total: progress("loading weights", done, total)) if progress else None
        source = _File(file)
        runner: GpuModel | Interpreter
        if target is None:
            runner = Interpreter(kind, config, source, fusions=fusions, cache=cache, progress=moved)
        else:
            options: dict[str, Any] = {"fusions": fusions, "cache": cache, "precision": precision, "tune": tune}
            runner = GpuModel(kind, config, source, target, progress=moved, **options)
        if runner.config.context < config.context:
            given = f"the model's {config.context:,} tokens to {runner.config.context:,}"
            _log.warning("the context is cut from %s: a longer cache does not fit one binding of this device", given)
        report = _report(file, runner.config, runner.report(), time.perf_counter() - started)
    return LanguageModel(runner, tokenizer, report)


def check_precision(given: str) -> None:
    """ "fast" or "exact"."""
    if given not in PRECISIONS:
        raise InputError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, got {given!r}")


def choose_device(device: str | int | Device | None) -> Device | None:
    """An open device, or None for the interpreter. Only "auto" may end on the CPU, and it says so."""
    if isinstance(device, Device):
        return device
    word = device.strip().lower() if isinstance(device, str) else device
    if word == "cpu":
        return None
    if word not in (None, "auto"):
        return open_device(device)
    try:
        found = adapters()
    except DeviceError as problem:
        _log.warning("no GPU can be used (%s); computing on the CPU with NumPy", problem)
        return None
    if found and not found[0].caps.software:
        return open_device(found[0].number)
    if not found:
        _log.warning("no GPU was found; computing on the CPU with NumPy. `shaderlm devices` says what to install")
        return None
    adapter = found[0].caps.name.lower()
    word = next((known for known in ("swiftshader", "llvmpipe") if known in adapter), "software")
    _log.warning(
        "no GPU was found; computing on the CPU with NumPy. --device %s runs the WGSL kernels in software", word
    )
    return None


class _File:
    """The weights of a GGUF file, as the runtime asks for them."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def rows(self, name: str, kind: str, first: int, end: int) -> Array:
        return rows_for_device(self._file, name, kind, first, end)

    def vector(self, name: str) -> Array:
        return self._file.dense(name)


def config_of_file(kind: Architecture, file: GgufFile, context: int | None, *, dense: bool) -> Config:
    """A model's sizes and formats from its file; `dense` as the CPU has them."""
    shapes = {name: info.shape for name, info in file.tensors.items()}
    config = kind.read(file.metadata, shapes, dict.fromkeys(shapes, "f32"))
    if not dense:
        config = replace(config, formats={name: device_format(file, name) for name in shapes})
    if context is None:
        return config
    if isinstance(context, bool) or not isinstance(context, (int, np.integer)) or not 1 <= context <= config.context:
        raise InputError(f"context must be a whole number from 1 to the model's {config.context:,}, got {context!r}")
    return replace(config, context=int(context))


def _report(file: GgufFile, config: Config, ran: Any, seconds: float) -> LoadReport:
    matrices = [(info.kind, config.formats[name]) for name, info in file.tensors.items() if len(info.shape) > 1]
    changed = {kind: form for kind, form in matrices if kind != form}
    return LoadReport(
        name=str(file.metadata.get("general.name") or file.path.stem),
        path=file.path,
        file_bytes=file.size,
        architecture=config.architecture,
        parameters=sum(math.prod(info.shape) for info in file.tensors.values()),
        context=config.context,
        types=dict(Counter(info.kind for info in file.tensors.values()).most_common()),
        converted=changed,
        device=ran["device"],
        cache=ran["cache"],
        precision=ran["precision"],
        weight_bytes=ran["weight_bytes"],
        seconds=seconds,
    )
