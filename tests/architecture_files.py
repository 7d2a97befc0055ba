"""Tiny checkpoints of every architecture, from what `data/architectures.json` says of each: metadata, shapes, logits.

The weights depend on the names of their tensors alone, so that nothing else needs to be kept.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from .tiny_models import SPECIAL, tiny_metadata, tiny_tokens

RECORDED = Path(__file__).parent / "data" / "architectures.json"
PROMPTS = [[int(i) for i in np.random.default_rng(3).integers(0, 256, count)] for count in (5, 40)]
KEPT = 12  # logits of a prompt that are recorded, evenly spread over the vocabulary


def recorded() -> dict[str, Any]:
    """By the name of the checkpoint: architecture, metadata, shapes, logits of the last row of every prompt."""
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    return found


def weights(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Random numbers that make sense in a tensor of this name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values: NDArray[np.float32] = rng.standard_normal(shape).astype(np.float32)
    if name.startswith("rope_"):
        return np.asarray(1 + np.abs(values), np.float32)
    if len(shape) == 1:
        return values / np.float32(10) + np.float32(0 if name.endswith(".bias") else 1)
    deviation = 0.3 if "embd" in name or name.startswith("output") else 1.5 / np.sqrt(shape[1])
    return values * np.float32(deviation)


def write(
    path: Path,
    entry: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:
    """Write the checkpoint of an entry; `metadata` and `tensors` (shapes) are added, None leaves out."""
    own = entry["architecture"]
    general = {key: value for key, value in tiny_metadata().items() if key.startswith("tokenizer.")}
    entries = {**general, **{f"{own}.{key}": value for key, value in entry["metadata"].items()}, **(metadata or {})}
    writer = GGUFWriter(path, own)
    for key, value in entries.items():
        adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            (writer.add_array if isinstance(value, list) else adders[type(value)])(key, value)
    for name, shape in {**entry["shapes"], **(tensors or {})}.items():
        if shape is not None:
            writer.add_tensor(name, weights(name, tuple(shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def kept(logits: NDArray[Any]) -> list[float]:
    """What is recorded of a row of logits."""
    return [float(value) for value in logits[np.linspace(0, len(logits) - 1 - len(SPECIAL), KEPT).astype(int)]]


VOCABULARY = len(tiny_tokens())
