"""Attention over cached pages, computed by the first backend that supports the view."""

from kvant.attention.dispatch import (
    BACKENDS,
    BackendExplanation,
    attend,
    check_backend,
    explain,
    has_fast_prefill,
)
from kvant.attention.native import select_tiles
from kvant.attention.triton.decode_step import TritonDecodeStep

__all__ = [
    "BACKENDS",
    "BackendExplanation",
    "TritonDecodeStep",
    "attend",
    "check_backend",
    "explain",
    "has_fast_prefill",
    "select_tiles",
]
