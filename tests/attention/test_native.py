"""The native backend: its bytes are the codecs', its figures those that docs promise."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import Tensor

from kvant import Cache, attend, explain
from kvant.attention.native import Native
from kvant.attention.native.lanes import Lanes
from kvant.attention.native.library import library
from kvant.attention.reference import Reference
from kvant.codecs import Affine, Codebook
from kvant.contracts import Codec

pytestmark = pytest.mark.skipif(
    library().functions is None, reason="the native library is not here"
)
CODECS: list[Codec] = [
    *(Affine(bits, group) for bits in (8, 6, 5, 4, 3, 2) for group in (16, 32, 64)),
    *(Codebook(bits, corrected) for bits in (4, 3, 2) for corrected in (True, False)),
]


def odd_rows(dtype: torch.dtype, dim: int) -> Tensor:
    """Pages [2, 3, 2, 64, dim] with outliers, zeros, equal values, infinities and NaN."""
    rows = torch.randn(2, 2, 3 * 64, dim)
    rows[..., 3] *= 30
    rows[0, 0, 5] = 0.0
    rows[0, 0, 6] = -0.0
    rows[0, 1, 7] = 2.5
    rows[0, 1, 8] *= 1e-7
    rows[1, 0, 9, 2] = math.inf
    rows[1, 1, 10, 11] = math.nan
    rows[1, 1, 12] *= 60000
    return rows.to(dtype).reshape(2, 2, 3, 64, dim).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_sealed_bytes_are_those_of_the_codec(codec: Codec, dtype: torch.dtype) -> None:
    for dim in (32, 80, 128):
        rows = odd_rows(dtype, dim)
        for side in ("keys", "values"):
            for tiles in (None, Lanes()):
                ours = Native().seal(codec, rows, side, tiles)
                theirs = Reference().seal(codec, rows, side, tiles)
                if ours is None:
                    assert dim % 32 and getattr(codec, "bits", 0) in (3, 5)
                    continue
                assert ours.keys() == theirs.keys()
                for name, field in theirs.items():
                    assert torch.equal(ours[name].view(torch.uint8), field.view(torch.uint8)), name
