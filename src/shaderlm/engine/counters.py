"""What an engine counts: tokens, seconds, gaps between tokens, and requests by how they ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .completion import Timing
from .histogram import Histogram

# Seconds from a token to the next, for counting them.
_GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


@dataclass
class Counters:
    """Since the engine was made."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    finished: Counter[str] = field(default_factory=Counter)  # requests by finish reason
    token_gaps: Histogram = field(default_factory=lambda: Histogram(_GAPS))

    @property
    def seconds_per_request(self) -> float:
        """Of those that ended."""
        return (self.prompt_seconds + self.decode_seconds) / max(1, self.finished.total())

    def numbers(self) -> dict[str, Any]:
        """All of them by name, as they are now."""
        return {**vars(self), "finished": dict(self.finished), "token_gaps": self.token_gaps.copy()}

    def finish(self, timing: Timing, reason: str) -> None:
        """One more request has ended."""
        self.prompt_seconds += timing.prompt_seconds
        self.decode_seconds += timing.decode_seconds
        self.finished[reason] += 1

    def observe_gaps(self, now: float, before: Iterable[float]) -> None:
        """Tokens of one step, of sequences that had their last ones at these times: mostly the same for many."""
        last, count = 0.0, 0
        for each in before:
            if each != last and count:
                self.token_gaps.observe(now - last, count)
                count = 0
            last, count = each, count + 1
        if count:
            self.token_gaps.observe(now - last, count)
