"""Several replicas on one machine or many, by Ray: `build_app` for Ray Serve, `Predictor` for Ray Data.

Ray is imported when one of these is used, and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import build_app
    from .predictor import Predictor

__all__ = ["Predictor", "build_app"]


def __getattr__(name: str) -> Any:
    """`build_app` and `Predictor`, imported on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .versions import check_ray

    check_ray()
    if name == "build_app":
        from .app import build_app

        return build_app
    from .predictor import Predictor

    return Predictor
