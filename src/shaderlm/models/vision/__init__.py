"""Towers: what makes features of patches of pictures. Metadata of an mmproj file → sizes → graph, and its processor.

One tower serves all pictures: patches of several tiles and pictures are its rows, in any number. `spans` says which of
them attend to each other.
"""

from .families import FAMILIES, Family
from .pixels import patches_graph, patches_inputs
from .places import tower_inputs
from .tower import Tower, described_tower, read_tower

__all__ = [
    "FAMILIES",
    "Family",
    "Tower",
    "described_tower",
    "patches_graph",
    "patches_inputs",
    "read_tower",
    "tower_inputs",
]
