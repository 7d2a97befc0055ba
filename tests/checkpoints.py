"""Tiny checkpoints whose logits `transformers` computed: what `make_checkpoints` recorded, as GGUF files and folders.

The weights depend on the names of their tensors alone, so that nothing else needs to be kept.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from .converted import Tensors, converted
from .folders import write_tokenizer
from .safetensors_files import write_safetensors
from .tiny_models import tiny_metadata, tiny_tokens

FOLDER = Path(__file__).parent / "data" / "checkpoints"
VOCABULARY = len(tiny_tokens())
PROMPTS = [[int(i) for i in np.random.default_rng(3).integers(0, 256, count)] for count in (5, 40)]
IMAGES = "visual."  # in the names of tensors for images, which are not recorded
EVERY = 4  # so many logits are recorded as one


def names() -> list[str]:
    """Of all checkpoints."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def recorded(name: str) -> dict[str, Any]:
    """architecture (GGUF's), config (config.json), shapes, logits and greedy ids of every prompt.

    And where it matters, the context, and `how`: fields of `converted.How`.
    """
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def tensors_of(entry: Mapping[str, Any]) -> Tensors:
    """The tensors of a checkpoint under Hugging Face's names, layers and experts in order."""
    return {name: weights(name, shape) for name, shape in expanded(entry["shapes"]).items()}


def expanded(shapes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """`shapes` maps names with a * for each number to the shape and to how many, or which, numbers there are for it."""
    found = {}
    for pattern, (shape, counts) in shapes.items():
        first, *others = pattern.split("*")
        for numbers in itertools.product(*(range(each) if isinstance(each, int) else each for each in counts)):
            name = first + "".join(f"{number}{part}" for number, part in zip(numbers, others, strict=True))
            found[name] = tuple(shape)
    return found


def shortened(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The inverse of `expanded`. Where a name has another shape in another layer, each is listed by itself."""
    found: dict[str, Any] = {}
    by_pattern: dict[str, set[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        by_pattern.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), set()).add(shape)
    for name, shape in shapes.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        if len(by_pattern[pattern]) > 1:
            found[name] = [list(shape), []]
            continue
        numbers = [int(each) for each in re.findall(r"(?<=\.)\d+(?=\.)", name)]
        entry = found.setdefault(pattern, [list(shape), [set() for _ in numbers]])
        for seen, number in zip(entry[1], numbers, strict=True):
            seen.add(number)
    for entry in found.values():
        entry[1] = [len(seen) if seen == set(range(len(seen))) else sorted(seen) for seen in entry[1]]
    assert expanded(found) == dict(shapes)
    return found


def weights(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Random numbers that make sense in a tensor of this name."""
    if not shape:  # a bound
        return np.array(-0.8 if name.endswith("_min") else 0.8, np.float32)
    values: NDArray[np.float32] = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    if len(shape) == 1:
        return values / np.float32(10) + np.float32(0 if name.endswith("bias") else 1)
    outer = re.search(r"embed|wte|wpe|lm_head", name)
    return values * np.float32(0.3 if outer else 1.5 / np.sqrt(shape[-1]))


def write_gguf(path: Path, entry: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> Path:
    """Write the checkpoint of an entry; `metadata` is added, and None leaves out."""
    own, made = converted(entry["architecture"], entry["config"], tensors_of(entry), entry.get("how"))
    tokens = {key: value for key, value in tiny_metadata().items() if key.startswith("tokenizer.")}
    if entry["architecture"] == "falcon-h1":  # as its converter writes them
        made = {
            name.removesuffix(".weight") if name.endswith("ffn_norm.weight") else name: each
            for name, each in made.items()
        }
    return write_entries(path, entry["architecture"], {**tokens, **own, **(metadata or {})}, made)


def write_entries(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Tensors) -> Path:
    """A GGUF file; metadata that is None is left out."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            (writer.add_array if isinstance(value, list) else adders[type(value)])(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(path: Path, entry: Mapping[str, Any]) -> Path:
    """The same as a Hugging Face folder."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(entry["config"]), encoding="utf-8")
    write_safetensors(path / "model.safetensors", tensors_of(entry))
    write_tokenizer(path, tiny_metadata())
    return path


def kept(logits: NDArray[Any]) -> NDArray[Any]:
    """What is recorded of a row of logits."""
    return logits[::EVERY]
