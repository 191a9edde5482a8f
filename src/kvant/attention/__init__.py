"""Attention over pages, and rows on their way into them, by the first backend that can."""

from kvant.attention.attending import (
    BACKENDS,
    Explanation,
    attend,
    check_backend,
    explain,
    reads_prompts,
)
from kvant.attention.native import arrangement
from kvant.attention.triton.step import Step

__all__ = [
    "BACKENDS",
    "Explanation",
    "Step",
    "arrangement",
    "attend",
    "check_backend",
    "explain",
    "reads_prompts",
]
