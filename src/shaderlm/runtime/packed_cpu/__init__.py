"""Steps on the CPU with weights as they are stored, by onnxruntime."""

from .runner import PackedRunner
from .sessions import is_available

__all__ = ["PackedRunner", "is_available"]
