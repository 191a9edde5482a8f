"""The invertible maps that rows are stored under, by the name they have on disk."""

from kvant.codecs.frames.diagonal import (
    Diagonal,
    Identity,
    Product,
    Smooth,
    fitted,
    smoothed,
    waits,
)
from kvant.codecs.frames.hadamard import Rotation
from kvant.contracts import Frame

FRAMES: dict[str, type[Frame]] = {
    "identity": Identity,
    "rotation": Rotation,
    "diagonal": Diagonal,
    "product": Product,
}

__all__ = [
    "FRAMES",
    "Diagonal",
    "Identity",
    "Product",
    "Rotation",
    "Smooth",
    "fitted",
    "smoothed",
    "waits",
]
