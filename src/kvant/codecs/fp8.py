"""The fp8 codec: floats of 8 bits (e4m3) with one scale for each row.

value = float8 * scale; the product is exact in float32. A code is the float8 itself:

    bit     7      6 5 4 3      2 1 0
          sign  |  exponent  |  mantissa        largest magnitude 448

The scale maps the largest magnitude of the row to 448, rounded up. No value moves by more than a
sixteenth (2^-4) of itself, or half of the smallest step (2^-10 of the scale) if that is larger.

Codes round to nearest, ties to even. NaN (0x7f, 0xff) and negative zero (0x80) are never stored.
Values beyond +-65504 saturate. A row with a NaN or an infinity decodes to NaN; other rows are
unaffected. The codec stores its frame but does not apply it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvant.codecs.frames.diagonal import Identity
from kvant.codecs.packing import FLOAT16_MAX, check_dim, round_up, saturate
from kvant.contracts import Field, Fields, Form, Frame

FLOAT8_DTYPE = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
NEGATIVE_ZERO_BITS = 0x80


@dataclass(frozen=True)
class Fp8:
    """8 bits per value, and 16 more per row."""

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
        # A maximum may return -0.0 or 0.0, by order of the values; adding 0.0 gives 0.0.
        top = saturate(torch.maximum(high, -low) + 0.0).masked_fill_(broken, 0)
        scale = round_up(top / FLOAT8_MAX)
        step = scale.to(torch.float32)
        # The scale is rounded up, so no quotient rounds beyond 448.
        codes = saturate(rows).div_(step.where(step > 0, 1.0)).to(FLOAT8_DTYPE).view(torch.uint8)
        codes = codes.masked_fill(broken | (codes == NEGATIVE_ZERO_BITS), 0)
        return {"codes": codes, "scale": scale.masked_fill(broken, torch.nan)}

    def open(self, fields: Fields) -> Tensor:
        rows = fields["codes"].view(FLOAT8_DTYPE).to(torch.float32)
        return rows.mul_(fields["scale"].to(torch.float32))
