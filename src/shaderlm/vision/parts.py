"""Bounds on the parts of a file of a picture: decoders take time for each, however few bytes and pixels there are."""

from __future__ import annotations

import io

from ..errors import InputError

MAX_READS = 50_000  # of a decoder: blocks of a file, and pieces of 64 KiB; 32 MiB of PNG in blocks of 4 KiB are 25,000
MAX_EXIF = 64  # blocks of a JPEG: Pillow joins them one by one
MAX_SCANS = 1000  # of a JPEG,
MAX_SCANNED = 1_000_000_000  # and pixels that they touch together


class PartsReader(io.BytesIO):
    """A file from which a decoder may read so often."""

    _reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """As of any file, until it is too often."""
        self._reads += 1
        if self._reads > MAX_READS:
            raise InputError(f"the picture has too many parts: reading it takes more than {MAX_READS:,} steps")
        return super().read(size)


def check_jpeg(content: bytes, pixels: int) -> None:
    """Before one is opened or decoded: how many blocks of EXIF and scans it has, at most."""
    if (blocks := content.count(b"Exif\0\0")) > MAX_EXIF:
        raise InputError(f"a JPEG may have {MAX_EXIF} blocks of EXIF, this one has {blocks:,}")
    scans = content.count(b"\xff\xda")
    if scans > MAX_SCANS or scans * pixels > MAX_SCANNED:
        most = min(MAX_SCANS, MAX_SCANNED // max(1, pixels))
        raise InputError(f"a JPEG of {pixels:,} pixels may have {most:,} scans, this one has {scans:,}")
