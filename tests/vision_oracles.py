"""Tiny checkpoints that see, with what `transformers` gives: pixels, ids, features, logits and greedy ids.

`data/vision-*.tar.xz` have a folder for each: `hf`, `model.gguf` and `mmproj.gguf`, pictures, `pixels.npz` (the
features of every case, and the pixels of some), `logits.npy` (the last row of every case) and `oracle.json`.
"""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ARCHIVES = sorted((Path(__file__).parent / "data").glob("vision-*.tar.xz"))
NAMES = ("gemma3-vision", "qwen3vl", "smolvlm")
IMAGE_TOKENS = {"qwen3vl": (4, 16)}  # of the processor, which an mmproj file does not say
SOURCES = [(name, source) for name in NAMES for source in ("hf", "model.gguf")]


@dataclass(frozen=True)
class VisionOracle:
    """One checkpoint."""

    folder: Path

    @cached_property
    def about(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "oracle.json").read_text(encoding="utf-8"))
        return found

    @cached_property
    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Features and pixels by their names."""
        with np.load(self.folder / "pixels.npz") as found:
            return dict(found)

    @cached_property
    def logits(self) -> NDArray[np.float32]:
        """The last row of every case."""
        found: NDArray[np.float32] = np.load(self.folder / "logits.npy")
        return found

    @property
    def cases(self) -> list[dict[str, Any]]:
        """With messages, pictures, ids and greedy ids."""
        cases: list[dict[str, Any]] = self.about["cases"]
        return cases

    def pictures(self, case: dict[str, Any]) -> list[Path]:
        """The files of a case."""
        return [self.folder / "images" / name for name in case["images"]]


def unpack_vision(folder: Path) -> dict[str, VisionOracle]:
    """All of them, in a folder; by name."""
    for each in ARCHIVES:
        with tarfile.open(each) as archive:
            for member in archive:
                content = archive.extractfile(member)
                assert content is not None
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
    return {path.name: VisionOracle(path) for path in sorted(folder.iterdir())}
