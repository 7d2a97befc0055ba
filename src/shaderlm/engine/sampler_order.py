"""Which samplers act on a request, and in which order: whether the device's sampler does it, or the host draws.

The device applies penalties, biases, temperature, top_k, top_p and min_p, in this order. What it has no kernel for, and
another order, is a chain that the host runs on the logits of the row. DRY is a bias wherever the device samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..graph.sampler_chain import SAMPLERS, ChainSettings
from ..runtime.sampler_settings import SamplerSettings
from .dry import DrySettings
from .sampling import SamplingParams

# Does a sampler change anything with these settings?
_ACTS: Mapping[str, Callable[[SamplingParams], bool]] = {
    "penalties": lambda how: (how.repetition_penalty, how.presence_penalty, how.frequency_penalty) != (1, 0, 0),
    "dry": lambda how: how.dry_multiplier > 0 and how.dry_penalty_last_n != 0,
    "top_n_sigma": lambda how: how.top_n_sigma > 0,
    "top_k": lambda how: how.top_k > 0,
    "typ_p": lambda how: how.typical_p < 1,
    "top_p": lambda how: how.top_p < 1,
    "min_p": lambda how: how.min_p > 0,
    "xtc": lambda how: how.xtc_probability > 0 and how.xtc_threshold <= 0.5,
    "temperature": lambda how: how.temperature != 1 or how.dynatemp_range > 0,
}
_WITHOUT_KERNELS = {"top_n_sigma", "typ_p", "xtc"}
_DEVICE_ORDER = ("penalties", "dry", "temperature", "top_k", "top_p", "min_p")
# Whether it divides before it takes the k largest changes nothing.
_SAME_ORDER = ("penalties", "dry", "top_k", "temperature", "top_p", "min_p")
_MIROSTAT_ORDER = ("penalties", "dry", "temperature")  # as with llama.cpp, it takes the place of all filters


def order_of(params: SamplingParams) -> Sequence[str]:
    """All samplers of a request, in their order, whether they change anything or not."""
    if params.mirostat:
        return _MIROSTAT_ORDER
    if params.samplers is not None:
        return params.samplers
    return tuple(SAMPLERS) if _needs_host(params, tuple(SAMPLERS)) else _DEVICE_ORDER


def _needs_host(params: SamplingParams, order: Sequence[str]) -> bool:
    """Does a sampler act that the device does not have?"""
    return any(_ACTS[name](params) for name in order if name in _WITHOUT_KERNELS) or (
        "temperature" in order and params.dynatemp_range > 0
    )


def _active(params: SamplingParams) -> tuple[str, ...]:
    return tuple(name for name in order_of(params) if _ACTS[name](params))


def chain_of(params: SamplingParams, settings: SamplerSettings, *, always: bool = False) -> ChainSettings | None:
    """What the host runs for a request, with the seed of its settings; None: the device samples, unless `always`."""
    names = _active(params)
    if not always and not params.mirostat and not _needs_host(params, names) and _is_device_order(params, names):
        return None
    numbers = {name: getattr(params, name) for name in ChainSettings._fields if name not in ("order", "seed")}
    numbers |= {"dynatemp_range": 0.0} if params.mirostat else {"mirostat_tau": None}
    return ChainSettings(names, settings.seed, **numbers)


def _is_device_order(params: SamplingParams, names: Sequence[str]) -> bool:
    if "temperature" in names and params.temperature == 0:  # the filters leave the largest logit, wherever they are
        names = [name for name in names if name not in ("top_k", "top_p", "min_p")]
    places = [[order.index(name) for name in names] for order in (_DEVICE_ORDER, _SAME_ORDER)]
    return any(each == sorted(each) for each in places)


def dry_of(params: SamplingParams) -> DrySettings | None:
    """DRY of a request; None: it is off."""
    if "dry" not in _active(params):
        return None
    limits = (params.dry_allowed_length, params.dry_penalty_last_n, tuple(params.dry_sequence_breakers))
    return DrySettings(params.dry_multiplier, params.dry_base, *limits)
