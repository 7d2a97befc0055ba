"""Drives Chromium over a pipe, in the DevTools protocol: no Node, no package. Knows nothing of what it shows.

Chromium reads commands from its descriptor 3 and answers on 4, as JSON with a NUL byte after each message.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip
WITHOUT_GPU = ("--disable-gpu",)
WEBGPU = ("--enable-unsafe-webgpu",)  # headless on Linux by SwiftShader; measure_web says how to take a GPU
# Shaders do not begin with zeros in workgroup memory: SwiftShader compiles those three times as long. Our kernels write
# before they read.
NO_ZEROS = "--enable-dawn-features=disable_workgroup_init"
PATIENCE = 60.0  # seconds for one answer; a slow machine with all its cores busy needs about 10 to start


class BrowserError(Exception):
    """Chromium is missing, gave up, did not answer in time, or refused a command."""


def find() -> str:
    """Path of a Chromium."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    raise BrowserError(f"found none of {', '.join(NAMES)} on PATH; `./dev test --browser` installs one where it can")


class Browser:
    """A Chromium with an empty profile and one tab. Everything that it says is kept in `events`.

    `flags`: with WEBGPU, pages have it. Others may follow.
    """

    def __init__(self, folder: Path, *, flags: Sequence[str] = WITHOUT_GPU):
        self._folder = folder
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self._log = (folder / "chromium.log").open("wb")
        # A shell moves the pipes' ends to 3 and 4, which others in this process may be using. The order is safe: of
        # four new descriptors the last is the highest, so never 3.
        moved = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        data = f"--user-data-dir={folder / 'chromium'}"
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", moved, find(), *FLAGS, *flags, data, "about:blank"],
            pass_fds=(to_browser, from_browser), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            start_new_session=True,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._rest, self._number, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        try:
            self._open_tab()
        except BaseException:
            self.close()
            raise

    def _open_tab(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    # Messages ----------------------------------------------------------------------------------------------

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise BrowserError(f"Chromium said nothing for too long; its log: {self._said()}")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise BrowserError(f"Chromium ended; its log: {self._said()}")
            self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _said(self) -> str:
        return (self._folder / "chromium.log").read_text(errors="replace")[-2000:] or "(empty)"

    def call(self, method: str, *, patience: float = PATIENCE, **params: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer, for so many seconds."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        try:
            os.write(self._write, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise BrowserError(f"Chromium ended; its log: {self._said()}") from None
        deadline = time.monotonic() + patience
        while True:
            answer = self._message(deadline)
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def wait_for(self, method: str) -> None:
        """Until an event of this name has come since `events` was last emptied."""
        deadline = time.monotonic() + PATIENCE
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._message(deadline))

    # What a person would do ------------------------------------------------------------------------------

    def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Shows a page in a window of this size and colour scheme, from its first script on."""
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media="screen", features=media)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        failed = self.call("Page.navigate", url=url).get("errorText")
        if failed:
            raise BrowserError(f"{url}: {failed}")
        self._drawn()

    def reload(self) -> None:
        """Shows the page again."""
        self.events.clear()
        self.call("Page.reload")
        self._drawn()

    def _drawn(self) -> None:
        self.wait_for("Page.loadEventFired")
        # Two frames later everything is drawn, and observers of sizes have been called.
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def run(self, expression: str, *, patience: float = PATIENCE) -> Any:
        """The value of a JavaScript expression; of a promise, what it comes to."""
        answer = self.call(
            "Runtime.evaluate", patience=patience, expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def hover(self, selector: str) -> None:
        """Moves the mouse over the middle of an element, scrolled into sight."""
        where = self.run(f"""(() => {{
            const node = document.querySelector({json.dumps(selector)});
            node.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = node.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=where[0], y=where[1])

    def press(self, key: str, code: int, *, shift: bool = False) -> None:
        """A key, by its name and its Windows virtual key code."""
        text = {"text": "\r"} if key == "Enter" else {}  # without it, Enter presses no button
        for kind in ("keyDown", "keyUp"):
            pressed: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code, **text}
            self.call("Input.dispatchKeyEvent", type=kind, modifiers=8 if shift else 0, **pressed)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def until(self, expression: str) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not self._is_true(expression):
            if time.monotonic() > deadline:
                raise BrowserError(f"{expression}: never true; the page says {self.run('document.body.innerText')!r}")
            time.sleep(0.02)

    def _is_true(self, expression: str) -> bool:
        """False, too, where the page goes away while it is asked."""
        try:
            return bool(self.run(f"Boolean({expression})"))
        except BrowserError as problem:
            if "navigated" in str(problem):
                return False
            raise

    def screenshot(self, whole: bool = False) -> bytes:
        """What is in sight, or the whole page, as a PNG file."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    # What it said ------------------------------------------------------------------------------------------

    def complaints(self) -> list[str]:
        """Exceptions, and warnings and errors on the console or in the log, since the page was opened."""
        self.run("1")  # what was said before the answer to this has arrived
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("warning", "error", "assert"):
                found.append(f"console.{params['type']}: {json.dumps(params['args'])}")
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
                found.append(f"log: {params['entry']['text']}")
        return found

    def requests(self) -> list[str]:
        """Addresses of everything that was asked for since the page was opened."""
        self.run("1")
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def close(self) -> None:
        """Ends Chromium with its children."""
        for descriptor in (self._write, self._read):
            os.close(descriptor)
        # With its pipe closed Chromium ends by itself; what is left of its group after that is made to.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def pixels(png: bytes) -> tuple[int, int, list[bytes]]:
    """Width, height and rows of a screenshot: 8 bits a channel, RGB or RGBA, not interlaced."""
    at, parts, width, height, channels = 8, [], 0, 0, 3
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", body[:10])
            assert depth == 8, f"{depth} bits a channel"
            channels = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            parts.append(body)
        at += length + 12
    data, rows, before = zlib.decompress(b"".join(parts)), [], bytes(width * channels)
    for start in range(0, len(data), width * channels + 1):
        before = _unfiltered(data[start], data[start + 1 : start + 1 + width * channels], before, channels)
        rows.append(before)
    return width, height, rows


def _unfiltered(kind: int, line: bytes, above: bytes, step: int) -> bytes:
    """One row of a PNG, of which only the difference from its neighbours is stored."""
    if kind == 0:
        return line
    if kind == 2:
        return bytes((a + b) & 255 for a, b in zip(line, above, strict=True))
    row = bytearray(line)
    for i, value in enumerate(line):
        left = row[i - step] if i >= step else 0
        corner = above[i - step] if i >= step else 0
        up = above[i]
        if kind == 1:
            guess = left
        elif kind == 3:
            guess = (left + up) // 2
        else:
            estimate = left + up - corner
            guess = min((left, up, corner), key=lambda near: abs(estimate - near))
        row[i] = (value + guess) & 255
    return bytes(row)
