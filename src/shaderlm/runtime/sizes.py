"""How much memory a model takes on a device, and what its limits allow. Reads configs and plans, allocates nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..compile.plan import NONE, BufferSpec, Plan
from ..errors import TooLargeError
from ..gpu.caps import DeviceCaps, size
from ..graph.batch import IMAGE_WORDS, PAGE
from ..models.config import Config
from .pages import MAX_SEQUENCES, pages_for, table_stride
from .runner import FIRST_PAGES, MAX_OUTPUTS
from .states import FIRST_STATES

FIRST_POSITIONS = 2048  # of the rope table


def cache_format(caps: DeviceCaps) -> str:
    """The format of keys and values in the cache, unless another one is asked for."""
    return "f16" if caps.policy.half_cache else "f32"


def cache_row(config: Config, cache: str) -> int:
    """Bytes of one position in the cache of a layer's keys, or of its values, where they are most; at least 1."""
    return max(1, config.kv_width * (2 if cache == "f16" else 4))


def power_of_two(most: int) -> int:
    """The largest one up to `most`, and at least 1."""
    return 1 << (max(1, most).bit_length() - 1)


def max_context(config: Config, caps: DeviceCaps, cache: str) -> int:
    """Positions for which the cache of a layer and the rope table still fit one binding."""
    per_position = (cache_row(config, cache), *(4 * rope.rotary for rope in config.ropes.values()))
    return caps.max_operand // max(per_position) // PAGE * PAGE


def max_tokens(config: Config, caps: DeviceCaps) -> int:
    """Rows of a step: a power of two, no more than the policy's and than lets every hidden tensor fit one binding."""
    heads = (config.heads + 2 * config.kv_heads) * config.head_width
    widest = max(config.hidden, 2 * config.ffn, heads, config.layers * config.layer_input)
    if config.recurrent:  # layers without attention multiply their input with as many rows; queries may have gates
        delta, scan, gates = config.delta, config.scan, config.heads * config.head_width
        rows = delta.channels + delta.values + 2 * delta.value_heads if delta else 3 * config.hidden
        widest = max(
            widest, scan.projected if scan else rows, (config.heads + 2 * config.kv_heads) * config.head_width + gates
        )
    return power_of_two(min(caps.policy.max_prefill_tokens, caps.max_operand // (4 * widest)))


def max_outputs(config: Config, caps: DeviceCaps) -> int:
    """Rows of a step that give logits: a power of two, as many as let the logits fit one binding."""
    return power_of_two(min(MAX_OUTPUTS, caps.max_operand // (4 * config.vocabulary)))


def pages_of(tokens: int) -> int:
    """Pages of the pool of one conversation with so many tokens."""
    return max(FIRST_PAGES, pages_for(tokens))


def input_sizes(config: Config, caps: DeviceCaps) -> dict[str, int]:
    """Bytes of what every step reads beside weights, keys and values, by the names in plans."""
    tokens, images = max_tokens(config, caps), config.images
    of_images = {
        "image_rows": 4 * IMAGE_WORDS * tokens,
        "features": 4 * tokens * images.levels * config.hidden if images else 0,
    }
    return {
        **(of_images if images else {}),
        NONE: 16,
        "batch": 16 * (1 + tokens),
        "outputs": 32 * max_outputs(config, caps),
        "hidden": 4 * tokens * config.hidden,
        "tokens": 4 * MAX_SEQUENCES,
        "page_table": 4 * MAX_SEQUENCES * table_stride(pages_for(config.context), config.recurrent),
    }


def weights_of(plans: Iterable[Plan]) -> dict[str, BufferSpec]:
    """Every weight that some plans read."""
    return {name: spec for plan in plans for name, spec in plan.of_role("weight").items()}


@dataclass(frozen=True)
class Memory:
    """Bytes that a model takes on a device."""

    weights: int
    cache: int  # keys and values, and states of recurrent layers
    scratch: int  # what is kept between dispatches, inputs, logits, tables

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.scratch


def memory_of(bodies: Iterable[Plan], heads: Iterable[Plan], config: Config, caps: DeviceCaps, tokens: int) -> Memory:
    """What the buffers of these plans take with so many tokens in the cache. Plans share what has the same name."""
    bodies = list(bodies)
    plans = [*bodies, *heads]
    rows = {name: spec.nbytes for plan in bodies for name, spec in plan.of_role("state").items()}
    sizes = input_sizes(config, caps)
    for plan in plans:
        for name, spec in plan.buffers.items():
            if spec.role in ("scratch", "output"):
                sizes[name] = max(sizes.get(name, 0), spec.nbytes)
    positions = min(config.context, max(FIRST_POSITIONS, 2 * tokens))
    scratch = sum(sizes.values()) + positions * sum(4 * rope.rotary for rope in config.ropes.values())
    weights = sum(spec.nbytes for spec in weights_of(plans).values())
    states = {name: spec.nbytes for plan in bodies for name, spec in plan.of_role("recurrent").items()}
    scratch += sum(states.values())  # by way of which a row of them is copied
    cache = sum(rows.values()) * PAGE * pages_of(tokens) + sum(states.values()) * FIRST_STATES
    return Memory(weights, cache, scratch)


def check_memory(needed: Memory, tokens: int, caps: DeviceCaps) -> None:
    """Refuse what cannot fit, where the size of the device's memory is known."""
    if caps.heap and needed.total > caps.heap:
        parts = f"weights {size(needed.weights)}, cache {size(needed.cache)}, scratch {size(needed.scratch)}"
        raise TooLargeError(
            f"{tokens:,} tokens of context need {size(needed.total)} ({parts}); {caps.name} has {size(caps.heap)}. "
            "Ask for a shorter context, or take a smaller model"
        )
