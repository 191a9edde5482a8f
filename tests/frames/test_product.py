import torch

from kvant.codecs.frames import Diagonal, FrameProduct, Rotation

SCALE = Diagonal((tuple(float(i + 1) for i in range(8)),))


def test_first_frame_is_applied_to_rows_first() -> None:
    x = torch.randn(1, 1, 3, 8)
    frame = FrameProduct((SCALE, Rotation(4)))
    assert torch.equal(frame.transform_rows(x), Rotation(4).transform_rows(SCALE.transform_rows(x)))
    assert not torch.allclose(
        frame.transform_rows(x), SCALE.transform_rows(Rotation(4).transform_rows(x))
    )


def test_last_frame_is_undone_first() -> None:
    x = torch.randn(1, 1, 3, 8)
    frame = FrameProduct((SCALE, Rotation(4)))
    assert torch.equal(
        frame.restore_outputs(x), SCALE.restore_outputs(Rotation(4).restore_outputs(x))
    )


def test_products_nest() -> None:
    x = torch.randn(1, 1, 3, 8)
    nested = FrameProduct((FrameProduct((SCALE, Rotation(4))), SCALE))
    assert torch.equal(
        nested.transform_rows(x), FrameProduct((SCALE, Rotation(4), SCALE)).transform_rows(x)
    )
    assert torch.allclose(nested.restore_outputs(nested.transform_rows(x)), x, atol=1e-5)
