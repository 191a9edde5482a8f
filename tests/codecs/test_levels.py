from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
import torch

from codebook_error import compute_corrected_mse, compute_mse
from kvant.codecs.codebook import (
    compute_boundaries,
    compute_levels,
)

BITS = (2, 3, 4)
DIMS = (8, 64, 80, 128, 256)
cases = pytest.mark.parametrize(("bits", "dim"), [(b, d) for b in BITS for d in DIMS])


def random_directions(rows: int, dim: int) -> torch.Tensor:
    """Return random directions of norm sqrt(dim)."""
    x = torch.randn(rows, dim, dtype=torch.float64)
    return x / x.square().mean(-1, keepdim=True).sqrt()


@cases
def test_levels_are_sorted_and_symmetric(bits: int, dim: int) -> None:
    table = compute_levels(bits, dim)
    assert len(table) == 2**bits
    assert (np.diff(table) > 0).all()
    assert np.array_equal(table, -table[::-1])
    assert abs(table[-1]) < np.sqrt(dim)


@cases
def test_a_boundary_lies_between_its_levels(bits: int, dim: int) -> None:
    table, between = compute_levels(bits, dim), compute_boundaries(bits, dim)
    assert len(between) == len(table) - 1
    assert (table[:-1] < between).all() and (between < table[1:]).all()
    assert between[len(between) // 2] == 0


@cases
def test_each_level_is_the_mean_of_its_cell(bits: int, dim: int) -> None:
    """Integrated on a different grid than the one that determined the levels."""
    t = np.linspace(-min(np.sqrt(dim), 14.0), min(np.sqrt(dim), 14.0), 400_001)
    density = np.maximum(1 - t**2 / dim, 0) ** ((dim - 3) / 2)
    cell = np.searchsorted(compute_boundaries(bits, dim), t)
    mass = np.bincount(cell, density)
    assert np.allclose(np.bincount(cell, density * t) / mass, compute_levels(bits, dim), atol=2e-4)
    spread = density * (t - compute_levels(bits, dim)[cell]) ** 2
    assert compute_mse(bits, dim) == pytest.approx(spread.sum() / density.sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("dim", "published"),
    [
        (64, (0.11453, 0.03339, 0.00913)),
        (128, (0.11600, 0.03397, 0.00931)),
        (256, (0.11674, 0.03426, 0.00941)),
        (100_000, (0.11748, 0.03455, 0.00950)),  # the normal distribution
    ],
)
def test_the_error_is_the_published_one(dim: int, published: tuple[float, ...]) -> None:
    assert [compute_mse(bits, dim) for bits in BITS] == pytest.approx(list(published), abs=1.01e-5)


def test_four_bit_table_beats_equal_probability_levels() -> None:
    """Means of 16 equally likely cells, mistaken for Lloyd-Max elsewhere, have 2.1 times the
    error.
    """
    normal = NormalDist()
    edges = [normal.inv_cdf(i / 16) for i in range(1, 16)]
    density = [0.0, *(normal.pdf(edge) for edge in edges), 0.0]
    theirs = np.array([16 * (a - b) for a, b in pairwise(density)])
    t = np.linspace(-9, 9, 200_001)
    weight = np.exp(-(t**2) / 2)
    weight /= weight.sum()
    error = (weight * (t - theirs[np.searchsorted((theirs[1:] + theirs[:-1]) / 2, t)]) ** 2).sum()
    assert error == pytest.approx(0.0203, abs=1e-4)
    assert compute_mse(4, 100_000) < error / 2.1


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_expected_errors_match_random_directions(bits: int, dim: int) -> None:
    u = random_directions(4_000_000 // dim, dim)
    table = torch.from_numpy(compute_levels(bits, dim).copy())
    c = table[torch.bucketize(u, torch.from_numpy(compute_boundaries(bits, dim)))]
    plain = (u - c).square().mean()
    corrected = 1 - ((u * c).sum(-1) ** 2 / (dim * c.square().sum(-1))).mean()
    assert compute_mse(bits, dim) == pytest.approx(float(plain), rel=0.004)
    assert compute_corrected_mse(bits, dim) == pytest.approx(float(corrected), rel=0.004)
    gain = compute_mse(bits, dim) - compute_corrected_mse(bits, dim)
    assert gain == pytest.approx(float(plain - corrected), rel=0.06)


def test_table_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        compute_levels(4, 64)[0] = 0
