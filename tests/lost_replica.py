"""A replica that loses its device, at the first step after an empty file beside its model is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shaderlm.errors import DeviceError
from shaderlm.ray.deployment import EngineReplica


def flag_of(model: Path) -> Path:
    """The file. It has the number of the process afterwards."""
    return model.with_suffix(".lost")


class LosesDevice(EngineReplica):
    """The first replica that finds the file is the one. Ray's checks, which would end it later, find nothing wrong."""

    async def __init__(self, name: str, config: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        await super().__init__(name, config)
        runner: Any = self._service.served.model.runner
        run, flag = runner._run, flag_of(Path(str(self._config.model)))

        def lost(*args: Any) -> Any:
            if not flag.exists() or flag.read_text():
                return run(*args)
            flag.write_text(f"{os.getpid()}")
            type(runner).usable = property(lambda runner: False)
            raise DeviceError("the GPU was lost: a test says so")

        runner._run = lost

    async def check_health(self) -> None:
        pass
