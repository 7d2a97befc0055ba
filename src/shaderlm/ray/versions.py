"""Which Ray this package works with. Parts of it that we use are alpha, or have no public name."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from ..errors import InputError
from ..install import install_command

TESTED = (2, 60)  # its request router and what listens were read in this release; pyproject.toml has the same


def check_ray() -> None:
    """An InputError without Ray, or with one that this package was not tested with."""
    try:
        installed = version("ray")
    except PackageNotFoundError:
        raise InputError(f"this needs the package ray, which is not installed: {install_command('ray')}") from None
    numbers = tuple(int(each) for each in re.findall(r"\d+", installed)[:2])
    if numbers != TESTED:
        expected = ".".join(map(str, TESTED))
        command = install_command("ray", upgrade=True)
        raise InputError(f"this needs ray {expected}, got {installed}: its request router changes. {command}")
