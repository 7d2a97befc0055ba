"""Keeps a Ray of one machine on that machine: its processes listen on 127.0.0.1, and it sends no usage statistics."""

from __future__ import annotations

import os
import secrets
from collections.abc import MutableMapping
from functools import wraps
from typing import Any

_LOOPBACK = "127.0.0.1"
# Ray takes the loopback address for its node only where it does not expect a cluster, and this is how it is told.
# Its processes then listen there alone.
_NO_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_TOKENS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Before Ray is imported, in the process that starts it."""
    no_statistics(environment)
    environment[_NO_CLUSTER] = "0"
    environment.setdefault("RAY_DEDUP_LOGS", "0")  # it takes lines of the request log for the same one
    # Seconds to say how much there is to do. A busy processor takes more than Ray's 0.1, and each time is a warning.
    environment.setdefault("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "1")
    if not any(name in environment for name in _TOKENS):
        environment["RAY_AUTH_MODE"] = "token"
        environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # or else Ray writes one to the home directory


def no_statistics(environment: MutableMapping[str, str] = os.environ) -> None:
    """Ray reports nothing to anybody, unless its user says so."""
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def bind_replica() -> None:
    """In the process of a replica, before it listens. Ray Serve binds the port between deployments to all addresses.

    It is asked for by no option. On a node of 127.0.0.1 nobody else can be meant.
    """
    import ray
    from ray.serve._private import replica

    bind: Any = replica.add_port_to_grpc_server
    if ray.util.get_node_ip_address() != _LOOPBACK or getattr(bind, "is_ours", False):
        return

    @wraps(bind)
    def on_loopback(server: Any, address: str) -> Any:
        return bind(server, address.replace("[::]", _LOOPBACK))

    on_loopback.is_ours = True  # type: ignore[attr-defined]
    replica.add_port_to_grpc_server = on_loopback
