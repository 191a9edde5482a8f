import torch

from kvant.codecs.frames import Diagonal, Product, Rotation

SCALE = Diagonal((tuple(float(i + 1) for i in range(8)),))


def test_the_first_frame_meets_the_rows_first() -> None:
    x = torch.randn(1, 1, 3, 8)
    frame = Product((SCALE, Rotation(4)))
    assert torch.equal(frame.rows(x), Rotation(4).rows(SCALE.rows(x)))
    assert not torch.allclose(frame.rows(x), SCALE.rows(Rotation(4).rows(x)))


def test_the_last_frame_is_left_first() -> None:
    x = torch.randn(1, 1, 3, 8)
    frame = Product((SCALE, Rotation(4)))
    assert torch.equal(frame.outputs(x), SCALE.outputs(Rotation(4).outputs(x)))


def test_products_nest() -> None:
    x = torch.randn(1, 1, 3, 8)
    nested = Product((Product((SCALE, Rotation(4))), SCALE))
    assert torch.equal(nested.rows(x), Product((SCALE, Rotation(4), SCALE)).rows(x))
    assert torch.allclose(nested.outputs(nested.rows(x)), x, atol=1e-5)
