"""How sure a mean over positions is: a percentile bootstrap over blocks of consecutive positions.

Neighbours in a text are alike, so blocks are drawn and not single positions: an interval of
independent draws would be too narrow.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # positions
DRAWS = 1000
Interval = tuple[float, float]


def mean_interval(
    values: Tensor, *, block: int = BLOCK, level: float = 0.95, seed: int = 0
) -> Interval:
    """What the mean of such values lies between, with this confidence."""
    block = max(1, min(block, len(values) // 8))  # of a short text there are still some to draw
    parts = values.double().split(block)  # type: ignore[no-untyped-call]
    sums = torch.stack([part.sum() for part in parts])
    counts = torch.tensor([len(part) for part in parts])
    drawn = torch.randint(
        len(parts), (DRAWS, len(parts)), generator=torch.Generator().manual_seed(seed)
    )
    means = (sums[drawn].sum(1) / counts[drawn].sum(1)).sort().values
    outside = round(DRAWS * (1 - level) / 2)
    return float(means[outside]), float(means[-1 - outside])
