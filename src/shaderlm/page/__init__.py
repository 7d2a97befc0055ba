"""The chat page: one source for `shaderlm serve` and for exports. What its files show and how is theirs.

The page talks to a source of answers: the server's HTTP API (`server.js`), or a model that this browser runs
(`local.js`). `data-source` of `index.html` says which one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

# Nothing is fetched from elsewhere, and no other page may show this one.
POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"

# Not from the system's table of types, which on some machines calls scripts plain text.
TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "json": "application/json",
    "bin": "application/octet-stream",
    "ts": "text/plain",
    "txt": "text/plain",
}

_LIST = "const FILES = {};"
_VERSION = 'const VERSION = "";'


@cache
def assets() -> dict[str, bytes]:
    """The files of the page by name, `index.html` among them, as the server shows them."""
    folder = files(__package__) / "assets"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def export_files() -> dict[str, bytes]:
    """The page of an export: path in its folder → bytes. The service worker is made last: see `service_worker`."""
    page, source = assets()["index.html"], b'data-source="server"'
    assert page.count(source) == 1
    rest = {f"assets/{name}": content for name, content in sorted(assets().items()) if name != "index.html"}
    return {"index.html": page.replace(source, b'data-source="local"'), **rest}


def service_worker(hashes: Mapping[str, str]) -> bytes:
    """`sw.js` of an export. `hashes`: path → SHA-256 in hex, of `plan.json` and of all files that it does not list.

    The list makes another file of it whenever one of them changes, which is how browsers notice a new export.
    """
    text = (files(__package__) / "sw.js").read_text(encoding="utf-8")
    listed = json.dumps(dict(sorted(hashes.items())), indent=0)
    version = hashlib.sha256(listed.encode()).hexdigest()[:16]
    for line, value in ((_LIST, f"const FILES = {listed};"), (_VERSION, f'const VERSION = "{version}";')):
        assert text.count(line) == 1
        text = text.replace(line, value)
    return text.encode()


def listed_files(worker: str) -> dict[str, str]:
    """The list that a service worker of an export has; empty if it is no such thing."""
    match = re.search(r"^const FILES = (\{.*?\});$", worker, re.M | re.S)
    try:
        listed = json.loads(match[1]) if match else {}
    except ValueError:
        return {}
    return {name: digest for name, digest in listed.items() if isinstance(digest, str)}
