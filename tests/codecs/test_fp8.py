import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvant.codecs import Affine, Fp8
from kvant.codecs.frames import Identity, Rotation

LIMIT = 65504.0
CODEC = Fp8()


def decode_code(code: int) -> float:
    """Decode a byte by the e4m3 definition: no infinity, one NaN of either sign."""
    sign, power, rest = (-1.0 if code & 0x80 else 1.0), code >> 3 & 15, code & 7
    if power == 15 and rest == 7:
        return float("nan")
    return sign * (rest * 2.0**-9 if power == 0 else (8 + rest) * 2.0 ** (power - 10))


VALUES = torch.tensor([decode_code(code) for code in range(256)], dtype=torch.float64)


def assert_within_its_bound(rows: Tensor) -> None:
    sealed = CODEC.seal(rows)
    x, scale = rows.double().clamp(-LIMIT, LIMIT), sealed["scale"].double()
    error = (CODEC.open(sealed).double() - x).abs()
    # float32 rounds the quotient.
    bound = torch.maximum(x.abs() * 2**-4, scale * 2**-10) * (1 + 2**-20)
    assert (error <= bound).all()


def test_every_code_opens_as_e4m3_defines() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    opened = CODEC.open({"codes": codes, "scale": torch.tensor([0.75], dtype=torch.float16)})
    assert torch.equal(opened.double().nan_to_num(9e9), (VALUES * 0.75).nan_to_num(9e9))


@pytest.mark.parametrize("scale", [1.0, 0.3125, 2.0**-24, 146.0])
def test_every_representable_value_is_exact(scale: float) -> None:
    """Subnormals too; a negative zero becomes a positive one."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    codes = torch.cat((codes, codes[:2]))  # 256 again; +-448 determine the scale
    rows = (VALUES[codes.long()] * scale).float()
    sealed = CODEC.seal(rows)
    assert float(sealed["scale"]) == scale
    assert torch.equal(sealed["codes"], codes.where(codes != 0x80, 0))
    assert torch.equal(CODEC.open(sealed), rows)


def test_codes_round_to_nearest_even() -> None:
    finite = VALUES[:0x7F]
    middle = (finite[1:] + finite[:-1]) / 2
    for factor, wins in ((1.0, None), (1 - 2**-12, 0), (1 + 2**-12, 1)):
        rows = torch.cat((torch.tensor([448.0, 448.0]), middle * factor)).float()[None]
        got = CODEC.seal(rows)["codes"][0, 2:].long()
        below = torch.arange(0x7E)
        expected = below + below % 2 if wins is None else below + wins
        assert torch.equal(got, expected)
        signed = CODEC.seal(-rows)["codes"][0, 2:].long()
        assert torch.equal(signed, torch.where(expected > 0, expected + 0x80, 0))


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_no_value_moves_beyond_its_bound(dim: int) -> None:
    size = torch.logspace(-9, 6, 40)[:, None]
    spread = torch.logspace(0, -6, dim)[torch.randperm(dim)]  # normals and subnormals in a row
    assert_within_its_bound(torch.randn(5, 40, dim) * size)
    assert_within_its_bound(torch.randn(5, 40, dim) * size * spread)


@given(values=st.lists(st.floats(width=32), min_size=16, max_size=16))
def test_any_floats_at_all_have_a_defined_outcome(values: list[float]) -> None:
    rows = torch.tensor(values)
    sealed = CODEC.seal(rows)
    assert not torch.isin(sealed["codes"], torch.tensor([0x7F, 0xFF, 0x80])).any()
    if rows.isfinite().all():
        assert_within_its_bound(rows)
    else:
        assert CODEC.open(sealed).isnan().all()


def test_scale_is_no_larger_than_the_largest_value_needs() -> None:
    rows = torch.randn(200, 64) * torch.logspace(-1, 4, 200)[:, None]
    need = rows.abs().amax(-1, keepdim=True) / 448
    scale = CODEC.seal(rows)["scale"].float()
    assert (scale >= need * (1 - 2**-22)).all() and (scale <= need * (1 + 2**-9)).all()


def test_rounded_scale_never_turns_the_largest_value_into_nan() -> None:
    """The range of float16 and the values just above and below it."""
    halves = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    tops = halves[:, None] * torch.tensor([1.0, 1 - 2**-20, 1 + 2**-20, 448.0, 448.0001])
    codes = CODEC.seal(tops.reshape(-1, 1).expand(-1, 8))["codes"]
    assert codes.max() == 0x7E


def test_every_row_has_its_own_scale() -> None:
    rows = torch.arange(1.0, 65)[:, None].expand(64, 64)
    opened = CODEC.open(CODEC.seal(rows))
    assert opened[:, 0].round().int().tolist() == list(range(1, 65))


def test_row_size_is_a_byte_per_value_plus_two() -> None:
    for dim in (8, 64, 80, 128, 256):
        sealed = CODEC.seal(torch.randn(3, dim))
        assert [t.numel() * t.itemsize // 3 for t in sealed.values()] == [dim, 2]


def test_outliers_add_no_error_to_their_row() -> None:
    """Eight bits on a uniform grid would lose small values next to a large one."""
    rows = torch.randn(2000, 64)
    rows[:, 3] = 1000.0

    def error(codec: Affine | Fp8) -> float:
        error = (codec.open(codec.seal(rows)) - rows)[:, 4:]
        return float(error.square().mean().sqrt())

    assert error(CODEC) < 0.03
    assert error(Affine(8, 64)) > 10 * error(CODEC)


def test_the_error_on_normal_rows_is_the_known_one() -> None:
    """The error of rounding to four bits at any magnitude."""
    rows = torch.randn(8000, 128)
    error = CODEC.open(CODEC.seal(rows)) - rows
    assert float(error.square().mean().sqrt()) == pytest.approx(0.0257, rel=0.02)


def test_rows_are_visible_sealed_at_once() -> None:
    assert CODEC.tail == 0
    assert not CODEC.exact
    assert CODEC == Fp8(Identity()) != Fp8(Rotation(1))
