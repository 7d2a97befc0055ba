"""A Hugging Face folder as a checkpoint: config.json, *.safetensors and tokenizer files, under GGUF's keys and names.

Tensors stay in their files. Where GGUF has rows in another order, several tensors in one, or other values, that is
done to the rows that are asked for.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from ..checkpoint import Checkpoint
from ..gguf_header import TensorInfo
from ..row_order import paired_rows
from ..safetensors import INDEX, Safetensors
from ..unpack import unpack
from ..weight_formats import WEIGHT_FORMATS
from .config import FolderConfig
from .matrices import Matrix, by_kind, in_order, negative_exp, part_of, scaled, stored, transposed
from .model_type import ModelType, TensorSplit
from .quantised import quantised_matrices
from .tokenizer import FILES as TOKENIZER_FILES
from .tokenizer import MODEL_CONFIG, read_config, sampling_metadata, tokenizer_metadata

# What is read of a folder beside its weights, where it has them.
FILES = (MODEL_CONFIG, *TOKENIZER_FILES, INDEX)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)(?=\.)")
# A buffer that old checkpoints store, and every program computes again.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class _Source:
    """Where a tensor comes from: matrices, one after the other; how many heads' rows are paired; a sum.

    experts: the matrices are those of experts, and get an axis of their own.
    """

    parts: tuple[Matrix, ...]
    paired_heads: int = 0
    offset: float = 0.0
    experts: bool = False


class Folder(Checkpoint):
    """An open Hugging Face folder."""

    def __init__(
        self,
        path: Path,
        files: Safetensors,
        metadata: Mapping[str, Any],
        sources: Mapping[str, _Source],
        computed: Mapping[str, NDArray[np.float32]],
    ) -> None:
        tensors = {name: _info(name, source) for name, source in sources.items()}
        tensors |= {name: TensorInfo(name, array.shape, "f32", 0, array.nbytes) for name, array in computed.items()}
        super().__init__(path, files.size, metadata, tensors)
        self._files, self._sources, self._computed = files, dict(sources), dict(computed)

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Read the configuration, map the weights, check all headers; what cannot be right is a ModelError."""
        config = FolderConfig(read_config(path))
        files = Safetensors.open(path)
        try:
            sources = _sources(config, matrices(files, config.quantisation))
            shape = sources["token_embd.weight"].parts[0].shape if "token_embd.weight" in sources else ()
            if shape and shape[0] != config.vocabulary:
                where = path / MODEL_CONFIG
                raise ModelError(f"{where}: vocab_size is {config.vocabulary:,}, the embedding matrix is {list(shape)}")
            tokens = tokenizer_metadata(path, config.vocabulary)
            name = {"general.name": name_of(path.resolve())}
            about = {**config.metadata, **name, **sampling_metadata(path), **tokens}
            return cls(path, files, about, sources, config.tensors)
        except BaseException:
            files.close()
            raise

    def files(self) -> list[Path]:
        """All that is read, in order of their names."""
        return sorted([*self._files.paths, *(path for name in FILES if (path := self.path / name).is_file())])

    def _read(self, info: TensorInfo, first: int, end: int) -> NDArray[np.uint8]:
        if info.name in self._computed:
            return self._computed[info.name].view(np.uint8).reshape(1, -1)[first:end]
        source = self._sources[info.name]
        width = info.shape[0] // source.paired_heads if source.paired_heads else 0
        if source.paired_heads and len(info.shape) == 1:
            row = source.parts[0].rows(slice(0, 1))
            order = paired_rows(np.arange(info.shape[0]), width, width)
            return np.ascontiguousarray(row.reshape(info.shape[0], -1)[order]).reshape(1, -1)[first:end]
        if source.paired_heads:
            return source.parts[0].rows(paired_rows(np.arange(first, end), width, width))
        rows = _rows(source.parts, first, end)
        if not source.offset:
            return rows
        return (unpack(rows, source.parts[0].kind) + np.float32(source.offset)).view(np.uint8)

    def _release(self) -> None:
        self._files.close()


def name_of(path: Path) -> str:
    """The folder's name; that of the repository for models--ORG--REPO/snapshots/COMMIT, as the hub's cache has it."""
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return os.fsencode(path.name).decode(errors="replace")  # it need not be UTF-8


