"""Records what `transformers` computes for tiny models that see: python -m tests.make_vision_checkpoints [NAME ...].

Needs `torch` and `transformers`, but not torchvision: its processors are written out here, with PyTorch's resampling of
8 bits, which torchvision calls. One row of `vision_checkpoints.ROWS` makes one checkpoint.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors import safe_open

from . import vision_checkpoints as files
from .checkpoints import shortened, tensors_of
from .safetensors_files import write_safetensors
from .vision_processors import FAMILIES, Family

_GREEDY = 12  # tokens
_RESAMPLED = ("plain", "wide")  # pictures whose pixels are kept


def main(wanted: list[str]) -> None:
    """Record these checkpoints, or all."""
    files.FOLDER.mkdir(exist_ok=True)
    for name in wanted or files.ROWS:
        entry, arrays = made(name)
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items())
        (files.FOLDER / f"{name}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        named: dict[str, Any] = arrays
        np.savez_compressed(files.FOLDER / f"{name}.npz", **named)
        least = min(case["least_lead"] for case in entry["cases"])
        print(f"{name}: logits up to {np.abs(arrays['logits']).max():.2f}, least lead {least:.4f}")


def made(name: str) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """What is recorded of a checkpoint."""
    row = files.ROWS[name]
    kind = getattr(transformers, f"{row.model}ForConditionalGeneration")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kind(kind.config_class(**json.loads(json.dumps(dict(row.config))))).save_pretrained(folder)
        with safe_open(folder / "model.safetensors", "np") as file:
            stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for each in (config, config["text_config"], config["vision_config"]):
            for key in ("transformers_version", "dtype"):
                each.pop(key, None)
        entry: dict[str, Any] = {"config": config, "shapes": shortened(stored)}
        write_safetensors(folder / "model.safetensors", tensors_of(entry))
        model, info = kind.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
        assert not any(info.values()), info
        files.write_folder(folder / "text", name, entry)
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "text")
    cases, arrays, rows = [], {}, []
    for number, names in enumerate(row.cases):
        case, features, logits, pixels = _case(row, model, tokenizer, names)
        cases.append(case)
        rows.append(logits)
        arrays[f"features-{number}"] = features
        if names[0] in _RESAMPLED and len(names) == 1:
            arrays[f"pixels-{number}"] = pixels[0]
    return {**entry, "cases": cases}, {**arrays, "logits": np.stack(rows)}


def _case(row: files.VisionRow, model: Any, tokenizer: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """The recorded case, features, the last row of logits, and pixels of every picture."""
    family = FAMILIES.get(row.model, Family(_processed, _tokens, _inputs))
    pixels = [family.pixels(row, files.picture(name)) for name in names]
    text = tokenizer.apply_chat_template(files.messages(names), tokenize=False)
    parts = text.split(row.place)
    text = parts[0] + "".join(family.text(row, each) + after for each, after in zip(pixels, parts[1:], strict=True))
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    inputs = family.inputs(row, pixels)
    ids, first, lead = list(prompt), None, float("inf")
    with torch.no_grad():
        features = torch.cat(list(model.model.get_image_features(**inputs, return_dict=True).pooler_output)).numpy()
        for _ in range(_GREEDY):
            logits = model(**_ids(model, ids), **inputs).logits[0, -1].numpy()
            second, best = np.sort(logits)[-2:]
            lead = min(lead, float(best - second))
            first = logits if first is None else first
            ids.append(int(logits.argmax()))
    assert lead > 1e-3, f"{names}: two tokens are as likely; take other weights"
    total = sum(float(each.astype(np.float64).sum()) for each in pixels)
    case = {
        "images": list(names),
        "ids": prompt,
        "greedy": ids[len(prompt) :],
        "least_lead": lead,
        "pixel_values": {"sum": total},
        "features": {"shape": list(features.shape)},
    }
    return case, features, first, pixels


def _ids(model: Any, ids: list[int]) -> dict[str, Any]:
    """Of some families the kind of each token is wanted, too."""
    tensor = torch.tensor([ids])
    if "mm_token_type_ids" not in inspect.signature(model.forward).parameters:
        return {"input_ids": tensor}
    return {"input_ids": tensor, "mm_token_type_ids": (tensor == model.config.image_token_id).long()}


# Processors ----------------------------------------------------------------------------------------------


def _processed(row: files.VisionRow, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[3, rows, columns], resized, shifted and scaled as the family's processor does."""
    given = row.processor
    resized = next(make for key, make in _SIZINGS.items() if key in given["size"])(row, pixels)
    mean, std = (np.array(given[f"image_{key}"], np.float32)[:, None, None] for key in ("mean", "std"))
    return ((resized.astype(np.float32) / np.float32(255) - mean) / std).astype(np.float32)


