"""Pictures in requests, whichever API they came by: from URLs and base64 to parts of messages for the engine.

Knows no HTTP library. What is wrong with a picture is an ApiError that names its place.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any
from weakref import WeakSet

from ..engine.vision import MAX_IMAGES
from ..errors import InputError
from ..vision import Picture, open_picture
from .errors import ApiError
from .served import ServedModel
from .types.anthropic import ImageBlock
from .types.openai import ImagePart
from .types.responses import InputImage

_KINDS = (ImagePart, InputImage, ImageBlock)
_IMAGE_URL = re.compile(r"data:image/[\w.+-]+(;[\w.+-]+=[\w.+-]*){0,4};base64,", re.ASCII | re.IGNORECASE)
_ADDRESS = ("http://", "https://")
_DECODED_BYTES = 1 << 30  # of pictures that wait for the engine; those beyond are decoded again when it comes to them
_decoded: WeakSet[Picture] = WeakSet()
_lock = Lock()


class Images:
    """Opens the pictures of one request. `fetched`: what is at addresses; None: addresses are not read."""

    def __init__(
        self, served: ServedModel, client: str | None = None, fetched: Mapping[str, bytes] | None = None
    ) -> None:
        self.client = client
        self._served, self._fetched = served, fetched
        self._pictures: list[Picture] = []

    def part(self, where: str, url: str) -> dict[str, Any]:
        """The part of a message for a picture that came as a URL."""
        self._check(where)
        try:
            self._pictures.append(open_picture(self._content(url)))
        except InputError as problem:
            raise ApiError(400, f"{where}: {problem}", param=where) from None
        return {"type": "image", "image": self._pictures[-1]}

    def _check(self, where: str) -> None:
        check_sees(self._served, where)
        check_count(len(self._pictures) + 1, where)

    def _content(self, url: str) -> bytes:
        if is_address(url):
            if self._fetched is None or url not in self._fetched:
                instead = "send the picture as a data URL, or start the server with --allow-image-urls"
                raise InputError(f"addresses of pictures are not fetched here; {instead}")
            return self._fetched[url]
        begin = _IMAGE_URL.match(url[:256])
        if begin is None:
            raise InputError(f"a picture must be a data URL, data:image/TYPE;base64,…; got {url[:40]!r}")
        return _decoded_base64(url[begin.end() :])

    def release(self) -> None:
        """The request is made, so its pictures are whole. Keep pixels of as many as may wait in memory."""
        with _lock:
            held = sum(_bytes(each) for each in _decoded if "pixels" in each.__dict__)
            for picture in self._pictures:
                held += _bytes(picture)
                if held > _DECODED_BYTES:
                    picture.forget_pixels()
                else:
                    _decoded.add(picture)


def _bytes(picture: Picture) -> int:
    return 3 * picture.width * picture.height


def check_sees(served: ServedModel, where: str) -> None:
    """A picture for a model that does not read images is a 400."""
    if served.model.vision is None:
        instead = "send text alone, or start the server with a model that reads images and its mmproj file"
        raise ApiError(400, f"{where}: {served.name} does not take images; {instead}", param=where)


def check_count(count: int, where: str) -> None:
    """More pictures than a request may have are a 400."""
    if count > MAX_IMAGES:
        raise ApiError(400, f"{where}: a request may have {MAX_IMAGES} images, this one has more", param=where)


def _decoded_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text.replace("\n", "").replace("\r", ""), validate=True)
    except (binascii.Error, ValueError):
        raise InputError("the picture is not valid base64") from None


# Bodies --------------------------------------------------------------------------------------------------


def urls_of(body: Any) -> Iterator[tuple[str, str]]:
    """Places and URLs of the pictures in a body; those of Ollama, which are base64, have the URL ""."""
    messages = getattr(body, "messages", None)
    name = "messages" if messages is not None else "input"
    messages = messages if messages is not None else getattr(body, "input", None)
    if getattr(body, "images", None):
        yield "images", ""
    for i, message in enumerate(messages) if isinstance(messages, list) else ():
        if getattr(message, "images", None):
            yield f"{name}[{i}].images", ""
        for field in ("content", "output"):
            yield from _urls(f"{name}[{i}].{field}", getattr(message, field, None))


def _urls(where: str, content: Any) -> Iterator[tuple[str, str]]:
    for i, part in enumerate(content) if isinstance(content, list) else ():
        if isinstance(part, _KINDS):
            yield f"{where}[{i}]", part.url
        else:
            yield from _urls(f"{where}[{i}].content", getattr(part, "content", None))  # what a tool gave


def is_address(url: str) -> bool:
    """Is it one that would have to be fetched?"""
    return url[:8].lower().startswith(_ADDRESS)
