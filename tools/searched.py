"""An affine codec that searches its scales, which was worse than fitting them (docs/quality.md).

It tries narrower ranges of each group, from the full range down to six tenths, and takes the one
with the least squared error. It decodes as its parent does. Only the measurement uses it.
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
    """`Affine` with searched scales, in the same byte layout."""

    def _seal_groups(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = saturate(x)
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        best: tuple[Tensor, ...] | None = None
        for share in RANGE_SHARES:
            candidate = self._quantize_range(x, (low + high) / 2, (high - low) / 2 * share)
            if best is None:
                best = candidate
            is_better = candidate[0] < best[0]
            best = tuple(
                map(lambda new, old, b=is_better: new.where(is_better, old), candidate, best)
            )
        _, codes, scale, bias = best
        return codes.to(torch.uint8).flatten(-2), scale.squeeze(-1), bias.squeeze(-1)

    def _quantize_range(self, x: Tensor, middle: Tensor, half: Tensor) -> tuple[Tensor, ...]:
        """Return squared error, codes, scale and bias for a range around the middle."""
        bias = (middle - half).half()
        scale = (2 * half / (2**self.bits - 1)).half()
        step = scale.float()
        codes = ((x - bias.float()) / step.where(step > 0, 1.0)).round().clamp(0, 2**self.bits - 1)
        error = (codes * step + bias.float() - x).square().sum(-1, keepdim=True)
        return error, codes, scale, bias
