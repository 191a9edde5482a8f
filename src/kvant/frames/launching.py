"""The rotation of frames/hadamard.py in one launch of a kernel: the same rows, to the bit.

Nothing is copied to the device and nothing waits for it, so a launch can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from kvant.launches import compiled, installed, on
from kvant.native import present

ROWS = 4  # a program, which is one warp: what lanes exchange waits for no others


def launchable(x: Tensor) -> bool:
    """Whether `launched` serves this."""
    return x.is_cuda and present(x) and _runs()


def launched(
    x: Tensor, signs: Callable[[Tensor], Tensor], dtype: torch.dtype, *, last: bool
) -> Tensor:
    """Rows [B, H, T, D] turned, multiplied by the D signs for them before that, or last.

    Signs are kept by whoever gives them, so they are asked for where memory is memory.
    """
    from kvant.frames.kernels.rotate import rotate

    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    assert type(out) is Tensor, "rows that are there, in a mode whose tensors are not"
    batch, heads, count, dim = x.shape
    rows = batch * heads * count
    if rows == 0:
        return out
    with on(x.device):
        rotate[-(-rows // ROWS),](
            *(x, signs(x), out, *x.stride()[:3], rows, heads, count),
            DIM=dim,
            LAST=last,
            ROWS=ROWS,
            num_warps=1,
            enable_fp_fusion=False,  # which rounds otherwise than torch does
        )
    return out


@lru_cache(maxsize=1)
def _runs() -> bool:
    """Can the kernel run on a GPU?"""
    if not installed():
        return False
    from kvant.frames.kernels.rotate import rotate

    return compiled(rotate) == {True}
