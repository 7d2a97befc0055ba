"""What a user gives as a picture → pixels, [height, width, 3] of uint8, and a hash of the contents.

Pillow decodes (the extra `vision`): PNG, JPEG, WebP, GIF (the first frame) and BMP. The sizes in a header are checked
before anything is decoded. Orientation of EXIF is honoured, transparent parts are white.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..install import install_command
from .parts import PartsReader, check_jpeg

U8 = NDArray[np.uint8]
MAX_BYTES = 32 << 20  # of a file
MAX_PIXELS = 50_000_000  # decoded and turned: 0.2 GB at most at once
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA_URL = re.compile(r"data:(?P<type>[\w.+/-]*)(?P<more>(;[\w.+=-]*)*?)(?P<base64>;base64)?,", re.ASCII)
_ORIENTATION = 0x0112  # of EXIF
_TURNED = (5, 6, 7, 8)  # values of it with which width and height change places
_EXPECTED = "the path or the bytes of a file, a data URL, an image of Pillow or an array [height, width, 3] of uint8"


class Picture:
    """A picture whose header is checked. Its pixels are decoded when they are first asked for."""

    def __init__(self, width: int, height: int, content: bytes | U8) -> None:
        """content: the bytes of a file, or pixels."""
        self.width, self.height = width, height
        self._content = content
        digest = hashlib.blake2b(content if isinstance(content, bytes) else content.reshape(-1).data, digest_size=16)
        if not isinstance(content, bytes):
            digest.update(f"{width}×{height}".encode())
        self.key = digest.digest()  # of the contents: the same picture has the same

    @cached_property
    def pixels(self) -> U8:
        """[height, width, 3]. A file that cannot be decoded is an InputError."""
        return self._content if not isinstance(self._content, bytes) else _decoded(self._content)

    def forget_pixels(self) -> None:
        """They are decoded again when they are asked for."""
        self.__dict__.pop("pixels", None)

    def __repr__(self) -> str:
        return f"<Picture {self.width}×{self.height}>"


def open_picture(source: Any) -> Picture:
    """A picture of whatever a user has: a path, bytes, a data URL, an image of Pillow, an array of pixels."""
    if isinstance(source, Picture):
        return source
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _of_bytes(_data_url(source))
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _of_bytes(bytes(source))
    if isinstance(source, (str, os.PathLike)):
        return _of_bytes(file_bytes(source))
    if isinstance(source, np.ndarray):
        return _of_array(source)
    if hasattr(source, "convert") and hasattr(source, "mode"):
        _check_size(*source.size)
        with _explained():
            return _of_array(_turned(_rgb(source), _orientation(source)))
    raise InputError(f"a picture must be {_EXPECTED}, got {type(source).__name__}")


def file_bytes(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file that may be a picture; no more than one may have."""
    if isinstance(path, str) and "://" in path:
        raise InputError(f"{path:.80}: addresses are not fetched; download the picture and give its path")
    try:
        where = Path(path).expanduser()
        if where.is_dir():
            raise InputError(f"{where} is a directory; give the path of a picture")
        size = where.stat().st_size
        if size > MAX_BYTES:
            raise InputError(_too_many_bytes(size))
        with where.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise InputError(f"the picture {os.fspath(path)!r:.200} cannot be read: {reason}") from None


