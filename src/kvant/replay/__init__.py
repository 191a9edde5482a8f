"""Replay of decoded tokens: a forward is captured once, and then run without Python."""

from kvant.replay.capture import (
    CaptureFunction,
    ReplayBuffers,
    capture_forward,
    capture_graph,
    make_capture_function,
)
from kvant.replay.replayer import NATIVE_REPLAY, Replayer

__all__ = [
    "NATIVE_REPLAY",
    "CaptureFunction",
    "ReplayBuffers",
    "Replayer",
    "capture_forward",
    "capture_graph",
    "make_capture_function",
]
