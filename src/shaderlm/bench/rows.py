"""Times the products of one layer over the number of rows, as a model runs them: what `bench rows` shows.

The rows of a step are padded to a bucket, the next power of two, and its kernels find the true number in a buffer.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.table import Table

from ..compile.execute import lower
from ..compile.lowering import Lowering
from ..compile.timing import Clock, Filler, Operands, Sets, sets_for, time_sets
from ..compile.tuner import product_of
from ..compile.tuning import Tuning
from ..engine.planning import step_graph
from ..gpu import Device, DeviceCaps, Program
from ..graph.batch import contiguous_batch
from ..graph.graph import Node
from ..graph.ops import label
from ..models.architecture import Architecture
from ..models.config import Config
from ..runtime.runner import bucket
from ..runtime.sizes import max_tokens
from ..version import __version__

# Buckets, and what lies between two of them.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MAX_RATIO = 1.15  # times the next larger bucket: what fewer rows may take
SAMPLE_SECONDS, SAMPLES, WARM_UP_SECONDS = 0.008, 7, 0.004


@dataclass(frozen=True)
class Product:
    """A product of a layer: microseconds of one call, with everything that its route runs."""

    op: str  # with prologue and epilogue
    K: int
    N: int
    route: str
    us: float


@dataclass(frozen=True)
class Measured:
    """The products of one layer for a number of rows."""

    rows: int
    bucket: int
    products: tuple[Product, ...]

    @property
    def us(self) -> float:
        """Of all products."""
        return round(sum(product.us for product in self.products), 3)

    @property
    def us_per_row(self) -> float:
        """Of all products, for each row."""
        return self.us / self.rows


def measure(
    device: Device,
    kind: Architecture,
    config: Config,
    rows: Sequence[int],
    tuning: Tuning | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """One layer of a model for each number of rows. Every product is timed for all of them in turns."""
    caps = device.caps
    lowering = Lowering(caps, "fast", tuning)
    one_layer = replace(config, layers=1)
    by_shape: dict[tuple[int, int], list[tuple[int, Node]]] = {}  # K, N: the same weights for every number of rows
    for count in rows:
        graph = step_graph(kind, one_layer, caps, bucket(count), lowering.unsupported_reason)
        for node in map(product_of, graph.nodes):
            if node.op == "linear":
                by_shape.setdefault((node.dims["K"], node.dims["N"]), []).append((count, node))
    products: dict[int, list[Product]] = {count: [] for count in rows}
    fill = Filler()
    with closing(Clock(device, WARM_UP_SECONDS)) as clock:
        for (K, N), nodes in by_shape.items():
            say(f"products of {K}×{N}")
            for (count, _), product in zip(nodes, _timed(clock, fill, lowering, nodes), strict=True):
                products[count].append(product)
    return [Measured(count, bucket(count), tuple(products[count])) for count in rows]


def _timed(clock: Clock, fill: Filler, lowering: Lowering, nodes: Sequence[tuple[int, Node]]) -> list[Product]:
    """A product of several numbers of rows, over the same weights."""
    device = clock.device
    programs = [_program(lowering, node, count) for count, node in nodes]
    device.compile(step for program in programs for step in program.steps)
    streamed = sum(size for name, size in programs[0].buffers.items() if _is_weight(name) and isinstance(size, int))
    with closing(Operands(device, fill, sets_for(device, streamed))) as operands:
        works: list[Sets] = []
        for i, ((_, node), program) in enumerate(zip(nodes, programs, strict=True)):
            weights = frozenset(name for name in program.buffers if _is_weight(name))
            keys = {name: name if name in weights else f"{i}.{name}" for name in program.buffers}
            works.append([[bound] for bound in operands.bind(program, node.dims, weights, keys)])
        times = time_sets(clock, works, SAMPLE_SECONDS, SAMPLES)
    return [_product(lowering, node, seconds) for (_, node), seconds in zip(nodes, times, strict=True)]


def _product(lowering: Lowering, node: Node, seconds: float) -> Product:
    route, config, *_ = lowering.route(node)
    name = f"{route.name}/{config}" if config else route.name
    return Product(label(node.op, node.dims), node.dims["K"], node.dims["N"], name, round(1e6 * seconds, 3))


def _is_weight(name: str) -> bool:
    """Weights rotate; inputs come from the kernel before, which may have left them in a cache."""
    return name.startswith(("weight", "scales"))


def _program(lowering: Lowering, node: Node, rows: int) -> Program:
    """A node as models run it, with so many rows in its batch."""
    choice = lowering.route(node)
    program = lower(choice.route, node.dims, lowering.caps, {}, launch_list=choice.launch_list)
    if "batch" not in program.buffers:
        return program
    batch = contiguous_batch(0, rows, tokens=node.dims["tokens"]).reshape(-1)
    return replace(program, buffers={**program.buffers, "batch": batch})


def usual_rows(config: Config, caps: DeviceCaps) -> tuple[int, ...]:
    """ROWS, as far as a step of this model goes on a device."""
    return tuple(count for count in ROWS if count <= max_tokens(config, caps))


@dataclass(frozen=True)
class Check:
    """What must hold of a measured number of rows, against the next larger bucket."""

    rows: int
    next_bucket: int
    time_ratio: float  # time of these rows / time of the next larger bucket
    per_row_ratio: float | None  # time per row of the next bucket / time per row of this one; None between buckets

    @property
    def problems(self) -> list[str]:
        """Fewer rows must take at most MAX_RATIO times as long, and a row of a larger bucket less time."""
        lines = []
        if self.time_ratio > MAX_RATIO:
            lines.append(f"{self.rows} rows take {self.time_ratio:.2f} × the time of {self.next_bucket}")
        if self.per_row_ratio is not None and self.per_row_ratio >= 1:
            ratio = f"{self.per_row_ratio:.2f} × the time of a row of {self.rows}"
            lines.append(f"a row of {self.next_bucket} takes {ratio}")
        return lines


def checks(measured: Sequence[Measured]) -> list[Check]:
    """Every number of rows that has a larger bucket among those measured."""
    full = [each for each in measured if each.rows == each.bucket]
    checked = []
    for each in measured:
        larger = next((other for other in full if other.rows > each.rows), None)
        if larger is not None:
            per_row = larger.us_per_row / each.us_per_row if each in full else None
            checked.append(Check(each.rows, larger.rows, each.us / larger.us, per_row))
    return checked


def record(model: str, measured: Sequence[Measured], caps: DeviceCaps) -> dict[str, Any]:
    """A model's times, for programs."""
    return {
        "model": model,
        "version": __version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": caps.name,
        "implementation": caps.implementation,
        "driver": caps.driver,
        "rows": [{**asdict(each), "us": each.us} for each in measured],
        "checks": [{**asdict(each), "holds": not each.problems} for each in checks(measured)],
    }


