"""Who may ask: keys, and origins of browser pages."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import InputError
from .errors import ApiError

# Answered without a key: whether the server is there; the page, which asks its user for one; and an export, whose page
# asks the server for nothing else.
PUBLIC = ("/health", "/", "/web")
PUBLIC_FOLDERS = ("/assets/", "/web/")
CLIENT = "shaderlm.client"  # in the scope of a request: who asks, by the number of the key


def origin_of(text: str) -> tuple[str, str, int | None] | None:
    """Scheme, host and port of an origin; None if it is no such thing ("null", for example)."""
    try:
        found = urlsplit(text)
        port = found.port
    except ValueError:
        return None
    if found.scheme not in ("http", "https") or not found.hostname or found.path or found.query or found.username:
        return None
    return found.scheme, found.hostname, port or {"http": 80, "https": 443}[found.scheme]


def is_loopback(host: str) -> bool:
    """Is it this machine, for programs on it alone?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Origins:
    """Origins of pages that may use the server: `*` (all), `localhost` (this machine, any port), or URLs."""

    def __init__(self, allowed: Collection[str]) -> None:
        self.all = "*" in allowed
        self._local = "localhost" in allowed
        self._exact = set()
        for text in allowed:
            if text in ("*", "localhost"):
                continue
            found = origin_of(text.rstrip("/"))
            if found is None:
                expected = "*, localhost or origins such as https://chat.example.com"
                raise InputError(f"--cors-origins must be {expected}, got {text!r}")
            self._exact.add(found)

    @property
    def hosts(self) -> frozenset[str]:
        """Hosts of the origins that are named."""
        return frozenset(host for _, host, _ in self._exact)

    def admits(self, origin: str) -> bool:
        """May pages of this origin use the server?"""
        if self.all:
            return True
        found = origin_of(origin)
        return found is not None and (found in self._exact or (self._local and is_loopback(found[1])))


class Access:
    """Checks origin and key before a request goes on, and answers CORS preflights."""

    def __init__(self, app: ASGIApp, keys: Collection[str], origins: Origins, host: str) -> None:
        self._app, self._keys, self._origins = app, [key.encode() for key in keys], origins
        self._open = not is_loopback(host)
        self._hosts = origins.hosts | {"localhost", host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        public = scope["path"] in PUBLIC or scope["path"].startswith(PUBLIC_FOLDERS)
        if not public and not self._keys and not self._is_own(headers.get("host", "")):
            name = headers.get("host", "")
            allowed = f"use its address, or start it with --api-key or --cors-origins http://{name}"
            await self._refuse(ApiError(403, f"this server is not known as {name}; {allowed}"), scope, receive, send)
            return
        origin = headers.get("origin")
        if origin is not None and not self._admits(origin, headers.get("host", "")):
            problem = ApiError(403, f"pages of {origin} may not use this server; --cors-origins {origin} allows it")
            await self._refuse(problem, scope, receive, send)
            return
        if origin is not None:
            send = _with_cors(send, origin)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers)(scope, receive, send)
            return
        key = self._key(headers) if self._keys else None
        if self._keys and not public and key is None:
            given = "a wrong key" if headers.get("authorization") or headers.get("x-api-key") else "no key"
            expected = "send `Authorization: Bearer KEY` or `x-api-key: KEY`"
            problem = ApiError(401, f"this server needs a key and got {given}; {expected}")
            problem.headers["WWW-Authenticate"] = "Bearer"
            await self._refuse(problem, scope, receive, send)
            return
        scope[CLIENT] = None if key is None else str(key)
        await self._app(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        """Is it a name of this server? A page may give its own name this machine's address, and is then the same
        origin as the server: browsers let it read everything, and send no origin with a GET.
        """
        if self._origins.all or not host:  # browsers always send one
            return True
        found = origin_of(f"http://{host}")
        return found is not None and (found[1] in self._hosts or _is_address(found[1]))

    def _admits(self, origin: str, host: str) -> bool:
        """Pages of this server itself may, too. By a name that only looks like this machine's, they may not."""
        if self._origins.admits(origin):
            return True
        found = origin_of(origin)
        if found is None or found != origin_of(f"{found[0]}://{host}"):
            return False
        return self._open or is_loopback(found[1])

    def _key(self, headers: Headers) -> int | None:
        """Which key a request has, by its number."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer.strip()] if scheme.lower() == "bearer" else []
        given.append(headers.get("x-api-key", ""))
        # All are compared, each in constant time: how long it takes says nothing about the keys.
        found = [
            i
            for each in given
            for i, key in enumerate(self._keys)
            if hmac.compare_digest(each.encode("latin-1"), key) and each
        ]
        return found[0] if found else None

    async def _refuse(self, problem: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(problem, scope["path"])(scope, receive, send)


def error_response(problem: ApiError, path: str) -> Response:
    """An error in the shape of the route's family."""
    body = problem.anthropic_body() if path.startswith("/v1/messages") else problem.body()
    raw = msgspec.json.encode(body)
    return Response(raw, problem.status, headers=problem.headers, media_type="application/json")


def _preflight(headers: Headers) -> Response:
    allowed = {
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "*"),
        "Access-Control-Max-Age": "600",
    }
    if headers.get("access-control-request-private-network") == "true":
        allowed["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=allowed)


def _with_cors(send: Send, origin: str) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = "Retry-After"
            headers.add_vary_header("Origin")
        await send(message)

    return sent
