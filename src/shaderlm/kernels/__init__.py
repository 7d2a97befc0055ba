"""WGSL kernels and, beside each, the declaration of when it applies and how it is launched."""

from .registry import Verdict, all_routes, choose, routes_of, verdicts
from .route import Dims, Dispatch, Recipe, Route, fold, over_limits
from .wgsl import Kernel, Shader, compose, read, rebind

__all__ = [
    "Dims",
    "Dispatch",
    "Kernel",
    "Recipe",
    "Route",
    "Shader",
    "Verdict",
    "all_routes",
    "choose",
    "compose",
    "fold",
    "over_limits",
    "read",
    "rebind",
    "routes_of",
    "verdicts",
]
