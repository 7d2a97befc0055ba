"""Models of a known shape with random weights: speed does not depend on the values, and nothing has to be fetched.

`synthetic:llama-3.2-1b:q4_0`. The weights are blocks of one small random pool, packed and uploaded a few rows at a
time, as those of a file are. A vocabulary of made-up words lets a server run such a model.
"""

from __future__ import annotations

import difflib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..engine import LanguageModel
from ..engine.cpu import cpu_runner, packs_weights
from ..engine.draft_settings import DRAFT_TOKENS, check_draft
from ..engine.loading import Progress, backend_of, check_context, check_precision, choose_device, use_drafts
from ..engine.report import LoadReport
from ..engine.vision import Vision
from ..errors import InputError
from ..formats.weight_formats import WEIGHT_FORMATS
from ..gpu import Array, Backend, Device
from ..models.architecture import Architecture
from ..models.config import Config, Shapes
from ..models.shapes import SYNTHETIC, ModelShape
from ..models.supported import architecture
from ..models.vision import Tower, described_tower, read_tower
from ..runtime.gpu_runner import GpuRunner
from ..runtime.numpy_runner import NumpyRunner
from ..runtime.tower import NumpyTower, TowerRunner
from ..text import Tokenizer, Vocabulary
from ..text.tokenizer import byte_alphabet
from ..text.vocabulary import CONTROL, NORMAL

PREFIX = "synthetic:"


def _mixed(plain: str, embedding: str) -> Callable[[str, int, int], str]:
    return lambda name, layer, layers: embedding if name in ("token_embd", "output") else plain


def _q4_k_m(name: str, layer: int, layers: int) -> str:
    """Half of the layers, the first and last eighth and every third between, have finer values and down projections."""
    if name in ("token_embd", "output"):
        return "q6_k"
    finer = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "q6_k" if finer and name in ("attn_v", "ffn_down") else "q4_k"


# The format of a matrix by its name and layer.
MIXES: Mapping[str, Callable[[str, int, int], str]] = {
    "q4_0": _mixed("q4_0", "q8_0"),
    "q4_k_m": _q4_k_m,
    "mxfp4": _mixed("mxfp4", "q8_0"),
    "mxfp4_moe": lambda name, layer, layers: "mxfp4" if name.endswith("_exps") else "q8_0",
    "q3_k": _mixed("q3_k", "q6_k"),
    "q2_k": _mixed("q2_k", "q6_k"),
    "iq4_nl": _mixed("iq4_nl", "q8_0"),
    "iq4_xs": _mixed("iq4_xs", "q6_k"),
    "q8_0": _mixed("q8_0", "q8_0"),
    "f16": _mixed("f16", "f16"),
    "bf16": _mixed("bf16", "bf16"),
}


