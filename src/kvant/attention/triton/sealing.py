"""Sealing pages with a kernel: the codec's own bytes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kvant.attention.triton.forms import DTYPES, MAX_DIM, form, table, third, unread
from kvant.codecs import Affine, Codebook, Raw
from kvant.codecs.levels import boundaries
from kvant.contracts import Codec, Fields
from kvant.lasting import lasting
from kvant.launches import on

ROWS = 16  # a program


def unsealed(codec: Codec, rows: Tensor) -> bool:
    """Is this left to the codec? What it sums in an order of halves must divide into them."""
    page, dim = rows.shape[3:]
    if type(codec) is Raw or unread(codec) is not None or type(rows) is not Tensor:
        return True
    if rows.dtype not in DTYPES or rows.stride(4) != 1 or page % ROWS:
        return True
    uneven = isinstance(codec, Codebook) and dim & (dim - 1)
    return dim % 16 != 0 or dim > MAX_DIM or bool(uneven)


def sealed(codec: Codec, rows: Tensor) -> Fields:
    """What `codec.seal` gives for rows [B, n, H, P, dim]."""
    from kvant.attention.triton.kernels import records
    from kvant.attention.triton.kernels.seal import seal

    batch, count, heads, page, dim = rows.shape
    out = {
        name: torch.empty(
            (batch, count, heads, page, field.width), dtype=field.dtype, device=rows.device
        )
        for name, field in codec.fields(dim).items()
    }
    codes, scale = out["codes"], out["scale"]
    numbers, cuts = scale, scale
    if isinstance(codec, Codebook):
        numbers = table(codec.bits, dim, torch.float32, rows.device)
        cuts = _boundaries(codec.bits, dim, rows.device)
    shape = form(codec, dim, rows.dtype, rows.device)
    with on(rows.device):
        seal[batch * count * heads, page // ROWS](
            records.Paged(rows, *rows.stride()[:4]),
            records.Pages(codes, scale, out.get("bias", scale), numbers, 0, 0, 0, 0),
            cuts,
            shape,
            third(dim) if isinstance(codec, Codebook) and codec.bits == 3 else shape,
            count,
            HEADS=heads,
            PAGE=page,
            DIM=dim,
            CORRECTED=isinstance(codec, Affine | Codebook) and codec.corrected,
            ROWS=ROWS,
            enable_fp_fusion=False,  # which rounds otherwise than the codecs do
        )
    return out


@lru_cache(maxsize=64)
def _boundaries(bits: int, dim: int, device: torch.device) -> Tensor:
    with lasting():
        return torch.tensor(boundaries(bits, dim).astype(np.float32), device=device)
