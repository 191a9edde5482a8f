"""Test properties of every format: sizes, independence of pages, and NaN rows."""

import pytest
import torch
from torch import Tensor

from kvant.codecs import CODECS, Affine, Codebook, Fp8, Raw
from kvant.codecs.frames import Rotation
from kvant.contracts import Codec, Fields

CODEC_LIST: list[Codec] = [
    Raw(),
    *(
        Affine(bits, group)
        for bits, group in ((2, 16), (3, 32), (4, 32), (5, 64), (6, 128), (8, 64))
    ),
    Affine(4, 32, corrected=False),
    *(Codebook(bits, corrected) for bits in (2, 3, 4) for corrected in (True, False)),
    Fp8(),
]
LOSSY = [codec for codec in CODEC_LIST if not codec.exact]
DIMS = (8, 64, 80, 128)


def codec_name(codec: object) -> str:
    return f"{type(codec).__name__}-{getattr(codec, 'bits', '')}-{getattr(codec, 'corrected', '')}"


def same_bytes(a: Fields, b: Fields) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k].contiguous().view(torch.uint8), b[k].contiguous().view(torch.uint8))
        for k in a
    )


def pick_pages(fields: Fields, *index: object) -> Fields:
    return {k: t[index] for k, t in fields.items()}


every = pytest.mark.parametrize("codec", CODEC_LIST, ids=codec_name)
lossy = pytest.mark.parametrize("codec", LOSSY, ids=codec_name)


def test_codec_table_has_the_names_on_disk() -> None:
    assert list(CODECS) == ["raw", "affine", "codebook", "fp8"]
    assert [getattr(codec, "name", None) for codec in CODECS.values()] == list(CODECS)


@every
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fields_describe_the_output_of_seal(codec: Codec, dim: int, dtype: torch.dtype) -> None:
    sealed = codec.seal(torch.randn(2, 3, 16, dim).to(dtype))
    fields = codec.fields(dim)
    assert sealed.keys() == fields.keys()
    for key, field in fields.items():
        assert sealed[key].shape == (2, 3, field.height(16), field.width)
        assert sealed[key].dtype == (field.dtype or dtype)


@every
@pytest.mark.parametrize("dim", DIMS)
def test_pages_seal_alike_in_any_order_or_batch(codec: Codec, dim: int) -> None:
    pages = torch.randn(2, 3, 2, 16, dim) * torch.logspace(-6, 4, 16)[:, None]
    batched = codec.seal(pages)
    for b in range(2):
        for n in range(3):
            assert same_bytes(codec.seal(pages[b, n]), pick_pages(batched, b, n))
    for row in range(16):
        single = codec.seal(pages[1, 2, 1, row : row + 1])
        assert same_bytes(single, pick_pages(batched, 1, 2, 1, slice(row, row + 1)))
    order = torch.tensor([2, 0, 1])
    assert same_bytes(codec.seal(pages[:, order]), pick_pages(batched, slice(None), order))


@every
def test_strides_do_not_matter(codec: Codec) -> None:
    base = torch.randn(16, 80, 3, 2)
    permuted = base.permute(3, 2, 0, 1)  # channels are not adjacent in memory
    assert same_bytes(codec.seal(permuted), codec.seal(permuted.contiguous()))
    wide_rows = torch.randn(2, 3, 16, 96)[..., 5:85]  # rows are neither aligned nor adjacent
    assert same_bytes(codec.seal(wide_rows), codec.seal(wide_rows.contiguous()))
    expanded = torch.randn(1, 1, 16, 64).expand(2, 3, 16, 64)
    assert same_bytes(codec.seal(expanded), codec.seal(expanded.contiguous()))


@every
def test_sealing_thousands_of_rows_equals_one_by_one(codec: Codec) -> None:
    rows = torch.randn(9001, 16)
    sealed = codec.seal(rows)
    for row in (0, 4095, 4096, 8192, 9000):
        assert same_bytes(codec.seal(rows[row]), pick_pages(sealed, row))


@every
def test_every_row_is_sealed(codec: Codec) -> None:
    """Regression elsewhere: an encoder ran over a grid that covered row 0 only."""
    rows = torch.arange(64.0)[None, None, :, None].expand(2, 3, 64, 128)
    opened = codec.open(codec.seal(rows))
    expected = [[list(range(64))] * 3] * 2
    for channel in (0, 63, 127):
        # A level may differ from the rms by a third: the decoded row 1 is the unit.
        unit = opened[..., 1:2, channel]
        assert (opened[..., channel] / unit).round().int().tolist() == expected


@every
def test_page_inside_a_larger_buffer_opens_the_same(codec: Codec) -> None:
    """Regression elsewhere: a decoder used the row count as stride, which broke heads above 0."""
    sealed = codec.seal(torch.randn(2, 3, 48, 64))
    opened = codec.open(sealed)
    for first, stop in ((0, 16), (16, 48)):
        part = pick_pages(sealed, slice(None), slice(None), slice(first, stop))
        assert torch.equal(codec.open(part), opened[:, :, first:stop])


@every
def test_reused_output_buffers_leave_no_residue(codec: Codec) -> None:
    """Regression elsewhere: sealing over old bytes mixed old and new bits after a rewind."""
    rows, other = torch.randn(2, 16, 64), torch.randn(2, 16, 64)
    before = codec.seal(rows)
    codec.seal(other)
    codec.open(codec.seal(other))
    assert same_bytes(codec.seal(rows), before)


@every
def test_rows_and_fields_are_not_modified(codec: Codec) -> None:
    rows = torch.randn(2, 16, 64, dtype=torch.float32)
    original = rows.clone()
    sealed = codec.seal(rows)
    copies = {k: t.clone() for k, t in sealed.items()}
    codec.open(sealed)
    assert torch.equal(rows, original)
    assert same_bytes(sealed, copies)


