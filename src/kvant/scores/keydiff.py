"""KeyDiff: keys that are unlike the others (Park et al., 2025). It asks for keys alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvant.contracts import Rows, Score

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KeyDiff(Score):
    """The cosine of a key and the mean direction of all keys of its head: the less, the better."""

    name: ClassVar[str] = "keydiff"
    decodes: ClassVar[bool] = True

    def of(self, rows: Rows) -> Tensor:
        from torch.nn.functional import normalize

        directions = normalize(rows.keys, dim=-1)
        there = rows.there.unsqueeze(-1)
        mean = (directions * there).sum(1, keepdim=True) / there.sum(1, keepdim=True)
        return -(directions * normalize(mean, dim=-1)).sum(-1)
