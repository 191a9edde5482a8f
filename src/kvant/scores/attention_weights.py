"""What the newest queries give to each row, which several scores go by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvant.contracts import ScoreInput

if TYPE_CHECKING:
    from torch import Tensor


def compute_attention_weights(rows: ScoreInput) -> Tensor:
    """The mean over queries of their attention weights, [N, group, n]; a head at a time."""
    import torch

    assert rows.queries is not None and rows.query_rows is not None
    found = []
    for keys, there, queries, asked in zip(
        rows.keys, rows.valid, rows.queries, rows.query_rows, strict=True
    ):
        seen = there & (torch.arange(len(keys), device=keys.device) <= asked[:, None])  # [m, n]
        logits = (queries @ keys.T * rows.scale).masked_fill(~seen, float("-inf"))
        weights = logits.softmax(-1).nan_to_num()  # a query that sees nothing is padding
        found.append(weights.sum(1) / (asked >= 0).sum().clamp(min=1))
    return torch.stack(found)
