"""`shaderlm info`: what a GGUF file holds, and whether it runs. Reads its header, loads no weights, opens no GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError, ModelError
from .loading import progress_bar
from .models import described, is_synthetic
from .options import backend_option, ignore_key_option, model_argument, one_model

if TYPE_CHECKING:
    from ..formats.checkpoint import Checkpoint
    from ..formats.gguf_header import TensorInfo
    from ..gpu import Backend
    from ..models.architecture import Architecture, Config

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
@ignore_key_option
@click.option("--context", type=click.IntRange(1), metavar="N", help="Also say what memory N tokens of context take.")
@click.option("--device", default=None, help="Adapter for --context: a kind, a number or part of a name.")
@backend_option
@click.option("--metadata", "with_metadata", is_flag=True, help="Also list all metadata.")
@click.option("--tensors", "with_tensors", is_flag=True, help="Also list all tensors.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(
    given: tuple[str, ...],
    model: str | None,
    ignore_keys: tuple[str, ...],
    context: int | None,
    device: str | None,
    backend: Backend,
    with_metadata: bool,
    with_tensors: bool,
    as_json: bool,
) -> None:
    """Show what a model file holds, and whether it runs.

    MODEL is a path, a name or hf:ORG/REPO/FILE.gguf (default: smollm2-135m), or with --context synthetic:SHAPE:FORMAT,
    as for `bench`. --context counts for the preferred GPU; without one, for a large GPU.
    """
    from ..formats.find import find
    from ..formats.opening import open_checkpoint

    name = one_model(given, model)
    if is_synthetic(name):
        if context is None:
            raise InputError("a synthetic model has no file to show; --context N says what memory it takes")
        _print_memory(_memory(*described(name), context, device, backend), as_json)
        return
    with progress_bar() as progress:
        path = find(name, progress)
    with open_checkpoint(path) as file:
        found = _gathered(file, ignore_keys)
        if context is not None:
            found["memory"] = _memory(*described(str(path), ignore_keys), context, device, backend)
        metadata = dict(file.metadata) if with_metadata else {}
        tensors = list(file.tensors.values()) if with_tensors else []
    if as_json:
        found |= {"metadata": {key: _json_value(value) for key, value in metadata.items()}} if with_metadata else {}
        found |= {"tensors": [_json_tensor(info) for info in tensors]} if with_tensors else {}
        print(json.dumps(found, ensure_ascii=False, indent=2))
        return
    for label, text in _lines(found):
        print(f"{label:<14} {_printable(text)}".rstrip())
    if "memory" in found:
        _print_memory(found["memory"], as_json)
    for key, value in metadata.items():
        print(f"{_printable(key)} = {_short(value)}")
    for tensor in tensors:
        shape = "×".join(map(str, tensor.shape))
        print(f"{_printable(tensor.name):<40} {shape:>16} {tensor.kind:<5} {tensor.nbytes:>14,} bytes")


# Memory --------------------------------------------------------------------------------------------------


def _memory(kind: Architecture, config: Config, context: int, device: str | None, backend: Backend) -> dict[str, Any]:
    """What a conversation of so many tokens takes, by part, and on which device."""
    from ..engine.planning import LARGE_GPU, memory
    from ..gpu import preferred_adapter
    from ..gpu.adapters import choose

    if device is not None:
        caps = choose(device, backend).caps
    else:
        adapter = preferred_adapter(backend)
        caps = adapter.caps if adapter is not None and not adapter.caps.software else LARGE_GPU
    taken = memory(kind, config, caps, context)
    parts = {"weights": taken.weights, "cache": taken.cache, "scratch": taken.scratch, "total": taken.total}
    return {"context": context, "device": caps.name, "device_bytes": caps.heap or None, **parts}


def _print_memory(found: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"memory": found}, ensure_ascii=False, indent=2))
        return
    from ..gpu.caps import size

    parts = ", ".join(f"{part} {size(found[part])}" for part in ("weights", "cache", "scratch"))
    has = f", which has {size(found['device_bytes'])}" if found["device_bytes"] else ""
    short = has and found["total"] > found["device_bytes"]
    print(f"{'memory':<14} {size(found['total'])} with {found['context']:,} tokens of context ({parts})")
    print(f"{'':<14} on {_printable(found['device'])}{has}{': too little' if short else ''}")


# Gathering -----------------------------------------------------------------------------------------------


def _gathered(file: Checkpoint, ignore_keys: Collection[str]) -> dict[str, Any]:
    metadata = file.metadata
    name = metadata.get("general.architecture")
    numbers = {key: _json_value(metadata.get(f"{name}.{there}")) for key, there in _NUMBERS.items()}
    reason = _unsupported_reason(file, ignore_keys)
    return {
        "name": str(metadata.get("general.name") or file.path.stem),
        "path": str(file.path),
        "file_bytes": file.size,
        "architecture": _json_value(name),
        "runs": reason is None,
        "unsupported_reason": reason,
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


def _unsupported_reason(file: Checkpoint, ignore_keys: Collection[str]) -> str | None:
    """Why this file cannot be run, in the order in which `load` would find it; None if it can."""
    from ..models.checkpoint import architecture_of, read_config

    try:
        kind = architecture_of(file)
        problem: str | None = _tokenizer(file.metadata)["problem"]
        if problem is None:
            read_config(kind, file, ignore_keys)
    except ModelError as refused:
        return str(refused)
    return problem


def _tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    from ..text import Tokenizer, Vocabulary

    problem = None
    try:
        Tokenizer(Vocabulary.from_metadata(metadata))
    except ModelError as failure:
        problem = str(failure)
    model, pre = (_json_value(metadata.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre"))
    return {"model": model, "pre": pre, "problem": problem}


def _vocabulary(file: Checkpoint) -> int | None:
    tokens, embedding = file.metadata.get("tokenizer.ggml.tokens"), file.tensors.get("token_embd.weight")
    if isinstance(tokens, list):
        return len(tokens)
    return embedding.shape[0] if embedding else None


def _types(file: Checkpoint) -> dict[str, dict[str, Any]]:
    """Per type of the matrices and vectors: how many, and their bytes."""
    found: dict[str, dict[str, Any]] = {}
    for tensor in file.tensors.values():
        entry = found.setdefault(tensor.kind, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    return found


def _gpu_bytes(file: Checkpoint) -> int | None:
    """Bytes of all weights as they lie on a GPU; None where there are none, or of types without a format."""
    from ..formats.weight_formats import WEIGHT_FORMATS
    from ..kernels.linear.packed import layout

    total = 0
    for tensor in file.tensors.values():
        if len(tensor.shape) == 1:
            total += 4 * tensor.shape[0]
        elif len(tensor.shape) in (2, 3) and tensor.kind in WEIGHT_FORMATS:
            n, k = math.prod(tensor.shape[:-1]), tensor.shape[-1]  # matrices of experts lie one below the other
            lay = layout({"N": n, "K": k, "format": tensor.kind})
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


def _lines(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    from ..gpu.caps import size

    tokenizer, cache = found["tokenizer"], found["cache_bytes_per_1000_tokens"]
    lines = [("name", found["name"]), ("file", f"{found['path']} ({size(found['file_bytes'])})")]
    lines.append(("architecture", _shown(found["architecture"])))
    lines.append(("runs", "yes" if found["runs"] else f"no: {found['unsupported_reason']}"))
    if found["parameters"]:
        lines.append(("parameters", f"{found['parameters'] / 1e6:,.1f} M"))
    for name in ("context", "layers", "hidden"):
        lines.append((name, _shown(found[name])))
    lines.append(("heads", f"{_shown(found['heads'])}, {_shown(found['kv_heads'])} of keys and values"))
    lines.append(("head width", _shown(found["head_width"])))
    lines.append(("FFN", _shown(found["ffn"])))
    lines.append(("vocabulary", _shown(found["vocabulary"])))
    lines.append(("rope", _rope(found["rope"])))
    problem = f" ({tokenizer['problem']})" if tokenizer["problem"] else ""
    words = f", pre-tokenizer {tokenizer['pre']}" if tokenizer["pre"] is not None else ""
    lines.append(("tokenizer", f"{_shown(tokenizer['model'])}{words}{problem}"))
    lines.append(("chat template", "yes" if found["chat_template"] else "no"))
    for kind, entry in found["types"].items():
        lines.append((f"tensors {kind}", f"{entry['tensors']}, {size(entry['bytes'])}"))
    if found["gpu_weight_bytes"]:
        lines.append(("on a GPU", f"about {size(found['gpu_weight_bytes'])} of weights"))
    if cache:
        lines.append(("cache", f"{size(cache['f16'])} per {_TOKENS:,} tokens in f16, {size(cache['f32'])} in f32"))
    return lines


def _rope(rope: Mapping[str, Any]) -> str:
    kind, factor = rope["scaling"], rope["factor"]
    if kind is None and factor:
        kind = "linear"  # what a factor without a type means
    scaled = f", scaling {kind}" if kind not in (None, "none") else ""
    scaled += f" by {factor:g}" if scaled and isinstance(factor, (int, float)) else ""
    return f"{_shown(rope['dimensions'])} dimensions, base {_shown(rope['base'])}{scaled}"


def _shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "not given" if value is None else str(value)
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
