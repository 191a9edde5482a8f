"""What holds for each format: sizes, independence of pages, and rows that are not numbers."""

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


def name(codec: object) -> str:
    return f"{type(codec).__name__}-{getattr(codec, 'bits', '')}-{getattr(codec, 'corrected', '')}"


def same_bytes(a: Fields, b: Fields) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k].contiguous().view(torch.uint8), b[k].contiguous().view(torch.uint8))
        for k in a
    )


def picked(fields: Fields, *index: object) -> Fields:
    return {k: t[index] for k, t in fields.items()}


every = pytest.mark.parametrize("codec", CODEC_LIST, ids=name)
lossy = pytest.mark.parametrize("codec", LOSSY, ids=name)


def test_the_table_has_the_names_on_disk() -> None:
    assert list(CODECS) == ["raw", "affine", "codebook", "fp8"]
    assert [getattr(codec, "name", None) for codec in CODECS.values()] == list(CODECS)


@every
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fields_says_what_seal_gives(codec: Codec, dim: int, dtype: torch.dtype) -> None:
    sealed = codec.seal(torch.randn(2, 3, 16, dim).to(dtype))
    fields = codec.fields(dim)
    assert sealed.keys() == fields.keys()
    for key, field in fields.items():
        assert sealed[key].shape == (2, 3, field.height(16), field.width)
        assert sealed[key].dtype == (field.dtype or dtype)


@every
@pytest.mark.parametrize("dim", DIMS)
def test_any_pages_may_be_sealed_in_any_order_and_together(codec: Codec, dim: int) -> None:
    pages = torch.randn(2, 3, 2, 16, dim) * torch.logspace(-6, 4, 16)[:, None]
    together = codec.seal(pages)
    for b in range(2):
        for n in range(3):
            assert same_bytes(codec.seal(pages[b, n]), picked(together, b, n))
    for row in range(16):
        alone = codec.seal(pages[1, 2, 1, row : row + 1])
        assert same_bytes(alone, picked(together, 1, 2, 1, slice(row, row + 1)))
    order = torch.tensor([2, 0, 1])
    assert same_bytes(codec.seal(pages[:, order]), picked(together, slice(None), order))


@every
def test_strides_do_not_matter(codec: Codec) -> None:
    base = torch.randn(16, 80, 3, 2)
    moved = base.permute(3, 2, 0, 1)  # channels are not neighbours in memory
    assert same_bytes(codec.seal(moved), codec.seal(moved.contiguous()))
    wide = torch.randn(2, 3, 16, 96)[..., 5:85]  # rows are neither aligned nor adjacent
    assert same_bytes(codec.seal(wide), codec.seal(wide.contiguous()))
    one = torch.randn(1, 1, 16, 64).expand(2, 3, 16, 64)
    assert same_bytes(codec.seal(one), codec.seal(one.contiguous()))


@every
def test_thousands_of_rows_are_sealed_like_one(codec: Codec) -> None:
    rows = torch.randn(9001, 16)
    sealed = codec.seal(rows)
    for row in (0, 4095, 4096, 8192, 9000):
        assert same_bytes(codec.seal(rows[row]), picked(sealed, row))


@every
def test_every_row_is_sealed(codec: Codec) -> None:
    """An encoder elsewhere ran over a grid that covered row 0 only."""
    rows = torch.arange(64.0)[None, None, :, None].expand(2, 3, 64, 128)
    opened = codec.open(codec.seal(rows))
    expected = [[list(range(64))] * 3] * 2
    for channel in (0, 63, 127):
        # A level may miss the rms by a third: what row 1 opens as is the unit.
        unit = opened[..., 1:2, channel]
        assert (opened[..., channel] / unit).round().int().tolist() == expected


@every
def test_a_page_inside_a_larger_buffer_opens_like_itself(codec: Codec) -> None:
    """A decoder elsewhere took the number of rows for the stride: heads above 0 fell apart."""
    sealed = codec.seal(torch.randn(2, 3, 48, 64))
    opened = codec.open(sealed)
    for first, stop in ((0, 16), (16, 48)):
        part = picked(sealed, slice(None), slice(None), slice(first, stop))
        assert torch.equal(codec.open(part), opened[:, :, first:stop])


