"""Rows by chance: what any other score has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvant.contracts import Rows, Score


@dataclass(frozen=True)
class Random(Score):
    name: ClassVar[str] = "random"
    decodes: ClassVar[bool] = True

    def of(self, rows: Rows) -> Tensor:
        generator = torch.Generator().manual_seed(rows.there.shape[1])
        return torch.rand(rows.there.shape, generator=generator)
