import pytest
import torch

from kvant.codecs.frames import Diagonal


def test_each_head_has_its_own_row() -> None:
    frame = Diagonal(((1.0, 2.0), (4.0, -8.0)))
    x = torch.ones(1, 2, 1, 2)
    assert frame.transform_rows(x).tolist() == [[[[1, 2]], [[4, -8]]]]
    assert frame.transform_queries(x).tolist() == [[[[1, 0.5]], [[0.25, -0.125]]]]


def test_queries_of_a_kv_head_are_adjacent() -> None:
    """Heads 0 and 1 use KV head 0, heads 2 and 3 use KV head 1."""
    frame = Diagonal(((1.0,), (4.0,)))
    x = torch.ones(1, 4, 1, 1)
    assert frame.transform_queries(x).flatten().tolist() == [1, 1, 0.25, 0.25]
    assert frame.restore_outputs(x).flatten().tolist() == [1, 1, 0.25, 0.25]


def test_one_row_serves_any_number_of_heads() -> None:
    frame = Diagonal(((2.0, 4.0),))
    assert frame.transform_rows(torch.ones(3, 5, 1, 2))[2, 4, 0].tolist() == [2, 4]
    assert frame.restore_outputs(torch.ones(3, 7, 1, 2))[2, 6, 0].tolist() == [0.5, 0.25]


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), float("inf"), 1e-40, 1e40])
def test_a_scale_without_an_inverse_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="magnitudes must lie"):
        Diagonal(((1.0, 1.0), (1.0, value)))


@pytest.mark.parametrize("scale", [(), ((),), ((1.0,), (1.0, 2.0))])
def test_scale_of_wrong_rank_is_refused(scale: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(ValueError, match="every head needs the same number"):
        Diagonal(scale)


def test_rows_of_wrong_shape_are_refused() -> None:
    frame = Diagonal(((1.0, 2.0), (4.0, 8.0)))
    with pytest.raises(ValueError, match="3 channels; this scale has 2"):
        frame.transform_rows(torch.ones(1, 2, 1, 3))
    with pytest.raises(ValueError, match="3 heads are no multiple of the 2"):
        frame.transform_rows(torch.ones(1, 3, 1, 2))


def test_sixteen_bit_rows_are_multiplied_in_float32() -> None:
    frame = Diagonal(((1 / 3,),))
    x = torch.full((1, 1, 1, 1), 3.0, dtype=torch.bfloat16)
    assert float(frame.transform_rows(x)) == 1.0


def test_factors_are_computed_once_per_head_count() -> None:
    """On a GPU each token would copy them, which synchronizes and prevents capture."""
    frame = Diagonal(((1.0, 2.0), (4.0, 8.0)))
    two, four = torch.ones(1, 2, 3, 2), torch.ones(1, 4, 1, 2)
    with torch.inference_mode():
        first = frame._get_factors(two)
    assert frame._get_factors(two) is first and not first.is_inference()
    assert frame._get_factors(four)[:, 0].tolist() == [[1, 2], [1, 2], [4, 8], [4, 8]]
    assert frame._get_factors(two.double()).dtype == torch.float64
