"""The request router with Ray's part of it, over replicas that are none: what it counts, and from when on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from shaderlm.ray import routing
from shaderlm.ray.relay import RelayedRequest
from shaderlm.ray.routing import Keys

if TYPE_CHECKING:
    from shaderlm.ray.router import PrefixRouter

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


class Replica:
    """A replica as a router sees it. `queue`: the requests that it says it has."""

    def __init__(self, name: str, queue: int = 0) -> None:
        from ray.serve._private.common import DeploymentID, ReplicaID

        self.replica_id = ReplicaID(name, DeploymentID("m"))
        self.max_ongoing_requests, self.queue = 4, queue

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue


def routed(
    work: Callable[[PrefixRouter], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, *replicas: Replica
) -> None:
    """Do something with a router over these replicas."""
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID

    from shaderlm.ray.router import PrefixRouter

    monkeypatch.setattr(routing, "routers", {})

    async def run() -> None:
        source = DeploymentHandleSource.REPLICA
        router = PrefixRouter(DeploymentID("m"), source, use_replica_queue_len_cache=True)
        router.initialize_state()
        router.update_replicas([*replicas])
        async with asyncio.timeout(60):
            await work(router)

    asyncio.run(run())


def pending(name: str, *pages: int) -> Any:
    from ray.serve._private.common import RequestMetadata
    from ray.serve.request_router import PendingRequest

    request = RelayedRequest("POST", "/x", b"", [], b"", None, None, name, Keys(pages=pages))
    return PendingRequest(args=[request], kwargs={}, metadata=RequestMetadata(name, name))


def test_prompts_that_come_together_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice knows of those before it, though none of them is sent yet."""

    async def work(router: PrefixRouter) -> None:
        waiting = [router._choose_replica_for_request(pending(f"{number}", number)) for number in range(4)]
        chosen = Counter(each.replica_id.unique_id for each in await asyncio.gather(*waiting))
        assert chosen == {"a": 2, "b": 2}

    routed(work, monkeypatch, Replica("a"), Replica("b"))


def test_the_same_beginning_at_the_same_time_goes_to_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(router: PrefixRouter) -> None:
        waiting = [router._choose_replica_for_request(pending(f"{number}", 7)) for number in range(2)]
        assert len({each.replica_id.unique_id for each in await asyncio.gather(*waiting)}) == 1

    routed(work, monkeypatch, Replica("a"), Replica("b"))


def test_a_request_counts_from_its_choice_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(router: PrefixRouter) -> None:
        request = pending("one", 1)
        name = (await router._choose_replica_for_request(request)).replica_id
        assert router._load == {name.unique_id: 1}
        again = await router._choose_replica_for_request(request, is_retry=True)  # it was not taken
        router.on_request_completed(name, "one")  # Ray tells later that the first try is over
        assert router._load == {again.replica_id.unique_id: 1}
        router.on_request_routed(request, again.replica_id, None)
        router.on_request_completed(name, "one to all replicas, as for metrics")
        assert router._load.total() == 1
        router.on_request_completed(again.replica_id, "one")
        assert not router._load
        assert not router._sent
        assert router.routing.counts.total() == 1

    routed(work, monkeypatch, Replica("a"), Replica("b"))


def test_a_wait_that_is_cancelled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    full = [Replica("a", 4), Replica("b", 4)]

    async def work(router: PrefixRouter) -> None:
        waiting = [asyncio.create_task(router._choose_replica_for_request(pending(f"{n}", n))) for n in range(3)]
        while router._load.total() < 3:
            await asyncio.sleep(0)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not router._load
        assert not router._sent

    routed(work, monkeypatch, *full)
