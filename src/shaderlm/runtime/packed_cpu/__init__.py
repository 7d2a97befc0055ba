"""Steps on the CPU with weights as they are stored, by kernels that LLVM compiles."""

from .code import is_available
from .runner import PackedRunner

__all__ = ["PackedRunner", "is_available"]
