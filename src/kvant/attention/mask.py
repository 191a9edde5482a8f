"""Which keys a query sees: one rule over positions, and its answer for whole blocks.

The rule is written once, for tensors (`visible`). `relation` asks it of the corners of a block, so
that a backend may skip blocks nobody sees and leave out the mask where everybody sees everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvant.contracts import Mask, View

Relation = Literal["none", "some", "all"]


@dataclass(frozen=True)
class Block:
    """Key columns [start, stop) of a view in one of their two states (the sinks by position)."""

    part: Literal["sinks", "sealed", "dense"]
    start: int
    stop: int


def visible(mask: Mask, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Does a query at `q_pos` see a key at `k_pos`? Negative key positions are padding."""
    seen = (k_pos >= 0) & (q_pos >= 0)
    if mask.causal:
        seen = seen & (k_pos <= q_pos)
    if mask.window is not None:
        seen = seen & ((q_pos - k_pos < mask.window) | (k_pos < mask.sinks))
    if mask.chunk is not None:
        seen = seen & (k_pos // mask.chunk == q_pos // mask.chunk)
    return seen


def relation(view: View, mask: Mask | Tensor, q0: int, q1: int, block: Block) -> Relation:
    """Do the queries at columns [q0, q1) see all, some or none of a block?"""
    if block.part == "sinks":
        return "some"
    state = _state(view, q0, q1, block)
    if state == "none" or isinstance(mask, Tensor):
        return "none" if state == "none" else "some"
    rule = _rule(mask, q0, q1, block.start, block.stop - 1)
    kept = view.keys.sinks.shape[2]
    if rule == "none":
        # A rule given in place of the view's may have sinks that lie among the other rows.
        return "some" if kept < mask.sinks and block.start < view.padding + mask.sinks else "none"
    first = view.padding + kept
    clean = block.start >= first and (view.padding == 0 or q0 >= view.padding)
    aligned = mask.chunk is None or view.padding == 0
    return "all" if clean and aligned and state == rule == "all" else "some"


def _state(view: View, q0: int, q1: int, block: Block) -> Relation:
    """By the seam alone: is the block in the state that the queries read?"""
    low, high = view.seam(q0), view.seam(q1 - 1)
    if block.part == "sealed":
        return "all" if block.stop <= low else "none" if block.start >= high else "some"
    return "all" if block.start >= high else "none" if block.stop <= low else "some"


def _rule(mask: Mask, q0: int, q1: int, k_first: int, k_last: int) -> Relation:
    """By the rule alone, over columns; what padding and sinks change is the caller's."""
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


def allowed(view: View, mask: Mask | Tensor, q0: int, q1: int, block: Block) -> Tensor:
    """[B, heads or 1, q1 - q0, keys] as booleans, or as numbers to add where `mask` is such."""
    device = view.start.device
    start = view.start.view(-1, 1, 1, 1)
    q_col = torch.arange(q0, q1, device=device).view(1, 1, -1, 1)
    k_col = torch.arange(block.start, block.stop, device=device).view(1, 1, 1, -1)
    if block.part == "sinks":
        k_pos, k_col = k_col, k_col + start
        exists = k_col < view.columns
    else:
        k_pos = k_col - start
        exists = k_pos >= view.keys.sinks.shape[2]
        seam = torch.tensor([view.seam(q) for q in range(q0, q1)], device=device).view(1, 1, -1, 1)
        exists = exists & ((k_col < seam) if block.part == "sealed" else (k_col >= seam))
    if isinstance(mask, Tensor):
        return _explicit(view, mask, q0, q1, k_col, exists & (k_pos >= 0))
    return exists & visible(mask, q_col - start, k_pos)


def _explicit(view: View, mask: Tensor, q0: int, q1: int, k_col: Tensor, exists: Tensor) -> Tensor:
    """The part of an explicit mask that belongs to `k_col`; it is aligned to the newest column."""
    queries, keys = mask.shape[-2], mask.shape[-1]
    rows = mask[..., q0 - view.columns + queries : q1 - view.columns + queries, :]
    index = k_col - (view.columns - keys)
    exists = exists & (index >= 0)
    batch = max(rows.shape[0], index.shape[0])
    index = index.clamp(0, keys - 1).expand(batch, rows.shape[1], rows.shape[2], -1)
    part = rows.expand(batch, -1, -1, -1).gather(-1, index)
    if part.dtype == torch.bool:
        return part & exists
    return part.masked_fill(~exists, float("-inf"))
