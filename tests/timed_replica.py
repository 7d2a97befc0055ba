"""A replica whose steps take a fixed time, whatever computes them: as one with a GPU of its own."""

from __future__ import annotations

import time
from typing import Any

from shaderlm.ray.deployment import EngineReplica

STEP_SECONDS = 0.1


class TimedReplica(EngineReplica):
    """The rest of the time of a step it sleeps."""

    async def __init__(self, name: str, config: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        await super().__init__(name, config)
        runner: Any = self._service.served.model.runner
        run = runner._run

        def timed(*args: Any) -> Any:
            end = time.perf_counter() + STEP_SECONDS
            result = run(*args)
            time.sleep(max(0.0, end - time.perf_counter()))
            return result

        runner._run = timed
