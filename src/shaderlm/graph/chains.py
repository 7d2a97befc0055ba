"""Chains: primitives that a kernel runs at once. Everything about a chain follows from its parts.

NumPy runs the parts in order, their FLOP add up, what is touched of an operand is what a part touches of it, and the
conditions are those of the parts. A chain has no formula, cost or reference of its own. `fuse` finds chains in graphs,
by the same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from . import conditions
from .formulas import Array, Operands
from .primitives import LINEAR, NORM, PRIMITIVES, REQUIRED, SCORES, Op, of

Dims = Mapping[str, Any]


class Is(NamedTuple):
    """A dim of a part that has this value in a chain, whatever the chain's dims are."""

    value: Any


# A dim of a part: another name in the chain, a value, or a formula.
Dim = str | Is | Callable[[Dims], Any]


def always(dims: Dims) -> bool:
    """Of parts that a chain always has."""
    return True


def where(**values: Any) -> Callable[[Dims], bool]:
    """Of parts that a chain has where its dims have these values."""
    return lambda dims: all(dims[name] == value for name, value in values.items())


@dataclass(frozen=True)
class Part:
    """A primitive or a chain inside of a chain.

    `wires` says what its operands are called in the chain: "x=q weight -> out=normed" reads the wire q as x and weight
    as it is, and gives the wire normed. A wire may be given again: later parts read the last one. `dims` has those
    that are not the chain's dims of the same name. `when`: is it there? A part with `implied` changes nothing with the
    chain's default dims, and a graph need not have it; a node of which `implied` is false is left outside.
    """

    op: str
    wires: str
    dims: Mapping[str, Dim] = field(default_factory=dict)
    when: Callable[[Dims], bool] = always
    implied: Callable[[Dims], bool] | None = None

    @cached_property
    def reads(self) -> dict[str, str]:
        """Operands and their wires."""
        return _named(self.wires.partition("->")[0])

    @cached_property
    def gives(self) -> dict[str, str]:
        """Results and their wires."""
        return _named(self.wires.partition("->")[2])


def _named(text: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in text.split())
    return {name: wire or name for name, _, wire in pairs}


