"""Fetches pictures from addresses that clients give: public ones alone, with limits of size, time and redirects.

The name of a host is resolved once, every address that it has is checked, and the connection is made to a checked one:
a name that means something else a moment later leads nowhere else.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import urljoin, urlsplit

from ..errors import InputError
from ..vision.pictures import MAX_BYTES
from .errors import ApiError

_THREADS, _REDIRECTS, _CHUNK = 8, 3, 1 << 16
_MAX_ADDRESS = 4096  # characters
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # the last 32 bits are an address of IPv4
_NOT_PUBLIC = "its host is not known, or is not a public one"


def is_public(text: str) -> bool:
    """Is it an address that anybody may reach? Not this machine, its network, or what lies inside others."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if address.is_site_local or address.is_reserved:  # such as ::7f00:1, an address of IPv4 in an old form
            return False
    return address.is_global and not address.is_multicast


class Fetcher:
    """Fetches for all requests, in threads of its own. `admits`: which addresses may be connected to."""

    def __init__(self, seconds: float, most: int, admits: Callable[[str], bool] = is_public) -> None:
        """most: bytes of the pictures of a request together."""
        self._seconds, self._most, self._admits = seconds, most, admits
        self._threads = ThreadPoolExecutor(_THREADS, "fetch")
        self._requests = asyncio.Semaphore(_THREADS)  # whose pictures are in memory

    async def fetch(self, addresses: Iterable[tuple[str, str]]) -> dict[str, bytes]:
        """What is at addresses, each with the place in the request that it has. A problem is a 400."""
        loop, fetched, left = asyncio.get_running_loop(), dict[str, bytes](), self._most
        end = time.monotonic() + self._seconds
        place = ""
        try:
            async with asyncio.timeout(self._seconds), self._requests:
                for where, address in addresses:
                    place = where
                    if address not in fetched:
                        most = min(left, MAX_BYTES)
                        fetched[address] = await loop.run_in_executor(self._threads, self._get, address, end, most)
                        left -= len(fetched[address])
        except TimeoutError:
            problem = f"its pictures took more than {self._seconds:g} s to arrive; send them as data URLs"
            raise ApiError(400, f"{place}: {problem}", param=place) from None
        except InputError as problem:
            raise ApiError(400, f"{place}: the picture cannot be fetched: {problem}", param=place) from None
        return fetched

    def close(self) -> None:
        """Nothing more is fetched."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _get(self, address: str, end: float, most: int) -> bytes:
        """The body of an answer, after redirects."""
        for _ in range(1 + _REDIRECTS):
            found = self._once(address, end, most)
            if isinstance(found, bytes):
                return found
            try:
                address = urljoin(address, found)
            except ValueError:
                raise InputError("it was redirected to what is no address") from None
        raise InputError(f"it was redirected more than {_REDIRECTS} times")

    def _once(self, address: str, end: float, most: int) -> bytes | str:
        """A body, or where it is instead."""
        try:
            connection, path = self._connect(address, end)
        except InputError:
            raise
        except (OSError, ValueError):
            raise InputError("its host does not answer") from None
        raw = connection.sock
        # Of a host that sends a byte now and then, no single read takes long.
        timer = threading.Timer(max(0.0, end - time.monotonic()), _shut, (raw,))
        timer.start()
        try:
            headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "shaderlm"}
            connection.request("GET", path, headers=headers)
            with connection.getresponse() as response:
                if response.status in (301, 302, 303, 307, 308):
                    return response.headers.get("Location", "")
                if response.status != 200:
                    raise InputError(f"its host answers with the status {response.status}")
                return _body(response, most)
        except InputError:
            raise
        except (OSError, http.client.HTTPException, ValueError):
            raise InputError("its host does not answer as HTTP has it, or not in time") from None
        finally:
            timer.cancel()
            connection.close()
            raw.close()

    def _connect(self, address: str, end: float) -> tuple[http.client.HTTPConnection, str]:
        """A connection to an address that was checked, and the path."""
        if len(address) > _MAX_ADDRESS or not address.isascii() or not address.isprintable():
            raise InputError(f"an address has at most {_MAX_ADDRESS:,} characters of ASCII, without line ends")
        try:
            url = urlsplit(address)
            known = url.port
        except ValueError:
            raise InputError(f"{address:.80} is no address") from None
        if url.scheme not in ("http", "https") or not url.hostname or url.username is not None:
            raise InputError("an address must be http:// or https:// with a host, and without a user")
        port = known or {"http": 80, "https": 443}[url.scheme]
        checked = self._resolved(url.hostname, port)
        seconds = max(0.1, end - time.monotonic())
        raw = socket.create_connection((checked, port), timeout=seconds)
        try:
            kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
            if url.scheme == "https":
                kind = http.client.HTTPSConnection
                raw = ssl.create_default_context().wrap_socket(raw, server_hostname=url.hostname)
            connection = kind(url.hostname, port, timeout=seconds)
            connection.sock = raw  # so it connects to no other
        except BaseException:
            raw.close()
            raise
        path = url.path.replace(" ", "%20") or "/"
        return connection, f"{path}?{url.query}" if url.query else path

    def _resolved(self, host: str, port: int) -> str:
        """The first address of a host, all of which must be public."""
        try:
            found = [each[4][0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError):
            raise InputError(_NOT_PUBLIC) from None
        addresses = [str(each) for each in found]
        if not addresses or not all(map(self._admits, addresses)):
            raise InputError(_NOT_PUBLIC)
        return addresses[0]


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _body(response: http.client.HTTPResponse, most: int) -> bytes:
    parts, size = [], 0
    while part := response.read1(_CHUNK):
        size += len(part)
        if size > most:
            raise InputError(f"it has more than {most:,} bytes, which is what is left of the most")
        parts.append(part)
    return b"".join(parts)
