"""A checkpoint's matrices in fewer bits, as a GGUF file that is kept: made once, in one pass over the weights.

The blocks are those of GGUF's reference quantisation, as the gguf package makes them. A copy is found again by the
names, sizes, times and samples of the files that it was made of, and by the modules that made it. When one of these
changes, a new copy takes the place of the old one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ModelError
from ..files import atomic_write, cache_directory
from ..version import __version__
from .blocks import BLOCK
from .checkpoint import Checkpoint
from .default_model import Progress
from .gguf import GgufFile
from .gguf_header import TensorInfo
from .gguf_write import Planned, header, padding, write_tensor
from .unpack import unpack
from .weight_formats import QUANTIZED, WEIGHT_FORMATS

_DENSE = ("f32", "f16", "bf16")
# Few bytes that decide much: the choice of experts stays as it is, positions are added and not multiplied with.
_KEPT = re.compile(r"ffn_gate_inp\b|position_embd\b")
_LARGE_TABLES = ("token_embd.weight", "output.weight")  # q8_0 beside matrices of q4_0
_PIECE_BYTES, _THREADS = 8 << 20, 4
# What a source says of its own files: parts, where tensors begin, the most frequent format.
_OF_FILES = re.compile(r"split\..*|general\.(alignment|file_type)")
_LARGEST = {"q4_0": 8, "q8_0": 127}  # what a factor is multiplied with
_DIGITS = 12  # of the digest in the name of a copy
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_MODULES = Path(__file__).parent  # any of them may decide about keys, names or bytes of a copy
_FROM = "shaderlm.quantized.from"
_TEMPORARY = re.compile(r"\..+\.(\d+)\.\d+")  # as `atomic_write` names them: .NAME.PROCESS.THREAD
_IDLE_SECONDS, _DAY_SECONDS = 600, 86_400


def folder() -> Path:
    """Where copies are kept. It need not exist yet."""
    return cache_directory() / "quantized"


def copies() -> dict[str, Path]:
    """Those that are kept, by name."""
    paths = (path for path in sorted(folder().glob("*.gguf")) if not path.name.startswith("."))
    return {path.stem: path for path in paths if path.is_file()}


def remove_leftovers() -> None:
    """Remove files that processes were writing when they were killed."""
    for path in folder().glob(".*"):
        named = _TEMPORARY.fullmatch(path.name)
        with suppress(OSError):  # it is gone meanwhile, or Windows keeps it for the process that writes it
            idle = time.time() - path.stat().st_mtime
            if named and idle > (_DAY_SECONDS if _runs(int(named[1])) else _IDLE_SECONDS):
                path.unlink()


def _runs(process: int) -> bool:
    """Is there such a process? Another machine's may have the same number, or none: age has to tell, too."""
    if sys.platform == "win32":
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def check_kind(kind: Any) -> None:
    """It must be one of QUANTIZED."""
    if kind not in QUANTIZED:
        raise InputError(f"quantize must be one of {', '.join(map(repr, QUANTIZED))}, got {kind!r:.60}")


def quantized_copy(source: Checkpoint, kind: str, progress: Progress | None = None) -> Path:
    """The file with the matrices of `source` in this format, which is made unless it is there.

    Matrices of F32, F16 and BF16 whose rows are whole blocks are quantised, the others stay as they are. Embeddings and
    the output matrix are q8_0 in any case.
    """
    check_kind(kind)
    planned = [Planned(info.name, info.shape, _kind(info, kind)) for info in source.tensors.values()]
    if all(tensor.kind == source.tensors[tensor.name].kind for tensor in planned):
        had = ", ".join(sorted({info.kind for info in source.tensors.values() if len(info.shape) > 1}))
        raise InputError(f"{source.path} has no matrices of F32, F16 or BF16 to quantise, only {had}")
    path = folder() / f"{_name(source)}-{kind}-{_identity(source, kind)}.gguf"
    if path.exists():
        return path
    about = {key: value for key, value in source.metadata.items() if not _OF_FILES.fullmatch(key)}
    about[_FROM] = os.fsencode(source.path.absolute()).decode(errors="replace")  # a name need not be UTF-8
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers()
        _check_space(path, sum(tensor.nbytes + padding(tensor.nbytes) for tensor in planned))
        with atomic_write(path) as file, ThreadPoolExecutor(_THREADS, "quantize") as pool:
            file.write(header(about, planned))
            total, done = sum(info.nbytes for info in source.tensors.values()), 0
            for tensor in planned:
                write_tensor(file, tensor, _pieces(source, tensor, pool))
                done += source.tensors[tensor.name].nbytes
                if progress:
                    progress("quantizing", done, total)
            file.flush()
            GgufFile.open(file.name).close()  # a copy that does not open must not be kept
    except OSError as problem:
        raise ModelError(f"the quantised copy {path} cannot be written: {problem.strerror}") from None
    _remove_older(path, about[_FROM])
    return path


