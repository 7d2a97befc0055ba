"""`python -m shaderlm.gpu.probe`: is there an adapter to compute on? Exit 0 and its name, or exit 3."""

from __future__ import annotations

import sys

from ..errors import DeviceError
from .adapters import choose


def main() -> int:
    """Print the preferred adapter that is not OpenGL; OpenGL misses what the tests need."""
    try:
        facts = choose(None).facts
    except DeviceError as problem:
        print(problem, file=sys.stderr)
        return 3
    if facts.backend == "OpenGL":
        print(
            f"only an OpenGL adapter was found ({facts.name}); Vulkan, Metal or D3D12 is needed",
            file=sys.stderr,
        )
        return 3
    print(f"{facts.name} ({facts.kind}, {facts.backend})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
