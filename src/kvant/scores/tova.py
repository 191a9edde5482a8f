"""TOVA: rows to which the newest token attends (Oren et al., 2024), the same for all heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvant.contracts import Rows, Score
from kvant.scores.weights import attention

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tova(Score):
    name: ClassVar[str] = "tova"
    decodes: ClassVar[bool] = True
    queries: ClassVar[int] = 1

    def of(self, rows: Rows) -> Tensor:
        heads, count = rows.there.shape
        weights = attention(rows).mean(1).view(-1, rows.heads, count).mean(1, keepdim=True)
        return weights.expand(-1, rows.heads, -1).reshape(heads, count)
