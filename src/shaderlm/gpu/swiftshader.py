"""SwiftShader, a software Vulkan driver that Chromium's packages install where the Vulkan loader does not look."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .environment import variables

_ICDS = (
    "/usr/lib/chromium/vk_swiftshader_icd.json",
    "/usr/lib/chromium-browser/vk_swiftshader_icd.json",
    "/usr/lib64/chromium-browser/vk_swiftshader_icd.json",
    "/opt/google/chrome/vk_swiftshader_icd.json",
)
_CHOSEN_BY = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES")


def swiftshader_icd() -> str | None:
    """Path of an installed SwiftShader driver file, if there is one. `./dev` asks, too."""
    return next((path for path in _ICDS if Path(path).is_file()), None)


@contextmanager
def offered_to_vulkan() -> Iterator[None]:
    """In this context the Vulkan loader sees SwiftShader beside the system's drivers, unless the user chose drivers.

    The loader takes its search path from the environment when a Vulkan instance is made, and from nowhere else. An
    implementation makes its instance inside this context; afterwards the environment is as it was.
    """
    icd = swiftshader_icd()
    if icd is None or any(os.environ.get(name) for name in _CHOSEN_BY):
        yield
        return
    with variables(VK_ADD_DRIVER_FILES=icd):
        yield
