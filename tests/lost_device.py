"""Engines for Ray Data that lose their device, as often as a file has characters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shaderlm.errors import DeviceError
from shaderlm.ray.predictor import ActorEngine, Predictor, RequestRunner

FILE = "SHADERLM_TEST_LOSSES"


def _lose(engine: ActorEngine) -> None:
    """Each loss takes a character out of the file."""
    path, loaded = Path(os.environ[FILE]), getattr(engine, "_engine", None)
    losses = path.read_text()
    if loaded is not None and losses:
        path.write_text(losses[1:])
        loaded._engine._inbox.lost = DeviceError("the device is lost")


class LosingRunner(RequestRunner):
    """For `results_of`."""

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        _lose(self._engine)
        return super().__call__(batch)


class LosingPredictor(Predictor):
    """For `map_batches`."""

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        _lose(self._engine)
        return super().__call__(batch)
