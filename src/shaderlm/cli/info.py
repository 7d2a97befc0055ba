"""`shaderlm info`: what a GGUF file says about itself. Reads its header, loads no weights, touches no GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ..errors import ShaderlmError
from .devices import size
from .loading import progress_bar
from .options import model_argument, one_model

if TYPE_CHECKING:
    from ..formats.gguf import GgufFile, TensorInfo

# What is shown of the architecture's numbers, by GGUF's names, which begin with the architecture's.
_NUMBERS = {
    "context": "context_length",
    "layers": "block_count",
    "hidden": "embedding_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_width": "attention.key_length",
    "ffn": "feed_forward_length",
}
_ROPE = {
    "dimensions": "rope.dimension_count",
    "base": "rope.freq_base",
    "scaling": "rope.scaling.type",
    "factor": "rope.scaling.factor",
}
_LONG_ARRAY, _LONG_TEXT = 8, 100
_TOKENS = 1000  # that the cache is given for


@click.command()
@model_argument
@click.option("--metadata", "with_metadata", is_flag=True, help="Also list all metadata.")
@click.option("--tensors", "with_tensors", is_flag=True, help="Also list all tensors.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(given: tuple[str, ...], model: str | None, with_metadata: bool, with_tensors: bool, as_json: bool) -> None:
    """Show what a model file says of itself.

    MODEL is a path, a name or hf:ORG/REPO/FILE.gguf (default: smollm2-135m).
    """
    from ..formats.find import find
    from ..formats.gguf import GgufFile

    with progress_bar() as progress:
        path = find(one_model(given, model), progress)
    with GgufFile.open(path) as file:
        caps = _facts(file)
        metadata = dict(file.metadata) if with_metadata else {}
        tensors = list(file.tensors.values()) if with_tensors else []
    if as_json:
        caps |= {"metadata": {key: _json_value(value) for key, value in metadata.items()}} if with_metadata else {}
        caps |= {"tensors": [_json_tensor(info) for info in tensors]} if with_tensors else {}
        print(json.dumps(caps, ensure_ascii=False, indent=2))
        return
    for name, text in _lines(caps):
        print(f"{name:<14} {_printable(text)}".rstrip())
    for key, value in metadata.items():
        print(f"{_printable(key)} = {_short(value)}")
    for tensor in tensors:
        shape = "×".join(map(str, tensor.shape))
        print(f"{_printable(tensor.name):<40} {shape:>16} {tensor.kind:<5} {tensor.nbytes:>14,} bytes")


# Gathering -----------------------------------------------------------------------------------------------


def _facts(file: GgufFile) -> dict[str, Any]:
    metadata = file.metadata
    name = metadata.get("general.architecture")
    numbers = {key: _json_value(metadata.get(f"{name}.{there}")) for key, there in _NUMBERS.items()}
    return {
        "name": str(metadata.get("general.name") or file.path.stem),
        "path": str(file.path),
        "file_bytes": file.size,
        "architecture": _json_value(name),
        "not_supported": _unsupported_reason(file),
        "parameters": sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        **_completed(numbers),
        "vocabulary": _vocabulary(file),
        "rope": {key: _json_value(metadata.get(f"{name}.{there}")) for key, there in _ROPE.items()},
        "tokenizer": _tokenizer(metadata),
        "chat_template": bool(metadata.get("tokenizer.chat_template")),
        "types": _types(file),
        "gpu_weight_bytes": _gpu_bytes(file),
        "cache_bytes_per_1000_tokens": _cache_bytes(_completed(numbers)),
    }


def _completed(numbers: dict[str, Any]) -> dict[str, Any]:
    """Files leave out what follows from the rest."""
    made = dict(numbers)
    if made["kv_heads"] is None:
        made["kv_heads"] = made["heads"]
    hidden, heads = made["hidden"], made["heads"]
    if made["head_width"] is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        made["head_width"] = hidden // heads
    return made


def _unsupported_reason(file: GgufFile) -> str | None:
    """Why this file cannot be run, in words; None if it can, as far as its header tells."""
    from ..formats.gguf import SUPPORTED
    from ..models.architecture import architecture

    if not file.tensors:
        return "it holds only a vocabulary: it can turn text into tokens, not answer"
    strange = sorted({tensor.kind for tensor in file.tensors.values()} - set(SUPPORTED))
    if strange:
        return f"tensors of the types {', '.join(strange)}; supported are {', '.join(SUPPORTED)}"
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    try:
        architecture(file.metadata).read(file.metadata, shapes, dict.fromkeys(shapes, "f32"))
    except ShaderlmError as problem:
        return str(problem)
    problem_of_text: str | None = _tokenizer(file.metadata)["problem"]
    return problem_of_text


def _tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    from ..text import Tokenizer, Vocabulary

    problem = None
    try:
        Tokenizer(Vocabulary.from_metadata(metadata))
    except ShaderlmError as failure:
        problem = str(failure)
    model, pre = (_json_value(metadata.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre"))
    return {"model": model, "pre": pre, "problem": problem}


def _vocabulary(file: GgufFile) -> int | None:
    tokens, embedding = file.metadata.get("tokenizer.ggml.tokens"), file.tensors.get("token_embd.weight")
    if isinstance(tokens, list):
        return len(tokens)
    return embedding.shape[0] if embedding else None


def _types(file: GgufFile) -> dict[str, dict[str, Any]]:
    """Per type of the matrices and vectors: how many, their bytes, and what matrices become on a GPU."""
    from ..formats.convert import ON_DEVICE

    found: dict[str, dict[str, Any]] = {}
    for tensor in file.tensors.values():
        entry = found.setdefault(tensor.kind, {"tensors": 0, "bytes": 0, "on_gpu": ON_DEVICE.get(tensor.kind)})
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    return found


def _gpu_bytes(file: GgufFile) -> int | None:
    """Bytes of all weights in their formats on a GPU; None where there are none, or of types without a format."""
    from ..formats.convert import ON_DEVICE
    from ..kernels.linear.packed import layout

    total = 0
    for tensor in file.tensors.values():
        if len(tensor.shape) == 1:
            total += 4 * tensor.shape[0]
        elif len(tensor.shape) == 2 and tensor.kind in ON_DEVICE:
            n, k = tensor.shape
            lay = layout({"N": n, "K": k, "format": ON_DEVICE[tensor.kind]})
            total += n * (lay.row_bytes + lay.groups * lay.group_bytes)
        else:
            return None
    return total or None


def _cache_bytes(numbers: Mapping[str, Any]) -> dict[str, int] | None:
    """Keys and values of 1,000 tokens, in the cache's two formats: f16 where the GPU has it."""
    wanted = [numbers[key] for key in ("layers", "kv_heads", "head_width")]
    if not all(isinstance(value, int) for value in wanted):
        return None
    values = 2 * _TOKENS * math.prod(wanted)
    return {"f16": 2 * values, "f32": 4 * values}


