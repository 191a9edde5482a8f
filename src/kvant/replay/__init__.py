"""Replay of decoded tokens: a forward is captured once, and then run without Python."""

from kvant.replay.capture import CaptureFunction, ReplayBuffers
from kvant.replay.generate import enable_replay
from kvant.replay.replayer import NATIVE_REPLAY, Replayer, get_graph_capture, make_replayer

__all__ = [
    "NATIVE_REPLAY",
    "CaptureFunction",
    "ReplayBuffers",
    "Replayer",
    "enable_replay",
    "get_graph_capture",
    "make_replayer",
]
