"""WGSL kernels and, beside each, the declaration of when it applies and how it is launched."""

from .registry import Option, Verdict, all_routes, choose, first_of, option, options, routes_of, verdicts
from .route import Dims, Dispatch, LaunchList, Route, fold, over_limits, shader_of
from .wgsl import Kernel, Shader, compose, read, rebind

__all__ = [
    "Dims",
    "Dispatch",
    "Kernel",
    "LaunchList",
    "Option",
    "Route",
    "Shader",
    "Verdict",
    "all_routes",
    "choose",
    "compose",
    "first_of",
    "fold",
    "option",
    "options",
    "over_limits",
    "read",
    "rebind",
    "routes_of",
    "shader_of",
    "verdicts",
]
