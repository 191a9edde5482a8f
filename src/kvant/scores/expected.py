"""Expected attention: what queries like those of the prompt give to a row, and how large it is.

The published method (Devoto et al., 2025) takes queries before their positions are turned in, and
turns their mean to positions to come. A cache sees queries as they are asked: so their mean and
covariance are those of the newest ones, at the positions that they have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvant.contracts import Score, ScoreInput

if TYPE_CHECKING:
    from torch import Tensor

NUM_PROTECTED_FIRST_ROWS = 4  # rows that always stay: many heads rest their attention on them


@dataclass(frozen=True)
class ExpectedAttention(Score):
    name: ClassVar[str] = "expected"
    num_queries: ClassVar[int] = 512

    def score_rows(self, rows: ScoreInput) -> Tensor:
        import torch

        assert rows.queries is not None and rows.query_rows is not None
        found = []
        for keys, there, queries, asked in zip(
            rows.keys, rows.valid, rows.queries, rows.query_rows, strict=True
        ):
            asking = queries[:, asked >= 0] * rows.scale  # [group, m, D]
            mean = asking.mean(1, keepdim=True)
            spread = asking - mean
            covariance = spread.transpose(1, 2) @ spread / asking.shape[1]
            logits = (mean @ keys.T).squeeze(1) + ((keys @ covariance) * keys).sum(-1) / 2
            found.append(logits.masked_fill(~there, float("-inf")).softmax(-1).mean(0))
        scores = torch.stack(found) * rows.values.norm(dim=-1)
        first = rows.valid.long().cumsum(1)
        most = torch.finfo(scores.dtype).max  # the newest rows, which are infinite, come before
        kept: Tensor = scores.masked_fill(rows.valid & (first <= NUM_PROTECTED_FIRST_ROWS), most)
        return kept
