"""Pages that the triton backend seals: the bytes of the codecs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention.kernels import DEVICE, GPU, NAME, needed
from attention.rows import odd_rows
from kvant.attention.triton import Triton, sealing
from kvant.attention.triton.forms import power
from kvant.codecs import Affine, Codebook
from kvant.codecs.sums import tree_sum
from kvant.contracts import Codec

pytestmark = [
    needed,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, of NaN and infinity
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODECS: list[Codec] = [
    *(
        Affine(bits, group, corrected=corrected)
        for bits in (8, 4)
        for group in (16, 32, 64, 128)
        for corrected in (True, False)
    ),
    *(Codebook(bits, corrected) for bits in (4, 3, 2) for corrected in (True, False)),
]


@pytest.fixture
def many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the interpreter takes as long for any number of rows."""
    if not GPU:
        monkeypatch.setattr(sealing, "ROWS", 32)


def same_bytes(codec: Codec, rows: Tensor) -> bool:
    """Are pages sealed as the codec seals them? Or not at all."""
    ours = Triton(NAME, DEVICE.type).seal(codec, rows.to(DEVICE), "keys", None)
    if ours is None:
        return False
    theirs = codec.seal(rows)
    assert ours.keys() == theirs.keys()
    for name, field in theirs.items():
        assert torch.equal(ours[name].cpu().view(torch.uint8), field.view(torch.uint8)), name
    return True


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_sealed_bytes_are_those_of_the_codec(codec: Codec, dtype: torch.dtype) -> None:
    for dim in (32, 80):
        even = isinstance(codec, Affine) or dim == 32
        assert same_bytes(codec, odd_rows(dtype, dim)[:, :1]) == even


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("dim", [16, 48, 64, 96, 112, 128, 240, 256])
def test_so_are_those_of_groups_of_any_width(dim: int) -> None:
    for bits in (8, 4):
        assert same_bytes(Affine(bits, 128), odd_rows(torch.float32, dim)[:, :2])


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
def test_sums_are_in_the_order_of_the_codecs(group: int) -> None:
    """Of numbers so far apart that any other order has another sum."""
    from attention.summing import sums

    for dim in range(16, 257, 16):
        rows = torch.randn(dim, dtype=torch.float64) * 2.0 ** torch.randint(-40, 40, (dim,))
        count = -(-dim // group)
        out = torch.empty(count, dtype=torch.float64, device=DEVICE)
        sums[(1,)](rows.to(DEVICE), out, group, power(count), count, dim)
        assert torch.equal(out.cpu(), torch.cat([tree_sum(part) for part in rows.split(group)]))
