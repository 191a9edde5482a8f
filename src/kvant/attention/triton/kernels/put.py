"""Rows copied to where they stay, all sides together: a change's entries, or a step's token."""

import triton
import triton.language as tl

from kvant.attention.triton.kernels.records import LENGTH, MOST

# What an entry says: the slot, the first row and the number of rows that are written, the open slot
# that they come from (below zero: they came just now), their sequence and their first column.
TO, ROW, COUNT, SOURCE, SEQUENCE, COLUMN = (tl.constexpr(n) for n in range(6))
ENTRY = tl.constexpr(6)


@triton.jit
def put(ways, entries, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """A program takes ROWS rows of one head of an entry."""
    entry = entries + tl.program_id(0).to(tl.int64) // HEADS * ENTRY
    head = tl.program_id(0).to(tl.int64) % HEADS
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    there = n < tl.load(entry + COUNT)
    slot, row = tl.load(entry + TO), tl.load(entry + ROW)
    source, sequence = tl.load(entry + SOURCE), tl.load(entry + SEQUENCE)
    column = tl.load(entry + COLUMN)
    for i in tl.static_range(len(ways)):
        found = begin(ways[i], source, sequence, head, column, n)
        _copy(found, ways[i], slot, head, row + n, there)


@triton.jit
def put_token(ways, place, width, open_at, PAGE: tl.constexpr, HEADS: tl.constexpr):
    """The rows of the newest token of each sequence, where there is room for them."""
    b, head = (tl.program_id(0) // HEADS).to(tl.int64), (tl.program_id(0) % HEADS).to(tl.int64)
    place += b * width
    one = tl.arange(0, 1).to(tl.int64)
    length = tl.load(place + LENGTH + one)
    there = (length > 0) & (length <= tl.load(place + MOST + one))
    position = tl.where(there, length - 1, 0)
    slot = tl.load(place + open_at + position // PAGE)
    for i in tl.static_range(len(ways)):
        found = begin(ways[i], one - 1, b, head, 0, one)
        _copy(found, ways[i], slot, head, position % PAGE, there)


@triton.jit
def begin(way, source, sequence, head, column, n):
    """Where rows of a head begin: those of an open page, or those that came just now."""
    paged = way.open.data + tl.maximum(source, 0) * way.open.first
    paged = paged + head * way.open.head + n * way.open.row
    came = way.own.data + sequence * way.own.first + head * way.own.head
    rows = tl.where(source < 0, came + (column + n) * way.own.row, paged)
    if way.aligned:  # which the compiler does not see behind the choice
        rows = tl.multiple_of(rows, 16)
    return rows


@triton.jit
def _copy(rows, way, slot, head, row, there):
    channel = tl.arange(0, way.wide)[None, :]
    mask = there[:, None] & (channel < way.dim)
    found = tl.load(rows[:, None] + channel, mask=mask)
    to = way.to.data + slot * way.to.first + head * way.to.head + row * way.to.row
    tl.store(to[:, None] + channel, found, mask=mask)
