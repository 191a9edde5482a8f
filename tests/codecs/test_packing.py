from math import gcd

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvant.codecs.packing import BIT_PLANES, pack_codes, unpack_codes

WIDTHS = sorted(BIT_PLANES)
LOW_FIRST = {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 8: [8]}


def random_codes(bits: int, *shape: int) -> Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8)


def pack_by_hand(codes: list[int], bits: int) -> list[int]:
    """Pack codes one value at a time, by the layout in the module's header."""
    dim, block, out, shift = len(codes), gcd(len(codes), 32), [], 0
    for width in LOW_FIRST[bits]:
        step = block * width // 8
        for first in range(0, dim, block):
            for e in range(step):
                channels = [codes[first + e + i * step] for i in range(8 // width)]
                parts = [code >> shift & (1 << width) - 1 for code in channels]
                out.append(sum(part << width * i for i, part in enumerate(parts)))
        shift += width
    return out


@pytest.mark.parametrize("bits", WIDTHS)
@given(data=st.data())
def test_unpack_undoes_pack_for_any_shape(bits: int, data: st.DataObject) -> None:
    lead = data.draw(st.lists(st.integers(0, 4), max_size=3))
    dim = 8 * data.draw(st.integers(1, 40))
    codes = random_codes(bits, *lead, dim)
    packed = pack_codes(codes, bits)
    assert packed.shape == (*lead, dim * bits // 8)
    assert torch.equal(unpack_codes(packed, bits), codes)


@pytest.mark.parametrize("dim", [8, 16, 24, 64, 80, 96, 128])
@pytest.mark.parametrize("bits", WIDTHS)
def test_byte_layout_matches_the_header(bits: int, dim: int) -> None:
    codes = random_codes(bits, dim)
    assert pack_codes(codes, bits).tolist() == pack_by_hand(codes.tolist(), bits)


def test_a_nibble_byte_holds_channels_16_apart() -> None:
    codes = torch.arange(32, dtype=torch.uint8) % 16
    codes[16:] = 15 - codes[16:]
    assert pack_codes(codes, 4).tolist() == [e | (15 - e) << 4 for e in range(16)]


def test_the_low_plane_comes_first() -> None:
    """3 bits are a plane of two low bits and one of the high bit; 4 sets only the latter."""
    assert pack_codes(torch.full((8,), 3, dtype=torch.uint8), 3).tolist() == [255, 255, 0]
    assert pack_codes(torch.full((8,), 4, dtype=torch.uint8), 3).tolist() == [0, 0, 255]


@pytest.mark.parametrize("bits", WIDTHS)
def test_each_channel_has_its_own_bits(bits: int) -> None:
    """Regression elsewhere: 3-bit codes across machine words leaked into their neighbours."""
    dim = 80
    single = pack_codes(torch.eye(dim, dtype=torch.uint8) * (2**bits - 1), bits)
    counts = [[sum(byte >> i & 1 for byte in row) for i in range(8)] for row in single.tolist()]
    assert [sum(row) for row in counts] == [bits] * dim
    union = single[0]
    for row in single[1:]:
        assert not (union & row).any()
        union = union | row
    assert union.tolist() == [255] * (dim * bits // 8)


@pytest.mark.parametrize("bits", WIDTHS)
def test_strides_do_not_matter(bits: int) -> None:
    codes = random_codes(bits, 64, 5, 3)
    permuted = codes.permute(2, 1, 0)
    assert torch.equal(pack_codes(permuted, bits), pack_codes(permuted.contiguous(), bits))
    packed = pack_codes(random_codes(bits, 7, 3, 64), bits)
    assert torch.equal(unpack_codes(packed[::2, 1:], bits), unpack_codes(packed, bits)[::2, 1:])


@pytest.mark.parametrize("dim", [0, 4, 12, 100])
def test_dim_that_half_fills_a_byte_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"{dim} values; .* multiple of 8"):
        pack_codes(torch.zeros(2, dim, dtype=torch.uint8), 4)
