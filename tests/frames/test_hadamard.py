from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from kvant.codecs.frames import Rotation
from kvant.codecs.frames.hadamard import make_signs, split_into_blocks, splitmix64

DIMS = (64, 80, 96, 128, 192, 256)
PINNED = [
    (0, 64, 0xF3845BF341EB2A5C),
    (0, 128, 0x27721718F91E554AE81CC43B8E9FDD10),
    (1, 64, 0x183864E0907C0337),
    (2**64 - 1, 80, 0xA1A89F54A4FD6233EC9D),
]


def make_matrix(rotation: Rotation, dim: int) -> Tensor:
    """Compute the matrix by transforming the unit rows."""
    return rotation.transform_rows(torch.eye(dim, dtype=torch.float64)).T


def make_sylvester(size: int) -> Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return h


@pytest.mark.parametrize("dim", [1, 2, 8, *DIMS, 100])
def test_it_is_the_signed_hadamard_matrix_of_each_block(dim: int) -> None:
    expected = torch.block_diag(
        *(make_sylvester(size) / size**0.5 for size in split_into_blocks(dim))
    )
    expected = expected * torch.tensor(make_signs(3, dim), dtype=torch.float64)
    assert torch.allclose(make_matrix(Rotation(3), dim), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dim", DIMS)
def test_it_is_orthogonal(dim: int) -> None:
    a = make_matrix(Rotation(5), dim)
    assert torch.allclose(a @ a.T, torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-13)


def test_other_sizes_split_into_powers_of_two() -> None:
    assert {dim: split_into_blocks(dim) for dim in (64, 80, 96, 192, 100)} == {
        64: [64],
        80: [64, 16],
        96: [64, 32],
        192: [128, 64],
        100: [64, 32, 4],
    }


def test_the_generator_gives_the_published_values() -> None:
    assert list(islice(splitmix64(0), 3)) == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert list(islice(splitmix64(1234567), 2)) == [6457827717110365317, 3203168211198807973]


@pytest.mark.parametrize(("seed", "dim", "bits"), PINNED)
def test_signs_never_change(seed: int, dim: int, bits: int) -> None:
    """Files store rows in this frame: other signs would decode them as noise."""
    assert sum(1 << i for i, sign in enumerate(make_signs(seed, dim)) if sign > 0) == bits


@given(seed=st.integers(0, 2**64 - 2), dim=st.sampled_from(DIMS))
def test_signs_differ_with_seed_and_dim(seed: int, dim: int) -> None:
    signs = make_signs(seed, dim)
    assert set(signs) == {1, -1}
    agree = sum(a == b for a, b in zip(signs, make_signs(seed + 1, dim), strict=True))
    assert 0.2 * dim < agree < 0.8 * dim
    longer = make_signs(seed, dim + 8)
    assert all(signs[16 : dim - 16] != longer[i : i + dim - 32] for i in range(41))


def test_an_outlier_is_spread_evenly() -> None:
    rows = torch.zeros(1, 1, 1, 128)
    rows[..., 17] = 8.0
    assert Rotation().transform_rows(rows).abs().eq(8 * 128**-0.5).all()


def test_nan_row_affects_no_other_row() -> None:
    x = torch.randn(1, 1, 3, 80)
    x[0, 0, 1, 70] = torch.nan
    y = Rotation().transform_rows(x)
    assert y.isnan().any(-1).flatten().tolist() == [False, True, False]


def test_queries_rotate_like_rows() -> None:
    """Keys, values and queries of one layer need the same map, for any number of heads."""
    x = torch.randn(1, 6, 2, 64)
    assert torch.equal(
        Rotation(9).transform_queries(x)[:, ::3], Rotation(9).transform_rows(x[:, ::3])
    )


def test_nothing_is_cached_from_fake_or_meta_tensors() -> None:
    with FakeTensorMode():
        fake = Rotation(4).transform_rows(torch.empty(4, 32, dtype=torch.float64))
    assert isinstance(fake, FakeTensor)
    for dim in (32, 64):
        x = torch.randn(4, dim, dtype=torch.float64)
        assert type(Rotation(4).transform_rows(x)) is Tensor


def test_gradients_equal_those_of_the_matrix() -> None:
    x = torch.randn(3, 80, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 80, dtype=torch.float64)
    (Rotation(2).transform_rows(x) * weights).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, weights @ make_matrix(Rotation(2), 80), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "0"])
def test_invalid_seeds_are_refused(seed: object) -> None:
    with pytest.raises(ValueError, match=r"seed is .* must"):
        Rotation(seed)  # type: ignore[arg-type]
