"""One file per architecture, named like GGUF's `general.architecture`: metadata → config → graph."""

from .architecture import Architecture, Config, Rope, architecture

__all__ = ["Architecture", "Config", "Rope", "architecture"]
