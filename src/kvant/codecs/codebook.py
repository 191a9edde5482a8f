"""The codebook codec: codes index fixed, non-uniform levels, with one scale for each row.

A coordinate of a uniformly random direction in d dimensions, scaled to unit variance, has the
density (1 - t^2/d)^((d-3)/2) on [-sqrt(d), sqrt(d)]. Lloyd's iteration, run to convergence in
float64, finds the levels with the least mean squared error: each level is the mean of its cell,
each boundary the midpoint of two levels. The density is log-concave, so the codebook is unique.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvant.codecs.frames.hadamard import Rotation
from kvant.codecs.packing import (
    FLOAT16_MAX,
    check_choice,
    check_dim,
    find_finite_rows,
    pack_codes,
    saturate,
    tree_sum,
    unpack_codes,
)
from kvant.contracts import Field, Fields, Form, Frame

Floats = NDArray[np.float64]

QUADRATURE_NODES, QUADRATURE_WEIGHTS = np.polynomial.legendre.leggauss(96)
DENSITY_CUTOFF = 12.0  # the density beyond is below exp(-72) of its peak
LLOYD_TOLERANCE = 1e-13


@lru_cache(maxsize=64)
def compute_levels(bits: int, dim: int) -> Floats:
    """Return the 2**bits levels, ascending and symmetric, as a read-only array."""
    half = np.linspace(0.1, 2.0, 2 ** (bits - 1))
    while True:
        t, weight = compute_quadrature(half, dim)
        better = (weight * t).sum(axis=1) / weight.sum(axis=1)
        moved = np.abs(better - half).max()
        half = better
        if moved < LLOYD_TOLERANCE:
            break
    levels = np.concatenate((-half[::-1], half))
    levels.flags.writeable = False
    return levels


def compute_boundaries(bits: int, dim: int) -> Floats:
    """Return the midpoints between the levels; the middle one is 0."""
    levels = compute_levels(bits, dim)
    boundaries: Floats = (levels[1:] + levels[:-1]) / 2
    return boundaries


def compute_quadrature(half: Floats, dim: int) -> tuple[Floats, Floats]:
    """Return quadrature points of each positive level's cell, [levels, nodes], and weights."""
    top = min(np.sqrt(dim), DENSITY_CUTOFF)
    edges = np.concatenate(([0.0], (half[1:] + half[:-1]) / 2, [top]))
    radius = np.diff(edges)[:, None] / 2
    t: Floats = edges[:-1, None] + radius * (1 + QUADRATURE_NODES)
    weight: Floats = radius * QUADRATURE_WEIGHTS * (1 - t**2 / dim) ** ((dim - 3) / 2)
    return t, weight


BIT_WIDTHS = (2, 3, 4)
MAX_ROWS_PER_SEAL = 4096  # bounds the scratch, so that it fits in the CPU's cache


@dataclass(frozen=True)
class Codebook:
    """`bits` per value, and 16 more per row."""

    bits: int = 4
    corrected: bool = True
    frame: Frame = field(default_factory=Rotation)
    name: ClassVar[str] = "codebook"
    limit: ClassVar[float] = FLOAT16_MAX
    exact: ClassVar[bool] = False
    tail: ClassVar[int] = 128

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, BIT_WIDTHS)

    @property
    def form(self) -> Form:
        return Form("codebook", self.bits, corrected=self.corrected)

    def fields(self, dim: int) -> Mapping[str, Field]:
        check_dim(dim)
        return {
            "codes": Field(torch.uint8, dim * self.bits // 8),
            "scale": Field(torch.float16, 1),
        }

    def seal(self, rows: Tensor) -> Fields:
        *lead, dim = rows.shape
        check_dim(dim)
        parts = torch.split(rows.detach().reshape(-1, dim), MAX_ROWS_PER_SEAL)
        sealed = zip(*(self._seal_rows(part) for part in parts), strict=True)
        codes, scale = (torch.cat(part) for part in sealed)
        return {"codes": codes.view(*lead, codes.shape[1]), "scale": scale.view(*lead, 1)}

    def open(self, fields: Fields) -> Tensor:
        codes = unpack_codes(fields["codes"], self.bits)
        return self._look_up_levels(codes, torch.float32).mul_(fields["scale"].to(torch.float32))

    def _seal_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        broken = ~find_finite_rows(rows)
        y = saturate(rows)
        scale = (tree_sum(y.double().mul_(y)) / y.shape[-1]).sqrt()
        codes = self._find_nearest_codes(y, scale.to(torch.float32)).masked_fill_(broken, 0)
        if self.corrected:
            scale = self._fit_scale(y, codes)
        scale = scale.to(torch.float32).clamp(max=FLOAT16_MAX).masked_fill(broken, torch.nan)
        return pack_codes(codes, self.bits), scale.to(torch.float16)

    def _find_nearest_codes(self, y: Tensor, rms: Tensor) -> Tensor:
        unit = y / rms.where(rms > 0, 1.0)
        codes = torch.zeros(y.shape, dtype=torch.uint8, device=y.device)
        # With this few boundaries, counting is twice as fast as a binary search.
        for boundary in compute_boundaries(self.bits, y.shape[-1]).astype(np.float32).tolist():
            codes.add_(unit >= boundary)
        return codes

    def _fit_scale(self, y: Tensor, codes: Tensor) -> Tensor:
        """Return the least squares scale, <y, c> / <c, c>."""
        overlap = tree_sum(self._look_up_levels(codes, torch.float64).mul_(y))
        # Adding 0.0 makes a negative zero positive.
        return (overlap + 0.0) / tree_sum(self._look_up_levels(codes, torch.float64).square_())

    def _look_up_levels(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        table = _make_level_table(self.bits, codes.shape[-1], dtype, codes.device)
        return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


@lru_cache(maxsize=64)
def _make_level_table(bits: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the levels rounded to float32, then converted to `dtype`."""
    return torch.tensor(compute_levels(bits, dim).astype(np.float32), dtype=dtype, device=device)
