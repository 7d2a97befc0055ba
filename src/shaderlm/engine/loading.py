"""Loading: from the name of a model to a `LanguageModel`: file, tokenizer, device, weights."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DeviceError, InputError
from ..formats.checkpoint import Checkpoint
from ..formats.convert import device_format, rows_for_device
from ..formats.find import find, shown_name
from ..formats.opening import open_checkpoint
from ..formats.quantize import check_kind, quantized_copy
from ..gpu import Array, Backend, Device, begin_opening, open_device, preferred_adapter
from ..models.architecture import Architecture
from ..models.checkpoint import architecture_of, read_config
from ..models.config import Config
from ..runtime.numpy_runner import NumpyRunner
from ..text import Vocabulary, check_vocabulary
from .cpu import cpu_runner, is_cpu, packs_weights
from .draft_model import ModelDrafter, check_same_vocabulary
from .draft_settings import DRAFT_TOKENS, check_can_draft, check_draft
from .drafts import Drafts, NgramDrafter
from .language_model import DEFAULT_CACHE_DISK, LanguageModel
from .report import LoadReport
from .sampling import sampling_of_file
from .tokenizer import Tokenizer
from .tower_files import find_tower
from .vision import Vision

if TYPE_CHECKING:
    from ..runtime.gpu_runner import GpuRunner

Progress = Callable[[str, int, int], None]  # what is copied, bytes done, bytes in total

PRECISIONS = ("fast", "exact")
_log = logging.getLogger("shaderlm")


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str | int | Device | None = None,
    backend: Backend = "auto",
    context: int | None = None,
    progress: Progress | None = None,
    precision: str = "fast",
    tune: bool = True,
    deterministic: bool = False,
    ignore_keys: Collection[str] = (),
    quantize: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_disk: int = DEFAULT_CACHE_DISK,
    draft: str | None = None,
    draft_model: str | os.PathLike[str] | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    vision: bool = True,
    mmproj: str | os.PathLike[str] | None = None,
    image_tokens: tuple[int, int] | None = None,
) -> LanguageModel:
    """Load a model: the path of a .gguf file or a Hugging Face folder, "hf:ORG/REPO[/FILE.gguf]", or a name.

    The default is smollm2-135m, downloaded once.

    device: "auto" (default) takes a GPU, or the CPU with a warning where there is none; "cpu" keeps weights as they are
    stored if llvmlite is installed (the extra `cpu`); otherwise it is "numpy", the reference, with weights in f32;
    anything else names an adapter (`shaderlm devices` lists them) and is never replaced by another.
    backend: the implementation of WebGPU: "wgpu", "dawn", or "auto" (default), which takes Dawn where it has matrix
    units, otherwise what `shaderlm tune` measured to be faster on this device, and before that wgpu.
    context: the largest number of tokens of a conversation (default: the model's own). If it is given, the memory of a
    GPU for one conversation of that length is allocated at once, or refused; otherwise the cache grows when it must.
    progress: called as progress(label, done, total), in bytes, while files and weights are copied.
    precision: "fast" (default) lets the inputs of matrix products be rounded to 16 bits, where that
    is faster; "exact" does not.
    tune: use the kernels that `shaderlm tune`, `serve` or `bench` measured to be the fastest on this GPU; False uses
    the built-in choice.
    deterministic: what a generation computes does not depend on what runs beside it, to the bit. It costs time: prompts
    share no steps, and tokens are computed by a plan for as many sequences as may run (`EngineOptions.parallel`).
    ignore_keys: metadata keys such as "llama.attention.sliding_window" to read as if the file did not have them. A key
    that would change what is computed, and is not supported, is otherwise refused.
    quantize: "q4_0" or "q8_0" computes with F32, F16 and BF16 matrices in this format. The copy is made once and kept;
    `shaderlm models` lists it.
    cache_dir: a folder for what is computed of prompts. Prompts that begin alike are found there by later processes.
    cache_disk: bytes that its files may take (default: 8 GiB); what was used least recently goes first.
    draft: "ngram" drafts what followed the last tokens where they came before, and verifies several tokens in a step,
    where that is faster. The text is the same. draft_model: a smaller model with the same vocabulary, which drafts, on
    the same device. draft_tokens: how many are drafted for a sequence at once, at most.
    vision: also load the part that reads images: of a folder, or of a GGUF file the mmproj file that lies beside it,
    if there is one. mmproj: that file, if it is elsewhere. image_tokens: the least and the most tokens of an image,
    where its size decides; the default is the checkpoint's.
    """
    return load_drafting(
        model,
        draft_model,
        device=device,
        backend=backend,
        context=context,
        progress=progress,
        precision=precision,
        tune=tune,
        deterministic=deterministic,
        ignore_keys=ignore_keys,
        quantize=quantize,
        cache_dir=cache_dir,
        cache_disk=cache_disk,
        draft=draft,
        draft_tokens=draft_tokens,
        vision=vision,
        mmproj=mmproj,
        image_tokens=image_tokens,
    )


def load_with(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str | int | Device | None = None,
    backend: Backend = "auto",
    context: int | None = None,
    progress: Progress | None = None,
    precision: str = "fast",
    tune: bool = True,
    deterministic: bool = False,
    ignore_keys: Collection[str] = (),
    quantize: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_disk: int = DEFAULT_CACHE_DISK,
    draft: str | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    vision: bool = True,
    mmproj: str | os.PathLike[str] | None = None,
    image_tokens: tuple[int, int] | None = None,
    fusions: Sequence[str] | None = None,
    cache: str | None = None,
    measure: bool = False,
    on_vocabulary: Callable[[int], None] | None = None,
    checkpoint: Checkpoint | None = None,
) -> LanguageModel:
    """`load` with more arguments, for servers, tests, comparisons and the command line.

    measure: time kernels for shapes that were never timed here, for at most 2 s, and keep the results.
    fusions: names of those to apply (default: all on a device, none in NumPy). cache: "f32" or "f16" keys and values.
    on_vocabulary: called with the size of the vocabulary before weights are copied; what it raises ends the load.
    checkpoint: the model's, if it is open already; whoever opened it closes it. `quantize` takes another.
    """
    if cache not in (None, "f32", "f16"):
        raise InputError(f"cache must be 'f32' or 'f16', got {cache!r}")
    check_precision(precision)
    check_draft(draft, draft_tokens)
    if quantize is not None:
        check_kind(quantize)
    if not isinstance(device, Device):
        begin_opening(device, backend)  # drivers take up to a second to start
    if checkpoint is None or quantize is not None:
        path, name = _find(model, quantize, progress, ignore_keys)
        using: AbstractContextManager[Checkpoint] = open_checkpoint(path)
    else:
        using, name = nullcontext(checkpoint), shown_name(model, checkpoint.path)
    started = time.perf_counter()
    # The header is read while a device is opened, and the tokenizer is built while weights are copied.
    with using as file, file.named_in_errors(), ThreadPoolExecutor(2, "load") as pool:
        opening = pool.submit(choose_device, device, backend)
        kind = architecture_of(file)
        vocabulary = Vocabulary.from_metadata(file.metadata, file.vocabulary)
        check_vocabulary(vocabulary)  # before weights are copied
        if on_vocabulary is not None:
            on_vocabulary(len(vocabulary.tokens))
        building = pool.submit(Tokenizer, vocabulary)
        model_context = read_config(kind, file, ignore_keys).context
        check_context(context, model_context)
        target = opening.result()
        packed = target is None and packs_weights(device)
        config = config_of_file(kind, file, context, dense=target is None and not packed, ignore_keys=ignore_keys)
        eyes = find_tower(file, config, mmproj, image_tokens, on_device=target is not None) if vision else None
        if eyes is not None:
            config = replace(config, images=eyes.tower.image_rows(layer_inputs=bool(config.layer_input)))
        moved = (lambda done, total: progress("loading weights", done, total)) if progress else None
        source = FileSource(file)
        runner: GpuRunner | NumpyRunner
        options: dict[str, Any] = {"fusions": fusions, "cache": cache, "deterministic": deterministic}
        if target is None:
            options |= {"packed": packed, "precision": precision}
            runner = cpu_runner(kind, config, source, progress=moved, **options)
        else:
            from ..runtime.gpu_runner import GpuRunner  # late: kernels and plans take 40 ms to import

            options |= {"precision": precision, "tune": tune, "measure": tune and measure, "reserve": context or 0}
            runner = GpuRunner(kind, config, source, target, progress=moved, **options)
        try:
            tokenizer = building.result()
            sight = None if eyes is None else Vision(eyes.load(target, precision, moved), tokenizer)
        except BaseException:
            runner.close()
            raise
        finally:
            if eyes is not None:
                eyes.file.close()
        limit = model_context
        if runner.config.context < config.context:
            limit = runner.config.context
            change = f"from {config.context:,} to {limit:,} tokens"
            _log.warning("the context is reduced %s: a longer cache does not fit one binding of this device", change)
        seconds = time.perf_counter() - started
        report = _report(name, file, runner.config, runner.report(), backend_of(target), limit, seconds)
        sampling = sampling_of_file(file.metadata)
    loaded = LanguageModel(runner, tokenizer, report, sampling)
    if sight is not None:
        loaded.use_vision(sight)
    use_drafts(loaded, draft, draft_tokens)
    if cache_dir is not None:
        try:
            loaded.use_cache_dir(cache_dir, cache_disk)
        except BaseException:
            loaded.close()
            raise
    return loaded


def load_drafting(
    model: str | os.PathLike[str] | None,
    draft_model: str | os.PathLike[str] | None,
    *,
    device: str | int | Device | None = None,
    draft: str | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    load_one: Callable[..., LanguageModel] = load_with,
    **options: Any,
) -> LanguageModel:
    """A model, and another one that drafts for it, if there is one, on the same device; options as for `load_with`.

    That one is loaded first: what memory is free for the cache is measured with it.
    """
    check_draft(draft, draft_tokens, draft_model)
    if draft_model is None:
        return load_one(model, device=device, draft=draft, draft_tokens=draft_tokens, **options)
    same = ("backend", "precision", "tune", "measure", "progress")
    from ..runtime.gpu_runner import GpuRunner

    shared = {name: options[name] for name in same if name in options}
    small = load_one(draft_model, device=device, vision=False, **shared)  # drafts follow from tokens alone
    try:
        check_can_draft(small.config)
        on = small.runner.device if isinstance(small.runner, GpuRunner) else device
        loaded = load_one(model, device=on, **options)
    except BaseException:
        small.close()
        raise
    try:
        check_same_vocabulary(loaded.tokenizer.vocabulary, small.tokenizer.vocabulary)
        loaded.engine.use_drafts(Drafts(ModelDrafter(small, loaded.config.vocabulary), draft_tokens))
        loaded.draft_model = small
    except BaseException:
        loaded.close()
        small.close()
        raise
    return loaded


def use_drafts(model: LanguageModel, draft: str | None, tokens: int) -> None:
    """Have a model draft as it was asked for. One that cannot is closed again."""
    if draft is None:
        return
    try:
        model.engine.use_drafts(Drafts(NgramDrafter(), tokens))
    except BaseException:
        model.close()
        raise


def _find(
    model: str | os.PathLike[str] | None, quantize: str | None, progress: Progress | None, ignore_keys: Collection[str]
) -> tuple[Path, str]:
    """The file or folder that is loaded, and the name of the model."""
    path = find(model, progress)
    name = shown_name(model, path)
    return path if quantize is None else quantized(path, quantize, progress, ignore_keys), name


def identify(
    model: str | os.PathLike[str] | None,
    *,
    context: int | None = None,
    quantize: str | None = None,
    ignore_keys: Collection[str] = (),
    progress: Progress | None = None,
) -> tuple[str, str, Path]:
    """What `load` would say of a model: its name, the one that its file has, and its path. It is fetched if need be.

    What is wrong with the file is told as `load` does, as far as no device is needed.
    """
    path, name = _find(model, quantize, progress, ignore_keys)
    with open_checkpoint(path) as file, file.named_in_errors():
        check_vocabulary(Vocabulary.from_metadata(file.metadata, file.vocabulary))
        check_context(context, read_config(architecture_of(file), file, ignore_keys).context)
        return name, _own_name(file), file.path


def quantized(path: Path, kind: str, progress: Progress | None, ignore_keys: Collection[str]) -> Path:
    """The quantised copy of a checkpoint, once it is known that the model runs."""
    with open_checkpoint(path) as file, file.named_in_errors():
        check_vocabulary(Vocabulary.from_metadata(file.metadata, file.vocabulary))
        read_config(architecture_of(file), file, ignore_keys)
        return quantized_copy(file, kind, progress)


def check_precision(precision: str) -> None:
    """It must be one of PRECISIONS."""
    if precision not in PRECISIONS:
        raise InputError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}")


def choose_device(device: str | int | Device | None, backend: Backend = "auto") -> Device | None:
    """An open device, or None for the CPU. Only "auto" falls back to the CPU, with a warning."""
    if isinstance(device, Device):
        return device
    word = device.strip().lower() if isinstance(device, str) else device
    if is_cpu(device):
        return None
    if word not in (None, "auto"):
        return open_device(device, backend=backend)
    try:
        adapter = preferred_adapter(backend)
    except DeviceError as problem:
        if backend != "auto":
            raise
        _log.warning("no GPU can be used (%s); computing on the CPU", problem)
        return None
    if adapter and not adapter.caps.software:
        return open_device(backend=backend)  # not this adapter: its matrix units may fail their check
    if not adapter:
        _log.warning("no GPU was found; computing on the CPU. `shaderlm devices` lists what to install")
        return None
    name = adapter.caps.name.lower()
    word = next((known for known in ("swiftshader", "llvmpipe") if known in name), "software")
    _log.warning('no GPU was found; computing on the CPU. device="%s" runs the WGSL kernels in software', word)
    return None


def backend_of(device: Device | None) -> str:
    """The implementation of WebGPU that a device is of, and why it was taken; "" without a device."""
    return "" if device is None else f"{device.caps.implementation}: {device.backend_reason}"


class FileSource:
    """The weights of a GGUF file, as the runtime asks for them."""

    repeats = False

    def __init__(self, file: Checkpoint) -> None:
        self._file = file

    def rows(self, name: str, kind: str, first: int, end: int) -> Array:
        """Rows of one tensor in a device's format."""
        return rows_for_device(self._file, name, kind, first, end)

    def vector(self, name: str) -> Array:
        """A one-dimensional tensor in f32."""
        return self._file.dense(name)


def config_of_file(
    kind: Architecture, file: Checkpoint, context: int | None, *, dense: bool, ignore_keys: Collection[str] = ()
) -> Config:
    """A model's sizes and formats from its file; `dense`: all weights in f32, as NumPy has them."""
    config = read_config(kind, file, ignore_keys)
    if not dense:
        config = replace(config, formats={name: device_format(file, name) for name in config.shapes})
    if context is None:
        return config
    check_context(context, config.context)
    return replace(config, context=int(context))


def check_context(context: Any, limit: int) -> None:
    """None, or a whole number up to the model's own context."""
    if context is None:
        return
    if isinstance(context, bool) or not isinstance(context, (int, np.integer)) or not 1 <= context <= limit:
        raise InputError(f"context must be a whole number from 1 to the model's {limit:,}, got {context!r}")


def _own_name(file: Checkpoint) -> str:
    return str(file.metadata.get("general.name") or "")


def _report(
    name: str, file: Checkpoint, config: Config, ran: Any, backend: str, max_context: int, seconds: float
) -> LoadReport:
    return LoadReport(
        name=name,
        own_name=_own_name(file),
        path=file.path,
        files=tuple(file.files()),
        file_bytes=file.size,
        tensor_bytes=sum(info.nbytes for info in file.tensors.values()),
        architecture=config.architecture,
        parameters=sum(math.prod(info.shape) for info in file.tensors.values()),
        context=config.context,
        max_context=max_context,
        types=dict(Counter(info.kind for info in file.tensors.values()).most_common()),
        device=ran["device"],
        backend=backend,
        cache=ran["cache"],
        precision=ran["precision"],
        weight_bytes=ran["weight_bytes"],
        dense_bytes=ran.get("dense_bytes", 0),
        seconds=seconds,
    )
