"""Expected attention: the weight that future queries should give a row, times its value norm.

The published method (Devoto et al., 2025) takes queries before rotary embedding, and rotates their
mean to future positions. A cache sees queries only after the embedding. So here the mean and the
covariance are those of the newest queries, at their own positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvant.contracts import Score, ScoreInput

if TYPE_CHECKING:
    from torch import Tensor

NUM_PROTECTED_FIRST_ROWS = 4  # always retained: many heads attend to them (attention sinks)


@dataclass(frozen=True)
class ExpectedAttention(Score):
    """Score rows by their expected attention under a Gaussian model of the queries."""

    name: ClassVar[str] = "expected"
    num_queries: ClassVar[int] = 512

    def score_rows(self, rows: ScoreInput) -> Tensor:
        import torch

        assert rows.queries is not None and rows.query_rows is not None
        weights = []
        for keys, valid, queries, query_rows in zip(
            rows.keys, rows.valid, rows.queries, rows.query_rows, strict=True
        ):
            queries = queries[:, query_rows >= 0] * rows.scale  # [group, m, D]
            mean = queries.mean(1, keepdim=True)
            centered = queries - mean
            covariance = centered.transpose(1, 2) @ centered / queries.shape[1]
            logits = (mean @ keys.T).squeeze(1) + ((keys @ covariance) * keys).sum(-1) / 2
            weights.append(logits.masked_fill(~valid, float("-inf")).softmax(-1).mean(0))
        scores = torch.stack(weights) * rows.values.norm(dim=-1)
        row_number = rows.valid.long().cumsum(1)  # from 1
        is_protected = rows.valid & (row_number <= NUM_PROTECTED_FIRST_ROWS)
        # Below infinity, which the caller gives to the newest rows.
        protected: Tensor = scores.masked_fill(is_protected, torch.finfo(scores.dtype).max)
        return protected
