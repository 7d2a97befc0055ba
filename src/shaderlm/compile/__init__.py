"""Graph → fused → routed → placed → `Plan`; and which routes are the fastest on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .execute import lower, run_op

__all__ = ["lower", "run_op"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import execute  # late: it imports all kernels, which the CPU does without

    return getattr(execute, name)
