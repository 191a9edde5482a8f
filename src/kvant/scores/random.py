"""Rows by chance: what any other score has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvant.contracts import Rows, Score

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Random(Score):
    """The same rows for sequences of one length, whatever they are computed with."""

    name: ClassVar[str] = "random"
    decodes: ClassVar[bool] = True

    def of(self, rows: Rows) -> Tensor:
        import torch

        count = rows.there.shape[1]
        found = torch.zeros(rows.there.shape)
        for first in range(0, len(found), rows.heads):
            mine = slice(first, first + rows.heads)
            held = int(rows.there[mine].any(0).sum())
            generator = torch.Generator().manual_seed(held)
            found[mine, count - held :] = torch.rand(rows.heads, held, generator=generator)
        return found.to(rows.there.device)
