"""Models as the measuring commands name them: what `generate` takes, or synthetic:SHAPE:FORMAT."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .loading import progress_bar

if TYPE_CHECKING:
    from ..engine import LanguageModel
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


def check_device(device: str, backend: Backend) -> None:
    """Refuse a name that no adapter has; `auto` and `cpu` need none."""
    from ..gpu.adapters import choose

    if device.strip().lower() not in ("auto", "cpu"):
        choose(device, backend)


@contextmanager
def opened(
    model: str | None,
    device: str | Device,
    *,
    precision: str,
    tune: bool,
    backend: Backend = "auto",
    ignore_keys: Collection[str] = (),
    fusions: Sequence[str] | None = None,
) -> Iterator[LanguageModel]:
    """A model on a device, loaded under a progress bar and closed afterwards."""
    from ..bench import synthetic
    from ..engine import loading

    options: dict[str, Any] = {"fusions": fusions, "precision": precision, "tune": tune, "backend": backend}
    with progress_bar() as progress:
        if model is not None and is_synthetic(model):
            loaded = synthetic.load_synthetic_model(model, device, progress=progress, **options)
        else:
            loaded = loading.load_with(model, device=device, ignore_keys=ignore_keys, progress=progress, **options)
    with loaded:
        yield loaded
