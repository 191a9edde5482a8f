"""The rotation of frames/hadamard.py in one call of the library: the same rows, to the bit.

A token's rows take less time than a few torch operators, so what a call asks is kept cheap.
"""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from kvant.modes import passing
from kvant.native.library import DTYPES, behind, done, library

RECORD = struct.Struct("@16q")  # kvant_rotate_request
DIMS = range(16, 256 + 1, 16)
Signs = ctypes.Array[ctypes.c_float]  # one a channel: +-1 over the square root of its block


def rotatable(x: Tensor) -> bool:
    """Whether `rotated` serves this."""
    return x.is_cpu and present(x) and library().functions is not None


def present(x: Tensor) -> bool:
    """Rows that lie in memory as a kernel reads them: not only traced, and no gradient wanted."""
    return (
        type(x) is Tensor
        and not passing()
        and x.dtype in DTYPES
        and x.ndim == 4
        and x.shape[3] in DIMS
        and x.stride(3) == 1
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def rotated(x: Tensor, signs: Signs, *, last: bool) -> Tensor:
    """Rows [B, H, T, D] turned, multiplied by the D signs before that, or last."""
    functions = library().functions
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    assert functions is not None
    assert type(out) is Tensor, "rows that are there, in a mode whose tensors are not"
    (batch, head, row, _), size = x.stride(), x.element_size()
    given = RECORD.pack(
        *(x.data_ptr(), behind(x, size), batch * size, head * size, row * size),
        *(DTYPES[x.dtype], *x.shape, ctypes.addressof(signs), ctypes.sizeof(signs), last),
        *(out.data_ptr(), out.nbytes, torch.get_num_threads()),
    )
    done(functions.kvant_rotate(given))
    return out
