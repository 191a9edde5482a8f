"""SnapKV: rows to which the end of the prompt attends (Li et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvant.contracts import Rows, Score
from kvant.scores.weights import attention

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = 5  # neighbours over which weights are averaged: what matters is rarely one row


@dataclass(frozen=True)
class SnapKV(Score):
    name: ClassVar[str] = "snapkv"
    queries: ClassVar[int] = 64

    def of(self, rows: Rows) -> Tensor:
        from torch.nn.functional import avg_pool1d

        return avg_pool1d(attention(rows), WIDTH, stride=1, padding=WIDTH // 2).mean(1)