# Showing -------------------------------------------------------------------------------------------------


def _lines(caps: Mapping[str, Any]) -> list[tuple[str, str]]:
    rope, tokenizer, cache = caps["rope"], caps["tokenizer"], caps["cache_bytes_per_1000_tokens"]
    lines = [("name", caps["name"]), ("file", f"{caps['path']} ({size(caps['file_bytes'])})")]
    lines.append(("architecture", _shown(caps["architecture"])))
    if caps["not_supported"]:
        lines.append(("not supported", caps["not_supported"]))
    if caps["parameters"]:
        lines.append(("parameters", f"{caps['parameters'] / 1e6:,.1f} M"))
    for name in ("context", "layers", "hidden"):
        lines.append((name, _shown(caps[name])))
    lines.append(("heads", f"{_shown(caps['heads'])}, {_shown(caps['kv_heads'])} of keys and values"))
    lines.append(("head width", _shown(caps["head_width"])))
    lines.append(("FFN", _shown(caps["ffn"])))
    lines.append(("vocabulary", _shown(caps["vocabulary"])))
    scaled = f", scaling {rope['scaling']}" if rope["scaling"] not in (None, "none") else ""
    scaled += f" by {rope['factor']:g}" if scaled and isinstance(rope["factor"], (int, float)) else ""
    lines.append(("rope", f"{_shown(rope['dimensions'])} dimensions, base {_shown(rope['base'])}{scaled}"))
    problem = f" ({tokenizer['problem']})" if tokenizer["problem"] else ""
    words = f", words cut like {tokenizer['pre']}" if tokenizer["pre"] is not None else ""
    lines.append(("tokenizer", f"{_shown(tokenizer['model'])}{words}{problem}"))
    lines.append(("chat template", "yes" if caps["chat_template"] else "no"))
    for kind, entry in caps["types"].items():
        turned = f"; as {entry['on_gpu']} on a GPU" if entry["on_gpu"] not in (None, kind) else ""
        lines.append((f"tensors {kind}", f"{entry['tensors']}, {size(entry['bytes'])}{turned}"))
    if caps["gpu_weight_bytes"]:
        lines.append(("on a GPU", f"about {size(caps['gpu_weight_bytes'])} of weights"))
    if cache:
        lines.append(("cache", f"{size(cache['f16'])} per {_TOKENS:,} tokens ({size(cache['f32'])} without f16)"))
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "not said" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _printable(text: str) -> str:
    """Files come from anywhere: what would move the cursor or colour the terminal is shown as �."""
    return "".join(character if character.isprintable() else "�" for character in text)


def _short(value: Any) -> str:
    """A value of the metadata on one line."""
    if isinstance(value, list) and len(value) > _LONG_ARRAY:
        return f"[{', '.join(map(_short, value[:_LONG_ARRAY]))}, …] ({len(value):,} values)"
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    if isinstance(value, str) and len(value) > _LONG_TEXT:
        return f"{value[:_LONG_TEXT]!r}… ({len(value):,} characters)"
    return repr(value)


def _json_value(value: Any) -> Any:
    """A value of the metadata as JSON has it: long arrays by their beginning, no infinities."""
    if isinstance(value, list):
        if len(value) > _LONG_ARRAY:
            return {"length": len(value), "first": [_json_value(item) for item in value[:_LONG_ARRAY]]}
        return [_json_value(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _json_tensor(tensor: TensorInfo) -> dict[str, Any]:
    return {"name": tensor.name, "shape": list(tensor.shape), "type": tensor.kind, "bytes": tensor.nbytes}
