"""A small server for tests of exports in a browser: it counts what is asked for, and damages what it is told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

Fault = Literal["missing", "damaged", "cut"]
# A page that nobody else can read has clocks of 5 µs, others of 100.
ISOLATION = {"cross-origin-opener-policy": "same-origin", "cross-origin-embedder-policy": "require-corp"}
TYPES = {".html": "text/html", ".js": "text/javascript", ".json": "application/json"}


class WebServer:
    """Files of some folders under /. `faults` says what is wrong with a path, `requests` what was asked for."""

    def __init__(self, pages: dict[str, bytes], folders: dict[str, list[Path]]) -> None:
        self.pages, self.folders = pages, folders
        self.faults: dict[str, Fault] = {}
        self.requests: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.requests.append(self.path)
                content, fault = server.content(self.path), server.faults.get(self.path)
                if content is None or fault == "missing":
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("content-type", TYPES.get(Path(self.path).suffix, "application/octet-stream"))
                self.send_header("content-length", str(len(content)))
                for policy, value in ISOLATION.items():
                    self.send_header(policy, value)
                self.end_headers()
                if fault == "damaged":
                    middle = len(content) // 2
                    content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
                if fault == "cut":
                    content, self.close_connection = content[: len(content) // 2], True
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Nothing on the console."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="web server")
        self._thread.start()

    def content(self, path: str) -> bytes | None:
        """What is at a path."""
        if path in self.pages:
            return self.pages[path]
        folder, _, name = path.lstrip("/").partition("/")
        found = (place / name for place in self.folders.get(folder, ()))
        return next((file.read_bytes() for file in found if file.is_file()), None)

    def asked(self, name: str) -> int:
        """How often files with this in their name were asked for."""
        return sum(name in path for path in self.requests)

    def close(self) -> None:
        """The end."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def serving(pages: dict[str, bytes], folders: dict[str, list[Path]]) -> Iterator[WebServer]:
    """A server for the time of a block."""
    server = WebServer(pages, folders)
    try:
        yield server
    finally:
        server.close()
