"""Which keys a query sees: one rule over positions, and its answer for whole blocks.

The rule is written once, for tensors (`visible`). `relation` says it of a block, so that a backend
may skip blocks nobody sees and leave out the mask where everybody sees everything.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvant.contracts import Mask

BlockVisibility = Literal["none", "some", "all"]


def evaluate_mask(mask: Mask, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Does a query at `q_pos` see a key at `k_pos`? Negative positions are padding."""
    seen = (k_pos >= 0) & (q_pos >= 0)
    if mask.causal:
        seen = seen & (k_pos <= q_pos)
    if mask.window is not None:
        seen = seen & ((q_pos - k_pos < mask.window) | (k_pos < mask.sinks))
    if mask.chunk is not None:
        seen = seen & (k_pos // mask.chunk == q_pos // mask.chunk)
    return seen


def classify_block(mask: Mask, q0: int, q1: int, k_first: int, k_last: int) -> BlockVisibility:
    """Do queries [q0, q1) see keys k_first to k_last, all or some? Sinks are the caller's."""
    if mask.causal and k_first > q1 - 1:
        return "none"
    every = not mask.causal or k_last <= q0
    if mask.window is not None:
        if q0 - k_last >= mask.window:
            return "none"
        every = every and q1 - 1 - k_first < mask.window
    if mask.chunk is not None:
        every = every and k_first // mask.chunk == k_last // mask.chunk
        every = every and q0 // mask.chunk == (q1 - 1) // mask.chunk == k_first // mask.chunk
    return "all" if every else "some"
