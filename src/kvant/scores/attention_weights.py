"""Attention weights of the newest queries, which several scores use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvant.contracts import ScoreInput

if TYPE_CHECKING:
    from torch import Tensor


def compute_attention_weights(rows: ScoreInput) -> Tensor:
    """Return the mean attention weight of each row over the queries, [N, group, n].

    Computes one head at a time, which bounds the scratch.
    """
    import torch

    assert rows.queries is not None and rows.query_rows is not None
    means = []
    for keys, valid, queries, query_rows in zip(
        rows.keys, rows.valid, rows.queries, rows.query_rows, strict=True
    ):
        causal = torch.arange(len(keys), device=keys.device) <= query_rows[:, None]  # [m, n]
        visible = valid & causal
        logits = (queries @ keys.T * rows.scale).masked_fill(~visible, float("-inf"))
        weights = logits.softmax(-1).nan_to_num()  # padding queries see no row
        means.append(weights.sum(1) / (query_rows >= 0).sum().clamp(min=1))
    return torch.stack(means)
