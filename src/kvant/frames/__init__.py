"""The invertible maps that rows are stored under, by the name they have on disk."""

from kvant.contracts import Frame
from kvant.frames.diagonal import Diagonal, Smooth, fitted, smoothed, waits
from kvant.frames.hadamard import Rotation
from kvant.frames.identity import Identity, Product

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
