"""Appends in two halves, whose rows somebody else writes: the same as appends."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kvant import CapacityError, attend
from kvant.contracts import View
from kvant.layers import Attention
from layers.tagged import layer, same

SPECS = (
    "raw",
    "raw,window=70,sinks=3",
    "affine8",
    "affine4/turbo3,tail=3",
    "affine8,tail=0",
    "affine8,tail=300",
    "turbo4v2,window=100,sinks=4",
    "affine4,window=40,tail=90",
    "affine8,slack=9,window=80",
    "affine8,start=200",
)


def filled(text: str, count: int = 150) -> Attention:
    """Always the same rows."""
    torch.manual_seed(1)
    state = Attention(layer(text))
    state.append(*rows(count), start=[0, 9])
    return state


def rows(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 2, count, 32), torch.randn(2, 2, count, 48)


def write(view: View, keys: Tensor, values: Tensor) -> None:
    """What a kernel does: the row goes to where the newest one of the view lies."""
    for side, row in ((view.keys, keys), (view.values, values)):
        side.dense[:, :, -1:] = side.codec.frame.rows(row)


def step(state: Attention, keys: Tensor, values: Tensor) -> None:
    """By halves, unless the page of the row itself is sealed with it."""
    view = state.expect()
    if view.paging.due(view.columns) * view.page < view.columns:
        write(view, keys, values)
        state.arrive()
    else:
        state.append(keys, values)


@pytest.mark.parametrize("capacity", ["", ",capacity=600"])
@pytest.mark.parametrize("text", SPECS)
def test_two_halves_are_an_append(text: str, capacity: str) -> None:
    one, other = filled(text + capacity), filled(text + capacity)
    for t in range(300):
        new = rows(1)
        step(one, *new)
        view = other.append(*new)
        if t % 23 == 0 or view.columns % 64 in (0, 1):
            same(one.snapshot(), other.snapshot())
            q = torch.randn(2, 4, 1, 32)
            assert torch.equal(attend(q, one.view()), attend(q, view))
    assert (one.nbytes, one.tally.appends) == (other.nbytes, other.tally.appends)


@pytest.mark.parametrize("text", SPECS)
def test_the_first_half_changes_nothing_that_is_read(text: str) -> None:
    state, draw = filled(text), random.Random(2)
    for _ in range(300):
        before = state.snapshot()
        state.expect()
        same(state.snapshot(), before)
        verb = draw.randrange(4)
        if verb == 0:
            state.rewind(state.reachable(state.length - draw.randrange(3)))
        elif verb == 1:
            state.rollback()
        state.append(*rows(1))


@pytest.mark.parametrize("text", [text for text in SPECS if "tail=0" not in text])
def test_with_a_capacity_memory_stays_where_it_is(text: str) -> None:
    state, lies = filled(text + ",capacity=600"), set()
    for _ in range(400):
        new = rows(1)
        view = state.expect()
        sealed = [*view.keys.sealed.values(), *view.values.sealed.values()]
        lies.add(tuple(x.data_ptr() for x in (view.keys.room, view.values.room, *sealed)))
        write(view, *new)
        state.arrive()
    assert len(lies) <= 2  # a long prompt may have taken more than steady use does


def test_more_than_the_capacity_is_refused() -> None:
    state = filled("raw,capacity=151")
    write(state.expect(), *rows(1))
    state.arrive()
    before = state.snapshot()
    with pytest.raises(CapacityError, match="152 tokens for a capacity of 151"):
        state.expect()
    same(state.snapshot(), before)


def test_an_empty_layer_expects_nothing() -> None:
    with pytest.raises(ValueError, match="append first"):
        Attention(layer("raw")).expect()
