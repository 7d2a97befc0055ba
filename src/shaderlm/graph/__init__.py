"""Ops, their shapes and their formulas in NumPy. Knows neither GPU nor files."""

from .ops import OPS, Op, resolve

__all__ = ["OPS", "Op", "resolve"]
