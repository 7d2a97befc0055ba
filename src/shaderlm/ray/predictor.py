"""Requests of a batch by Ray Data: each actor holds an engine, and all requests of a block run in it at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv

from ..errors import DeviceError
from ..server.batch import BatchEngine, BatchResult
from ..server.limits import Limits
from .config import ModelConfig, cluster_config
from .deployment import device_here, load_served
from .problems import error_of
from .rows import request_of

# The file is the user's own.
TRUSTED = Limits(choices=1 << 20, stop_strings=1 << 20, tools=1 << 20)
COLUMNS = ("custom_id", "method", "url", "body")
LOSSES = 3  # of an actor's device in a row, with no block finished in between: then it is an error
RESTARTS = 20  # of an actor in a run, for whatever reason
_POLL_SECONDS = 0.1
Item = TypeVar("Item")


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
        (config,) = cluster_config({"models": {"model": {**options, "embedding": True}}}).models.values()
        self._engine = ActorEngine(config)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """One block. A request that is wrong has an error as its result."""
        results = self._engine.run([_call(batch, number) for number in range(len(batch["custom_id"]))])
        texts = [each.line.decode() for each in results]
        return {**{name: batch[name] for name in batch}, "result": np.array(texts, dtype=object)}


def _call(batch: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A row as a request. One that cannot be read is an error of its own."""
    row = {name: batch[name][number] for name in COLUMNS if name in batch}
    row["custom_id"] = str(row["custom_id"])
    try:
        return request_of(row)
    except (ValueError, RecursionError) as problem:
        return {**{name: str(value) for name, value in row.items()}, "body": f"which is no JSON: {problem}"}


class RequestRunner:
    """The same over whole requests as JSON: what `shaderlm batch --ray` sends."""

    def __init__(self, **options: Any) -> None:
        self._engine = ActorEngine(msgspec.convert(options, ModelConfig))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """One block."""
        results = self._engine.run([json.loads(bytes(each)) for each in batch["request"]])
        lines = np.array([each.line for each in results], dtype=object)
        return {"custom_id": batch["custom_id"], "result": lines, "failed": np.array([each.failed for each in results])}


class ActorEngine:
    """An engine in an actor. Where its device is lost, the process ends: Ray starts another, and sends it the block.

    A device that is lost each time is an error.
    """

    def __init__(self, config: ModelConfig) -> None:
        context = ray.get_runtime_context()
        self._losses = f"shaderlm-device-losses-{context.get_actor_id()}".encode()
        try:
            self._engine = BatchEngine(load_served(config, "", device_here(config), limits=TRUSTED))
        except DeviceError as problem:
            if not context.was_current_actor_reconstructed:  # the first start: it was never there
                raise
            self._lost(problem)

    def run(self, calls: Sequence[Mapping[str, Any]]) -> list[BatchResult]:
        """The results of requests, in their order."""
        try:
            results = dict(self._engine.run(enumerate(calls)))
        except DeviceError as problem:
            self._lost(problem)
        internal_kv._internal_kv_del(self._losses)
        return [results[row] for row in range(len(calls))]

    def _lost(self, problem: DeviceError) -> NoReturn:
        """Losses are counted in Ray's head: each is of another process."""
        losses = int(internal_kv._internal_kv_get(self._losses) or 0) + 1
        if losses >= LOSSES:
            raise DeviceError(f"an engine has lost its device {losses} times, with no block in between: {problem}")
        internal_kv._internal_kv_put(self._losses, str(losses).encode())
        os._exit(1)


def results_of(
    requests: Iterable[dict[str, Any]],
    config: ModelConfig,
    *,
    actors: int,
    block: int,
    runner: type[RequestRunner] = RequestRunner,
) -> Iterator[tuple[str, BatchResult] | None]:
    """The results of requests as they come, each with its custom_id; None where there is none. Ray must be there."""
    options = ray.data.DataContext.get_current()
    options.enable_progress_bars = False  # the command has its own
    rows = [
        {"custom_id": each["custom_id"], "request": json.dumps(each, ensure_ascii=False).encode()} for each in requests
    ]
    blocks = max(1, -(-len(rows) // block))
    dataset = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
        runner,
        fn_constructor_kwargs=msgspec.to_builtins(config),
        compute=ray.data.ActorPoolStrategy(size=actors),
        batch_size=None,
        num_cpus=config.num_cpus,
        num_gpus=config.gpus or None,
        max_task_retries=-1,
        max_restarts=RESTARTS,
    )
    try:
        for batch in _or_none(dataset.iter_batches(batch_size=None, prefetch_batches=0)):
            if batch is None:
                yield None
                continue
            for custom_id, line, failed in zip(batch["custom_id"], batch["result"], batch["failed"], strict=True):
                yield str(custom_id), BatchResult(bytes(line), bool(failed))
    except RayError as problem:
        raise error_of(problem) from None


def _or_none(items: Iterable[Item]) -> Iterator[Item | None]:
    """The items, and None where there is none yet: who iterates can listen to Ctrl-C."""
    came: SimpleQueue[tuple[Item | None, BaseException | None]] = SimpleQueue()

    def read() -> None:
        end: BaseException = StopIteration()
        try:
            for item in items:
                came.put((item, None))
        except BaseException as problem:
            end = problem
        came.put((None, end))

    Thread(target=read, name="results", daemon=True).start()
    while True:
        try:
            item, end = came.get(timeout=_POLL_SECONDS)
        except Empty:
            yield None
            continue
        if isinstance(end, StopIteration):
            return
        if end is not None:
            raise end
        yield item
