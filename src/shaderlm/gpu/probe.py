"""`python -m shaderlm.gpu.probe`: is there an adapter to compute on? Exit 0 and its name, or exit 3."""

from __future__ import annotations

import sys

from ..errors import DeviceError
from .adapters import adapters


def main() -> int:
    """Print the preferred adapter that is not OpenGL; OpenGL misses what the tests need."""
    try:
        found = [adapter.facts for adapter in adapters()]
    except DeviceError as problem:
        print(problem, file=sys.stderr)
        return 3
    facts = next((facts for facts in found if facts.backend != "OpenGL"), None)
    if facts is None:
        print("no Vulkan, Metal or D3D12 adapter was found", file=sys.stderr)
        return 3
    print(f"{facts.name} ({facts.kind}, {facts.backend})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
