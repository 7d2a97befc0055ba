"""Addresses of pictures that clients give: public hosts alone, bounded in size, time and redirects."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from shaderlm.server.addresses import Fetcher, is_public
from shaderlm.server.errors import ApiError

PRIVATE = (
    *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "fec0::1", "::ffff:127.0.0.1"),
    *("64:ff9b::a9fe:a9fe", "2002:7f00:1::", "255.255.255.255", "::7f00:1", "::a9fe:a9fe", "64:ff9b:1::7f00:1"),
)


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


def test_public_addresses() -> None:
    assert all(map(is_public, ("93.184.216.34", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")))


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name, _, value = self.path[1:].partition("?")
        if name == "to":
            self.send_response(302)
            self.send_header("Location", value)
            self.end_headers()
        elif name == "silent":
            time.sleep(1)
        elif name == "endless":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(b"x" * 1000)
        elif name == "slow":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.05)
        else:
            self.send_response(404 if name == "none" else 200)
            self.end_headers()
            self.wfile.write(b"x" * (5000 if name == "large" else 3))

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def _fetch(address: str, seconds: float = 5, **options: Any) -> bytes:
    fetcher = Fetcher(seconds, 4000, **options)
    try:
        return asyncio.run(fetcher.fetch([("messages[0]", address)]))[address]
    finally:
        fetcher.close()


def _here(address: str) -> bool:
    """This machine stands for a public host."""
    return address == "127.0.0.1"


def test_what_is_fetched(host: str) -> None:
    assert _fetch(f"{host}/a", admits=_here) == b"xxx"
    assert _fetch(f"{host}/to?/to?/a", admits=_here) == b"xxx"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/none", "status 404"),
        ("/large", "more than 4,000 bytes"),
        ("/to?http://169.254.169.254/latest/meta-data", "not a public one"),
        ("/to?http://[::1]/", "not a public one"),
        ("/to?file:///etc/passwd", "must be http:// or https://"),
        ("/to?http://[::1", "redirected to what is no address"),
        ("/to?http://a:99999/", "http://a:99999/ is no address"),
        ("/to?/to?/to?/to?/to?/a", "more than 3 times"),
        ("/slow", "5 s|in time|0.3 s"),
        ("/silent", "in time|0.3 s"),
        ("/endless", "more than 4,000 bytes"),
    ],
)
def test_what_is_refused(host: str, path: str, words: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ApiError, match=words) as problem:
        _fetch(host + path, 0.3 if path in ("/slow", "/silent") else 5, admits=_here)
    assert problem.value.status == 400
    assert time.monotonic() - begin < 2


def test_a_name_that_is_looked_up_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request does not wait for the system's resolver, which cannot be stopped."""
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: answered.wait(20) and [])
    begin = time.monotonic()
    try:
        with pytest.raises(ApiError, match=r"more than 0\.2 s"):
            _fetch("http://pictures.example/a", 0.2)
        assert time.monotonic() - begin < 2
    finally:
        answered.set()


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1/x", "http://169.254.169.254/x", "http://localhost/x", "http://2130706433/x", "http://[::1]:80/"],
)
def test_hosts_that_are_not_public(address: str) -> None:
    with pytest.raises(ApiError, match="not a public one"):
        _fetch(address)


def test_a_name_of_a_private_address(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """One private address among public ones is enough; the name is asked for once, so it cannot change."""
    asked, known = [], socket.getaddrinfo

    def resolve(name: Any, port: Any, *args: Any, **more: Any) -> Any:
        if name != "pictures.example":
            return known(name, port, *args, **more)
        asked.append(name)
        found = ["93.184.216.34", "10.0.0.7"] if len(asked) == 1 else ["127.0.0.1"]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    port = host.rpartition(":")[2]
    with pytest.raises(ApiError, match="not a public one"):
        _fetch(f"http://pictures.example:{port}/a")
    assert _fetch(f"http://pictures.example:{port}/a", admits=_here) == b"xxx"
    assert len(asked) == 2
