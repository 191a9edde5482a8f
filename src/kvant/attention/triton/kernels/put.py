"""The rows of one token, keys and values together, copied to where they stay."""

import triton
import triton.language as tl

from kvant.attention.triton.kernels.records import COLUMNS, FIRST_COLUMN, MOST


@triton.jit
def put(
    keys,
    values,
    new_keys,
    new_values,
    place,  # of a `Step`
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_WIDE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDE: tl.constexpr,
):
    b, head = (tl.program_id(0) // HEADS).to(tl.int64), (tl.program_id(0) % HEADS).to(tl.int64)
    columns = tl.load(place + COLUMNS)
    slot = columns - 1 - tl.load(place + FIRST_COLUMN)
    if (columns <= tl.load(place + MOST)) & (slot >= 0):  # where there is room
        _copy(keys, new_keys, b, head, slot, KEY_DIM, KEY_WIDE)
        _copy(values, new_values, b, head, slot, VALUE_DIM, VALUE_WIDE)


@triton.jit
def _copy(room, new, b, head, slot, DIM: tl.constexpr, WIDE: tl.constexpr):
    channel = tl.arange(0, WIDE)
    there = channel < DIM
    row = tl.load(new.data + b * new.batch + head * new.head + channel, mask=there)
    place = b * room.batch + head * room.head + slot * room.row
    tl.store(room.data + place + channel, row, mask=there)
