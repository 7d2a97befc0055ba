"""The plans of a model's step: from a batch to hidden states, and from there to logits and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..graph.fuse import RejectedFusion, fuse
from ..graph.graph import Graph, Node, Tensor
from ..graph.ops import resolve
from ..graph.sampling import MAX_LOGPROBS
from ..models.architecture import Architecture
from ..models.config import Config, StepSpec
from .lowering import Lowering
from .plan import Plan, concat


class Head(NamedTuple):
    """What a head is made for: rows that it gives, rows of the step, and what is done with them.

    kind: "hidden" (no logits: the states after the output norm), "logits" (nothing is done with them), "greedy" (every
    row takes the largest), "sample" (each row as its record says), "adjusted" (sampled after penalties, biases and
    masks, and counted for penalties; log probabilities of the logits as they were), "scores" (nothing is sampled: log
    probabilities of tokens that are known).
    """

    rows: int
    tokens: int
    kind: str
    paged: bool = True


def _step_name(tokens: int) -> str:
    """What people call a step."""
    return "decode" if tokens == 1 else "prefill"


def body_plan(
    lowering: Lowering, graph: Graph, rejected: tuple[RejectedFusion, ...], step: StepSpec, config: Config
) -> Plan:
    """The plan of a step's fused graph."""
    return lowering.plan(_step_name(step.tokens), graph, rejected, step.tokens, rope_tables(config))


def head_plan(
    lowering: Lowering, graph: Graph, rejected: tuple[RejectedFusion, ...], head: Head, config: Config
) -> Plan:
    """The plan of a head's fused graph, with the sampler that its kind asks for."""
    if head.kind == "adjusted":
        graph = _with_logprobs(_with_sampler(_with_adjustments(graph, head, config), head, config), head, config)
    elif head.kind == "scores":
        graph = _with_logprobs(graph, head, config, tokens="targets")
    elif head.kind not in ("logits", "hidden"):
        graph = _with_sampler(graph, head, config)
    return lowering.plan("head", graph, rejected, head.tokens)


def step_plan(
    lowering: Lowering,
    architecture: Architecture,
    config: Config,
    step: StepSpec,
    head: Head,
    fusions: Sequence[str] | None = None,
) -> Plan:
    """The whole plan of a step, from the batch to the tokens, as one."""
    tail = architecture.head(config, head.rows, head.tokens, logits=head.kind != "hidden")
    graphs = (architecture.build(config, step), tail)
    body, ending = (fuse(graph, fusions, lowering.unsupported_reason) for graph in graphs)
    parts = (body_plan(lowering, *body, step, config), head_plan(lowering, *ending, head, config))
    return concat(_step_name(step.tokens), parts)


def rope_tables(config: Config) -> Mapping[str, Mapping[str, Any]]:
    """The formulas of rope tables: row p has (cos, sin) of p / linear_scale · theta^(−2i / rotary) / factors[i].

    `yarn` (the fields of `graph.reference.Yarn`) and `magnitude` are there where a model has them.
    """
    tables: dict[str, Mapping[str, Any]] = {}
    for name, rope in config.ropes.items():
        about: dict[str, Any] = {"rotary": rope.rotary, "theta": rope.theta, "linear_scale": rope.linear_scale}
        about["factors"] = rope.factors_for(config.context)
        if rope.yarn is not None:
            about["yarn"] = rope.yarn._asdict()
        if rope.magnitude != 1:
            about["magnitude"] = rope.magnitude
        tables[name] = {"formula": "rope", **about}
    return tables


def _with_sampler(graph: Graph, head: Head, config: Config) -> Graph:
    """A head's graph, and tokens sampled from its logits. Records of sampled rows move on to the next position."""
    counted = head.kind == "adjusted"
    dims = {"greedy": head.kind == "greedy", "advance": True, "paged": head.paged, "counted": counted, "pages": 1}
    inputs = {"logits": "adjusted" if counted else "logits", "outputs": "outputs", "batch": "batch", "tokens": "tokens"}
    inputs |= {"page_table": "page_table"} if head.paged else {}
    outputs = {"tokens": "tokens", "batch": "batch"} | ({"counts": "counts"} if counted else {})
    tokens, page_table = Tensor("tokens", (1,), "state", "u32"), Tensor("page_table", (1,), "input", "u32")
    tensors = (tokens, page_table) if head.paged else (tokens,)
    inputs |= {"counts": "counts"} if counted else {}
    return _with_op(graph, head, config, "sample", dims, inputs, outputs, tensors)


def _with_adjustments(graph: Graph, head: Head, config: Config) -> Graph:
    """A head's graph, and its logits after penalties, biases and masks: `adjusted` [rows, vocabulary]."""
    tensors = (
        Tensor("adjustments", (head.rows, 8), "input", "u32"),
        Tensor("counts", (1, config.vocabulary), "state", "u32"),
        Tensor("biases", (1, 2), "input", "u32"),
        Tensor("masks", (1, -(-config.vocabulary // 32)), "input", "u32"),
        Tensor("adjusted", (head.rows, config.vocabulary), "hidden"),
    )
    names = ("logits", "adjustments", "batch", "counts", "biases", "masks")
    inputs = dict(zip(names, names, strict=True))
    return _with_op(graph, head, config, "adjust_logits", {}, inputs, {"out": "adjusted"}, tensors)


def _with_logprobs(graph: Graph, head: Head, config: Config, tokens: str = "tokens") -> Graph:
    """A head's graph, and log probabilities of the logits as they were: `logprobs` [rows, 1 + 20, 2].

    `tokens` has those that are reported of each output, by its slot: what was sampled, or "targets", which are known.
    """
    out = Tensor("logprobs", (head.rows, 1 + MAX_LOGPROBS, 2), "hidden", "u32")
    records = Tensor("adjustments", (head.rows, 8), "input", "u32")
    targets = () if tokens in graph.tensors else (Tensor(tokens, (head.rows,), "input", "u32"),)
    names = ("logits", "outputs", "adjustments", "batch")
    inputs = dict(zip(names, names, strict=True)) | {"tokens": tokens}
    tensors = (out, records, *targets)
    graph = _with_op(graph, head, config, "logprobs", {}, inputs, {"out": "logprobs"}, tensors)
    return replace(graph, outputs=(*graph.outputs, "logprobs"))


def _with_op(
    graph: Graph,
    head: Head,
    config: Config,
    op: str,
    dims: Mapping[str, Any],
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    tensors: Sequence[Tensor],
) -> Graph:
    """A graph with one more op of the sampler, which reads records of the step beside tensors of its own."""
    shape = {"rows": head.rows, "width": config.vocabulary, "tokens": head.tokens, "slots": 1}
    batch = Tensor("batch", (1 + head.tokens, 4), "state", "u32")
    records = Tensor("outputs", (head.rows, 8), "input", "u32")
    node = Node(op, resolve(op, {**shape, **dims}), inputs, outputs, "sample")
    known = {**graph.tensors, **{tensor.name: tensor for tensor in (batch, records, *tensors)}}
    return Graph(known, (*graph.nodes, node), graph.outputs).check()
