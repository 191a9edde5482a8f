"""SnapKV: retain rows to which the end of the prompt attends (Li et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvant.contracts import Score, ScoreInput
from kvant.scores.attention_weights import compute_attention_weights

if TYPE_CHECKING:
    from torch import Tensor

POOLING_WIDTH = 5  # rows over which weights are averaged: neighbours of a key row matter too


@dataclass(frozen=True)
class SnapKV(Score):
    """Score rows by the attention weights of the newest queries, averaged over neighbours."""

    name: ClassVar[str] = "snapkv"
    num_queries: ClassVar[int] = 64

    def score_rows(self, rows: ScoreInput) -> Tensor:
        from torch.nn.functional import avg_pool1d

        return avg_pool1d(
            compute_attention_weights(rows), POOLING_WIDTH, stride=1, padding=POOLING_WIDTH // 2
        ).mean(1)