def _rows(parts: Sequence[Matrix], first: int, end: int) -> NDArray[np.uint8]:
    """Rows of matrices of the same shape, one after the other."""
    each = parts[0].row_count
    blocks = []
    for i in range(first // each, -(-end // each)):
        blocks.append(parts[i].rows(slice(max(first - i * each, 0), min(end - i * each, each))))
    if not blocks:
        return parts[0].rows(slice(0, 0))
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def _info(name: str, source: _Source) -> TensorInfo:
    first = source.parts[0]
    if not math.prod(first.shape) or any((part.shape, part.kind) != (first.shape, first.kind) for part in source.parts):
        raise ModelError(f"tensor {name} must not be empty, and must be like those of the other experts")
    if not first.shape:
        raise ModelError(f"tensor {name} must have dimensions, it is a single number")
    if source.paired_heads and (first.shape[0] % source.paired_heads or first.shape[0] // source.paired_heads % 2):
        raise ModelError(f"tensor {name} must have an even number of rows for each of {source.paired_heads} heads")
    shape = (len(source.parts), *first.shape) if source.experts else first.shape
    if source.offset:
        return TensorInfo(name, shape, "f32", 0, 4 * math.prod(shape))
    form = WEIGHT_FORMATS.get(first.kind)
    nbytes = math.prod(shape) // form.block_weights * form.block_bytes if form else 0
    return TensorInfo(name, shape, first.kind, 0, nbytes)


# Names ---------------------------------------------------------------------------------------------------


def matrices(files: Safetensors, quantisation: Any) -> dict[str, Matrix]:
    """The tensors of the files by their names, without what every program computes again."""
    if quantisation is None:
        by_name = {name: stored(files, name) for name in files.tensors}
    else:
        by_name = quantised_matrices(files, quantisation)
    return {name: matrix for name, matrix in by_name.items() if not _COMPUTED.search(name)}


def _sources(config: FolderConfig, tensors: Mapping[str, Matrix]) -> dict[str, _Source]:
    """GGUF's name → tensors of the files. What the tables do not have keeps its name."""
    entries: dict[str, dict[int | None, tuple[str, Matrix]]] = {}
    for name, matrix in tensors.items():
        if config.row.ignored and re.match(config.row.ignored, name):
            continue
        expert, pieces = _gguf_names(config.row, name)
        for piece in pieces:
            entry = entries.setdefault(piece.name, {})
            if expert in entry:
                raise ModelError(f"the tensors {entry[expert][0]!r} and {name!r} both are {piece.name}")
            entry[expert] = (name, _piece(matrix, piece, config))
    if config.tied is True and "output.weight" in entries:
        _check_same(entries.pop("output.weight")[None], entries.get("token_embd.weight", {}).get(None))
    elif config.tied is False and "output.weight" not in entries:
        raise ModelError("there is no tensor 'lm_head.weight', and tie_word_embeddings is false")
    heads = {name: config.get(f"attention.head_count{kv}") for name, kv in (("attn_q", ""), ("attn_k", "_kv"))}
    if isinstance(heads["attn_k"], list):  # 0 of layers that have no keys
        heads["attn_k"] = max(heads["attn_k"])
    heads["attn_k"] = heads["attn_k"] or heads["attn_q"]
    sources = {}
    for called, entry in entries.items():
        experts = None not in entry
        if set(entry) != (set(range(len(entry))) if experts else {None}):
            numbers = sorted(each for each in entry if each is not None)
            raise ModelError(f"of {called} there are the experts {numbers[:20]}: some are missing")
        stem = called.split(".")[-2] if called.count(".") else ""
        paired = heads.get(stem, 0) if config.row.pairs else 0
        if not isinstance(paired, int) or isinstance(paired, bool) or paired < 0:
            raise ModelError(f"config.json: the number of heads must be a whole number, it is {paired!r:.60}")
        shifted = stem.endswith("norm") and called.endswith(".weight") and stem not in config.row.plain_norms
        norm = config.row.norm_offset if shifted else 0.0
        parts = tuple(entry[i][1] for i in (range(len(entry)) if experts else [None]))
        if stem in config.factors:
            parts = tuple(scaled(part, config.factors[stem]) for part in parts)
        sources[called] = _Source(parts, paired, norm, experts)
    return sources


_COMPARED_ROWS = 4096


def _check_same(output: tuple[str, Matrix], embedding: tuple[str, Matrix] | None) -> None:
    """Is a matrix for the output, beside embeddings that serve as one, the same? Programs differ in which they take."""
    called, matrix = output
    if embedding is not None:
        other = embedding[1]
        ranges = (
            slice(row, min(row + _COMPARED_ROWS, matrix.row_count))
            for row in range(0, matrix.row_count, _COMPARED_ROWS)
        )
        if matrix.shape == other.shape and all(_equal(matrix, other, each) for each in ranges):
            return
    raise ModelError(
        f"config.json: tie_word_embeddings is true, but {called!r} differs from the embeddings. Programs differ "
        "in which of them they use: set tie_word_embeddings to false to use the tensor, or remove it"
    )


def _equal(one: Matrix, other: Matrix, which: slice) -> bool:
    rows = one.rows(which), other.rows(which)
    if one.kind == other.kind:
        return np.array_equal(*rows)
    return np.array_equal(unpack(rows[0], one.kind), unpack(rows[1], other.kind))


def _piece(matrix: Matrix, piece: TensorSplit, config: FolderConfig) -> Matrix:
    if piece.part == "by kind":
        return by_kind(matrix, config.get("attention.head_count"))
    if piece.part == "negative exp":
        return negative_exp(matrix)
    if piece.part in ("qkv of groups", "z of groups"):
        return _of_groups(matrix, piece.part.removesuffix(" of groups"), config)
    # A quantised tensor has its columns as rows already.
    bias = piece.name.endswith(".bias")
    if piece.transposed and not bias and matrix.values is not None:
        matrix = transposed(matrix)
    return part_of(matrix, piece.part, bias=bias)


def _of_groups(whole: Matrix, letters: str, config: FolderConfig) -> Matrix:
    """The queries, keys and values of all key heads, or the gates: in the folder, those of a key head are together."""
    sizes = {name: config.get(f"ssm.{name}") for name in ("group_count", "time_step_rank", "state_size", "inner_size")}
    groups, heads, keys, values = sizes.values()
    wrong = not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes.values())
    if wrong or heads % groups or len(whole.shape) != 2 or whole.shape[0] != 2 * (groups * keys + values):
        raise ModelError(
            f"a tensor of the shape {list(whole.shape)} has no rows for {groups} key and {heads} value heads"
        )
    widths = {"q": keys, "k": keys, "v": values // groups, "z": values // groups}
    begins = dict(zip(widths, np.cumsum([0, *widths.values()]), strict=False))
    first = np.arange(groups)[:, None] * sum(widths.values())
    parts = [(first + begins[letter] + np.arange(widths[letter])).reshape(-1) for letter in letters]
    return in_order(whole, np.concatenate(parts))


# GGUF has them without ".weight".
_BARE = ("ssm_a", "ssm_d", "ffn_gate_inp.scale", "ffn_down_exps.scale")


def _gguf_names(row: ModelType, name: str) -> tuple[int | None, tuple[TensorSplit, ...]]:
    """The number of the expert where there is one, and GGUF's names."""
    unmapped = (None, (TensorSplit(name),))
    for pattern, replacement in row.renames:
        renamed = re.sub(pattern, replacement, name)
        if renamed != name:
            name = renamed
            break
    stem, _, suffix = name.rpartition(".")
    if suffix in ("weight", "bias") and stem in row.whole_names():
        return None, (TensorSplit(f"{row.whole_names()[stem]}.{suffix}"),)
    layer_match = _LAYER.fullmatch(name)
    if layer_match is None:
        return unmapped
    number, module_path, suffix = layer_match.groups()
    expert_match = _EXPERT.search(f".{module_path}")
    known = row.layer_names().get(_EXPERT.sub("{e}", f".{module_path}").removeprefix("."))
    if known is None or len(number) > 5 or (expert_match and len(expert_match[0]) > 5):
        return unmapped
    pieces = (TensorSplit(known),) if isinstance(known, str) else known
    suffixes = ["" if piece.name in _BARE else f".{suffix}" for piece in pieces]
    named_splits = tuple(
        piece._replace(name=f"blk.{int(number)}.{piece.name}{end}") for piece, end in zip(pieces, suffixes, strict=True)
    )
    return int(expert_match[0]) if expert_match else None, named_splits
