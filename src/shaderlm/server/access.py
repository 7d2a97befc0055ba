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
PUBLIC = ("/health", "/v1/health", "/", "/web")
PUBLIC_FOLDERS = ("/assets/", "/web/")
CLIENT = "shaderlm.client"  # in the scope of a request: who asks, by the number of the key


def origin_of(text: str) -> tuple[str, str, int | None] | None:
    """Scheme, host and port of an origin; None if it is no such thing ("null", for example)."""
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        return None
    if url.scheme not in ("http", "https") or not url.hostname or url.path or url.query or url.username:
        return None
    return url.scheme, url.hostname, port or {"http": 80, "https": 443}[url.scheme]


def _address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Is it this machine, for programs on it alone?"""
    address = _address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


class Origins:
    """Origins of pages that may use the server: `*` (all), `localhost` (this machine, any port), or URLs.

    None are named: a server with keys lets all pages ask, for they need a key; one without, those of this machine.
    """

    def __init__(self, allowed: Collection[str], *, has_keys: bool = False) -> None:
        allowed = allowed or (("*",) if has_keys else ("localhost",))
        self.all = "*" in allowed
        self._local = "localhost" in allowed
        self._exact = set()
        for text in set(allowed) - {"*", "localhost"}:
            origin = origin_of(text.rstrip("/"))
            if origin is None:
                expected = "*, localhost or origins such as https://chat.example.com"
                raise InputError(f"--cors-origins must be {expected}, got {text!r}")
            self._exact.add(origin)

    @property
    def hosts(self) -> frozenset[str]:
        """Hosts of the origins that are named."""
        return frozenset(host for _, host, _ in self._exact)

    def admits(self, origin: str) -> bool:
        """May pages of this origin use the server?"""
        parts = origin_of(origin)
        local = self._local and parts is not None and is_loopback(parts[1])
        return self.all or local or parts in self._exact


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
        host, origin = headers.get("host", ""), headers.get("origin")
        app = self._app
        preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        try:
            if not public and not self._keys and not self._is_own(host):
                allowed = f"use its address, or start it with --api-key or --cors-origins http://{host}"
                raise ApiError(403, f"this server is not known as {host}; {allowed}")
            admitted = origin is not None and self._admits(origin, host)
            if origin is not None and admitted:
                send = _with_cors(send, origin)
            if preflight:  # what it does not allow, the browser does not send
                app = _preflight(headers) if admitted else Response()
            elif origin is not None and not admitted:
                raise ApiError(403, f"pages of {origin} may not use this server; --cors-origins {origin} allows it")
            else:
                scope[CLIENT] = self._client(headers, public)
        except ApiError as problem:
            app = error_response(problem, scope["path"])
        await app(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        """Is it a name of this server? A page may give its own name this machine's address, and is then the same
        origin as the server: browsers let it read everything, and send no origin with a GET.
        """
        if self._origins.all or not host:  # browsers always send one
            return True
        parts = origin_of(f"http://{host}")
        return parts is not None and (parts[1] in self._hosts or _address_of(parts[1]) is not None)

    def _admits(self, origin: str, host: str) -> bool:
        """Pages of this server itself may, too. By a name that only looks like this machine's, they may not."""
        if self._origins.admits(origin):
            return True
        parts = origin_of(origin)
        if parts is None or parts != origin_of(f"{parts[0]}://{host}"):
            return False
        return self._open or is_loopback(parts[1])

    def _client(self, headers: Headers, public: bool) -> str | None:
        """Who asks: the number of the key, if there are keys."""
        if not self._keys:
            return None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        sent = [bearer.strip()] if scheme.lower() == "bearer" else []
        sent.append(headers.get("x-api-key", ""))
        # All are compared, each in constant time: how long it takes says nothing about the keys.
        matches = [
            i
            for text in sent
            for i, key in enumerate(self._keys)
            if hmac.compare_digest(text.encode("latin-1"), key) and text
        ]
        if matches or public:
            return str(matches[0]) if matches else None
        got = "a wrong key" if headers.get("authorization") or headers.get("x-api-key") else "no key"
        expected = "send `Authorization: Bearer KEY` or `x-api-key: KEY`"
        message = f"this server needs a key and got {got}; {expected}"
        raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})


def error_response(problem: ApiError, path: str) -> Response:
    """An error in the shape of the route's family."""
    shapes = {"/v1/messages": problem.anthropic_body, "/api/": problem.ollama_body}
    shape = next((shape for prefix, shape in shapes.items() if path.startswith(prefix)), problem.body)
    raw = msgspec.json.encode(shape())
    return Response(raw, problem.status, headers=problem.headers, media_type="application/json")


def _preflight(headers: Headers) -> Response:
    """The headers are named: `*` is not Authorization."""
    allowed = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "*"),
        "Access-Control-Max-Age": "600",
    }
    if headers.get("access-control-request-private-network") == "true":
        allowed["Access-Control-Allow-Private-Network"] = "true"
    return Response(headers=allowed)


def _with_cors(send: Send, origin: str) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Allow-Credentials"] = "true"  # certificates of clients, and proxies that log in
            headers["Access-Control-Expose-Headers"] = "Retry-After"
            headers.add_vary_header("Origin")
        await send(message)

    return sent
