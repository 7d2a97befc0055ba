"""Work on what others sent, in processes with limits of time and memory. Knows neither templates nor grammars."""

from .pool import Answer, LimitedProgram

__all__ = ["Answer", "LimitedProgram"]
