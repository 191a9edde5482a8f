"""Rows that are hard to rotate, and their rotation by torch, which every backend must reproduce."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvant.codecs.frames import hadamard

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
dtypes = pytest.mark.parametrize("dtype", list(INTEGERS), ids=str)


def rotate_with_torch(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hadamard, "can_rotate", lambda x: False)
        patch.setattr(hadamard, "can_launch", lambda x: False)
        return act(x)


def to_bits(x: Tensor) -> Tensor:
    """Return the bits of a tensor with equal NaNs: torch itself rounds them to different ones."""
    return x.masked_fill(x.isnan(), torch.nan).view(INTEGERS[x.dtype])


def make_hard_rows(dtype: torch.dtype, dim: int) -> Tensor:
    """Return outliers, zeros of both signs, denormals, infinities, NaN, and values close to
    infinity.
    """
    rows = torch.randn(2, 3, 40, dim)
    rows[0, :, :, 3] *= 300
    rows[0, 0, 5] = 0.0
    rows[0, 0, 6] = -0.0
    rows[0, 1, :, ::3] = -0.0
    rows[0, 2, 7] = 2.5
    rows = (rows * torch.logspace(-3, 3, 40)[:, None]).to(dtype)
    rows[1, 0, 1, 2] = torch.inf
    rows[1, 0, 2, 3:5] = -torch.inf
    rows[1, 0, 3, 1], rows[1, 0, 3, 11] = torch.inf, -torch.inf
    rows[1, 0, 4, 11] = torch.nan
    info = torch.finfo(dtype)
    rows[1, 1] = (torch.randn(40, dim) * info.max / 4).clamp(info.min, info.max)
    rows[1, 1, 0] = 0.0
    rows[1, 1, 0, 9] = info.max
    rows[1, 2] = (torch.randn(40, dim, dtype=torch.float64) * info.tiny).to(dtype)
    rows[1, 2, 0] = info.smallest_normal / 2
    return rows
