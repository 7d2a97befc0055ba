"""Makes the page of a profile: one HTML file that needs nothing else. Does not know how profiles are measured.

The parts lie in `assets/`; what they show and how is theirs. Here they become one text, with the profile
as JSON inside.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from ..errors import InputError

SCRIPTS = ("figures.js", "parts.js", "charts.js", "roofline.js", "page.js")  # each may use those before it


def page(profile: Mapping[str, Any]) -> str:
    """The profile as a page, to be written as UTF-8."""
    parts = {
        "style": _part("page.css"),
        "script": "\n".join(_part(name) for name in SCRIPTS),
        "profile": _embedded(profile),
    }
    # In one pass: what a part brings along is never taken for a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part("page.html"))


def _part(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8").strip()


def _embedded(profile: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element: no `<`, so no name of a model can end the element."""
    try:
        text = json.dumps(profile, allow_nan=False, separators=(",", ":"))
    except ValueError as problem:
        raise InputError(
            f"the profile holds a number that JSON has no word for ({problem}); write null for what was not measured"
        ) from problem
    return text.replace("<", "\\u003c")
