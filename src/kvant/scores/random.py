"""Random scores: the baseline for every other score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvant.contracts import Score, ScoreInput

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RandomScore(Score):
    """Score rows at random, seeded by the number of rows of a sequence.

    Sequences with equally many rows get the same scores on every device.
    """

    name: ClassVar[str] = "random"
    prunes_during_decode: ClassVar[bool] = True

    def score_rows(self, rows: ScoreInput) -> Tensor:
        import torch

        count = rows.valid.shape[1]
        scores = torch.zeros(rows.valid.shape)
        for first in range(0, len(scores), rows.heads_per_sequence):
            heads = slice(first, first + rows.heads_per_sequence)
            num_rows = int(rows.valid[heads].any(0).sum())
            generator = torch.Generator().manual_seed(num_rows)
            scores[heads, count - num_rows :] = torch.rand(
                rows.heads_per_sequence, num_rows, generator=generator
            )
        return scores.to(rows.valid.device)
