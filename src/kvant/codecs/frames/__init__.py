"""Frames (invertible maps applied to stored rows), registered under their names in files."""

from kvant.codecs.frames.diagonal import (
    Diagonal,
    FrameProduct,
    Identity,
    SmoothPlaceholder,
    add_smoothing,
    fill_smoothing,
    needs_fitting,
)
from kvant.codecs.frames.hadamard import Rotation
from kvant.contracts import Frame

FRAMES: dict[str, type[Frame]] = {
    "identity": Identity,
    "rotation": Rotation,
    "diagonal": Diagonal,
    "product": FrameProduct,
}

__all__ = [
    "FRAMES",
    "Diagonal",
    "FrameProduct",
    "Identity",
    "Rotation",
    "SmoothPlaceholder",
    "add_smoothing",
    "fill_smoothing",
    "needs_fitting",
]
