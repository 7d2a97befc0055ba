"""`shaderlm info`: what a file or folder holds, and whether it runs. Reads headers, loads no weights, opens no GPU."""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError, ModelError
from .loading import progress_bar
from .models import described, is_synthetic
from .options import adapter_option, backend_option, ignore_key_option, json_option, model_argument, with_flags

if TYPE_CHECKING:
    from ..formats.checkpoint import Checkpoint
    from ..formats.gguf_header import TensorInfo
    from ..gpu import Backend, DeviceCaps
    from ..models.architecture import Architecture
    from ..models.config import Config
    from ..runtime.sizes import Memory

    _Model = tuple[Architecture, Config]

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
_LARGEST = 1 << 24  # of layers, heads and their widths
_MOST_LAYERS = 1024  # of which different numbers are shown
_CONTEXTS = (1024, 4096, 16384, 65536)  # that sizes are given for, beside the model's own
_NOT_GIVEN = "not given"  # by the file: such lines are left out
_LABEL = 14  # characters of a label, before a space


@click.command()
@model_argument
@ignore_key_option
@click.option(
    *("-c", "--context", "--ctx-size"),
    type=click.IntRange(1),
    metavar="N",
    help="Also say what memory N tokens of context take.",
)
@adapter_option
@backend_option
@click.option("--metadata", "with_metadata", is_flag=True, help="Also list all metadata.")
@click.option("--tensors", "with_tensors", is_flag=True, help="Also list all tensors.")
@click.option("--draft-model", "-md", metavar="MODEL", help="With --context: beside a model that drafts for it.")
@json_option
def info(
    model: str | None,
    ignore_keys: tuple[str, ...],
    context: int | None,
    device: str | None,
    backend: Backend,
    with_metadata: bool,
    with_tensors: bool,
    draft_model: str | None,
    as_json: bool,
) -> None:
    """Show what a model is, whether it runs, and how large it is.

    If it does not run, it says why, and the exit code is 1. No GPU is needed.

    MODEL is the path of a GGUF file or of a Hugging Face folder, a name or hf:ORG/REPO (default: smollm2-135m), or with
    --context synthetic:SHAPE:FORMAT, as for `bench`. --context counts for what --device names, or the preferred GPU;
    without one, for a large GPU.
    """
    from ..engine.planning import described_by
    from ..formats.find import find, shown_name
    from ..formats.hf.refused import RefusedFolder
    from ..formats.opening import open_checkpoint

    if draft_model is not None and context is None:
        raise InputError("--draft-model is for --context N, which says what memory the models take")
    if is_synthetic(model):
        if context is None:
            raise InputError("a synthetic model has no file to show; --context N says what memory it takes")
        _print_memory(_memory(*described(model), context, device, backend, draft_model), as_json)
        return
    with progress_bar() as progress:
        path = find(model, progress)
    with ExitStack() as opened:
        refused = None
        try:
            file = opened.enter_context(open_checkpoint(path))
        except ModelError as problem:
            if not path.is_dir():
                raise
            # A folder of an unknown kind is still one of known files.
            refused = str(problem).removeprefix(f"{path}: ")
            file = opened.enter_context(RefusedFolder.open(path))
        facts = _facts(shown_name(model, path), file, ignore_keys, refused)
        if context is not None:
            facts["memory"] = _memory(*described_by(file, ignore_keys), context, device, backend, draft_model)
        metadata = dict(file.metadata) if with_metadata else {}
        tensors = list(file.tensors.values()) if with_tensors else []
    if as_json:
        if with_metadata:
            facts["metadata"] = {key: _json_value(value) for key, value in metadata.items()}
        if with_tensors:
            facts["tensors"] = [_json_tensor(info) for info in tensors]
        print(json.dumps(facts, ensure_ascii=False, indent=2))
    else:
        _print_facts(facts, metadata, tensors)
    if not facts["runs"]:
        sys.exit(1)


