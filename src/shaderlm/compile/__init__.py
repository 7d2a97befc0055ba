"""Graph → fused → routed → placed → `Plan`; and which routes are the fastest on a device."""

from .execute import lower, run_op

__all__ = ["lower", "run_op"]
