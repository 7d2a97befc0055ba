"""Capabilities of a device with decisions that are not those of its kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shaderlm.gpu import DeviceCaps


def with_policy(caps: DeviceCaps, **changes: Any) -> DeviceCaps:
    """The same capabilities with these decisions changed. `dataclasses.replace` of the result undoes it."""
    made = replace(caps)
    vars(made)["policy"] = replace(caps.policy, **changes)  # where cached_property keeps it
    return made
