"""The affine codec: uniform codes with a scale and a bias for each group of channels.

value = bias + code * scale. The product is exact in float32, so fused and plain multiply-adds
agree. Sealing has two steps:

1. Choose a scale and a bias that cover the group: the bias is the minimum rounded down, the scale
   is rounded up. Every value is within half a scale of its code.
2. If `corrected`, fit the scale and the bias to these codes by least squares, and round them. If
   the squared error is smaller, store this pair, and encode the values again with it.

Bounds, up to float32 rounding: the correction never increases a group's squared error. Without it,
no value moves by more than half of the covering scale; with it, sqrt(n) / 2 in a group of n values.
Values on a grid of float16 scale and bias decode exactly if both ends of the grid occur. So
decoded rows are sealed to the same values again if their codes include both ends.

Values beyond +-65504 saturate. A group with a NaN or an infinity decodes to NaN; other groups are
unaffected. Sums over a group are exact, or float64 in one fixed order, so the bytes of a group do
not depend on other groups or rows. The codec stores its frame but does not apply it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvant.codecs.frames.diagonal import Identity
from kvant.codecs.packing import (
    BIT_PLANES,
    FLOAT16_MAX,
    check_choice,
    check_dim,
    pack_codes,
    round_down,
    round_up,
    saturate,
    tree_sum,
    unpack_codes,
)
from kvant.contracts import Field, Fields, Form, Frame

GROUP_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Affine:
    """`bits` per value, and 32 more per group; the last group of a row may be shorter."""

    bits: int = 8
    group: int = 64
    frame: Frame = field(default_factory=Identity)
    corrected: bool = True
    name: ClassVar[str] = "affine"
    limit: ClassVar[float] = FLOAT16_MAX
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, BIT_PLANES)
        check_choice("group", self.group, GROUP_SIZES)

    @property
    def tail(self) -> int:
        return 0 if self.bits >= 6 else 128

    @property
    def form(self) -> Form:
        return Form("affine", self.bits, self.group, self.corrected)

    def fields(self, dim: int) -> Mapping[str, Field]:
        check_dim(dim)
        groups = -(-dim // self.group)
        return {
            "codes": Field(torch.uint8, dim * self.bits // 8),
            "scale": Field(torch.float16, groups),
            "bias": Field(torch.float16, groups),
        }

    def seal(self, rows: Tensor, *, num_fits: int = 1) -> Fields:
        """Seal rows; each further fit of scales to codes reduces the error, by less each time."""
        check_dim(rows.shape[-1])
        parts = self._split_groups(rows.detach())
        sealed = [self._seal_groups(part, num_fits) for part in parts]
        codes, scale, bias = (torch.cat(parts, dim=-1) for parts in zip(*sealed, strict=True))
        return {"codes": pack_codes(codes, self.bits), "scale": scale, "bias": bias}

    def open(self, fields: Fields) -> Tensor:
        rows = unpack_codes(fields["codes"], self.bits).to(torch.float32)
        first = 0
        for part in self._split_groups(rows):
            groups = slice(first, first + part.shape[-2])
            part.mul_(fields["scale"][..., groups, None].to(torch.float32))
            part.add_(fields["bias"][..., groups, None].to(torch.float32))
            first = groups.stop
        return rows

    def _split_groups(self, x: Tensor) -> list[Tensor]:
        """Split x into [..., groups, group], and the remainder into one shorter group."""
        full = x.shape[-1] // self.group * self.group
        groups = (*x.shape[:-1], full // self.group, self.group)
        parts = [x[..., :full].reshape(groups)] if full else []
        return parts if full == x.shape[-1] else [*parts, x[..., full:].unsqueeze(-2)]

    def _seal_groups(self, x: Tensor, num_fits: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes [..., groups * group], and scale and bias [..., groups]."""
        scale, bias, broken = self._compute_covering_scale(
            x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        )
        x = saturate(x)
        codes = self._find_nearest_codes(x, scale, bias)
        for _ in range(num_fits if self.corrected else 0):
            scale, bias = _fit_scale(x, codes, scale, bias)
            codes = self._find_nearest_codes(x, scale, bias)
        codes = codes.masked_fill_(broken, 0)
        scale, bias = (t.masked_fill(broken, torch.nan).squeeze(-1) for t in (scale, bias))
        return codes.to(torch.uint8).flatten(-2), scale, bias

    def _find_nearest_codes(self, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        step = scale.to(torch.float32)
        codes = (x - bias.to(torch.float32)).div_(step.where(step > 0, 1.0))
        return codes.round_().clamp_(0, 2**self.bits - 1)

    def _compute_covering_scale(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scale and bias that cover [low, high], and which ranges are not finite."""
        broken = ~(low.isfinite() & high.isfinite())
        low, high = (saturate(t).masked_fill(broken, 0) for t in (low, high))
        # amin and amax may return -0.0 or 0.0, by order of the values; adding 0.0 gives 0.0.
        bias = round_down(low + 0.0)
        extent = high + 0.0 - bias.to(torch.float32)
        # A GPU multiplies by the reciprocal of a number, but divides by a tensor exactly.
        scale = round_up(extent / torch.full_like(extent, 2**self.bits - 1))
        return scale, bias, broken


def _fit_scale(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least squares scale and bias, or the given pair if its error is no larger.

    Equal codes and broken groups have no fit: its error is NaN, and the given pair is returned.
    """
    n = x.shape[-1]
    x, codes = x.double(), codes.double()
    # Sums of codes are exact in any order, and so are products of a code and a value.
    total = codes.sum(-1, keepdim=True)
    spread = n * codes.square().sum(-1, keepdim=True) - total.square()
    overlap, level = tree_sum(codes.mul_(x)), tree_sum(x)
    slope = (n * overlap - total * level) / spread

    def excess(scale: Tensor, bias: Tensor) -> Tensor:
        """Return n times the squared error in excess of the unrounded fit's."""
        scale, bias = scale.double(), bias.double()
        return (scale - slope).square() * spread + (scale * total + n * bias - level).square()

    fit = _round_to_float16(slope)
    base = _round_to_float16((level - fit.double() * total) / n)
    better = (fit > 0) & (excess(fit, base) < excess(scale, bias))
    return fit.where(better, scale), base.where(better, bias)


def _round_to_float16(x: Tensor) -> Tensor:
    """Round x to float32, clamp it, round it to float16; never a negative zero."""
    return saturate(x).to(torch.float16) + 0.0
