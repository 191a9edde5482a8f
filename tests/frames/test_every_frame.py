"""Test properties of every frame: scores and rows equal those without it."""

from dataclasses import replace

import pytest
import torch

from kvant.codecs.frames import FRAMES, Diagonal, FrameProduct, Identity, Rotation
from kvant.contracts import Frame

HEADS, GROUP = 2, 3
DIMS = (64, 80, 96, 128, 192, 256)


def make_scales(dim: int, heads: int) -> Diagonal:
    values = torch.rand(heads, dim, dtype=torch.float64) * 3 + 0.2
    return Diagonal(tuple(tuple(head) for head in values.tolist()))


def list_frames(dim: int) -> list[Frame]:
    torch.manual_seed(dim)
    return [
        Identity(),
        Rotation(7),
        make_scales(dim, HEADS),
        make_scales(dim, 1),
        FrameProduct((make_scales(dim, HEADS), Rotation(1), make_scales(dim, 1))),
        FrameProduct(()),
    ]


cases = pytest.mark.parametrize(
    ("frame", "dim"), [(f, d) for d in DIMS for f in list_frames(d)], ids=lambda v: type(v).__name__
)


def test_frame_table_has_the_names_on_disk() -> None:
    assert list(FRAMES) == ["identity", "rotation", "diagonal", "product"]
    assert [getattr(frame, "name", None) for frame in FRAMES.values()] == list(FRAMES)


@cases
def test_scores_are_preserved(frame: Frame, dim: int) -> None:
    k = torch.randn(2, HEADS, 5, dim, dtype=torch.float64)
    q = torch.randn(2, HEADS * GROUP, 4, dim, dtype=torch.float64)
    stored = frame.transform_rows(k).repeat_interleave(GROUP, 1)
    framed = frame.transform_queries(q)
    expected = q @ k.repeat_interleave(GROUP, 1).mT
    assert torch.allclose(framed @ stored.mT, expected, rtol=0, atol=1e-10)


@cases
def test_inverse_recovers_the_rows(frame: Frame, dim: int) -> None:
    pages = torch.randn(2, 3, HEADS, 4, dim)
    assert torch.allclose(
        frame.restore_outputs(frame.transform_rows(pages)), pages, rtol=1e-5, atol=1e-5
    )


@cases
def test_attention_outputs_are_rotated_back(frame: Frame, dim: int) -> None:
    v = torch.randn(1, HEADS, 5, dim, dtype=torch.float64)
    weights = torch.rand(1, HEADS * GROUP, 4, 5, dtype=torch.float64)
    stored = frame.transform_rows(v).repeat_interleave(GROUP, 1)
    expected = weights @ v.repeat_interleave(GROUP, 1)
    assert torch.allclose(frame.restore_outputs(weights @ stored), expected, rtol=0, atol=1e-10)


@cases
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_preserved(frame: Frame, dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(1, HEADS, 3, dim).to(dtype)
    for result in (frame.transform_rows(x), frame.restore_outputs(x)):
        assert result.dtype == dtype
        assert result.shape == x.shape


@cases
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_queries_keep_full_precision(frame: Frame, dim: int, dtype: torch.dtype) -> None:
    q = torch.randn(1, HEADS * GROUP, 3, dim).to(dtype)
    framed = frame.transform_queries(q)
    assert framed.shape == q.shape
    assert torch.equal(
        framed.to(torch.float64), frame.transform_queries(q.to(framed.dtype)).to(torch.float64)
    )
    assert framed.dtype == torch.promote_types(dtype, torch.float32) or torch.equal(framed, q)


@cases
def test_sixteen_bits_round_to_nearest(frame: Frame, dim: int) -> None:
    """Truncation to bfloat16 makes every value smaller, which accumulates in scores."""
    x = torch.randn(1, HEADS, 500, dim).bfloat16()
    decoded = frame.restore_outputs(frame.transform_rows(x)).double()
    assert ((decoded - x).abs().mean() / x.abs().mean()) < 2**-7
    assert abs(float((decoded * x).sum() / x.double().square().sum()) - 1) < 2e-4


@cases
def test_a_row_does_not_depend_on_its_neighbours(frame: Frame, dim: int) -> None:
    x = torch.randn(3, HEADS, 7, dim)
    for act in (frame.transform_rows, frame.transform_queries, frame.restore_outputs):
        batched = act(x)
        assert torch.equal(act(x[1:2, :, 3:4]), batched[1:2, :, 3:4])
        assert torch.equal(act(x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)), batched)


@cases
def test_tables_built_in_inference_mode_support_gradients(frame: Frame, dim: int) -> None:
    frame = replace(frame)  # without tables cached by an earlier test
    x = torch.randn(1, HEADS, 3, dim, dtype=torch.float64)
    with torch.inference_mode():
        frame.restore_outputs(frame.transform_rows(x))
    x.requires_grad_()
    frame.restore_outputs(frame.transform_rows(x)).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, torch.ones_like(x))


@cases
def test_frame_of_zero_rows_is_empty(frame: Frame, dim: int) -> None:
    x = torch.randn(1, HEADS, 0, dim)
    for act in (frame.transform_rows, frame.transform_queries, frame.restore_outputs):
        assert act(x).shape == x.shape


def test_frames_compare_by_value() -> None:
    for dim in (64, 80):
        assert list_frames(dim) == list_frames(dim)
        assert len({hash(frame) for frame in list_frames(dim)}) == len(list_frames(dim))
    assert Rotation(1) != Rotation(2)
