"""TOVA: retain rows to which the newest token attends (Oren et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvant.contracts import Score, ScoreInput
from kvant.scores.attention_weights import compute_attention_weights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tova(Score):
    """Score rows by the attention weights of the newest query, averaged over all heads."""

    name: ClassVar[str] = "tova"
    prunes_during_decode: ClassVar[bool] = True
    num_queries: ClassVar[int] = 1

    def score_rows(self, rows: ScoreInput) -> Tensor:
        heads, count = rows.valid.shape
        weights = (
            compute_attention_weights(rows)
            .mean(1)
            .view(-1, rows.heads_per_sequence, count)
            .mean(1, keepdim=True)
        )
        return weights.expand(-1, rows.heads_per_sequence, -1).reshape(heads, count)
