"""KeyDiff: retain keys that differ from the others (Park et al., 2025). Uses keys alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvant.contracts import Score, ScoreInput

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KeyDiff(Score):
    """Score keys by their negative cosine to the mean direction of the head's keys."""

    name: ClassVar[str] = "keydiff"
    prunes_during_decode: ClassVar[bool] = True

    def score_rows(self, rows: ScoreInput) -> Tensor:
        from torch.nn.functional import normalize

        directions = normalize(rows.keys, dim=-1)
        valid = rows.valid.unsqueeze(-1)
        mean = (directions * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True)
        return -(directions * normalize(mean, dim=-1)).sum(-1)