def _check_space(path: Path, nbytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        raise ModelError(
            f"the quantised copy {path} needs {nbytes / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free; remove a model "
            "(`shaderlm models` lists them), or set SHADERLM_CACHE to a folder on another disk"
        )


def _remove_older(path: Path, source: str) -> None:
    """Remove copies in the same format of the same source as it was before."""
    stem = path.name.rpartition("-")[0]
    for other in path.parent.glob(f"{stem}-{'[0-9a-f]' * _DIGITS}.gguf"):
        with suppress(OSError, ModelError):
            with GgufFile.open(other) as copy:
                same = copy.metadata.get(_FROM) == source
            if same and other != path:
                other.unlink()


def _kind(info: TensorInfo, kind: str) -> str:
    whole = len(info.shape) > 1 and info.shape[-1] % BLOCK == 0
    if not whole or info.kind not in _DENSE or not info.name.endswith(".weight") or _KEPT.search(info.name):
        return info.kind
    return "q8_0" if info.name in _LARGE_TABLES else kind


def _pieces(source: Checkpoint, tensor: Planned, pool: ThreadPoolExecutor) -> Iterator[bytes]:
    """The bytes of a tensor, some rows at a time; threads work a few pieces ahead."""
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    step = max(1, _PIECE_BYTES // (4 * tensor.shape[-1]))
    ranges = iter([(first, min(first + step, rows)) for first in range(0, rows, step)])

    def piece(first: int, end: int) -> bytes:
        stored = source.raw(tensor.name, first, end)
        if tensor.kind != source.tensors[tensor.name].kind:
            stored = quantize(unpack(stored, source.tensors[tensor.name].kind), tensor.kind, tensor.name)
        return stored.tobytes()

    waiting = [pool.submit(piece, *each) for each in islice(ranges, 2 * _THREADS)]
    while waiting:
        yield waiting.pop(0).result()
        waiting += [pool.submit(piece, *each) for each in islice(ranges, 1)]


def quantize(rows: NDArray[np.float32], kind: str, name: str = "the matrix") -> NDArray[np.uint8]:
    """float32 [N, K] as rows of blocks, by the gguf package. Weights that have no such blocks are a ModelError."""
    from gguf import GGMLQuantizationType, quants  # late: it takes 0.2 s to import

    largest = _LARGEST[kind] * 65504  # of f16, which the factor of a block is
    if not (np.abs(rows).max(initial=0) < largest):  # nor NaN
        raise ModelError(f"{name} has weights that are no numbers, or too large for {kind}")
    with np.errstate(over="ignore", invalid="ignore"):  # a block of nearly nothing has a factor of 0
        blocks: NDArray[np.uint8] = quants.quantize(rows, GGMLQuantizationType(WEIGHT_FORMATS[kind].gguf_type))
    return blocks


# What a copy was made of ---------------------------------------------------------------------------------


def _name(source: Checkpoint) -> str:
    name = str(source.metadata.get("general.name") or source.path.stem)
    plain = re.sub(r"[^\w.-]+", "-", name).strip("-.")
    return plain.encode(errors="ignore")[:60].decode(errors="ignore") or "model"  # disks count bytes


@cache
def _rules(modules: Path) -> str:
    """A digest of what decides about a copy: the version of the package, and its modules that read and write."""
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(modules.rglob("*.py")):
        digest.update(f"\0{path.relative_to(modules).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _identity(source: Checkpoint, kind: str) -> str:
    """A digest of the rules, and of the files' names, sizes, times of change and samples of their bytes."""
    digest = hashlib.sha256(f"{_rules(_MODULES)} {kind}".encode())
    for path in source.files():
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            digest.update(b"\0" + os.fsencode(path.name) + f" {about.st_size} {about.st_mtime_ns}\0".encode())
            for i in range(_SAMPLES):  # times are not always kept when files are copied or unpacked
                file.seek(about.st_size * i // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:_DIGITS]
