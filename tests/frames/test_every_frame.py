"""What holds for each frame: scores and rows are what they were without it."""

from dataclasses import replace

import pytest
import torch

from kvant.codecs.frames import FRAMES, Diagonal, FrameProduct, Identity, Rotation
from kvant.contracts import Frame

HEADS, GROUP = 2, 3
DIMS = (64, 80, 96, 128, 192, 256)


def scales(dim: int, heads: int) -> Diagonal:
    values = torch.rand(heads, dim, dtype=torch.float64) * 3 + 0.2
    return Diagonal(tuple(tuple(head) for head in values.tolist()))


def frames(dim: int) -> list[Frame]:
    torch.manual_seed(dim)
    return [
        Identity(),
        Rotation(7),
        scales(dim, HEADS),
        scales(dim, 1),
        FrameProduct((scales(dim, HEADS), Rotation(1), scales(dim, 1))),
        FrameProduct(()),
    ]


cases = pytest.mark.parametrize(
    ("frame", "dim"), [(f, d) for d in DIMS for f in frames(d)], ids=lambda v: type(v).__name__
)


def test_the_table_has_the_names_on_disk() -> None:
    assert list(FRAMES) == ["identity", "rotation", "diagonal", "product"]
    assert [getattr(frame, "name", None) for frame in FRAMES.values()] == list(FRAMES)


@cases
def test_scores_are_preserved(frame: Frame, dim: int) -> None:
    k = torch.randn(2, HEADS, 5, dim, dtype=torch.float64)
    q = torch.randn(2, HEADS * GROUP, 4, dim, dtype=torch.float64)
    stored = frame.transform_rows(k).repeat_interleave(GROUP, 1)
    asked = frame.transform_queries(q)
    expected = q @ k.repeat_interleave(GROUP, 1).mT
    assert torch.allclose(asked @ stored.mT, expected, rtol=0, atol=1e-10)


@cases
def test_rows_come_back(frame: Frame, dim: int) -> None:
    pages = torch.randn(2, 3, HEADS, 4, dim)
    assert torch.allclose(
        frame.restore_outputs(frame.transform_rows(pages)), pages, rtol=1e-5, atol=1e-5
    )


@cases
def test_attention_outputs_leave_the_frame(frame: Frame, dim: int) -> None:
    v = torch.randn(1, HEADS, 5, dim, dtype=torch.float64)
    weights = torch.rand(1, HEADS * GROUP, 4, 5, dtype=torch.float64)
    stored = frame.transform_rows(v).repeat_interleave(GROUP, 1)
    expected = weights @ v.repeat_interleave(GROUP, 1)
    assert torch.allclose(frame.restore_outputs(weights @ stored), expected, rtol=0, atol=1e-10)


@cases
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_stays(frame: Frame, dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(1, HEADS, 3, dim).to(dtype)
    for result in (frame.transform_rows(x), frame.restore_outputs(x)):
        assert result.dtype == dtype
        assert result.shape == x.shape


@cases
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_queries_lose_no_bits(frame: Frame, dim: int, dtype: torch.dtype) -> None:
    q = torch.randn(1, HEADS * GROUP, 3, dim).to(dtype)
    asked = frame.transform_queries(q)
    assert asked.shape == q.shape
    assert torch.equal(
        asked.to(torch.float64), frame.transform_queries(q.to(asked.dtype)).to(torch.float64)
    )
    assert asked.dtype == torch.promote_types(dtype, torch.float32) or torch.equal(asked, q)


@cases
def test_sixteen_bits_round_to_nearest(frame: Frame, dim: int) -> None:
    """Truncation to bfloat16, as elsewhere, makes every value smaller and adds up in scores."""
    x = torch.randn(1, HEADS, 500, dim).bfloat16()
    back = frame.restore_outputs(frame.transform_rows(x)).double()
    assert ((back - x).abs().mean() / x.abs().mean()) < 2**-7
    assert abs(float((back * x).sum() / x.double().square().sum()) - 1) < 2e-4


@cases
def test_a_row_does_not_depend_on_its_neighbours(frame: Frame, dim: int) -> None:
    x = torch.randn(3, HEADS, 7, dim)
    for act in (frame.transform_rows, frame.transform_queries, frame.restore_outputs):
        together = act(x)
        assert torch.equal(act(x[1:2, :, 3:4]), together[1:2, :, 3:4])
        assert torch.equal(act(x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)), together)


@cases
def test_what_inference_mode_built_serves_gradients(frame: Frame, dim: int) -> None:
    frame = replace(frame)  # without what an earlier test built
    x = torch.randn(1, HEADS, 3, dim, dtype=torch.float64)
    with torch.inference_mode():
        frame.restore_outputs(frame.transform_rows(x))
    x.requires_grad_()
    frame.restore_outputs(frame.transform_rows(x)).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, torch.ones_like(x))


@cases
def test_a_frame_of_nothing_is_nothing(frame: Frame, dim: int) -> None:
    x = torch.randn(1, HEADS, 0, dim)
    for act in (frame.transform_rows, frame.transform_queries, frame.restore_outputs):
        assert act(x).shape == x.shape


def test_frames_are_values() -> None:
    for dim in (64, 80):
        assert frames(dim) == frames(dim)
        assert len({hash(frame) for frame in frames(dim)}) == len(frames(dim))
    assert Rotation(1) != Rotation(2)