def _print_facts(facts: dict[str, Any], metadata: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> None:
    for label, text in _lines(facts):
        print("\n".join(_wrapped(label, printable(text))))
    for line in _size_table(facts["sizes"]):
        print(line)
    if "memory" in facts:
        _print_memory(facts["memory"], as_json=False)
    for key, value in metadata.items():
        print(f"{printable(key)} = {_short(value)}")
    for tensor in tensors:
        shape = "×".join(map(str, tensor.shape))
        print(f"{printable(tensor.name):<40} {shape:>16} {tensor.kind:<5} {tensor.nbytes:>14,} bytes")


# Memory --------------------------------------------------------------------------------------------------


def _memory(
    kind: Architecture,
    config: Config,
    context: int,
    device: str | None,
    backend: Backend,
    draft_model: str | None = None,
) -> dict[str, Any]:
    """What a conversation of so many tokens takes, by part, and on which device; with a model that drafts for it."""
    memory = _memory_of_one(kind, config, context, device, backend)
    if draft_model is None:
        return memory
    from ..engine.draft_settings import check_can_draft

    small = described(draft_model)
    check_can_draft(small[1])
    drafts = _memory_of_one(*small, min(context, small[1].context), device, backend)
    limit = memory["cache_limit"]
    if limit is not None:
        limit = max(0, limit - int(memory["cache_share"] * (drafts["weights"] + drafts["scratch"])))
    return {**memory, "draft": drafts["total"], "total": memory["total"] + drafts["total"], "cache_limit": limit}


def _memory_of_one(
    kind: Architecture, config: Config, context: int, device: str | None, backend: Backend
) -> dict[str, Any]:
    """What one model takes."""
    from ..engine.cpu import is_cpu
    from ..engine.planning import LARGE_GPU, memory
    from ..gpu import preferred_adapter
    from ..gpu.adapters import choose

    if is_cpu(device):
        return _cpu_memory(kind, config, context, str(device).strip().lower())
    adapter = preferred_adapter(backend) if device is None else choose(device, backend)
    if device is None and adapter is not None and adapter.caps.software:
        adapter = None
    caps = LARGE_GPU if adapter is None else adapter.caps
    by = None if adapter is None else f"{caps.implementation}: {adapter.reason}"
    needed = memory(kind, config, caps, context)
    parts = {part: getattr(needed, part) for part in ("weights", "cache", "scratch", "total")}
    parts |= _cache_limit(None if adapter is None else caps, needed, is_here=adapter is not None)
    return {"context": context, "device": caps.name, "device_bytes": caps.heap or None, "backend": by, **parts}


def _cache_limit(caps: DeviceCaps | None, needed: Memory, *, is_here: bool) -> dict[str, Any]:
    """What the cache may take where nobody says how much: of a device that is here."""
    from ..runtime.cache_share import free_memory, share_of

    free = free_memory(caps, needed.weights + needed.scratch, loaded=False) if is_here else None
    share = share_of(caps)
    return {"cache_share": share, "cache_limit": None if free is None else int(free * share)}


def _cpu_memory(kind: Architecture, config: Config, context: int, device: str) -> dict[str, Any]:
    """The same on the CPU, as this installation computes there."""
    from ..engine.planning import cpu_memory
    from ..runtime.packed_cpu import is_available

    packed = device == "cpu" and is_available()
    needed, _ = cpu_memory(kind, config, context, packed=packed)
    parts = {part: getattr(needed, part) for part in ("weights", "cache", "scratch", "total")}
    parts |= _cache_limit(None, needed, is_here=True)
    name = f"the CPU, by {'LLVM' if packed else 'NumPy'}"
    return {"context": context, "device": name, "device_bytes": None, "backend": None, **parts}


def _print_memory(memory: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"memory": memory}, ensure_ascii=False, indent=2))
        return
    from ..gpu.caps import size

    named = {"weights": "weights", "cache": "cache", "scratch": "scratch", "draft": "the draft model"}
    parts = ", ".join(f"{name} {size(memory[part])}" for part, name in named.items() if part in memory)
    has = f", which has {size(memory['device_bytes'])}" if memory["device_bytes"] else ""
    short = has and memory["total"] > memory["device_bytes"]
    print(f"{'memory':<14} {size(memory['total'])} with {memory['context']:,} tokens of context ({parts})")
    print(f"{'':<14} on {printable(memory['device'])}{has}{': too little' if short else ''}")
    if memory["cache_limit"] is not None:
        share = f"{memory['cache_share']:.0%} of what is free beside the model"
        print(f"{'':<14} the cache of all conversations takes up to {size(memory['cache_limit'])}, {share}")
    if memory["backend"]:
        print(f"{'':<14} by {memory['backend']}")


