"""Models as the measuring commands name them: what `generate` takes, or synthetic:SHAPE:FORMAT."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from .loading import progress_bar

if TYPE_CHECKING:
    from ..engine import LanguageModel
    from ..formats.checkpoint import Checkpoint
    from ..gpu import Backend, Device
    from ..models.architecture import Architecture
    from ..models.config import Config


def is_synthetic(model: str | None) -> bool:
    """Is it the name of a shape with random weights?"""
    from ..bench.synthetic import PREFIX

    return model is not None and model.startswith(PREFIX)


def name_with_format(model: LanguageModel) -> str:
    """The model's name with the format of most of its weights, which is in the names of synthetic ones."""
    report = model.report
    return report.name if is_synthetic(str(report.path)) else f"{report.name} {next(iter(report.types)).upper()}"


def described(model: str | None, ignore_keys: Collection[str] = ()) -> tuple[Architecture, Config]:
    """A model's architecture and sizes; no weight is read. The default model is fetched if it is not there yet."""
    from ..bench.synthetic import config_of, parse
    from ..engine.planning import read_header

    if model is not None and is_synthetic(model):
        return config_of(*parse(model))
    with progress_bar() as progress:
        return read_header(model, progress, ignore_keys)


def open_described(
    model: str | None, ignore_keys: Collection[str] = ()
) -> tuple[Architecture, Config, Checkpoint | None]:
    """The same, and the checkpoint, open for `load_any`: whoever asks closes it. A synthetic model has none."""
    from ..engine.planning import described_by
    from ..formats.find import find
    from ..formats.opening import open_checkpoint

    if model is not None and is_synthetic(model):
        return *described(model), None
    with progress_bar() as progress:
        file = open_checkpoint(find(model, progress))
    try:
        return *described_by(file, ignore_keys), file
    except BaseException:
        file.close()
        raise


def check_device(device: str, backend: Backend) -> None:
    """Refuse a name that no adapter has; `auto` and those of the CPU need none."""
    from ..engine.cpu import is_cpu
    from ..gpu.adapters import choose

    if device.strip().lower() != "auto" and not is_cpu(device):
        choose(device, backend)


def load_any(
    model: str | None,
    device: str | Device,
    *,
    ignore_keys: Collection[str] = (),
    quantize: str | None = None,
    draft_model: str | None = None,
    checkpoint: Checkpoint | None = None,
    **options: Any,
) -> LanguageModel:
    """A model, loaded under a progress bar; `options` as for `engine.loading.load_drafting`.

    `checkpoint`: the model's, if it is open already. It stays open.
    """
    from ..bench import synthetic
    from ..engine import loading

    def load_one(name: str | None, *, device: str | Device, **how: Any) -> LanguageModel:
        if name is not None and is_synthetic(name):
            return synthetic.load_synthetic(name, device, **how)
        own = {"ignore_keys": ignore_keys, "quantize": quantize, "checkpoint": checkpoint}
        more: dict[str, Any] = own if name == model else {}
        return loading.load_with(name, device=device, **more, **how)

    with progress_bar() as progress:
        return loading.load_drafting(model, draft_model, device=device, progress=progress, load_one=load_one, **options)
