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

__all__ = [
    "BACKENDS",
    "BackendExplanation",
    "attend",
    "check_backend",
    "explain",
    "has_fast_prefill",
    "select_tiles",
]
