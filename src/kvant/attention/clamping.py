"""Values beyond what their codec stores: they are counted, and said once a cache.

Looks at rows as they are sealed, in the frame of the codec; rows that stay dense are not concerned.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kvant.contracts import Codec, Tally

log = logging.getLogger("kvant")


def count_clamped(codec: Codec, rows: Tensor, side: str, tally: Tally) -> None:
    """Count in `tally` the finite values of rows to be sealed that are beyond the codec's limit."""
    limit = codec.limit
    if torch.finfo(rows.dtype).max <= limit or rows.numel() == 0:
        return
    if type(rows) is not Tensor:  # in a mode whose tensors have no values
        return
    if rows.device.type != "cpu":  # nobody waits for a device here: who asks for stats does
        tally.clamped = tally.clamped + _beyond(rows, limit).sum()
        return
    # Not `aminmax`, which copies rows that lie apart: scratch that the allocator keeps.
    if -limit <= float(rows.amin()) and float(rows.amax()) <= limit:
        return
    beyond = rows[_beyond(rows, limit)].abs()
    if beyond.numel() == 0:  # infinities and NaN alone, which come back as NaN
        return
    tally.clamped += beyond.numel()
    if "clamped" not in tally.told:
        tally.told.add("clamped")
        log.warning(
            "%s of %g in a format that stores magnitudes up to %g: larger ones are stored as that, "
            "and counted in stats()['clamped']; 'raw' stores them as they are, and 'smooth' or "
            "'rotate' may bring them within reach",
            side,
            float(beyond.max()),
            limit,
        )


def _beyond(rows: Tensor, limit: float) -> Tensor:
    """Which values are finite and beyond; in float32, since a limit need not be a bfloat16."""
    return (rows.to(torch.float32).abs() > limit) & rows.isfinite()
