"""Expected attention: what queries like those of the prompt give to a row, and how large it is.

The published method (Devoto et al., 2025) takes queries before their positions are turned in, and
turns their mean to positions to come. A cache sees queries as they are asked: so their mean and
covariance are those of the newest ones, at the positions that they have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvant.contracts import Rows, Score

if TYPE_CHECKING:
    from torch import Tensor

FIRST = 4  # rows that always stay: many heads rest their attention on them


@dataclass(frozen=True)
class Expected(Score):
    name: ClassVar[str] = "expected"
    queries: ClassVar[int] = 512

    def of(self, rows: Rows) -> Tensor:
        import torch

        assert rows.queries is not None and rows.asked is not None
        found = []
        for keys, there, queries, asked in zip(
            rows.keys, rows.there, rows.queries, rows.asked, strict=True
        ):
            asking = queries[:, asked >= 0] * rows.scale  # [group, m, D]
            mean = asking.mean(1, keepdim=True)
            spread = asking - mean
            covariance = spread.transpose(1, 2) @ spread / asking.shape[1]
            logits = (mean @ keys.T).squeeze(1) + ((keys @ covariance) * keys).sum(-1) / 2
            found.append(logits.masked_fill(~there, float("-inf")).softmax(-1).mean(0))
        scores = torch.stack(found) * rows.values.norm(dim=-1)
        first = rows.there.long().cumsum(1)
        most = torch.finfo(scores.dtype).max  # the newest rows, which are infinite, come before
        kept: Tensor = scores.masked_fill(rows.there & (first <= FIRST), most)
        return kept
