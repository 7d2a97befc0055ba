"""`shaderlm batch --ray`: the same requests on several engines, on this machine or on a cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .batch_files import Line, RequestFile
from .options import ModelOptions

if TYPE_CHECKING:
    from ..server.batch import BatchResult

BLOCK = 64  # requests that go to an engine together; one that ends early waits for the others of its block
WAITING = 4  # blocks for each engine, so that none has to wait


def run_by_ray(
    requests: RequestFile,
    todo: Sequence[Line],
    model_options: ModelOptions,
    options: Mapping[str, Any],
    replicas: int,
    address: str | None,
) -> Iterator[tuple[str, BatchResult]]:
    """Results as they come. A request whose engine was lost runs again, and may have run before."""
    from ..ray.cluster import local_ray, ray_at
    from ..ray.config import cluster_config
    from ..ray.versions import check_ray

    check_ray()
    logging.disable(logging.INFO)  # Ray tells what it does, and sets its levels again and again
    model = model_options.model
    if model is not None and model.startswith("synthetic:"):
        raise InputError(f"{model} has random weights; give a model's file or name")
    from .serve_replicas import resources

    has, gpus = resources(model_options.device, replicas) if address is None else ({"device": model_options.device}, 0)
    args = {
        "model": str(Path(model).absolute()) if model is not None and Path(model).exists() else model,
        "backend": model_options.backend,
        "context": model_options.context,
        "precision": model_options.precision,
        "tune": not model_options.no_tune,
        "ignore_keys": model_options.ignore_keys,
        "quantize": model_options.quantize,
        "embedding": True,
        **{name: value for name, value in options.items() if value is not None},
        **has,
    }
    (config,) = cluster_config({"models": {"model": args}}).models.values()
    with local_ray(replicas, gpus) if address is None else ray_at(address):
        from ..ray.predictor import results_of

        calls = (requests.read(line) for line in todo)
        yield from results_of(calls, config, actors=replicas, block=_block(len(todo), replicas))


def _block(requests: int, replicas: int) -> int:
    """Few requests are spread over all engines."""
    return max(1, min(BLOCK * WAITING, -(-requests // (WAITING * replicas))))
