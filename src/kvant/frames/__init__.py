"""The invertible maps that rows are stored under, by the name they have on disk."""

from kvant.contracts import Frame
from kvant.frames.diagonal import Diagonal
from kvant.frames.hadamard import Rotation
from kvant.frames.identity import Identity
from kvant.frames.product import Product
from kvant.frames.smooth import Smooth, fitted, smoothed, waits

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
