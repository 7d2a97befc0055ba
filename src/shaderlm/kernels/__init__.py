"""WGSL kernels and, beside each, the declaration of when it applies and how it is launched."""

from .registry import Verdict, all_routes, choose, first_of, routes_of, verdicts
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
    "first_of",
    "fold",
    "over_limits",
    "read",
    "rebind",
    "routes_of",
    "verdicts",
]
