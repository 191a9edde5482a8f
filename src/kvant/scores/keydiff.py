"""KeyDiff: keys that are unlike the others (Park et al., 2025). It asks for keys alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvant.contracts import Score, ScoreInput

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KeyDiff(Score):
    """The cosine of a key and the mean direction of all keys of its head: the less, the better."""

    name: ClassVar[str] = "keydiff"
    prunes_during_decode: ClassVar[bool] = True

    def score_rows(self, rows: ScoreInput) -> Tensor:
        from torch.nn.functional import normalize

        directions = normalize(rows.keys, dim=-1)
        there = rows.valid.unsqueeze(-1)
        mean = (directions * there).sum(1, keepdim=True) / there.sum(1, keepdim=True)
        return -(directions * normalize(mean, dim=-1)).sum(-1)
