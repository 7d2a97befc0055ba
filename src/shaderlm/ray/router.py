"""The policy as a request router of Ray Serve. `ray.serve.request_router` is alpha: all that we use of it is here."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from . import routing
from .versions import check_ray

check_ray()


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is not there where types are checked
    """Chooses a replica by `routing.PrefixRouting`. The first argument of a request has its keys, as `Keys`."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called once by Ray."""
        self.routing = routing.PrefixRouting(**kwargs)
        self._running: Counter[str] = Counter()  # requests that this router sent and that are not over
        self._reasons: dict[str, str] = {}  # a request, by its id → why it goes where it goes
        # Ray copies this module into the process, and what is global here would be a copy, too.
        routing.routers[self._deployment_id.name] = self

    @property
    def replica_names(self) -> list[str]:
        """The replicas that requests may go to."""
        return [each.unique_id for each in self.curr_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray's news of replicas."""
        super().update_replicas(replicas)
        self.routing.update(self.replica_names)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """One was seen to be gone before Ray's news of it."""
        super().on_replica_actor_died(replica_id)
        self.routing.update(self.replica_names)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, tried in their order. Ray asks again for a request whose replicas are full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}

        def load(name: str) -> int:  # what this router sent, or more, if a replica said that others sent some, too
            known = self.replica_queue_len_cache.get(by_name[name].replica_id) if name in by_name else None
            return max(self._running[name], known or 0)

        mean = self._running.total() / max(1, len(by_name))
        names, reason = self.routing.choose(_keys(pending_request), load, mean)
        request = pending_request.metadata.internal_request_id
        ranks = [[by_name[name]] for name in names if name in by_name]
        if request in self._reasons:
            ranks.append([by_name[name] for name in self.routing.two() if name in by_name])
        self._reasons[request] = reason
        return ranks

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A request went to a replica."""
        reason = self._reasons.pop(pending_request.metadata.internal_request_id, "new")
        self._running[replica_id.unique_id] += 1
        self.routing.sent(_keys(pending_request), replica_id.unique_id, reason)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request is over, however it ended."""
        name = replica_id.unique_id
        self._reasons.pop(internal_request_id, None)
        self._running[name] -= 1
        if self._running[name] <= 0:
            del self._running[name]


def _keys(request: PendingRequest) -> routing.Keys:
    first = request.args[0] if request.args else None
    keys = getattr(first, "keys", None)
    return keys if isinstance(keys, routing.Keys) else routing.Keys()
