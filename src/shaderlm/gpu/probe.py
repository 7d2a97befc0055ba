"""`python -m shaderlm.gpu.probe`: is there an adapter to compute on? Exit 0 and its name, or exit 3."""

from __future__ import annotations

import sys

from ..errors import DeviceError
from .adapters import adapters


def main() -> int:
    """Print the preferred adapter that is not OpenGL; OpenGL misses what the tests need."""
    try:
        listed = [adapter.caps for adapter in adapters()]
    except DeviceError as problem:
        print(problem, file=sys.stderr)
        return 3
    caps = next((caps for caps in listed if caps.backend != "OpenGL"), None)
    if caps is None:
        print("no Vulkan, Metal or D3D12 adapter was found", file=sys.stderr)
        return 3
    print(f"{caps.name} ({caps.kind}, {caps.backend})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
