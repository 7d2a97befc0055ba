"""Files mapped into memory, never read whole, and the way out of it. Knows no format."""

from __future__ import annotations

import mmap
import os
import stat
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError


def map_file(path: Path, expected: str) -> mmap.mmap:
    """A regular file that is not empty, for reading; anything else is a ModelError that says what was `expected`."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelError(f"{path} is a directory; expected {expected}")
        if not stat.S_ISREG(mode):
            raise ModelError(f"{path} is not a regular file; expected {expected}")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelError(f"{path} is empty; download it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; expected {expected}") from None
    except PermissionError:
        raise ModelError(f"{path} may not be read: permission denied") from None
    except OSError as problem:
        raise ModelError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except ModelError:
        raise
    except ValueError as problem:  # a NUL in the path
        raise ModelError(f"{str(path)!r} cannot be a path: {problem}") from None


def mapped_rows(data: mmap.mmap, offset: int, row_bytes: int, first: int, end: int) -> NDArray[np.uint8]:
    """Rows `first` … `end` of rows that begin at `offset`: a read-only view, [rows, row_bytes]."""
    count = (end - first) * row_bytes
    if not count:
        return np.empty((end - first, row_bytes), np.uint8)
    return np.frombuffer(data, np.uint8, count, offset + first * row_bytes).reshape(end - first, row_bytes)


def unmap(data: mmap.mmap) -> None:
    """Let go of a file. Arrays that look at it keep it mapped: the last one to go unmaps it."""
    with suppress(BufferError):
        data.close()
