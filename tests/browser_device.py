"""A device in a page of Chromium: runs the same programs as `Device`, several in one round trip.

`tests/web/programs.js` is the page's part and describes what is sent.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shaderlm.errors import DeviceError, KernelError
from shaderlm.gpu import DeviceCaps, Program
from shaderlm.gpu.lanes import probe
from shaderlm.gpu.program import as_bytes, padded
from shaderlm.gpu.webgpu_h import LIMITS

from .browser import NO_ZEROS, WEBGPU, Browser

_PAGES = Path(__file__).parent / "web"
_TYPES = {".html": "text/html", ".js": "text/javascript"}
_FEATURES = {"f16": "shader-f16", "subgroups": "subgroups"}
_PATIENCE = 600.0  # seconds for a batch: a software adapter compiles a dozen kernels in it
_BATCH_BYTES = 64 << 20

Outputs = dict[str, NDArray[np.uint8]]


class _Handler(BaseHTTPRequestHandler):
    """Files of `tests/web`, batches out and results in."""

    server: _Server

    def do_GET(self) -> None:
        file = _PAGES / self.path.lstrip("/")
        if self.path.startswith("/batch/"):
            self._send(self.server.batches.pop(self.path), "application/octet-stream")
        elif file.parent == _PAGES and file.is_file():
            self._send(file.read_bytes(), _TYPES[file.suffix])
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        self.server.results[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(b"", "text/plain")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: it would go between the lines of the tests."""


class _Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)  # a secure context, which WebGPU wants
        self.batches: dict[str, bytes] = {}
        self.results: dict[str, bytes] = {}


class BrowserDevice:
    """A device that the page opened. `caps` are those that `requestDevice` granted."""

    def __init__(self, browser: Browser, server: _Server, name: str, features: Sequence[str], full: bool) -> None:
        self._browser, self._server, self._name = browser, server, name
        self._sent: set[str] = set()
        self._number = 0
        asked = json.dumps([name, [_FEATURES[cap] for cap in features], full])
        self.caps = _caps_of(browser.run(f"open_device(...{asked})"))
        if self.caps.subgroups:
            lanes = probe(self)
            self.caps = replace(
                self.caps,
                subgroups=lanes.consecutive,
                subgroup_min=lanes.smallest,
                subgroup_max=lanes.largest,
            )

    def run(self, program: Program) -> Outputs:
        """Run a program once and read its outputs back as raw bytes."""
        (found,) = self.run_all([program])
        if isinstance(found, Exception):
            raise found
        return found

    def run_all(self, programs: Sequence[Program]) -> list[Outputs | KernelError]:
        """The outputs of each program; of one that failed, the error, with the name of the shader."""
        found: list[Outputs | KernelError] = []
        part: list[Program] = []
        for program in programs:
            if part and sum(map(_nbytes, part)) + _nbytes(program) > _BATCH_BYTES:
                found += self._batch(part)
                part = []
            part.append(program)
        return found + (self._batch(part) if part else [])

    def _batch(self, programs: Sequence[Program]) -> list[Outputs | KernelError]:
        url = f"/batch/{self._name}/{self._number}"
        self._number += 1
        self._server.batches[url] = self._packed(programs)
        problems = self._browser.run(f"runBatch({json.dumps(self._name)}, {json.dumps(url)})", patience=_PATIENCE)
        raw, at = np.frombuffer(self._server.results.pop(url), np.uint8), 0
        found: list[Outputs | KernelError] = []
        for program, problem in zip(programs, problems, strict=True):
            if problem:
                found.append(KernelError(problem))
                continue
            outputs = {}
            for name in program.outputs:
                nbytes, size = _size(program.buffers[name])
                outputs[name], at = raw[at : at + nbytes].copy(), at + size
            found.append(outputs)
        return found

    def _packed(self, programs: Sequence[Program]) -> bytes:
        """A batch as the page reads it. Shaders that it has already are left out."""
        shaders: dict[str, dict[str, str]] = {}
        listed, contents, at = [], [], 0
        for program in programs:
            buffers: dict[str, dict[str, int]] = {}
            for name, content in program.buffers.items():
                buffers[name] = {"bytes": _size(content)[1]}
                if not isinstance(content, int):
                    buffers[name]["at"], raw = at, as_bytes(content)
                    contents.append(raw)
                    at += raw.nbytes
            steps = []
            for step in program.steps:
                key = hashlib.sha256(step.source.encode()).hexdigest()[:16]
                if key not in self._sent:
                    shaders[key] = {"label": step.label, "wgsl": step.source}
                    self._sent.add(key)
                bindings = [
                    {"buffer": slot.buffer, "access": slot.access, "offset": slot.offset, "size": slot.size}
                    for slot in step.slots
                ]
                steps.append({"shader": key, "bindings": bindings, "grid": step.grid})
            listed.append({"buffers": buffers, "steps": steps, "outputs": program.outputs})
        text = json.dumps({"shaders": shaders, "programs": listed}).encode()
        head = len(text).to_bytes(4, "little") + text + b" " * (-len(text) % 4)
        return b"".join([head, *(each.tobytes() for each in contents)])


def _size(content: NDArray[Any] | int) -> tuple[int, int]:
    """Bytes of a buffer's content, and of the buffer."""
    nbytes = content if isinstance(content, int) else content.nbytes
    return nbytes, padded(nbytes)


def _nbytes(program: Program) -> int:
    return sum(_size(content)[1] for content in program.buffers.values())


def _caps_of(granted: dict[str, Any]) -> DeviceCaps:
    """What a page knows of its device."""
    info = granted["info"]
    words = [info[key] for key in ("vendor", "architecture", "device", "description") if info[key]]
    found: dict[str, Any] = {cap: int(granted["limits"][name]) for cap, name in LIMITS.items()}
    found |= {cap: feature in granted["features"] for cap, feature in _FEATURES.items()}
    return DeviceCaps(
        name=" ".join(words) or "unnamed adapter",
        kind="software" if "swiftshader" in words else "other",
        backend="WebGPU",
        driver="",
        timestamps=False,
        vendor=info["vendor"],
        offset_alignment=max(16, int(granted["limits"]["minStorageBufferOffsetAlignment"])),
        implementation="dawn",
        **found,
    )


@contextmanager
def browser_devices(folder: Path) -> Iterator[tuple[BrowserDevice, BrowserDevice]]:
    """Two devices of one page: with all that the adapter has, and with no feature and the limits that all grant.

    Workgroup memory does not begin with zeros, as it does in browsers elsewhere: kernels that read before they write
    are found, and it takes a third of the time.
    """
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, name="web server of the tests", daemon=True)
    thread.start()
    try:
        browser = Browser(folder, flags=(*WEBGPU, NO_ZEROS))
        try:
            browser.open(f"http://127.0.0.1:{server.server_port}/programs.html")
            browser.until("window.ready")
            full = BrowserDevice(browser, server, "full", tuple(_FEATURES), full=True)
            least = BrowserDevice(browser, server, "least", (), full=False)
            yield full, least
            if said := browser.complaints():
                raise DeviceError(f"the page complained: {said}")
        finally:
            browser.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