@dataclass(frozen=True)
class Chain:
    """Parts in the order in which they run. `outputs`: wires that others may read. `dims` as those of an `Op`.

    `swap`: two operands that may change places. `conditions` are about several parts.
    """

    name: str
    parts: tuple[Part, ...]
    dims: Mapping[str, Any]
    outputs: tuple[str, ...] = ("out",)
    swap: tuple[str, str] | None = None
    conditions: tuple[conditions.Condition, ...] = ()

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Wires that parts read before one gives them."""
        inputs: dict[str, None] = {}
        written: set[str] = set()
        for part in self.parts:
            inputs |= dict.fromkeys(wire for wire in part.reads.values() if wire not in written)
            written |= set(part.gives.values())
        return tuple(inputs)

    def of(self, dims: Dims) -> list[PresentPart]:
        """The parts that are there, what they are, and their dims."""
        return self._shape(tuple(dims.items()))[0]

    @cached_property
    def _shape(self) -> Callable[[tuple[tuple[str, Any], ...]], tuple[list[PresentPart], dict[str, list[Touch]]]]:
        """For dims: `of`, and which parts touch a wire. Worked out once for a shape: chains are nested."""

        @lru_cache(maxsize=64)
        def shape(items: tuple[tuple[str, Any], ...]) -> tuple[list[PresentPart], dict[str, list[Touch]]]:
            dims = dict(items)
            parts = [(part, self.member(part), self.dims_of(part, dims)) for part in self.parts if part.when(dims)]
            touches: dict[str, list[Touch]] = {}
            written: set[str] = set()
            for part, op, part_dims in parts:
                # A wire that is given again is another one, unless it is a state, which parts change in place.
                pairs = {pair for pair in part.reads.items() if pair[1] not in written or pair[1] in self.outputs}
                pairs |= {pair for pair in part.gives.items() if pair[1] in self.outputs}
                for name, wire in pairs:
                    touches.setdefault(wire, []).append((op, name, part_dims))
                written |= set(part.gives.values())
            return parts, touches

        return shape

    def member(self, part: Part) -> Op | Chain:
        """What a part is: a chain may be named like its main primitive."""
        return PRIMITIVES[part.op] if part.op == self.name or part.op not in CHAINS else CHAINS[part.op]

    def dims_of(self, part: Part, dims: Dims) -> dict[str, Any]:
        """The dims of a part, from those of the chain."""
        values: dict[str, Any] = {}
        for name, default in self.member(part).dims.items():
            dim = part.dims.get(name, name)
            if isinstance(dim, Is):
                values[name] = dim.value
            elif callable(dim):
                values[name] = dim(dims)
            elif dim in dims:
                values[name] = dims[dim]
            else:
                values[name] = default(values) if callable(default) else default
        return values

    def compute(self, dims: Dims, operands: Operands) -> dict[str, Array]:
        """The parts in NumPy, one after the other."""
        wires, written = dict(operands), set[str]()
        for part, op, part_dims in self.of(dims):
            results = op.compute(part_dims, {name: wires[wire] for name, wire in part.reads.items() if wire in wires})
            for name, value in results.items():
                wires[part.gives[name]] = value
                written.add(part.gives[name])
        return {name: wires[name] for name in self.outputs if name in written}

    def flops(self, dims: Dims, position: int) -> int:
        """Of all parts."""
        return sum(op.flops(part_dims, position) for _, op, part_dims in self.of(dims))

    def part(self, operand: str, dims: Dims, position: int) -> float:
        """What is touched of an operand, by the part that touches most of it. Of "", which kernels keep, all."""
        touches = self._shape(tuple(dims.items()))[1].get(operand, ())
        return max((op.part(name, part_dims, position) for op, name, part_dims in touches), default=1.0)

    def wrong(self, dims: dict[str, Any]) -> str | None:
        """Where dims do not go together: those of the chain, else those of a part."""
        for condition in self.conditions:
            if reason := condition(dims):
                return reason
        return next((reason for _, op, part_dims in self.of(dims) if (reason := op.wrong(part_dims))), None)


PresentPart = tuple[Part, Op | Chain, dict[str, Any]]
Touch = tuple[Op | Chain, str, dict[str, Any]]  # a part's op, its name for a wire, its dims


# The chains ------------------------------------------------------------------------------------------------------


def _values(d: Dims) -> int:
    return int(d["tokens"] * d["heads"] * d["width"])


_EACH: Mapping[str, Dim] = {"count": _values}
_RESULTS: Mapping[str, Dim] = {"count": lambda d: d["tokens"] * d["N"]}

# Queries, keys and values on their way to attention. They may be columns of wider rows.
_ROTATED = {
    **dict.fromkeys(("tokens", "Hq", "Hkv", "D"), REQUIRED),
    "rotary": of("D"),
    "interleaved": False,
    "cache": "f32",
    **{f"{name}_first": 0 for name in "qkv"},
    "q_stride": lambda dims: dims["Hq"] * dims["D"],
    **{f"{name}_stride": lambda dims: dims["Hkv"] * dims["D"] for name in "kv"},
}


def _columns(name: str, heads: str) -> Part:
    """Columns of wider rows: the heads of q, k or v."""
    dims: dict[str, Dim] = {"width": f"{name}_stride", "first": f"{name}_first"}
    dims["count"] = lambda d: d[heads] * d["D"]
    return Part("slice", f"x={name} -> out={name}", {**dims, "step": Is(1)}, implied=_in_quads)


def _in_quads(d: Dims) -> bool:
    """Kernels read heads in quads of one row."""
    return bool(d["step"] == 1 and d["first"] % 4 == 0 and d["width"] % 4 == 0)


def _without(name: str, heads: str) -> dict[str, Dim]:
    """Dims of a part whose q or k is a tensor of its own."""
    return {f"{name}_first": Is(0), f"{name}_stride": lambda d: d[heads] * d["D"]}


def _gated(op: str, **values: str) -> tuple[Part, ...]:
    """Gate and up take turns in the results of a product."""

    def rows(d: Dims) -> int:
        return int(d["tokens"] * d.get("used", 1))

    pairs: dict[str, Dim] = {"tokens": rows, "width": "N", "count": lambda d: d["N"] // 2, "step": Is(2)}
    gate, up = (
        Part("slice", f"x=out -> out={name}", {**pairs, "first": Is(first)}, where(**values))
        for first, name in enumerate(("gate", "up"))
    )
    return gate, up, Part(op, "a=gate b=up -> out", {"count": lambda d: rows(d) * d["N"] // 2}, where(**values))


def _taken(stride: Dim, first: Dim, count: Dim) -> dict[str, Dim]:
    """Dims of a slice: so many columns, from one on, of rows that are so wide."""
    return {"width": stride, "first": first, "count": count, "step": Is(1)}


def _row_values(d: Dims) -> int:
    return int(d["heads"] * d["width"])


def _head_values(d: Dims) -> int:
    return int(d["H"] * d["D"])


def _channels(d: Dims) -> int:
    return int(2 * d["Hk"] * d["Dk"] + d["Hv"] * d["Dv"])


def _third(name: str, number: int) -> Part:
    """Queries, keys or values, which are columns of one product."""
    dims = _taken(lambda d: 3 * _head_values(d), lambda d: number * _head_values(d), _head_values)
    return Part("slice", f"x -> out={name}", dims)


_THIRDS = tuple(_third(name, i) for i, name in enumerate("qkv"))
_WIDTH: Mapping[str, Dim] = {"count": lambda d: d["tokens"] * d["width"]}
_ROWS: Mapping[str, Dim] = {"heads": Is(1), "width": "K"}  # of the inputs of a product
_NORMED: Mapping[str, Dim] = {**_ROWS, "residual": Is(False)}
_STARTS: Mapping[str, Dim] = {
    "q_first": lambda d: 0,
    "k_first": lambda d: d["Hq"] * d["D"],
    "v_first": lambda d: (d["Hq"] + d["Hkv"]) * d["D"],
    **dict.fromkeys(("q_stride", "k_stride", "v_stride"), "N"),
    "interleaved": lambda d: True,
}
# Dims of a product inside of a chain that has heads of its own.
_PLAIN: Mapping[str, Dim] = {
    "prologue": Is("none"),
    "eps": Is(1e-6),
    **dict.fromkeys(("Hq", "Hkv", "D", "rotary"), Is(0)),
    "cache": Is("f32"),
}

_TABLE = (
    Chain(
        "embedding",
        (
            Part("embedding", "batch tokens weight -> out"),
            Part("scale", "x=out -> out", {"count": lambda d: d["tokens"] * d["K"]}, lambda d: d["factor"] != 1),
        ),
        {**PRIMITIVES["embedding"].dims, "factor": 1.0},
    ),
    Chain(
        "rms_norm_mul",
        (
            Part("rms_norm", "x batch -> out"),
            Part("mul", "a=out b=weight -> out", {"count": _values, "period": "width"}),
            Part("add", "a=residual b=out -> out", _EACH, where(residual=True)),
            Part("mul", "a=out b=scale -> out", {**_EACH, "period": Is(1)}, where(scaled=True)),
        ),
        {**NORM, "residual": False, "scaled": False},
        conditions=(conditions.sums_are_scaled,),
    ),
    Chain(
        "add_rms_norm",
        (Part("add", "a b -> out=sum", _EACH), Part("rms_norm_mul", "x=sum weight batch -> out")),
        NORM,
        ("sum", "out"),
        swap=("a", "b"),
    ),
    Chain(
        "rms_norm_add_rms_norm",
        (
            Part("rms_norm_mul", "x=b weight -> out=normed"),
            Part("add_rms_norm", "a b=normed weight=next_weight batch -> sum out"),
        ),
        NORM,
        ("sum", "out"),
    ),
    # `rounded` and the prologue `int16_activations` say how numbers lie between two products of one row, which nobody
    # else reads.
    Chain(
        "linear",
        (
            Part("rms_norm_mul", "x weight=norm_weight -> out=x", _NORMED, where(prologue="rms_norm")),
            Part(
                "rms_norm_add_rms_norm",
                "a=skip b=x weight=post_weight next_weight=norm_weight -> sum out=x",
                _ROWS,
                where(prologue="rms_norm_add_rms_norm"),
            ),
            Part(
                "rms_norm_mul",
                "x weight=post_weight residual=skip -> out=sum",
                {**_ROWS, "residual": Is(True)},
                where(prologue="rms_norm_add"),
            ),
            Part("linear", "x weight bias batch -> out", when=lambda d: d["prologue"] != "rms_norm_add"),
            Part("linear", "x=sum weight bias batch -> out", when=where(prologue="rms_norm_add")),
            Part("add", "a=residual b=out -> out", _RESULTS, where(epilogue="add")),
            *_gated("silu_mul", epilogue="silu_mul"),
            *_gated("gelu_mul", epilogue="gelu_mul"),
            Part("gelu_mul", "a=out b=residual -> out", _RESULTS, where(epilogue="gelu_residual")),
            *(Part(op, "x=out -> out", _RESULTS, where(epilogue=op)) for op in ("gelu", "gelu_erf")),
            Part(
                "rope_kv_write",
                "q=out k=out v=out batch table k_cache v_cache -> out k_cache v_cache",
                _STARTS,
                where(epilogue="rope_kv_write"),
            ),
        ),
        {
            **{name: default for name, default in LINEAR.items() if name != "batched"},
            "prologue": "none",  # what is done with x before the product
            "epilogue": "none",  # what is done with the sums
            "eps": 1e-6,  # of the prologue
            **dict.fromkeys(("Hq", "Hkv", "D"), 0),  # of the epilogue rope_kv_write, as far as "cache"
            "rotary": of("D"),
            "cache": "f32",
            "rounded": False,  # out has 16 bits, in blocks of 32, for a product with the prologue int16_activations
            "batched": False,  # the true number of rows is in the batch
        },
        ("out", "sum", "k_cache", "v_cache"),
        conditions=(conditions.rows_are_pairs, conditions.rows_are_heads, conditions.rounded_in_blocks),
    ),
    Chain(
        "linear_experts",
        (
            Part("rms_norm_mul", "x weight=norm_weight -> out=x", _NORMED, where(prologue="rms_norm")),
            Part(
                "linear_experts",
                "x weight bias ids factors batch -> out",
                {"combine": lambda d: "sum" if d["combine"] == "sum" else "none"},
            ),
            *(part for op in conditions.EXPERT_GATES for part in _gated(op, combine=op)),
            Part("add", "a=residual b=out -> out", _RESULTS, where(residual=True)),
        ),
        {
            **{name: PRIMITIVES["linear_experts"].dims[name] for name in ("tokens", "experts", "used", "K", "N")},
            "format": "f32",
            "bias": False,
            "prologue": "none",  # what is done with x before the product
            "combine": "none",  # of the experts of a row
            "residual": False,
            "eps": 1e-6,  # of the prologue
            "batched": False,
        },
        conditions=(conditions.rows_are_pairs, conditions.sums_have_residuals, conditions.experts_prologue),
    ),
    Chain(
        "rope_kv_write",
        (
            *(_columns(name, heads) for name, heads in (("q", "Hq"), ("k", "Hkv"), ("v", "Hkv"))),
            Part("rope", "x=q batch table -> out", {"H": "Hq"}),
            Part("rope", "x=k batch table -> out=k", {"H": "Hkv"}),
            Part("kv_write", "k v batch k_cache v_cache -> k_cache v_cache"),
        ),
        _ROTATED,
        ("out", "k_cache", "v_cache"),
        conditions=(conditions.heads_are_grouped,),
    ),
    Chain(
        "rms_norm_rope_kv_write",
        (
            *(_columns(name, heads) for name, heads in (("q", "Hq"), ("k", "Hkv"))),
            Part("rms_norm_mul", "x=q weight=q_norm -> out=q", {"heads": "Hq", "width": "D"}),
            Part("rms_norm_mul", "x=k weight=k_norm -> out=k", {"heads": "Hkv", "width": "D"}),
            Part(
                "rope_kv_write",
                "q k v batch table k_cache v_cache -> out k_cache v_cache",
                {**_without("q", "Hq"), **_without("k", "Hkv")},
            ),
        ),
        {**_ROTATED, "eps": 1e-6},
        ("out", "k_cache", "v_cache"),
    ),
    # Queries alone, of layers that read the keys and values of another.
    Chain(
        "rms_norm_rope",
        (
            Part("slice", "x -> out=x", _taken("stride", "first", _head_values), implied=_in_quads),
            Part("rms_norm_mul", "x weight -> out=x", {"heads": "H", "width": "D"}),
            Part("rope", "x batch table -> out"),
        ),
        {**PRIMITIVES["rope"].dims, "eps": 1e-6, "first": 0, "stride": _head_values},
    ),
    Chain(
        "rms_norm_rope_attention",
        (
            Part(
                "rms_norm_rope_kv_write",
                "q k v q_norm k_norm batch table k_cache v_cache -> out=q k_cache v_cache",
            ),
            Part("attention", "q k_cache v_cache batch page_table sinks -> out"),
        ),
        {**_ROTATED, "eps": 1e-6, **SCORES},
        ("out", "k_cache", "v_cache"),
    ),
    Chain(
        "rms_norm_rope_attention_linear",
        (
            Part(
                "rms_norm_rope_attention",
                "q k v q_norm k_norm batch table k_cache v_cache page_table sinks -> out k_cache v_cache",
            ),
            Part("linear", "x=out weight bias residual -> out", _PLAIN),
        ),
        {
            **_ROTATED,
            "eps": 1e-6,
            **SCORES,
            "K": lambda dims: dims["Hq"] * dims["D"],
            "N": REQUIRED,
            "format": "f32",
            "bias": False,
            "epilogue": "none",  # or add: residual + y
        },
        ("out", "k_cache", "v_cache"),
        conditions=(conditions.heads_are_columns, conditions.nothing_or_added),
    ),
    # Layers with a state. What they read may be columns of wider rows: products that read one tensor are merged.
    Chain(
        "slice_short_conv",
        (
            Part("slice", "x -> out=columns", _taken("stride", "first", "width")),
            Part("short_conv", "x=columns weight batch page_table state -> out state"),
        ),
        {**PRIMITIVES["short_conv"].dims, "first": 0, "stride": of("width")},
        ("out", "state"),
    ),
    Chain(
        "mul_short_conv_mul",
        (
            *(
                Part("slice", f"x -> out={name}", _taken("stride", f"{name}_first", "width"))
                for name in ("before", "values", "after")
            ),
            Part("mul", "a=before b=values -> out=columns", _WIDTH),
            Part("short_conv", "x=columns weight batch page_table state -> out=mixed state", {"silu": Is(False)}),
            Part("mul", "a=after b=mixed -> out", _WIDTH),
        ),
        {
            **{name: dim for name, dim in PRIMITIVES["short_conv"].dims.items() if name != "silu"},
            "before_first": 0,
            "after_first": of("width"),
            "values_first": lambda d: 2 * d["width"],
            "stride": lambda d: 3 * d["width"],
        },
        ("out", "state"),
    ),
    Chain(
        "slice_gated_delta_rule",
        (
            *(
                Part("slice", f"x=factors -> out={name}", _taken("stride", f"{name}_first", "Hv"))
                for name in ("alpha", "beta")
            ),
            Part("gated_delta_rule", "x alpha beta decay batch page_table state -> out state"),
        ),
        {
            **PRIMITIVES["gated_delta_rule"].dims,
            "alpha_first": 0,
            "beta_first": of("Hv"),
            "stride": lambda d: 2 * d["Hv"],  # of the rows of factors
        },
        ("out", "state"),
    ),
    Chain(
        "mamba2_scan_silu_mul",
        (
            Part("slice", "x=projected -> out=gate", _taken("stride", "gate_first", lambda d: d["H"] * d["P"])),
            Part("slice", "x=projected -> out=deltas", _taken("stride", "deltas_first", "H")),
            Part("mamba2_scan", "x bias deltas factors batch page_table state -> out=y state"),
            Part("silu_mul", "a=gate b=y -> out", {"count": lambda d: d["tokens"] * d["H"] * d["P"]}),
        ),
        {
            **PRIMITIVES["mamba2_scan"].dims,
            "gate_first": 0,
            "deltas_first": lambda d: 2 * (d["H"] * d["P"] + d["G"] * d["N"]),
            "stride": lambda d: d["deltas_first"] + d["H"],  # of the rows of what is projected
        },
        ("out", "state"),
    ),
    Chain(
        "rms_norm_silu_mul",
        (
            Part("rms_norm_mul", "x weight batch -> out=normed", {"residual": Is(False)}),
            Part("slice", "x=gate -> out=gate", _taken("stride", "first", _row_values), implied=_in_quads),
            Part("silu_mul", "a=gate b=normed -> out", _EACH),
        ),
        {**NORM, "first": 0, "stride": _row_values},
    ),
    # All of one row between the products of a layer.
    Chain(
        "short_conv_gated_delta_rule",
        (
            Part("slice", "x -> out=x", _taken("stride", "first", _channels), implied=always),
            Part("slice", "x=gates -> out=gate", _taken("gates_stride", "gate_first", lambda d: d["Hv"] * d["Dv"])),
            *(
                Part("slice", f"x=gates -> out={name}", _taken("gates_stride", f"{name}_first", "Hv"))
                for name in ("alpha", "beta")
            ),
            Part(
                "short_conv",
                "x weight=conv_weight batch page_table state=conv_state -> out=mixed state=conv_state",
                {"width": _channels, "silu": Is(True)},
            ),
            Part("gated_delta_rule", "x=mixed alpha beta decay batch page_table state -> out=y state"),
            Part(
                "rms_norm_mul",
                "x=y weight=norm_weight batch -> out=y",
                {"heads": "Hv", "width": "Dv", "residual": Is(False)},
            ),
            Part("silu_mul", "a=gate b=y -> out", {"count": lambda d: d["tokens"] * d["Hv"] * d["Dv"]}),
        ),
        {
            **PRIMITIVES["gated_delta_rule"].dims,
            "kernel": REQUIRED,
            "eps": 1e-6,
            "first": 0,
            "stride": _channels,
            "gate_first": 0,
            "alpha_first": lambda d: d["Hv"] * d["Dv"] + d["Hv"],
            "beta_first": lambda d: d["Hv"] * d["Dv"],
            "gates_stride": lambda d: d["Hv"] * (d["Dv"] + 2),
        },
        ("out", "state", "conv_state"),
    ),
    # Images: rows of a span see each other.
    Chain(
        "slice_attend_spans",
        (*_THIRDS, Part("attend_spans", "q k v spans -> out")),
        PRIMITIVES["attend_spans"].dims,
    ),
    Chain(
        "slice_rope_by_row_attend_spans",
        (
            *_THIRDS,
            *(Part("rope_by_row", f"x={name} table -> out={name}") for name in "qk"),
            Part("attend_spans", "q k v spans -> out"),
        ),
        {**PRIMITIVES["attend_spans"].dims, "rotary": of("D")},
    ),
    Chain(
        "slice_sigmoid_mul",
        (
            Part("slice", "x=gate -> out=gate", _taken("stride", "first", "width")),
            Part("sigmoid_mul", "a=gate b batch -> out", _WIDTH),
        ),
        {"tokens": 1, "width": REQUIRED, "first": 0, "stride": of("width"), "batched": False},
    ),
)
CHAINS: Mapping[str, Chain] = {chain.name: chain for chain in _TABLE}