def _data_url(text: str) -> bytes:
    begin = _DATA_URL.match(text[:256])
    if begin is None or not begin["base64"]:
        raise InputError("a data URL of a picture must begin with data:image/TYPE;base64,")
    encoded = text[begin.end() :]
    if len(encoded) > MAX_BYTES * 4 // 3 + 4:
        raise InputError(_too_many_bytes(len(encoded) * 3 // 4))
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InputError("the data URL of a picture is not valid base64") from None


def _too_many_bytes(size: int) -> str:
    return f"a picture may have {MAX_BYTES >> 20} MiB, this one has {size / (1 << 20):,.1f} MiB"


def _of_array(pixels: NDArray[Any]) -> Picture:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        shape = f"{list(pixels.shape)} of {pixels.dtype}"
        raise InputError(f"an array of pixels must be [height, width, 3] of uint8, got {shape}")
    height, width = pixels.shape[:2]
    _check_size(width, height)
    return Picture(width, height, np.array(pixels, np.uint8))  # a copy: the caller may change it


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise InputError(f"a picture must have pixels, this one is {width} × {height}")
    if width * height > MAX_PIXELS:
        most = f"{MAX_PIXELS // 1_000_000} megapixels"
        raise InputError(f"a picture may have {most}, this one is {width:,} × {height:,}; make it smaller")


def _of_bytes(content: bytes) -> Picture:
    """Of a file: its header is read, and nothing else."""
    if len(content) > MAX_BYTES:
        raise InputError(_too_many_bytes(len(content)))
    if not content:
        raise InputError("the picture is empty: it has 0 bytes")
    if is_jpeg := content[:2] == b"\xff\xd8":
        check_jpeg(content, 0)
    with _explained(), _opened(content) as image:
        width, height = image.size
        _check_size(width, height)
        if is_jpeg:
            check_jpeg(content, width * height)
        if _orientation(image) in _TURNED:
            width, height = height, width
    return Picture(width, height, content)


def _decoded(content: bytes) -> U8:
    with _explained(), _opened(content) as image:
        _check_size(*image.size)
        turn = _orientation(image)
        pixels = _rgb(image)
    return np.ascontiguousarray(_turned(pixels, turn))


def _opened(content: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise InputError(f"pictures need Pillow: {install_command('vision')}") from None
    return Image.open(PartsReader(content), formats=FORMATS)


@contextmanager
def _explained() -> Iterator[None]:
    """What Pillow raises about a file, in words; what it warns of is not shown."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (InputError, KeyboardInterrupt):
        raise
    except MemoryError:
        raise InputError("there is not enough memory to decode the picture") from None
    except Exception as problem:  # any: a decoder may fail in any way on bytes that it does not expect
        name = type(problem).__name__
        if name == "UnidentifiedImageError":
            kinds = "a PNG, JPEG, WebP, GIF or BMP file"
            raise InputError(f"the picture is not {kinds}, or is damaged where it begins") from None
        if name == "DecompressionBombError":
            raise InputError(f"a picture may have {MAX_PIXELS // 1_000_000} megapixels, this one has more") from None
        raise InputError(f"the picture cannot be decoded: it is damaged or incomplete ({problem!s:.100})") from None


def _orientation(image: Any) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a damaged EXIF block says nothing; the pixels may be whole
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _turned(pixels: U8, orientation: int) -> U8:
    if orientation in _TURNED:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _rgb(image: Any) -> U8:
    """Pixels in RGB. Transparent parts are laid on white; of 16 bits the upper 8 count."""
    mode = image.mode
    if mode.startswith("I;16"):
        return _of_grey(np.asarray(image) >> 8)
    if mode in ("I", "F"):  # an image of Pillow. Of 32 bits it is not said how many are used
        values = np.asarray(image).astype(np.float64)
        return _of_grey(np.clip(values / 256 if mode == "I" and values.max(initial=0) > 255 else values, 0, 255))
    if "transparency" in image.info or mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        if mode in ("RGBa", "La"):
            image = image.convert(mode.upper())
        return _on_white(np.asarray(image.convert("RGBA")))
    return np.array(image.convert("RGB"), np.uint8)


def _of_grey(values: NDArray[Any]) -> U8:
    return np.repeat(values.astype(np.uint8)[:, :, None], 3, axis=2)


def _on_white(rgba: U8) -> U8:
    """α · colour + (1 − α) · white, in whole numbers, a stripe at a time."""
    out = np.empty((*rgba.shape[:2], 3), np.uint8)
    for first in range(0, len(rgba), 64):
        stripe = rgba[first : first + 64].astype(np.uint32)
        alpha = stripe[:, :, 3:]
        out[first : first + 64] = (stripe[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255
    return out
