"""How this copy of the package is installed, for hints: by pip, by uv, or as a tool of pipx or uv."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

NAME = "shaderlm"


def install_command(extra: str, *, upgrade: bool = False) -> str:
    """The command that adds an extra such as `serve`, and keeps those that are there.

    upgrade: its packages are there, and too old.
    """
    prefix = Path(sys.prefix)
    newer = " -U" if upgrade else ""
    try:
        if (prefix / "uv-receipt.toml").exists():
            source, extras = _source_of_uv(prefix / "uv-receipt.toml")
            return _quoted(f"uv tool install{newer}", source, {extra, *extras})
        if (prefix / "pipx_metadata.json").exists():
            source, extras = _source_of_pipx(prefix / "pipx_metadata.json")
            return _quoted("pipx install --force", source, {extra, *extras})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # another version of the tool writes otherwise
        pass
    return _quoted(f"{_installer(prefix)} install{newer}", NAME, {extra})


def _quoted(command: str, source: str, extras: set[str]) -> str:
    listed = f"[{','.join(sorted(extras))}]"
    return f"{command} '{NAME}{listed} @ {source}'" if "://" in source else f"{command} '{source}{listed}'"


def _installer(prefix: Path) -> str:
    """A virtual environment that uv made has no pip."""
    try:
        text = (prefix / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "pip"
    return "uv pip" if re.search(r"^uv\s*=", text, re.MULTILINE) else "pip"


def _source_of_uv(receipt: Path) -> tuple[str, set[str]]:
    """The name, path or address that uv installed, and the extras."""
    requirements = tomllib.loads(receipt.read_text(encoding="utf-8"))["tool"]["requirements"]
    (own,) = (each for each in requirements if each["name"] == NAME)
    address = f"git+{own['git']}" if "git" in own else own.get("url")
    places = (address, *(own.get(kind) for kind in ("directory", "editable", "path")))
    return next((str(place) for place in places if place), NAME), set(own.get("extras", ()))


def _source_of_pipx(metadata: Path) -> tuple[str, set[str]]:
    """What was given to pipx, a name or a path, and the extras behind it."""
    package = json.loads(metadata.read_text(encoding="utf-8"))["main_package"]["package_or_url"]
    source, _, rest = str(package).partition("[")
    if re.match(rf"{NAME}\s*([=<>!~@]|$)", source):
        source = NAME
    return source, {each.strip() for each in rest.partition("]")[0].split(",") if each.strip()}
