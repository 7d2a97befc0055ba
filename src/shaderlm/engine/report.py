"""`LoadReport`: what was loaded, and onto which device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..gpu.caps import size


def counted(parameters: int) -> str:
    """In thousands, millions or billions."""
    unit, divisor = next((each for each in (("B", 1e9), ("M", 1e6)) if parameters >= each[1]), ("K", 1e3))
    return f"{parameters / divisor:,.1f} {unit}"


@dataclass(frozen=True)
class LoadReport:
    """What was loaded, onto which device, for `--verbose` and for Python."""

    name: str  # what it was loaded by; of a path, the name of the file or folder
    path: Path
    file_bytes: int
    architecture: str
    parameters: int
    context: int
    types: Mapping[str, int]  # tensors of each type in the file
    device: str
    cache: str
    precision: str
    weight_bytes: int  # on the device
    seconds: float
    dense_bytes: int = 0  # of weights that the CPU unpacks to f32, beside packed ones
    tensor_bytes: int = 0  # of all tensors, in the formats of the file
    backend: str = ""  # the implementation of WebGPU, and why it was taken
    own_name: str = ""  # what the file says
    files: tuple[Path, ...] = ()  # that were read; none of a model with random weights
    max_context: int = 0  # the largest `context=` that the model takes on this device; 0: not known

    def lines(self) -> list[str]:
        """The report in a few lines."""
        own = f'; its file says "{self.own_name}"' if self.own_name not in ("", self.name) else ""
        types = ", ".join(f"{count} {kind}" for kind, count in self.types.items())
        dense = f" ({size(self.dense_bytes)} of it dense, in f32)" if self.dense_bytes else ""
        lines = [
            f"model    {self.name} ({self.architecture}, {counted(self.parameters)} parameters{own})",
            f"file     {self.path} ({size(self.file_bytes)}; tensors: {types})",
            f"device   {self.device}; weights {size(self.weight_bytes)}{dense}, cache {self.cache}, {self.precision}",
            f"context  {self.context:,} tokens",
            f"loaded   in {self.seconds:.2f} s",
        ]
        if self.backend:
            lines.insert(3, f"backend  {self.backend}")
        return lines