# Gathering -----------------------------------------------------------------------------------------------


def _facts(name: str, file: Checkpoint, ignore_keys: Collection[str], refused: str | None) -> dict[str, Any]:
    """What is shown. `refused`: why the file could not be opened as a checkpoint."""
    from ..engine.sampling import sampling_of_file

    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    numbers = _completed(_numbers(metadata, _NUMBERS))
    reason, model = (refused, None) if refused else _verdict(file, ignore_keys)
    on_gpu = _gpu_reason(model) if model else None
    if model:
        numbers["layers"] = model[1].layers
    read = [tensor for name, tensor in file.tensors.items() if not model or name in model[1].shapes]
    weights, parameters = _gpu_bytes(read), sum(math.prod(tensor.shape) for tensor in read)
    return {
        "name": name,
        "own_name": str(metadata.get("general.name") or ""),
        "path": str(file.path),
        "file_bytes": file.size,
        "architecture": _json_value(architecture),
        "runs": reason is None,
        "unsupported_reason": reason,
        "unsupported_on_gpu": on_gpu,
        "parameters": parameters,
        "active_parameters": _active_parameters(file.metadata, read) if model else parameters,
        "experts": _experts(model),
        "predictors": model[1].predictors if model else 0,
        **numbers,
        "vocabulary": _vocabulary(file),
        "rope": _rope_of(model, _numbers(metadata, _ROPE)),
        "windows": _windows(model),
        "tokenizer": None if refused else _tokenizer(metadata, file.vocabulary),
        "chat_template": bool(metadata.get("tokenizer.chat_template")),
        "sampling": dict(sampling_of_file(metadata)),
        "types": _types(file),
        "gpu_weight_bytes": weights,
        "cpu_weight_bytes": _cpu_bytes(file, model),
        "cache_bytes_per_1000_tokens": _cache_bytes(numbers, model),
        "images": _images(file, model),
        "sizes": _sizes(model, weights) if model and weights and not on_gpu else [],
    }


_SHOWN_PICTURE = 1024  # pixels on a side


def _images(file: Checkpoint, model: _Model | None) -> dict[str, Any] | None:
    """The part that reads images, where `load` would find one."""
    from ..engine.tower_files import find_tower

    found = find_tower(file, model[1], None, None, on_device=True) if model else None
    if found is None:
        return None
    found.file.close()
    tower = found.tower
    tokens = tower.processor.layout(_SHOWN_PICTURE, _SHOWN_PICTURE).tokens
    return {
        "path": str(found.file.path),
        "layers": tower.layers,
        "hidden": tower.hidden,
        "gpu_weight_bytes": tower.weight_bytes,
        "tokens_of_a_picture": tokens,
    }


