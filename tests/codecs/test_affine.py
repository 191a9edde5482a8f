from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvant.codecs import Affine
from kvant.codecs.packing import unpack_codes

LIMIT = 65504.0
WIDTHS = (2, 3, 4, 5, 6, 8)
widths = pytest.mark.parametrize("bits", WIDTHS)


def row_nbytes(codec: Affine, dim: int) -> int:
    return sum(field.dtype.itemsize * field.width for field in codec.fields(dim).values())


def measure_error(codec: Affine, rows: Tensor) -> float:
    return float((codec.open(codec.seal(rows)) - rows).square().mean())


def with_covering_scale(codec: Affine) -> Affine:
    return replace(codec, corrected=False)


def assert_within_half_a_step(codec: Affine, rows: Tensor) -> None:
    codec = with_covering_scale(codec)
    sealed = codec.seal(rows)
    step = sealed["scale"].double().repeat_interleave(codec.group, -1)[..., : rows.shape[-1]]
    x = rows.double().clamp(-LIMIT, LIMIT)
    error = (codec.open(sealed).double() - x).abs()
    # float32 rounds the quotient, at most 255, and the sum.
    assert (error <= step * (0.5 + 2**-14) + x.abs() * 2**-23).all()


def exact_errors(codec: Affine, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the error of each stored value before float32 rounding, and each scale."""
    sealed, dim = codec.seal(rows), rows.shape[-1]
    scale, bias = (
        sealed[name].double().repeat_interleave(codec.group, -1)[..., :dim]
        for name in ("scale", "bias")
    )
    codes = unpack_codes(sealed["codes"], codec.bits).double()
    return bias + codes * scale - rows.double().clamp(-LIMIT, LIMIT), scale


def assert_no_worse_than_covering(codec: Affine, rows: Tensor) -> None:
    (fitted, _), (plain, scale) = (
        exact_errors(codec, rows),
        exact_errors(with_covering_scale(codec), rows),
    )
    x = rows.double().abs().clamp(max=LIMIT)
    for first in range(0, rows.shape[-1], codec.group):
        part = slice(first, first + codec.group)
        n = rows[..., part].shape[-1]
        # Codes are computed in float32 from numbers of the size of x.
        noise = n**0.5 * x[..., part].amax(-1) * 2**-23
        fitted_error, theirs = (e[..., part].square().sum(-1).sqrt() for e in (fitted, plain))
        assert (fitted_error <= theirs * (1 + 2**-12) + noise).all()
        largest_error = fitted[..., part].abs().amax(-1)
        float32 = x[..., part].amax(-1) * 2**-23  # codes are computed in float32
        bound = scale[..., first] * (0.5 + 2**-14)
        assert (largest_error <= n**0.5 * (bound + float32)).all()


def make_hard_rows(dim: int) -> Tensor:
    """Return rows with outliers, two values, equal values, tiny, subnormal and huge values, and
    offsets.
    """
    noise = torch.randn(12, 40, dim)
    kinds = [noise[0], noise[1] * 1e30, noise[2] * 1e-6, noise[3] * 1e-9, noise[4] * 2e4]
    kinds += [noise[5] + 1000, noise[6] * 1e-3 - 60000, noise[7].sign() * 3, noise[8].exp() ** 3]
    spike, odd = noise[9].clone(), torch.full((40, dim), 7.7)
    spike[:, 5] = 4000
    odd[:, 3] = 7.8
    skew = torch.where(noise[10] > 0, 0.499, 0.501) * noise[11].abs().round()
    return torch.stack([*kinds, spike, odd, skew])


@widths
@pytest.mark.parametrize("dim", [16, 48, 128])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_no_group_has_more_error_than_with_the_covering_scale(
    bits: int, dim: int, group: int
) -> None:
    codec = Affine(bits, group)
    assert_no_worse_than_covering(codec, make_hard_rows(dim))


@widths
def test_correction_is_the_least_squares_fit_to_the_covering_codes(bits: int) -> None:
    rows = torch.randn(300, 64)
    fitted, plain = Affine(bits, 64).seal(rows), Affine(bits, 64, corrected=False).seal(rows)
    codes = unpack_codes(plain["codes"], bits).double()
    design = torch.stack((codes, torch.ones_like(codes)), -1)
    best = torch.linalg.lstsq(design, rows.double()[..., None]).solution
    scale, bias = fitted["scale"].double(), fitted["bias"].double()
    corrected_groups = (scale != plain["scale"]) | (bias != plain["bias"])
    assert corrected_groups.double().mean() > 0.5
    assert ((scale / best[:, 0] - 1).abs() < 2**-11 * 1.01)[corrected_groups].all()
    level = rows.double().mean(-1, keepdim=True) - scale * codes.mean(-1, keepdim=True)
    assert ((bias - level).abs() <= level.abs() * 2**-11 + 2**-25)[corrected_groups].all()
    refitted_codes = ((rows.double() - bias) / scale).round().clamp(0, 2**bits - 1)
    assert (unpack_codes(fitted["codes"], bits) == refitted_codes).double().mean() > 0.999


@widths
def test_correction_reduces_the_error(bits: int) -> None:
    rows = torch.randn(4000, 128)
    assert measure_error(Affine(bits, 16), rows) < 0.92 * measure_error(
        with_covering_scale(Affine(bits, 16)), rows
    )


@widths
@pytest.mark.parametrize("corrected", [True, False])
def test_values_on_a_grid_are_exact(bits: int, corrected: bool) -> None:
    """Both ends of the grid occur, and float32 represents its values."""
    codes = torch.randint(0, 2**bits, (400, 32))
    codes[:, 3], codes[:, 9] = 0, 2**bits - 1
    scale = (torch.rand(400, 1) + 1).half() * 2.0 ** torch.randint(-14, 6, (400, 1))
    bias = scale * torch.randint(-1000, 1000, (400, 1))
    scale, bias = scale.half().double(), bias.half().double()
    rows = (bias + scale * codes).float()
    exact = (rows.double() == bias + scale * codes).all(-1)
    assert exact.sum() > 100
    rows = rows[exact]
    codec = Affine(bits, 32, corrected=corrected)
    assert torch.equal(codec.open(codec.seal(rows)), rows)


@widths
def test_resealing_opened_rows_gives_the_same_values(bits: int) -> None:
    """Up to float32 rounding of the largest value.

    Codes must use both ends; they need not if the bias is rounded by more than a step.
    """
    codec = Affine(bits, 32)
    rows = make_hard_rows(64)
    sealed = codec.seal(rows)
    codes = unpack_codes(sealed["codes"], bits).unflatten(-1, (2, 32))
    whole = (codes.amin(-1) == 0) & (codes.amax(-1) == 2**bits - 1)
    assert whole.double().mean() > 0.4
    opened = codec.open(sealed).unflatten(-1, (2, 32))
    resealed = codec.seal(opened.flatten(-2))
    assert torch.equal(
        unpack_codes(resealed["codes"], bits).unflatten(-1, (2, 32))[whole], codes[whole]
    )
    error = (codec.open(resealed).unflatten(-1, (2, 32)) - opened).abs()
    assert (error.amax(-1) <= opened.abs().amax(-1) * 2**-23)[whole].all()


def test_no_bias_is_a_negative_zero() -> None:
    rows = torch.randn(5000, 16) * 1e-7
    rows[:, 0] = 0.0
    sealed = Affine(2, 16).seal(rows)
    zero = sealed["bias"] == 0
    assert zero.any() and not sealed["bias"][zero].signbit().any()


@widths
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_uncorrected_values_move_by_at_most_half_a_scale(bits: int, dim: int, group: int) -> None:
    size = torch.logspace(-9, 6, 40)[:, None]
    shift = torch.randn(40, 1) * torch.logspace(-3, 3, 40)[torch.randperm(40), None]
    assert_within_half_a_step(Affine(bits, group), torch.randn(5, 40, dim) * size + shift)


@given(
    values=st.lists(st.floats(width=32), min_size=24, max_size=24),
    bits=st.sampled_from(WIDTHS),
)
def test_any_floats_at_all_have_a_defined_outcome(values: list[float], bits: int) -> None:
    codec = Affine(bits, 16)
    rows = torch.tensor(values)
    opened = codec.open(codec.seal(rows))
    assert torch.equal(
        opened.isnan(),
        with_covering_scale(codec).open(with_covering_scale(codec).seal(rows)).isnan(),
    )
    for part in (slice(0, 16), slice(16, 24)):
        if rows[part].isfinite().all():
            single = torch.zeros(16)
            single[: len(rows[part])] = rows[part]
            assert opened[part].isfinite().all()
        else:
            assert opened[part].isnan().all()
    rows = torch.where(opened.isnan(), 0.0, rows)
    assert_within_half_a_step(codec, rows)
    assert_no_worse_than_covering(codec, rows)


@widths
def test_scale_is_no_larger_than_the_range_needs(bits: int) -> None:
    rows = torch.randn(200, 64)
    sealed = Affine(bits, 64, corrected=False).seal(rows)
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    bias = sealed["bias"].float()
    assert (bias <= low).all() and (bias >= low - low.abs() * 2**-10).all()
    need = (high - bias) / (2**bits - 1)
    assert (sealed["scale"] >= need).all() and (sealed["scale"] <= need * (1 + 2**-9)).all()


@widths
@pytest.mark.parametrize("value", [1.0, 0.1, -3.3, 1e-3, 12345.678, -65504.0, 65504.0, 7e-5])
def test_a_constant_group_opens_within_float16(bits: int, value: float) -> None:
    codec = Affine(bits, 32)
    opened = codec.open(codec.seal(torch.full((3, 64), value)))
    assert (opened - value).abs().max() <= max(abs(value) * 2**-11, 2**-24)
    exact = float(torch.tensor(value).half())
    assert codec.open(codec.seal(torch.full((3, 64), exact))).eq(exact).all()


@pytest.mark.parametrize("channel", [0, 31, 32, 79])
def test_only_the_group_of_a_nan_is_lost(channel: int) -> None:
    rows = torch.randn(3, 80)
    rows[1, channel] = torch.nan
    codec = Affine(4, 32)
    lost = codec.open(codec.seal(rows)).isnan()
    first = channel // 32 * 32
    assert lost[1].nonzero().flatten().tolist() == list(range(first, min(first + 32, 80)))
    assert lost.sum() == lost[1].sum()


def test_short_last_group_has_its_own_scale() -> None:
    rows = torch.cat((torch.randn(9, 64) * 100, torch.randn(9, 16)), dim=-1)
    codec = Affine(8, 64)
    assert codec.fields(80)["scale"].width == 2
    error = (codec.open(codec.seal(rows)) - rows).abs()
    assert error[:, :64].max() > 0.1 > 0.02 > error[:, 64:].max()
    assert codec.fields(32)["scale"].width == 1
    assert_within_half_a_step(codec, rows[:, :32])


@widths
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_row_size_is_value_bits_plus_32_per_group(bits: int, group: int) -> None:
    for dim in (64, 80, 128, 192, 256):
        groups = (dim + group - 1) // group
        assert row_nbytes(Affine(bits, group), dim) * 8 == dim * bits + 32 * groups


def test_published_sizes_against_bfloat16() -> None:
    assert row_nbytes(Affine(8, 64), 128) / 256 == 0.53125
    assert row_nbytes(Affine(4, 32), 128) / 256 == 0.3125
    codes = [Affine(bits, 32).fields(128)["codes"].width for bits in (8, 4)]
    assert codes == [128, 64]


def test_rows_with_outliers_survive_at_the_size_of_a_real_model() -> None:
    """8 heads of 128 channels with a spike per head: errors stay within each group's range."""
    rows = torch.randn(8, 64, 128)
    for head in range(8):
        rows[head, :, 16 * head + 3] = 40.0
    for bits in WIDTHS:
        assert_within_half_a_step(Affine(bits, 32), rows)


def test_smaller_groups_have_less_error_next_to_an_outlier() -> None:
    """Groups of 64 at 4 bits made text degenerate in other libraries; groups of 16 did not."""
    rows = torch.randn(8, 64, 128)
    for head in range(8):
        rows[head, :, 16 * head + 3] = 40.0
    errors = [measure_error(Affine(4, group), rows) for group in (16, 32, 64, 128)]
    assert errors == sorted(errors)
    assert errors[3] > 3 * errors[0]
    assert measure_error(Affine(8, 64), rows) < errors[0] / 10


@widths
def test_one_more_bit_quarters_the_error(bits: int) -> None:
    rows = torch.randn(2000, 128)
    more = measure_error(
        with_covering_scale(Affine(min(bits + 1, 8) if bits != 6 else 8, 64)), rows
    )
    if bits < 8:
        steps = ((2 ** (bits + (2 if bits == 6 else 1)) - 1) / (2**bits - 1)) ** 2
        assert measure_error(with_covering_scale(Affine(bits, 64)), rows) / more == pytest.approx(
            steps, rel=0.05
        )


@pytest.mark.parametrize(
    ("bits", "group", "expected"),
    [(2, 32, 0.1544), (2, 128, 0.2507), (3, 64, 0.0370), (4, 32, 0.00612), (4, 64, 0.00804)],
)
def test_the_error_on_normal_rows_is_the_known_one(bits: int, group: int, expected: float) -> None:
    """With the covering scale, which other libraries store."""
    codec = Affine(bits, group, corrected=False)
    assert measure_error(codec, torch.randn(8000, 128)) == pytest.approx(expected, rel=0.02)


@widths
def test_low_bit_formats_require_a_dense_tail(bits: int) -> None:
    assert Affine(bits).tail == (0 if bits >= 6 else 128)
    assert not Affine(bits).exact


@pytest.mark.parametrize(
    ("bits", "group", "message"),
    [(7, 64, "7.*2, 3, 4"), (4.0, 64, "4.0"), (4, 48, "48.*16, 32, 64"), (4, True, "True")],
)
def test_other_widths_and_groups_are_refused(bits: int, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Affine(bits, group)