@every
def test_zero_rows_can_be_sealed(codec: Codec) -> None:
    for shape in ((0, 2, 16, 64), (1, 0, 16, 64), (1, 2, 0, 64)):
        assert codec.open(codec.seal(torch.randn(shape))).shape == shape


@lossy
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_of_another_dtype_are_sealed_as_float32(codec: Codec, dtype: torch.dtype) -> None:
    rows = torch.randn(3, 16, 64).to(dtype)
    assert same_bytes(codec.seal(rows), codec.seal(rows.float()))
    assert codec.open(codec.seal(rows)).dtype == torch.float32


@lossy
def test_sealed_pages_have_no_gradient(codec: Codec) -> None:
    sealed = codec.seal(torch.randn(2, 16, 64, requires_grad=True))
    assert not any(t.requires_grad for t in sealed.values())


@lossy
def test_sealing_in_inference_mode_leaves_tables_usable_outside(codec: Codec) -> None:
    rows = torch.randn(16, 48)  # a width that no other test has cached a table for
    with torch.inference_mode():
        codec.open(codec.seal(codec.frame.transform_rows(rows)))
    x = rows.clone().requires_grad_()
    codec.frame.restore_outputs(
        codec.open(codec.seal(x)) * codec.frame.transform_rows(x)
    ).sum().backward()
    assert x.grad is not None


@lossy
def test_all_zero_rows_open_as_exact_zeros(codec: Codec) -> None:
    """A group of equal values has scale 0, a zero row has norm 0: other libraries divided 0 by
    0.
    """
    rows = torch.randn(4, 16, 80)
    rows[1] = 0.0
    rows[2, 3] = -0.0
    opened = codec.open(codec.seal(rows))
    assert opened[1].view(torch.int32).eq(0).all()
    assert opened[2, 3].view(torch.int32).eq(0).all()
    assert opened.isfinite().all()


@lossy
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_nan_row_affects_no_other_row(codec: Codec, poison: float) -> None:
    rows = torch.randn(2, 3, 16, 128)
    clean = codec.seal(rows)
    rows[1, 2, 5, 70] = poison
    sealed = codec.seal(rows)
    opened = codec.open(sealed)
    broken = opened.isnan()
    assert broken[1, 2, 5, 64:80].all()
    assert opened[~broken].isfinite().all()
    broken[1, 2, 5] = False
    assert not broken.any()
    keep = torch.ones(2, 3, 16, dtype=torch.bool)
    keep[1, 2, 5] = False
    assert same_bytes(pick_pages(sealed, keep), pick_pages(clean, keep))


@lossy
def test_all_nan_rows_have_the_same_bytes(codec: Codec) -> None:
    rows = torch.randn(4, 2, 16)
    rows[0, :, 3], rows[1, :, 4], rows[2, :, 0], rows[3, :, 15] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        9,
    )
    sealed = codec.seal(rows)
    assert same_bytes(pick_pages(sealed, 0), pick_pages(sealed, 1))
    assert same_bytes(pick_pages(sealed, 0), pick_pages(sealed, 2))
    assert not same_bytes(pick_pages(sealed, 0), pick_pages(sealed, 3))


@lossy
def test_the_sign_of_a_zero_is_not_stored(codec: Codec) -> None:
    """A minimum returns the first zero it meets, which depends on the memory layout."""
    rows = torch.randn(64, 64).clamp(min=0)
    rows[:8] = 0.0  # their maximum is a zero as well
    signed = torch.where((rows == 0) & (torch.rand(64, 64) < 0.5), -0.0, rows)
    assert signed.signbit().any()
    assert same_bytes(codec.seal(signed), codec.seal(rows))


@lossy
def test_values_beyond_float16_saturate(codec: Codec) -> None:
    rows = (torch.rand(4, 16, 64) * 2 - 1) * 3e38
    assert same_bytes(codec.seal(rows), codec.seal(rows.clamp(-65504, 65504)))
    assert same_bytes(codec.seal(rows.double() * 1e200), codec.seal(rows.sign() * 65504))
    assert codec.open(codec.seal(rows)).isfinite().all()


@lossy
def test_values_below_float16_have_error_under_its_smallest_step(codec: Codec) -> None:
    step = 2.0**-24
    for size in (1e-300, 1e-40, 1e-9, step):
        rows = (torch.rand(8, 16, 64, dtype=torch.float64) * 2 - 1) * size
        assert rms(codec.open(codec.seal(rows)) - rows).max() < step


@pytest.mark.parametrize("dim", [0, -8, 4, 100])
@lossy
def test_dim_that_does_not_fill_bytes_is_refused(codec: Codec, dim: int) -> None:
    with pytest.raises(ValueError, match=f"{dim} values"):
        codec.fields(dim)
    if dim > 0:
        with pytest.raises(ValueError, match=f"{dim} values"):
            codec.seal(torch.randn(2, dim))


def test_raw_is_exact_for_any_dim() -> None:
    rows = torch.randn(2, 3, 16, 5, dtype=torch.float16)
    assert Raw().exact and Raw().tail == 0
    assert Raw().open(Raw().seal(rows)) is rows
    with pytest.raises(ValueError, match="0 values"):
        Raw().fields(0)


def test_recipes_compare_by_value() -> None:
    assert Affine(4, 32) == Affine(4, 32) != Affine(4, 64)
    assert hash(Codebook(3)) == hash(Codebook(3, frame=Rotation(0)))
    assert Codebook(frame=Rotation(1)) != Codebook()


def rms(x: Tensor) -> Tensor:
    return x.double().square().mean(-1).sqrt()