@every
def test_what_was_sealed_before_leaves_nothing_behind(codec: Codec) -> None:
    """Sealing over old bytes elsewhere mixed old and new bits after a rewind."""
    rows, other = torch.randn(2, 16, 64), torch.randn(2, 16, 64)
    before = codec.seal(rows)
    codec.seal(other)
    codec.open(codec.seal(other))
    assert same_bytes(codec.seal(rows), before)


@every
def test_neither_rows_nor_fields_are_written_to(codec: Codec) -> None:
    rows = torch.randn(2, 16, 64, dtype=torch.float32)
    kept = rows.clone()
    sealed = codec.seal(rows)
    copies = {k: t.clone() for k, t in sealed.items()}
    codec.open(sealed)
    assert torch.equal(rows, kept)
    assert same_bytes(sealed, copies)


@every
def test_nothing_is_a_number_of_rows_too(codec: Codec) -> None:
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
    rows = torch.randn(16, 48)  # a width that no other test has put in a table
    with torch.inference_mode():
        codec.open(codec.seal(codec.frame.transform_rows(rows)))
    x = rows.clone().requires_grad_()
    codec.frame.restore_outputs(
        codec.open(codec.seal(x)) * codec.frame.transform_rows(x)
    ).sum().backward()
    assert x.grad is not None


@lossy
def test_zero_rows_open_as_exact_zeros(codec: Codec) -> None:
    """A group of equal values has scale 0, a zero row has norm 0: both divided 0 by 0 elsewhere."""
    rows = torch.randn(4, 16, 80)
    rows[1] = 0.0
    rows[2, 3] = -0.0
    opened = codec.open(codec.seal(rows))
    assert opened[1].view(torch.int32).eq(0).all()
    assert opened[2, 3].view(torch.int32).eq(0).all()
    assert opened.isfinite().all()


@lossy
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_no_number_stays_alone(codec: Codec, poison: float) -> None:
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
    assert same_bytes(picked(sealed, keep), picked(clean, keep))


@lossy
def test_all_rows_that_are_no_numbers_are_the_same_bytes(codec: Codec) -> None:
    rows = torch.randn(4, 2, 16)
    rows[0, :, 3], rows[1, :, 4], rows[2, :, 0], rows[3, :, 15] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        9,
    )
    sealed = codec.seal(rows)
    assert same_bytes(picked(sealed, 0), picked(sealed, 1))
    assert same_bytes(picked(sealed, 0), picked(sealed, 2))
    assert not same_bytes(picked(sealed, 0), picked(sealed, 3))


@lossy
def test_the_sign_of_a_zero_is_not_stored(codec: Codec) -> None:
    """A minimum takes whichever zero it meets first, and that depends on how rows lie."""
    rows = torch.randn(64, 64).clamp(min=0)
    rows[:8] = 0.0  # whose maximum is a zero as well
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
def test_values_below_float16_lose_less_than_its_smallest_step(codec: Codec) -> None:
    step = 2.0**-24
    for size in (1e-300, 1e-40, 1e-9, step):
        rows = (torch.rand(8, 16, 64, dtype=torch.float64) * 2 - 1) * size
        assert rms(codec.open(codec.seal(rows)) - rows).max() < step


@pytest.mark.parametrize("dim", [0, -8, 4, 100])
@lossy
def test_a_dim_that_does_not_fill_bytes_is_refused(codec: Codec, dim: int) -> None:
    with pytest.raises(ValueError, match=f"{dim} values"):
        codec.fields(dim)
    if dim > 0:
        with pytest.raises(ValueError, match=f"{dim} values"):
            codec.seal(torch.randn(2, dim))


def test_raw_is_exact_and_has_any_dim() -> None:
    rows = torch.randn(2, 3, 16, 5, dtype=torch.float16)
    assert Raw().exact and Raw().tail == 0
    assert Raw().open(Raw().seal(rows)) is rows
    with pytest.raises(ValueError, match="0 values"):
        Raw().fields(0)


def test_recipes_are_values() -> None:
    assert Affine(4, 32) == Affine(4, 32) != Affine(4, 64)
    assert hash(Codebook(3)) == hash(Codebook(3, frame=Rotation(0)))
    assert Codebook(frame=Rotation(1)) != Codebook()


def rms(x: Tensor) -> Tensor:
    return x.double().square().mean(-1).sqrt()
