"""shaderlm: large language models on any GPU, from Python, through WebGPU.

>>> import shaderlm
>>> model = shaderlm.load()  # doctest: +SKIP
>>> print(model.generate("Once upon a time"))  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from .engine import Completion, LanguageModel, Stream, load
    from .engine.tokenizer import Tokenizer

# Imported when they are first used: `import shaderlm` and `shaderlm --help` stay quick.
_HOMES = {
    "Completion": ".engine",
    "LanguageModel": ".engine",
    "Stream": ".engine",
    "Tokenizer": ".engine.tokenizer",
    "load": ".engine",
}

__all__ = ["Completion", "LanguageModel", "Stream", "Tokenizer", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shaderlm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
