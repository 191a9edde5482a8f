"""Rows that are put where they stay, and never beyond."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvant.arenas import GROWING, Buffer, Growth, Slab
from kvant.native import library, put

CPU = torch.device("cpu")
native = pytest.mark.skipif(library().functions is None, reason="the native library is not here")


def room(slots: int, batch: int = 2, heads: int = 3) -> tuple[Tensor, Tensor]:
    """Slots in the midst of memory, all of which is 7."""
    memory = torch.full((slots * batch * heads * 4 + 2000,), 7.0)
    return memory, memory[1000:-1000].view(batch, heads, slots, 4)


@native
@pytest.mark.parametrize(("slot", "count"), [(0, 4), (2, 2), (3, 1), (4, 1), (-1, 1), (1 << 60, 1)])
def test_rows_beyond_the_room_are_refused(slot: int, count: int) -> None:
    """Bug: they were written behind it, or over the rows of the next head."""
    memory, to = room(slots=3)
    x = torch.zeros(2, 3, count, 4)
    with pytest.raises(ValueError, match=f"{count} rows at slot {slot} of a room of 3: allocate"):
        put({"keys": x, "values": x}, {"keys": to.clone(), "values": to}, slot)
    assert (memory == 7).all()


@native
@pytest.mark.parametrize("shape", [(3, 3, 1, 4), (2, 4, 1, 4), (2, 3, 1, 2), (2, 3, 1, 8)])
def test_rows_of_another_shape_are_left_to_torch(shape: tuple[int, ...]) -> None:
    """Bug: more sequences or heads than the room has were written behind it."""
    memory, to = room(slots=3)
    assert not put({"keys": torch.zeros(shape)}, {"keys": to}, 0)
    assert (memory == 7).all()


@native
def test_rows_are_put_where_they_stay() -> None:
    memory, to = room(slots=3)
    x = torch.arange(2.0 * 2 * 3 * 4).view(2, 2, 3, 4).transpose(1, 2)
    assert put({"keys": x}, {"keys": to}, 1)
    assert torch.equal(to[:, :, 1:], x)
    to[:, :, 1:] = 7
    assert (memory == 7).all()


@pytest.mark.parametrize("count", [10, 40])
def test_a_buffer_takes_no_more_rows_than_it_has_slots(count: int) -> None:
    """Bug: 10 rows in a buffer of 3 were written behind it."""
    buffer = Buffer({"keys": Slab((1, 8, GROWING, 64), torch.float32)}, Growth(1, at_once=3), CPU)
    buffer.allocate(0, 0, 3)
    for first in (0, -2):
        with pytest.raises(ValueError, match=f"{count} rows at slot {first} of a room of 3"):
            buffer.write(first, {"keys": torch.zeros(1, 8, count, 64)})
