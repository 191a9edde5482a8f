"""What scales are computed with: sums the same to the bit, and what a 16-bit float can hold."""

from __future__ import annotations

import torch
from torch import Tensor


def tree_sum(x: Tensor) -> Tensor:
    """Sums over the last dimension, [..., 1]; in place."""
    width = x.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        x[..., : width - half] += x[..., half:width]
        width = half
    return x[..., :1]


LIMIT = 65504.0  # the largest finite float16


def saturated(x: Tensor) -> Tensor:
    """A float32 copy within +-LIMIT; NaN stays NaN."""
    return x.to(torch.float32).clamp(-LIMIT, LIMIT)


def rounded_down(x: Tensor) -> Tensor:
    """The largest float16 that is not above x, for float32 x within +-LIMIT."""
    nearest = x.to(torch.float16)
    return torch.where(nearest.to(torch.float32) > x, _next_below(nearest), nearest)


def rounded_up(x: Tensor) -> Tensor:
    return -rounded_down(-x)


def finite_rows(x: Tensor) -> Tensor:
    """[..., 1]: whether no value of a row is NaN or infinite, in the dtype it came in."""
    return x.amin(-1, keepdim=True).isfinite() & x.amax(-1, keepdim=True).isfinite()


def _next_below(x: Tensor) -> Tensor:
    # As integers the magnitudes of floats are in order; below either zero comes 0x8001.
    bits = x.view(torch.int16)
    below = torch.where(bits > 0, bits - 1, bits + 1)
    return torch.where(x == 0, below.new_tensor(-0x7FFF), below).view(torch.float16)