def _longest(row: files.VisionRow, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pixtral's: the longest side is bounded, then sides of whole tokens."""
    unit, longest = _unit(row), row.processor["size"]["longest_edge"]
    rows, columns = pixels.shape[:2]
    ratio = max(rows, columns) / longest
    if ratio > 1:
        rows, columns = int(np.floor(rows / ratio)), int(np.floor(columns / ratio))
    return _resized(pixels, ((rows - 1) // unit + 1) * unit, ((columns - 1) // unit + 1) * unit)


def _cropped(row: files.VisionRow, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """CLIP's: the shorter side is resized, then the middle is cut out."""
    (rows, columns), side = pixels.shape[:2], row.processor["size"]["shortest_edge"]
    longer = int(side * max(rows, columns) / min(rows, columns))
    whole = _resized(pixels, *((side, longer) if rows <= columns else (longer, side)))
    cut = row.processor["crop_size"]
    top, left = (int((whole.shape[1 + i] - cut[key]) / 2) for i, key in enumerate(("height", "width")))
    return whole[:, top : top + cut["height"], left : left + cut["width"]]


def _square(row: files.VisionRow, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """SigLIP's: one size for all pictures."""
    return _resized(pixels, row.processor["size"]["height"], row.processor["size"]["width"])


_SIZINGS = {"longest_edge": _longest, "shortest_edge": _cropped, "height": _square}


def _unit(row: files.VisionRow) -> int:
    return int(row.more["patch_size"] * row.more.get("spatial_merge_size", 1))


def _resized(pixels: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.uint8]:
    tensor = torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None]
    if tensor.shape[-2:] != (rows, columns):
        tensor = torch.nn.functional.interpolate(tensor, (rows, columns), mode="bicubic", antialias=True)
    return np.asarray(tensor[0].numpy())


def _tokens(row: files.VisionRow, pixels: NDArray[np.float32]) -> str:
    """What stands for a picture in the text."""
    unit = _unit(row)
    rows, columns = pixels.shape[1] // unit, pixels.shape[2] // unit
    if len(row.tokens) == 1:
        return str(row.tokens[0] * (rows * columns))
    token, row_end, end = row.tokens
    return row_end.join([token * columns] * rows) + end


def _inputs(row: files.VisionRow, pixels: list[NDArray[np.float32]]) -> Mapping[str, Any]:
    """Pictures of several sizes are padded; their sizes are given, too."""
    if len({each.shape for each in pixels}) == 1 and "longest_edge" not in row.processor["size"]:
        return {"pixel_values": torch.from_numpy(np.stack(pixels))}
    sizes = [each.shape[1:] for each in pixels]
    most = [max(size[axis] for size in sizes) for axis in (0, 1)]
    padded = [np.pad(each, ((0, 0), (0, most[0] - each.shape[1]), (0, most[1] - each.shape[2]))) for each in pixels]
    return {"pixel_values": torch.from_numpy(np.stack(padded)), "image_sizes": torch.tensor(sizes)}


if __name__ == "__main__":
    main(sys.argv[1:])
