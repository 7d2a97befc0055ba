"""Tiny checkpoints with what `transformers` gives for them: logits, greedy ids, token ids of texts.

`data/oracles.tar.xz` has a folder for each: `model.gguf`; for some the same weights as a Hugging Face folder `hf`;
`logits.npy`, the last row of each prompt; `oracle.json` with the rest. `python -m tests.oracles FOLDER` packs them.
"""

from __future__ import annotations

import io
import json
import lzma
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
ARCHIVE = Path(__file__).parent / "data" / "oracles.tar.xz"
ARCHITECTURES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "gemma4-moe": "gemma4",
    "glm4": "glm4",
    "gpt-oss-mxfp4": "gpt-oss",
    "granite": "granite",
    "granitehybrid": "granitehybrid",
    "lfm2moe": "lfm2moe",
    "llama-yarn": "llama",
    "mamba2": "mamba2",
    "mixtral": "llama",
    "nemotronh": "nemotron_h",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "phi3-longrope": "phi3",
    "qwen2": "qwen2",
    "qwen35": "qwen35",
    "qwen3moe": "qwen3moe",
    "qwen3next": "qwen3next",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
}
WITH_FOLDER = ("gemma3", "gemma4", "granitehybrid", "lfm2moe", "phi3", "qwen2", "qwen35", "qwen3moe")
NAMES = list(ARCHITECTURES)
# What there is of them: the file, and the folder where there is one.
SOURCES = [(name, "model.gguf") for name in NAMES] + [(name, "hf") for name in WITH_FOLDER]
# What a logit may be off by, as a part of the largest one or of 1, by the format of the cache.
TOLERANCE = {"f32": 2e-4, "f16": 1e-2}


class Case(NamedTuple):
    """A prompt, and what a model with this context gives for it."""

    prompt: list[int]
    context: int
    logits: F32  # of the last row
    greedy: list[int]  # the ids that follow

    def check(self, found: F32, cache: str = "f32") -> None:
        """Are these the logits of the last row?"""
        assert_logits(found, self.logits, f"a prompt of {len(self.prompt)} tokens", cache)


def assert_logits(found: F32, wanted: F32, label: str, cache: str = "f32") -> None:
    """Rows of logits, within the tolerance."""
    assert found.shape == wanted.shape, label
    bound = TOLERANCE[cache] * np.maximum(1, np.abs(wanted).max(-1, keepdims=True))
    error = np.abs(found - wanted) / bound
    worst = np.unravel_index(int(error.argmax()), error.shape)
    assert error[worst] <= 1, f"{label}: {error[worst]:.3g} times the bound at {worst}: {found[worst]}, {wanted[worst]}"


@dataclass(frozen=True)
class Oracle:
    """One checkpoint."""

    folder: Path

    @property
    def gguf(self) -> Path:
        return self.folder / "model.gguf"

    @property
    def hf(self) -> Path:
        return self.folder / "hf"

    @cached_property
    def about(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "oracle.json").read_text(encoding="utf-8"))
        return found

    @property
    def texts(self) -> list[tuple[str, list[int]]]:
        """With their token ids."""
        return [(each["text"], each["ids"]) for each in self.about["texts"]]

    def cases(self, source: str = "model.gguf") -> dict[int, list[Case]]:
        """By their context."""
        about, logits, rows = self.about, "logits.npy", "f32"
        if source == "model.gguf" and "gguf" in about:  # GGUF has no key for a number of gpt-oss, which the folder has
            logits, rows = "logits-gguf.npy", "gguf"
        made = list(self._cases(about["contexts"], logits, about[rows]))
        for name, more in about.get("variants", {}).items():  # longrope: a long context changes short prompts, too
            made += self._cases([max(about["contexts"])] * len(more), f"logits-{name}.npy", more)
        return {size: [case for case in made if case.context == size] for size in sorted({c.context for c in made})}

    def _cases(self, contexts: Sequence[int], logits: str, rows: Sequence[Any]) -> Iterator[Case]:
        last = np.load(self.folder / logits)
        for prompt, context, wanted, row in zip(self.about["prompts"], contexts, last, rows, strict=True):
            yield Case(prompt, context, wanted, row["greedy"])


def unpack(folder: Path) -> dict[str, Oracle]:
    """All of them, in a folder; by name."""
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            path = folder / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())
    return {path.name: Oracle(path) for path in sorted(folder.iterdir())}


def pack(folder: Path) -> None:
    """Write the archive: the same bytes for the same files."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            info = tarfile.TarInfo(path.relative_to(folder).as_posix())  # of nobody, at the time 0
            info.size = path.stat().st_size
            with path.open("rb") as content:
                archive.addfile(info, content)
    # Numbers of four bytes: 8 % smaller than by the defaults.
    numbers = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 2, "pb": 2}
    ARCHIVE.write_bytes(lzma.compress(made.getvalue(), filters=[numbers]))


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
