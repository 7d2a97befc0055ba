"""Layers with a sliding window, as metadata describe them."""

from __future__ import annotations

from dataclasses import replace

from .config import LOCAL_ROPE, ROPE, Config, Layer, Metadata, Rope

_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


def all_layers(meta: Metadata, config: Config) -> Config:
    """Every layer has the window, if the file has one."""
    window = _window(meta, 0)
    return replace(config, per_layer=(Layer(window),) * config.layers) if window else config


def local_layers(
    meta: Metadata,
    config: Config,
    *,
    period: int,
    default: int | None = None,
    local_theta: float | None = None,
    local_rotary: int = 0,
    full_rope: str | None = ROPE,
) -> Config:
    """All but the last of every `period` layers have a window, unless the file has a pattern of its own.

    `default`: the window of files that have none; 0: there is no window then; None: files must have one.
    `local_theta`: layers with a window rotate by it, without scaling, and so many values of a head: `local_rotary`.
    `full_rope`: the table of layers without one.
    """
    window = _window(meta, default)
    local = _pattern(meta, config.layers, period)
    if not window:
        return config
    rope, table = None, ROPE
    if local_theta is not None:
        rope, table = Rope(local_rotary or config.rope.rotary, local_theta, config.rope.interleaved), LOCAL_ROPE
    if rope == config.rope:
        rope, table = None, ROPE
    layers = tuple(Layer(window, table) if each else Layer(rope=full_rope) for each in local)
    return replace(config, per_layer=layers, local_rope=rope)


def _window(meta: Metadata, default: int | None) -> int:
    """0 stands for none."""
    if default is None:
        return meta.whole(_WINDOW)
    return meta.whole(_WINDOW, default) if meta.get(_WINDOW, default) else 0


def _pattern(meta: Metadata, layers: int, period: int) -> list[bool]:
    """Which layers have the window: one truth value for each, or how often one has none."""
    pattern = meta.get(_PATTERN, period)
    if isinstance(pattern, list):
        if len(pattern) != layers or not all(isinstance(each, bool) for each in pattern):
            raise meta.wrong(_PATTERN, f"{layers} truth values, or a whole number", pattern)
        return pattern
    every = meta.whole(_PATTERN, period)
    return [i % every != every - 1 for i in range(layers)]
