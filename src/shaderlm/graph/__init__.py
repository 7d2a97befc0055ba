"""Ops, their shapes and their formulas in NumPy. Knows neither GPU nor files."""

from .ops import OPS, resolve

__all__ = ["OPS", "resolve"]
