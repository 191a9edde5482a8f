"""Left padding, where a mask says nothing else."""

from __future__ import annotations

import torch
from torch import Tensor


def left_padding(seen: Tensor) -> list[int] | None:
    """Columns of padding before each sequence of [B, columns]; None where there are holes."""
    start = seen.to(torch.int8).argmax(-1)
    plain = torch.equal(seen.sum(-1), seen.shape[-1] - start)
    return [int(s) for s in start] if plain else None
