"""Pictures: bytes → pixels, and what the processor of a family makes of a picture of some size. No model, no GPU."""

from .pictures import MAX_BYTES, MAX_PIXELS, Picture, open_picture
from .processors import Layout, Processor, Tile

__all__ = ["MAX_BYTES", "MAX_PIXELS", "Layout", "Picture", "Processor", "Tile", "open_picture"]
