"""Times what `bench kernels` compares: for each comparison both routes in turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from ..compile.roofline import Roofline, measure_roofline, uses_matrix_units
from ..compile.timing import Clock, Filler
from ..compile.workload import program_of, time_in_turns
from ..errors import DeviceError, RouteError
from ..gpu import Device
from .comparisons import Comparison

# A software adapter is only asked for what it can do in about a second.
SOFTWARE_FLOPS = 200_000_000
SOFTWARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Row:
    """A measured comparison; times in seconds per call."""

    comparison: Comparison
    before: float
    after: float
    matrix_units: bool  # the new route multiplies by them
    roofline: Roofline

    @property
    def ratio(self) -> float:
        """How many times faster the new route is."""
        return self.before / self.after

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the new route, counting each byte once."""
        return self.comparison.nbytes / self.after

    @property
    def rate(self) -> float:
        """FLOP per second of the new route."""
        return self.comparison.flops / self.after

    @property
    def roof_share(self) -> float:
        """Of the least time that the measured roofs allow for this work, the part of the new route's time: 0 … 1."""
        c = self.comparison
        return self.roofline.floor_us(c.nbytes, c.flops, self.matrix_units) / (1e6 * self.after)


def too_large(comparison: Comparison) -> bool:
    """Beyond what a software adapter does in reasonable time."""
    return comparison.flops > SOFTWARE_FLOPS or comparison.nbytes > SOFTWARE_BYTES


@dataclass(frozen=True)
class LeftOut:
    """A comparison that this device cannot make, and why."""

    comparison: Comparison
    reason: str


def measure(device: Device, chosen: list[Comparison]) -> Iterator[Row | LeftOut]:
    """Each comparison as it is measured; one that does not fit the device is left out with its reason."""
    roofline = measure_roofline(device)
    fill = Filler()
    with closing(Clock(device)) as clock:
        for comparison in chosen:
            try:
                before, after = time_in_turns(clock, [comparison.before, comparison.after], fill)
            except (RouteError, DeviceError) as problem:
                yield LeftOut(comparison, str(problem))
            else:
                steps = [step for routed in comparison.after for step in program_of(routed, device.caps).steps]
                yield Row(comparison, before, after, any(map(uses_matrix_units, steps)), roofline)
