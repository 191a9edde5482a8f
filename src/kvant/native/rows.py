"""A token's rows, keys and values together, copied to where they stay in one call."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from kvant.native.library import behind, done, library

RECORD = struct.Struct("@27q")  # kvant_put_request
NO_SIDE = (0,) * 11
FEW = 16  # rows: a prompt is copied faster by all threads of torch


def put(rows: Mapping[str, Tensor], room: Mapping[str, Tensor], slot: int) -> bool:
    """Copy rows [B, H, n, D] to `slot` of a room [B, H, slots, D]; False where that is torch's."""
    functions = library().functions
    if functions is None or len(rows) > 2 or torch.compiler.is_compiling():
        return False
    sides: list[int] = []
    batch = heads = count = 0
    for name, x in rows.items():
        to = room[name]
        batch, heads, count, dim = x.shape
        places, each, slots, width = to.shape
        size, (b, h, row, one), (to_b, to_h, to_row, _) = x.element_size(), x.stride(), to.stride()
        if type(x) is not Tensor or not x.is_cpu or x.dtype != to.dtype or one != 1:
            return False
        if count > FEW or type(to) is not Tensor:
            return False
        if (batch, heads, dim) != (places, each, width):
            return False
        sides += (x.data_ptr(), behind(x, size), b * size, h * size, row * size)
        sides += (to.data_ptr(), to.nbytes, to_b * size, to_h * size, slots, to_row * size)
    sides += NO_SIDE * (2 - len(rows))
    refusal = functions.kvant_put(RECORD.pack(len(rows), batch, heads, slot, count, *sides))
    if refusal is not None:
        for name in rows:
            check_room(slot, count, room[name].shape[2])
    done(refusal)
    return True


def check_room(slot: int, count: int, slots: int) -> None:
    """Nothing is written where there are no slots."""
    if not 0 <= slot <= slots - count:
        raise ValueError(f"{count} rows at slot {slot} of a room of {slots}: allocate it first")