def _numbers(metadata: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Values of the architecture, by our names."""
    prefix = metadata.get("general.architecture")
    return {key: _json_value(metadata.get(f"{prefix}.{name}")) for key, name in names.items()}


def _completed(numbers: dict[str, Any]) -> dict[str, Any]:
    """Files leave out what follows from the rest."""
    hidden, heads = numbers["hidden"], numbers["heads"]
    if numbers["kv_heads"] is None:
        numbers["kv_heads"] = heads
    if numbers["head_width"] is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        numbers["head_width"] = hidden // heads
    return numbers


def _verdict(file: Checkpoint, ignore_keys: Collection[str]) -> tuple[str | None, _Model | None]:
    """Why this file cannot be run, in the order in which `load` would find it; None if it can, and what it is."""
    from ..models.checkpoint import architecture_of, read_config

    try:
        kind = architecture_of(file)
        problem: str | None = _tokenizer(file.metadata, file.vocabulary)["problem"]
        if problem is None:
            return None, (kind, read_config(kind, file, ignore_keys))
    except ModelError as refused:
        return str(refused), None
    return problem, None


def _gpu_reason(model: _Model) -> str | None:
    """Why no GPU can run it, though the CPU can."""
    from ..compile.lowering import check_shapes
    from ..models.config import StepSpec

    kind, config = model
    try:
        check_shapes(kind.build(config, StepSpec(1)))
    except ModelError as refused:
        return str(refused)
    return None


def _experts(model: _Model | None) -> dict[str, int] | None:
    if model is None or model[1].experts is None:
        return None
    experts = model[1].experts
    return {"count": experts.count, "used": experts.used, "ffn": experts.ffn, "shared_ffn": experts.shared}


def _rope_of(model: _Model | None, numbers: dict[str, Any]) -> dict[str, Any]:
    """Files leave out what follows from the rest here, too."""
    if model is not None:
        rope = model[1].rope
        if numbers["dimensions"] is None or not rope.rotary:  # files say how it would be, where nothing is rotated
            numbers["dimensions"] = rope.rotary
        if numbers["base"] is None and rope.rotary:
            numbers["base"] = rope.theta
    return numbers


def _windows(model: _Model | None) -> dict[int, int]:
    """How many layers have a window of so many tokens."""
    if model is None:
        return {}
    windows = (model[1].layer(i).window for i in range(model[1].layers))
    return dict(Counter(window for window in windows if window))


def _active_parameters(metadata: Mapping[str, Any], read: Sequence[TensorInfo]) -> int:
    """Those that one token is multiplied with: of the experts only the chosen ones."""
    architecture = metadata["general.architecture"]
    count, used = (metadata.get(f"{architecture}.expert_{key}") or 1 for key in ("count", "used_count"))
    sizes = ((tensor.name, math.prod(tensor.shape)) for tensor in read)
    return sum(size // count * used if "_exps." in name else size for name, size in sizes)


def _sizes(model: _Model, weights: int) -> list[dict[str, int]]:
    """Bytes on a GPU at several lengths of the context, the last of them the model's own."""
    from ..engine.planning import cache_bytes

    longest = model[1].context
    sizes = []
    for tokens in (*(tokens for tokens in _CONTEXTS if tokens < longest), longest):
        cache = cache_bytes(*model, tokens)
        sizes.append({"context": tokens, "weights": weights, "cache": cache, "total": weights + cache})
    return sizes


def _tokenizer(metadata: Mapping[str, Any], size: int) -> dict[str, Any]:
    from ..text import Tokenizer, Vocabulary

    problem = None
    try:
        Tokenizer(Vocabulary.from_metadata(metadata, size))
    except ModelError as failure:
        problem = str(failure)
    model, pre = (_json_value(metadata.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre"))
    return {"model": model, "pre": pre, "problem": problem}


def _vocabulary(file: Checkpoint) -> int | None:
    tokens, embedding = file.metadata.get("tokenizer.ggml.tokens"), file.tensors.get("token_embd.weight")
    if isinstance(tokens, list):
        return len(tokens)
    size = file.metadata.get(f"{file.metadata.get('general.architecture')}.vocab_size")
    return embedding.shape[0] if embedding else size if isinstance(size, int) else None


def _types(file: Checkpoint) -> dict[str, dict[str, Any]]:
    """Per type of the matrices and vectors: how many, and their bytes."""
    types: dict[str, dict[str, Any]] = {}
    for tensor in file.tensors.values():
        entry = types.setdefault(tensor.kind, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    return types


_LEAST_COLUMNS = 32  # of a matrix on a GPU


def _gpu_bytes(read: Sequence[TensorInfo]) -> int | None:
    """Bytes of weights as they lie on a GPU; None where there are none, or of types without a format."""
    from ..formats.weight_formats import WEIGHT_FORMATS
    from ..kernels.linear.packed import layout

    total = 0
    for tensor in read:
        if len(tensor.shape) == 1 or tensor.shape[-1] < _LEAST_COLUMNS:  # short convolutions are no products
            total += 4 * math.prod(tensor.shape)
        elif len(tensor.shape) in (2, 3) and tensor.kind in WEIGHT_FORMATS:
            n, k = math.prod(tensor.shape[:-1]), tensor.shape[-1]  # matrices of experts lie one below the other
            lay = layout({"N": n, "K": k, "format": tensor.kind})
            total += n * (lay.row_bytes + lay.groups * lay.group_bytes)
        else:
            return None
    return total or None


def _cpu_bytes(file: Checkpoint, model: _Model | None) -> dict[str, int] | None:
    """Bytes of weights on the CPU: by LLVM, those of them that are dense, and in NumPy."""
    from ..engine.planning import cpu_memory
    from ..formats.convert import device_format

    if model is None:
        return None
    kind, config = model
    stored = replace(config, formats={name: device_format(file, name) for name in config.shapes})
    packed, dense = cpu_memory(kind, stored, 1, packed=True)
    in_numpy, _ = cpu_memory(kind, stored, 1, packed=False)
    return {"packed": packed.weights, "dense": dense, "numpy": in_numpy.weights}


def _cache_bytes(numbers: Mapping[str, Any], model: _Model | None) -> dict[str, int] | None:
    """Keys and values of 1,000 tokens, in the cache's two formats: f16 where the GPU has it."""
    factors = [numbers[key] for key in ("layers", "kv_heads", "head_width")]
    if model:
        values = 2 * _TOKENS * sum(model[1].kv_widths)
    elif all(isinstance(factor, int) and 0 < factor <= _LARGEST for factor in factors):
        values = 2 * _TOKENS * math.prod(factors)
    else:
        return None
    return {"f16": 2 * values, "f32": 4 * values}


# Showing -------------------------------------------------------------------------------------------------


def _lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    from ..engine.report import counted
    from ..gpu.caps import size

    tokenizer, cache = facts["tokenizer"], facts["cache_bytes_per_1000_tokens"]
    where = "folder" if Path(facts["path"]).is_dir() else "file"
    own = facts["own_name"]
    named = f'{facts["name"]} (its {where} says "{own}")' if own not in ("", facts["name"]) else facts["name"]
    lines = [("name", named), (where, f"{facts['path']} ({size(facts['file_bytes'])})")]
    lines.append(("architecture", _shown(facts["architecture"])))
    problem = facts["unsupported_on_gpu"]
    cpu_only = f", but not on a GPU: {with_flags(problem)}" if problem else ""
    lines.append(("runs", f"yes{cpu_only}" if facts["runs"] else f"no: {facts['unsupported_reason']}"))
    if facts["parameters"]:
        active = facts["active_parameters"]
        some = f", {counted(active)} of them active for a token" if active != facts["parameters"] else ""
        lines.append(("parameters", f"{counted(facts['parameters'])}{some}"))
    if facts["experts"]:
        experts = facts["experts"]
        shared = f", and one of width {_shown(experts['shared_ffn'])} for all" if experts["shared_ffn"] else ""
        width = f" of width {_shown(experts['ffn'])}"
        lines.append(("experts", f"{experts['count']}{width}, {experts['used']} for a token{shared}"))
    if facts["predictors"]:
        lines.append(("left aside", f"{facts['predictors']} layers that predict further tokens"))
    for name in ("context", "layers", "hidden"):
        lines.append((name, _shown(facts[name])))
    if facts["heads"]:
        lines.append(("heads", f"{_shown(facts['heads'])}, {_shown(facts['kv_heads'])} of keys and values"))
        lines.append(("head width", _shown(facts["head_width"])))
    if facts["ffn"] != 0:
        lines.append(("FFN", _shown(facts["ffn"])))
    lines.append(("vocabulary", _shown(facts["vocabulary"])))
    lines.append(("rope", _rope(facts["rope"])))
    for window, layers in facts["windows"].items():
        lines.append(("window", f"{_shown(window)} tokens in {layers} of {_shown(facts['layers'])} layers"))
    if tokenizer:
        problem = f" ({tokenizer['problem']})" if tokenizer["problem"] else ""
        words = f", pre-tokenizer {tokenizer['pre']}" if tokenizer["pre"] is not None else ""
        lines.append(("tokenizer", f"{_shown(tokenizer['model'])}{words}{problem}"))
        lines.append(("chat template", "yes" if facts["chat_template"] else "no"))
    if facts["sampling"]:
        lines.append(("sampling", ", ".join(f"{name} {value:g}" for name, value in facts["sampling"].items())))
    for kind, entry in facts["types"].items():
        lines.append((f"tensors {kind}", f"{entry['tensors']}, {size(entry['bytes'])}"))
    if facts["gpu_weight_bytes"] and not facts["sizes"]:
        lines.append(("on a GPU", f"about {size(facts['gpu_weight_bytes'])} of weights"))
    if cpu := facts["cpu_weight_bytes"]:
        dense = f" ({size(cpu['dense'])} of them dense)" if cpu["dense"] else ""
        lines.append(("on the CPU", f"{size(cpu['packed'])} of weights{dense}, {size(cpu['numpy'])} by NumPy"))
    if images := facts["images"]:
        picture = f"{images['tokens_of_a_picture']:,} tokens for {_SHOWN_PICTURE:,} × {_SHOWN_PICTURE:,}"
        weights = f"{size(images['gpu_weight_bytes'])} of weights on a GPU"
        lines.append(("images", f"{images['layers']} layers, {weights}; {picture}, whose scratch is not counted"))
    if cache:
        lines.append(("cache", f"{size(cache['f16'])} per {_TOKENS:,} tokens in f16, {size(cache['f32'])} in f32"))
    return [(label, text) for label, text in lines if text != _NOT_GIVEN]


def _size_table(sizes: Sequence[Mapping[str, int]]) -> list[str]:
    """One line for each length of the context."""
    from ..gpu.caps import size

    if not sizes:
        return []
    rows = [
        (f"{row['context']:,} tokens", *(size(row[part]) for part in ("weights", "cache", "total"))) for row in sizes
    ]
    head = ("on a GPU", "weights", "cache (f16)", "together")
    return ["", *(f"{first:<18}" + "".join(f"{cell:>13}" for cell in rest) for first, *rest in (head, *rows))]


def _wrapped(label: str, text: str) -> list[str]:
    """A label and its text: one line, but on a terminal as many as its width makes of it."""
    line = f"{label:<{_LABEL}} {text}".rstrip()
    if not sys.stdout.isatty():
        return [line]
    width = max(40, shutil.get_terminal_size().columns)
    return textwrap.wrap(line, width, subsequent_indent=" " * (_LABEL + 1), break_on_hyphens=False) or [line]


def _rope(rope: Mapping[str, Any]) -> str:
    if rope["dimensions"] == 0:
        return "none: positions are learned, or not told"
    kind, factor = rope["scaling"], rope["factor"]
    if kind is None and factor:
        kind = "linear"  # what a factor without a type means
    scaled = f", scaling {kind}" if kind not in (None, "none") else ""
    scaled += f" by {factor:g}" if scaled and isinstance(factor, (int, float)) else ""
    parts = [f"{rope['dimensions']} dimensions"] if rope["dimensions"] is not None else []
    parts += [f"base {_shown(rope['base'])}"] if rope["base"] is not None else []
    return ", ".join(parts) + scaled if parts else _NOT_GIVEN


def _shown(value: Any) -> str:
    if isinstance(value, list) and 0 < len(value) <= _MOST_LAYERS and all(type(each) is int for each in value):
        return " or ".join(f"{each:,}" for each in sorted(set(value)))  # one for each layer
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _NOT_GIVEN if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def printable(text: str) -> str:
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
