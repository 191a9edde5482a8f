"""An affine codec that searches its scales: what lost against fitting them (see docs/quality.md).

Each group is covered by a narrower range as well, from all of it down to six tenths, and what gives
the least squared error is taken. It opens as its parent does, and only the measurement uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.codecs import Affine
from kvant.codecs.packing import saturate

RANGE_SHARES = tuple(1 - step / 20 for step in range(9))


@dataclass(frozen=True)
class SearchedAffine(Affine):
    """The same bytes, otherwise chosen."""

    def _seal_groups(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = saturate(x)
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        best: tuple[Tensor, ...] | None = None
        for share in RANGE_SHARES:
            found = self._quantize_range(x, (low + high) / 2, (high - low) / 2 * share)
            if best is None:
                best = found
            better = found[0] < best[0]
            best = tuple(map(lambda n, o, b=better: n.where(b, o), found, best))
        _, codes, scale, bias = best
        return codes.to(torch.uint8).flatten(-2), scale.squeeze(-1), bias.squeeze(-1)

    def _quantize_range(self, x: Tensor, middle: Tensor, half: Tensor) -> tuple[Tensor, ...]:
        """Squared error, codes, scale and bias where a group is covered so far from its middle."""
        bias = (middle - half).half()
        scale = (2 * half / (2**self.bits - 1)).half()
        step = scale.float()
        codes = ((x - bias.float()) / step.where(step > 0, 1.0)).round().clamp(0, 2**self.bits - 1)
        error = (codes * step + bias.float() - x).square().sum(-1, keepdim=True)
        return error, codes, scale, bias
