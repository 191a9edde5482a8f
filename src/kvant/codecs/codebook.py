"""Non-uniform codes from a fixed codebook, with one scale for each row.

value = level[code] * scale. The levels suit rows in a rotated frame, whose coordinates are spread
like those of a random direction; code = how many boundaries do not exceed value / rms of the row.
The scale is the rms, or corrected: the one that fits the chosen levels best.

Values beyond +-65504, and a scale beyond it, saturate there. A row with a NaN or an infinity opens
as NaN throughout. Sums over a row are float64 in one fixed order, so bytes do not depend on what
lies beside the row. It knows no page, and no frame but to name it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvant.codecs.checks import check_choice, check_dim
from kvant.codecs.float16 import LIMIT, finite_rows, saturated
from kvant.codecs.levels import boundaries, levels
from kvant.codecs.packing import pack, unpack
from kvant.codecs.sums import tree_sum
from kvant.contracts import Field, Fields, Form, Frame
from kvant.frames.hadamard import Rotation

WIDTHS = (2, 3, 4)
ROWS = 4096  # sealed at a time: bounds the scratch, and keeps it near the processor


@dataclass(frozen=True)
class Codebook:
    """`bits` a value, and 16 more a row."""

    bits: int = 4
    corrected: bool = True
    frame: Frame = field(default_factory=Rotation)
    name: ClassVar[str] = "codebook"
    limit: ClassVar[float] = LIMIT
    exact: ClassVar[bool] = False
    tail: ClassVar[int] = 128

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, WIDTHS)

    @property
    def form(self) -> Form:
        return Form("codebook", self.bits, corrected=self.corrected)

    def fields(self, dim: int) -> Mapping[str, Field]:
        check_dim(dim)
        return {
            "codes": Field(torch.uint8, dim * self.bits // 8),
            "scale": Field(torch.float16, 1),
        }

    def seal(self, rows: Tensor) -> Fields:
        *lead, dim = rows.shape
        check_dim(dim)
        parts = torch.split(rows.detach().reshape(-1, dim), ROWS)
        sealed = zip(*(self._seal_rows(part) for part in parts), strict=True)
        codes, scale = (torch.cat(part) for part in sealed)
        return {"codes": codes.view(*lead, codes.shape[1]), "scale": scale.view(*lead, 1)}

    def open(self, fields: Fields) -> Tensor:
        codes = unpack(fields["codes"], self.bits)
        return self._chosen(codes, torch.float32).mul_(fields["scale"].to(torch.float32))

    def _seal_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        broken = ~finite_rows(rows)
        y = saturated(rows)
        scale = (tree_sum(y.double().mul_(y)) / y.shape[-1]).sqrt()
        codes = self._nearest(y, scale.to(torch.float32)).masked_fill_(broken, 0)
        if self.corrected:
            scale = self._fitted(y, codes)
        scale = scale.to(torch.float32).clamp(max=LIMIT).masked_fill(broken, torch.nan)
        return pack(codes, self.bits), scale.to(torch.float16)

    def _nearest(self, y: Tensor, rms: Tensor) -> Tensor:
        unit = y / rms.where(rms > 0, 1.0)
        codes = torch.zeros(y.shape, dtype=torch.uint8, device=y.device)
        # Counting is twice as fast as a binary search among this few boundaries.
        for boundary in boundaries(self.bits, y.shape[-1]).astype(np.float32).tolist():
            codes.add_(unit >= boundary)
        return codes

    def _fitted(self, y: Tensor, codes: Tensor) -> Tensor:
        """The least squares scale, <y, c> / <c, c>."""
        overlap = tree_sum(self._chosen(codes, torch.float64).mul_(y))
        # Zeros of either sign give one zero.
        return (overlap + 0.0) / tree_sum(self._chosen(codes, torch.float64).square_())

    def _chosen(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        table = _table(self.bits, codes.shape[-1], dtype, codes.device)
        return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


@lru_cache(maxsize=64)
def _table(bits: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The levels as float32 has them, whatever the dtype."""
    return torch.tensor(levels(bits, dim).astype(np.float32), dtype=dtype, device=device)
