"""A Hugging Face folder that is no checkpoint here: what its files say nevertheless, for `shaderlm info`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint
from ..safetensors import Safetensors
from .folder import name_of
from .model_type import KEYS
from .tokenizer import read_config


class RefusedFolder(Checkpoint):
    """Tensors under their own names, and the sizes of config.json under GGUF's keys. Nothing can be read of it."""

    @classmethod
    def open(cls, path: Path) -> RefusedFolder:
        """Read config.json and the headers of the weights. What is broken is a ModelError."""
        config = read_config(path)
        text = config.get("text_config")  # of models that read images, too
        sizes: dict[str, Any] = text if isinstance(text, dict) else config
        model_type = config.get("model_type")
        metadata = {f"{model_type}.{key}": sizes[name] for name, keys in KEYS.items() if name in sizes for key in keys}
        if "vocab_size" in sizes:
            metadata[f"{model_type}.vocab_size"] = sizes["vocab_size"]
        files = Safetensors.open(path)
        try:
            metadata |= {"general.architecture": model_type, "general.name": name_of(path.resolve())}
            return cls(path, files.size, metadata, files.tensors)
        finally:
            files.close()

    def _release(self) -> None:
        pass
