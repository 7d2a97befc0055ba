"""Requests of a batch by Ray Data: each actor holds an engine, and all requests of a block run in it at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
import ray
import ray.data
from ray.exceptions import RayError
from ray.experimental import internal_kv

from ..errors import DeviceError, ShaderlmError
from ..server.batch import BatchEngine, BatchResult
from ..server.limits import Limits
from .config import ModelConfig, cluster_config
from .deployment import device_here, load_served
from .problems import error_of, hush_ray_data
from .rows import request_of

# The file is the user's own.
TRUSTED = Limits(choices=1 << 20, stop_strings=1 << 20, tools=1 << 20)
COLUMNS = ("custom_id", "method", "url", "body")
STARTS = 3  # of an actor's process with no block finished: one more is an error


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

    A device that is lost each time is an error, and so is a process that ends each time for another reason. The first
    block raises what the constructor has met: of a constructor Ray prints tracebacks, and starts it again.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._starts = _Starts(ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None)
        self._problem: ShaderlmError | None = self._starts.add()
        if self._problem is None:
            try:
                self._engine = BatchEngine(load_served(config, "", device_here(config), limits=TRUSTED))
            except ShaderlmError as problem:
                if isinstance(problem, DeviceError) and self._starts.again:
                    self._starts.end(problem)
                self._problem = problem

    def run(self, calls: Sequence[Mapping[str, Any]]) -> list[BatchResult]:
        """The results of requests, in their order."""
        if self._problem is not None:
            raise self._problem
        try:
            results = dict(self._engine.run(enumerate(calls)))
        except DeviceError as problem:
            self._starts.end(problem)
        self._starts.clear()
        return [results[row] for row in range(len(calls))]


class _Starts:
    """How often an actor's process was started since its last block, and why. Ray's head keeps it: processes end.

    Outside of an actor nothing is started again, and nothing ends.
    """

    def __init__(self, actor: str | None) -> None:
        self._key, self._count, self._reason = f"shaderlm-starts-{actor}".encode(), 0, ""
        self._in_actor = actor is not None
        value = internal_kv._internal_kv_get(self._key) if self._in_actor else None
        self.again = value is not None  # or else this is the first process
        if value is not None:
            self._count, self._reason = json.loads(value)

    def add(self) -> DeviceError | None:
        """One more start. One too many is an error."""
        if self._count >= STARTS:
            reason = self._reason or "its process has ended"
            return DeviceError(f"an engine was lost {self._count} times with no block finished: {reason}")
        self._write(self._count + 1, "")
        return None

    def end(self, problem: DeviceError) -> NoReturn:
        """The end of this process."""
        if not self._in_actor:
            raise problem
        self._write(self._count, str(problem))
        os._exit(1)

    def clear(self) -> None:
        """A block is finished."""
        if self._count:
            self._write(0, "")

    def _write(self, count: int, reason: str) -> None:
        self._count, self._reason = count, reason
        if self._in_actor:
            internal_kv._internal_kv_put(self._key, json.dumps([count, reason]).encode())


def results_of(
    requests: Iterable[dict[str, Any]],
    config: ModelConfig,
    *,
    actors: int,
    block: int,
    runner: type[RequestRunner] = RequestRunner,
) -> Iterator[list[tuple[str, BatchResult]]]:
    """The results of requests as they come, a block at a time, each with its custom_id. Ray must be there."""
    hush_ray_data()
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
    )
    try:
        for batch in dataset.iter_batches(batch_size=None, prefetch_batches=0):
            lines = zip(batch["custom_id"], batch["result"], batch["failed"], strict=True)
            yield [(str(custom_id), BatchResult(bytes(line), bool(failed))) for custom_id, line, failed in lines]
    except RayError as problem:
        raise error_of(problem) from None
