"""JavaScript of the project in Chromium, beside files that stand for what it imports."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .browser import Browser


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing on the console."""


def run_in_chromium(folder: Path, files: dict[str, str], main: str) -> Any:
    """What `main`, a module beside `files`, exports as `found`."""
    (folder / "site").mkdir()
    for name, content in {**files, "page.html": "<!doctype html>", "main.js": main}.items():
        (folder / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "site" / name).write_text(content, encoding="utf-8")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder / "site")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = Browser(folder)
    try:
        browser.open(f"http://127.0.0.1:{server.server_address[1]}/page.html")
        return browser.run("import('/main.js').then((made) => made.found)")
    finally:
        browser.close()
        server.shutdown()
        server.server_close()
