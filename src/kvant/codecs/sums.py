"""Sums of floats that are the same to the bit, whatever lies beside them and whoever adds them.

The order is a tree: the upper half is added to the lower one until one number is left. The kernels
in src/native add in the same order. It knows no codec.
"""

from __future__ import annotations

from torch import Tensor


def tree_sum(x: Tensor) -> Tensor:
    """Sums over the last dimension, [..., 1]; in place."""
    width = x.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        x[..., : width - half] += x[..., half:width]
        width = half
    return x[..., :1]
