"""Requests of a batch by Ray Data: each actor holds an engine, and all requests of a block run in it at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from ..server.batch import BatchEngine, BatchResult
from ..server.limits import Limits
from .config import ModelConfig, cluster_config
from .deployment import device_here, load_served

# The file is the user's own.
TRUSTED = Limits(choices=1 << 20, stop_strings=1 << 20, tools=1 << 20)
COLUMNS = ("custom_id", "method", "url", "body")


class Predictor:
    """For `Dataset.map_batches`: rows of OpenAI's batch format in, the same rows with a column `result` out.

    options: as the keys of a model in docs/scaling.md, such as model, device, context, parallel.

        import ray
        from shaderlm.ray import Predictor

        requests = ray.data.read_parquet("requests")  # custom_id, method, url, and body as JSON
        results = requests.map_batches(
            Predictor,
            fn_constructor_kwargs={"model": "smollm2-135m", "device": "cpu"},
            compute=ray.data.ActorPoolStrategy(size=2),
            batch_size=256,
        )
        results.write_parquet("results")
    """

    def __init__(self, **options: Any) -> None:
        (self._config,) = cluster_config({"models": {"model": {**options, "embedding": True}}}).models.values()
        served = load_served(self._config, "", device_here(self._config), limits=TRUSTED)
        self._engine = BatchEngine(served)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """One block. A request that is wrong has an error as its result."""
        ids = [str(each) for each in batch["custom_id"]]
        calls = [_call(batch, row) for row in range(len(ids))]
        results = dict(self._engine.run(enumerate(calls)))
        texts = [results[row].line.decode() for row in range(len(ids))]
        return {**{name: batch[name] for name in batch}, "result": np.array(texts, dtype=object)}


def _call(batch: Mapping[str, Any], row: int) -> dict[str, Any]:
    """A row as a request. The body is JSON: columns of Parquet have one type, and bodies have many."""
    call: dict[str, Any] = {name: batch[name][row] for name in COLUMNS if name in batch}
    call["custom_id"] = str(call["custom_id"])
    body = call.get("body")
    if isinstance(body, (str, bytes)):
        try:
            call["body"] = json.loads(body)
        except ValueError as problem:
            call["body"] = f"which is no JSON: {problem}"
    return call


def results_of(
    requests: Iterable[dict[str, Any]], config: ModelConfig, *, actors: int, block: int
) -> Iterator[tuple[str, BatchResult]]:
    """The results of requests as they come, each with its custom_id. Ray must be there."""
    import ray

    options = ray.data.DataContext.get_current()
    options.enable_progress_bars = False  # the command has its own
    rows = [
        {"custom_id": each["custom_id"], "request": json.dumps(each, ensure_ascii=False).encode()} for each in requests
    ]
    blocks = max(1, -(-len(rows) // block))
    dataset = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
        _Lines,
        fn_constructor_kwargs=msgspec.to_builtins(config),
        compute=ray.data.ActorPoolStrategy(size=actors),
        batch_size=None,
        num_cpus=config.num_cpus,
        num_gpus=config.gpus or None,
        max_task_retries=-1,
        max_restarts=-1,
    )
    for batch in dataset.iter_batches(batch_size=None, prefetch_batches=0):
        for custom_id, line, failed in zip(batch["custom_id"], batch["result"], batch["failed"], strict=True):
            yield str(custom_id), BatchResult(bytes(line), bool(failed))


class _Lines:
    """The same over whole requests as JSON: what `shaderlm batch --ray` sends."""

    def __init__(self, **options: Any) -> None:
        config = msgspec.convert(options, ModelConfig)
        self._engine = BatchEngine(load_served(config, "", device_here(config), limits=TRUSTED))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        calls = [json.loads(bytes(each)) for each in batch["request"]]
        results = dict(self._engine.run(enumerate(calls)))
        lines = [results[row].line for row in range(len(calls))]
        failed = [results[row].failed for row in range(len(calls))]
        return {"custom_id": batch["custom_id"], "result": np.array(lines, dtype=object), "failed": np.array(failed)}
