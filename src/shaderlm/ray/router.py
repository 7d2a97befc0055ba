"""The policy as a request router of Ray Serve. `ray.serve.request_router` is alpha: all that we use of it is here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from . import routing
from .versions import check_ray

check_ray()


@dataclass
class _Choice:
    """Where a request shall go, and why. It stays with the request."""

    replica: str
    reason: str
    counts: bool = True  # as load of the replica: until the request is sent, or nobody waits for it any more


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is not there where types are checked
    """Chooses a replica by `routing.PrefixRouting`. The first argument of a request has its keys, as `Keys`."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called once by Ray."""
        self.routing = routing.PrefixRouting(**kwargs)
        self._load = Counter[str]()  # requests of this router by replica, from the choice to the end
        self._sent = Counter[tuple[str, str]]()  # of those that are sent: request and replica; one may be sent twice
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
        earlier = self._release(pending_request)

        def load(name: str) -> int:  # what this router chose, or more, if a replica said that others sent some, too
            known = self.replica_queue_len_cache.get(by_name[name].replica_id) if name in by_name else None
            return max(self._load[name], known or 0)

        keys, mean = _keys(pending_request), self._load.total() / max(1, len(by_name))
        names, reason = self.routing.choose(keys, load, mean)
        ranks = [[by_name[name]] for name in names if name in by_name]
        if earlier is not None:
            ranks.append([by_name[name] for name in self.routing.two() if name in by_name])
            reason = "new" if earlier.reason == "new" else reason
        if names:
            pending_request.routing_context.choice = _Choice(names[0], reason)
            _add(self._load, names[0], 1)
            if earlier is None:
                self.routing.reserve(keys, names[0])
        return ranks

    async def _choose_replica_for_request(self, pending_request: PendingRequest, **options: Any) -> RunningReplica:
        """Ray's, which waits for a replica. For each that it returns there is one `on_request_completed`."""
        try:
            replica = await super()._choose_replica_for_request(pending_request, **options)
        finally:
            self._release(pending_request)
        name = replica.replica_id.unique_id
        _add(self._load, name, 1)
        _add(self._sent, (pending_request.metadata.internal_request_id, name), 1)
        return replica

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica took a request."""
        name, choice = replica_id.unique_id, pending_request.routing_context.choice
        reason = choice.reason if name == choice.replica or choice.reason == "new" else "moved"
        self.routing.sent(_keys(pending_request), name, reason)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request is over, or was not taken. Ray calls it for those to all replicas, too, which nobody chose."""
        name = replica_id.unique_id
        if self._sent[internal_request_id, name]:
            _add(self._sent, (internal_request_id, name), -1)
            _add(self._load, name, -1)

    def _release(self, request: PendingRequest) -> _Choice | None:
        """The choice for a request, if there is one. It counts no more."""
        choice: _Choice | None = getattr(request.routing_context, "choice", None)
        if choice is not None and choice.counts:
            choice.counts = False
            _add(self._load, choice.replica, -1)
        return choice


def _add(counts: Counter[Any], key: Any, change: int) -> None:
    """What is 0 leaves the table."""
    counts[key] += change
    if not counts[key]:
        del counts[key]


def _keys(request: PendingRequest) -> routing.Keys:
    first = request.args[0] if request.args else None
    keys = getattr(first, "keys", None)
    return keys if isinstance(keys, routing.Keys) else routing.Keys()
