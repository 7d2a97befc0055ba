"""A Hugging Face folder as a checkpoint: config.json, *.safetensors and tokenizer files, under GGUF's keys and names.

Tensors stay in their files. Where GGUF has rows in another order, several tensors in one, or other values, that is
done to the rows that are asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from .checkpoint import Checkpoint
from .folder_config import FolderConfig
from .folder_models import ModelType
from .folder_tokenizer import tokenizer_metadata
from .gguf_header import TensorInfo
from .json_files import read_json
from .safetensors import Safetensors
from .unpack import unpack

CONFIG = "config.json"
_MAX_CONFIG = 4 << 20
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)(?=\.)")
# Buffers that old checkpoints store, and every program computes again.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")


@dataclass(frozen=True)
class _Source:
    """Where a tensor comes from: tensors of the files, one after the other; how many heads' rows are paired; a sum."""

    parts: tuple[str, ...]
    paired_heads: int = 0
    offset: float = 0.0


class Folder(Checkpoint):
    """An open Hugging Face folder."""

    def __init__(
        self,
        path: Path,
        files: Safetensors,
        metadata: Mapping[str, Any],
        sources: Mapping[str, _Source],
        made: Mapping[str, NDArray[np.float32]],
    ) -> None:
        tensors = {name: _info(files, name, source) for name, source in sources.items()}
        tensors |= {name: TensorInfo(name, array.shape, "f32", 0, array.nbytes) for name, array in made.items()}
        super().__init__(path, files.size, metadata, tensors)
        self._files, self._sources, self._made = files, dict(sources), dict(made)

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Read the configuration, map the weights, check all headers; what cannot be right is a ModelError."""
        config = FolderConfig(read_json(path / CONFIG, _MAX_CONFIG))
        files = Safetensors.open(path)
        try:
            sources = _sources(config, list(files.tensors))
            embedding = (
                files.tensors.get(sources["token_embd.weight"].parts[0]) if "token_embd.weight" in sources else None
            )
            if embedding is not None and embedding.shape[:1] != (config.vocabulary,):
                raise ModelError(
                    f"{path / CONFIG}: vocab_size is {config.vocabulary:,}, the embedding matrix is "
                    f"{list(embedding.shape)}"
                )
            tokens = tokenizer_metadata(path, config.vocabulary)
            name = {"general.name": path.resolve().name}
            return cls(path, files, {**config.metadata, **name, **tokens}, sources, config.tensors)
        except BaseException:
            files.close()
            raise

    def _read(self, info: TensorInfo, first: int, end: int) -> NDArray[np.uint8]:
        if info.name in self._made:
            return self._made[info.name].view(np.uint8).reshape(1, -1)[first:end]
        source = self._sources[info.name]
        if source.paired_heads and len(info.shape) == 1:
            row = self._files.raw(source.parts[0])
            order = _paired(np.arange(info.shape[0]), info.shape[0], source.paired_heads)
            return np.ascontiguousarray(row.reshape(info.shape[0], -1)[order]).reshape(1, -1)[first:end]
        if source.paired_heads:
            order = _paired(np.arange(first, end), info.shape[0], source.paired_heads)
            return self._files.raw(source.parts[0])[order]
        rows = self._rows(source.parts, first, end)
        if not source.offset:
            return rows
        kind = self._files.tensors[source.parts[0]].kind
        return (unpack(rows, kind) + np.float32(source.offset)).view(np.uint8)

    def _rows(self, parts: Sequence[str], first: int, end: int) -> NDArray[np.uint8]:
        """Rows of tensors of the same shape, one after the other."""
        each = math.prod(self._files.tensors[parts[0]].shape[:-1])
        found = []
        for i in range(first // each, -(-end // each)):
            found.append(self._files.raw(parts[i], max(first - i * each, 0), min(end - i * each, each)))
        if not found:
            return self._files.raw(parts[0], 0, 0)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _release(self) -> None:
        self._files.close()


def _paired(rows: NDArray[np.int64], count: int, heads: int) -> NDArray[np.int64]:
    """Which row of the file is row r of GGUF: rows i and i + width / 2 of a head become 2 i and 2 i + 1."""
    width = count // heads
    at = rows % width
    return rows - at + at % 2 * (width // 2) + at // 2


def _info(files: Safetensors, name: str, source: _Source) -> TensorInfo:
    parts = [files.tensors[part] for part in source.parts]
    first = parts[0]
    if any((part.shape, part.kind) != (first.shape, first.kind) for part in parts) or not math.prod(first.shape):
        raise ModelError(f"tensor {first.name!r} must not be empty, and must be like those of the other experts")
    if not first.shape:
        raise ModelError(f"tensor {first.name!r} must have dimensions, it is a single number")
    if source.paired_heads and (first.shape[0] % source.paired_heads or first.shape[0] // source.paired_heads % 2):
        raise ModelError(
            f"tensor {first.name!r} must have an even number of rows for each of {source.paired_heads} heads"
        )
    shape = (len(parts), *first.shape) if "_exps." in name else first.shape
    if len(shape) == 2 and shape[0] == 1:  # a vector to GGUF, such as the gate of a shared expert
        shape = shape[1:]
    if source.offset:
        return TensorInfo(name, shape, "f32", 0, 4 * math.prod(shape))
    return TensorInfo(name, shape, first.kind, 0, sum(part.nbytes for part in parts))


# Names ---------------------------------------------------------------------------------------------------


def _sources(config: FolderConfig, names: Sequence[str]) -> dict[str, _Source]:
    """GGUF's name → tensors of the files. What the tables do not have keeps its name."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        if _COMPUTED.search(name):
            continue
        called, expert = _gguf_name(config.row, name)
        entry = found.setdefault(called, {})
        if expert in entry:
            raise ModelError(f"the tensors {entry[expert]!r} and {name!r} both are {called}")
        entry[expert] = name
    if config.tied is True:  # the embeddings are used, whatever lies there
        found.pop("output.weight", None)
    elif config.tied is False and "output.weight" not in found:
        raise ModelError("there is no tensor 'lm_head.weight', and tie_word_embeddings is false")
    heads = {name: config.get(f"attention.head_count{kv}") for name, kv in (("attn_q", ""), ("attn_k", "_kv"))}
    heads["attn_k"] = heads["attn_k"] or heads["attn_q"]
    made = {}
    for called, entry in found.items():
        if sorted(entry) != list(range(len(entry))):
            raise ModelError(f"of {called} there are the experts {sorted(entry)[:20]}: some are missing")
        stem = called.split(".")[-2] if called.count(".") else ""
        paired = heads.get(stem, 0) if config.row.pairs else 0
        if not isinstance(paired, int) or isinstance(paired, bool) or paired < 0:
            raise ModelError(f"config.json: the number of heads must be a whole number, it is {paired!r:.60}")
        norm = config.row.norm_offset if stem.endswith("norm") and called.endswith(".weight") else 0.0
        made[called] = _Source(tuple(entry[i] for i in range(len(entry))), paired, norm)
    return made


def _gguf_name(row: ModelType, name: str) -> tuple[str, int]:
    """GGUF's name and the number of the expert, 0 where there is none."""
    stem, _, suffix = name.rpartition(".")
    if suffix in ("weight", "bias") and stem in row.whole_names():
        return f"{row.whole_names()[stem]}.{suffix}", 0
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name, 0
    number, inner, suffix = layer.groups()
    expert = _EXPERT.search(f".{inner}")
    known = row.layer_names().get(re.sub(r"(?<=experts\.)\d+(?=\.)", "{e}", inner))
    if known is None or len(number) > 5 or (expert and len(expert[0]) > 5):
        return name, 0
    return f"blk.{int(number)}.{known}.{suffix}", int(expert[0]) if expert else 0
