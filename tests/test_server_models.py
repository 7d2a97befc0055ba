"""Several models in one server: who is loaded, who waits, who makes room. With models that compute nothing."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from starlette.requests import Request

from shaderlm.engine import EngineOptions, EngineStats, Histogram
from shaderlm.errors import DeviceError, MemoryFullError, ModelError, TooLargeError
from shaderlm.server import models as module
from shaderlm.server.errors import ApiError
from shaderlm.server.leases import _unless_gone
from shaderlm.server.models import HostedModel, Lease, Models, ModelsOptions, ModelSource
from shaderlm.server.served import ServedModel

MB = 1 << 20


@dataclass
class FakeEngine:
    lost: Exception | None = None
    tokens: int = 0

    def stats(self) -> EngineStats:
        numbers: dict[str, Any] = {each.name: 0 for each in fields(EngineStats)}
        numbers |= {"finished": {}, "token_gaps": Histogram((1.0,)), "options": EngineOptions()}
        return EngineStats(**{**numbers, "generation_tokens": self.tokens})

    def sequences(self) -> list[Any]:
        return []

    async def adrain(self, seconds: float) -> bool:
        return True


@dataclass
class FakeReport:
    path: Path


class FakeServed:
    """What `Models` sees of a model."""

    def __init__(self, house: House, name: str) -> None:
        self.name, self.model, self._house = name, self, house
        self.engine, self.report, self.nbytes = FakeEngine(), FakeReport(house.path(name)), house.sizes.get(name, MB)

    def knows(self, name: str) -> bool:
        return name == self.name

    def close(self) -> None:
        self._house.events.append(f"close {self.name}")


class House:
    """Models and what happened to them."""

    def __init__(self, folder: Path, *names: str, one: bool = False, **options: Any) -> None:
        self.folder, self.events, self.sizes = folder, list[str](), dict[str, int]()
        self.problems, self.gates = dict[str, list[BaseException]](), dict[str, threading.Event]()
        self.names = [*names]
        for name in names:
            self.path(name).write_bytes(b"x")
        self.models = Models(self.sources, ModelsOptions(**options), one=one)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.gguf"

    def sources(self) -> list[ModelSource]:
        def source(name: str) -> ModelSource:
            more: dict[str, Any] = {"aliases": (f"{name}-alias",), "tags": (f"{name}-tag",)}
            return ModelSource(name=name, load=lambda: self.load(name), path=self.path(name), **more)

        return [source(name) for name in self.names]

    def load(self, name: str) -> ServedModel:
        self.events.append(f"load {name}")
        if name in self.gates:
            assert self.gates[name].wait(60)
        if self.problems.get(name):
            raise self.problems[name].pop(0)
        return cast("ServedModel", FakeServed(self, name))

    def __getitem__(self, name: str) -> HostedModel:
        model = self.models.get(name)
        assert model is not None
        return model

    async def use(self, name: str, keep_seconds: float | None = None) -> Lease:
        return await self.models.acquire(self[name], keep_seconds)

    def states(self) -> dict[str, str]:
        return {each.name: each.state for each in self.models.all()}


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await work()

    asyncio.run(limited())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)


def test_names_aliases_tags_and_others(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee")

    async def work() -> None:
        for name in ("bee", "bee:latest", "bee-alias", "bee-tag"):
            assert (await house.models.find(name)).name == "bee"
        assert (await house.models.find(None)).name == "ant"
        with pytest.raises(ApiError, match="'cow' is not served here; there are 'ant', 'bee'") as problem:
            await house.models.find("cow")
        assert problem.value.status == 404
        house.names.append("cow")  # a file that is put into the folder
        house.path("cow").write_bytes(b"x")
        assert (await house.models.find("cow")).name == "cow"
        house.names.remove("ant")
        await house.models.refresh()
        assert list(house.states()) == ["bee", "cow"]

    run(work)


def test_two_requests_load_a_model_once_and_a_third_finds_it(tmp_path: Path) -> None:
    house = House(tmp_path, "ant")

    async def work() -> None:
        leases = [*await asyncio.gather(house.use("ant"), house.use("ant")), await house.use("ant")]
        assert house["ant"].leases == 3
        for lease in (*leases, leases[0]):  # the second time has no effect
            lease.release()
        assert (house["ant"].leases, house.events) == (0, ["load ant"])

    run(work)


def test_the_least_recently_used_goes_and_never_one_with_requests(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee", "cow", memory=2 * MB)

    async def work() -> None:
        for name in ("ant", "bee", "ant"):
            (await house.use(name)).release()
            await asyncio.sleep(0.002)
        cow = await house.use("cow")
        assert house.states() == {"ant": "loaded", "bee": "unloaded", "cow": "loaded"}
        bee = await house.use("bee")
        assert house.states() == {"ant": "unloaded", "bee": "loaded", "cow": "loaded"}, "cow has a request"
        ant = asyncio.create_task(house.use("ant"))
        await until(lambda: house["bee"]._is_draining or house["cow"]._is_draining)
        assert house["cow"]._is_draining, "it was loaded first"
        other = asyncio.create_task(house.use("cow"))
        await asyncio.sleep(0.05)
        assert not ant.done()
        assert not other.done(), "it takes no new requests"
        cow.release()
        (await ant).release()
        (await other).release()
        bee.release()

    run(work)


def test_how_many_may_be_loaded(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee", most=1)

    async def work() -> None:
        (await house.use("ant")).release()
        (await house.use("bee")).release()
        assert house.events == ["load ant", "close ant", "load bee"]

    run(work)


def test_a_request_that_gets_no_room_is_told_so(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee", most=1, room_seconds=0.1)

    async def work() -> None:
        ant = await house.use("ant")
        with pytest.raises(ApiError, match="no memory for the model 'bee': 'ant' have requests") as problem:
            await house.use("bee")
        assert (problem.value.status, problem.value.headers) == (503, {"Retry-After": "5"})
        again = await house.use("ant")  # it takes requests again
        again.release()
        ant.release()
        assert house.events == ["load ant"]

    run(work)


def test_a_model_that_is_larger_than_the_memory(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee", memory=2 * MB)
    house.sizes["bee"] = 3 * MB

    async def work() -> None:
        ant = await house.use("ant")
        for _ in range(2):
            with pytest.raises(ApiError, match=r"'bee' cannot be loaded: it takes 3.0 MiB, and --models-memory is 2.0"):
                await house.use("bee")
        assert house.events == ["load ant", "load bee", "close bee"]
        ant.release()

    run(work)


def test_a_folder_counts_as_what_is_loaded_of_it(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", memory=2 * MB)
    house.path("ant").unlink()
    house.path("ant").mkdir()
    for name, size in (("model.safetensors", MB), ("consolidated.safetensors", 2 * MB)):
        (house.path("ant") / name).write_bytes(bytes(size))

    async def work() -> None:
        (await house.use("ant")).release()
        assert house.states() == {"ant": "loaded"}

    run(work)


def test_a_cache_that_grows_makes_others_go(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee", memory=4 * MB)

    async def work() -> None:
        (await house.use("ant")).release()
        lease = await house.use("bee")
        cast("Any", lease.served).nbytes = 4 * MB
        lease.release()
        await until(lambda: house.states() == {"ant": "unloaded", "bee": "loaded"})

    run(work)


def test_a_load_that_fails_is_told_and_tried_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(tmp_path, "ant", "bee")
    house.problems["bee"] = [ModelError("the file is broken"), OSError("secret"), DeviceError("no memory")]

    async def work() -> None:
        ant = await house.use("ant")
        for _ in range(2):  # the second one is told the same
            with pytest.raises(ApiError, match="'bee' cannot be loaded: the file is broken") as problem:
                await house.use("bee")
            assert problem.value.status == 500
        assert house.states() == {"ant": "loaded", "bee": "failed"}
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
        with pytest.raises(ApiError, match="the server's log has the reason"):
            await house.use("bee")
        with pytest.raises(ApiError, match="no memory") as problem:
            await house.use("bee")
        assert problem.value.status == 503
        (await house.use("bee")).release()
        ant.release()
        assert house.events == ["load ant", *["load bee"] * 4]

    run(work)


def test_a_device_without_memory_closes_another_model(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee")
    house.problems["bee"] = [MemoryFullError("no memory")]

    async def work() -> None:
        (await house.use("ant")).release()
        (await house.use("bee")).release()
        assert house.events == ["load ant", "load bee", "close ant", "load bee"]

    run(work)


def test_a_device_that_refuses_a_model_closes_no_other(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee")
    house.problems["bee"] = [DeviceError("the driver does not compile a shader")]

    async def work() -> None:
        (await house.use("ant")).release()
        with pytest.raises(ApiError, match="'bee' cannot be loaded: the driver does not compile") as problem:
            await house.use("bee")
        assert problem.value.status == 503
        assert house.events == ["load ant", "load bee"]
        assert house.states() == {"ant": "loaded", "bee": "failed"}

    run(work)


def test_a_model_that_is_larger_than_the_device_closes_no_other(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee")
    house.problems["bee"] = [TooLargeError("it needs 200 GB, and the device has 139")]

    async def work() -> None:
        (await house.use("ant")).release()
        with pytest.raises(ApiError, match="'bee' cannot be loaded: it needs 200 GB") as problem:
            await house.use("bee")
        assert (problem.value.status, problem.value.headers) == (500, {}), "later it has no more room than now"
        assert house.states() == {"ant": "loaded", "bee": "failed"}

    run(work)


def test_who_leaves_cancels_only_the_own_wait(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee", most=1)
    house.gates["ant"] = threading.Event()

    async def work() -> None:
        first, second = asyncio.create_task(house.use("ant")), asyncio.create_task(house.use("ant"))
        await until(lambda: house.events)
        first.cancel()
        await asyncio.sleep(0.01)
        house.gates["ant"].set()
        lease = await second
        assert house["ant"].leases == 1
        waiting = asyncio.create_task(house.use("bee"))  # for room: nobody loads it when its only request is gone
        await until(lambda: house["ant"]._is_draining)
        waiting.cancel()
        await until(lambda: house.states() == {"ant": "loaded", "bee": "unloaded"})
        (await house.use("ant")).release()
        lease.release()
        assert house.events == ["load ant"]

    run(work)


def test_sleep_and_keep_alive(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee", "cow", sleep_seconds=0.05)

    async def work() -> None:
        (await house.use("ant")).release()
        (await house.use("bee", math.inf)).release()
        (await house.use("cow", 0)).release()
        (await house.use("bee", 1e300)).release()
        assert house["bee"].expires_at is None, "there is no such date"
        await until(lambda: "close ant" in house.events)
        assert house.states() == {"ant": "sleeping", "bee": "loaded", "cow": "sleeping"}
        assert house.events.index("close cow") < house.events.index("close ant")
        lease = await house.use("ant")
        await asyncio.sleep(0.1)
        assert house.states()["ant"] == "loaded", "it has a request"
        assert house["ant"].expires_at is None
        lease.release()
        assert house["ant"].expires_at is not None
        await until(lambda: house.states()["ant"] == "sleeping")

    run(work)


def test_loading_and_closing_by_hand(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee")
    house.gates["bee"] = threading.Event()

    async def work() -> None:
        house.models.load(house["ant"])
        house.models.load(house["ant"])
        await until(lambda: house.states()["ant"] == "loaded")
        lease = await house.use("ant")
        house.models.unload(house["ant"])
        later = asyncio.create_task(house.use("ant"))
        await asyncio.sleep(0.01)
        assert house.events == ["load ant"]
        lease.release()
        (await later).release()
        assert house.events == ["load ant", "close ant", "load ant"]
        house.models.load(house["bee"])
        await until(lambda: house.states()["bee"] == "loading")
        await until(lambda: "load bee" in house.events)
        house.models.unload(house["bee"])
        house.gates["bee"].set()
        await until(lambda: house.events[-1] == "close bee")
        assert house.states()["bee"] == "unloaded"
        house.gates["bee"].clear()
        house.models.load(house["bee"])
        await until(lambda: house.events[-1] == "load bee")
        house.models.unload(house["bee"])
        house.models.load(house["bee"])
        house.gates["bee"].set()
        await until(lambda: house["bee"].served)
        await asyncio.sleep(0.01)
        assert house.states()["bee"] == "loaded", "the last word counts"

    run(work)


def test_who_closes_a_model_is_heard_though_others_want_its_room_no_more(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee", most=1)

    async def work() -> None:
        ant = await house.use("ant")
        waiting = asyncio.create_task(house.use("bee"))
        await until(lambda: house["ant"]._is_draining)
        house.models.unload(house["ant"])
        waiting.cancel()
        await asyncio.wait((waiting,))
        ant.release()
        await until(lambda: house.events[-1] == "close ant")
        (await house.use("ant")).release()
        await asyncio.sleep(0.01)
        assert house.states() == {"ant": "loaded", "bee": "unloaded"}

    run(work)


def test_a_request_that_ends_as_its_model_comes_gives_it_back(tmp_path: Path) -> None:
    house = House(tmp_path, "ant")

    async def work() -> None:
        async def receive() -> Any:
            await asyncio.Event().wait()

        async def came() -> Lease:
            lease = await house.use("ant")
            request.cancel()
            return lease

        request = asyncio.create_task(_unless_gone(Request({"type": "http"}, receive), came()))
        await asyncio.wait((request,))
        assert request.cancelled()
        assert house["ant"].leases == 0

    run(work)


def test_a_model_whose_file_goes_while_it_waits_for_room(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee", most=1)

    async def work() -> None:
        ant = await house.use("ant")
        waiting = asyncio.create_task(house.use("bee"))
        await until(lambda: house.states()["bee"] == "loading")
        house.names.remove("bee")
        await house.models.refresh()
        ant.release()
        bee = await waiting
        assert house.models.of(bee.served) is house["bee"]
        bee.release()
        house.models.unload(house["bee"])
        await until(lambda: house.events[-1] == "close bee")

    run(work)


def test_a_request_that_comes_when_a_model_is_about_to_be_closed(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee", most=1, room_seconds=0.05)

    async def work() -> None:
        (await house.use("ant", 0)).release()
        for _ in range(2):  # its time is over, and it is not closed yet
            await asyncio.sleep(0)
        lease = house.models.acquire_now(house["ant"])
        assert lease is not None
        await asyncio.sleep(0.05)
        assert house.states()["ant"] == "loaded"
        lease.release()
        assert house.events == ["load ant"]

    run(work)


def test_a_file_that_is_replaced_is_loaded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    house = House(tmp_path, "ant")

    async def work() -> None:
        (await house.use("ant")).release()
        house.path("ant").write_bytes(b"another")
        (await house.use("ant")).release()
        assert house.events == ["load ant", "close ant", "load ant"]
        house.path("ant").unlink()
        (await house.use("ant")).release()
        assert house.events[3:] == [], "there is nothing to load instead"

    run(work)
    assert "the file of ant has changed" in caplog.text


def test_a_part_that_is_replaced_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part of a model in several files."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    house = House(tmp_path, "ant-00001-of-00002")
    second = house.path("ant-00002-of-00002")
    second.write_bytes(b"x")

    async def work() -> None:
        for content, loads in ((b"x", 1), (b"x", 1), (b"xy", 2)):
            second.write_bytes(content)
            os.utime(second, (1, 1))
            (await house.use("ant-00001-of-00002")).release()
            assert house.events.count("load ant-00001-of-00002") == loads

    run(work)


def test_who_waits_for_a_model_with_requests_is_told(tmp_path: Path) -> None:
    """One that is loaded again when its requests are over: they may take for ever."""
    house = House(tmp_path, "ant", room_seconds=0.05)

    async def work() -> None:
        lease = await house.use("ant")
        house.models.unload(house["ant"])
        with pytest.raises(ApiError, match="'ant' is loaded again when its requests are over") as problem:
            await house.use("ant")
        assert problem.value.status == 503
        assert house.states() == {"ant": "loaded"}
        lease.release()
        await until(lambda: house.events == ["load ant", "close ant"])
        (await house.use("ant")).release()
        assert house.events == ["load ant", "close ant", "load ant"]

    run(work)


def test_a_model_whose_device_is_lost_is_loaded_again(tmp_path: Path) -> None:
    house = House(tmp_path, "ant")

    async def work() -> None:
        lease = await house.use("ant")
        cast("Any", lease.served).engine.lost = DeviceError("gone")
        lease.release()
        (await house.use("ant")).release()
        assert house.events == ["load ant", "close ant", "load ant"]

    run(work)


def test_numbers_of_engines_that_are_closed_are_kept(tmp_path: Path) -> None:
    house = House(tmp_path, "ant")

    async def work() -> None:
        assert house["ant"].stats() is None
        for _ in range(2):
            lease = await house.use("ant", 0)
            cast("Any", lease.served).engine.tokens = 5
            lease.release()
            await until(lambda: house.states()["ant"] == "sleeping")
        stats = house["ant"].stats()
        assert stats is not None
        assert stats.generation_tokens == 10

    run(work)


def test_the_end_while_a_model_is_loaded(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", "bee")
    house.gates["bee"] = threading.Event()

    async def work() -> None:
        (await house.use("ant")).release()
        waiting = asyncio.create_task(house.use("bee"))
        await until(lambda: "load bee" in house.events)
        assert house.models.is_loading
        assert await house.models.drain(0)
        with pytest.raises(ApiError, match="about to end"):
            await waiting
        with pytest.raises(ApiError, match="about to end"):
            await house.use("ant")
        await house.models.stop()
        house.gates["bee"].set()
        await until(lambda: not house.models.is_loading)
        assert house.events == ["load ant", "load bee", "close ant", "close bee"]

    run(work)


def test_the_end_just_after_a_model_was_loaded(tmp_path: Path) -> None:
    house = House(tmp_path, "ant")
    house.gates["ant"] = threading.Event()

    async def work() -> None:
        house.models.load(house["ant"])
        await until(lambda: house.events)
        await house.models.drain(0)
        house.gates["ant"].set()
        while house.models.is_loading:  # the loop has heard nothing of the end of the thread
            time.sleep(0.001)
        await house.models.stop()
        await until(lambda: house.events[-1] == "close ant")
        assert house.states() == {"ant": "unloaded"}

    run(work)


def test_nothing_is_left_of_a_load_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house, arrays = House(tmp_path, "ant"), list[weakref.ref[Any]]()

    def load(name: str) -> ServedModel:
        weights = np.zeros(4)
        arrays.append(weakref.ref(weights))
        try:
            raise OSError("the disk is gone")
        except OSError as problem:
            raise ModelError(f"{len(weights)} weights") from problem

    monkeypatch.setattr(house, "load", load)

    async def work() -> None:
        with pytest.raises(ApiError, match="'ant' cannot be loaded: 4 weights"):
            await house.use("ant")
        gc.collect()
        assert arrays[0]() is None, "the reason is kept, and what its frames refer to is not"
        assert house.states() == {"ant": "failed"}

    run(work)


def test_many_that_wait(tmp_path: Path) -> None:
    house = House(tmp_path, "ant", waiting=2)
    house.gates["ant"] = threading.Event()

    async def work() -> None:
        waiting = [asyncio.create_task(house.use("ant")) for _ in range(2)]
        await until(lambda: house["ant"].waiting == 2)
        with pytest.raises(ApiError, match="2 requests wait for the model 'ant'") as problem:
            await house.use("ant")
        assert problem.value.status == 429
        house.gates["ant"].set()
        for lease in await asyncio.gather(*waiting):
            lease.release()

    run(work)
