"""What the `tokenizers` package raises about a checkpoint's own rules → a ModelError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ModelError, ShaderlmError


@contextmanager
def wrap_tokenizer_errors(what: str) -> Iterator[None]:
    """Every error becomes a ModelError that begins with `what`, also a panic of Rust, which is no Exception."""
    try:
        yield
    except ShaderlmError:
        raise
    except BaseException as problem:  # the package has no exceptions of its own
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":
            raise
        raise ModelError(f"{what}: {' '.join(str(problem).split())[:200]}") from None