def table(model: str, measured: Sequence[Measured], caps: DeviceCaps) -> Table:
    """For people: each product, all of them, and against the next larger bucket."""
    names = [f"{product.K}×{product.N} µs" for product in measured[-1].products]
    title = f"products of one layer · {model} · {caps.name} ({caps.implementation})"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("rows", *names, "all µs", "µs per row", "of next bucket", "routes"):
        shown.add_column(name, justify="left" if name == "routes" else "right", no_wrap=name != "routes")
    against = {each.rows: each for each in checks(measured)}
    for each in measured:
        check = against.get(each.rows)
        times = [f"{product.us:,.1f}" for product in each.products]
        times += [""] * (len(names) - len(times))
        ratio = f"{check.time_ratio:.2f}" if check else "–"
        routes = ", ".join(dict.fromkeys(product.route for product in each.products))
        shown.add_row(str(each.rows), *times, f"{each.us:,.1f}", f"{each.us_per_row:,.2f}", ratio, routes)
    return shown


def verdict(measured: Sequence[Measured]) -> list[str]:
    """Whether what must hold does hold, and where it does not."""
    every = checks(measured)
    problems = [line for each in every for line in each.problems]
    most = max((each.time_ratio for each in every), default=0.0)
    limit = f"the next larger bucket (limit {MAX_RATIO})"
    right = f"rows take at most {most:.2f} × the time of {limit}, and time per row falls"
    return [f"NOT HELD: {line}" for line in problems] or [right]
