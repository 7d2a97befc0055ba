"""`shaderlm batch --ray`: the same requests on several engines, on this machine or on a cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, ShaderlmError
from .batch_files import Line, Requests
from .loading import progress_bar
from .options import ModelOptions

if TYPE_CHECKING:
    from ..ray.config import ModelConfig
    from ..server.batch import BatchResult
    from ..server.served import ModelNames

BLOCK = 64  # requests that go to an engine together; one that ends early waits for the others of its block
WAITING = 4  # blocks for each engine, so that none has to wait


@dataclass(frozen=True)
class RayEngines:
    """Several engines of one model. Ray runs in `started` alone."""

    config: ModelConfig
    names: ModelNames
    replicas: int
    gpus: int
    address: str | None

    @contextmanager
    def started(self) -> Iterator[None]:
        """A Ray of this machine alone, or the one at the address."""
        from ..ray.cluster import local_ray, ray_at

        logging.disable(logging.INFO)  # Ray tells what it does, and sets its levels again and again
        with ExitStack() as stack:
            try:
                stack.enter_context(
                    local_ray(self.replicas, self.gpus) if self.address is None else ray_at(self.address)
                )
            except ShaderlmError:
                raise
            except Exception as problem:  # Ray raises all kinds
                reason = (str(problem).splitlines() or [type(problem).__name__])[0]
                raise ShaderlmError(f"Ray did not start: {reason}") from None
            yield

    def results(self, requests: Requests[Any], todo: Sequence[Line]) -> Iterator[list[tuple[str, BatchResult]]]:
        """Results as they come, a block at a time. A request whose engine was lost runs again."""
        from ..ray.predictor import results_of

        calls = (requests.read(line) for line in todo)
        return results_of(calls, self.config, actors=self.replicas, block=_block(len(todo), self.replicas))


def ray_engines(
    model_options: ModelOptions, options: Mapping[str, Any], replicas: int, address: str | None
) -> RayEngines:
    """The engines of a model, whose file is there and can be run: what is wrong is told before Ray starts."""
    from ..engine.loading import identify
    from ..formats.default_model import NAME
    from ..ray.config import cluster_config
    from ..ray.versions import check_ray
    from ..server.served import ModelNames
    from .models import is_synthetic
    from .serve_replicas import resources

    check_ray()
    if model_options.cache_dir is not None:
        raise InputError("--cache-dir is not for --ray: each engine may be on a machine of its own.")
    if model_options.draft is not None or model_options.draft_model is not None:
        raise InputError("--draft is not for --ray yet; leave it out.")
    model = model_options.model
    if is_synthetic(model):
        raise InputError(f"{model} has random weights, and engines load files; give a model's file or name")
    path = None if model is None or not Path(model).exists() else str(Path(model).absolute())
    source = path or model
    with progress_bar() as progress:
        name, own_name, file = identify(
            source,
            context=model_options.context,
            quantize=model_options.quantize,
            ignore_keys=model_options.ignore_keys,
            progress=progress,
        )
    has, gpus = resources(model_options.device, replicas) if address is None else ({"device": model_options.device}, 0)
    args = {
        "model": source,
        "backend": model_options.backend,
        "context": model_options.context,
        "precision": model_options.precision,
        "tune": not model_options.no_tune,
        "ignore_keys": model_options.ignore_keys,
        "quantize": model_options.quantize,
        "embedding": True,
        **{key: value for key, value in options.items() if value is not None},
        **has,
    }
    (config,) = cluster_config({"models": {"model": args}}).models.values()
    names = ModelNames.of(config.aliases, name, own_name, source or NAME, file)
    return RayEngines(config, names, replicas, gpus, address)


def _block(requests: int, replicas: int) -> int:
    """Few requests are spread over all engines."""
    return max(1, min(BLOCK * WAITING, -(-requests // (WAITING * replicas))))
