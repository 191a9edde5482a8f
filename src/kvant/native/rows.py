"""A token's rows, keys and values together, copied to where they stay in one call."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from kvant.native.library import library

RECORD = struct.Struct("@20q")  # kvant_put_request
NO_SIDE = (0,) * 8
FEW = 16  # rows: a prompt is copied faster by all threads of torch


def put(rows: Mapping[str, Tensor], room: Mapping[str, Tensor], slot: int) -> bool:
    """Copy rows [B, H, n, D] to `slot` of a room [B, H, slots, D]; False where that is torch's."""
    functions = library().functions
    if functions is None or len(rows) > 2 or torch.compiler.is_compiling():
        return False
    sides: list[int] = []
    lead = torch.Size()
    for name, x in rows.items():
        to = room[name]
        lead, size = x.shape[:3], x.element_size()
        (batch, head, row, one), (to_batch, to_head, to_row, _) = x.stride(), to.stride()
        if type(x) is not Tensor or not x.is_cpu or x.dtype != to.dtype or one != 1:
            return False
        if lead[2] > FEW or type(to) is not Tensor:
            return False
        sides += (x.data_ptr(), batch * size, head * size, row * size)
        sides += (to.data_ptr() + slot * to_row * size, to_batch * size, to_head * size)
        sides.append(to_row * size)
    functions.kvant_put(RECORD.pack(len(rows), *lead, *sides, *NO_SIDE * (2 - len(rows))))
    return True
