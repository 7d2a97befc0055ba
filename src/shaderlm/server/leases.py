"""Which model answers a request, and for how long it is needed: from the request's end back to the models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .models import Lease
from .served import ServedModel
from .service import Service

LEASES = "shaderlm.leases"  # in the scope of a request: what is released when it is over


async def use_model(
    service: Service, request: Request, name: str | None, keep_seconds: float | None = None
) -> ServedModel:
    """The model that a request names, loaded; it stays until the request is over. `keep_seconds`: and so long after."""
    service.check_ending()
    service.check_model()
    if service.models.is_pinned:
        return service.served
    model = await service.models.find(name)
    lease = service.models.acquire_now(model, keep_seconds)
    if lease is None:
        lease = await _unless_gone(request, service.models.acquire(model, keep_seconds))
    request.scope.setdefault(LEASES, []).append(lease)
    return lease.served


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Lease]) -> Lease:
    """What comes of a wait, unless the client leaves meanwhile. The request's body has been read."""
    waiting = asyncio.create_task(work)
    listening = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((waiting, listening), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        raise ClientDisconnect
    except BaseException:
        waiting.cancel()
        with suppress(asyncio.CancelledError, Exception):
            (await waiting).release()  # it came at the same time
        raise
    finally:
        listening.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await listening


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def releasing(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Any]]:
    """The same route, which releases what it used when its answer is sent, or fails."""

    async def answered(request: Request) -> Any:
        try:
            response = await answer(request)
        except BaseException:
            release(request.scope)
            raise
        return _Released(response) if LEASES in request.scope else response

    return answered


def release(scope: Scope) -> None:
    """The request is over."""
    leases: list[Lease] = scope.get(LEASES, [])
    for lease in leases:
        lease.release()


class _Released:
    """A response, with what follows it."""

    def __init__(self, response: Response) -> None:
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await self._response(scope, receive, send)
        finally:
            release(scope)
