"""Rotary positions as the metadata and the tensors of a checkpoint describe them."""

from __future__ import annotations

import math

from ..errors import ModelError
from ..graph.reference import Yarn
from .config import Metadata, Rope, Shapes, expect

FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"

_LOGARITHM = "rope.scaling.yarn_log_multiplier"
_MAGNITUDES = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
# No keys of GGUF: its files mean the usual magnitude and whole pairs. Folders may say otherwise.
_MAGNITUDE, _TRUNCATE = "rope.scaling.yarn_magnitude", "rope.scaling.yarn_truncate"


def read_rope(meta: Metadata, shapes: Shapes, width: int, *, interleaved: bool, long: bool = False) -> Rope:
    """Rope of heads of this width. `long`: the file may have factors for short and for long contexts."""
    rotary = meta.whole("rope.dimension_count", width)
    if rotary % 2 or rotary > width:
        raise meta.wrong("rope.dimension_count", f"even and at most {width}", rotary)
    theta = meta.number("rope.freq_base", 10000.0)
    original = meta.whole("rope.scaling.original_context_length", meta.whole("context_length"))
    kind, factor = _scaling(meta, ("none", "linear", "yarn", *(["longrope"] if long else [])))
    magnitudes = [meta.number(key, 1.0) for key in _MAGNITUDES]
    yarn, magnitude = None, magnitudes[0]
    # Files have the numbers of yarn in two sets of names, and only some of them.
    share = meta.fraction("rope.scaling.yarn_ext_factor", 1.0)
    fast, slow = meta.number("rope.scaling.yarn_beta_fast", 32.0), meta.number("rope.scaling.yarn_beta_slow", 1.0)
    divisor = meta.number(_LOGARITHM) if meta.get(_LOGARITHM) else 0.0
    if kind == "yarn":
        if theta <= 1:
            raise meta.wrong("rope.freq_base", "above 1 for yarn", theta)
        truncate = meta.get(_TRUNCATE, True)
        if not isinstance(truncate, bool):
            raise meta.wrong(_TRUNCATE, "true or false", truncate)
        yarn = Yarn(factor, original, fast, slow, share, truncate)
        logarithm = 0.1 * math.log(factor) if share else 0.0
        _check_magnitudes(meta, magnitudes, 1 + logarithm)
        magnitude = meta.number(_MAGNITUDE, (1 + logarithm) / (1 + divisor * logarithm))
    names = [FACTORS] if FACTORS in shapes else []
    if long and {LONG_FACTORS, SHORT_FACTORS} & set(shapes):
        names = [SHORT_FACTORS, LONG_FACTORS]
    elif kind == "longrope":
        raise ModelError(
            f"{meta.full('rope.scaling.type')} is 'longrope', but the checkpoint has no tensors {SHORT_FACTORS!r} and "
            f"{LONG_FACTORS!r}"
        )
    for name in names:
        expect(shapes, name, (rotary // 2,))
    return Rope(
        rotary,
        theta,
        interleaved,
        linear_scale=factor if kind == "linear" else 1.0,
        factors=names[0] if names else None,
        long_factors=names[1] if len(names) > 1 else None,
        original_context=original if len(names) > 1 else 0,
        yarn=yarn,
        magnitude=magnitude,
    )


def _check_magnitudes(meta: Metadata, magnitudes: list[float], usual: float) -> None:
    """Refuse magnitudes of yarn that nobody can tell the meaning of.

    Converters write the whole magnitude, which is the usual one in published models. Other programs read the same keys
    as a factor of it, which is 1.
    """
    for key, value in zip(_MAGNITUDES, magnitudes, strict=True):
        if not any(math.isclose(value, meant, rel_tol=1e-4) for meant in (1.0, usual)):
            raise ModelError(
                f"{meta.full(key)} is {value:g}: it is not known whether it replaces yarn's magnitude, {usual:.4f}, or "
                f"is multiplied with it. --ignore-key {meta.full(key)} takes the magnitude alone"
            )


def _scaling(meta: Metadata, known: tuple[str, ...]) -> tuple[str, float]:
    """How positions are scaled, and by what. A factor without a type is linear, and a factor of 0 means 1."""
    meta.get("rope.scale_linear")  # read in any case
    key = "rope.scale_linear" if meta.get("rope.scaling.factor") is None else "rope.scaling.factor"
    factor = meta.number(key) if meta.get(key) else 1.0
    kind = meta.get("rope.scaling.type", "linear")
    if kind not in known:
        both = " ".join(f"--ignore-key {meta.full(name)}" for name in ("rope.scaling.type", "rope.scaling.factor"))
        raise ModelError(
            f"{meta.full('rope.scaling.type')} is {kind!r}: positions are rotated in another way, which is not "
            f"supported; {', '.join(known)} are. {both} reads the file as if its positions were not scaled"
        )
    return kind, factor
