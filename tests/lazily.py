"""Imports on first use. Every worker imports every file of tests, and only one of them needs a large package."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def lazily(name: str) -> Any:
    """A module that is executed when something of it is asked for."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"the package {name} is not installed"
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