def parse(spec: str) -> tuple[ModelShape, str]:
    """The shape and the mix of formats that `synthetic:SHAPE:MIX` names."""
    name, _, mix = spec.removeprefix(PREFIX).lower().partition(":")
    mix = mix or "q4_0"
    for word, names, what in ((name, SYNTHETIC, "model"), (mix, MIXES, "format")):
        if word not in names:
            close = difflib.get_close_matches(word, names, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise InputError(f"no synthetic {what} {word!r}.{hint} There are {', '.join(names)}")
    return SYNTHETIC[name], mix


def config_of(shape: ModelShape, mix: str) -> tuple[Architecture, Config]:
    """A config as a file of this shape would give it."""
    kind = architecture(shape.metadata)
    shapes = shape.tensors
    formats = {name: _format(name, size, mix, shape.layers) for name, size in shapes.items()}
    return kind, kind.read(shape.metadata, shapes, formats)


def _format(name: str, size: tuple[int, ...], mix: str, layers: int) -> str:
    """By the parts of a name: blk.3.attn_v.weight, token_embd.weight."""
    *layer, matrix, part = name.removeprefix("blk.").split(".")
    # Files keep norms, biases, routers and short convolutions as they are.
    if len(size) == 1 or part == "bias" or matrix in ("ffn_gate_inp", "ssm_conv1d"):
        return "f32"
    return MIXES[mix](matrix, int(layer[0]) if layer else 0, layers)


def load_synthetic(
    spec: str,
    device: str | int | Device | None,
    *,
    progress: Progress | None = None,
    fusions: Sequence[str] | None = None,
    precision: str = "fast",
    tune: bool = True,
    measure: bool = False,
    backend: Backend = "auto",
    context: int | None = None,
    deterministic: bool = False,
    draft: str | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    vision: bool = True,
) -> LanguageModel:
    """A synthetic model with a tokenizer, as servers need it; options as for `load_with`."""
    shape, mix = parse(spec)
    check_precision(precision)
    check_draft(draft, draft_tokens)
    started = time.perf_counter()
    kind, config = config_of(shape, mix)
    if context is not None:
        check_context(context, config.context)
        config = replace(config, context=context)
    tower = tower_of(shape) if vision else None
    if tower is not None:
        config = replace(config, images=tower.image_rows())
    target = choose_device(device, backend)
    moved = (lambda done, total: progress("making weights", done, total)) if progress else None
    runner: GpuRunner | NumpyRunner
    options: dict[str, Any] = {"fusions": fusions, "deterministic": deterministic, "progress": moved}
    if target is None:
        packed = packs_weights(device)
        stored = config if packed else replace(config, formats=dict.fromkeys(config.shapes, "f32"))
        runner = cpu_runner(kind, stored, RandomWeights(stored), packed=packed, precision=precision, **options)
    else:
        options |= {"precision": precision, "tune": tune, "measure": tune and measure, "reserve": context or 0}
        runner = GpuRunner(kind, config, RandomWeights(config), target, **options)
    report = LoadReport(
        name=f"{shape.name} {mix}",
        path=Path(spec),
        file_bytes=0,  # there is none
        tensor_bytes=tensor_bytes(config),
        architecture=config.architecture,
        parameters=sum(math.prod(size) for size in config.shapes.values()),
        context=runner.config.context,
        max_context=shape.context,
        types=dict(Counter(config.formats.values()).most_common()),
        backend=backend_of(target),
        seconds=time.perf_counter() - started,
        **runner.report(),
    )
    marks = [] if tower is None else [tower.processor.token]
    model = LanguageModel(runner, Tokenizer(made_up_vocabulary(runner.config.vocabulary, marks)), report)
    if tower is not None:
        model.use_vision(Vision(_tower_runner(tower, target, precision), model.tokenizer))
    use_drafts(model, draft, draft_tokens)
    return model


def tower_of(shape: ModelShape) -> Tower | None:
    """What reads images in a model of this shape, as an mmproj file with matrices in f16 would give it."""
    if not shape.tower:
        return None
    metadata = {"clip.projector_type": shape.tower["projector_type"]}
    metadata |= {f"clip.vision.{key}": value for key, value in shape.tower.items()}
    shapes = described_tower(metadata, {}, {}).wanted()
    return read_tower(metadata, shapes, {name: "f16" if len(size) > 1 else "f32" for name, size in shapes.items()})


def _tower_runner(tower: Tower, target: Device | None, precision: str) -> TowerRunner:
    source = RandomWeights(replace(tower, shapes=tower.padded()))
    if target is None:
        return NumpyTower(replace(tower, formats={}), source)
    from ..runtime.gpu_tower import GpuTower

    return GpuTower(tower, source, target, precision=precision)


def made_up_vocabulary(size: int, marks: Sequence[str] = ()) -> Vocabulary:
    """One token for each byte, so that all text can be read; words with a space before them; marks; the last is EOS.

    Words have the length of usual tokens. Grammars have as many tokens to choose from as with a real vocabulary.
    """
    words = [*byte_alphabet(), *(f"Ġ{_word(i)}" for i in range(size))]
    tokens = [*words[: size - 1 - len(marks)], *marks]
    return Vocabulary(
        kind="bpe",
        pre="gpt-2",
        tokens=[*tokens, "<|endoftext|>"],
        types=[NORMAL] * (len(tokens) - len(marks)) + [CONTROL] * (1 + len(marks)),
        scores=[],
        merges=[],
        bos=None,
        eos=len(tokens),
        unknown=None,
        add_bos=False,
        add_eos=False,
        add_space_prefix=False,
        chat_template=None,
    )


def _word(number: int) -> str:
    """A word of at least three letters, another one for each number."""
    letters = ""
    while number or len(letters) < 3:
        number, at = divmod(number, 26)
        letters += chr(ord("a") + at)
    return letters


def tensor_bytes(config: Config) -> int:
    """What the tensors would take in a file."""
    total = 0
    for name, shape in config.shapes.items():
        form = WEIGHT_FORMATS[config.formats[name]]
        total += math.prod(shape) // form.block_weights * form.block_bytes
    return total


class _HasShapes(Protocol):
    """A config, or a tower."""

    @property
    def shapes(self) -> Shapes:
        """Of its tensors."""
        ...


class RandomWeights:
    """A source of weights: rows cut from pools of random blocks with small scales. The same rows again and again."""

    repeats = True

    def __init__(self, sizes: _HasShapes) -> None:
        self._shapes = sizes.shapes

    def rows(self, name: str, kind: str, first: int, end: int) -> Array:
        """Rows in a device's format; those of experts lie one below the other."""
        rows: Array = _pool(kind, end - first, self._shapes[name][-1])
        return rows

    def vector(self, name: str) -> Array:
        """Norms and factors: ones. Biases: zeros. How fast states are forgotten: a number below 0."""
        value = 0.0 if name.endswith(".bias") else -1.0 if name.endswith(".ssm_a") else 1.0
        return np.full(math.prod(self._shapes[name]), value, np.float32)


# Where the f16 scales of a block lie.
_SCALES = {
    "q4_0": (0,),
    "q8_0": (0,),
    "q4_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
    "q3_k": (108,),
    "q2_k": (80, 82),
}
# The deviation of weights at a scale of 1.
_UNITS = {
    "q4_0": 4.6,
    "q8_0": 74.0,
    "q4_k": 170.0,
    "q6_k": 1370.0,
    "mxfp4": 5.9,
    "iq4_nl": 67.0,
    "iq4_xs": 1250.0,
    "q3_k": 43.0,
    "q2_k": 14.0,
}


@lru_cache(maxsize=4)
def _pool(kind: str, rows: int, k: int) -> Any:
    """[rows, …] in a format; standard deviations are of the order of 1/sqrt(k)."""
    rng = np.random.default_rng(rows * k)
    form = WEIGHT_FORMATS[kind]
    if form.dtype is not None:
        block = (rng.standard_normal(min(rows * k, 1 << 20)) / np.sqrt(k)).astype(np.float32)
        if kind == "bf16":
            return np.resize((block.view(np.uint32) >> 16).astype(np.uint16), (rows, k))
        return np.resize(block.astype(form.dtype), (rows, k))
    weights, nbytes = form.block_weights, form.block_bytes
    count = rows * k // weights
    raw = np.resize(rng.integers(0, 256, (min(count, 1 << 16), nbytes), np.uint8), (count, nbytes))
    unit = _UNITS[kind]
    if kind == "mxfp4":
        raw[:, 0] = round(128 - math.log2(unit * math.sqrt(k)))  # an exponent
        return raw.reshape(rows, -1)
    scale = np.array([1 / (unit * np.sqrt(k))], np.float16).view(np.uint8)
    for at in _SCALES[kind]:
        raw[:, at : at + 2] = scale
    return raw.reshape(rows, -1)
