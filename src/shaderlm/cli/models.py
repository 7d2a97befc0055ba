"""Models as the measuring commands name them: what `generate` takes, or synthetic:SHAPE:FORMAT."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from .loading import progress_bar

if TYPE_CHECKING:
    from ..engine import LanguageModel
    from ..engine.report import LoadReport
    from ..gpu import Backend, Device
    from ..models.architecture import Architecture, Config
    from ..runtime.runner import Runner


class Opened(NamedTuple):
    """A runner, what was loaded, and the whole model if it has a tokenizer."""

    runner: Runner
    report: LoadReport
    model: LanguageModel | None

    @property
    def name(self) -> str:
        """The model's name with the format of most of its weights."""
        if self.model is None:
            return self.report.name
        return f"{self.report.name} {next(iter(self.report.types)).upper()}"


def is_synthetic(model: str | None) -> bool:
    """Is it the name of a shape with random weights?"""
    from ..bench.synthetic import PREFIX

    return model is not None and model.startswith(PREFIX)


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
) -> Iterator[Opened]:
    """A model on a device, loaded under a progress bar and closed afterwards."""
    from ..bench import synthetic
    from ..engine import loading

    options: dict[str, Any] = {"fusions": fusions, "precision": precision, "tune": tune, "backend": backend}
    with progress_bar() as progress:
        if model is not None and is_synthetic(model):
            runner, report = synthetic.load_synthetic(model, device, progress, **options)
            found, close = Opened(runner, report, None), runner.close
        else:
            loaded = loading.load_with(model, device=device, ignore_keys=ignore_keys, progress=progress, **options)
            found, close = Opened(loaded.runner, loaded.report, loaded), loaded.close
    try:
        yield found
    finally:
        close()
