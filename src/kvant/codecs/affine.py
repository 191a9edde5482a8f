"""Uniform codes with a scale and a bias for each group of channels.

value = bias + code * scale; the product is exact in float32, so a fused and a plain multiply-add
agree. Codes are found against the rounded scale and bias: inside a group no value moves by more
than half of the stored scale. Bias is the minimum rounded down, scale is rounded up.

Values beyond +-65504 saturate there. A group with a NaN or an infinity opens as NaN throughout;
no other group is touched. It knows no frame but to name it, and no page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvant.codecs.checks import check_choice, check_dim
from kvant.codecs.float16 import rounded_down, rounded_up, saturated
from kvant.codecs.packing import PLANES, pack, unpack
from kvant.contracts import Field, Fields, Frame
from kvant.frames.identity import Identity

GROUPS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Affine:
    """`bits` a value, and 32 more a group; the last group of a row may be short."""

    bits: int = 8
    group: int = 64
    frame: Frame = field(default_factory=Identity)
    name: ClassVar[str] = "affine"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, PLANES)
        check_choice("group", self.group, GROUPS)

    @property
    def tail(self) -> int:
        return 0 if self.bits >= 6 else 128

    def fields(self, dim: int) -> Mapping[str, Field]:
        check_dim(dim)
        groups = -(-dim // self.group)
        return {
            "codes": Field(torch.uint8, dim * self.bits // 8),
            "scale": Field(torch.float16, groups),
            "bias": Field(torch.float16, groups),
        }

    def seal(self, rows: Tensor) -> Fields:
        check_dim(rows.shape[-1])
        sealed = [self._seal_groups(part) for part in self._grouped(rows.detach())]
        codes, scale, bias = (torch.cat(parts, dim=-1) for parts in zip(*sealed, strict=True))
        return {"codes": pack(codes, self.bits), "scale": scale, "bias": bias}

    def open(self, fields: Fields) -> Tensor:
        rows = unpack(fields["codes"], self.bits).to(torch.float32)
        first = 0
        for part in self._grouped(rows):
            groups = slice(first, first + part.shape[-2])
            part.mul_(fields["scale"][..., groups, None].to(torch.float32))
            part.add_(fields["bias"][..., groups, None].to(torch.float32))
            first = groups.stop
        return rows

    def _grouped(self, x: Tensor) -> list[Tensor]:
        """x as [..., groups, group], and what is left over as one shorter group."""
        full = x.shape[-1] // self.group * self.group
        groups = (*x.shape[:-1], full // self.group, self.group)
        parts = [x[..., :full].reshape(groups)] if full else []
        return parts if full == x.shape[-1] else [*parts, x[..., full:].unsqueeze(-2)]

    def _seal_groups(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [..., groups * group], scale and bias [..., groups]."""
        scale, bias, broken = self._fitted(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True))
        step = scale.to(torch.float32)
        codes = saturated(x).sub_(bias.to(torch.float32)).div_(step.where(step > 0, 1.0))
        codes = codes.round_().clamp_(0, 2**self.bits - 1).masked_fill_(broken, 0)
        scale, bias = (t.masked_fill(broken, torch.nan).squeeze(-1) for t in (scale, bias))
        return codes.to(torch.uint8).flatten(-2), scale, bias

    def _fitted(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The scale and bias that cover [low, high], and which of them cannot be had."""
        broken = ~(low.isfinite() & high.isfinite())
        low, high = (saturated(t).masked_fill(broken, 0) for t in (low, high))
        # Of -0.0 and 0.0 a minimum takes whichever it meets first; adding 0.0 leaves one zero.
        bias = rounded_down(low + 0.0)
        scale = rounded_up((high - bias.to(torch.float32)) / (2**self.bits - 1))
        return scale, bias, broken
