"""The memory that pages live in."""

from kvant.arenas.buffer import GROWING, Buffer, Growth, Slab
from kvant.arenas.reserve import joined
from kvant.arenas.span import Span
from kvant.arenas.tiles import Tiled, retiled

__all__ = ["GROWING", "Buffer", "Growth", "Slab", "Span", "Tiled", "joined", "retiled"]
