"""shaderlm: large language models on any GPU, from Python, through WebGPU.

>>> import shaderlm
>>> model = shaderlm.load()  # doctest: +SKIP
>>> print(model.generate("Once upon a time"))  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .engine import Completion, GenerationOptions, LanguageModel, Stream, TokenLogprob, load
    from .engine.tokenizer import Tokenizer

# Name → module, imported when the name is first used: `import shaderlm` and `shaderlm --help` stay quick.
_MODULES = {
    "Completion": ".engine",
    "GenerationOptions": ".engine",
    "LanguageModel": ".engine",
    "Stream": ".engine",
    "TokenLogprob": ".engine",
    "Tokenizer": ".engine.tokenizer",
    "load": ".engine",
}

__all__ = [
    "Completion",
    "GenerationOptions",
    "LanguageModel",
    "Stream",
    "TokenLogprob",
    "Tokenizer",
    "__version__",
    "load",
]


# Modules that users meet, beside these names. The other modules are attributes as well.
_LISTED = ("errors", "ops")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name], __name__), name)
    if name.isidentifier() and not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'shaderlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_LISTED))
