"""Names of headers as people write them. Case means nothing in HTTP, but some clients look for `Access-Control-…`."""

from __future__ import annotations

from functools import cache

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OF_THE_CONNECTION = (b"content-length", b"transfer-encoding", b"connection")  # uvicorn reads these


class _Name(bytes):
    """uvicorn writes names in small letters where they have any."""

    def lower(self) -> _Name:
        return self


@cache
def _written(name: bytes) -> bytes:
    return name if name in _OF_THE_CONNECTION else _Name(name.title())


class HeaderCase:
    """Sends an application's headers so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(_written(bytes(name)), value) for name, value in message.get("headers", ())]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, sent if scope["type"] == "http" else send)
