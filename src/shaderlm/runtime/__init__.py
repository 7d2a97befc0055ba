"""From a routed op to a program on a device."""

from .execute import lower, run_op

__all__ = ["lower", "run_op"]
