"""Rows by chance: what any other score has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvant.contracts import Score, ScoreInput

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RandomScore(Score):
    """The same rows for sequences of one length, whatever they are computed with."""

    name: ClassVar[str] = "random"
    prunes_during_decode: ClassVar[bool] = True

    def score_rows(self, rows: ScoreInput) -> Tensor:
        import torch

        count = rows.valid.shape[1]
        found = torch.zeros(rows.valid.shape)
        for first in range(0, len(found), rows.heads_per_sequence):
            mine = slice(first, first + rows.heads_per_sequence)
            held = int(rows.valid[mine].any(0).sum())
            generator = torch.Generator().manual_seed(held)
            found[mine, count - held :] = torch.rand(
                rows.heads_per_sequence, held, generator=generator
            )
        return found.to(rows.valid.device)
