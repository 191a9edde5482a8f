"""Evaluate masks: which keys a query sees, as one rule over positions.

`evaluate_mask` applies the rule to tensors of positions. `classify_block` applies it to a whole
block, so a backend can skip invisible blocks and omit the mask of fully visible ones.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvant.contracts import Mask

BlockVisibility = Literal["none", "some", "all"]


def evaluate_mask(mask: Mask, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Return whether queries at `q_pos` see keys at `k_pos`; negative positions are padding."""
    visible = (k_pos >= 0) & (q_pos >= 0)
    if mask.causal:
        visible = visible & (k_pos <= q_pos)
    if mask.window is not None:
        visible = visible & ((q_pos - k_pos < mask.window) | (k_pos < mask.sinks))
    if mask.chunk is not None:
        visible = visible & (k_pos // mask.chunk == q_pos // mask.chunk)
    return visible


def classify_block(mask: Mask, q0: int, q1: int, k_first: int, k_last: int) -> BlockVisibility:
    """Tell whether queries [q0, q1) see all, some or none of keys k_first to k_last.

    Sinks are ignored: the caller checks them.
    """
    if mask.causal and k_first > q1 - 1:
        return "none"
    all_visible = not mask.causal or k_last <= q0
    if mask.window is not None:
        if q0 - k_last >= mask.window:
            return "none"
        all_visible = all_visible and q1 - 1 - k_first < mask.window
    if mask.chunk is not None:
        all_visible = all_visible and k_first // mask.chunk == k_last // mask.chunk
        all_visible = (
            all_visible and q0 // mask.chunk == (q1 - 1) // mask.chunk == k_first // mask.chunk
        )
    return "all" if all_visible else "some"
