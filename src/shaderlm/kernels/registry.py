"""Finds every route. An op's declaration file ends with `ROUTES`, in order of preference; that is all."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..errors import InputError, RouteError
from ..gpu.caps import DeviceCaps
from .route import Dims, LaunchList, Route, over_limits

FAMILIES = ("norm", "linear", "experts", "attention", "recurrent", "pointwise", "vision", "sampling")


@lru_cache(maxsize=1)
def all_routes() -> dict[str, tuple[Route, ...]]:
    """Every op that has kernels, with its routes in order of preference."""
    routes: dict[str, tuple[Route, ...]] = {}
    for family in FAMILIES:
        package = importlib.import_module(f"{__package__}.{family}")
        for module in pkgutil.iter_modules(package.__path__):
            for route in getattr(importlib.import_module(f"{package.__name__}.{module.name}"), "ROUTES", ()):
                routes[route.op] = (*routes.get(route.op, ()), route)
    return routes


def routes_of(op: str) -> tuple[Route, ...]:
    """Routes of one op, preferred first (unless a route's `prefer` says otherwise)."""
    known = all_routes()
    if op not in known:
        close = difflib.get_close_matches(str(op), known, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InputError(f"unknown op {op!r}.{hint} Ops with kernels: {', '.join(sorted(known))}")
    return known[op]


def _in_order(op: str, dims: Dims, caps: DeviceCaps) -> list[Route]:
    """Routes of one op, preferred first for this shape on this device."""
    return sorted(routes_of(op), key=lambda route: not route.prefer(dims, caps))


@dataclass(frozen=True)
class Verdict:
    """Whether a route applies to a shape on a device, and if not, why."""

    route: str
    applies: bool
    reason: str
    default: bool

    def __str__(self) -> str:
        mark = "→" if self.default else ("✓" if self.applies else "✗")
        return f"{mark} {self.route:<16} {self.reason}"


def verdicts(op: str, dims: Dims, caps: DeviceCaps) -> list[Verdict]:
    """One verdict per route of the op; the route that would be taken by default is marked."""
    answers: list[Verdict] = []
    for route in _in_order(op, dims, caps):
        reason = route.reason(dims, caps)
        by_default = reason is None and route.exact and not any(verdict.default for verdict in answers)
        applies = "taken by default" if by_default else "applies" if route.exact else "applies when named (rounds)"
        answers.append(Verdict(route.name, reason is None, reason or applies, by_default))
    return answers


def choose(op: str, dims: Dims, caps: DeviceCaps, name: str | None, precision: str = "exact") -> Route:
    """The named route, or the first that applies and is offered. Never another than the one that was named."""
    candidates = routes_of(op)
    # What is off (no prologue, no bias, no heads) is left out.
    shape = ", ".join(f"{key}={value}" for key, value in dims.items() if value not in ("none", None, 0))
    if name is not None:
        named = next((route for route in candidates if route.name == name), None)
        if named is None:
            close = difflib.get_close_matches(str(name), [route.name for route in candidates], 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            known = ", ".join(route.name for route in candidates)
            raise RouteError(f"{op} has no route {name!r}.{hint} Its routes: {known}")
        reason = named.reason(dims, caps)
        if reason is not None:
            raise RouteError(f"route {name!r} of {op} does not apply to {shape}: {reason}")
        return named
    route_or_reason = first_of(op, dims, caps, precision)
    if isinstance(route_or_reason, Route):
        return route_or_reason
    raise RouteError(f"no route of {op} applies to {shape} on {caps.name}. {route_or_reason}")


def first_of(op: str, dims: Dims, caps: DeviceCaps, precision: str) -> Route | str:
    """The first route that applies and is offered at this precision, or why there is none: equal reasons once."""
    reasons: dict[str, list[str]] = {}
    for route in _in_order(op, dims, caps):
        reason = route.reason(dims, caps)
        if reason is None and route.offered(precision, caps):
            return route
        rounds = "rounds its inputs: only when named or precision is fast, on a GPU"
        reasons.setdefault(reason or rounds, []).append(route.name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())


class Option(NamedTuple):
    """A route in one of its launch configurations ("": the one it takes by itself), and the launch list for a shape."""

    route: Route
    config: str
    launch_list: LaunchList

    @property
    def name(self) -> str:
        """ROUTE, or ROUTE/CONFIG."""
        return f"{self.route.name}/{self.config}" if self.config else self.route.name


def options(op: str, dims: Dims, caps: DeviceCaps, precision: str) -> list[Option]:
    """All ways to compute a shape at this precision; first the one that is taken without asking. Equal ones once."""
    first = choose(op, dims, caps, None, precision)
    others = [route for route in routes_of(op) if route is not first and _usable(route, dims, caps, precision)]
    ways: list[Option] = []
    for route in (first, *others):
        launch_lists = {"": route.launch_list(dims, caps)} | {
            name: config() for name, config in route.candidates(dims, caps).items()
        }
        for name, launch_list in launch_lists.items():
            known = any(launch_list == option.launch_list for option in ways)
            if not known and over_limits(launch_list, caps) is None:
                ways.append(Option(route, name, launch_list))
    return ways


def option(op: str, name: str, dims: Dims, caps: DeviceCaps, precision: str) -> Option | str:
    """The option of this name, or why it cannot be taken."""
    route_name, _, config = name.partition("/")
    route = next((route for route in routes_of(op) if route.name == route_name), None)
    if route is None:
        return f"{op} has no route {route_name!r}"
    if not route.offered(precision, caps):
        return f"{route_name} rounds its inputs, which was not asked for"
    reason = route.reason(dims, caps)
    if reason is not None:
        return f"{route_name} does not apply: {reason}"
    if not config:
        return Option(route, "", route.launch_list(dims, caps))
    candidates = route.candidates(dims, caps)
    if config not in candidates:
        return f"{route_name} has no launch configuration {config!r}"
    launch_list = candidates[config]()
    return over_limits(launch_list, caps) or Option(route, config, launch_list)


def _usable(route: Route, dims: Dims, caps: DeviceCaps, precision: str) -> bool:
    return route.offered(precision, caps) and route.reason(dims, caps) is None
