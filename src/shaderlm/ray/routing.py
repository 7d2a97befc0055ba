"""Which replica a request goes to. A policy of numbers alone: it knows neither Ray nor HTTP.

1. A session that a client names, or else the longest beginning that an earlier prompt had, goes where that one went.
2. Something new goes to the less loaded of two replicas, which its first hash chooses: several routers agree on them.
3. A replica that has much more to do than the others is passed over: for the other of the two, and where that has
   too much to do as well, for the less loaded of any two. So a beginning that everyone sends comes to be on as many
   replicas as it needs.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

REMEMBERED = 1 << 18  # hashes; the table has about 40 MB then
RECENT = 64  # requests for each replica that count as its recent share
_SPREAD = 1.25  # of the mean load: more is uneven
_SLACK = 2  # requests more than the mean that are never uneven
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Router(Protocol):
    """What the ingress asks a router."""

    routing: PrefixRouting

    @property
    def replica_names(self) -> list[str]:
        """The replicas that requests may go to."""


routers: dict[str, Router] = {}  # of this process, by the name of the deployment


@dataclass(frozen=True)
class Keys:
    """What a request has in common with others: a session, or hashes of its beginnings, the longest last."""

    session: int | None = None
    pages: Sequence[int] = ()

    @property
    def hashes(self) -> Sequence[int]:
        """What is remembered of it."""
        return self.pages if self.session is None else (*self.pages, self.session)


class PrefixRouting:
    """Remembers what went where. `counts` says why requests went where they did."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._homes: OrderedDict[int, str] = OrderedDict()  # hash → replica, the least recently used first
        self._remembered = remembered
        self._replicas: list[str] = []
        self._present: set[str] = set()
        self._ids = np.zeros(0, np.uint64)
        self._recent: deque[str] = deque()
        self._shares: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    @property
    def replicas(self) -> list[str]:
        """Those that requests may go to."""
        return self._replicas

    def update(self, replicas: Collection[str]) -> None:
        """These are the replicas. What went to others is new again."""
        self._replicas = sorted(replicas)
        digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in self._replicas]
        self._ids = np.array([int.from_bytes(each, "little") for each in digests], np.uint64)
        self._present = set(self._replicas)
        self._recent = deque(name for name in self._recent if name in self._present)
        self._shares = Counter(self._recent)

    def choose(self, keys: Keys, load: Callable[[str], int], mean: float) -> tuple[list[str], str]:
        """Replicas in the order in which to try them, and why the first one is it.

        load: the requests of a replica. mean: those of all, divided by their number.
        """
        home, reason = self._home(keys)
        most = _SPREAD * mean + _SLACK
        if home is not None and load(home) <= most:
            return [home], reason

        def rank(name: str) -> tuple[int, int]:
            return load(name), self._shares[name]

        pair = sorted(self._pair(keys), key=rank)
        if load(pair[0]) > most:  # more begins like this than two replicas can do
            pair = [*sorted(self.two(), key=rank), *pair]
        return [*dict.fromkeys(pair)], "new" if home is None else "moved"

    def two(self) -> list[str]:
        """Any two, for a request whose replicas are full."""
        return random.sample(self._replicas, min(2, len(self._replicas)))

    def reserve(self, keys: Keys, replica: str) -> None:
        """A request shall go there: what is chosen before it is sent knows of it."""
        self._shares[replica] += 1
        self._recent.append(replica)
        while len(self._recent) > RECENT * max(1, len(self._replicas)):
            self._shares[self._recent.popleft()] -= 1
        self._remember(keys, replica)

    def sent(self, keys: Keys, replica: str, reason: str) -> None:
        """A request went there, or to another one if the first was full."""
        self.counts[reason] += 1
        if keys.hashes and self._homes.get(keys.hashes[-1]) != replica:
            self._remember(keys, replica)

    def _remember(self, keys: Keys, replica: str) -> None:
        for each in keys.hashes:
            self._homes[each] = replica
            self._homes.move_to_end(each)
        while len(self._homes) > self._remembered:
            self._homes.popitem(last=False)

    def __len__(self) -> int:
        return len(self._homes)

    def _home(self, keys: Keys) -> tuple[str | None, str]:
        hashes = [(each, "prefix") for each in reversed(keys.pages)]
        if keys.session is not None:
            hashes.insert(0, (keys.session, "session"))
        for each, reason in hashes:
            replica = self._homes.get(each)
            if replica in self._present:
                return replica, reason
        return None, ""

    def _pair(self, keys: Keys) -> list[str]:
        """Two replicas for these keys: the largest of a hash of each replica with the first of them."""
        count = len(self._replicas)
        if count <= 2:
            return [*self._replicas]
        hashes = keys.hashes
        if not hashes:
            return self.two()
        anchor = hashes[0] if keys.session is None else keys.session
        mixed = (self._ids ^ np.uint64(anchor)) * _MULTIPLIER
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _MULTIPLIER
        one, other = np.argpartition(mixed, count - 2)[-2:]
        return [self._replicas[one], self._replicas[other]]
