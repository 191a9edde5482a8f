"""Floats of 8 bits (e4m3) with one scale for each row.

value = float8 * scale; the product is exact in float32. A code is the float8 itself: a sign, four
bits of exponent, three of mantissa; the largest is 448. The scale is what takes the largest value
of the row there, rounded up. No value moves by more than a sixteenth (2^-4) of itself, or than
half of the smallest step (2^-10 of the scale) where that is more.

Codes are the nearest, ties to even; those of NaN (0x7f, 0xff) and the negative zero (0x80) are
never written. Values beyond +-65504 saturate there. A row with a NaN or an infinity opens as NaN
throughout; no other row is touched. It knows no page, and no frame but to name it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvant.codecs.frames.diagonal import Identity
from kvant.codecs.packing import (
    FLOAT16_MAX,
    check_dim,
    round_up,
    saturate,
)
from kvant.contracts import Field, Fields, Form, Frame

FLOAT8_DTYPE = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
NEGATIVE_ZERO_BITS = 0x80


@dataclass(frozen=True)
class Fp8:
    """8 bits a value, and 16 more a row."""

    frame: Frame = field(default_factory=Identity)
    name: ClassVar[str] = "fp8"
    limit: ClassVar[float] = FLOAT16_MAX
    exact: ClassVar[bool] = False
    tail: ClassVar[int] = 0
    form: ClassVar[Form] = Form("float", 8)

    def fields(self, dim: int) -> Mapping[str, Field]:
        check_dim(dim)
        return {"codes": Field(torch.uint8, dim), "scale": Field(torch.float16, 1)}

    def seal(self, rows: Tensor) -> Fields:
        check_dim(rows.shape[-1])
        rows = rows.detach()
        low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
        broken = ~(low.isfinite() & high.isfinite())
        # Of two zeros a maximum takes whichever it meets first; adding 0.0 leaves one zero.
        top = saturate(torch.maximum(high, -low) + 0.0).masked_fill_(broken, 0)
        scale = round_up(top / FLOAT8_MAX)
        step = scale.to(torch.float32)
        # A scale that is rounded up leaves no quotient that rounds beyond 448.
        codes = saturate(rows).div_(step.where(step > 0, 1.0)).to(FLOAT8_DTYPE).view(torch.uint8)
        codes = codes.masked_fill(broken | (codes == NEGATIVE_ZERO_BITS), 0)
        return {"codes": codes, "scale": scale.masked_fill(broken, torch.nan)}

    def open(self, fields: Fields) -> Tensor:
        rows = fields["codes"].view(FLOAT8_DTYPE).to(torch.float32)
        return rows.mul_(fields["scale"].to(torch.float32))
